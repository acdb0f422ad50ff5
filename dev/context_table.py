#!/usr/bin/env python3
"""The longest sequences that models can train on in given amounts of memory, as a Markdown table, from the
plans of a build of ./train. Use it to see how long a context fits your card, and to make the first table of
dev/results/context.md anew.

A cell has the longest sequence, in multiples of 64 tokens, for which --memory finds a fitting configuration;
the estimated time of a step; and the host memory or disk space needed besides the budget. A model is a
folder; it needs only a config.json. Arguments after -- are passed to ./train:

    dev/context_table.py ./train --model llama-8b --memory 8GiB 24GiB -- --train lora --lora-rank 32 --base nf4-double
"""

import argparse
import json
import os
import subprocess
import sys

STEP = 64
MOST = 1 << 21  # the limit of ./train


def fail(message):
    print(f"context_table.py: {message}", file=sys.stderr)
    sys.exit(2)


class Planner:
    """Plans of one model in one budget."""

    def __init__(self, train, model, memory, batch, more):
        self.command = [train, "--model", model, "--memory", memory, "--batch", str(batch), "--plan", "json", *more]
        self.refusal = ""

    def plan(self, tokens):
        """A step with sequences of this length: (seconds, bytes outside the device); None if nothing fits."""
        try:
            result = subprocess.run([*self.command, "--seq-len", str(tokens)], capture_output=True, text=True)
        except OSError as error:
            fail(f"{self.command[0]}: {error.strerror}")
        if result.returncode == 0:
            plan = json.loads(result.stdout)
            return plan["estimated_seconds"], sum(plan["outside_device"].values())
        self.refusal = result.stderr.strip()
        ends = "the least that this takes" in self.refusal or "positions" in self.refusal or "tokens in a" in self.refusal
        if result.returncode != 2 or not ends:
            fail(self.refusal.splitlines()[-1] if self.refusal else f"{self.command[0]}: ended with {result.returncode}")
        return None

    def longest(self):
        """(tokens, plan, whether memory is the limit), or None if not even STEP tokens fit."""
        fits, plans, why = 0, {}, ""
        step = 1
        while step * STEP <= MOST and (taken := self.plan(step * STEP)) is not None:
            fits, plans[step], step = step, taken, 2 * step
        fails, why = min(step, MOST // STEP + 1), self.refusal
        while fails - fits > 1:
            middle = (fits + fails) // 2
            taken = self.plan(middle * STEP)
            if taken is None:
                fails, why = middle, self.refusal
            else:
                fits, plans[middle] = middle, taken
        if fits == 0:
            return None
        return fits * STEP, plans[fits], "the least" in why


def cell(found):
    if found is None:
        return "none"
    tokens, (seconds, elsewhere), by_memory = found
    beside = f", {elsewhere / 2**30:.1f} GiB" if elsewhere else ""
    return f"{tokens:,}{'' if by_memory else ' (all it can)'}, {seconds:.3g} s{beside}"


def table(options):
    rows = [["model", *options.memory]]
    for model in options.model:
        planners = [Planner(options.train, model, memory, options.batch, options.more) for memory in options.memory]
        rows.append([os.path.basename(os.path.normpath(model)), *(cell(p.longest()) for p in planners)])
    rows.insert(1, ["---", *("---:" for _ in options.memory)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="the binary")
    parser.add_argument("--model", nargs="+", required=True, help="folders with a config.json")
    parser.add_argument("--memory", nargs="+", required=True, help="budgets, as in 8GiB")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step (default: 1)")
    options = parser.parse_args(arguments[:cut])
    options.more = arguments[cut + 1:]
    print(table(options), end="")


if __name__ == "__main__":
    sys.exit(main())
