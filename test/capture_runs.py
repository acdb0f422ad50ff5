#!/usr/bin/env python3
"""Keeps what a change must leave as it was: the bits of many short runs, and many plans. Not a test of its own: run it
with a build from before the change, and again with one from after it, on the same machine.

    PYTHONPATH=dev .venv/bin/python test/capture_runs.py --to before.json build/cpu-fp32/train build/cpu-bf16/train
    PYTHONPATH=dev .venv/bin/python test/capture_runs.py --compare before.json build/cpu-fp32/train build/cpu-bf16/train

A run is every family in every way of RUNS. Its losses, norms, validations, saved numbers and samples are kept as digests. A plan
is every setting of PLANS, without what depends on the process; plans for GPUs need build/planner. --only WORD takes the cases
whose names have it. Exit code 1 if a case differs.
"""

import argparse
import hashlib
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from multiprocessing.pool import ThreadPool

from model_files import DATA, MODELS, VOCAB
from trainer_runs import Train, figures, make, random_tokens, read_log, write_shard

FAMILIES = MODELS | {"gpt2": ("--heads", 3, "--channels", 42)}
LORA = "--train lora --lora-rank 3"
LONG = "--batch 1 --seq-len 300"
FULL = ["", *(f"--recompute {level}" for level in ("none", "norm", "ffn", "attention", "block", "block:2,gelu:1")),
        "--grad-accum 3", "--chunk-rows head=5,mlp=16", f"{LONG} --recompute block --chunk-rows attention=128,mlp=64",
        "--update-in-backward --by-block --grad-accum 2", "--clip 0 --optimizer sgd", "--state-formats m=8bit,v=8bit", "--state-formats m=bf16,v=8bit",
        "--offload weights=disk,gradients=disk,state=disk", "--offload weights=disk --prefetch 0 --by-block --grad-accum 2",
        "--offload inputs=auto --recompute block", f"{LONG} --recompute block --chunk-rows attention=256 --offload keys=auto,inputs=auto",
        *(f"--devices 2 --zero {zero}" for zero in (0, 1, 3)), "--devices 3 --zero 2 --by-block --grad-accum 6"]
ADAPTERS = [LORA, f"{LORA} --base nf4", f"{LORA} --base nf4-double,head=nf4 --recompute block", f"{LORA} --base mlp=bf16,attention=nf4",
            f"{LORA} --lora-targets attention --lora-dropout 0.1", f"{LORA} --offload weights=disk,embeddings=disk",
            f"{LORA} --base mlp=8bit", f"{LORA} --devices 2 --zero 3 --base nf4", "--train prompt --soft-prompt 5",
            f"{LONG} --train prompt --soft-prompt 5 --recompute block --chunk-rows attention=128"]
RUNS = [*FULL, *ADAPTERS]
BF16_RUNS = ["--state-formats master=split", "--state-formats master=none"]

NAMED = ["llama-3.1-8b", "qwen3-8b", "qwen2.5-1.5b", "mistral-7b", "d24", "bloom-560m"]
GPUS = ["RTX 3060", "RTX 4090", "A100 80GB", "H200"]
PLANS = [f"--model {model} --gpu '{gpu}' {way}" for model, gpu, way in itertools.product(NAMED, GPUS, [
    "--batch 1 --seq-len 1024", "--batch 4 --seq-len 512 --grad-accum 4", "--batch 1 --seq-len 1024 --train lora --base nf4-double",
    "--batch 2 --seq-len 512 --train prompt", "--batch 1 --seq-len auto --train lora --base nf4-double",
    "--batch auto --seq-len 512 --train lora", "--batch 1 --seq-len 1024 --devices 4", "--batch 1 --seq-len 1024 --memory 10GiB,host=64GiB"])]
PLANS += [f"--model {model} --batch 2 --seq-len 256 --memory {memory}" for model in ("d4", "llama:d6", "qwen3:d4", "bloom:d4")
          for memory in ("400MiB", "1GiB", "4GiB")]


def prepare(folder):
    for name, options in FAMILIES.items():
        (folder / name).mkdir()
        by_layer = any("_layers" in str(word) or "layer_types" in str(word) for word in options)  # lists of two layers
        make(folder / name / "model", "--family", name.split("-")[0], "--layers", 2 if by_layer else 3, "--vocab", VOCAB, "--positions", 320,
             "--dtype", "bf16", *options)
        write_shard(folder / name / "data.bin", random_tokens(VOCAB, 3000))
        write_shard(folder / name / "val.bin", random_tokens(VOCAB, 2000, seed=1))


def digest(*values):
    return hashlib.sha256(b"".join(value if isinstance(value, bytes) else json.dumps(value).encode() for value in values)).hexdigest()[:16]


