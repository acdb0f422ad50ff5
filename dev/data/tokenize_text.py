#!/usr/bin/env python3
"""Tokenizes text into token shards that ./train reads, with GPT-2's vocabulary or another.

A shard has llm.c's .bin format: int32 header[256] = 20240520, 1, count; then uint16 tokens. For vocabularies
of more than 65,536 tokens, such as Llama 3's, the header is 20240801, 7, count, followed by uint32 tokens.
Each document is preceded by the token that begins one. The tokenizer's files are copied next to the shards,
so that the trainer can print samples.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import sys

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHARD_HEADERS = {2: (20240520, 1), 4: (20240801, 7)}  # magic and version, by bytes per token
DOCUMENT_STARTS = "<|endoftext|>", "<|begin_of_text|>", "<s>"  # the first that the vocabulary has is used
TOKENIZER_FILES = "vocab.json", "merges.txt", "tokenizer.json"
HUB_GPT2 = "openai-community/gpt2"


def fail(message):
    """Ends the program for a user's mistake: one line, exit code 2."""
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    sys.exit(2)


def one_line_for_errors(main):
    """Decorates main(): an error of the system, such as a full disk, ends the program like other mistakes."""

    @functools.wraps(main)
    def run(arguments=None):
        try:
            main(arguments)
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}" if error.filename else error)

    return run


class OptionParser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


def replace_file(path, *parts):
    """Writes bytes to another name and renames the file, so that it is never incomplete, and never changes
    under a reader."""
    try:
        with open(path + ".tmp", "wb") as file:
            file.writelines(parts)
        os.replace(path + ".tmp", path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        raise OSError(error.errno, error.strerror, path) from error


def download_from_hub(repository, name, kind="model"):
    """The local path of a file from the Hugging Face hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging
    logging.set_verbosity_error()  # otherwise each of its retries prints two lines
    try:
        return hf_hub_download(repository, name, repo_type=kind)
    except Exception as error:  # the hub's client raises its own errors, its HTTP library's and the system's
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        fail(f"cannot download {name} of {repository}: {reason} (is this machine online?)")


def load_tokenizer(vocab):
    """A folder's tokenizer, or the hub's gpt2, with its files: tokenizer.json, or vocab.json and
    merges.txt."""
    files = [os.path.join(vocab, name) for name in ("vocab.json", "merges.txt")]
    if vocab == "gpt2" and not os.path.isdir(vocab):
        files = [download_from_hub(HUB_GPT2, name) for name in ("vocab.json", "merges.txt")]
    try:
        # The other files do not say how to split text.
        if os.path.exists(whole := os.path.join(vocab, "tokenizer.json")):
            tokenizer, files = Tokenizer.from_file(whole), [whole]
        elif all(map(os.path.exists, files)):
            tokenizer = Tokenizer(models.BPE.from_file(*files))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            fail(f"--vocab {vocab}: no folder with vocab.json and merges.txt or with tokenizer.json")
    except Exception as error:  # tokenizers raises bare Exception for damaged files
        fail(f"--vocab {vocab}: {' '.join(str(error).split())}")
    if document_start(tokenizer) is None:
        fail(f"--vocab {vocab}: the vocabulary has no {' or '.join(DOCUMENT_STARTS)}")
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in the text is plain text
    return tokenizer, files


def document_start(tokenizer):
    return next(filter(lambda token: token is not None, map(tokenizer.token_to_id, DOCUMENT_STARTS)), None)


def save_tokenizer(files, folder):
    """Copies a tokenizer's files into a folder and removes those of another tokenizer."""
    if os.path.samefile(os.path.dirname(files[0]) or ".", folder):
        return
    names = list(map(os.path.basename, files))
    for path, name in zip(files, names):
        with open(path, "rb") as file:
            replace_file(os.path.join(folder, name), file.read())
    for name in set(TOKENIZER_FILES) - set(names):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))


def split_stream(file, separator):
    """The documents between separators. Holds at most one of them and a chunk in memory."""
    rest = ""
    while chunk := file.read(1 << 20):
        *documents, rest = (rest + chunk).split(separator)
        yield from documents
    yield rest


