"""The CUDA build without a GPU: the trainer's own PTX runs on a GPU that test/gpu emulates. Its runs agree with the CPU build
within rounding, and to the bit where the arithmetic is equal. test_emulated_kernels.py has the tests of kernels."""

import collections
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types

import gpu_predicted
import numpy as np
import pytest
from conftest import MORE
from emulated_runs import BOUND, BUILD, DATA, logged, losses, on_cpu, play, played
from model_files import VOCAB, linked, prepare, starting_at_0
from rate_files import rates_of, spent, write
from safetensors.torch import load_file, save_file
from trainer_runs import (ROOT, binaries, figures, make, random_tokens, read_log, running, sampled, saved_bytes, taken_and_planned,
                          wait_for_line, write_shard, write_text)

pytestmark = pytest.mark.skipif(not (BUILD / "faults").exists(), reason="no CUDA Toolkit")


# --- The trainer.

MODELS = {"gpt2": ("--heads", 2, "--channels", 48),
          "llama": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--mlp-width", 72)}
STEPS = ("--steps", 10, "--lr", 1e-3, "--warmup", 2, "--clip", 2, "--val-data", "data.bin", "--eval-every", 5,
         "--eval-batches", 2)
@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp(request.param), request.param, MODELS)


# fp32's attention multiplies with shuffles, which is slow here. Only make test-more builds the trainer in fp32.
@pytest.fixture(params=[pytest.param("fp32", marks=pytest.mark.more), "bf16"])
def precision(request):
    return request.param


# Settings that change neither plan nor arithmetic, and settings that change only the plan.
SAME = {
    "graphs off": (("--advanced", "graph=off"), {}),
    "as late as possible": ((), {"GPU_ORDER": "late", "GPU_SEED": "7"}),
    "as early as possible": ((), {"GPU_ORDER": "early", "GPU_SEED": "8"}),
    "block": (("--recompute", "block"), {}),
    "nothing kept less": (("--recompute", "none", "--chunk-rows", "head=0"), {}),
}
# Further runs, each compared with the CPU build's.
VARIED = {
    "accumulation": ("--grad-accum", 2),
    "update in backward": ("--update-in-backward", "--clip", 0),
    "8-bit state": ("--state-formats", "m=8bit,v=8bit"),
    "LoRA on NF4": ("--train", "lora", "--lora-rank", 3, "--base", "nf4-double", "--lora-dropout", 0.1),
    "soft prompt": ("--train", "prompt", "--soft-prompt", 3),
}


def test_runs_are_those_of_the_cpu_build_and_of_each_other(model, precision, tmp_path):
    here, files, said = logged(played(precision), tmp_path / "here", model, *STEPS)
    there, _, _ = logged(on_cpu(precision), tmp_path / "there", model, *STEPS)
    assert len(losses(here)) >= 12  # of steps and validations
    np.testing.assert_allclose(losses(here), losses(there), rtol=BOUND[precision])
    taken, planned = taken_and_planned(said)
    assert taken <= planned
    for name, (options, environment) in SAME.items():
        again, same_files, _ = logged(played(precision, **environment), tmp_path / name, model, *STEPS, *options)
        assert again == here, name
        assert {k: v for k, v in same_files.items() if k != "trainer_state.safetensors"} == \
            {k: v for k, v in files.items() if k != "trainer_state.safetensors"}, name


@pytest.mark.parametrize("name", VARIED)
def test_what_people_train_with(model, precision, name, tmp_path):
    options = ("--steps", 4, "--lr", 1e-3, "--warmup", 2, *VARIED[name])
    here, files, _ = logged(played(precision), tmp_path / "here", model, *options)
    there, _, _ = logged(on_cpu(precision), tmp_path / "there", model, *options)
    np.testing.assert_allclose(losses(here), losses(there), rtol=BOUND[precision])
    again, same_files, _ = logged(played(precision, GPU_SEED="5"), tmp_path / "again", model, *options, "--advanced", "graph=off")
    assert (again, same_files) == (here, files)


# Steps of a run: the first is not recorded, the second is, graph by graph, and the third replays the graphs.
REPLAYED = 3


@pytest.mark.parametrize("gpu, head_size", [("A100", 20), ("H100", 64)])
def test_attention_in_chunks(gpu, head_size, tmp_path):
    """128 of 150 tokens at a time, with the kernels of all GPUs and with Hopper's own. Forward has the bits
    of all tokens at once, and the bits are the same again with inputs that are offloaded chunk by chunk, with
    graphs and without."""
    make(tmp_path / "model", "--family", "qwen3", "--layers", 3, "--heads", 2, "--kv-heads", 1, "--channels", 48, "--head-size",
         head_size, "--vocab", VOCAB, "--positions", 150, "--dtype", "bf16")
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = ("--batch", 1, "--seq-len", 150, "--steps", REPLAYED, "--recompute", "block", "--eval-batches", 1)
    whole = logged(played("bf16", GPU=gpu), tmp_path / "whole", tmp_path, *options)[0]
    chunks = (*options, "--chunk-rows", "attention=128,mlp=64")
    first = logged(played("bf16", GPU=gpu), tmp_path / "chunks", tmp_path, *chunks)[:2]
    assert losses(first[0])[0] == losses(whole)[0]
    np.testing.assert_allclose(losses(first[0]), losses(whole), rtol=BOUND["bf16"])
    for order, more in (("late", ()), ("early", ("--advanced", "graph=off"))):
        parked = logged(played("bf16", GPU=gpu, GPU_ORDER=order), tmp_path / order, tmp_path, *chunks, "--offload", "inputs=auto", *more)
        assert parked[:2] == first, order


