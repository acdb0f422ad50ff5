"""Programs and trainers on emulated GPUs (test/gpu): where they are, and what tests do with them."""

import functools
import os
import subprocess

import numpy as np
import pytest
from model_files import linked
from trainer_runs import ROOT, Train, binaries, figures, read_log, saved_bytes

BUILD = ROOT / os.environ.get("EMULATED", "build/emulated")
FAULT = 70  # exit code of a process that did what CUDA forbids

DATA = ("--model", "model", "--data", "data.bin", "--batch", 2, "--seq-len", 33, "--sample", "tokens=0")
# Losses compared with those of the CPU build, whose kernels add in another order.
BOUND = {"fp32": 2e-5, "bf16": 6e-3}


def play(*command, gpu="A100", seed=1, minutes=8, **environment):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60 * minutes,
                          env={**os.environ, "GPU": gpu, "GPU_SEED": str(seed), **environment})


@functools.cache
def played(precision, **environment):
    return Train(BUILD / f"train-{precision}", **{"GPU": "A100", "GPU_SEED": "1"} | environment)


def on_cpu(precision):
    found = [b for b in binaries() if b.device == "cpu" and b.precision == precision]
    return found[0] if found else pytest.skip(f"no CPU build in {precision}")


def logged(train, path, folder, *options, data=DATA):
    """The figures of a run in a folder of its own, and what it saved."""
    path.mkdir()
    work = linked(path, folder)
    ran = train(*data, *options, "--log", "log.jsonl", "--out", "out", cwd=work, minutes=5)
    return figures(read_log(work / "log.jsonl")), saved_bytes(work / "out"), ran.stdout.decode()


def losses(lines):
    return np.array([value for line in lines for key, value in line.items() if key.endswith("loss")])
