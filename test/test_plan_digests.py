"""Plans stay the same, byte for byte: digests of plans for a grid of models and options are compared with
stored ones.

If a change is meant to change plans, `PYTHONPATH=dev .venv/bin/python test/test_plan_digests.py` writes new
digests for the binaries in TRAIN_BINARIES.
"""

import hashlib
import itertools
import json
import pathlib
import tempfile

import pytest
from trainer_runs import binaries, random_tokens, write_shard

DIGESTS = pathlib.Path(__file__).with_suffix(".json")
LEVELS = ["none", "gelu", "norm", "ffn", "attention", "block"]
SMALL = {"model_type": "gpt2", "vocab_size": 301, "n_positions": 50, "n_layer": 5, "n_head": 3, "n_embd": 42}
MODELS = ["d2", "small --batch 3 --seq-len 37", "d12 --batch 4 --seq-len 1024", "d48 --batch 2 --seq-len 256"]
WAYS = ["--chunk-rows head=256", "--chunk-rows head=0", "--chunk-rows head=100 --grad-accum 3", "--steps 0 --chunk-rows head=0",
        "--chunk-rows head=100 --update-in-backward --clip 0 --optimizer sgd", "--chunk-rows head=0 --state-formats m=8bit,v=bf16"]
CASES = [f"{model} {way}" for model, way in itertools.product(MODELS, WAYS)]
MIXES = {"small": "none:1,ffn:3,block:1", "d12": "block:4,norm:3,gelu:5", "d48": "gelu:1,attention:47"}


def digest(train, folder, case):
    """Digest of what the plans at all levels say of tensors. The memory of libraries and the process depends
    on the machine and is left out."""
    (folder / "config.json").write_text(json.dumps(SMALL))
    model, *options = case.split()
    if model == "d2":  # without data it would train on bytes
        options += ["--data", write_shard(folder / "data.bin", random_tokens(301, 2000))]
    said = []
    for level in [*LEVELS, MIXES.get(model, "gelu")]:
        plan = train.plan("--model", folder if model == "small" else model, *options, "--recompute", level)
        totals = {kind: size for kind, size in plan["totals"].items() if kind not in ("process", "workspace", "total")}
        buffers = [list(b.values()) for b in plan["buffers"] if b["name"] != "library"]
        said.append([plan["parameters"], totals, plan["activations_lower_bound"], plan["peak_at"], buffers])
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def read():
    return json.loads(DIGESTS.read_text())


@pytest.mark.parametrize("model", MODELS)
def test_plans_are_what_they_were(train, tmp_path, model):
    expected = read().get(str(train))
    if expected is None:
        pytest.skip(f"no digests of {train}")
    cases = [case for case in CASES if case.startswith(model)]
    assert {case: digest(train, tmp_path, case) for case in cases} == {case: expected[case] for case in cases}


def main():
    digests = read()
    with tempfile.TemporaryDirectory() as folder:
        for train in binaries():
            digests[str(train)] = {case: digest(train, pathlib.Path(folder), case) for case in CASES}
    DIGESTS.write_text(json.dumps(digests, indent=0) + "\n")


if __name__ == "__main__":
    main()
