#!/usr/bin/env python3
"""Draws the loss of validations by the length of the context. Use it to see whether a model makes use of long
contexts, and how --rope-scaling changes that.

A file has JSON lines, one per validation, as ./train --loss-by-position writes them. Each file is drawn as
one curve, that of its last validation; with --all there is a curve for each validation.
"""

import argparse
import json
import math
import sys

import figures
from plot_runs import labels_of


def fail(message):
    print(f"plot_loss_by_position.py: {message}", file=sys.stderr)
    sys.exit(2)


class Curve:
    """A validation: its step, its mean loss, and (contexts, losses), with a point in the middle of each
    bucket."""

    def __init__(self, line):
        self.step, self.loss = int(line["step"]), float(line["val_loss"])
        self.points = [(math.sqrt(c["first"] * c["last"]), float(c["loss"])) for c in line["contexts"]]
        self.longest = line["contexts"][-1]


def read_curves(path):
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or error}")
    curves = []
    for number, line in enumerate(lines, 1):
        try:
            curves.append(Curve(json.loads(line)))
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError):
            fail(f"{path}, line {number}: not a line of --loss-by-position")
    if not curves:
        fail(f"{path}: no validation in it")
    return curves


def draw(curves, out):
    """Draws (label, curve) pairs."""
    pyplot = figures.pyplot(fail)
    figure, axes = pyplot.subplots(figsize=(10, 5))
    for label, curve in curves:
        axes.plot(*zip(*curve.points), marker="o", markersize=3, linewidth=1.5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("validation loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figures.save(figure, out, fail)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="of ./train --loss-by-position FILE")
    parser.add_argument("--all", action="store_true", help="a curve of each validation")
    parser.add_argument("--out", default="loss_by_position.png", metavar="FILE",
                        help=".png, .svg, .pdf (default: loss_by_position.png)")
    options = parser.parse_args(arguments)
    curves = []
    for path, label in zip(options.files, labels_of(options.files)):
        read = read_curves(path)
        for curve in read if options.all else read[-1:]:
            curves.append((f"{label}, step {curve.step}" if options.all else label, curve))
    draw(curves, options.out)
    for label, curve in curves:
        last = curve.longest
        print(f"{label}: loss {curve.loss:.4f}, {curve.points[0][1]:.4f} with the shortest context, "
              f"{last['loss']:.4f} with {last['first']} to {last['last']} tokens")


if __name__ == "__main__":
    sys.exit(main())
