#!/usr/bin/env python3
"""Draws what a training step keeps in memory, from the files of ./train --timeline. Use it to see which
kind of tensor takes the memory at a step's peak, and what an option changes.

    ./train --plan --model d12 --batch 4 --seq-len 1024 --timeline step.json
    dev/plot_memory.py step.json --out step.png

One file: the live bytes by kind, stacked, over the operations of a step. Below it, if anything is streamed,
its transfers from and to host and disk; those that computing waits for, by measured rates, have a frame.
Several files: their totals as lines. With --over: the peak of each file against its seq_len (or another
figure). FILE:head stands for the part before the phase `head`, which is the forward pass.
"""

import argparse
import json
import os
import sys

import figures

MIB = 1 << 20
FIGURES = ("parameters", "batch", "seq_len")
COLOURS = ("#46627f", "#7f9db9", "#5f8f7a", "#93b8a6", "#c0c9cf", "#333333", "#e08a3c", "#b5403a", "#8a6bb1",
           "#999999")
SETTINGS = ("model", "device", "precision", "batch", "seq_len", "grad_accum", "head_rows", "recompute")


def fail(message):
    print(f"plot_memory.py: {message}", file=sys.stderr)
    sys.exit(2)


class Timeline:
    """One file; with `FILE:PHASE` only the part before that phase."""

    def __init__(self, argument):
        path, self.until = argument, None
        if not os.path.exists(argument) and ":" in argument:
            path, _, self.until = argument.rpartition(":")
        self.name = argument
        try:
            with open(path, encoding="utf-8") as file:
                record = json.load(file)
            self.kinds, operations = record["kinds"], record["operations"]
            self.settings = {key: (int if key in FIGURES else str)(record[key]) for key in {*SETTINGS, *FIGURES}}
            self.bytes = [[int(size) for size in operation["bytes"]] for operation in operations]
            self.ranges = [operation["range"] for operation in operations]
            self.names = [operation["name"] for operation in operations]
            self.transfers = [{"way": str(t["way"]), "of": str(t["of"]), "begins": float(t["begins"]),
                               "ends": float(t["ends"]), "waited": float(t.get("waited", 0))}
                              for t in record.get("transfers", ())]
        except OSError as error:
            fail(f"{path}: {error.strerror}")
        except (ValueError, TypeError, KeyError):
            fail(f"{path}: not a file of ./train --timeline")
        if not self.bytes or any(len(row) != len(self.kinds) for row in self.bytes):
            fail(f"{path}: not a file of ./train --timeline")
        self.whole_length = len(self.bytes)
        if self.until is not None:
            self.cut()

    def cut(self):
        end = next((i for i, name in enumerate(self.ranges) if name.split(" ")[0] == self.until), 0)
        if end == 0:
            fail(f"{self.name}: nothing comes before a phase '{self.until}'; the phases: "
                 f"{', '.join(name for name, _, _ in self.phases())}")
        self.bytes, self.ranges, self.names = self.bytes[:end], self.ranges[:end], self.names[:end]
        self.transfers = [t | {"ends": min(t["ends"], end)} for t in self.transfers if t["begins"] < end]

    def totals(self):
        return [sum(row) for row in self.bytes]

    def peak(self):
        """The bytes of the peak, and the first operation that has them."""
        totals = self.totals()
        return max(totals), totals.index(max(totals))

    def peak_text(self):
        size, at = self.peak()
        return f"{size / MIB:,.0f} MiB at {', '.join(filter(None, (self.ranges[at], self.names[at])))}"

    def phases(self):
        """(name, first operation, end) of each run of ranges that begin with the same word."""
        found = []
        for i, name in enumerate(self.ranges):
            phase = name.split(" ")[0]
            if phase and found and found[-1][0] == phase and found[-1][2] == i:
                found[-1][2] = i + 1
            elif phase:
                found.append([phase, i, i + 1])
        return found


def labels_of(timelines, given):
    """The given labels, or the settings in which the files differ, or else the files' names."""
    if given:
        if len(given) != len(timelines):
            fail(f"--labels: {len(given)} labels for {len(timelines)} files")
        return given
    differ = [key for key in SETTINGS if len({t.settings[key] for t in timelines}) > 1]
    labels = []
    for t in timelines:
        parts = [f"{key} {t.settings[key]}" if key in ("batch", "seq_len", "recompute") else str(t.settings[key])
                 for key in differ]
        labels.append(", ".join(parts + ([f"before {t.until}"] if t.until else [])))
    return labels if len(set(labels)) == len(labels) and all(labels) else [t.name for t in timelines]


