"""Plans stay the same, byte for byte: digests of plans for a grid of models and options are compared with
stored ones. Beside each digest are the plan's buffers, by which a difference is named.

If a change is meant to change plans, `PYTHONPATH=dev .venv/bin/python test/test_plan_digests.py` writes new
digests for the binaries in TRAIN_BINARIES.
"""

import collections
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


def levels_of(model):
    return [*LEVELS, MIXES.get(model, "gelu")]


def sizes_of(buffers):
    """How many buffers of each name a plan has, and their bytes in all: {"residual": "13x 163577856"}."""
    counts, sizes = collections.Counter(), collections.Counter()
    for b in buffers:
        counts[b["name"]] += 1
        sizes[b["name"]] += b["bytes"]
    return {name: f"{counts[name]}x {sizes[name]}" for name in counts}


def describe(train, folder, case):
    """What the plans at all levels say of tensors: the digest of all of it, and the sizes of buffers, in which a
    level has only what differs from the level before it. The memory of libraries and the process depends on the
    machine and is left out."""
    (folder / "config.json").write_text(json.dumps(SMALL))
    model, *options = case.split()
    if model == "d2":  # without data it would train on bytes
        options += ["--data", write_shard(folder / "data.bin", random_tokens(301, 2000))]
    said, changes, before = [], [], {}
    for level in levels_of(model):
        plan = train.plan("--model", folder if model == "small" else model, *options, "--recompute", level)
        totals = {kind: size for kind, size in plan["totals"].items() if kind not in ("process", "workspace", "total")}
        buffers = [b for b in plan["buffers"] if b["name"] != "library"]
        said.append([plan["parameters"], totals, plan["activations_lower_bound"], plan["peak_at"], [list(b.values()) for b in buffers]])
        sizes = sizes_of(buffers)
        changes.append({name: sizes.get(name) for name in {**before, **sizes} if sizes.get(name) != before.get(name)})
        before = sizes
    return {"digest": hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16], "buffers": changes}


def unfolded(changes):
    """The sizes of all buffers at each level."""
    levels, sizes = [], {}
    for change in changes:
        sizes = {name: size for name, size in {**sizes, **change}.items() if size}
        levels.append(sizes)
    return levels


def difference(model, expected, got):
    """The buffers that changed, a line for each and level."""
    lines = [f"--recompute {level}, {name}: {new.get(name, 'none')} bytes, was {old.get(name, 'none')}"
             for level, old, new in zip(levels_of(model), unfolded(expected["buffers"]), unfolded(got["buffers"]))
             for name in {**old, **new} if old.get(name) != new.get(name)]
    return lines or ["buffers have the bytes that they had; their shapes, order or lifetimes, or a total, changed"]


def read():
    return json.loads(DIGESTS.read_text())


@pytest.mark.parametrize("model", MODELS)
def test_plans_are_what_they_were(train, tmp_path, model):
    expected = read().get(str(train))
    if expected is None:
        pytest.skip(f"no digests of {train}")
    wrong = []
    for case in (case for case in CASES if case.startswith(model)):
        got = describe(train, tmp_path, case)
        if got != expected[case]:
            wrong += [f"{case}:", *(f"    {line}" for line in difference(model.split()[0], expected[case], got))]
    assert not wrong, "\n".join(wrong)


def test_a_difference_names_the_buffer():
    old = {"digest": "0", "buffers": [{"up": "2x 20", "qkv": "1x 8"}, {"up": None}]}
    new = {"digest": "1", "buffers": [{"up": "2x 24", "qkv": "1x 8"}, {"up": None, "d_up": "1x 4"}]}
    assert difference("d12", old, new) == ["--recompute none, up: 2x 24 bytes, was 2x 20", "--recompute gelu, d_up: 1x 4 bytes, was none"]
    assert len(difference("d12", old, old | {"digest": "1"})) == 1


def main():
    digests = read()
    with tempfile.TemporaryDirectory() as folder:
        for train in binaries():
            digests[str(train)] = {case: describe(train, pathlib.Path(folder), case) for case in CASES}
    text = json.dumps(digests)
    for start in ('"cpu-', '"cuda-', '"d2 ', '"small ', '"d12 ', '"d48 '):
        text = text.replace(start, "\n" + start)
    DIGESTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
