"""The trainer and its data: what it prints about them, how it divides them, and what it does when they
change."""

import json
import re
import shutil
import time

import numpy as np
import pytest
from trainer_runs import ROOT, cpu_seconds, figures, make, random_tokens, read_log, saved_bytes, write_shard, write_text

USUALLY = "fp32"  # see conftest.py

SMALL = ("--layers", 2, "--heads", 3, "--channels", 48, "--positions", 64)
RUN = ("--batch", 2, "--seq-len", 24, "--sample", "tokens=0")


@pytest.fixture
def work(tmp_path):
    make(tmp_path / "model", *SMALL)
    write_text(tmp_path / "text")
    return tmp_path


def data_line(run):
    [line] = re.findall(r"^data: (.*)$", run.stdout.decode(), re.MULTILINE)
    return line


def test_a_run_says_what_it_reads(train, work):
    run = train("--model", "model", "--data", "text", *RUN, "--steps", 100, "--grad-accum", 2, "--out", "out", cwd=work)
    # 3600 tokens are 149 windows of 24, and a tenth, 400, is 15.
    assert data_line(run) == ("3600 tokens in 149 sequences of 24; 100 steps read 400 sequences, 2.68 epochs; "
                              "a validation reads 16 of 16")
    assert data_line(train("--resume", "out", "--steps", 110, "--grad-accum", 1, cwd=work)).startswith(
        "3600 tokens in 149 sequences of 24; 110 steps read 420 sequences, 2.82 epochs")


@pytest.mark.parametrize("size, train_tokens, validates", [(250, 225, True), (249, 249, False)])
def test_a_tenth_that_is_no_sequence_is_trained_on(train, work, size, train_tokens, validates):
    write_text(work / "text", size)
    run = train("--model", "model", "--data", "text", *RUN, "--steps", 1, "--log", "log", cwd=work)
    assert data_line(run).startswith(f"{train_tokens} tokens in")
    assert ("val_loss" in read_log(work / "log")[-1]) == validates
    assert (b"no validation: a tenth of the text is less than" in run.stderr) == (not validates)


def test_wide_tokens_are_the_same_tokens(train, work):
    make(work / "model", *SMALL, "--vocab", 300)
    tokens = random_tokens(300, 2000)
    write_shard(work / "narrow.bin", tokens)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240801, 7, len(tokens)
    (work / "wide.bin").write_bytes(header.tobytes() + tokens.astype(np.uint32).tobytes())
    for name in ("narrow", "wide"):
        train("--model", "model", "--data", f"{name}.bin", "--val-data", f"{name}.bin", *RUN, "--steps", 4,
              "--log", name, cwd=work)
    assert figures(read_log(work / "wide")) == figures(read_log(work / "narrow"))


def test_the_first_text(train):
    """Without --data, in the project's folder."""
    run = train("--steps", 1, "--batch", 1, "--sample", "tokens=0", cwd=ROOT)
    assert data_line(run).startswith("1003855 tokens in 7841 sequences of 128")


def test_seventy_thousand_files(train_fp32, work):
    many = work / "many"
    many.mkdir()
    for i in range(70000):
        (many / f"{i:05}").write_bytes(b"%05d, a text\n" % i)
    runs = []
    seconds = cpu_seconds(lambda: runs.append(train_fp32("--model", "model", "--data", "many/*", *RUN, "--steps", 3, cwd=work)))
    # Of 14 bytes, one is held out.
    assert data_line(runs[0]).startswith("910000 tokens in 37915 sequences of 24")
    assert seconds < 60


def until_changed(train, work, *options, change):
    """An endless run whose data `change` modifies after some steps: returns its error line, and the step that
    it saved."""
    with train.start("--model", "model", *RUN, *options, "--steps", 10**9, "--schedule", "constant", "--out", "out",
                     "--log", "log", cwd=work, stderr=-1) as process:
        try:
            while not (work / "log").exists() or len(read_log(work / "log")) < 20:
                assert process.poll() is None
                time.sleep(0.01)
            change()
            error = process.communicate(timeout=60)[1].decode()
        finally:
            process.kill()
    assert process.returncode == 2 and error.startswith("train: ") and error.count("\n") == 1, error
    return error, json.loads((work / "out" / "trainer_state.json").read_text())["step"]


@pytest.mark.parametrize("options", [(), ("--grad-accum", 3), ("--update-in-backward",)], ids=str)
def test_a_text_that_is_shortened(train, work, options):
    """The training so far is saved and equals that of an undisturbed run."""
    shutil.copy2(work / "text", work / "before")
    error, step = until_changed(train, work, "--data", "text", *options,
                                change=lambda: (work / "text").write_bytes(b"short"))
    assert "text was written to or replaced since the run began, and had 4000 bytes" in error
    assert step >= 20 and [line["step"] for line in read_log(work / "log")] == list(range(1, step + 1))
    shutil.copy2(work / "before", work / "text")
    train("--model", "model", "--data", "text", *RUN, *options, "--steps", step + 3, "--schedule", "constant",
          "--out", "unbroken", cwd=work)
    train("--resume", "out", "--steps", step + 3, cwd=work)
    assert saved_bytes(work / "out") == saved_bytes(work / "unbroken")


def test_a_text_that_goes_while_validating(train, work):
    """Every validation reads two files; the one that was read last is open."""
    for name in ("a", "b"):
        write_text(work / name, 200)
    error, step = until_changed(train, work, "--data", "text", "--val-data", "a", "b", "--eval-every", 10,
                                change=(work / "a").unlink)
    assert "a: cannot open: No such file" in error and step % 10 == 0
    assert [line["step"] for line in read_log(work / "log") if "loss" in line] == list(range(1, step + 1))


def test_shards_that_change(train, work):
    make(work / "model", *SMALL, "--vocab", 300)
    for name in ("a.bin", "b.bin"):
        write_shard(work / name, random_tokens(300, 500))
    error, _ = until_changed(train, work, "--data", "a.bin", "b.bin",
                             change=lambda: write_shard(work / "b.bin", random_tokens(300, 600)))
    assert "b.bin was written to or replaced" in error
