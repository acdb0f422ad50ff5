"""Full training with weights, gradients and optimizer state on the disk has the bits of a training in memory, and the
memory that is planned."""

import json
import re
import shutil

import pytest
from adapter_files import OPTIONS, trained
from model_files import DATA, linked, prepare
from streaming_models import ALL, DISK, ELSEWHERE, FAMILIES, GRADIENTS, folder, full_plan, read_steps, wide, wide4, work
from trainer_runs import Train, nameless_files, running, saved_bytes, small_disk, taken_and_planned, wait_for_line

USUALLY = "bf16"  # see conftest.py

FORMATS = {"fp32": ((), ("--state-formats", "m=8bit,v=bf16"), ("--optimizer", "sgd")),
           "bf16": ((), ("--state-formats", "master=split,m=8bit,v=8bit"), ("--state-formats", "master=none", "--optimizer", "sgd"))}


IN_BACKWARD = ("--update-in-backward", "--recompute", "block")


@pytest.mark.parametrize("formats, order", [
    (0, ("--grad-accum", 2)), (1, IN_BACKWARD), (2, ("--grad-accum", 2)),
    *(pytest.param(*case, marks=pytest.mark.more) for case in ((0, IN_BACKWARD), (1, ("--grad-accum", 2)), (2, IN_BACKWARD)))], ids=str)
def test_full_training_with_its_state_on_the_disk_is_the_same_to_the_bit(train, wide4, tmp_path, formats, order):
    """Blocks have 12 chunks, which pass through a ring more than once."""
    work = linked(tmp_path, wide4)
    options = (*FORMATS[train.precision][formats], *order)
    for i, where in enumerate(((), *ELSEWHERE)):
        train(*DATA, "--steps", 3, "--sample", "tokens=0", "--out", f"out{i}", *options, *where, cwd=work)
    expected = saved_bytes(work / "out0")
    for i in range(1, 4):
        assert saved_bytes(work / f"out{i}") == expected, ELSEWHERE[i - 1]


@pytest.mark.parametrize("options", [(), pytest.param(("--grad-accum", 3), marks=pytest.mark.more), ("--grad-accum", 3, "--by-block", "--recompute", "block"),
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
    assert [b["bytes"] for b in disk["buffers"] if b["name"] == "streamed_gradients"] == 2 * [sectors + 4096]
    assert device["totals"]["gradients"] - disk["totals"]["gradients"] == 12 * block
    assert disk["outside_device"]["working_file"] == 12 * sectors
    for options, named in ((("--update-in-backward", "--clip", 0), ": with --update-in-backward "),
                           (("--train", "lora"), " is for a model that is trained whole\n")):
        error = train(*DATA, "--steps", 1, *GRADIENTS, *options, "--plan", cwd=work, code=2).stderr.decode()
        assert error.startswith(f"train: --offload gradients=disk{named}") and error.count("\n") == 1


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
    rooms = [b["bytes"] for b in disk["buffers"] if b["name"] == "streamed_block"]
    assert rooms == 2 * [(parameters * width + 4095) // 4096 * 4096 + 4096]
    assert disk["totals"]["optimizer_m"] == disk["totals"]["optimizer_v"] == disk["totals"]["master"] == 0
    assert device["totals"]["weights"] - disk["totals"]["weights"] == 12 * parameters * width
    chunk = (1 << 18) * (8 if train.precision == "fp32" else 12)
    in_backward = full_plan(train, work, *ELSEWHERE[2], "--update-in-backward")
    ring = [b["bytes"] for b in in_backward["buffers"] if b["name"] == "streamed_state"]
    assert ring == 32 * [chunk + 4096]
    working = disk["outside_device"]["working_file"]
    assert working >= 12 * parameters * (width + chunk // (1 << 18))
    said = train(*DATA, "--steps", 2, "--sample", "tokens=0", *ELSEWHERE[2], cwd=work).stdout.decode()
    taken, planned = taken_and_planned(said)
    assert taken <= planned and re.search(r"waited +[\d.]+%", said)


@pytest.mark.parametrize("where", [ELSEWHERE[2], (*GRADIENTS, "--offload", "inputs=auto"), ("--offload", "state=disk", "--state-formats", "m=8bit", "--offload", "inputs=auto:2")], ids=str)
def test_the_files_of_a_run_are_those_of_its_plan(train, wide4, tmp_path, where):
    """To the byte, measured from outside; and the run says so."""
    work = linked(tmp_path, wide4)
    planned = full_plan(train, work, *where)["outside_device"]
    planned = planned["working_file"] + planned["offloaded"]
    with running(train, *DATA, "--steps", 10**6, "--sample", "tokens=0", *where, cwd=work, text=True) as process:
        said = wait_for_line(process, "^taken in files")
        assert sum(file.stat().st_size for file in nameless_files(process)) == planned > 0
    assert said == f"taken in files: {planned / 2**20:.1f} MiB; planned: {planned / 2**20:.1f} MiB\n"


@pytest.mark.parametrize("where", (*ELSEWHERE[:2], GRADIENTS))
def test_a_working_file_needs_room(train, wide, tmp_path, where):
    work = linked(tmp_path, wide)
    with small_disk(tmp_path / "small", "4m") as folder:
        small = Train(train.path, TMPDIR=str(folder))
        error = small(*DATA, "--steps", 1, *where, "--out", "out", cwd=work, code=2).stderr.decode()
    assert error.startswith(f"train: --offload {where[1].split(',')[0]}: ") and "TMPDIR" in error and error.count("\n") == 1
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


@pytest.mark.parametrize("where", [(), pytest.param(("--offload", "inputs=auto"), marks=pytest.mark.more), ("--offload", "inputs=auto:2", *ELSEWHERE[2])], ids=str)
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
