#!/usr/bin/env python3
"""Exports a model as GGUF in every type, and prints a table: size, time, and the validation loss of the file, which the trainer
reads again. Makes the table of dev/results/exports.md.

Where PyPI's xllamacpp is installed, which brings llama.cpp, it also generates from each file and counts how many tokens of a
greedy continuation are those of the trainer.

    dev/export_table.py --train build/cpu-fp32/train --model data/smollm2
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time

TYPES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q4_k_m", "q4_0")
PROMPT = "The capital of France is"
TOKENS = 32


def run(train, *arguments):
    result = subprocess.run([train, *map(str, arguments)], capture_output=True, text=True)
    if result.returncode != 0:
        print(f"export_table.py: {result.stderr.strip()}", file=sys.stderr)
        sys.exit(2)
    return result.stdout


def loss_of(options, model):
    said = run(options.train, "--model", model, "--val-data", options.val_data, "--steps", 0, "--seq-len", 256, "--batch", 2,
               "--eval-batches", options.eval_batches)
    return float(re.search(r"validation loss ([\d.]+)", said)[1])


def text_of(options, model):
    """A greedy continuation."""
    said = run(options.train, "--model", model, "--steps", 0, "--prompt", PROMPT, "--raw-prompt",
               "--sample", f"tokens={TOKENS},temperature=0")
    return said.removesuffix("\n")


def text_of_llama_cpp(path):
    """The same by llama.cpp; None without it."""
    try:
        import xllamacpp
    except ImportError:
        return None
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.n_gpu_layers = path, 256, False, 0
    answer = xllamacpp.Server(params).handle_completions(
        {"prompt": PROMPT, "n_predict": TOKENS, "temperature": 0, "top_k": 1})
    return PROMPT + (json.loads(answer) if isinstance(answer, str) else answer)["choices"][0]["text"]


def row(options, folder, name, loss):
    path = os.path.join(folder, f"{name}.gguf")
    start = time.monotonic()
    run(options.train, "--model", options.model, "--steps", 0, "--export", f"{path},type={name}")
    seconds, size = time.monotonic() - start, os.path.getsize(path)
    after, theirs = loss_of(options, path), text_of_llama_cpp(path)
    same = {None: "not run", text_of(options, path): "the same text"}.get(theirs, "another text")
    os.remove(path)
    return f"| `{name}` | {size / 2**20:.1f} | {seconds:.1f} | {after:.4f} | {after - loss:+.4f} | {same} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--train", default="build/cpu-fp32/train", help="the trainer")
    parser.add_argument("--model", default="data/smollm2", help="folder of the model")
    parser.add_argument("--val-data", default="dev/data/tinyshakespeare.txt", help="text of the validation")
    parser.add_argument("--eval-batches", type=int, default=4, help="size of the validation: 512 tokens each")
    options = parser.parse_args()
    loss = loss_of(options, options.model)
    print(f"| type | MiB | seconds | loss of the file | change | {TOKENS} greedy tokens in llama.cpp |\n|---|---:|---:|---:|---:|---|")
    print(f"| the folder | | | {loss:.4f} | | |")
    with tempfile.TemporaryDirectory() as folder:
        for name in TYPES:
            print(row(options, folder, name, loss), flush=True)


if __name__ == "__main__":
    main()
