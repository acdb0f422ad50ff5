"""Saves in everyday use: shared, moved and read while a run writes them; signals, requeued jobs, changed
data."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time

import pytest
from trainer_runs import (figures, listing, make, read_log, running, saved_bytes, small_disk, wait_for_line,
                          write_text)
from transformers import AutoModelForCausalLM

USUALLY = "fp32"  # see conftest.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("given")
    make(path / "model", "--layers", 2, "--heads", 3, "--channels", 48, "--positions", 64)
    write_text(path / "text")
    return path


@pytest.fixture
def work(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


RUN = ("--model", "model", "--data", "text", "--batch", 2, "--seq-len", 24, "--schedule", "constant",
       "--sample", "tokens=0")
FOREVER = (*RUN, "--steps", 100000)


def state(out):
    return json.loads((out / "trainer_state.json").read_text())


def change_state(out, change):
    """Rewrites the save's trainer_state.json after change(state)."""
    changed = state(out)
    change(changed)
    (out / "trainer_state.json").write_text(json.dumps(changed))


def test_a_save_that_is_gone(train, work):
    """The message names the saves that are left."""
    train(*RUN, "--steps", 4, "--save-every", 1, "--keep", 2, "--out", "out", cwd=work)

    def refused(folder):
        return train("--resume", folder, "--steps", 9, cwd=work, code=2).stderr.decode()

    left = ", ".join(sorted(path.name for path in (work / "out").glob("step-*")))
    assert left.endswith("step-00000003, step-00000004") and "step-00000001" not in left
    for gone in ("out/step-00000001", "out/step-00000001/"):
        assert refused(gone) == f"train: {gone}: there is no such folder; out has {left}\n"
    assert refused("nowhere/step-00000001") == "train: nowhere/step-00000001: there is no such folder\n"
    for step in range(11, 21):
        (work / "out" / f"step-{step:08}").mkdir()
    assert re.search(r"out has 1[234] saves from step-0000000\d to step-00000020$", refused("out/step-00000001"))


# ---- one run per folder


def test_one_run_at_a_time_saves_in_a_folder(train, work):
    """The second run reports it and trains nothing. If the first is killed, its folder is free at once."""
    with running(train, *FOREVER, "--save-every", 1, "--out", "out", cwd=work) as process:
        wait_for_line(process, rb"^saved step 2 ")
        error = train(*RUN, "--steps", 1, "--log", "log", "--out", "./out/", cwd=work, code=2).stderr.decode()
        assert error.count("\n") == 1 and "--out ./out/: another run saves there" in error
        assert f"process {process.pid} on " in error and not (work / "log").exists()
        assert process.poll() is None
        AutoModelForCausalLM.from_pretrained(work / "out" / "latest")
        process.kill()
    step = state(work / "out")["step"]
    AutoModelForCausalLM.from_pretrained(work / "out")
    train("--resume", "out", "--steps", step + 1, "--save-every", 0, cwd=work)
    train(*RUN, "--steps", step + 1, "--out", "whole", cwd=work)
    assert saved_bytes(work / "out") == saved_bytes(work / "whole")
    assert ".lock" not in os.listdir(work / "out")


def test_the_next_run_waits_for_one_that_ends(train, work):
    """It continues from what the other run saved last."""
    with running(train, *FOREVER, "--out", "out", "--grad-accum", 4, cwd=work) as first:
        wait_for_line(first, rb"^step +1/")
        with running(train, *FOREVER, "--out", "out", "--grad-accum", 4, "--resume", "auto", cwd=work) as second:
            time.sleep(0.5)
            first.terminate()
            saved = int(re.search(rb"saved step (\d+)", first.stdout.read())[1])
            assert wait_for_line(second, rb"^(resuming|--resume auto)") == b"resuming out at step %d\n" % saved


