"""Weights that live in the model's files: the bits are those of weights in memory, and the memory is what is planned."""

import json
import os
import re
import shutil
import signal
import threading

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_adapters import OPTIONS, make_adapter, trained, validated
from test_bad_input import refused
from test_families import DATA, VOCAB, linked, prepare
from test_gguf import MODELS as GGUF_MODELS, write_gguf
from test_train import sampled
from trainer_runs import Train, make, random_tokens, running, saved_bytes, small_disk, wait_for_line, write_shard

FAMILIES = ("gpt2", "llama", "qwen3", "bloom")
DISK = ("--weights", "disk")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """Five layers, so that blocks come and go; of Llama in several files, of Qwen3 as halves."""
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
                                     ("--update-in-backward", "--clip-per-block", "--train", "lora", "--lora-dropout", 0.1)], ids=str)
def test_training_is_the_same_to_the_bit(train, work, options):
    assert trained(train, work, "memory", *options) == trained(train, work, "disk", *options, *DISK)


def test_validation_sampling_and_merging_are_the_same(train, work):
    options = ("--model", "model", "--adapter", "adapter")
    outcomes = []
    for where in ((), DISK):
        merged = f"merged{len(outcomes)}"
        loss = validated(train, work, *options, *where, "--merge", merged)
        outcomes.append((loss, (work / merged / "model.safetensors").read_bytes()))
    assert outcomes[0][0] == outcomes[1][0]
    tensors = [load_file(work / f"merged{i}" / "model.safetensors") for i in range(2)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    plain = [validated(train, work, "--model", "model", *where) for where in ((), DISK)]
    assert plain[0] == plain[1] != outcomes[0][0]


def test_resume_goes_on_from_the_disk(train_fp32, work):
    whole = trained(train_fp32, work, "whole")
    train_fp32(*DATA, "--adapter", "adapter", "--steps", 4, "--save-every", 2, "--keep", 0, "--out", "out", "--sample-tokens",
               0, *DISK, cwd=work)
    shutil.rmtree(work / "out" / "step-00000004")
    train_fp32("--resume", "out/step-00000002", cwd=work)
    assert saved_bytes(work / "out") == whole[1]


@pytest.mark.parametrize("base", ["nf4", "nf4-double"])
def test_a_base_in_nf4_is_lent_in_nf4(train, tmp_path, base):
    work = prepare(tmp_path, "llama", OPTIONS)
    make_adapter(work, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    train("--model", "model", "--base", base, "--steps", 0, "--save-base", "base", cwd=work)
    assert trained(train, work, "a", "--model", "base") == trained(train, work, "b", "--model", "base", *DISK)


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_a_gguf_is_lent_in_its_own_formats(train, tmp_path, name):
    config, arch = GGUF_MODELS[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    write_gguf(tmp_path / "model.gguf", model, arch)
    write_shard(tmp_path / "data.bin", random_tokens(config.vocab_size, 3000))
    options = ("--model", "model.gguf", "--train", "lora", *DATA[2:], "--steps", 3, "--sample-tokens", 0, "--log")
    for number, where in enumerate(((), DISK)):
        train(*options, f"log{number}", "--out", f"out{number}", *where, cwd=tmp_path)
    assert saved_bytes(tmp_path / "out0") == saved_bytes(tmp_path / "out1")


def test_smollm2_says_the_same(train):
    if not os.path.exists("data/smollm2"):
        pytest.skip("no data/smollm2: dev/make_smollm2.py makes it")
    options = ("--model", "data/smollm2", "--steps", 0, "--prompt", "The capital of France is", "--sample-tokens", 6)
    assert sampled(train, *options, cwd=None) == sampled(train, *options, *DISK, cwd=None)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Blocks of 3 million parameters each."""
    work = tmp_path_factory.mktemp("wide")
    make(work / "model", "--family", "llama", "--layers", 12, "--channels", 512, "--heads", 8, "--vocab", VOCAB, "--positions",
         64, "--dtype", "bf16", "--shard-size", "50MB")
    write_shard(work / "data.bin", random_tokens(VOCAB, 3000))
    return work


LORA = (*DATA, "--train", "lora", "--lora-rank", 2)


def test_two_blocks_are_in_memory_and_no_page_of_the_files(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    memory, disk = plan(train, work), plan(train, work, *DISK)
    block = (4 + 3 * 3) * 512 * 512 * 2
    rooms = [b for b in disk["buffers"] if b["name"] == "lent_block"]
    matrices = disk["elsewhere"]["on_disk"]
    assert [room["bytes"] for room in rooms] == 2 * [block] and matrices == 12 * block
    assert disk["totals"]["weights"] == memory["totals"]["weights"] - matrices * (1 if train.precision == "bf16" else 2)
    said = train(*LORA, "--steps", 2, "--sample-tokens", 0, *DISK, cwd=work).stdout.decode()
    taken, planned = map(float, re.search(r"taken from the device: ([\d.]+) MiB; planned: ([\d.]+)", said).groups())
    assert taken <= planned
    assert re.search(r"waited +[\d.]+%", said)


def plan(train, work, *options):
    return json.loads(train(*LORA, "--steps", 1, *options, "--plan", "--json", cwd=work).stdout)


def test_a_file_that_changes_stops_the_run(train, wide, tmp_path):
    shutil.copytree(wide, tmp_path, dirs_exist_ok=True)
    with running(train, *LORA, "--steps", 10**6, *DISK, "--out", "out", "--print-every", 1, cwd=tmp_path, text=True,
                 stderr=-1) as process:
        wait_for_line(process, r"^step +2/")
        file = sorted((tmp_path / "model").glob("*.safetensors"))[0]
        with open(file, "r+b") as f:
            f.seek(-1, 2)
            f.write(b"\0")
        rest = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and "was changed since it was opened" in rest and rest.count("\n") <= 2, rest


def test_a_file_that_is_removed_is_still_read(train, wide, tmp_path):
    shutil.copytree(wide, tmp_path, dirs_exist_ok=True)
    with running(train, *LORA, "--steps", 4, *DISK, "--sample-tokens", 0, "--print-every", 1, cwd=tmp_path,
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


def read_steps(work):
    done = json.loads((work / "out" / "trainer_state.json").read_text())["step"]
    return range(done)


@pytest.mark.parametrize("options, named", [
    ({"--train": None}, "not trained"),
    ({"--model": "llama:d2", "--plan": True, "--out": None, "--log": None}, "a new one"),
    ({"--base": "nf4"}, "--save-base"),
    ({"--train": None, "--steps": 0, "--data": None, "--log": None}, "--out out"),
    ({"--train": None, "--steps": 0, "--data": None, "--log": None, "--out": None, "--resume": "saved", "--prompt": "a",
      "--seq-len": None, "--batch": None}, "whole model"),
    ({"--train": None, "--steps": 0, "--data": None, "--log": None, "--out": None, "--resume": "saved", "--prompt": "a",
      "--seq-len": None, "--batch": None, "--weights": "device", "--base": "nf4"}, "whole model"),
    ({"--weights": "host"}, "--weights disk takes none"),
    ({"--weights": "tape"}, "tape")])
def test_what_cannot_be_lent_is_refused(train, tmp_path, options, named):
    prepare(tmp_path, "llama", OPTIONS)
    train(*DATA, "--steps", 1, "--sample-tokens", 0, "--out", "saved", cwd=tmp_path)
    good = {"--model": "model", "--data": "data.bin", "--train": "lora", "--weights": "disk"}
    refused(train, tmp_path, good | options, named)


@pytest.mark.parametrize("options", [(), ("--recompute", "none", "--grad-accum", 2), ("--recompute", "block"),
                                     (*DISK, "--recompute", "block:2,gelu:3")], ids=str)
@pytest.mark.parametrize("layers", [1, 4, "all"])
def test_parked_inputs_change_no_bit(train, work, options, layers):
    assert trained(train, work, "a", *options) == trained(train, work, "b", *options, "--park", layers)


@pytest.mark.parametrize("options", [(), ("--update-in-backward", "--clip-per-block")], ids=str)
def test_parking_in_full_training(train, wide, tmp_path, options):
    work = linked(tmp_path, wide)
    for name, more in (("a", ()), ("b", ("--park", "all", "--recompute", "block"))):
        train(*DATA, "--steps", 3, "--sample-tokens", 0, "--out", name, *options, *more, cwd=work)
    assert saved_bytes(work / "a") == saved_bytes(work / "b")


def test_parking_keeps_two_inputs(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    options = ("--batch", 8, "--seq-len", 64, "--recompute", "block")
    kept, parked = plan(train, work, *options), plan(train, work, *options, "--park", "all")
    one = 8 * 64 * 512 * (4 if train.precision == "fp32" else 2)
    assert kept["totals"]["activations"] - parked["totals"]["activations"] == (12 - 2) * one
    assert parked["elsewhere"]["parked"] == (12 - 2) * one


def test_parking_needs_room(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    with small_disk(tmp_path / "small", "4m") as folder:
        small = Train(train.path, TMPDIR=str(folder))
        error = small(*LORA, "--steps", 1, "--batch", 32, "--seq-len", 64, "--park", "all", cwd=work, code=2).stderr.decode()
    assert error.startswith("train: --park") and "TMPDIR" in error and error.count("\n") == 1


def test_parking_of_some_layers_is_not_chosen_for(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    error = train(*LORA, "--steps", 1, "--park", 3, "--memory", "1GiB", cwd=work, code=2).stderr.decode()
    assert "--park all" in error
    chosen = plan(train, work, "--park", "all", *DISK, "--memory", "250MiB")
    assert chosen["totals"]["total"] <= 250 << 20
