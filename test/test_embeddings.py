"""Embeddings and head that stay in the model's files: the rows and slices that are read equal those in
memory."""

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
from model_files import DATA, linked, prepare
from safetensors.torch import load_file
from trainer_runs import (make, random_tokens, read_log, refused, running, sampled, saved_bytes, taken_and_planned, wait_for_line,
                          write_shard)

USUALLY = "bf16"  # see conftest.py

VOCAB = 9001  # three slices of the head, the last one partial
SLICE = 4096
ELSEWHERE = ("--offload", "embeddings=disk")
BOUND = {"fp32": {"rel": 2e-6}, "bf16": {"rel": 4e-3}}  # slices are summed in fp32, and rounded once
FAMILIES = {"gpt2": (), "llama": ("--shard-size", "300KB"), "qwen2": ("--dtype", "fp16"), "bloom": ("--dtype", "fp32")}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """In GPT-2, Qwen2 and BLOOM one matrix is both embedding and head. Llama has two, in several files."""
    work = tmp_path_factory.mktemp(request.param)
    make(work / "model", "--family", request.param, "--layers", 3, "--vocab", VOCAB, "--positions", 64,
         "--dtype", "bf16", *OPTIONS[request.param], *FAMILIES[request.param])
    write_shard(work / "data.bin", random_tokens(VOCAB, 3000))
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM"))
    return work


@pytest.fixture
def work(folder, tmp_path):
    return linked(tmp_path, folder, "adapter")


def close(train, a, b):
    """Compares two runs' losses and norms of gradients, step by step."""
    assert len(a) == len(b) > 0
    for one, other in zip(a, b):
        assert one == pytest.approx(other, **BOUND[train.precision])


def test_training_is_the_same_but_for_the_order_of_sums(train, work):
    options = ("--chunk-rows", "head=40")
    memory, disk = trained(train, work, "a", *options)[0], trained(train, work, "b", *options, *ELSEWHERE)[0]
    close(train, memory, disk)


@pytest.mark.parametrize("options", [("--recompute", "block"), ("--recompute", "none", "--offload", "weights=disk"),
                                     ("--offload", "inputs=auto"), ("--threads", 1)], ids=str)
def test_other_options_change_no_bit(train, work, options):
    assert trained(train, work, "a", *ELSEWHERE) == trained(train, work, "b", *ELSEWHERE, *options)


def test_micro_batches_that_go_together(train, work):
    options = (*ELSEWHERE, "--grad-accum", 3, "--offload", "weights=disk")
    assert trained(train, work, "a", *options) == trained(train, work, "b", *options, "--by-block")


def test_validation_and_merging_are_the_same(train, work):
    losses, merged = [], []
    for i, where in enumerate(((), ELSEWHERE, (*ELSEWHERE, "--offload", "weights=disk"))):
        losses.append(validated(train, work, "--model", "model", "--adapter", "adapter", *where, "--merge", f"merged{i}"))
        merged.append(load_file(work / f"merged{i}" / "model.safetensors"))
    assert losses[1] == losses[2] == pytest.approx(losses[0], **BOUND[train.precision])
    for tensors in merged[1:]:
        assert tensors.keys() == merged[0].keys()
        assert all(torch.equal(tensors[name], merged[0][name]) for name in tensors)
    whole = validated(train, work, "--model", "merged1")
    assert whole == pytest.approx(losses[0], **BOUND[train.precision])


def test_a_soft_prompt_begins_as_the_same_rows(train, work):
    """BLOOM's embedding norm reads the rows again in backward."""
    logs = []
    for name, where in (("a", ()), ("b", ELSEWHERE)):
        train(*DATA, "--train", "prompt", "--soft-prompt", 5, "--seq-len", 30, "--steps", 3, "--lr", 0.01, "--log", f"{name}.log",
              "--sample", "tokens=0", "--out", name, *where, cwd=work)
        logs.append([(line["loss"], line["grad_norm"]) for line in read_log(work / f"{name}.log") if "loss" in line])
        begun = f"begun-{name}"
        train(*DATA, "--train", "prompt", "--soft-prompt", 5, "--seq-len", 30, "--steps", 1, "--lr", 0, "--weight-decay", 0,
              "--sample", "tokens=0", "--out", begun, *where, cwd=work)
    close(train, *logs)
    first = [load_file(next((work / f"begun-{name}").rglob("adapter_model.safetensors"))) for name in "ab"]
    assert all(torch.equal(first[0][key], first[1][key]) for key in first[0])


