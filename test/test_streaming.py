"""Weights streamed from the model's files: the bits are those of weights in memory, and the memory is as
planned."""

import json
import os
import re
import shutil
import signal

import peft
import pytest
import torch
import transformers
from adapter_files import OPTIONS, make_adapter, trained, validated
from gguf_files import MODELS as GGUF_MODELS, write_gguf
from model_files import DATA, VOCAB, linked, prepare
from safetensors.torch import load_file
from streaming_models import DISK, LORA, folder, plan, wide, wide4, work
from trainer_runs import (cached_bytes, drop_from_cache, random_tokens, refused, running, sampled, saved_bytes, taken_and_planned,
                          wait_for_line, write_shard)

USUALLY = "bf16"  # see conftest.py


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


def test_two_blocks_are_in_memory_and_no_page_of_the_files(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    files = list((work / "model").glob("*.safetensors"))
    drop_from_cache(*files)
    memory, disk = plan(train, work), plan(train, work, *DISK)
    block = (4 + 3 * 3) * 512 * 512 * 2
    rooms = [b for b in disk["buffers"] if b["name"] == "streamed_block"]
    matrices = disk["outside_device"]["on_disk"]
    assert [room["bytes"] for room in rooms] == 2 * [block] and matrices == 12 * block
    assert disk["totals"]["weights"] == memory["totals"]["weights"] - matrices * (1 if train.precision == "bf16" else 2)
    said = train(*LORA, "--steps", 2, "--sample", "tokens=0", *DISK, cwd=work).stdout.decode()
    taken, planned = taken_and_planned(said)
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
    assert [b["bytes"] for b in report["buffers"] if b["name"] == "streamed_block"] == 2 * [block]
    assert json.loads(bench.stdout)["links"]["disk_read"]["bytes"] == 22 * block


@pytest.mark.parametrize("ahead", [0, 2, 4])
def test_blocks_may_come_from_farther_ahead(train, wide, tmp_path, ahead):
    """Each prefetched block has a slot, and when backward begins, the blocks in slots are still there. The
    run takes the plan's memory and moves the plan's bytes."""
    work = linked(tmp_path, wide)
    block = (4 + 3 * 3) * 512 * 512 * 2
    where = (*DISK, "--prefetch", ahead)
    rooms = [b["bytes"] for b in plan(train, work, *where)["buffers"] if b["name"] == "streamed_block"]
    assert rooms == (ahead + 1) * [block]
    bench = train(*LORA[2:], "--model", "model", *where, "--bench", "json", "--steps", "1", "--warmup", "0", cwd=work)
    assert json.loads(bench.stdout)["links"]["disk_read"]["bytes"] == (24 - ahead - 1) * block
    said = train(*LORA, "--steps", 2, "--sample", "tokens=0", *where, cwd=work).stdout.decode()
    taken, planned = taken_and_planned(said)
    assert taken <= planned


@pytest.mark.parametrize("ahead", [0, 2, 9])
def test_how_far_ahead_blocks_come_changes_no_bit(train, work, ahead):
    """Also where all micro-batches pass a block before the next."""
    for i, options in enumerate(((), ("--recompute", "block:2,none:3", "--grad-accum", 2, "--by-block"))):
        memory = trained(train, work, f"memory{i}", *options)
        assert trained(train, work, f"disk{i}", *options, *DISK, "--prefetch", ahead) == memory, options


@pytest.mark.parametrize("options, named", [
    ({"--train": None, "--offload weights": "host"}, "weights=disk takes none"),
    ({"--train": None, "--offload weights": "device", "--offload state": "host"}, "state=disk takes none"),
    ({"--train": None, "--offload weights": "device", "--offload gradients": "host"}, "gradients=disk takes none"),
    ({"--offload gradients": "disk"}, "trained whole"),
    ({"--offload updates": "host"}, "is for a GPU's host"),
    ({"--model": "llama:d2", "--plan": True, "--out": None, "--log": None}, "a new model"),
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
    if train.device == "cuda" and ("takes none" in named or "GPU's host" in named):
        pytest.skip("a GPU has a host")
    prepare(tmp_path, "llama", OPTIONS)
    train(*DATA, "--steps", 1, "--sample", "tokens=0", "--out", "saved", cwd=tmp_path)
    good = {"--model": "model", "--data": "data.bin", "--train": "lora", "--offload weights": "disk"}
    refused(train, tmp_path, good | options, named)
