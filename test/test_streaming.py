"""Weights streamed from the model's files: the bits are those of weights in memory, and the memory is as
planned."""

import ctypes
import errno
import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import threading

import peft
import pytest
import test_rates
import torch
import transformers
from safetensors.torch import load_file
from test_adapters import OPTIONS, make_adapter, trained, validated
from test_bad_input import refused
from test_families import DATA, VOCAB, linked, prepare
from test_gguf import MODELS as GGUF_MODELS, write_gguf
from test_train import sampled
from trainer_runs import (Train, cached_bytes, drop_from_cache, make, random_tokens, running, saved_bytes, small_disk, wait_for_line,
                          write_shard)

USUALLY = "bf16"  # see conftest.py

FAMILIES = ("gpt2", "llama", "qwen3", "bloom")
DISK = ("--offload", "weights=disk")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """Five layers, so that blocks come and go; of Llama in several files, of Qwen3 in fp16."""
    work = tmp_path_factory.mktemp(request.param)
    more = {"llama": ("--shard-size", "20KB"), "qwen3": ("--dtype", "fp16"), "bloom": ("--dtype", "fp32")}
    make(work / "model", "--family", request.param, "--layers", 5, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16",
         *OPTIONS[request.param], *more.get(request.param, ()))
    write_shard(work / "data.bin", random_tokens(VOCAB, 3000))
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM"))
    return work


@pytest.fixture
def work(folder, tmp_path):
    return linked(tmp_path, folder, "adapter")


@pytest.mark.parametrize("options", [(), ("--recompute", "none", "--grad-accum", 2), ("--recompute", "block", "--threads", 1),
                                     ("--update-in-backward", "--train", "lora", "--lora-dropout", 0.1)], ids=str)
def test_training_is_the_same_to_the_bit(train, work, options):
    memory = trained(train, work, "memory", *options)
    assert memory == trained(train, work, "disk", *options, *DISK)


def test_validation_sampling_and_merging_are_the_same(train, work):
    options = ("--model", "model", "--adapter", "adapter")
    outcomes = []
    for where in ((), DISK):
        merged = f"merged{len(outcomes)}"
        loss = validated(train, work, *options, *where, "--merge", merged)
        outcomes.append((loss, (work / merged / "model.safetensors").read_bytes()))
    assert outcomes[0][0] == outcomes[1][0]
    in_memory, streamed = [load_file(work / f"merged{i}" / "model.safetensors") for i in range(2)]
    assert streamed.keys() == in_memory.keys() and all(torch.equal(streamed[name], in_memory[name]) for name in streamed)
    plain = [validated(train, work, "--model", "model", *where) for where in ((), DISK)]
    assert plain[0] == plain[1] != outcomes[0][0]


def test_resume_goes_on_from_the_disk(train_fp32, work):
    whole = trained(train_fp32, work, "whole")
    train_fp32(*DATA, "--adapter", "adapter", "--steps", 4, "--save-every", 2, "--keep", 0, "--out", "out", "--sample", "tokens=0", *DISK, cwd=work)
    shutil.rmtree(work / "out" / "step-00000004")
    train_fp32("--resume", "out/step-00000002", cwd=work)
    assert saved_bytes(work / "out") == whole[1]


