#!/usr/bin/env python3
"""Compares a run on several devices with one device that accumulates as many micro-batches: the losses, and the speed
beside the plan's prediction. Exit code 1 if a loss differs by more than the tolerance.

    dev/compare_devices.py build/cuda-bf16/train --devices 4 --model d12 --batch 16 --seq-len 1024

Options that it does not know go to the trainer, in all runs.

With --one-gpu the ranks share one GPU, which tests NCCL's part on a machine with no more: each rank runs under a host name
of its own, so that NCCL takes the ranks for as many machines and connects them by its network transport. Then speeds say
nothing. It needs OpenMPI's mpirun, and permission to unshare a namespace.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from training_log import read_log


def fail(message):
    print(f"compare_devices.py: {message}", file=sys.stderr)
    sys.exit(2)


# What a rank on a shared GPU runs: bash -c OWN_HOST NAME COMMAND...
OWN_HOST = 'hostname "$0" && NCCL_HOSTID=$0 exec "$@"'
ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "OMPI_ALLOW_RUN_AS_ROOT": "1",
           "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def on_one_gpu(command, devices):
    """The command of mpirun whose ranks share a GPU."""
    unshare = ["unshare", "--uts", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    ranks = [["-n", "1", *unshare, "bash", "-c", OWN_HOST, f"rank{r}", *command] for r in range(devices)]
    return ["mpirun", "--oversubscribe", "--bind-to", "none", *ranks[0], *(word for rank in ranks[1:] for word in (":", *rank))]


def train(command, log, devices=0):
    """The losses of a run, and its tokens/s: the median of all steps but the first three, which set things up. If devices
    is not 0, as many ranks share one GPU."""
    command, environment = [*command, "--log", log], dict(os.environ)
    if devices:
        command = on_one_gpu(command, devices)
        environment |= ONE_GPU | {"CUDA_VISIBLE_DEVICES": environment.get("CUDA_VISIBLE_DEVICES", "0")}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode != 0:
        fail(f"{' '.join(command)}: exit code {ran.returncode}: {ran.stderr.strip()[-500:]}")
    steps = read_log(log, ("loss", "tokens_per_second"))
    speeds = [step["tokens_per_second"] for number, step in sorted(steps.items()) if "tokens_per_second" in step]
    return {number: step["loss"] for number, step in steps.items() if "loss" in step}, statistics.median(speeds[3:])


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
    parser.add_argument("--one-gpu", action="store_true", help="the ranks share one GPU: compares losses, not speed")
    given, options = parser.parse_known_args(arguments)
    if given.steps < 5:
        fail("--steps: at least 5")
    shared = [given.train, *options, "--sample", "tokens=0", "--print-every", "1"]
    runs = {"one device": ["--grad-accum", str(given.devices)]}
    devices = [] if given.one_gpu else ["--devices", str(given.devices)]  # on one GPU, mpirun starts as many ranks
    runs |= {f"{given.devices} devices, --zero {zero}": [*devices, "--zero", zero] for zero in given.zero.split(",")}
    worst = 0
    speeds = () if given.one_gpu else ("tokens/s", "times one device", "predicted tokens/s")
    columns = ("run", *speeds, "largest relative difference of a loss")
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    first = None
    with tempfile.TemporaryDirectory() as folder:
        for name, extra in runs.items():
            losses, speed = train([*shared, *extra, "--steps", str(given.steps)], str(pathlib.Path(folder) / f"{name}.jsonl"),
                                  given.devices if given.one_gpu and first else 0)
            first = first or (losses, speed)
            difference = max(abs(losses[step] - loss) / abs(loss) for step, loss in first[0].items())
            worst = max(worst, difference)
            cells = [name] if given.one_gpu else [name, f"{speed:,.0f}", f"{speed / first[1]:.2f}",
                                                  f"{predicted([*shared, *extra]):,.0f}"]
            print(f"| {' | '.join([*cells, f'{difference:.1e}'])} |", flush=True)
    return 0 if worst <= given.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
