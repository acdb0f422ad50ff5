"""Saves that cannot be resumed or written: one line names what is wrong."""

import json
import os
import shutil

import pytest
from bad_input_models import SMALL, given, work
from safetensors.torch import load_file, save_file
from trainer_runs import GOOD, binaries, command, listing, make, refused, saved_bytes, small_disk

USUALLY = "fp32"  # see conftest.py


@pytest.fixture
def saved(work, train):
    """The folder with `out`, a save of two steps, in it."""
    train(*command({"--log": None}), cwd=work)
    return work


RESUME = {name: None for name in GOOD} | {"--steps": 4}


def test_resume_of_what_is_none(train, work):
    (work / "hollow").mkdir()
    for folder in ("hollow", "nowhere", "model", "text"):
        refused(train, work, RESUME | {"--resume": folder}, folder)


def test_resume_of_another_model(train, saved):
    make(saved / "deeper", *SMALL, "--layers", 3)
    make(saved / "fewer heads", *SMALL, "--heads", 2)
    for model in ("deeper", "fewer heads", "d2"):
        refused(train, saved, RESUME | {"--resume": "out", "--model": model}, "--resume out", model)


def test_resume_of_another_precision(train, saved):
    others = [other for other in binaries() if other.precision != train.precision]
    if not others:
        pytest.skip("TRAIN_BINARIES has one precision")
    refused(others[0], saved, RESUME | {"--resume": "out"}, "out", train.precision, others[0].precision)


@pytest.mark.parametrize("master", ["split", "none"])
def test_master_of_fp32_weights(train_fp32, work, master):
    refused(train_fp32, work, {"--state-formats master": master}, f"--state-formats master={master}", "fp32", "PRECISION=bf16")


@pytest.mark.parametrize("options", [{"--state-formats m": "8bit"}, {"--state-formats v": "bf16"}, {"--optimizer": "sgd"}], ids=str)
def test_resume_in_other_formats(train, saved, options):
    error = refused(train, saved, RESUME | {"--resume": "out"} | options, "out",
                    *(f"{name.split()[-1]}={value}" if " " in name else f"{name} {value}" for name, value in options.items()))
    assert "--optimizer adamw --state-formats master=fp32,m=fp32,v=fp32" in error


def test_resume_with_another_master(train_bf16, work):
    train_bf16(*command({"--log": None}), cwd=work)
    refused(train_bf16, work, RESUME | {"--resume": "out", "--state-formats master": "split"}, "out", "--state-formats master=split",
            "--state-formats master=fp32")


@pytest.mark.parametrize("damage, named", [
    (lambda state: state.pop("step"), "step"),
    (lambda state: state.update(step=-1), "step"),
    (lambda state: state.update(sequences="4"), "sequences"),
    (lambda state: state.update(precision="fp8"), "precision"),
    (lambda state: state.update(options=[]), "options"),
    (lambda state: state.update(formats=8), "formats"),
    (lambda state: state.update(evaluated=1), "evaluated"),
    (lambda state: state.update(others=[-1]), "others"),
    (lambda state: state.update(directory=3), "directory"),
    (lambda state: state.update(data={"--data": 3}), "data"),
    (lambda state: state["options"].update({"--batch": 3}), "--batch"),
    (lambda state: state["options"].update({"--batch": ["x"]}), "--batch"),
    (lambda state: state["options"].update({"--batch": []}), "--batch"),
], ids=["no step", "step", "sequences", "precision", "options", "formats", "evaluated", "others", "directory", "data",
        "number", "no number", "nothing"])
def test_resume_of_a_damaged_state(train, saved, damage, named):
    path = saved / "out" / "latest" / "trainer_state.json"
    state = json.loads(path.read_text())
    damage(state)
    path.write_text(json.dumps(state))
    refused(train, saved, RESUME | {"--resume": "out"}, named)


def test_resume_of_damaged_tensors(train, saved):
    path = saved / "out" / "latest" / "trainer_state.safetensors"
    tensors = load_file(path)
    path.write_bytes(path.read_bytes()[:-10])
    refused(train, saved, RESUME | {"--resume": "out"}, "trainer_state.safetensors")
    tensors.pop("v.ln_f.bias")
    save_file(tensors, path)
    refused(train, saved, RESUME | {"--resume": "out"}, "trainer_state.safetensors", "v.ln_f.bias")


