#!/usr/bin/env python3
"""Compares a step measured on a GPU with what dev/gpu_predicted.py predicts for it: writes one table.

    gpu_compare.py --gpu "NVIDIA H100 80GB HBM3" build/cuda-bf16/train --bench ops,json --model d12 --batch 64 ...

runs the trainer, which must measure its operations; with --recorded FILE its figures are read from there. The
prediction comes from dev/results/gpu-predicted.json: by operation, in proportion to the FLOPs or bytes that
the trainer reports.
"""

import argparse
import json
import pathlib
import re
import sys

import gpu_predicted
from gpu_predicted import GPUS, ROOT, row_name, step_of, table

# By the driver's name of a GPU: (the GPU whose kernels were counted, the rates).
NAMES = {"A100.*80GB": ("A100", GPUS["A100"]), "RTX 4090$": ("4090", GPUS["4090"]), "H100 80GB HBM3": ("H100", GPUS["H100"]),
         "H200": ("H100", GPUS["H100"]._replace(bandwidth=4.8e12, memory=141e9))}


def known_gpu(name):
    """The entry of NAMES for the driver's name. Exits if there are no counts for it."""
    for pattern, gpu in NAMES.items():
        if re.search(rf"\b{pattern}", name):
            return gpu
    print(f"gpu_compare.py: nothing was counted for {name}; there are A100 80GB, RTX 4090, H100 80GB HBM3 and H200")
    raise SystemExit(0)


# If the counts have no row for an operation, it was counted as part of this one.
COUNTED_WITH = {"attention_delta": "attention_backward"}


def predicted(gpu, key, operations, units):
    """{row: (seconds, bound)} of the operations with counts."""
    slower = GPUS[key].bandwidth / gpu.bandwidth  # for a GPU with another bandwidth
    units = {name: unit | {"under_way": unit["under_way"] * slower} for name, unit in units[key].items()}
    counted = [o for o in operations if row_name(o["name"]) != o["name"] or o["name"] in units]
    return {row[0]: (row[1], row[2]) for row in step_of(gpu, counted, units)}


def compare(bench, gpu_name, setups, setup):
    """The lines of the file."""
    key, gpu = known_gpu(gpu_name)
    operations = bench["operations"]
    said = predicted(gpu, key, operations, setups[setup])
    measured, calls = {}, {}
    for o in operations:
        name = row_name(o["name"])
        together = name if name in setups[setup][key] else COUNTED_WITH.get(name, name)
        measured[together] = measured.get(together, 0) + o["ms"]
        calls[together] = calls.get(together, 0) + (o["calls"] if together == name else 0)
    rows = []
    for name, ms in sorted(measured.items(), key=lambda item: -item[1]):
        seconds, bound = said.get(name, (None, ""))
        rows.append([name, calls[name], f"{ms:.3f}", f"{1e3 * seconds:.3f}" if seconds else "",
                     f"{ms / (1e3 * seconds):.2f}" if seconds else "", bound])
    whole, counted = sum(measured.values()), 1e3 * sum(seconds for seconds, _ in said.values())
    rows.append(["all of these", sum(calls.values()), f"{whole:.3f}", f"{counted:.3f}", f"{whole / counted:.2f}", ""])
    return [f"# Measured and predicted: {bench['model']}, {bench['precision']}, {bench['batch']} x {bench['seq_len']}, "
            f"{gpu_name}", "",
            f"The whole step took {bench['step_ms']['median']:.2f} ms (median). Predicted is what `dev/gpu_predicted.py` counts, "
            f"with the kernels of its {setup} on {key}: the least that an operation should take.", "",
            *table(["operation", "calls", "measured, ms", "predicted, ms", "measured / predicted", "bound"], rows)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", required=True, help="as nvidia-smi names it")
    parser.add_argument("--units", default=ROOT / "dev/results/gpu-predicted.json")
    parser.add_argument("--setup", default="GPT-2 124M", help="whose kernels were counted")
    parser.add_argument("--out", help="a file for the table; else it is printed")
    parser.add_argument("--recorded", help="what the trainer has said, instead of running it")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the trainer, with --bench ops,json")
    options = parser.parse_args(arguments)
    known_gpu(options.gpu)
    if bool(options.recorded) == bool(options.command):
        parser.error("either a trainer's command, or --recorded")
    setups = json.loads(pathlib.Path(options.units).read_text())
    if options.setup not in setups:
        parser.error(f"--setup {options.setup}: there are {', '.join(setups)}")
    text = pathlib.Path(options.recorded).read_text() if options.recorded else gpu_predicted.run(options.command)
    bench = json.loads(text)
    if "operations" not in bench:
        parser.error("the trainer has measured no operations: --bench ops")
    if bench["precision"] != "bf16":
        parser.error(f"what was counted is of bf16, not {bench['precision']}")
    text = "\n".join(compare(bench, options.gpu, setups, options.setup)).rstrip() + "\n"
    if options.out:
        pathlib.Path(options.out).write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
