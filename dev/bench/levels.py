#!/usr/bin/env python3
"""What each recompute level costs: a model is trained for a few steps at every level, in turn, several rounds over.

    dev/bench/levels.py --model d12 --batch 4 --seq-len 1024 [--levels none,gelu,...] [--rounds 2] [-- --adam-m 8bit]

Prints a Markdown table: MiB of activations and of everything as planned, the median time of a step, tokens/s, and the
time as a multiple of the first level's. The tokens are random; each run's first step, which is slower, does not count.
What follows -- goes to ./train as it is.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEVELS = "none,gelu,norm,ffn,attention,block"


def write_tokens(path, count):
    """A shard of random tokens of GPT-2's vocabulary."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, count
    tokens = np.random.default_rng(1).integers(0, 50257, count).astype(np.uint16)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def step_times(command, log):
    """The milliseconds of each step but the first."""
    result = subprocess.run([*command, "--log", str(log)], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"levels.py: {' '.join(command)}: {result.stderr.strip()}")
    times = [line["ms"] for line in map(json.loads, log.read_text().splitlines()) if "ms" in line]
    return times[1:]


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", default=str(ROOT / "train"))
    parser.add_argument("--model", default="d12")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--levels", default=LEVELS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("more", nargs="*", help="options for ./train, after --")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps: at least 2, of which the first does not count")
    return options


def main(arguments=None):
    o = parse(arguments)
    levels = o.levels.split(",")
    times = {level: [] for level in levels}
    plans = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write_tokens(folder / "tokens.bin", (o.steps * o.batch + 1) * o.seq_len + 1)
        shape = ["--model", o.model, "--batch", str(o.batch), "--seq-len", str(o.seq_len), "--sample-tokens", "0",
                 *o.more]
        for level in levels:
            plan = subprocess.run([o.train, *shape, "--recompute", level, "--plan", "--json"], capture_output=True,
                                  text=True)
            if plan.returncode:
                sys.exit(f"levels.py: {plan.stderr.strip()}")
            plans[level] = json.loads(plan.stdout)
        run = [o.train, *shape, "--data", str(folder / "tokens.bin"), "--steps", str(o.steps)]
        for _ in range(o.rounds):
            for level in levels:
                times[level] += step_times([*run, "--recompute", level], folder / "log")
    first = statistics.median(times[levels[0]])
    print(f"{o.model}, {plans[levels[0]]['precision']}, batch {o.batch}, seq-len {o.seq_len}, median of "
          f"{len(times[levels[0]])} steps\n")
    print("| `--recompute` | activations, MiB | in all, MiB | ms a step | tokens/s | time |\n|---|---|---|---|---|---|")
    for level in levels:
        totals, ms = plans[level]["totals"], statistics.median(times[level])
        print(f"| `{level}` | {totals['activations'] / 2**20:.0f} | {totals['total'] / 2**20:.0f} | {ms:.0f} | "
              f"{o.batch * o.seq_len / ms * 1000:.0f} | {ms / first:.3f}x |", flush=True)


if __name__ == "__main__":
    main()