def test_resume_where_data_is_gone(train, saved):
    (saved / "text").unlink()
    refused(train, saved, RESUME | {"--resume": "out"}, "--data", "text")


@pytest.mark.parametrize("options", [
    {"--log": "out/config.json"}, {"--log": "out/latest/trainer_state.json"}, {"--log": "out/step-00000002/log"},
    {"--timeline": "out/model.safetensors"}, {"--out": "out/latest/more"}, {"--out": "other", "--log": "out/.lock"},
    {"--log": "out/best"}, {"--log": "out/latest.tmp"}, {"--log": "out/config.json.tmp"}],
    ids=str)
def test_outputs_of_a_resume(train, saved, options):
    refused(train, saved, RESUME | {"--resume": "out"} | options, "part of ", *list(options.items())[-1])


LORA = {"--train": "lora", "--lora-rank": 2}


@pytest.mark.parametrize("options, said", [
    (LORA | {"--merge": "nowhere/"}, None), (LORA | {"--merge": "a/b/merged"}, None),
    (LORA | {"--merge": "text/merged"}, "--merge text/merged: cannot make the folder: Not a directory"),
    (LORA | {"--merge": "/proc/merged"}, "--merge /proc/merged: cannot make the folder: "),
    ({"--export": "/proc/x.gguf"}, "--export /proc/x.gguf: No such file"), ({"--log": "/sys/log"}, "--log /sys/log: "),
    (LORA | {"--merge": "m" * 252}, "cannot make the folder: File name too long"),
    (LORA | {"--merge": "dangling"}, "--merge dangling is there already"),
    (LORA | {"--merge": "out/step-00000002"}, "--merge out/step-00000002 is a part of out: "),
    (LORA | {"--merge": "log"}, "--merge log is --log too"),
    (LORA | {"--base": "nf4", "--save-base": "text/base"}, "--save-base text/base: cannot make the folder: Not a directory"),
    (LORA | {"--base": "nf4", "--save-base": "dangling"}, "--save-base dangling is there already"),
    (LORA | {"--base": "nf4", "--save-base": "same", "--merge": "same/"}, "is --merge too"),
    (LORA | {"--merge": "mine"}, "--merge mine: it is written as mine.tmp, and something else is there"),
    (LORA | {"--merge": "m", "--out": "m.tmp"}, "--merge m: it is written as m.tmp, which has --out"),
    (LORA | {"--merge": "m", "--out": "m.tmp/out"}, "--merge m: it is written as m.tmp, which has --out"),
    (LORA | {"--merge": "m", "--log": "m.tmp/log"}, "--log m.tmp/log: No such file"),
    (LORA | {"--merge": "m", "--log": "m.tmp"}, "--merge m: it is written as m.tmp, which has --log"),
    (LORA | {"--merge": "m", "--export": "m.tmp"}, "--merge m: it is written as m.tmp, which has --export"),
    (LORA | {"--model": "b.tmp", "--merge": "b"}, "--merge b: it is written as b.tmp, which has b.tmp"),
    (LORA | {"--model": "b.tmp", "--base": "nf4", "--save-base": "b"}, "--save-base b: it is written as b.tmp, which has b.tmp"),
], ids=str)
def test_folders_that_cannot_be_made(train_fp32, work, options, said):
    """Found before the training. A missing folder, or a slash after its name, is not a mistake."""
    (work / "dangling").symlink_to("nothing")
    (work / "mine.tmp").mkdir()
    (work / "mine.tmp" / "notes").write_text("precious")
    shutil.copytree(work / "model", work / "b.tmp")
    if said:
        refused(train_fp32, work, options, said)
    else:
        train_fp32(*command(options), cwd=work)
        assert (work / options["--merge"] / "model.safetensors").exists()


