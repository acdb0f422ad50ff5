#!/usr/bin/env python3
"""Tokenizes text with GPT-2's vocabulary into token shards that ./train reads.

A shard is llm.c's .bin: int32 header[256] = 20240520, 1, count; then uint16 tokens. Each document is preceded by
<|endoftext|>. The vocabulary is put beside the shards, for the trainer to print samples with.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHARD_MAGIC, SHARD_VERSION = 20240520, 1
DOCUMENT_START = "<|endoftext|>"
HUB_GPT2 = "openai-community/gpt2"


def fail(message):
    """Ends the program for a user's mistake: one line, exit code 2."""
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    sys.exit(2)


def download_from_hub(repository, name, kind="model"):
    """The local path of a file of the Hugging Face hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging
    logging.set_verbosity_error()  # or each of its retries prints two lines
    try:
        return hf_hub_download(repository, name, repo_type=kind)
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fail(f"cannot download {name} of {repository}: {reason} (is this machine online?)")


def load_tokenizer(vocab):
    """The tokenizer of a folder with vocab.json and merges.txt or tokenizer.json, or of "gpt2" on the hub."""
    files = [os.path.join(vocab, name) for name in ("vocab.json", "merges.txt")]
    if vocab == "gpt2" and not os.path.isdir(vocab):
        files = [download_from_hub(HUB_GPT2, name) for name in ("vocab.json", "merges.txt")]
    try:
        if all(map(os.path.exists, files)):
            tokenizer = Tokenizer(models.BPE.from_file(*files))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        elif os.path.exists(os.path.join(vocab, "tokenizer.json")):
            tokenizer = Tokenizer.from_file(os.path.join(vocab, "tokenizer.json"))
        else:
            fail(f"--vocab {vocab}: no folder with vocab.json and merges.txt or with tokenizer.json")
    except Exception as error:  # tokenizers raises bare Exception for damaged files
        fail(f"--vocab {vocab}: {error}")
    if tokenizer.token_to_id(DOCUMENT_START) is None:
        fail(f"--vocab {vocab}: the vocabulary has no {DOCUMENT_START}")
    if tokenizer.get_vocab_size() > 1 << 16:
        fail(f"--vocab {vocab}: {tokenizer.get_vocab_size()} tokens do not fit the shards' 16 bits")
    tokenizer.encode_special_tokens = True  # the text's own "<|endoftext|>" is text
    return tokenizer


def save_vocabulary(tokenizer, folder):
    """Writes vocab.json and merges.txt; where they are the tokenizer's own, nothing changes."""
    tokenizer.model.save(folder)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    with open(os.path.join(folder, "vocab.json"), "w", encoding="utf-8") as file:
        json.dump(dict(vocabulary), file)


def split_stream(file, separator):
    """The documents between separators, without holding more than one of them and a chunk."""
    rest = ""
    while chunk := file.read(1 << 20):
        *documents, rest = (rest + chunk).split(separator)
        yield from documents
    yield rest


def read_documents(paths, json_field=None, separator=None):
    """The texts of files ("-" is stdin): each file is one, or each line's JSON field, or what a separator parts."""
    for path in paths:
        try:
            with (contextlib.nullcontext(sys.stdin) if path == "-" else
                  open(path, encoding="utf-8", newline="")) as file:
                if json_field:
                    yield from (json.loads(line)[json_field] for line in file if line.strip())
                elif separator:
                    yield from (text.strip("\r\n") for text in split_stream(file, separator))
                else:
                    yield file.read()
        except UnicodeDecodeError as error:
            fail(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})")
        except (OSError, json.JSONDecodeError) as error:
            fail(f"{path}: {error}")
        except (KeyError, TypeError):
            fail(f"{path}: a line is no JSON object with the field {json_field}")


def encode(documents, tokenizer):
    """Each document that is not empty as an array of tokens."""
    start = tokenizer.token_to_id(DOCUMENT_START)
    documents = (text for text in documents if text)
    while batch := list(itertools.islice(documents, 256)):  # in parallel inside a batch
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array([start, *encoding.ids], dtype=np.uint16)


def take(arrays, count):
    """The first count tokens of an iterator of arrays, and an iterator of the rest."""
    taken = []
    while count > 0 and (array := next(arrays, None)) is not None:
        taken.append(array[:count])
        if len(array) > count:
            arrays = itertools.chain([array[count:]], arrays)
        count -= len(taken[-1])
    return taken, arrays


def write_shard(path, tokens):
    """Writes beside and renames, so that no half shard ever has a shard's name."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    with open(path + ".tmp", "wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())
    os.replace(path + ".tmp", path)
    print(f"{path}: {len(tokens):,} tokens", flush=True)


def write_shards(arrays, prefix, shard_tokens):
    """Writes PREFIX_000000.bin and so on, and removes those of an earlier run beyond. Returns how many tokens.

    A last shard of less than a tenth joins the one before: a stream must be longer than a training sequence.
    """
    arrays, total = iter(arrays), 0
    held, arrays = take(arrays, shard_tokens)
    for index in itertools.count():
        if not held:
            break
        following, arrays = take(arrays, shard_tokens)
        if sum(map(len, following)) < shard_tokens / 10:
            held, following = held + following, []
        tokens = np.concatenate(held)
        write_shard(f"{prefix}_{index:06}.bin", tokens)
        total += len(tokens)
        held = following
    for index in itertools.count(index):
        path = f"{prefix}_{index:06}.bin"
        if not os.path.exists(path):
            return total
        os.remove(path)
        print(f"{path}: removed, from an earlier run")


def write_dataset(documents, tokenizer, prefix, shard_tokens, val_tokens):
    """PREFIX_val_*.bin from the first val_tokens tokens, PREFIX_train_*.bin from the rest, and the vocabulary."""
    folder = os.path.dirname(prefix) or "."
    os.makedirs(folder, exist_ok=True)
    held_out, arrays = take(encode(documents, tokenizer), val_tokens)
    first = next(arrays, None)
    if first is None:
        fail(f"--val-tokens {val_tokens}: the text has only {sum(map(len, held_out))} tokens"
             if held_out else "the text is empty")
    write_shards(held_out, f"{prefix}_val", shard_tokens)
    write_shards(itertools.chain([first], arrays), f"{prefix}_train", shard_tokens)
    save_vocabulary(tokenizer, folder)


def count(minimum):
    """An argparse type: a whole number from the minimum up to what a shard's header can hold."""

    def parse(text):
        value = int(text.replace("_", ""))
        if not minimum <= value <= 10**9:
            raise argparse.ArgumentTypeError(f"{text} must be from {minimum} to 1000000000")
        return value

    parse.__name__ = "number"
    return parse


def add_shard_options(parser, val_tokens):
    parser.add_argument("--vocab", default="gpt2",
                        help="folder with vocab.json and merges.txt or tokenizer.json, or gpt2 from the hub")
    parser.add_argument("--shard-tokens", type=count(1), default=100_000_000, help="tokens in a shard")
    parser.add_argument("--val-tokens", type=count(0), default=val_tokens, help="first tokens, for validation")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("files", nargs="*", default=["-"], help="UTF-8 text files, - for standard input")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="shards are PREFIX_train_000000.bin and on")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--json-field", metavar="NAME", help="files are JSON lines, this field is a document")
    parts.add_argument("--separator", metavar="TEXT", help="splits a file into documents")
    add_shard_options(parser, val_tokens=0)
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(options.vocab)
    write_dataset(read_documents(options.files, options.json_field, options.separator), tokenizer, options.out,
                  options.shard_tokens, options.val_tokens)


if __name__ == "__main__":
    main()
