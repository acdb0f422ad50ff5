#!/usr/bin/env python3
"""Downloads a data set and prepares it for ./train --data.

tinystories  2.2 GB of short stories, tokenized                -> DIR/tinystories_{train,val}_*.bin
fineweb      web pages, 10 billion tokens (30 GB), tokenized   -> DIR/fineweb_{train,val}_*.bin
"""

import argparse
import os

from tokenize_text import (OptionParser, add_shard_options, count, download_from_hub, encode, fail, load_tokenizer,
                           one_line_for_errors, read_documents, save_tokenizer, write_dataset, write_shards)


def tinystories(options):
    tokenizer, files = load_tokenizer(options.vocab)
    for split, name in (("val", "TinyStoriesV2-GPT4-valid.txt"), ("train", "TinyStoriesV2-GPT4-train.txt")):
        path = download_from_hub("roneneldan/TinyStories", name, "dataset")
        stories = read_documents([path], separator="<|endoftext|>")
        write_shards(encode(stories, tokenizer), os.path.join(options.dir, f"tinystories_{split}"),
                     options.shard_tokens)
    save_tokenizer(files, options.dir)


def fineweb_pages(files):
    """The pages of the first files (of 15) of the sample of 10 billion tokens, downloaded one at a time."""
    from pyarrow import parquet
    for index in range(files):
        path = download_from_hub("HuggingFaceFW/fineweb", f"sample/10BT/{index:03}_00000.parquet", "dataset")
        for batch in parquet.ParquetFile(path).iter_batches(columns=["text"]):
            yield from batch.column("text").to_pylist()


def fineweb(options):
    try:
        import pyarrow.parquet  # noqa: F401 - fails here, before gigabytes are downloaded
    except ImportError:
        fail("fineweb is stored as Parquet: .venv/bin/pip install pyarrow")
    write_dataset(fineweb_pages(options.files), options.vocab, os.path.join(options.dir, "fineweb"),
                  options.shard_tokens, options.val_tokens)


@one_line_for_errors
def main(arguments=None):
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("tinystories", "fineweb"))
    parser.add_argument("--dir", default="data", help="folder to write (default: data)")
    parser.add_argument("--files", type=count(1), default=15, help="of fineweb: only so many of its 15 files")
    add_shard_options(parser, val_tokens=10_000_000)
    options = parser.parse_args(arguments)
    os.makedirs(options.dir, exist_ok=True)
    {"tinystories": tinystories, "fineweb": fineweb}[options.name](options)


if __name__ == "__main__":
    main()