@pytest.mark.parametrize("options", [("--model", "out"), ("--resume", "out")], ids=str)
def test_reading_where_a_run_saves(train, work, options):
    """Each save is removed once the next exists. Two are made while the reader is stopped, wherever it is."""
    def latest():
        return os.readlink(work / "out" / "latest")

    reader = (*options, "--steps", 0, "--prompt", "a", "--sample", "tokens=2", "--data", "text")
    random.seed(train.precision)
    with running(train, *FOREVER, "--save-every", 1, "--keep", 1, "--out", "out", cwd=work, stdout=None) as process:
        while not (work / "out" / "latest").exists():
            time.sleep(0.01)
        start = time.monotonic()
        train(*reader, cwd=work)
        duration = time.monotonic() - start
        for _ in range(20):
            with running(train, *reader, cwd=work) as reading:
                time.sleep(random.uniform(0, duration))
                reading.send_signal(signal.SIGSTOP)
                for _ in range(2):
                    shown = latest()
                    while latest() == shown:
                        time.sleep(0.001)
                reading.send_signal(signal.SIGCONT)
                assert len(reading.stdout.read()) > len(b"a\n") and reading.wait() == 0
        assert process.poll() is None
        process.terminate()
        process.wait(timeout=60)
    train("--resume", "out", "--steps", state(work / "out")["step"] + 2, cwd=work)
    assert len(list((work / "out").glob("step-*"))) == 1


# ---- signals


def test_interrupted_between_micro_batches(train, work):
    """The part of the step that was computed is dropped, and the save has the same bits."""
    train(*RUN, "--grad-accum", 3, "--steps", 3, "--out", "out", cwd=work)
    before = saved_bytes(work / "out")
    with running(train, "--resume", "out", "--steps", 5, "--grad-accum", 10**8, cwd=work) as process:
        wait_for_line(process, rb"^resuming")
        time.sleep(1)
        process.terminate()
        assert process.wait(timeout=60) == 143
        text = process.stdout.read()
    assert b"interrupted before step 4\n" in text and saved_bytes(work / "out") == before
    train("--resume", "out", "--steps", 5, "--grad-accum", 3, cwd=work)
    train(*RUN, "--grad-accum", 3, "--steps", 5, "--out", "whole", cwd=work)
    assert saved_bytes(work / "out") == saved_bytes(work / "whole")


def test_what_is_due_at_an_interrupted_step_is_made_once(train, work):
    options = ("--eval-every", 2, "--eval-batches", 1, "--log", "log")
    with running(train, *RUN, *options, "--steps", 2, "--out", "out", cwd=work) as process:
        process.wait()
    change_state(work / "out", lambda saved: saved.update(evaluated=False, validated=False))
    (work / "log").unlink()
    with running(train, "--resume", "out", "--steps", 4, "--grad-accum", 10**8, cwd=work) as process:
        wait_for_line(process, rb"validation loss")
        time.sleep(0.5)
        process.terminate()
        process.wait(timeout=60)
    train("--resume", "out", "--steps", 3, "--grad-accum", 1, cwd=work)
    assert [line["step"] for line in read_log(work / "log") if "val_loss" in line] == [2, 3]


@pytest.mark.quick
def test_first_and_second_ctrl_c(train, work):
    write_text(work / "long", 100000)
    options = ("--model", "d6", "--data", "long", "--batch", 16, "--seq-len", 512, "--steps", 5)
    with running(train, *options, cwd=work, stderr=-1) as process:
        wait_for_line(process, rb"^nothing will be saved: no --out")
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == b"stopping after this micro-batch; Ctrl-C again: at once\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT


def test_the_reader_of_the_output_goes(train, work):
    """As with `| tee` on Ctrl-C: the run saves."""
    with running(train, *FOREVER, "--out", "out", cwd=work, stderr=-1) as process:
        wait_for_line(process, rb"^step +3/")  # the next line is that of step 4
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b"stopping after this micro-batch; Ctrl-C again: at once, without saving\n"
    assert state(work / "out")["step"] >= 4


def test_ignored_signals_stay_ignored(train, work):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with running(train, *RUN, "--steps", 300, "--out", "out", cwd=work, preexec_fn=ignore) as process:
        wait_for_line(process, rb"^step +2/")
        process.send_signal(signal.SIGHUP)
        process.stdout.read()
        assert process.wait(timeout=60) == 0
    assert state(work / "out")["step"] == 300


def step_saved_when_asked(train, process):
    """The step that SIGUSR1 saves in the middle of the next one. If that one's line comes first, the signal was sent too late."""
    for _ in range(10):
        step = int(wait_for_line(process, rb"^step ").split(b"/")[0].split()[1])
        process.send_signal(signal.SIGUSR1)
        line = wait_for_line(process, rb"^(saved step|step) ")
        if line.startswith(b"saved"):
            assert train.device != "cpu" or line == b"saved step %d in out\n" % step
            return int(line.split()[2])
        wait_for_line(process, rb"^saved step \d+ in out$")
        assert train.device == "cpu"
    raise AssertionError("each save came after the next step")


