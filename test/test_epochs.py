"""--epochs: how long a run trains, and what it says of it."""
import json
import re

import pytest
from trainer_runs import make, write_text


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model of bytes, 40 examples of a sequence each, and a text."""
    path = tmp_path_factory.mktemp("epochs")
    make(path / "model", "--layers", 1, "--heads", 2, "--channels", 32, "--positions", 64)
    lines = [json.dumps({"prompt": f"{i:02} is", "completion": " " + "x" * 50}) for i in range(40)]
    (path / "examples.jsonl").write_text("\n".join(lines))
    write_text(path / "text", 6400)
    return path


def run(train, work, *options, data="examples.jsonl", **how):
    return train("--model", work / "model", "--data", work / data, "--seq-len", 64, "--batch", 4, "--sample", "tokens=0",
                 *options, **how)


def told(result):
    """(steps, sequences in an epoch, epochs), as the line about the data says them."""
    line = re.search(r"data: .*? in (\d+) sequences.*?; (\d+) steps read \d+ sequences, ([\d.]+) epochs", result.stdout.decode())
    return int(line[2]), int(line[1]), float(line[3])


def last_step(result):
    return int(re.findall(r"^step +(\d+)/", result.stdout.decode(), re.M)[-1])


def test_examples_are_trained_on_three_times(train_fp32, work):
    result = run(train_fp32, work)
    steps, sequences, epochs = told(result)
    assert steps == -(-3 * sequences // 4) == last_step(result) and 3 <= epochs < 3.2
    assert b"(--epochs or --steps change that)" in result.stdout
    assert told(run(train_fp32, work, "--steps", 5))[0] == 5


@pytest.mark.parametrize("data, epochs, accumulated", [("examples.jsonl", 2, 1), ("examples.jsonl", 0.5, 2), ("text", 1.5, 1),
                                                       ("text", 0.001, 1)])
def test_epochs_become_steps(train_fp32, work, data, epochs, accumulated):
    result = run(train_fp32, work, "--epochs", epochs, "--grad-accum", accumulated, data=data)
    steps, sequences, _ = told(result)
    assert steps == max(1, -int(-epochs * sequences // (4 * accumulated))) == last_step(result)
    assert b"change that" not in result.stdout


def test_a_warmup_is_a_tenth_of_few_steps(train_fp32, work):
    """The fourth of 30 steps has the whole rate after a warmup of three."""
    rates = [float(rate) for rate in re.findall(r"\| lr ([\d.e+-]+)", run(
        train_fp32, work, "--epochs", 3, "--lr", 1e-3, "--schedule", "constant", "--print-every", 1).stdout.decode())]
    tenth = -(-len(rates) // 10)
    assert [rate < 1e-3 for rate in rates] == [True] * (tenth - 1) + [False] * (len(rates) - tenth + 1)


def test_a_resume_reads_what_is_left(train_fp32, work, tmp_path):
    """Half of the epochs, and then all of them with another batch: the rest is read, no more."""
    first = run(train_fp32, work, "--epochs", 1, "--out", tmp_path / "out")
    steps, sequences, _ = told(first)
    more = train_fp32("--resume", tmp_path / "out", "--epochs", 3, "--batch", 2)
    assert told(more)[0] == steps + -(-(3 * sequences - 4 * steps) // 2) == last_step(more)
    done = train_fp32("--resume", tmp_path / "out")
    assert b"nothing is left to train" in done.stdout
    assert told(train_fp32("--resume", tmp_path / "out", "--steps", last_step(more) + 1))[0] == last_step(more) + 1


@pytest.mark.parametrize("options, said", [
    (("--epochs", 2, "--steps", 3), "--epochs 2 and --steps 3 both say how long to train: give one of them"),
    (("--epochs", 0), "--epochs"), (("--epochs", -1), "--epochs"), (("--epochs", "nan"), "--epochs"),
    (("--epochs", 2, "--bench"), "--epochs 2: a bench only measures")])
def test_mistakes(train_fp32, work, options, said):
    error = run(train_fp32, work, *options, code=2).stderr.decode()
    assert said in error and error.count("\n") == 1


def test_a_resume_with_fewer_steps_than_it_has_made(train_fp32, work, tmp_path):
    run(train_fp32, work, "--steps", 4, "--out", tmp_path / "out")
    text = train_fp32("--resume", tmp_path / "out", "--steps", 3).stdout.decode()
    assert "; 4 steps read 16 sequences" in text and "is at step 4 of 3: nothing is left to train" in text


def test_a_resume_lists_what_has_changed(train_fp32, work, tmp_path):
    """With the value that the save has, and the learning rate of the next step."""
    out = tmp_path / "out"
    run(train_fp32, work, "--steps", 4, "--lr", 1e-3, "--schedule", "linear", "--warmup", 1, "--out", out)
    same = train_fp32("--resume", out, "--lr", "0.001", "--print-every", 1, "--threads", 1).stdout.decode()
    assert "other settings" not in same
    unspoken = train_fp32("--resume", out, "--seed", 0, "--grad-accum", 1).stdout.decode()  # the defaults
    assert "other settings" not in unspoken, unspoken
    text = train_fp32("--resume", out, "--steps", 8, "--weight-decay", 0, "--clip", 1).stdout.decode()
    assert "\nother settings than those of the save: --steps 8 (was 4), --weight-decay 0 (was 0.1)\n" in text
    match = re.search(r"^the learning rate goes on as that of a run of 8 steps with these settings: (\S+) in step 5; it was (\S+) in the step before$", text, re.M)
    rate, before = match[1], match[2]
    assert float(before) == pytest.approx(1e-3 * (1 - 2 / 3), rel=1e-3)
    assert float(rate) == pytest.approx(1e-3 * (1 - 3 / 7), rel=1e-3)
    assert f"| lr {float(rate):.3e} |" in text
