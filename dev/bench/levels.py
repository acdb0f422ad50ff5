#!/usr/bin/env python3
"""Measures what each recompute level costs: `./train --bench` at every level, in turn, for several rounds.

    dev/bench/levels.py --model d12 --batch 4 --seq-len 1024 [--levels none,gelu,...] [--rounds 2] [-- --state-formats m=8bit]

Prints a Markdown table: MiB of activations and of everything as planned, the median over the rounds of a
step's median time, tokens/s, and the time as a multiple of the first level's. Arguments after -- are passed
to ./train.
"""

import pathlib
import statistics
import tempfile

import results
from results import MIB, PeerFailed, fail, positive, write_tokens

LEVELS = "none,gelu,norm,ffn,attention,block"


def parse(arguments):
    parser = results.OptionParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", default=str(results.ROOT / "train"))
    parser.add_argument("--model", default="d12")
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--seq-len", type=positive, default=1024)
    parser.add_argument("--levels", default=LEVELS)
    parser.add_argument("--steps", type=positive, default=2, help="that count")
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("more", nargs="*", help="options for ./train, after --")
    return parser.parse_args(arguments)


def measure(o, levels):
    """By level: the plan's totals, and the milliseconds of a step in each round."""
    shape = [o.train, "--model", o.model, "--batch", o.batch, "--seq-len", o.seq_len, *o.more]
    with tempfile.TemporaryDirectory() as folder:
        data = []
        if not pathlib.Path(o.model).exists():  # a bench of a new model has GPT-2's tokens
            data = ["--data", pathlib.Path(folder) / "tokens.bin"]
            write_tokens(data[1], 2 * o.batch * o.seq_len)
        planned = [*shape, *data, "--sample", "tokens=0", "--plan", "json"]
        plans = {level: results.json_of([*planned, "--recompute", level]) for level in levels}
    times = {level: [] for level in levels}
    for _ in range(o.rounds):
        for level in levels:
            bench = results.json_of([*shape, "--bench", "json", "--warmup", "1", "--steps", o.steps, "--recompute", level])
            times[level].append(bench["step_ms"]["median"])
    return plans, times


def main(arguments=None):
    o = parse(arguments)
    levels = o.levels.split(",")
    try:
        plans, times = measure(o, levels)
    except PeerFailed as failed:
        fail(failed)
    first = statistics.median(times[levels[0]])
    print(f"{o.model}, {plans[levels[0]]['precision']}, batch {o.batch}, seq-len {o.seq_len}, {o.rounds} rounds of "
          f"{o.steps} steps\n")
    print("| `--recompute` | activations, MiB | in all, MiB | ms a step | tokens/s | time |\n|---|---|---|---|---|---|")
    for level in levels:
        totals, ms = plans[level]["totals"], statistics.median(times[level])
        print(f"| `{level}` | {totals['activations'] / MIB:.0f} | {totals['total'] / MIB:.0f} | {ms:.0f} | "
              f"{o.batch * o.seq_len / ms * 1000:.0f} | {ms / first:.3f}x |")


if __name__ == "__main__":
    main()
