#!/usr/bin/env python3
"""Puts two training logs side by side; exit code 1 if they differ by more than the tolerance.

Losses are compared by their absolute difference, gradient norms by their relative one. A log has JSON lines,
as ./train --log and dev/reference.py --log write them. If a step was logged twice (in a resumed run), the
last line counts.
"""

import argparse
import math
import sys

from training_log import BrokenLog, read_log


def fail(message):
    print(f"compare_losses.py: {message}", file=sys.stderr)
    sys.exit(2)


def read(path):
    try:
        return read_log(path, ("loss", "grad_norm", "val_loss"))
    except BrokenLog as error:
        fail(error)


def difference(key, a, b):
    """Absolute for losses, relative for gradient norms; NaN if either value is NaN."""
    if key != "grad_norm" or a == b:
        return abs(a - b)
    return abs(a - b) / max(abs(a), abs(b))


def compare(log_a, log_b, tolerances):
    """Prints the table. Returns how many values differ too much or are in one log only, and the largest
    difference by kind."""
    failures, worst = 0, {}
    print(f"{'step':>6} {'value':>9} {'A':>13} {'B':>13} {'difference':>11}")
    for step in sorted(log_a.keys() | log_b.keys()):
        for key, tolerance in tolerances.items():
            a, b = log_a.get(step, {}).get(key), log_b.get(step, {}).get(key)
            if a is None and b is None:
                continue
            if a is None or b is None:
                failures += 1
                print(f"{step:>6} {key:>9} only in {'A' if b is None else 'B'}")
                continue
            off = difference(key, a, b)
            within = off <= tolerance  # false for NaN
            failures += not within
            worst[key] = max(worst.get(key, 0.0), math.inf if math.isnan(off) else off)
            print(f"{step:>6} {key:>9} {a:>13.7f} {b:>13.7f} {off:>11.2e}{'' if within else '  <<<'}")
    return failures, worst


def plot(path, names, logs):
    try:
        import matplotlib
        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError:
        fail("--plot needs matplotlib: run dev/venv.sh and use .venv/bin/python")
    figure, (losses, gaps) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    for name, log, style in zip(names, logs, ("-", "--")):
        for key in ("loss", "val_loss"):
            points = [(step, values[key]) for step, values in sorted(log.items()) if key in values]
            if points:
                losses.plot(*zip(*points), style, marker="o" if key == "val_loss" else None,
                            label=f"{key} {name}")
    for key in ("loss", "grad_norm"):
        points = [(step, difference(key, logs[0][step][key], logs[1][step][key]))
                  for step in sorted(logs[0].keys() & logs[1].keys())
                  if key in logs[0][step] and key in logs[1][step]]
        if points:
            gaps.plot(*zip(*points), label="grad_norm (relative)" if key == "grad_norm" else key)
    losses.set_ylabel("loss")
    losses.legend()
    gaps.set(xlabel="step", ylabel="difference")
    gaps.set_yscale("symlog", linthresh=1e-8)  # shows zero too
    gaps.legend()
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        fail(f"--plot {path}: {error}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a", metavar="A", help="a log of JSON lines")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of losses, absolute (default: 1e-4)")
    parser.add_argument("--norm-tolerance", type=float, help="of gradient norms, relative (default: --tolerance)")
    parser.add_argument("--plot", metavar="FILE", help="draw losses and differences (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    norm_tolerance = options.tolerance if options.norm_tolerance is None else options.norm_tolerance
    log_a, log_b = read(options.a), read(options.b)
    failures, worst = compare(log_a, log_b, {"val_loss": options.tolerance, "loss": options.tolerance,
                                             "grad_norm": norm_tolerance})
    if options.plot:
        plot(options.plot, (options.a, options.b), (log_a, log_b))
    summary = ", ".join(f"{key} {off:.2e}" for key, off in worst.items()) or "nothing in common"
    print(f"largest differences: {summary}; {failures} past the tolerance")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