def test_sigusr1_saves_and_goes_on(train, work):
    """Saves the last complete step, even in the middle of the next one. The save equals that of a run that
    ends there. A GPU's host is ahead: it may have begun all micro-batches of the next step, and then saves after it."""
    with running(train, *RUN, "--steps", 100000, "--grad-accum", 200, "--print-every", 1, "--out", "out", "--keep", 0, cwd=work) as process:
        steps = step_saved_when_asked(train, process)
        assert step_saved_when_asked(train, process) > steps
        process.terminate()
        assert process.wait(timeout=60) == 143
    train(*RUN, "--grad-accum", 200, "--steps", steps, "--out", "whole", cwd=work)
    assert saved_bytes(work / "out" / f"step-{steps:08}") == saved_bytes(work / "whole")


def test_sigusr1_before_there_is_something_to_save(train, work):
    """From the program's start on, the signal waits for the first step."""
    with running(train, *FOREVER, "--grad-accum", 100, "--out", "out", cwd=work) as process:
        while not (work / "out").exists():
            time.sleep(0.001)
        process.send_signal(signal.SIGUSR1)
        wait_for_line(process, rb"^saved step \d+ in out$")
        process.terminate()
        assert process.wait(timeout=60) == 143


def test_sigusr1_without_a_place_to_save(train, work):
    with running(train, *FOREVER, cwd=work, stderr=-1) as process:
        wait_for_line(process, rb"^step +1/")
        process.send_signal(signal.SIGUSR1)
        assert process.stderr.readline() == b"SIGUSR1 asks for a save, and there is no --out: going on without\n"
        wait_for_line(process, rb"^step +\d+/")
        process.terminate()
        assert process.wait(timeout=60) == 143


def test_signals_change_no_bit(train, tmp_path):
    """A signal may come while a library's product uses the stack pointer for something else."""
    write_text(tmp_path / "text", 20000)
    options = ("--model", "d4", "--data", "text", "--steps", 20, "--batch", 2, "--seq-len", 64, "--sample", "tokens=0", "--log")
    train(*options, "quiet", cwd=tmp_path)
    with running(train, *options, "signalled", cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        wait_for_line(process, rb"^step +1/")
        while process.poll() is None:
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.002)
        assert process.returncode == 0
    quiet, signalled = (figures(read_log(tmp_path / log)) for log in ("quiet", "signalled"))
    assert len(quiet) >= 20 and signalled == quiet


# ---- limits on the size of files


def limited(train, work, most_bytes, *options):
    """A run whose files may have at most this many bytes: its end, and its stderr. Python ignores SIGXFSZ,
    and restores the default in a child."""
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    with running(train, *options, cwd=work, stderr=-1, preexec_fn=limit) as process:
        error = process.communicate(timeout=60)[1].decode()
        return process.returncode, error


@pytest.mark.parametrize("bytes, options, said", [
    (100_000, ("--out", "out"), r"--out out: a save: a file takes \d+ bytes, and ulimit -f allows 100000"),
    (100_000, ("--train", "lora", "--lora-rank", 1, "--merge", "out"), r"--merge out: the merged model: a file takes \d+ bytes, and "
     "ulimit -f allows 100000"),
    (10_000, ("--timeline", "out"), r"--timeline out: cannot write: File too large \(ulimit -f allows 10000 bytes\)"),
    pytest.param(100_000, ("--offload", "state=disk"), r"--offload state=disk: .*: File too large \(ulimit -f allows 100000 bytes\)",
                 marks=pytest.mark.not_played("its memory is a file too"))], ids=lambda v: str(v)[:30])
def test_a_limit_of_a_files_size_is_known_beforehand(train, work, bytes, options, said):
    code, error = limited(train, work, bytes, *RUN, "--steps", 2, *options)
    assert code == 2 and re.fullmatch(f"train: {said}\n", error), error
    assert sorted(path.name for path in work.iterdir()) == sorted({"model", "text"} | ({"out"} if "--timeline" in options else set()))


def test_a_log_that_may_not_grow(train, work):
    """The training so far is saved, and the line names the file."""
    make(work / "tiny", "--layers", 1, "--heads", 1, "--channels", 8, "--positions", 64)
    code, error = limited(train, work, 60_000, *FOREVER, "--model", "tiny", "--log", "log", "--out", "out")
    assert code == 2 and error == "train: --log log: File too large (ulimit -f allows 60000 bytes)\n"
    last = [line for line in (work / "log").read_text().splitlines() if line.endswith("}")][-1]
    # A GPU is a step ahead of the host, which writes the lines.
    assert state(work / "out")["step"] == json.loads(last)["step"] + (1 if train.device == "cpu" else 2)
    assert ".lock" not in os.listdir(work / "out")