@pytest.mark.parametrize("base", ["nf4", "nf4-double"])
def test_a_base_in_nf4_is_lent_in_nf4(train, tmp_path, base):
    work = prepare(tmp_path, "llama", OPTIONS)
    make_adapter(work, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    train("--model", "model", "--base", base, "--steps", 0, "--save-base", "base", cwd=work)
    memory = trained(train, work, "a", "--model", "base")
    assert memory == trained(train, work, "b", "--model", "base", *DISK)


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_a_gguf_is_lent_in_its_own_formats(train, tmp_path, name):
    config, arch = GGUF_MODELS[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    write_gguf(tmp_path / "model.gguf", model, arch)
    write_shard(tmp_path / "data.bin", random_tokens(config.vocab_size, 3000))
    options = ("--model", "model.gguf", "--train", "lora", *DATA[2:], "--steps", 3, "--sample", "tokens=0", "--log")
    for number, where in enumerate(((), DISK)):
        train(*options, f"log{number}", "--out", f"out{number}", *where, cwd=tmp_path)
    assert saved_bytes(tmp_path / "out0") == saved_bytes(tmp_path / "out1")


def test_smollm2_says_the_same(train):
    if not os.path.exists("data/smollm2"):
        pytest.skip("no data/smollm2: dev/make_smollm2.py makes it")
    options = ("--model", "data/smollm2", "--steps", 0, "--prompt", "The capital of France is", "--sample", "tokens=6")
    said = sampled(train, *options, cwd=None)
    assert said == sampled(train, *options, *DISK, cwd=None)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Twelve blocks of 3 million parameters each."""
    return make_wide(tmp_path_factory.mktemp("wide"), 12)


@pytest.fixture(scope="module")
def wide4(tmp_path_factory):
    """Four of these blocks, for runs that save: 48 chunks of state, more than a ring has slots."""
    return make_wide(tmp_path_factory.mktemp("wide4"), 4)


def make_wide(work, layers):
    make(work / "model", "--family", "llama", "--layers", layers, "--channels", 512, "--heads", 8, "--vocab", VOCAB,
         "--positions", 64, "--dtype", "bf16", "--shard-size", "50MB")
    write_shard(work / "data.bin", random_tokens(VOCAB, 3000))
    return work


LORA = (*DATA, "--train", "lora", "--lora-rank", 2)


def test_two_blocks_are_in_memory_and_no_page_of_the_files(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    files = list((work / "model").glob("*.safetensors"))
    drop_from_cache(*files)
    memory, disk = plan(train, work), plan(train, work, *DISK)
    block = (4 + 3 * 3) * 512 * 512 * 2
    rooms = [b for b in disk["buffers"] if b["name"] == "lent_block"]
    matrices = disk["elsewhere"]["on_disk"]
    assert [room["bytes"] for room in rooms] == 2 * [block] and matrices == 12 * block
    assert disk["totals"]["weights"] == memory["totals"]["weights"] - matrices * (1 if train.precision == "bf16" else 2)
    said = train(*LORA, "--steps", 2, "--sample", "tokens=0", *DISK, cwd=work).stdout.decode()
    taken, planned = map(float, re.search(r"taken from the device: ([\d.]+) MiB; planned: ([\d.]+)", said).groups())
    assert taken <= planned
    assert re.search(r"waited +[\d.]+%", said)
    assert sum(file.stat().st_size for file in files) > matrices and cached_bytes(*files) == 0


@pytest.mark.parametrize("where", [(), DISK, ("--offload", "state=disk")], ids=str)
def test_what_is_loaded_and_saved_leaves_the_page_cache(train, wide4, tmp_path, where):
    """Checked while the run continues, with files of 27 MB and more."""
    work = linked(tmp_path, wide4)
    model = list((work / "model").glob("*.safetensors"))
    options = (*DATA, "--warmup", 30, "--steps", 10**6, "--out", "out", "--sample", "tokens=0", "--print-every", 1, *where)
    drop_from_cache(*model)
    with running(train, *options, cwd=work, text=True) as process:
        wait_for_line(process, r"^step +1/")
        assert cached_bytes(*model) <= 1 << 20
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    saved = list((work / "out" / "latest").resolve().glob("*.safetensors"))
    assert sum(file.stat().st_size for file in saved) > 150 << 20 and cached_bytes(*saved) == 0
    with running(train, "--resume", "out", cwd=work, text=True) as process:
        wait_for_line(process, r"^step +\d+/")
        assert cached_bytes(*saved) <= 1 << 20


def test_a_gguf_that_is_loaded_leaves_the_page_cache(train, tmp_path):
    config = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
                                      num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64)
    write_gguf(tmp_path / "model.gguf", transformers.AutoModelForCausalLM.from_config(config), "llama")
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 3000))
    drop_from_cache(tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").stat().st_size > 20 << 20
    with running(train, "--model", "model.gguf", "--train", "lora", *DATA[2:], "--steps", 10**6, "--sample", "tokens=0", "--print-every", 1,
                 cwd=tmp_path, text=True) as process:
        wait_for_line(process, r"^step +1/")
        assert cached_bytes(tmp_path / "model.gguf") == 0


@pytest.mark.parametrize("recompute, order", [("none", ()), ("block", ()), ("block:6,none:6", ()), ("block", ("--by-block",)),
                                              ("attention", ("--by-block",))])
def test_blocks_have_two_rooms(train, wide, tmp_path, recompute, order):
    """And at the turn of a step the two in them are not read again."""
    work = linked(tmp_path, wide)
    options = ("--recompute", recompute, *(("--grad-accum", 3, *order) if order else ()), *DISK)
    report = plan(train, work, *options)
    bench = train(*LORA[2:], "--model", "model", *options, "--bench", "json", "--steps", "1", "--warmup", "0", cwd=work)
    block = (4 + 3 * 3) * 512 * 512 * 2
    assert [b["bytes"] for b in report["buffers"] if b["name"] == "lent_block"] == 2 * [block]
    assert json.loads(bench.stdout)["links"]["disk_read"]["bytes"] == 22 * block


@pytest.mark.parametrize("ahead", [0, 2, 4])
def test_blocks_may_come_from_farther_ahead(train, wide, tmp_path, ahead):
    """Each prefetched block has a slot, and when backward begins, the blocks in slots are still there. The
    run takes the plan's memory and moves the plan's bytes."""
    work = linked(tmp_path, wide)
    block = (4 + 3 * 3) * 512 * 512 * 2
    where = (*DISK, "--prefetch", ahead)
    rooms = [b["bytes"] for b in plan(train, work, *where)["buffers"] if b["name"] == "lent_block"]
    assert rooms == (ahead + 1) * [block]
    bench = train(*LORA[2:], "--model", "model", *where, "--bench", "json", "--steps", "1", "--warmup", "0", cwd=work)
    assert json.loads(bench.stdout)["links"]["disk_read"]["bytes"] == (24 - ahead - 1) * block
    said = train(*LORA, "--steps", 2, "--sample", "tokens=0", *where, cwd=work).stdout.decode()
    taken, planned = map(float, re.search(r"taken from the device: ([\d.]+) MiB; planned: ([\d.]+)", said).groups())
    assert taken <= planned


@pytest.mark.parametrize("ahead", [0, 2, 9])
def test_how_far_ahead_blocks_come_changes_no_bit(train, work, ahead):
    """Also where all micro-batches pass a block before the next."""
    for i, options in enumerate(((), ("--recompute", "block:2,none:3", "--grad-accum", 2, "--by-block"))):
        memory = trained(train, work, f"memory{i}", *options)
        assert trained(train, work, f"disk{i}", *options, *DISK, "--prefetch", ahead) == memory, options


def plan(train, work, *options):
    return json.loads(train(*LORA, "--steps", 1, *options, "--plan", "json", cwd=work).stdout)


@pytest.mark.parametrize("change", ["written to", "cut"])
def test_a_file_that_changes_stops_the_run(train, wide, tmp_path, change):
    shutil.copytree(wide, tmp_path, dirs_exist_ok=True)
    with running(train, *LORA, "--steps", 10**6, *DISK, "--out", "out", "--print-every", 1, cwd=tmp_path, text=True,
                 stderr=-1) as process:
        wait_for_line(process, r"^step +2/")
        file = sorted((tmp_path / "model").glob("*.safetensors"))[0]
        with open(file, "r+b") as f:
            f.seek(-1, 2)
            f.write(b"\0") if change == "written to" else f.truncate(file.stat().st_size // 2)
        rest = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "was changed since it was opened" in rest and rest.count("\n") <= 2, rest


def test_a_file_that_is_removed_is_still_read(train, wide, tmp_path):
    shutil.copytree(wide, tmp_path, dirs_exist_ok=True)
    with running(train, *LORA, "--steps", 4, *DISK, "--sample", "tokens=0", "--print-every", 1, cwd=tmp_path,
                 text=True) as process:
        wait_for_line(process, r"^step +1/")
        shutil.rmtree(tmp_path / "model")
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "step     4/4" in said


def test_ctrl_c_saves(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    with running(train, *LORA, "--steps", 10**6, *DISK, "--out", "out", "--print-every", 1, cwd=work, text=True) as process:
        wait_for_line(process, r"^step +2/")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    train("--resume", "out", "--steps", len(read_steps(work)) + 1, cwd=work)


@pytest.mark.parametrize("where", [("--offload", "state=disk"), ("--offload", "state=disk", *DISK, "--offload", "gradients=disk,inputs=auto")], ids=str)
def test_ctrl_c_saves_what_lives_on_the_disk(train, wide4, tmp_path, where):
    """The run continues from there with the bits of one that was never stopped."""
    work = linked(tmp_path, wide4)
    options = (*DATA, "--schedule", "constant", "--sample", "tokens=0")
    with running(train, *options, *where, "--steps", 10**6, "--out", "out", "--print-every", 1, cwd=work, text=True) as process:
        wait_for_line(process, r"^step +2/")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    done = len(read_steps(work))
    train("--resume", "out", "--steps", done + 2, cwd=work)
    train(*options, "--steps", done + 2, "--out", "whole", cwd=work)
    assert done >= 2 and saved_bytes(work / "out") == saved_bytes(work / "whole")


def read_steps(work):
    done = json.loads((work / "out" / "trainer_state.json").read_text())["step"]
    return range(done)


def refuse_io_uring(error=errno.EPERM):
    """Makes the kernel answer this process's io_uring_setup with an error: EPERM, as in a container, or
    ENOMEM, as older kernels do if locked memory is limited."""
    class Filter(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("if_true", ctypes.c_ubyte), ("if_false", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.POINTER(Filter))]

    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    filters = (Filter * 4)((load, 0, 0, 0), (jump_if_equal, 0, 1, 425), (answer, 0, 0, 0x50000 | error),
                           (answer, 0, 0, 0x7fff0000))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp = 38, 22
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(seccomp, 2, ctypes.byref(Program(4, filters)), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def lock_no_memory():
    """Like ulimit -l 0 for a user who is not root; root's CAP_IPC_LOCK has no limit."""
    ipc_lock, drop_from_bounding_set = 14, 24
    ctypes.CDLL(None).prctl(drop_from_bounding_set, ipc_lock, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))


def test_without_io_uring_the_bits_are_the_same(train, wide, tmp_path):
    """Threads are used instead, decided at run time. For some kernels a limit on locked memory limits
    rings."""
    work = linked(tmp_path, wide)
    options = (*LORA, "--steps", 3, *DISK, "--offload", "inputs=auto,state=disk", "--sample", "tokens=0", "--print-every", 1)
    setting = pathlib.Path("/proc/sys/kernel/io_uring_disabled")
    allowed = setting.exists() and setting.read_text().strip() == "0"
    rings = []
    for name, before in (("ring", None), ("threads", refuse_io_uring), ("memory", lambda: refuse_io_uring(errno.ENOMEM)),
                         ("limit", lock_no_memory)):
        with running(train, *options, "--out", name, cwd=work, text=True, preexec_fn=before) as process:
            wait_for_line(process, r"^step +1/")
            files = pathlib.Path(f"/proc/{process.pid}/fd")
            rings.append(sum("[io_uring]" in os.readlink(file) for file in files.iterdir()))
            limits = pathlib.Path(f"/proc/{process.pid}/limits").read_text()
            assert (name == "limit") == bool(re.search(r"Max locked memory +0 +0", limits))
            process.communicate(timeout=60)
        assert process.returncode == 0
    # For the model's files, for its state, for offloaded inputs.
    assert rings[1] == rings[2] == 0 and (rings[0] == 3 or not allowed)
    assert saved_bytes(work / "ring") == saved_bytes(work / "threads") == saved_bytes(work / "memory") == saved_bytes(work / "limit")


@pytest.mark.parametrize("train_what, where", [
    ("lora", DISK), ("lora", ("--offload", "embeddings=disk")), ("lora", ("--offload", "inputs=auto")), ("full", DISK), ("full", ("--offload", "state=disk")),
    ("full", ("--offload", "gradients=disk"))], ids=str)
def test_a_file_system_without_direct_access_is_named(train, wide, tmp_path, bad_disk, train_what, where):
    """Before the first step, and the line says what to do."""
    work = linked(tmp_path, wide)
    refusing = Train(train.path, LD_PRELOAD=str(bad_disk), BAD_DISK_DIRECT="none", TMPDIR=str(tmp_path))
    options = LORA if train_what == "lora" else DATA
    error = refusing(*options, "--steps", 1, "--out", "out", *where, cwd=work, code=2).stderr.decode()
    in_model = train_what == "lora" and not where[1].startswith("inputs")
    named = ("model/model-0", "copy it to one that can") if in_model else (where[0], str(tmp_path), "TMPDIR")
    assert all(part in error for part in (*named, "past the page cache")) and error.count("\n") == 1, error
    assert not (work / "out").exists()


@pytest.mark.parametrize("ring", ["ring", "threads"])
@pytest.mark.parametrize("train_what, where", [("lora", (*DISK, "--prefetch", 2)), ("lora", ("--offload", "inputs=auto", "--recompute", "block")),
                                               ("full", ("--offload", "state=disk", *DISK))], ids=str)
def test_a_disk_that_fails_stops_the_run_and_loses_nothing(train, wide4, tmp_path, bad_disk, train_what, where, ring):
    """The disk fails from some moment on, in the middle of a step."""
    work = linked(tmp_path, wide4)
    failing = Train(train.path, LD_PRELOAD=str(bad_disk), BAD_DISK_FAILS=str(tmp_path / "now"),
                    **({"BAD_DISK_RING": "none"} if ring == "threads" else {}))
    options = LORA if train_what == "lora" else DATA
    with running(failing, *options, "--steps", 10**6, "--save-every", 2, "--keep", 0, "--out", "out", "--sample", "tokens=0",
                 "--print-every", 1, *where, cwd=work, text=True, stderr=-1) as process:
        wait_for_line(process, r"^step +5/")
        (tmp_path / "now").touch()
        error = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 2 and error.startswith("train: "), error
    assert re.search(r"(model\S*\.safetensors: cannot read|what --\w+( disk)? keeps there cannot be (read|written)): Input/output error", error)
    assert (work / "out" / "step-00000004").exists()
    train("--resume", "out", "--steps", len(read_steps(work)) + 1, cwd=work)


@pytest.mark.parametrize("options, named", [
    ({"--train": None, "--offload weights": "host"}, "weights=disk takes none"),
    ({"--train": None, "--offload weights": "device", "--offload state": "host"}, "state=disk takes none"),
    ({"--train": None, "--offload weights": "device", "--offload gradients": "host"}, "gradients=disk takes none"),
    ({"--offload gradients": "disk"}, "trained whole"),
    ({"--offload updates": "host"}, "is for a GPU's host"),
    ({"--model": "llama:d2", "--plan": True, "--out": None, "--log": None}, "a new one"),
    ({"--base": "nf4"}, "--save-base"),
    ({"--train": None, "--steps": 0, "--data": None, "--log": None}, "--out out"),
    ({"--train": None, "--steps": 0, "--data": None, "--log": None, "--out": None, "--resume": "saved", "--prompt": "a",
      "--seq-len": None, "--batch": None}, "whole model"),
    ({"--train": None, "--steps": 0, "--data": None, "--log": None, "--out": None, "--resume": "saved", "--prompt": "a",
      "--seq-len": None, "--batch": None, "--offload weights": "device", "--base": "nf4"}, "whole model"),
    ({"--offload weights": "host"}, "weights=disk takes none"),
    ({"--offload weights": "device", "--prefetch": 2}, "--offload weights=disk"),
    ({"--prefetch": -1}, "--prefetch"),
    ({"--offload weights": "tape"}, "tape")])
def test_what_cannot_be_lent_is_refused(train, tmp_path, options, named):
    prepare(tmp_path, "llama", OPTIONS)
    train(*DATA, "--steps", 1, "--sample", "tokens=0", "--out", "saved", cwd=tmp_path)
    good = {"--model": "model", "--data": "data.bin", "--train": "lora", "--offload weights": "disk"}
    refused(train, tmp_path, good | options, named)


@pytest.mark.parametrize("options", [(), ("--recompute", "none", "--grad-accum", 2), ("--recompute", "block"),
                                     (*DISK, "--recompute", "block:2,gelu:3")], ids=str)
@pytest.mark.parametrize("layers", [1, 4, "all"])
def test_parked_inputs_change_no_bit(train, work, options, layers):
    assert trained(train, work, "a", *options) == trained(train, work, "b", *options, "--offload", f"inputs=auto:{layers}")


@pytest.mark.parametrize("options", [(), ("--update-in-backward",)], ids=str)
def test_parking_in_full_training(train, wide4, tmp_path, options):
    work = linked(tmp_path, wide4)
    for name, more in (("a", ()), ("b", ("--offload", "inputs=auto", "--recompute", "block"))):
        train(*DATA, "--steps", 3, "--sample", "tokens=0", "--out", name, *options, *more, cwd=work)
    assert saved_bytes(work / "a") == saved_bytes(work / "b")


def test_parking_keeps_two_inputs(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    options = ("--batch", 8, "--seq-len", 64, "--recompute", "block")
    kept, parked = plan(train, work, *options), plan(train, work, *options, "--offload", "inputs=auto")
    one = 8 * 64 * 512 * (4 if train.precision == "fp32" else 2)
    assert one % 4096 == 0  # otherwise a sector would be partly used
    assert kept["totals"]["activations"] - parked["totals"]["activations"] == (12 - 2) * one - 2 * 4096
    assert parked["elsewhere"]["parked"] == (12 - 2) * one


def test_parking_needs_room(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    with small_disk(tmp_path / "small", "4m") as folder:
        small = Train(train.path, TMPDIR=str(folder))
        error = small(*LORA, "--steps", 1, "--batch", 32, "--seq-len", 64, "--offload", "inputs=auto", cwd=work, code=2).stderr.decode()
    assert error.startswith("train: --offload inputs=") and "TMPDIR" in error and error.count("\n") == 1


def test_parking_of_some_layers_is_not_chosen_for(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    error = train(*LORA, "--steps", 1, "--offload", "inputs=auto:3", "--memory", "1GiB", cwd=work, code=2).stderr.decode()
    assert "--offload inputs=auto" in error
    chosen = plan(train, work, "--offload", "inputs=auto", *DISK, "--memory", "250MiB")
    assert chosen["totals"]["total"] <= 250 << 20


ELSEWHERE = (("--offload", "state=disk"), DISK, ("--offload", "state=disk", *DISK))
FORMATS = {"fp32": ((), ("--state-formats", "m=8bit,v=bf16"), ("--optimizer", "sgd")),
           "bf16": ((), ("--state-formats", "master=split,m=8bit,v=8bit"), ("--state-formats", "master=none", "--optimizer", "sgd"))}


@pytest.mark.parametrize("formats", range(3))
@pytest.mark.parametrize("order", [("--grad-accum", 2), ("--update-in-backward", "--recompute", "block")], ids=str)
def test_full_training_with_its_state_on_the_disk_is_the_same_to_the_bit(train, wide4, tmp_path, formats, order):
    """Blocks have 12 chunks, which pass through a ring more than once."""
    work = linked(tmp_path, wide4)
    options = (*FORMATS[train.precision][formats], *order)
    for i, where in enumerate(((), *ELSEWHERE)):
        train(*DATA, "--steps", 3, "--sample", "tokens=0", "--out", f"out{i}", *options, *where, cwd=work)
    expected = saved_bytes(work / "out0")
    for i in range(1, 4):
        assert saved_bytes(work / f"out{i}") == expected, ELSEWHERE[i - 1]


GRADIENTS = ("--offload", "gradients=disk")
ALL = (*GRADIENTS, *ELSEWHERE[2], "--offload", "inputs=auto")


@pytest.mark.parametrize("options", [(), ("--grad-accum", 3), ("--grad-accum", 3, "--by-block", "--recompute", "block"),
                                     ("--grad-accum", 2, "--advanced", "clip=block"), ("--optimizer", "sgd", "--clip", 0)], ids=str)
def test_gradients_on_the_disk_are_the_same_to_the_bit(train, wide4, tmp_path, options):
    """So are their norm and the loss."""
    work = linked(tmp_path, wide4)
    steps = []
    for i, where in enumerate(((), GRADIENTS, ALL)):
        train(*DATA, "--steps", 3, "--sample", "tokens=0", "--out", f"out{i}", "--log", f"log{i}", *options, *where, cwd=work)
        steps.append([(line["loss"], line["grad_norm"]) for line in map(json.loads, (work / f"log{i}").read_text().splitlines())
                      if "grad_norm" in line])
    assert saved_bytes(work / "out0") == saved_bytes(work / "out1") == saved_bytes(work / "out2")
    assert len(steps[0]) == 3 and steps[0] == steps[1] == steps[2]


def test_two_blocks_have_gradients_in_memory(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    device, disk = (full_plan(train, work, *where) for where in ((), GRADIENTS))
    block = ((4 + 3 * 3) * 512 * 512 + 2 * 512) * (4 if train.precision == "fp32" else 2)
    sectors = (block + 4095) // 4096 * 4096
    assert [b["bytes"] for b in disk["buffers"] if b["name"] == "lent_gradients"] == 2 * [sectors + 4096]
    assert device["totals"]["gradients"] - disk["totals"]["gradients"] == 12 * block
    assert disk["elsewhere"]["working_file"] == 12 * sectors
    for options, named in ((("--update-in-backward", "--clip", 0), "--update-in-backward"), (("--train", "lora"), "trained whole")):
        error = train(*DATA, "--steps", 1, *GRADIENTS, *options, "--plan", cwd=work, code=2).stderr.decode()
        assert error.startswith("train: --offload gradients=disk: ") and named in error and error.count("\n") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_from_the_disk(train, tmp_path, family):
    """With any prefetch distance."""
    work = prepare(tmp_path, family, OPTIONS)
    in_backward = ("--update-in-backward",)
    for options, elsewhere in ((("--grad-accum", 2), ALL), (in_backward, ELSEWHERE[2])):
        train(*DATA, "--steps", 3, "--sample", "tokens=0", "--out", "memory", *options, cwd=work)
        for ahead in (0, 1, 2):
            train(*DATA, "--steps", 3, "--sample", "tokens=0", "--out", "disk", *options, *elsewhere, "--prefetch", ahead, cwd=work)
            assert saved_bytes(work / "disk") == saved_bytes(work / "memory"), (options, ahead)
            shutil.rmtree(work / "disk")
        shutil.rmtree(work / "memory")


def test_a_new_model_and_an_adapter_with_its_state_on_the_disk(train, work):
    options = ("--data", "data.bin", "--batch", 2, "--seq-len", 16, "--steps", 3, "--sample", "tokens=0")
    for i, where in enumerate(((), ELSEWHERE[2])):
        train("--model", "qwen3:d2", *options, "--out", f"new{i}", *where, cwd=work)
    assert saved_bytes(work / "new0") == saved_bytes(work / "new1")
    assert trained(train, work, "a") == trained(train, work, "b", *ELSEWHERE[2])


def test_resume_wherever_the_state_lives(train, wide4, tmp_path):
    work = linked(tmp_path, wide4)
    train(*DATA, "--steps", 4, "--sample", "tokens=0", "--out", "whole", cwd=work)
    rooms = ("--offload", "inputs=auto,state=disk:block")
    train(*DATA, "--steps", 2, "--warmup", 30, "--sample", "tokens=0", "--out", "half", *ELSEWHERE[2], *rooms, cwd=work)
    shutil.copytree(work / "half", work / "other", symlinks=True)
    train("--resume", "half", "--steps", 4, cwd=work)
    train("--resume", "other", "--steps", 4, "--offload", "weights=device,state=device", cwd=work)
    assert saved_bytes(work / "half") == saved_bytes(work / "other")


def test_two_blocks_and_a_ring_are_in_memory(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    device, disk = (full_plan(train, work, *where) for where in ((), ELSEWHERE[2]))
    width = 4 if train.precision == "fp32" else 2
    parameters = (4 + 3 * 3) * 512 * 512 + 2 * 512
    rooms = [b["bytes"] for b in disk["buffers"] if b["name"] == "lent_block"]
    assert rooms == 2 * [(parameters * width + 4095) // 4096 * 4096 + 4096]
    assert disk["totals"]["optimizer_m"] == disk["totals"]["optimizer_v"] == disk["totals"]["master"] == 0
    assert device["totals"]["weights"] - disk["totals"]["weights"] == 12 * parameters * width
    chunk = (1 << 18) * (8 if train.precision == "fp32" else 12)
    in_backward = full_plan(train, work, *ELSEWHERE[2], "--update-in-backward")
    ring = [b["bytes"] for b in in_backward["buffers"] if b["name"] == "state_room"]
    assert ring == 32 * [chunk + 4096]
    working = disk["elsewhere"]["working_file"]
    assert working >= 12 * parameters * (width + chunk // (1 << 18))
    said = train(*DATA, "--steps", 2, "--sample", "tokens=0", *ELSEWHERE[2], cwd=work).stdout.decode()
    taken, planned = map(float, re.search(r"taken from the device: ([\d.]+) MiB; planned: ([\d.]+)", said).groups())
    assert taken <= planned and re.search(r"waited +[\d.]+%", said)


@pytest.mark.parametrize("where", [ELSEWHERE[2], (*GRADIENTS, "--offload", "inputs=auto"), ("--offload", "state=disk", "--state-formats", "m=8bit", "--offload", "inputs=auto:2")], ids=str)
def test_the_files_of_a_run_are_those_of_its_plan(train, wide4, tmp_path, where):
    """To the byte, measured from outside; and the run says so."""
    work = linked(tmp_path, wide4)
    planned = full_plan(train, work, *where)["elsewhere"]
    planned = planned["working_file"] + planned["parked"]
    with running(train, *DATA, "--steps", 10**6, "--sample", "tokens=0", *where, cwd=work, text=True) as process:
        said = wait_for_line(process, "^taken in files")
        files = [file for file in pathlib.Path(f"/proc/{process.pid}/fd").iterdir() if "/train-" in os.readlink(file)]
        assert sum(file.stat().st_size for file in files) == planned > 0
    assert said == f"taken in files: {planned / 2**20:.1f} MiB; planned: {planned / 2**20:.1f} MiB\n"


def full_plan(train, work, *options):
    return json.loads(train(*DATA, "--steps", 1, *options, "--plan", "json", cwd=work).stdout)


@pytest.mark.parametrize("where", (*ELSEWHERE[:2], GRADIENTS))
def test_a_working_file_needs_room(train, wide, tmp_path, where):
    work = linked(tmp_path, wide)
    with small_disk(tmp_path / "small", "4m") as folder:
        small = Train(train.path, TMPDIR=str(folder))
        error = small(*DATA, "--steps", 1, *where, "--out", "out", cwd=work, code=2).stderr.decode()
    assert error.startswith(f"train: {where[0]} {where[1]}") and "TMPDIR" in error and error.count("\n") == 1
    assert not (work / "out" / "latest").exists()


def test_kill_leaves_the_last_save_and_the_checkpoint(train, wide4, tmp_path):
    work = linked(tmp_path, wide4)
    before = {f: f.read_bytes() for f in (work / "model").iterdir()}
    with running(train, *DATA, "--steps", 10**6, *ALL, "--out", "out", "--save-every", 2, "--sample", "tokens=0",
                 "--print-every", 1, cwd=work, text=True) as process:
        wait_for_line(process, r"^step +5/")
        process.kill()
        process.communicate(timeout=60)
    assert {f: f.read_bytes() for f in (work / "model").iterdir()} == before
    train("--resume", "out", "--steps", len(read_steps(work)) + 1, cwd=work)


ACCUMULATED = ("--grad-accum", 3, "--recompute", "gelu:2,block:3")


@pytest.mark.parametrize("where", [(), ("--offload", "inputs=auto"), ("--offload", "inputs=auto:2", *ELSEWHERE[2])], ids=str)
def test_all_micro_batches_of_a_block_before_the_next(train, wide4, tmp_path, where):
    """With a head of its own: a tied head's gradients are added in another order."""
    work = linked(tmp_path, wide4)
    for order in ((), ("--advanced", "clip=block",)):
        options = ("--grad-accum", 3, "--recompute", "gelu:2,block:2", "--steps", 3, "--sample", "tokens=0", *order)
        train(*DATA, *options, "--out", "a", "--log", "a.jsonl", cwd=work)
        together = ("--by-block", *(("--update-in-backward",) if order else ()))
        train(*DATA, *options, *together, *where, "--out", "b", "--log", "b.jsonl", cwd=work)
        assert saved_bytes(work / "a") == saved_bytes(work / "b")
        shutil.rmtree(work / "a"), shutil.rmtree(work / "b")


@pytest.mark.parametrize("where", [(), DISK, (*DISK, "--offload", "inputs=auto")], ids=str)
def test_all_micro_batches_of_a_frozen_block_before_the_next(train, work, where):
    options = (*ACCUMULATED, "--train", "lora", "--lora-dropout", 0.1)
    assert trained(train, work, "a", *options) == trained(train, work, "b", *options, "--by-block", *where)


def test_dropout_and_packed_examples_by_block(train, tmp_path):
    """With tied embeddings: the same except for rounding."""
    work = prepare(tmp_path, "gpt2", OPTIONS)
    lines = [{"prompt": "to be" * (i % 5 + 1), "completion": " or not to be" * (i % 3 + 1)} for i in range(60)]
    (work / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--model", "d2", "--data", "data.jsonl", "--batch", 2, "--seq-len", 96, "--grad-accum", 3, "--dropout", 0.2, "--steps", 3,
               "--sample", "tokens=0")
    logs = []
    for order in ((), ("--by-block",)):
        train(*options, *order, "--log", f"log{len(order)}", cwd=work)
        logs.append([json.loads(line)["loss"] for line in (work / f"log{len(order)}").read_text().splitlines() if "grad_norm" in line])
    assert logs[0] == pytest.approx(logs[1], rel=1e-6 if train.precision == "fp32" else 1e-3) and logs[0][0] == logs[1][0]


def test_a_block_is_read_once_a_step_by_block(train, wide, tmp_path):
    """In the plan: a second micro-batch only adds its batch and its inputs."""
    work = linked(tmp_path, wide)
    options = ("--recompute", "block", "--update-in-backward")
    one, three = full_plan(train, work, *options), full_plan(train, work, *options, "--grad-accum", 3, "--by-block")
    assert three["totals"]["gradients"] == one["totals"]["gradients"] == 0
    assert three["totals"]["input"] == 3 * one["totals"]["input"]
    stream = 3 * 37 * 512 * (4 if train.precision == "fp32" else 2)
    more = three["totals"]["activations"] - one["totals"]["activations"]
    assert 2 * 12 * stream <= more <= 2 * 14 * (stream + 256)
    error = train(*DATA, "--steps", 1, *options, "--grad-accum", 3, "--plan", cwd=work, code=2).stderr.decode()
    assert "--by-block" in error


# ---- --memory chooses placements

RESIDENT = ("--offload", "weights=device,gradients=device,state=device,inputs=device")
# With these options no other micro-batch is possible.
ONE = ("--data", "data.bin", "--model", "model", "--batch", 1, "--seq-len", 37, "--sample", "tokens=0")
KINDS = {"full": (), "adapter": ("--train", "lora", "--lora-rank", 2), "consumed": ("--update-in-backward", "--clip", 0)}


def least(train, work, *options):
    """The smallest budget, in MiB."""
    error = train(*options, "--memory", "1MiB", "--plan", cwd=work, code=2).stderr.decode()
    assert error.count("\n") == 1, error
    return float(re.search(r"the least that this takes is ([\d.]+) MiB", error)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_below_what_is_resident_moves_it(train, wide4, tmp_path, kind):
    """The plan says what moves, the run takes that memory, and no bit changes. With a budget for everything,
    nothing moves."""
    work = linked(tmp_path, wide4)
    options = (*ONE, *KINDS[kind], "--steps", 2)
    resident, few = least(train, work, *options, *RESIDENT), least(train, work, *options)
    assert few < resident - 4
    train(*options, "--out", "resident", cwd=work)
    for i, share in enumerate((0, 0.5, 1)):
        budget = ("--memory", f"{few + 0.1 + share * (resident - 1 - few):.1f}MiB")
        chosen = json.loads(train(*options, *budget, "--plan", "json", cwd=work).stdout)
        moved = chosen["choice"][0]["residences"]
        assert "disk" in moved or "inputs=" in moved
        assert any(chosen["elsewhere"].values()) and chosen["choice"][0]["bytes"] == chosen["totals"]["total"]
        said = train(*options, *budget, "--out", f"out{i}", cwd=work).stdout.decode()
        taken, planned = map(float, re.search(r"taken from the device: ([\d.]+) MiB; planned: ([\d.]+)", said).groups())
        assert moved in said and taken <= planned <= float(budget[1][:-3]) + 0.05
        assert saved_bytes(work / f"out{i}") == saved_bytes(work / "resident")
    roomy = json.loads(train(*options, "--memory", f"{resident + 0.1:.1f}MiB", "--plan", "json", cwd=work).stdout)
    assert roomy["choice"][0]["residences"] == "" and not any(roomy["elsewhere"].values())


def test_memory_chooses_how_far_ahead_blocks_come(train, wide, tmp_path):
    """0 if nothing else fits; many if the disk is slower than computing, so that blocks are still there when
    backward begins."""
    work = linked(tmp_path, wide)
    options = (*ONE, *KINDS["adapter"], "--steps", 2, "--offload", "weights=disk,embeddings=device")
    few, two_rooms = least(train, work, *options), least(train, work, *options, "--prefetch", 1)
    assert few < two_rooms - 3
    train(*options, "--out", "out1", cwd=work)
    slow = test_rates.write(tmp_path / "slow", test_rates.rates_of(train, transfers=1e8))
    fast = test_rates.write(tmp_path / "fast", test_rates.rates_of(train, transfers=1e15))
    for budget, rates, ahead in ((few + 0.1, fast, 0), (two_rooms + 200, fast, 1), (two_rooms + 200, slow, 16), (two_rooms + 12, slow, 2)):
        command = (*options, "--memory", f"{budget:.1f}MiB")
        chosen = json.loads(train(*command, "--rates", rates, "--plan", "json", cwd=work).stdout)
        said = re.search(r"--prefetch (\d+)", chosen["choice"][0]["residences"])
        assert (int(said[1]) if said else 1) == ahead
        assert sum(b["name"] == "lent_block" for b in chosen["buffers"]) == min(ahead + 1, 12)
        asked = json.loads(train(*command, "--prefetch", ahead, "--rates", rates, "--plan", "json", cwd=work).stdout)
        assert asked["totals"] == chosen["totals"]
        train(*command, "--rates", rates, "--out", f"out{ahead}", cwd=work)
        assert saved_bytes(work / f"out{ahead}") == saved_bytes(work / "out1"), ahead
        saved = json.loads((work / f"out{ahead}" / "trainer_state.json").read_text())["options"]
        assert saved.get("--prefetch", ["1"]) == [str(ahead)]


def test_the_state_may_have_other_rooms(train, wide4, tmp_path):
    """The bits are the same. A block has as many slots as chunks, which are fetched while it is computed."""
    work = linked(tmp_path, wide4)
    options = (*ONE, "--steps", 2, "--update-in-backward", "--offload", "weights=disk")
    plans = {}
    for rooms in (32, 1, 5, "block"):
        train(*options, "--offload", f"state=disk:{rooms}", "--out", f"out{rooms}", "--sample", "tokens=0", cwd=work)
        plans[rooms] = json.loads(train(*options, "--offload", f"state=disk:{rooms}", "--plan", "json", cwd=work).stdout)
        assert saved_bytes(work / f"out{rooms}") == saved_bytes(work / "out32"), rooms
    count = {rooms: sum(b["name"] == "state_room" for b in plan["buffers"]) for rooms, plan in plans.items()}
    block = (4 + 3 * 3) * 512 * 512 + 2 * 512
    assert count == {32: 32, 1: 1, 5: 5, "block": -(-block // (1 << 18))} and count["block"] != 32
    error = train(*ONE, "--steps", 2, "--offload", "state=device:5", cwd=work, code=2).stderr.decode()
    assert "--offload state" in error and error.count("\n") == 1


MIXES = (("device",), ("disk",), ("device", "embeddings=disk"), ("disk", "embeddings=disk"))


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_the_fastest_mix_that_fits_is_chosen(train, wide4, tmp_path, kind):
    """Among all configurations that can be given by hand, by their own estimates. An adapter needs no larger
    micro-batch for its blocks to be read once."""
    work = linked(tmp_path, wide4)
    # With a larger prefetch distance, all four blocks would stay.
    options = (*ONE, "--grad-accum", 4, "--prefetch", 1, *KINDS[kind], "--steps", 1)
    resident, few = least(train, work, *options, *RESIDENT), least(train, work, *options)
    together = 0
    for share in (0.02, 0.3, 0.6, 0.95):
        budget = ("--memory", f"{few + share * (resident - few):.1f}MiB")
        chosen = json.loads(train(*options, *budget, "--plan", "json", cwd=work).stdout)
        by_hand = []
        for weights, gradients, state, park, order in itertools.product(MIXES, ("device", "disk"), ("device", "disk"), ("device", "auto"),
                                                                        ((), ("--by-block",))):
            where = ("--offload", f"weights={','.join(weights)},gradients={gradients},state={state},inputs={park}", *order)
            stay = weights[0] == gradients == "device"
            if kind == "adapter" and "disk" in (gradients, state) or order and stay or kind == "full" and len(weights) > 1:
                continue
            command = train.command(*options, *budget, *where, "--plan", "json")
            planned = subprocess.run(command, cwd=work, env=train.environment, capture_output=True)
            if planned.returncode == 0:
                by_hand.append(json.loads(planned.stdout)["estimated_seconds"])
        assert min(by_hand) * 0.98 <= chosen["estimated_seconds"] <= min(by_hand) * 1.05, (share, by_hand)
        together += "--by-block" in chosen["choice"][0]["residences"]
    assert together or kind == "full"


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_resumed_run_has_what_was_chosen(train, wide4, tmp_path, kind):
    work = linked(tmp_path, wide4)
    options = (*ONE, *KINDS[kind], "--schedule", "constant")
    budget = f"{least(train, work, *options) + 0.1:.1f}MiB"
    train(*options, "--steps", 4, "--out", "whole", cwd=work)
    train(*options, "--steps", 2, "--memory", budget, "--out", "out", cwd=work)
    chosen = json.loads(train(*options, "--steps", 2, "--memory", budget, "--plan", "json", cwd=work).stdout)
    saved = json.loads((work / "out" / "trainer_state.json").read_text())["options"]
    assert "--memory" not in saved and saved["--offload.weights"] == ["disk"]
    resumed = json.loads(train("--resume", "out", "--steps", 4, "--plan", "json", cwd=work).stdout)
    assert resumed["elsewhere"] == chosen["elsewhere"] and resumed["totals"] == chosen["totals"]
    anew = json.loads(train("--resume", "out", "--steps", 4, "--memory", "8GiB", "--plan", "json", cwd=work).stdout)
    assert not any(anew["elsewhere"].values())
    train("--resume", "out", "--steps", 4, cwd=work)
    assert saved_bytes(work / "out") == saved_bytes(work / "whole")
    assert b"validation loss" in train("--resume", "out", "--steps", 0, "--val-data", "data.bin", cwd=work).stdout


def test_a_full_disk_is_not_chosen(train, wide4, tmp_path):
    """The line names the folder that is full."""
    work = linked(tmp_path, wide4)
    options = (*ONE, "--steps", 1)
    enough = least(train, work, *options) + 20
    train(*options, "--memory", f"{enough:.1f}MiB", "--plan", cwd=work)
    with small_disk(tmp_path / "small", "4m") as folder:
        small = Train(train.path, TMPDIR=str(folder))
        error = small(*options, "--memory", f"{enough:.1f}MiB", "--plan", cwd=work, code=2).stderr.decode()
    assert "--offload state=disk" not in error and f"TMPDIR with room: {folder}" in error and error.count("\n") == 1
