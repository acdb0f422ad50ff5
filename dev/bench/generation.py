#!/usr/bin/env python3
"""Compares the speed of generating one sequence, in tokens per second. The peers, which take turns, are
./train and transformers' generate() with its cache. The rate at which memory is copied is measured too: a
token reads every weight once, so that rate is the limit.

    dev/bench/generation.py --model d12 --precision bf16 [--tokens 256] [--rounds 3]

With --prompts N it compares ./train with itself instead: it answers a file of N prompts one by one, then all at a time, in turn.
The model may be a GGUF file too; its prompts are texts.

    dev/bench/generation.py --model data/smollm2 --precision bf16 --prompts 8 --tokens 100

Greedy, from a prompt of one token. The time is measured from the second token to the last. The trainer gets
the model with a tokenizer that spells token i as "t<i> ", so that its output shows when each token was made.
Prints a table.
"""

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import results
from results import ENVIRONMENT, PeerFailed, fail, positive

FOLDER = pathlib.Path(__file__).resolve().parent
PROMPT = "t0 "  # token 0
BYTES = {"fp32": 4, "bf16": 2}


def parse(arguments):
    parser = results.OptionParser(description=__doc__.split(".")[0])
    add = parser.add_argument
    add("--model", default="d12", help="dN, with random weights, or a Hugging Face folder; with --prompts also a GGUF file")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="of the weights, in both")
    add("--tokens", type=positive, default=256)
    add("--prompts", type=positive, help="compare answering this many prompts one by one with answering them all at a time")
    add("--threads", type=positive, default=results.cores())
    add("--rounds", type=positive, default=3)
    add("--train", help="the trainer's binary (default: that of the precision in build/)")
    add("--timeout", type=positive, default=3600, help="seconds that a turn may take")
    options = parser.parse_args(arguments)
    options.train = options.train or str(results.ROOT / f"build/cpu-{options.precision}/train")
    if not os.path.exists(options.train):
        fail(f"--train {results.shown([options.train])}: no such file; make DEVICE=cpu PRECISION={options.precision}")
    if options.tokens < 3:
        fail("--tokens: at least 3, as the time from the second to the last counts")
    if options.prompts and options.prompts < 2:
        fail("--prompts: at least 2")
    return options


def read_model(folder):
    """The model's vocabulary, and how many weights a token reads: all but embeddings that are not the
    head."""
    sizes = {}
    try:
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        for path in sorted(folder.glob("*.safetensors")):
            with open(path, "rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            sizes |= {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, KeyError, ValueError, struct.error) as error:
        fail(f"--model {folder}: {error!r}")
    if not sizes:
        fail(f"--model {folder}: has no .safetensors")
    unread = ["wpe.weight"]
    if any(name.endswith("lm_head.weight") for name in sizes):
        unread += ["embed_tokens.weight", "wte.weight", "word_embeddings.weight"]
    return vocabulary, sum(n for name, n in sizes.items() if not name.endswith(tuple(unread)))


def prompt_texts(count):
    """Prompts of one token each: the first tokens of the vocabulary."""
    return [f"t{i} " for i in range(count)]


def write_tokenizer(path, vocabulary, prompts=1):
    """Writes a tokenizer that spells every token as its number. It reads the texts of `prompts` prompts."""
    texts = prompt_texts(min(prompts, vocabulary))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": byte_level,
        "added_tokens": [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": False} for i, text in enumerate(texts)],
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {texts[i] if i < len(texts) else f"t{i}Ġ": i for i in range(vocabulary)}, "merges": []}}))


@contextlib.contextmanager
def spelled(folder, vocabulary, prompts=1):
    """A view of the folder's model with such a tokenizer, and without tokens that end a text."""
    with tempfile.TemporaryDirectory() as temporary:
        view = pathlib.Path(temporary)
        for path in [folder / "config.json", *folder.glob("*.safetensors*")]:
            (view / path.name).symlink_to(path.resolve())
        (view / "generation_config.json").write_text('{"do_sample": false}')
        write_tokenizer(view / "tokenizer.json", vocabulary, prompts)
        yield view