def test_host_memory_that_is_not_there(tmp_path):
    """More would be pinned than the machine has: one line, before anything is allocated."""
    write_text(tmp_path / "text", 2 << 20)
    options = ("--model", "d48", "--data", tmp_path / "text", "--batch", 1500, "--seq-len", 1024, "--steps", 1, "--recompute", "block",
               "--offload", "inputs=auto", "--sample", "tokens=0")
    pinned = played("bf16").plan(*options)["outside_device"]["pinned_host"]
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > pinned:
        pytest.skip("this machine has as much")
    error = played("bf16")(*options, cwd=tmp_path, code=2).stderr.decode()
    assert error.count("\n") == 1 and "host memory" in error and "this machine's memory" in error, error


@pytest.mark.parametrize("gpu, head_size", [("A100", 20), ("H100", 64)])
def test_parked_keys_come_in_time(gpu, head_size, tmp_path):
    """Four whole pieces and some more: their slots are reused while kernels read."""
    make(tmp_path / "model", "--family", "llama", "--layers", 1, "--heads", 2, "--kv-heads", 1, "--channels", 2 * head_size,
         "--vocab", VOCAB, "--positions", 534, "--dtype", "bf16")
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = ("--batch", 1, "--seq-len", 534, "--steps", 2, "--recompute", "block", "--eval-batches", 1, "--chunk-rows", "attention=128")
    first = logged(played("bf16", GPU=gpu), tmp_path / "here", tmp_path, *options)[:2]
    for order in ("late", "early"):
        parked = logged(played("bf16", GPU=gpu, GPU_ORDER=order), tmp_path / order, tmp_path, *options, "--offload", "keys=auto")
        assert parked[:2] == first, order


def test_what_lives_elsewhere_comes_in_time(tmp_path):
    """Blocks streamed from host memory and from disk, and offloaded inputs, with copies as late and as early
    as allowed."""
    make(tmp_path / "model", "--family", "llama", "--layers", 5, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16",
         *MODELS["llama"])
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = ("--steps", REPLAYED, "--train", "lora", "--lora-rank", 3, "--eval-batches", 1)
    first = logged(played("bf16"), tmp_path / "memory", tmp_path, *options)[:2]
    for name, (more, environment) in {
            "host": (("--offload", "weights=host,inputs=auto"), {"GPU_ORDER": "late", "GPU_SEED": "3"}),
            "disk": (("--offload", "weights=disk,inputs=auto:4"), {"GPU_ORDER": "early", "GPU_SEED": "4"}),
            "disk late": (("--offload", "weights=disk", "--recompute", "block"), {"GPU_ORDER": "late", "GPU_SEED": "5"}),
            "one by one": (("--offload", "weights=disk", "--prefetch", 0), {"GPU_ORDER": "late", "GPU_SEED": "5"}),
            "far ahead": (("--offload", "weights=disk", "--prefetch", 3), {"GPU_ORDER": "early", "GPU_SEED": "5"}),
            "host ahead": (("--offload", "weights=host", "--prefetch", 4), {"GPU_ORDER": "late", "GPU_SEED": "6"})}.items():
        assert logged(played("bf16", **environment), tmp_path / name, tmp_path, *options, *more)[:2] == first, name


def test_a_nan_in_weights_in_host_memory(tmp_path):
    """It is found when the weights are loaded."""
    make(tmp_path / "model", "--family", "llama", "--layers", 2, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16", "--heads", 2,
         "--channels", 32, "--mlp-width", 64)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    error = played("bf16")("--model", "model", "--data", "data.bin", "--train", "lora", "--offload", "weights=host", "--steps", 1, "--batch", 1,
                           "--seq-len", 16, "--sample", "tokens=0", cwd=tmp_path, code=2).stderr.decode()
    assert error == f'train: model: tensor "model.layers.1.mlp.up_proj.weight" has a number that is not finite as value {3 * 32 + 5}\n'


def test_what_is_stored_in_fewer_bits_waits_in_host_memory(tmp_path):
    """Blocks as --base keeps them are those on the device."""
    make(tmp_path / "model", "--family", "llama", "--layers", 4, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16", "--heads", 4,
         "--kv-heads", 2, "--channels", 64, "--mlp-width", 128)
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = ("--steps", REPLAYED, "--train", "lora", "--lora-rank", 3, "--eval-batches", 1)
    plain = logged(played("bf16"), tmp_path / "plain", tmp_path, *options)[:2]
    stored = (*options, "--base", "mlp=nf4,attention=8bit")
    first = logged(played("bf16"), tmp_path / "device", tmp_path, *stored)[:2]
    assert losses(first[0])[0] != losses(plain[0])[0]
    for order, more in (("late", ()), ("early", ("--recompute", "block")), ("random", ("--prefetch", 2))):
        host = logged(played("bf16", GPU_ORDER=order), tmp_path / order, tmp_path, *stored, "--offload", "weights=host", *more)[:2]
        assert host == first, order