@pytest.mark.parametrize("option", ["--log", "--timeline", "--loss-by-position"])
def test_a_fifo_as_an_output(train_fp32, work, option):
    """A FIFO without a reader is not waited for. With a reader, it gets the lines."""
    os.mkfifo(work / "fifo")
    options = {"--log": None, "--val-data": "text", option: "fifo"}
    refused(train_fp32, work, options, f"{option} fifo is a FIFO that no process reads")
    with open(os.open(work / "fifo", os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        train_fp32(*command(options), cwd=work)
        assert json.loads(reader.read() if option == "--timeline" else reader.readline())


@pytest.mark.parametrize("name, said", [("fifo", " is not a regular file"), ("/dev/null", " is not a regular file"),
                                        ("text", " is there and is no file that --calibrate writes"), ("model", ": Is a directory")])
def test_a_calibration_replaces_no_other_file(train_fp32, work, name, said):
    os.mkfifo(work / "fifo")
    before = listing(work)
    error = train_fp32("--calibrate", name, cwd=work, code=2).stderr.decode()
    assert error.startswith(f"train: --calibrate {name}{said}") and error.count("\n") == 1 and listing(work) == before


@pytest.mark.parametrize("target", ["nothing", "text"])
def test_a_lock_that_is_a_link(train_fp32, work, target):
    """The file that the link leads to is neither created nor emptied."""
    (work / "out").mkdir()
    (work / "out" / ".lock").symlink_to(f"../{target}")
    refused(train_fp32, work, {}, "--out out: out/.lock is a symbolic link")


def test_a_log_on_a_full_disk(train_fp32, work):
    """The training so far is saved."""
    error = train_fp32(*command({"--log": "/dev/full"}), cwd=work, code=2).stderr.decode()
    assert error == "train: --log /dev/full: No space left on device\n" and os.readlink(work / "out" / "latest") == "step-00000001"


def test_no_room_for_a_merge(train_fp32, work):
    """Neither for as many saves as exist at once, nor for both."""
    with small_disk(work / "disk", "1m") as disk:
        (disk / "filler").write_bytes(bytes(900_000))
        refused(train_fp32, work, LORA | {"--merge": "disk/merged"}, "--merge disk/merged: the merged model takes ", "KiB")
        refused(train_fp32, work, LORA | {"--out": "disk/out", "--save-every": 1, "--steps": 3, "--lora-rank": 4},
                "--out disk/out: a save takes ", "3 of them")
        (disk / "filler").write_bytes(bytes(730_000))
        refused(train_fp32, work, LORA | {"--out": "disk/out", "--merge": "disk/merged"}, "--merge disk/merged", " of --out, ")


def test_no_room_for_the_last_good_save(train_fp32, work):
    """It stays beside the newest saves if these go bad. The run says that there would be no room for it."""
    options = LORA | {"--out": "disk/out", "--save-every": 1, "--steps": 3, "--keep": 1, "--lora-rank": 4}
    said = b"--out disk/out: if the loss goes bad, the last good save stays beside the newest: that takes "
    with small_disk(work / "disk", "1m") as disk:
        assert said not in train_fp32(*command(options), cwd=work).stdout
        save = sum(path.stat().st_size for path in (disk / "out" / "step-00000003").iterdir())
        shutil.rmtree(disk / "out")
        (disk / "filler").write_bytes(bytes((1 << 20) - int(2.7 * save) // 4096 * 4096))
        assert said in train_fp32(*command(options), cwd=work).stdout


def test_no_room_for_a_save(train, work):
    """Found before the training; an unfinished save is removed to make space."""
    with small_disk(work / "disk", "1m") as disk:
        (disk / "filler").write_bytes(bytes(700000))
        refused(train, work, {"--out": "disk/out"}, "--out disk/out: a save takes ", " KiB, and ", " KiB are free there")
        (disk / "out" / "step-00000007.tmp").mkdir(parents=True)
        (disk / "filler").rename(disk / "out" / "step-00000007.tmp" / "model.safetensors")
        train(*command({"--out": "disk/out"}), cwd=work)


def test_disk_full(train, work):
    """The save that does not fit is removed; the one before is complete, and another run can continue from
    it."""
    with small_disk(work / "disk", "2m") as disk:
        options = {"--out": "disk/out", "--save-every": 1, "--keep": 0, "--steps": 9, "--log": None}
        error = train(*command(options), cwd=work, code=2).stderr.decode()
        assert error.startswith("train: disk/out/step-") and error.count("\n") == 1 and "No space left" in error
        steps = sorted(path.name for path in (disk / "out").glob("step-*"))
        assert steps and len(steps) < 9 and os.readlink(disk / "out" / "latest") == steps[-1]
        train(*command({"--steps": len(steps), "--schedule": "cosine", "--resume": "disk/out", "--out": "elsewhere",
                        "--model": None}), cwd=work)
        assert saved_bytes(work / "elsewhere") == saved_bytes(disk / "out")