def test_resume_goes_on_there(train_fp32, work):
    whole = trained(train_fp32, work, "whole", *ELSEWHERE)
    train_fp32(*DATA, "--adapter", "adapter", "--steps", 4, "--save-every", 2, "--keep", 0, "--out", "out", "--sample", "tokens=0",
               *ELSEWHERE, cwd=work)
    shutil.rmtree(work / "out" / "step-00000004")
    train_fp32("--resume", "out/step-00000002", cwd=work)
    assert saved_bytes(work / "out") == whole[1]


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_those_of_a_gguf_are_read_in_their_own_formats(train, tmp_path, name):
    config, arch = GGUF_MODELS[name]
    torch.manual_seed(1)
    write_gguf(tmp_path / "model.gguf", transformers.AutoModelForCausalLM.from_config(config), arch)
    write_shard(tmp_path / "data.bin", random_tokens(config.vocab_size, 3000))
    logs = []
    for kind, more in (("lora", ()), ("prompt", ("--soft-prompt", 3))):
        for number, where in enumerate(((), ELSEWHERE, (*ELSEWHERE, "--offload", "weights=disk"))):
            log = f"{kind}{number}.log"
            train("--model", "model.gguf", "--train", kind, *more, *DATA[2:6], "--seq-len", 30, "--steps", 3, "--sample", "tokens=0",
                  "--log", log, *where, cwd=tmp_path)
            logs.append([(line["loss"], line["grad_norm"]) for line in read_log(tmp_path / log) if "loss" in line])
        memory, disk, all_on_disk = logs[-3:]
        assert disk == all_on_disk
        close(train, memory, disk)


