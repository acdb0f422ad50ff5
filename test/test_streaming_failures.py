"""Streams that are interrupted: files that change, Ctrl-C, disks that fail, and disks without what streams use."""

import re
import shutil
import signal

import pytest
from model_files import DATA, linked
from streaming_models import DISK, LORA, read_steps, wide, wide4
from trainer_runs import Train, running, saved_bytes, wait_for_line

USUALLY = "bf16"  # see conftest.py


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


@pytest.mark.parametrize("train_what, where", [
    ("lora", DISK), ("lora", ("--offload", "embeddings=disk")), ("lora", ("--offload", "inputs=auto")), ("full", DISK), ("full", ("--offload", "state=disk")),
    ("full", ("--offload", "gradients=disk"))], ids=str)
def test_a_file_system_without_direct_access_is_named(train, wide, tmp_path, bad_disk, train_what, where):
    """Before the first step, and the line says what to do."""
    work = linked(tmp_path, wide)
    refusing = Train(train.path, LD_PRELOAD=str(bad_disk), BAD_DISK_DIRECT="none", TMPDIR=str(tmp_path))
    options = LORA if train_what == "lora" else DATA
    error = refusing(*options, "--steps", 1, "--out", "out", *where, cwd=work, code=2).stderr.decode()
    in_model = train_what == "lora" and where[1] != "inputs=auto"
    named = ("model/model-0", "copy it to one that can") if in_model else (where[1].split("=")[0] + "=", str(tmp_path), "TMPDIR")
    assert all(part in error for part in (*named, "past the page cache")) and error.count("\n") == 1, error
    assert not (work / "out").exists()


@pytest.mark.parametrize("train_what, where", [("lora", (*DISK, "--prefetch", 2)), ("lora", ("--offload", "inputs=auto", "--recompute", "block")),
                                               ("full", ("--offload", "state=disk", *DISK))], ids=str)
def test_a_disk_that_fails_stops_the_run_and_loses_nothing(train, wide4, tmp_path, bad_disk, train_what, where):
    """The disk fails from some moment on, in the middle of a step."""
    work = linked(tmp_path, wide4)
    failing = Train(train.path, LD_PRELOAD=str(bad_disk), BAD_DISK_FAILS=str(tmp_path / "now"))
    options = LORA if train_what == "lora" else DATA
    with running(failing, *options, "--steps", 10**6, "--save-every", 2, "--keep", 0, "--out", "out", "--sample", "tokens=0",
                 "--print-every", 1, *where, cwd=work, text=True, stderr=-1) as process:
        wait_for_line(process, r"^step +5/")
        (tmp_path / "now").touch()
        error = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 2 and error.startswith("train: "), error
    assert re.search(r"(model\S*\.safetensors: cannot read|what --offload \w+=disk keeps there cannot be (read|written)): Input/output error", error)
    assert (work / "out" / "step-00000004").exists()
    train("--resume", "out", "--steps", len(read_steps(work)) + 1, cwd=work)
