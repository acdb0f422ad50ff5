#!/usr/bin/env python3
"""Compares a run on several devices with one device that accumulates as many micro-batches: the losses, and the speed
beside the plan's prediction. Exit code 1 if a loss differs by more than the tolerance.

    dev/compare_devices.py build/cuda-bf16/train --devices 4 --model d12 --batch 16 --seq-len 1024

Options that it does not know go to the trainer, in all runs.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from training_log import read_log


def fail(message):
    print(f"compare_devices.py: {message}", file=sys.stderr)
    sys.exit(2)


def train(command, log):
    """The losses of a run, and its tokens/s: the median of all steps but the first three, which set things up."""
    ran = subprocess.run([*command, "--log", log], capture_output=True, text=True)
    if ran.returncode != 0:
        fail(f"{' '.join(command)}: exit code {ran.returncode}: {ran.stderr.strip()[-500:]}")
    steps = read_log(log, ("loss", "tokens_per_second"))
    speeds = [step["tokens_per_second"] for number, step in sorted(steps.items()) if "tokens_per_second" in step]
    return {number: step["loss"] for number, step in steps.items()}, statistics.median(speeds[3:])


def predicted(command):
    ran = subprocess.run([*command, "--plan", "json"], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)["tokens_per_second"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="the trainer's binary")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--zero", default="0,1,2", help="what the ranks keep, one run for each")
    parser.add_argument("--tolerance", type=float, default=2e-2, help="of the losses' difference, relative")
    given, options = parser.parse_known_args(arguments)
    if given.steps < 5:
        fail("--steps: at least 5")
    shared = [given.train, *options, "--sample", "tokens=0", "--print-every", "1"]
    runs = {"one device": ["--grad-accum", str(given.devices)]}
    runs |= {f"{given.devices} devices, --zero {zero}": ["--devices", str(given.devices), "--zero", zero]
             for zero in given.zero.split(",")}
    worst = 0
    print("| run | tokens/s | times one device | predicted tokens/s | largest relative difference of a loss |\n"
          "|---|---:|---:|---:|---:|")
    first = None
    with tempfile.TemporaryDirectory() as folder:
        for name, extra in runs.items():
            losses, speed = train([*shared, *extra, "--steps", str(given.steps)], str(pathlib.Path(folder) / f"{name}.jsonl"))
            first = first or (losses, speed)
            difference = max(abs(losses[step] - loss) / abs(loss) for step, loss in first[0].items())
            worst = max(worst, difference)
            print(f"| {name} | {speed:,.0f} | {speed / first[1]:.2f} | {predicted([*shared, *extra]):,.0f} | {difference:.1e} |",
                  flush=True)
    return 0 if worst <= given.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