def test_a_base_in_nf4_has_its_embeddings_elsewhere(train, tmp_path):
    work = prepare(tmp_path, "llama", OPTIONS)
    make_adapter(work, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    train("--model", "model", "--base", "nf4", "--steps", 0, "--save-base", "base", cwd=work)
    memory = trained(train, work, "a", "--model", "base")[0]
    close(train, memory, trained(train, work, "b", "--model", "base", *ELSEWHERE)[0])
    close(train, memory, trained(train, work, "c", "--base", "nf4", *ELSEWHERE)[0])


def test_smollm2_says_the_same(train):
    if not os.path.exists("data/smollm2"):
        pytest.skip("no data/smollm2: dev/make_smollm2.py makes it")
    options = ("--model", "data/smollm2", "--steps", 0, "--prompt", "The capital of France is", "--sample", "tokens=6")
    said = sampled(train, *options, cwd=None)
    assert said == sampled(train, *options, *ELSEWHERE, cwd=None)


LORA = (*DATA, "--train", "lora", "--lora-rank", 2)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    work = tmp_path_factory.mktemp("wide")
    make(work / "model", "--family", "llama", "--layers", 2, "--channels", 512, "--heads", 8, "--vocab", VOCAB, "--positions", 64,
         "--dtype", "bf16")
    write_shard(work / "data.bin", random_tokens(VOCAB, 3000))
    return work


def plan(train, work, *options):
    return json.loads(train(*LORA, "--steps", 1, *options, "--plan", "json", cwd=work).stdout)


def test_two_slices_are_in_memory_and_rows_that_are_used(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    memory, disk = plan(train, work), plan(train, work, *ELSEWHERE)
    row, width = 512 * 2, 512 * (4 if train.precision == "fp32" else 2)
    assert [b["bytes"] for b in disk["buffers"] if b["name"] == "streamed_vocabulary"] == 2 * [SLICE * row]
    assert disk["outside_device"]["on_disk"] == 2 * VOCAB * row
    padded = -(-VOCAB // 128) * 128  # rows of a matrix that is both, or of the embedding
    weights = [next(b["bytes"] for b in report["buffers"] if b["name"] == "weights") for report in (memory, disk)]
    assert 2 * VOCAB * width <= weights[0] - weights[1] <= 2 * (padded + 1) * width
    said = train(*LORA, "--steps", 2, "--sample", "tokens=0", *ELSEWHERE, cwd=work).stdout.decode()
    taken, planned = taken_and_planned(said)
    assert taken <= planned
    assert re.search(r"waited +[\d.]+%", said)


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_is_read(train, wide, tmp_path, chunks):
    """The head's slices are read upwards and downwards in the vocabulary; the last ones are still there at
    each turn."""
    work = linked(tmp_path, wide)
    bench = train(*LORA, *ELSEWHERE, "--chunk-rows", f"head={111 // chunks}", "--bench", "json", "--steps", "1", "--warmup", "0", cwd=work)
    row, last = 512 * 2, VOCAB - 2 * SLICE
    rows = 3 * 37 + 2 * SLICE + last + SLICE + (chunks - 1) * (last + SLICE)
    assert json.loads(bench.stdout)["links"]["disk_read"]["bytes"] == rows * row


def test_memory_moves_them_where_that_is_needed(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    error = train(*LORA, "--steps", 1, "--memory", "1MiB", "--plan", cwd=work, code=2).stderr.decode()
    assert "embeddings=disk" in error
    least = float(re.search(r"the least that this takes is ([\d.]+) MiB", error).group(1))
    budget = f"{least + 1:.1f}MiB"
    chosen = plan(train, work, "--memory", budget)
    assert "embeddings=disk" in chosen["choice"][0]["placements"] and chosen["outside_device"]["on_disk"] >= 2 * VOCAB * 512 * 2
    said = train(*LORA, "--steps", 2, "--memory", budget, "--sample", "tokens=0", "--out", "out", cwd=work).stdout.decode()
    taken, planned = taken_and_planned(said)
    assert taken <= planned <= least + 1.05
    saved = json.loads((work / "out" / "trainer_state.json").read_text())["options"]
    assert saved["--offload.embeddings"] == ["disk"]
    refused_here = train(*LORA, "--steps", 1, "--offload", "embeddings=device", "--memory", budget, "--plan", cwd=work, code=2)
    assert b"embeddings=" not in refused_here.stderr.split(b"(")[1].split(b")")[0]


@pytest.mark.parametrize("change", ["written to", "cut", "removed"])
def test_a_file_that_changes_while_it_is_read(train, wide, tmp_path, change):
    """The run stops with one line. A file that was deleted can still be read."""
    shutil.copytree(wide, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model" / "model.safetensors"
    with running(train, *LORA, "--steps", 10**6, *ELSEWHERE, "--sample", "tokens=0", "--print-every", 1, cwd=tmp_path, text=True,
                 stderr=-1) as process:
        wait_for_line(process, r"^step +2/")
        if change == "written to":
            with open(file, "r+b") as f:
                f.seek(-1, 2)
                f.write(b"\0")
        elif change == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            file.unlink()
            for _ in range(3):
                wait_for_line(process, r"^step +\d+/")
            process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    if change == "removed":
        assert process.returncode == 130
    else:
        assert process.returncode == 2 and f"{file.name} was changed since it was opened" in error and error.count("\n") <= 2, error


@pytest.mark.parametrize("options, named", [
    ({"--train": None}, "frozen"),
    ({"--offload embeddings": "host"}, "embeddings=disk takes none"),
    ({"--offload embeddings": "tape"}, "tape"),
    ({"--base head": "nf4"}, "--base head=nf4"),
    ({"--base": "nf4", "--save-base": "base"}, "--save-base"),
    ({"--model": "llama:d2", "--plan": True, "--out": None, "--log": None}, "a new model"),
    ({"--train": None, "--steps": 0, "--data": None, "--log": None}, "--out out"),
    ({"--train": None, "--steps": 0, "--data": None, "--log": None, "--out": None, "--resume": "saved", "--prompt": "a",
      "--seq-len": None, "--batch": None}, "whole model")])
def test_what_cannot_live_there_is_refused(train, tmp_path, options, named):
    if train.device == "cuda" and "takes none" in named:
        pytest.skip("a GPU has a host")
    prepare(tmp_path, "llama", OPTIONS)
    train(*DATA, "--steps", 1, "--sample", "tokens=0", "--out", "saved", cwd=tmp_path)
    good = {"--model": "model", "--data": "data.bin", "--train": "lora", "--offload embeddings": "disk"}
    refused(train, tmp_path, good | options, named)