def test_a_merge_that_fails_loses_nothing(train, work):
    """The disk becomes full during the merge."""
    lora = ("--train", "lora", "--lora-rank", 2)
    with small_disk(work / "disk", "400k") as disk:
        for out in (("--out", "out"), ()):
            with running(train, *RUN, *lora, "--steps", 300, *out, "--merge", "disk/merged", cwd=work, stderr=-1) as process:
                wait_for_line(process, rb"^step +1/")
                (disk / "filler").write_bytes(bytes(250_000 if train.precision == "fp32" else 340_000))
                error = process.communicate(timeout=60)[1].decode()
            assert process.returncode == 2 and error.count("\n") == 1, error
            adapter = "--resume out" if out else "--model model --adapter disk/merged.adapter"
            assert "No space left" in error and error.endswith(f"; the adapter is saved: {adapter} --steps 0 --merge DIR merges it\n")
            (disk / "filler").unlink()
            train(*adapter.split(), "--steps", 0, "--merge", "later" + "".join(out), cwd=work)
        assert sorted(os.listdir(disk)) == ["merged.adapter"]
    assert (work / "later" / "model.safetensors").read_bytes() == (work / "later--outout" / "model.safetensors").read_bytes()


# ---- requeued jobs


def test_resume_auto(train, work):
    """One command starts, resumes, and says when nothing is left to do."""
    command = (*RUN, "--steps", 6, "--save-every", 2, "--log", "log", "--out", "out", "--resume", "auto")
    assert b"--resume auto: out holds no save yet: beginning\n" in train(*command, cwd=work).stdout
    whole, log = saved_bytes(work / "out"), figures(read_log(work / "log"))
    shutil.rmtree(work / "out" / "step-00000006")
    (work / "out" / "latest").unlink()
    (work / "out" / "latest").symlink_to("step-00000004")
    (work / "log").write_text("".join(json.dumps(line) + "\n" for line in log[:4]))
    assert b"resuming out at step 4\n" in train(*command, cwd=work).stdout
    assert saved_bytes(work / "out") == whole and figures(read_log(work / "log")) == log
    before = listing(work / "out")
    assert b"out is at step 6 of 6: nothing is left to train\n" in train(*command, cwd=work).stdout
    assert listing(work / "out") == before


def test_resume_auto_keeps_what_was_chosen(train, work):
    command = (*RUN[:4], "--seq-len", 24, "--sample", "tokens=0", "--batch", "auto", "--out", "out", "--resume", "auto")
    train(*command, "--steps", 1, cwd=work)
    assert int(state(work / "out")["options"]["--batch"][0]) > 3
    change_state(work / "out", lambda saved: saved["options"].update({"--batch": ["3"]}))
    assert b", batch 3, " in train(*command, "--steps", 2, cwd=work).stdout
    command = (*RUN, "--memory", "2GiB", "--state-formats", "auto", "--out", "chosen", "--resume", "auto")
    for steps in (1, 2):
        train(*command, "--steps", steps, cwd=work)


def test_resume_where_nothing_is_left(train, work):
    train(*RUN, "--steps", 4, "--out", "out", cwd=work)
    before = listing(work / "out")
    text = train("--resume", "out", "--steps", 3, cwd=work).stdout
    assert b"out is at step 4 of 3: nothing is left to train\n" in text
    assert listing(work / "out") == before
    train("--resume", "out", "--out", "copy", cwd=work)
    assert saved_bytes(work / "copy") == saved_bytes(work / "out")


def test_a_prompt_for_a_save(train, work):
    """Without the data, and although its run made no samples. What the run wrote stays."""
    train(*RUN, "--steps", 1, "--log", "log", "--out", "out", cwd=work)
    (work / "text").unlink()
    before = listing(work)
    text = train("--resume", "out", "--steps", 0, "--prompt", "Hi", cwd=work).stdout
    assert text.startswith(b"Hi") and len(text) > 150
    assert listing(work) == before


# ---- the data and where they are