def rate_of(moments):
    """Tokens per second. The tokens of a tiny model may all arrive at once."""
    return (len(moments) - 2) / max(moments[-1] - moments[1], 1e-6)


def words_as_they_come(command):
    """The words that a command prints, and the time at which each ended."""
    moments, text = [], b""
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, bufsize=0,
                                       env={**os.environ, **ENVIRONMENT})
        except OSError as error:
            raise PeerFailed(f"{results.shown(command[:1])}: {error.strerror}") from None
        while piece := process.stdout.read(1 << 16):
            text += piece
            moments += [time.perf_counter()] * (text.count(b" ") - len(moments))
        process.stdout.close()
        if process.wait():
            errors.seek(0)
            raise PeerFailed((errors.read().decode(errors="replace").strip().splitlines() or ["the trainer failed"])[-1])
    return text.decode(errors="replace").split(), moments


def train_turn(options, view):
    """The trainer's tokens, and how many it made per second."""
    command = [options.train, "--model", view, "--steps", 0, "--prompt", PROMPT, "--sample", f"tokens={options.tokens},temperature=0", "--threads", options.threads]
    words, moments = words_as_they_come([str(word) for word in command])
    tokens = [int(word[1:]) for word in words[1:] if re.fullmatch(r"t\d+", word)]
    if len(tokens) != options.tokens:
        raise PeerFailed(f"{results.shown(command)}: made {len(tokens)} tokens, not {options.tokens}")
    return tokens, rate_of(moments[1:])


def transformers_turn(options, folder):
    command = [sys.executable, FOLDER / "torch_generation.py", "--model", folder, "--weights", options.precision, "--tokens",
               options.tokens, "--threads", options.threads]
    output, _ = results.run(command, {**ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads)}, options.timeout)
    raw = results.last_json(output, command)
    return raw["tokens"], rate_of(raw["moments"])


def copy_rate(options):
    """The bytes per second that a large copy reads and writes, as measured by ./train --bench."""
    command = [options.train, "--bench", "forward,json", "--model", "d1", "--batch", 1, "--seq-len", 8, "--warmup", "0",
               "--steps", "1", "--threads", options.threads]
    return results.json_of(command, options.timeout)["copy_peak"]


def model_folder(options):
    """--model as a folder; a new model is written once."""
    if pathlib.Path(options.model).is_dir():
        return pathlib.Path(options.model)
    folder = results.ROOT / "build" / "bench" / f"{options.model}-{options.precision}"
    if not (folder / "config.json").exists():
        results.run([options.train, "--model", options.model, "--steps", 0, "--out", folder], ENVIRONMENT, options.timeout)
    return folder


def measure(options, folder, vocabulary):
    """{what: rates of the rounds}, and the tokens of each peer."""
    rates, tokens = {}, {}
    with_transformers = importlib.util.find_spec("transformers")
    with spelled(folder, vocabulary) as view:
        for _ in range(options.rounds):
            rates.setdefault("copy", []).append(copy_rate(options))
            turns = {"train": lambda: train_turn(options, view)}
            if with_transformers:
                turns["transformers"] = lambda: transformers_turn(options, folder)
            for name, turn in turns.items():
                made, rate = turn()
                rates.setdefault(name, []).append(rate)
                if tokens.setdefault(name, made) != made:
                    raise PeerFailed(f"{name}: other tokens than the round before")
    return rates, tokens


def table(options, rates, tokens, weight_bytes):
    rows = [["a copy", "", f"{statistics.median(rates['copy']) / 1e9:.1f}", "", ""]]
    for name in tokens:
        # Drift affects both.
        shares = [weight_bytes * rate / copy for rate, copy in zip(rates[name], rates["copy"])]
        ratios = [ours / rate for ours, rate in zip(rates["train"], rates[name])]
        rate = statistics.median(rates[name])
        rows.append([name, f"{rate:.1f}", f"{weight_bytes * rate / 1e9:.1f}", f"{100 * statistics.median(shares):.0f}%",
                     f"{statistics.median(ratios):.2f}"])
    return results.markdown(["", "tokens/s", "GB/s", "of the copy", "train is faster by"], rows)