def draw_one(axes, t):
    """Draws the kinds stacked, with phases shaded and named."""
    shown = [k for k in range(len(t.kinds)) if any(row[k] for row in t.bytes)]
    x = range(len(t.bytes) + 1)
    layers = [[row[k] / MIB for row in t.bytes + t.bytes[-1:]] for k in shown]
    axes.stackplot(x, layers, labels=[t.kinds[k] for k in shown], step="post", linewidth=0,
                   colors=[COLOURS[i % len(COLOURS)] for i in range(len(shown))])
    axes.set(xlim=(0, len(t.bytes)), ylim=(0, 1.3 * t.peak()[0] / MIB), xlabel="operation of the step",
             ylabel="MiB alive")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(", ".join(f"{key} {t.settings[key]}" for key in SETTINGS), fontsize=9)
    for i, (name, first, end) in enumerate(t.phases()):
        axes.axvspan(first, end, color="black", alpha=0.04 + 0.06 * (i % 2), linewidth=0, zorder=3)
        narrow = end - first < 0.06 * len(t.bytes)
        at_edge = narrow and end > 0.98 * len(t.bytes)
        axes.text(end if at_edge else (first + end) / 2, 0.98, name, rotation=90 if narrow else 0, va="top",
                  ha="right" if at_edge else "center", transform=axes.get_xaxis_transform(), zorder=4)
    size, at = t.peak()
    axes.plot([at + 0.5], [size / MIB], "o", color="black", zorder=5)
    right = at > len(t.bytes) / 2
    axes.annotate(t.peak_text(), (at + 0.5, size / MIB), textcoords="offset points", xytext=(-4 if right else 4, 6),
                  ha="right" if right else "left", va="bottom", zorder=5)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1, 0.5))


def draw_transfers(axes, t):
    """Draws transfers as bars, in a row for each direction."""
    ways = list(dict.fromkeys(transfer["way"] for transfer in t.transfers))
    kinds = list(dict.fromkeys(transfer["of"] for transfer in t.transfers))
    least = len(t.bytes) / 1000  # so that the shortest are visible
    for k, kind in enumerate(kinds):
        bars = [transfer for transfer in t.transfers if transfer["of"] == kind]
        axes.barh([ways.index(b["way"]) for b in bars], [max(b["ends"] - b["begins"], least) for b in bars],
                  left=[b["begins"] for b in bars], height=0.7, color=COLOURS[-2 - k], edgecolor="black", label=kind,
                  linewidth=[0.8 if b["waited"] > 0 else 0 for b in bars])
    axes.set_yticks(range(len(ways)), [way.replace("_", " ") for way in ways])
    axes.set(ylim=(len(ways) - 0.5, -0.5), xlabel="operation of the step")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_several(axes, timelines, labels):
    """Draws totals as lines. If steps have different lengths, x is the share of the step."""
    normalize = len({t.whole_length for t in timelines}) > 1
    scales = [1 / t.whole_length if normalize else 1 for t in timelines]
    axes.set(xlim=(0, 1 if normalize else timelines[0].whole_length), ylabel="MiB alive",
             ylim=(0, 1.15 * max(t.peak()[0] for t in timelines) / MIB),
             xlabel="part of the step's operations" if normalize else "operation of the step")
    for i, (t, label, scale) in enumerate(zip(timelines, labels, scales)):
        totals = t.totals()
        axes.plot([k * scale for k in range(len(totals) + 1)], [size / MIB for size in totals + totals[-1:]],
                  drawstyle="steps-post", color=f"C{i % 10}", linestyle="--" if t.until else "-",
                  label=f"{label}: {t.peak_text()}")
        size, at = t.peak()
        axes.plot([(at + 0.5) * scale], [size / MIB], "o", color=f"C{i % 10}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="lower center")


def draw_over(axes, timelines, figure):
    """Draws peaks against a figure, with a line for all files that agree in everything else."""
    if len({t.settings[figure] for t in timelines}) == 1:
        fail(f"--over {figure}: every file has {figure} {timelines[0].settings[figure]}")
    others = [key for key in SETTINGS if key != figure and not (figure == "parameters" and key == "model")]
    differ = [key for key in others if len({t.settings[key] for t in timelines}) > 1]
    lines = {}
    for t in timelines:
        parts = [f"{key} {t.settings[key]}" for key in differ] + ([f"before {t.until}"] if t.until else [])
        lines.setdefault(", ".join(parts), []).append((t.settings[figure], t.peak()[0] / MIB))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points)), marker="o", label=label or "peak")
    ticks = sorted({t.settings[figure] for t in timelines})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel=figure, ylabel="MiB at the peak")
    axes.grid(alpha=0.3)
    axes.legend()


def draw(timelines, options):
    pyplot = figures.pyplot(fail)
    bars = timelines[0].transfers if len(timelines) == 1 and not options.over else ()
    if bars:
        rows = len({transfer["way"] for transfer in bars})
        figure, (axes, below) = pyplot.subplots(2, 1, figsize=(9, 5.2 + 0.4 * rows), sharex=True,
                                                height_ratios=(6, 0.4 + 0.4 * rows))
        draw_transfers(below, timelines[0])
    else:
        figure, axes = pyplot.subplots(figsize=(9, 4.8) if len(timelines) == 1 else (11, 6))
    if options.over:
        draw_over(axes, timelines, options.over)
    elif len(timelines) == 1:
        draw_one(axes, timelines[0])
        if bars:
            axes.set_xlabel("")
    else:
        draw_several(axes, timelines, labels_of(timelines, options.labels))
    figures.save(figure, options.out, fail)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE[:PHASE]", help="of ./train --timeline FILE")
    parser.add_argument("--out", default="memory.png", metavar="FILE", help=".png, .svg, .pdf (default: memory.png)")
    parser.add_argument("--labels", nargs="+", help="the lines' names; else what the files differ in")
    parser.add_argument("--over", choices=FIGURES, help="draw the peak of each file against this figure of it")
    options = parser.parse_args(arguments)
    timelines = [Timeline(file) for file in options.files]
    draw(timelines, options)
    for t in timelines:
        print(f"{t.name}: {t.peak_text()}")


if __name__ == "__main__":
    sys.exit(main())