@pytest.mark.parametrize("where", [
    ("--train", "lora", "--offload", "weights=host,embeddings=host,inputs=auto"),
    ("--train", "lora", "--offload", "weights=disk,embeddings=disk", "--prefetch", 2),
    ("--offload", "weights=host,gradients=host,state=host,updates=host"),
    ("--offload", "state=disk,updates=host"),
    ("--offload", "weights=disk,gradients=disk,state=disk", "--grad-accum", 2, "--prefetch", 0), ()], ids=str)
def test_what_is_pinned_is_what_is_planned(tmp_path, where):
    """To the byte, as the GPU counts it. If exactly that much may be pinned, the run says so; with a byte
    less it ends with one line."""
    make(tmp_path / "model", "--family", "llama", "--layers", 3, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16", *MODELS["llama"])
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = (*DATA, "--steps", 2, *where)
    planned = played("bf16").plan(*(tmp_path / part if part in ("model", "data.bin") else part for part in options))
    pinned, in_files = planned["host"]["pinned"], planned["outside_device"]["working_file"] + planned["outside_device"]["offloaded"]
    assert pinned > planned["outside_device"]["pinned_host"]  # also batches, and the results of steps
    said = played("bf16", GPU_PINNED=str(pinned))(*options, cwd=tmp_path).stdout.decode()
    for what, size in (("pinned in host memory", pinned), ("taken in files", in_files)):
        line = f"{what}: {size / 2**20:.1f} MiB; planned: {size / 2**20:.1f} MiB\n"
        assert (line in said) == (size > 0), said
    error = played("bf16", GPU_PINNED=str(pinned - 1))(*options, cwd=tmp_path, code=2).stderr.decode()
    assert "of host memory cannot be pinned" in error and error.count("\n") == 1, error


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_embeddings_that_live_elsewhere_come_in_time(dtype, tmp_path):
    """The head's three slices, and the rows of a batch, in host memory (where the GPU reads the rows itself)
    or on disk."""
    make(tmp_path / "model", "--family", "llama", "--layers", 2, "--vocab", 9001, "--positions", 64, "--dtype", dtype,
         *MODELS["llama"])
    write_shard(tmp_path / "data.bin", random_tokens(9001, 3000))
    options = ("--steps", REPLAYED, "--train", "prompt", "--soft-prompt", 3, "--eval-batches", 1, "--chunk-rows", "head=40")
    runs = {}
    for name, (more, environment) in {
            "device": ((), {}),
            "host": (("--offload", "embeddings=host"), {"GPU_ORDER": "late", "GPU_SEED": "3"}),
            "host early": (("--offload", "embeddings=host,weights=host"), {"GPU_ORDER": "early", "GPU_SEED": "4"}),
            "disk": (("--offload", "embeddings=disk"), {"GPU_ORDER": "late", "GPU_SEED": "5"}),
            "disk early": (("--offload", "embeddings=disk,weights=disk"), {"GPU_ORDER": "early", "GPU_SEED": "6"})}.items():
        runs[name] = logged(played("bf16", **environment), tmp_path / name, tmp_path, *options, *more)[:2]
    assert runs["host"] == runs["host early"] == runs["disk"] == runs["disk early"]
    np.testing.assert_allclose(losses(runs["disk"][0]), losses(runs["device"][0]), rtol=BOUND["bf16"])


@pytest.mark.parametrize("options", [
    (), pytest.param(("--update-in-backward", "--clip", 0, "--state-formats", "m=8bit,v=8bit"), marks=pytest.mark.more)], ids=str)
def test_what_is_trained_lives_elsewhere(tmp_path, options):
    """Changed weights of blocks are written back, and chunks of the optimizer's state pass through their
    ring: in host memory, or through it to a file."""
    make(tmp_path / "model", "--family", "llama", "--layers", 4, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16",
         *MODELS["llama"])
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = ("--steps", REPLAYED, "--eval-batches", 1, *options)
    first = logged(played("bf16"), tmp_path / "device", tmp_path, *options)[:2]
    for name, (more, environment) in {
            "host": (("--offload", "weights=host,state=host"), {"GPU_ORDER": "late", "GPU_SEED": "3"}),
            "early": (("--offload", "weights=host,state=host,inputs=auto"), {"GPU_ORDER": "early", "GPU_SEED": "4"}),
            "state": (("--offload", "state=host"), {"GPU_ORDER": "late", "GPU_SEED": "5"}),
            "disk": (("--offload", "weights=disk,state=disk"), {"GPU_ORDER": "late", "GPU_SEED": "6"}),
            "one by one": (("--offload", "weights=host,state=host", "--prefetch", 0), {"GPU_ORDER": "late", "GPU_SEED": "6"}),
            "far ahead": (("--offload", "weights=disk", "--prefetch", 2), {"GPU_ORDER": "late", "GPU_SEED": "6"}),
            "disk early": (("--offload", "weights=disk,state=disk:3"), {"GPU_ORDER": "early", "GPU_SEED": "7"}),
            "block": (("--offload", "state=disk:block"), {"GPU_SEED": "8"})}.items():
        lines, files, said = logged(played("bf16", **environment), tmp_path / name, tmp_path, *options, *more)
        assert (lines, files) == first, name
        assert re.search(r"waited +[\d.]+%", said)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_gradients_live_elsewhere(tmp_path, home):
    """They are fetched to be accumulated, stored, and fetched again for the update."""
    make(tmp_path / "model", "--family", "llama", "--layers", 4, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16",
         *MODELS["llama"])
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = ("--steps", REPLAYED, "--eval-batches", 1, "--grad-accum", 2)
    first = logged(played("bf16"), tmp_path / "device", tmp_path, *options)[:2]
    for name, (more, environment) in {
            "late": ((), {"GPU_ORDER": "late", "GPU_SEED": "3"}),
            "early": (("--offload", f"state={home},weights={home}"), {"GPU_ORDER": "early", "GPU_SEED": "4"}),
            "by block": (("--offload", "inputs=auto", "--by-block"), {"GPU_ORDER": "late", "GPU_SEED": "5"})}.items():
        lines = logged(played("bf16", **environment), tmp_path / name, tmp_path, *options, "--offload", f"gradients={home}", *more)[:2]
        assert name == "by block" or lines == first, name


@pytest.mark.parametrize("options", [
    ("--train", "lora", "--lora-rank", 3, "--offload", "weights=host,inputs=auto"), ("--offload", "weights=disk,state=disk"),
    ("--update-in-backward", "--offload", "state=host,updates=host,gradients=device"),
    ("--update-in-backward", "--offload", "state=disk,updates=host")], ids=str)
def test_steps_that_move_are_replayed(tmp_path, options):
    """Between graphs, the host only does what it must: it queues far less than without graphs, and the bits
    are the same."""
    make(tmp_path / "model", "--family", "llama", "--layers", 4, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16",
         *MODELS["llama"])
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    runs, given = {}, {}
    for graph in ("on", "off"):
        for steps in (REPLAYED, REPLAYED + 2):
            count = tmp_path / f"{graph} {steps}.txt"
            runs[graph] = logged(played("bf16", GPU_ENQUEUED=str(count)), tmp_path / f"{graph} {steps}", tmp_path, *options,
                                 "--steps", steps, "--lr", 1e-3, "--advanced", f"graph={graph}")[:2]
            given[graph, steps] = int(count.read_text())
    assert runs["on"] == runs["off"]
    a_step = {graph: given[graph, REPLAYED + 2] - given[graph, REPLAYED] for graph in runs}
    assert 0 < a_step["on"] < 0.6 * a_step["off"], a_step


FORMATS = {"fp32": (), "split": ("--state-formats", "master=split,m=8bit,v=bf16"),
           "no master": ("--state-formats", "master=none,v=8bit"), "sgd": ("--optimizer", "sgd")}


@pytest.mark.parametrize("formats", ["split", *(pytest.param(name, marks=pytest.mark.more) for name in ("fp32", "no master", "sgd"))])
def test_the_hosts_cores_update_to_the_same_bits(tmp_path, formats):
    """In backward and after it, with weights and gradients on the device and in host memory, the state in
    host memory and on its disk, in several orders."""
    make(tmp_path / "model", "--family", "llama", "--layers", 4, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16",
         *MODELS["llama"])
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = ("--steps", REPLAYED, "--lr", 1e-3, "--clip", 1, "--eval-batches", 1, *FORMATS[formats])
    for name, way in {"after": ("--grad-accum", 2), "in backward": ("--update-in-backward",)}.items():
        first = logged(played("bf16"), tmp_path / name, tmp_path, *options, *way)[:2]
        places = [(), ("--offload", "weights=host")] + ([("--offload", "weights=host,gradients=host")] if name == "after" else [])
        places = [("--offload", f"state={state}", *where) for state in ("host", "disk") for where in places]
        for i, (where, order) in enumerate(zip(places, itertools.cycle(("late", "early", "random")))):
            lines, files, said = logged(played("bf16", GPU_ORDER=order, GPU_SEED=str(i)), tmp_path / f"{name} {i}", tmp_path,
                                        *options, *way, "--offload", "updates=host", *where)
            assert (lines, files) == first, (name, where)
            assert re.search(r"waited +[\d.]+%", said)


@pytest.mark.more
@pytest.mark.parametrize("home", ["host", "disk"])
def test_weights_in_fp32_are_updated_by_the_host_too(tmp_path, home):
    """Weights are stored there and fetched again, and so are 8-bit moments."""
    make(tmp_path / "model", "--family", "gpt2", "--layers", 2, "--vocab", VOCAB, "--positions", 64, *MODELS["gpt2"])
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = ("--steps", REPLAYED, "--lr", 1e-3, "--eval-batches", 1, "--state-formats", "m=8bit")
    first = logged(played("fp32"), tmp_path / "device", tmp_path, *options)[:2]
    assert logged(played("fp32"), tmp_path / "host", tmp_path, *options, "--offload", f"state={home},updates=host")[:2] == first


def test_blocks_of_several_chunks_are_updated_by_the_host(tmp_path):
    """Their state is on disk. Each slot is reused several times in a step, and a save has all of the
    state."""
    make(tmp_path / "model", "--family", "llama", "--layers", 3, "--heads", 4, "--kv-heads", 2, "--channels", 128, "--mlp-width", 1600,
         "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16")
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    options = ("--steps", 4, "--lr", 1e-3, "--clip", 1, "--eval-batches", 1, "--save-every", 2, "--keep", 0)
    first = logged(played("bf16"), tmp_path / "device", tmp_path, *options)[:2]
    for order in ("late", "early"):
        here = logged(played("bf16", GPU_ORDER=order), tmp_path / order, tmp_path, *options, "--offload", "state=disk,updates=host")
        assert here[:2] == first, order
    work = tmp_path / "late"
    played("bf16")("--resume", "out/step-00000002", "--out", "rest", "--log", "rest.jsonl", cwd=work)
    assert figures(read_log(work / "rest.jsonl"))[-2:] == first[0][-2:]
    assert saved_bytes(work / "rest") == first[1]


def test_a_disk_that_fails_beside_the_hosts_updates(tmp_path, bad_disk):
    """In the middle of a step: the run ends with one line."""
    work = prepare(tmp_path, "llama", MODELS)
    failing = played("bf16", LD_PRELOAD=str(bad_disk), BAD_DISK_FAILS=str(tmp_path / "now"))
    with running(failing, *DATA, "--steps", 10**6, "--print-every", 1, "--offload", "state=disk,updates=host", cwd=work, text=True,
                 stderr=-1) as process:
        wait_for_line(process, r"^step +3/")
        (tmp_path / "now").touch()
        error = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 2, error
    assert re.search(r"^train: \S+: what --offload state=disk keeps there cannot be (read|written): Input/output error$", error), error


@pytest.mark.parametrize("home", [pytest.param("host", marks=pytest.mark.more), "disk"])
def test_what_moves_for_the_hosts_updates_is_planned(tmp_path, home):
    """As many bytes in each direction; a state on disk is read and written once."""
    work = prepare(tmp_path, "llama", MODELS)
    train = played("bf16", GPU_MEMORY="64")
    options = (*DATA, "--offload", f"state={home},updates=host")
    train(*options, "--plan", "--timeline", "step.json", cwd=work)
    planned = collections.Counter()
    for transfer in json.loads((work / "step.json").read_text())["transfers"]:
        planned[transfer["way"]] += transfer["bytes"]
    bench = train(*options, "--bench", "json", "--warmup", "1", "--steps", "2", cwd=work)
    moved = {way: link["bytes"] for way, link in json.loads(bench.stdout)["links"].items()}
    assert moved == planned
    assert set(moved) == {"to_host", "from_host", "host_update", *(("disk_read", "disk_write") if home == "disk" else ())}
    assert moved.get("disk_read") == moved.get("disk_write")


@pytest.mark.parametrize("options, said", [
    ((), "add state=host or state=disk"), (("--offload", "state=device"), "add state=host or state=disk"),
    (("--offload", "state=device", "--memory", "1500MiB"), "add state=host or state=disk"),
    (("--offload", "state=host,gradients=disk"), "gradients=disk"), (("--offload", "state=host,weights=disk"), "weights=disk"),
    (("--offload", "state=disk,gradients=disk"), "gradients=disk"), (("--offload", "state=disk,weights=disk"), "weights=disk")])
def test_what_the_host_cannot_update_is_said(options, said):
    error = played("bf16")("--model", "d2", *options, "--offload", "updates=host", "--plan", code=2).stderr.decode()
    assert said in error and error.count("\n") == 1


def test_memory_chooses_what_waits_in_host_memory():
    """Within the offered host memory; also what would fit without it, if that is faster; and in files what
    does not fit there."""
    train = played("bf16")
    options = ("--model", "d12", "--batch", 8, "--seq-len", 1024, "--memory")
    for memory, host, moved in ((1500, 4096, " --offload state=host,updates=host"),
                                (900, 4096, "gradients=host,state=host,updates=host,inputs=host"),
                                (700, 4096, " --offload weights=host,gradients=host,state=host,updates=host,inputs=host"),
                                (700, 400, " --offload weights=host,gradients=disk,state=disk"), (2400, 100, " --offload inputs=host")):
        plan = train.plan(*options, f"{memory}MiB", "--memory", f"host={host}MiB")
        assert moved in plan["choice"][0]["placements"]
        assert plan["totals"]["total"] <= memory << 20 and 0 < plan["outside_device"]["pinned_host"] <= host << 20
        assert plan["gpu"] == "A100 80GB PCIe" and plan["rates"] == "nominal"
    there = train.plan(*options, "1500MiB", "--memory", "host=4GiB", "--offload", "updates=device")
    assert there["choice"][0]["placements"] == " --offload state=host"
    little = [train.plan(*options, memory, "--memory", "host=400MiB", "--offload", "updates=host")["choice"][0]["placements"]
              for memory in ("1500MiB", "700MiB")]
    assert little[0] == " --offload state=disk"
    assert "gradients=disk" in little[1] and "updates=device" in little[1]
    assert there["estimated_seconds"] > 1.2 * train.plan(*options, "1500MiB", "--memory", "host=4GiB")["estimated_seconds"]
    resident = train.plan(*options, "2400MiB")
    assert not any(resident["outside_device"].values()) and resident["estimated_seconds"] > plan["estimated_seconds"]
    for more, named in (((), "needed with host=SIZE in --memory"), (("--memory", "host=10MiB"), "a larger host= in --memory, or a TMPDIR with more room: "),
                        (("--memory", "host=lots"), "--memory host= 'lots'")):
        error = train(*options, "1500MiB", *more, "--plan", code=2).stderr.decode()
        assert named in error and error.count("\n") == 1


def test_a_resumed_run_goes_on_with_the_same_bits(model, precision, tmp_path):
    work = linked(tmp_path, model)
    train = played(precision)
    whole = (*DATA, "--steps", 6, "--lr", 1e-3, "--save-every", 3, "--keep", 0)
    train(*whole, "--out", "whole", "--log", "whole.jsonl", cwd=work)
    train("--resume", "whole/step-00000003", "--out", "rest", "--log", "rest.jsonl", cwd=work)
    assert figures(read_log(work / "rest.jsonl"))[-3:] == figures(read_log(work / "whole.jsonl"))[-3:]
    assert saved_bytes(work / "rest") == saved_bytes(work / "whole")


@pytest.mark.more
def test_samples_are_those_of_the_cpu_build(model, tmp_path):
    """In fp32, always the likeliest token."""
    starting_at_0(model / "model", tmp_path / "model")
    (tmp_path / "data.bin").symlink_to(model / "data.bin")
    options = ("--model", "model", "--data", "data.bin", "--batch", 1, "--seq-len", 33, "--steps", 1, "--lr", 0,
               "--sample", "tokens=30")
    here, there = (sampled(train, *options, cwd=tmp_path) for train in (played("fp32"), on_cpu("fp32")))
    assert here == there and len(here.split()) == 30


@pytest.mark.more
def test_measuring(tmp_path):
    work = prepare(tmp_path, "gpt2", MODELS)
    small = played("bf16", GPU_MEMORY="64")  # makes the copies small that measure the rate of copies
    bench = ("--warmup", "1", "--steps", "2")
    assert b"tokens/s" in small(*DATA, "--bench", *bench, cwd=work).stdout
    assert b"matmul" in small(*DATA, "--bench", "ops", *bench, cwd=work).stdout
    train = played("bf16")
    algorithms = ("--advanced", "algorithms=algorithms.json", "--steps", 2)
    first, second = (train(*DATA, *algorithms, "--log", f"{n}.jsonl", cwd=work) for n in (1, 2))
    assert b"measuring" in first.stdout + first.stderr and b"measuring" not in second.stdout + second.stderr
    assert figures(read_log(work / "1.jsonl")) == figures(read_log(work / "2.jsonl"))


@pytest.mark.more
def test_tf32(tmp_path):
    """Other bits than fp32's, but close to them; the same again, and after a resume; and another time in the
    plan."""
    model, steps = prepare(tmp_path, "llama", MODELS), ("--steps", 4, "--lr", 1e-3, "--warmup", 2)
    exact, rounded = (logged(played("fp32"), tmp_path / name, model, *options)
                      for name, options in (("fp32", steps), ("tf32", (*steps, "--advanced", "tf32=on", "--save-every", 2, "--keep", 0))))
    assert (losses(exact[0]) != losses(rounded[0])).any()
    np.testing.assert_allclose(losses(exact[0]), losses(rounded[0]), rtol=2e-3)
    work = tmp_path / "tf32"
    played("fp32")("--resume", "out/step-00000002", "--out", "rest", "--log", "rest.jsonl", cwd=work)
    assert figures(read_log(work / "rest.jsonl"))[-2:] == figures(read_log(work / "log.jsonl"))[-2:]
    assert saved_bytes(work / "rest")["model.safetensors"] == rounded[1]["model.safetensors"]
    big = ("--model", "d12", "--batch", 4, "--seq-len", 1024, "--chunk-rows", "head=256")
    plan, faster = (played("fp32").plan(*big, *option) for option in ((), ("--advanced", "tf32=on",)))
    assert faster["estimated_seconds"] < plan["estimated_seconds"] / 2
    assert {o["name"].endswith(" tf32") for o in faster["operations"] if o["name"].startswith("matmul")} == {True}


# What cuBLASLt may have no algorithm for: epilogues, and the product itself, which a kernel then computes.
@pytest.mark.parametrize("refused", ["gelu,dgelu,bgrad", "bias,gelu,dgelu,bgrad", "plain,bias,gelu,dgelu,bgrad"])
def test_what_the_library_does_not_do_is_done_beside_it(tmp_path, refused):
    work = prepare(tmp_path, "gpt2", MODELS)
    logs = []
    for train, log in ((played("bf16", GPU_REFUSE=refused), "here.jsonl"), (on_cpu("bf16"), "there.jsonl")):
        train(*DATA, "--steps", 3, "--lr", 1e-3, "--log", log, cwd=work)
        logs.append(losses(read_log(work / log)))
    np.testing.assert_allclose(*logs, rtol=BOUND["bf16"])


def test_products_without_tensor_cores_are_named(tmp_path):
    """A line for each of three shapes, however often they occur, and one line for all others."""
    work = prepare(tmp_path, "gpt2", MODELS)
    options = (*DATA, "--batch", 1, "--seq-len", 9, "--steps", 1, "--chunk-rows", "head=0")
    assert b"cuBLASLt" not in played("bf16")(*options, cwd=work).stderr
    said = played("bf16", GPU_REFUSE="plain,bias,gelu,dgelu,bgrad")(*options, cwd=work).stderr.decode()
    lines = [line for line in said.splitlines() if "cuBLASLt" in line]
    first = r"cuBLASLt has no algorithm for the product (9 x 144 x 48 N[NT][ \w]*, bf16): a kernel makes it without tensor cores, " \
            r"at about 6 TFLOP/s, (\S+) ms each time"
    assert float(re.fullmatch(first, lines[0])[2]) == pytest.approx(2 * 9 * 144 * 48 / (108 * 60e9) * 1e3, rel=0.01)
    assert len({line for line in lines[:3] if " for the product " in line}) == 3
    assert lines[3:] == ["cuBLASLt has no algorithm for other products either"]


# Errors that a user may meet end in a line that names them, with exit code 2; bugs end with another code.
@pytest.mark.parametrize("environment, options, code, said", [
    ({"GPU_MEMORY": "1"}, (), 2, "the plan takes .* are free .the GPU.s memory"),
    ({"GPU_COUNT": "0"}, (), 2, "none answers .*the driver has CUDA 1.*make DEVICE=cpu"),
    ({"GPU_COUNT": "0", "CUDA_VISIBLE_DEVICES": "7"}, (), 2, "none answers .*CUDA_VISIBLE_DEVICES is 7"),
    ({"GPU_COUNT": "0", "GPU_COUNT_ERROR": "803"}, (), 2, "of different versions.*restart"),
    ({"GPU_DRIVER": "0"}, (), 2, "there is no NVIDIA driver here: install driver [0-9]+ or later.*make DEVICE=cpu"),
    ({"GPU_DRIVER": "11040"}, (), 2, "driver is too old: it has CUDA 11.4.* built with CUDA [0-9.]+, needs driver [0-9]+ or later: update"),
    ({}, ("--advanced", "attention=hopper"), 2, "--advanced attention=hopper is for GPUs of compute capability 9.0"),
    ({"GPU_ERROR": "46"}, (), 2, "CUDA: "),  # devices unavailable
    # Stopped by a display's watchdog.
    ({"GPU_ERROR": "702"}, (), 2, "CUDA: .* draws a screen.*WSL2: use .*--chunk-rows attention="),
    ({"GPU_ERROR": "209"}, (), 2, "CUDA: .*.compute capability 8.0.: .*make CUDA_ARCH="),  # no code for it
    ({"GPU_ERROR": "719"}, (), 1, "CUDA: "),  # a launch failed
    ({"GPU_PRODUCT_ERROR": "3"}, (), 2, "cuBLASLt: "),  # no memory
    ({"GPU_PRODUCT_ERROR": "13"}, (), 1, "cuBLASLt: "),  # execution failed
    ({"GPU_PRODUCT_ERROR": "13"}, ("--advanced", "algorithms=algorithms.json"), 2, "does none of the algorithms"),
])
def test_what_the_gpu_does_not_do_is_said(tmp_path, environment, options, code, said):
    work = prepare(tmp_path, "gpt2", {"gpt2": ("--heads", 1, "--channels", 64)})
    train = played("bf16", **environment)
    result = subprocess.run(train.command(*DATA, "--steps", 1, *options), cwd=work, env=train.environment,
                            capture_output=True, text=True, timeout=120)
    assert result.returncode == code and re.search(said, result.stderr), (result.returncode, result.stderr)


@pytest.mark.skipif(bool(subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode), reason="not allowed to mount")
def test_memory_that_a_gpu_shares_with_the_host_is_counted_once(tmp_path):
    """On a machine of 5000 MiB, what is pinned and what the GPU takes fit one by one, and not together."""
    work = prepare(tmp_path, "gpt2", {"gpt2": ("--heads", 1, "--channels", 64)})
    (tmp_path / "meminfo").write_text(f"MemTotal: {5200 << 10} kB\nMemAvailable: {5000 << 10} kB\n")
    train = played("bf16")
    line = shlex.join(map(str, train.command("--model", "d24", *DATA[2:], "--offload", "state=host", "--batch", 1, "--seq-len", 64, "--steps", 1,
                                             "--sample", "tokens=0")))
    command = ["unshare", "-m", "sh", "-c", f"mount --bind {tmp_path}/meminfo /proc/meminfo && exec {line}"]
    result = subprocess.run(command, cwd=work, env=train.environment | {"GPU_INTEGRATED": "1"}, capture_output=True, text=True, timeout=120)
    said = r"the plan pins 4\d+\.\d MiB of host memory and [\d.]+ are free \(this machine's memory, beside what the GPU takes of it\)"
    assert result.returncode == 2 and re.search(said, result.stderr), result.stderr
    process = subprocess.Popen(command, cwd=work, env=train.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for_line(process, rb"allocating")
    finally:
        process.kill()
        process.communicate()


def test_the_head_is_cut_for_the_gpu():
    """Into as many rows as the time model suggests, and its gradient into few slices."""
    plan = played("bf16", GPU="H100").plan("--model", "d12", "--batch", 64, "--seq-len", 1024)
    assert plan["head_rows"] >= 8192
    calls = {operation["name"]: operation["calls"] for operation in plan["operations"]}
    assert calls["wide_sum_add"] <= 2 * 65536 / plan["head_rows"]


def test_each_gpu_has_its_own_rates():
    """Found by its name or, if no table has that, from what it reports of itself."""
    options = ("--model", "d12", "--batch", 8, "--seq-len", 1024)
    seconds = {gpu: spent(played("bf16", GPU=gpu).plan(*options), "products") for gpu in ("A100", "4090", "5090")}
    work = [seconds[gpu] * rate for gpu, rate in zip(seconds, (312, 165, 209.6))]
    assert work == pytest.approx([work[0]] * 3, rel=0.05)
    unknown = played("bf16", GPU="5090", GPU_NAME="NVIDIA GeForce RTX 5095")
    plan = unknown.plan(*options)
    assert plan["gpu"] == "NVIDIA GeForce RTX 5095"
    assert spent(plan, "products") == pytest.approx(seconds["5090"], rel=0.01)
    said = unknown(*options, "--plan").stdout.decode()
    assert "of the GPU NVIDIA GeForce RTX 5095, computed from what it reports" in said
    assert "of the GPU RTX 5090 (" in played("bf16", GPU="5090")(*options, "--plan").stdout.decode()


def test_long_launches_of_attention_are_split_by_the_rates(tmp_path):
    """A display's watchdog would end a launch of seconds. The parts have the same bits."""
    work = prepare(tmp_path, "gpt2", {"gpt2": ("--heads", 2, "--channels", 64)})
    lines, launches = [], []
    for flops_per_second in (1e14, 1e5):
        rates = rates_of(types.SimpleNamespace(device="cpu", precision="bf16"), attention=flops_per_second)
        rates |= {"device": "cuda", "name": "NVIDIA A100 80GB PCIe"}
        del rates["threads"]
        counters, log = tmp_path / f"{flops_per_second}.txt", tmp_path / f"{flops_per_second}.jsonl"
        played("bf16", GPU_COUNTERS=str(counters))(*DATA, "--steps", 1, "--sample", "tokens=0", "--log", log,
                                                   "--rates", write(tmp_path / "rates.json", rates), cwd=work)
        lines.append(figures(read_log(log)))
        launches.append({part: kernel["launches"] for name, kernel in gpu_predicted.read_counters(counters.read_text()).items()
                         for part in ("forward", "backward_queries", "backward_keys") if f"attention_{part}_kernel" in name})
    assert lines[0] == lines[1]
    assert len(launches[0]) == 3 and all(launches[1][part] >= 4 * count for part, count in launches[0].items()), launches


def test_hoppers_attention_is_what_runs_there(tmp_path):
    """With heads 64 wide, by default, and in as much memory as the common kernels."""
    prepare(tmp_path, "gpt2", {"gpt2": ("--heads", 1, "--channels", 64)})
    logs, kernels, plans = [], [], []
    for number, options in enumerate(((), ("--advanced", "attention=common"))):
        log, counters = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.txt"
        train = played("bf16", GPU="H100", GPU_COUNTERS=str(counters))
        train(*DATA, "--steps", 3, "--lr", 1e-3, *options, "--log", log, cwd=tmp_path)
        logs.append(losses(read_log(log)))
        kernels.append("hopper_attention_backward_keys" in counters.read_text())
        plans.append(train.plan("--model", tmp_path / "model", *options)["totals"])
    np.testing.assert_allclose(logs[0], logs[1], rtol=BOUND["bf16"])
    assert kernels == [True, False] and plans[0] == plans[1]


def test_memory_is_asked_for_in_whole_sectors(tmp_path):
    """By kernels that mostly move memory; no two lanes access one bank of shared memory."""
    work = prepare(tmp_path, "qwen2", {"qwen2": ("--heads", 4, "--kv-heads", 1, "--channels", 512, "--mlp-width", 512)})
    counted = tmp_path / "counters.txt"
    played("bf16", GPU_COUNTERS=str(counted))(*DATA, "--steps", 1, "--chunk-rows", "head=22", cwd=work)
    kernels = {name: k for name, k in gpu_predicted.read_counters(counted.read_text()).items()
               if re.search("optimizer|wide_sum|rope|column_sums|norm_backward_input|norm_forward|swiglu", name)}
    assert len(kernels) >= 10
    used = {name: k["global_bytes"] / 32 / k["global_sectors"] for name, k in kernels.items()}
    passes = {name: k["shared_passes"] / k["shared_requests"] for name, k in kernels.items() if k["shared_requests"]}
    assert min(used.values()) >= 0.9, used
    assert len(passes) >= 2 and max(passes.values()) <= 1.1, passes


# A part of make test-gpu-python: what gpu-check's Python tests check of every CUDA trainer, mostly with
# plans.
GPU_CHECKS = {"test_plan": "schema or totals or batch or text or summary or none", "test_plan_table": "rows or chosen or options_for_all",
              "test_memory": "gates or holds_one_block or head_rows_differ or batch_auto or smaller_state",
              "test_closed_memory": "step_0 or lives", "test_rates": "alone or nominal", "test_json_lines": "what_the_data_are"}


@pytest.mark.parametrize("name", [name if name == "test_plan" else pytest.param(name, marks=pytest.mark.more) for name in GPU_CHECKS])
def test_gpu_checks_python_tests(name):
    binaries = " ".join(str(BUILD / f"train-{precision}") for precision in (("fp32", "bf16") if MORE else ("bf16",)))
    ran = play(sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", ROOT / "test" / f"{name}.py",
               "-k", GPU_CHECKS[name], TRAIN_BINARIES=binaries, ASAN_TRAINERS="", MORE_TESTS="1")
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-1000:]


def test_ctrl_c_saves(model, tmp_path):
    work = linked(tmp_path, model)
    with running(played("bf16"), *DATA, "--steps", 10000, "--print-every", 1, "--out", "out", cwd=work) as process:
        wait_for_line(process, rb"step +3/")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 130
    assert (work / "out" / "model.safetensors").exists()