def same_until(a, b):
    """How many tokens agree, from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# ---- several prompts at a time


@contextlib.contextmanager
def asked(options):
    """The model to ask and a file of --prompts, as options of the trainer. A folder's model gets the tokenizer without an end of
    texts, so that all answers have --tokens tokens. A GGUF file has its own, and answers texts."""
    with contextlib.ExitStack() as stack:
        path = pathlib.Path(options.model)
        texts = prompt_texts(options.prompts)
        if path.suffix == ".gguf":
            texts = [f"Write a long story about the {('sea', 'woods', 'sun', 'moon', 'king', 'wind', 'snow', 'city')[i % 8]}, in {i + 2} parts."
                     for i in range(options.prompts)]
        else:
            folder = model_folder(options)
            vocabulary, _ = read_model(folder)
            if vocabulary < options.prompts:
                fail(f"--prompts {options.prompts}: the model has {vocabulary} tokens to begin with")
            path = stack.enter_context(spelled(folder, vocabulary, options.prompts))
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".jsonl"))
        file.writelines(json.dumps({"prompt": text}) + "\n" for text in texts)
        file.flush()
        yield ["--model", path, "--prompts", file.name, *(["--raw-prompt"] if path.suffix != ".gguf" else [])]


def answers_turn(options, asks, at_a_time):
    """What the trainer answers, how many tokens that are, and how many it made per second."""
    command = [str(word) for word in (options.train, *asks, "--batch", at_a_time, "--sample", f"tokens={options.tokens},temperature=0",
                                      "--threads", options.threads)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, env={**os.environ, **ENVIRONMENT})
    except OSError as error:
        raise PeerFailed(f"{results.shown(command[:1])}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"{results.shown(command)}: not done after {options.timeout} s") from None
    said = re.search(rf"^{options.prompts} prompts answered: (\d+) tokens, ([\d.]+) tokens/s$", ran.stderr, re.M)
    if ran.returncode:
        raise PeerFailed((ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1])
    if not said:
        raise PeerFailed(f"{results.shown(command[:1])}: did not say how fast it was")
    return ran.stdout, int(said[1]), float(said[2])


def compare_at_a_time(options):
    """One by one and all at a time, in turn. The answers must be the same to the byte."""
    rates, answers = {1: [], options.prompts: []}, None
    with asked(options) as asks:
        for _ in range(options.rounds):
            for at_a_time, found in rates.items():
                said, tokens, rate = answers_turn(options, asks, at_a_time)
                found.append(rate)
                answers = answers or said
                if said != answers:
                    raise PeerFailed(f"{at_a_time} at a time: other answers than one by one")
    rows = []
    for at_a_time, found in rates.items():
        ratios = [rate / alone for rate, alone in zip(found, rates[1])]  # drift affects both
        rows.append([f"{at_a_time} at a time" if at_a_time > 1 else "one by one", f"{statistics.median(found):.1f}",
                     f"{min(found):.1f} to {max(found):.1f}", f"{statistics.median(ratios):.2f}"])
    print(f"{options.model}, {options.precision}, {options.prompts} prompts, {tokens} tokens in all, {options.threads} threads, medians of "
          f"{options.rounds} rounds in turn; the same answers; load before: {results.LOAD_BEFORE:.1f}\n")
    print("\n".join(results.markdown(["", "tokens/s", "from the slowest to the fastest", "times one by one"], rows)))


def main(arguments=None):
    options = parse(arguments)
    try:
        if options.prompts:
            compare_at_a_time(options)
            return
        folder = model_folder(options)
        vocabulary, weights = read_model(folder)
        rates, tokens = measure(options, folder, vocabulary)
    except PeerFailed as failed:
        fail(failed)
    weight_bytes = weights * BYTES[options.precision]
    print(f"{options.model}, {options.precision}, {options.tokens} tokens, {options.threads} threads, medians of "
          f"{options.rounds} rounds in turn; {weight_bytes / 1e6:.0f} MB of weights a token; load before: "
          f"{results.LOAD_BEFORE:.1f}\n")
    print("\n".join(table(options, rates, tokens, weight_bytes)))
    if "transformers" in tokens:
        print(f"\nThe first {same_until(tokens['train'], tokens['transformers'])} of {options.tokens} tokens are the same.")


if __name__ == "__main__":
    main()