def run_digest(train, work, options, steps):
    """What a run leaves, and what its save leaves that goes on for a step: losses, norms, samples, numbers in saves. A refused
    run leaves its line."""
    out = tempfile.mkdtemp(dir=work)

    def left(*words):
        ran = subprocess.run(train.command(*words), cwd=work, env=train.environment, capture_output=True, timeout=600)
        if ran.returncode:
            return f"exit code {ran.returncode}: {ran.stderr.decode(errors='replace').replace(out, 'OUT').strip()}"
        log = [{key: value for key, value in line.items() if key != "step"} for line in figures(read_log(f"{out}/log"))]
        samples = re.findall(rb"--- sample after \d+ steps ---\n(.*?)\n---\n", ran.stdout, re.DOTALL)
        saved = sorted(pathlib.Path(out, "out").glob("*.safetensors"))
        return digest(log, *samples, *(path.read_bytes() for path in saved))

    first = left(*map(str, DATA), "--val-data", "val.bin", "--threads", "1", "--steps", str(steps), "--eval-every", "2", "--out",
                 f"{out}/out", "--log", f"{out}/log", "--sample", "tokens=8,temperature=0", *options)
    return first if first.startswith("exit") else f"{first} {left('--resume', f'{out}/out', '--steps', str(steps + 1))}"


def plan_of(train, work, options):
    """A plan, and the seconds that it took."""
    start = time.monotonic()
    ran = subprocess.run(["bash", "-c", f'exec "$0" --plan json {options}', train.path], cwd=work, env=train.environment,
                         capture_output=True, timeout=600)
    seconds = time.monotonic() - start
    if ran.returncode:
        return f"exit code {ran.returncode}: {ran.stderr.decode(errors='replace').strip()}", seconds
    plan = json.loads(ran.stdout)
    process = plan["totals"].pop("process")
    del plan["totals"]["total"]
    if plan["device"] == "cpu":
        for choice in plan.get("choice", []):
            choice["bytes"] -= process
    return plan, seconds


def capture(paths, only):
    """All cases of these binaries: {name: digest or plan}, and {name: seconds} of plans."""
    found, seconds = {}, {}
    with tempfile.TemporaryDirectory() as folder, ThreadPool(2) as pool:
        folder = pathlib.Path(folder)
        prepare(folder)
        cases = []
        for train in map(Train, paths):
            ways = RUNS + (BF16_RUNS if train.precision == "bf16" else [])
            cases += [(f"{train} run {family} {way}", run_digest, (train, folder / family, way.split(), 3))
                      for family, way in itertools.product(FAMILIES, ways)]
            cases += [(f"{train} plan {plan}", plan_of, (train, folder, plan)) for plan in PLANS]
        cases = [case for case in cases if all(word in case[0] for word in only)]
        for done, (name, result) in enumerate(pool.imap(lambda case: (case[0], case[1](*case[2])), cases), 1):
            found[name] = result
            if isinstance(result, tuple):
                found[name], seconds[name] = result
            if done % 50 == 0:
                print(f"{done} of {len(cases)}", file=sys.stderr)
    return {"cases": found, "seconds": seconds}


def differences(before, now):
    """A line for each case that differs, with the first keys of a plan that do."""
    for name, old in before.items():
        new = now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):  # plans of older versions have no such keys
            new = {key: value for key, value in new.items() if key in old or key not in ("run", "memory_setting")}
        if new == old:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            yield f"{name}: " + ", ".join(f"{key}: {str(old.get(key))[:60]} -> {str(new.get(key))[:60]}" for key in keys[:4])
        else:
            yield f"{name}: {str(old)[:150]} -> {str(new)[:150]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binaries", nargs="+")
    parser.add_argument("--to", type=pathlib.Path, help="writes what was found into this file")
    parser.add_argument("--compare", type=pathlib.Path, help="compares with this file")
    parser.add_argument("--only", action="append", default=[], help="takes the cases whose names have this word")
    options = parser.parse_args()
    now = capture(options.binaries, options.only)
    print(f"{len(now['cases'])} cases; plans took {sum(now['seconds'].values()):.1f} s, the slowest {max(now['seconds'].values(), default=0):.1f} s")
    if options.to:
        options.to.write_text(json.dumps(now))
    if not options.compare:
        return
    before = json.loads(options.compare.read_text())
    binaries = {name.split()[0] for name in now["cases"]}
    kept = {name: value for name, value in before["cases"].items()
            if name.split()[0] in binaries and all(word in name for word in options.only)}
    lines = list(differences(kept, now["cases"]))
    print(*lines, f"{len(lines)} of {len(kept)} cases differ", sep="\n")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