def test_relative_names_are_found_again(train, work):
    """From another folder, from the moved one, and from a folder other than the moved one."""
    (work / "runs").mkdir()
    for name in ("text", "model"):
        (work / name).rename(work / "runs" / name)
    (work / "else").mkdir()
    write_text(work / "else" / "text", 2000)  # another file of this name
    options = list(RUN)
    options[options.index("text")] = "te*t"
    train(*options, "--val-data", "text", "--steps", 1, "--log", "log", "--out", "out", cwd=work / "runs")
    train("--resume", "../runs/out", "--steps", 2, cwd=work / "else")
    (work / "runs").rename(work / "mov[e]d")
    train("--resume", "../mov[e]d/out/step-00000002", "--steps", 3, cwd=work / "else")
    train("--resume", "out", "--steps", 4, cwd=work / "mov[e]d")
    assert [line["step"] for line in read_log(work / "mov[e]d" / "log") if "loss" in line] == [1, 2, 3, 4]
    assert sorted(os.listdir(work / "else")) == ["text"]
    train(*RUN, "--val-data", "text", "--steps", 4, "--out", "whole", cwd=work / "mov[e]d")
    assert saved_bytes(work / "mov[e]d" / "out") == saved_bytes(work / "mov[e]d" / "whole")


def longer(text):
    return text + b"x"


def other(text):
    return b"#" + text[1:]


@pytest.mark.parametrize("change", [longer, other])
def test_changed_data(train, work, change):
    train(*RUN, "--steps", 1, "--out", "out", cwd=work)
    (work / "text").write_bytes(change((work / "text").read_bytes()))
    before = listing(work)
    error = train("--resume", "out", "--steps", 2, cwd=work, code=2).stderr.decode()
    assert error.startswith("train: --data text has changed since out was saved: ") and error.count("\n") == 1
    assert listing(work) == before
    error = train("--resume", "out", "--data", "text", "--steps", 2, cwd=work).stderr.decode()
    assert error.startswith("--data text: other data than those of out: ") and error.count("\n") == 1
    assert not train("--resume", "out", "--steps", 3, cwd=work).stderr


def test_changed_validation_data(train, work):
    write_text(work / "val", 1000)
    train(*RUN, "--val-data", "val", "--steps", 1, "--out", "out", cwd=work)
    write_text(work / "val", 900)
    assert b"--val-data val has changed" in train("--resume", "out", "--steps", 2, cwd=work, code=2).stderr
    train("--resume", "out", "--val-data", "val", "--steps", 2, cwd=work)


def test_older_saves(train, work):
    """Those that say nothing of folders and data resume in the current folder, with the data there."""
    train(*RUN, "--steps", 1, "--out", "out", cwd=work)

    def older(saved):
        assert saved.pop("directory") == str(work) and saved.pop("data")
    change_state(work / "out", older)
    (work / "text").write_bytes(longer((work / "text").read_bytes()))
    assert not train("--resume", "out", "--steps", 2, cwd=work).stderr


def test_names_that_are_not_utf8(train, work):
    place = os.fsencode(work) + b"/caf\xe9"
    os.mkdir(place)
    for name in ("text", "model"):
        (work / name).rename(os.fsdecode(place + b"/" + name.encode()))
    os.rename(place + b"/text", place + b"/t%ext \xff")
    options = list(RUN)
    options[options.index("text")] = os.fsdecode(b"t%ext \xff")
    train(*options, "--steps", 1, "--out", "out", cwd=os.fsdecode(place))
    saved = json.loads(open(place + b"/out/trainer_state.json", "rb").read().decode())
    assert saved["options"]["--data"] == [{"percent": "t%25ext%20%FF"}]
    train("--resume", os.fsdecode(place + b"/out"), "--steps", 2, cwd=work)
    assert b"--data t%ext \xff: no file" not in train("--resume", "out", "--steps", 3, cwd=os.fsdecode(place)).stderr


@pytest.mark.parametrize("steps", [2, 4])
def test_a_save_that_nothing_leads_to(train_fp32, work, steps):
    """A run that was killed between its first save and the link to it. --resume auto goes on from there, or finds nothing left to
    do, and the folder shows the save."""
    options = (*RUN, "--resume", "auto", "--out", "out")
    train_fp32(*options, "--steps", 2, cwd=work)
    for path in (work / "out").iterdir():
        if path.is_symlink():
            path.unlink()
    said = train_fp32(*options, "--steps", steps, cwd=work)
    assert b"resuming out/step-00000002 at step 2" in said.stdout and b"another run" not in said.stderr
    assert os.readlink(work / "out" / "latest") == f"step-{steps:08}"
    train_fp32("--model", "out", "--steps", 0, "--val-data", "text", "--seq-len", 24, cwd=work)
