#!/usr/bin/env python3
"""Draws how training runs went. Use it to see whether a run learns, and to compare runs with each other: losses,
learning rates and tokens per second, from the logs of ./train --log or dev/reference.py --log.

Pale lines show single steps, the others means over a hundredth of the run. --losses draws one panel, with the
training and the validation losses.

    dev/plot_runs.py out/a.jsonl out/b.jsonl --out runs.png
"""

import argparse
import math
import os
import statistics
import sys

import figures
from training_log import BrokenLog, read_log

PANELS = {"loss": "training loss", "val_loss": "validation loss", "lr": "learning rate", "tokens_per_second": "tokens/s"}
SMOOTHED = ("loss", "tokens_per_second")


def fail(message):
    print(f"plot_runs.py: {message}", file=sys.stderr)
    sys.exit(2)


class Run:
    """One log: the points (steps, values) of each curve."""

    def __init__(self, path):
        self.path = path
        try:
            steps = sorted(read_log(path, PANELS).items())
        except BrokenLog as error:
            fail(error)
        self.points = {}
        for key in PANELS:
            found = [(step, values[key]) for step, values in steps if math.isfinite(values.get(key, math.nan))]
            if found:
                self.points[key] = tuple(zip(*found))

    def summary(self):
        """A summary in one line: how many steps were done, and which losses were reached."""
        steps = max(self.points.get("loss", ((0,),))[0])
        parts = [f"{steps} steps"]
        if "loss" in self.points:
            last = self.points["loss"][1][-max(1, steps // 100):]
            parts.append(f"loss {statistics.mean(last):.4f} over the last {len(last)}")
        if "val_loss" in self.points:
            best, step = min(zip(*reversed(self.points["val_loss"])))
            parts.append(f"best validation {best:.4f} at step {step}")
        if "tokens_per_second" in self.points:
            parts.append(f"{statistics.median(self.points['tokens_per_second'][1]):,.0f} tokens/s")
        return f"{self.path}: {', '.join(parts)}"


def smooth(values):
    """At each point, the mean over a hundredth of all values, up to this point; over fewer at the start."""
    window = max(1, len(values) // 100)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(i + 1, window) for i in range(len(values))]


def labels_of(paths):
    """The files' names, with as many folders as are needed to tell them apart."""
    parts = [os.path.abspath(path).split(os.sep) for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        labels = [os.sep.join(part[-count:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    return paths  # one file is given twice


def draw_losses(runs, out):
    """Draws both losses of each run in one panel."""
    pyplot = figures.pyplot(fail)
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    several = len(runs) > 1
    for i, (run, label) in enumerate(zip(runs, labels_of([run.path for run in runs]))):
        if "loss" in run.points:
            steps, values = run.points["loss"]
            axes.plot(steps, values, color=f"C{2 * i % 10}", alpha=0.25, linewidth=0.8)
            axes.plot(steps, smooth(values), color=f"C{2 * i % 10}", label=f"{label}, training" if several else "training loss")
        if "val_loss" in run.points:
            axes.plot(*run.points["val_loss"], color=f"C{(2 * i + 1) % 10}", marker="o", markersize=4,
                      label=f"{label}, validation" if several else "validation loss")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figures.save(figure, out, fail)


def draw(runs, out):
    """Draws a panel for each figure that a log has."""
    pyplot = figures.pyplot(fail)
    panels = [key for key in PANELS if any(key in run.points for run in runs)]
    figure, rows = pyplot.subplots(len(panels), 1, sharex=True, squeeze=False, figsize=(10, 2.8 * len(panels)))
    for key, axes in zip(panels, rows[:, 0]):
        for i, (run, label) in enumerate(zip(runs, labels_of([run.path for run in runs]))):
            if key not in run.points:
                continue
            steps, values = run.points[key]
            colour, marker = f"C{i % 10}", "o" if key == "val_loss" or len(steps) == 1 else None
            if key in SMOOTHED and len(values) >= 200:  # with fewer values, a mean covers one step
                axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
                values = smooth(values)
            axes.plot(steps, values, color=colour, marker=marker, markersize=4, linewidth=1.5, label=label)
        axes.set_ylabel(PANELS[key])
        axes.grid(alpha=0.3)
        axes.legend()
    rows[-1, 0].set_xlabel("step")
    figures.save(figure, out, fail)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="of ./train --log LOG")
    parser.add_argument("--losses", action="store_true", help="one panel, with training and validation losses")
    parser.add_argument("--out", default="runs.png", metavar="FILE", help=".png, .svg, .pdf (default: runs.png)")
    options = parser.parse_args(arguments)
    runs = [Run(path) for path in options.logs]
    if not any(run.points for run in runs):
        fail(f"{runs[0].path}: nothing in it is a number")
    (draw_losses if options.losses else draw)(runs, options.out)
    for run in runs:
        print(run.summary())


if __name__ == "__main__":
    sys.exit(main())