def text_of_line(line, field, place):
    """The text in a field of a JSON object."""
    try:
        text = json.loads(line)[field]
        text.encode()  # fails for values that are not text, and for the unpaired surrogates that JSON allows
        return text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fail(f"{place} is no JSON object with a text in the field {field}")


def read_documents(paths, json_field=None, separator=None):
    """The texts of files ("-" is stdin): one per file, or the JSON field of each line, or the parts between
    separators."""
    for path in paths:
        try:
            with open(0 if path == "-" else path, encoding="utf-8", newline="", closefd=path != "-") as file:
                if json_field:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield text_of_line(line, json_field, f"{path}: line {number}")
                elif separator:
                    yield from (text.strip("\r\n") for text in split_stream(file, separator))
                else:
                    yield file.read()
        except UnicodeDecodeError as error:
            fail(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})")


def encode(documents, tokenizer):
    """The tokens of each document that is not empty, as an array."""
    start = document_start(tokenizer)
    dtype = np.uint16 if max(tokenizer.get_vocab().values()) < 1 << 16 else np.uint32
    documents = (text for text in documents if text)
    while batch := list(itertools.islice(documents, 256)):  # tokenizes in parallel within a batch
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array([start, *encoding.ids], dtype=dtype)


def take(arrays, count):
    """The first `count` tokens of an iterator of arrays, and an iterator over the rest."""
    taken = []
    while count > 0 and (array := next(arrays, None)) is not None:
        taken.append(array[:count])
        if len(array) > count:
            arrays = itertools.chain([array[count:]], arrays)
        count -= len(taken[-1])
    return taken, arrays


def write_shard(path, tokens):
    header = np.zeros(256, dtype="<i4")
    header[:3] = *SHARD_HEADERS[tokens.itemsize], len(tokens)
    replace_file(path, header.tobytes(), tokens.astype(tokens.dtype.newbyteorder("<")).tobytes())
    print(f"{path}: {len(tokens):,} tokens", flush=True)


def write_shards(arrays, prefix, shard_tokens):
    """Writes PREFIX_000000.bin and so on, and removes further ones of an earlier run. Returns the number of
    tokens.

    A last shard of less than a tenth is joined to the one before it: a stream must be longer than a training
    sequence.
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


def write_dataset(documents, vocab, prefix, shard_tokens, val_tokens):
    """Writes the first val_tokens tokens to PREFIX_val_*.bin, the rest to PREFIX_train_*.bin, and the
    tokenizer's files."""
    tokenizer, files = load_tokenizer(vocab)
    folder = os.path.dirname(prefix) or "."
    os.makedirs(folder, exist_ok=True)
    held_out, arrays = take(encode(documents, tokenizer), val_tokens)
    first = next(arrays, None)
    if first is None:
        fail(f"--val-tokens {val_tokens}: the text has only {sum(map(len, held_out))} tokens"
             if held_out else "the text is empty")
    write_shards(held_out, f"{prefix}_val", shard_tokens)
    write_shards(itertools.chain([first], arrays), f"{prefix}_train", shard_tokens)
    save_tokenizer(files, folder)


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


@one_line_for_errors
def main(arguments=None):
    parser = OptionParser(description=__doc__.splitlines()[0],
                          formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("files", nargs="*", default=["-"], help="UTF-8 text files, - for standard input")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="shards are PREFIX_train_000000.bin and on")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--json-field", metavar="NAME", help="files are JSON lines, this field is a document")
    parts.add_argument("--separator", metavar="TEXT", help="splits a file into documents")
    add_shard_options(parser, val_tokens=0)
    options = parser.parse_args(arguments)
    for name, value in (("--json-field", options.json_field), ("--separator", options.separator)):
        if value == "":
            fail(f"{name} is empty")
    write_dataset(read_documents(options.files, options.json_field, options.separator), options.vocab, options.out,
                  options.shard_tokens, options.val_tokens)


if __name__ == "__main__":
    main()
