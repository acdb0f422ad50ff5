"""--keep-best and --early-stopping: what the validations of a run decide."""
import json
import os
import re

import pytest
from trainer_runs import make, read_log, write_text


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model of bytes that soon overfits: its text is short, and the text that it is validated on is another."""
    path = tmp_path_factory.mktemp("best")
    make(path / "model", "--layers", 1, "--heads", 2, "--channels", 32, "--positions", 32)
    (path / "text").write_text("the same words again and again, " * 20)
    write_text(path / "other", 2000)
    return path


def run(train, work, *options, **how):
    return train("--model", work / "model", "--data", work / "text", "--val-data", work / "other", "--seq-len", 32, "--batch", 4,
                 "--lr", 1e-2, "--warmup", 1, "--schedule", "constant", "--sample", "tokens=0", "--eval-every", 2, *options, **how)


def validations(log):
    return {entry["step"]: entry["val_loss"] for entry in read_log(log) if "val_loss" in entry}


def progress(save):
    return json.loads((save / "trainer_state.json").read_text())


def test_the_best_save_stays(train_fp32, work, tmp_path):
    """It is that of the lowest loss, also when newer saves have come and the run was resumed between."""
    out, log = tmp_path / "out", tmp_path / "log"
    options = ("--keep-best", "--keep", 1, "--save-every", 4, "--log", log)
    run(train_fp32, work, *options, "--steps", 20, "--out", out)
    losses = validations(log)
    best = min(losses, key=losses.get)
    assert 2 < best < 16, losses
    assert os.readlink(out / "best") == f"step-{best:08}" and os.readlink(out / "latest") == "step-00000020"
    assert sorted(path.name for path in out.glob("step-*")) == [f"step-{best:08}", "step-00000020"]
    assert progress(out / "best")["best"] == {"loss": pytest.approx(losses[best], abs=1e-6), "step": best, "worse_since": 0}
    worse = progress(out / "latest")["best"]
    assert worse["step"] == best and worse["worse_since"] == len([step for step in losses if step > best])
    assert b"validation loss" in train_fp32("--model", out / "best", "--val-data", work / "other", "--seq-len", 32, "--steps", 0).stdout

    train_fp32("--resume", out, "--steps", 24)
    assert os.readlink(out / "best") == f"step-{best:08}" and (out / "best" / "config.json").exists()
    assert sorted(path.name for path in out.glob("step-*")) == [f"step-{best:08}", "step-00000024"]

    halves = tmp_path / "halves"
    run(train_fp32, work, *options, "--steps", 6, "--out", halves)
    train_fp32("--resume", halves, "--steps", 20)
    assert os.readlink(halves / "best") == f"step-{best:08}"
    assert (halves / "best/model.safetensors").read_bytes() == (out / "best/model.safetensors").read_bytes()


def test_the_same_data_by_another_name(train_fp32, work, tmp_path):
    """Their losses compare, and those of other data do not."""
    out = tmp_path / "out"
    run(train_fp32, work, "--keep-best", "--steps", 4, "--out", out)
    best = progress(out / "latest")["best"]
    (tmp_path / "link").symlink_to(work / "other")
    for name, kept in ((tmp_path / "link", True), (work / "text", False)):
        train_fp32("--resume", out, "--steps", 6, "--lr", 10, "--val-data", name, "--out", tmp_path / f"{kept}")
        assert (progress(tmp_path / f"{kept}" / "latest")["best"]["loss"] == best["loss"]) == kept


def test_the_last_validation_may_be_the_best(train_fp32, work, tmp_path):
    out = tmp_path / "out"
    run(train_fp32, work, "--keep-best", "--keep", 1, "--steps", 5, "--out", out)
    assert os.readlink(out / "best") == "step-00000005" and [p.name for p in out.glob("step-*")] == ["step-00000005"]
    assert progress(out / "best")["best"]["step"] == 5


def test_a_save_that_is_validated_later_may_be_the_best(train_fp32, work, tmp_path):
    """A run that is interrupted in a validation saves before it is done, and validates when it is resumed."""
    out, log = tmp_path / "out", tmp_path / "log"
    options = ("--keep-best", "--keep", 1, "--save-every", 2, "--log", log, "--out", out)
    run(train_fp32, work, *options, "--steps", 2)
    state = progress(out / "latest")
    (out / "latest" / "trainer_state.json").write_text(json.dumps(state | {"evaluated": False, "validated": False, "best": None}))
    (out / "best").unlink()
    train_fp32("--resume", out, "--steps", 8, "--lr", 0.3)
    losses = validations(log)
    assert min(losses, key=losses.get) == 2, losses
    assert os.readlink(out / "best") == "step-00000002" and progress(out / "best")["best"]["step"] == 2
    assert sorted(path.name for path in out.glob("step-*")) == ["step-00000002", "step-00000008"]


def test_the_validation_at_the_end_is_made_up_for(train_fp32, work, tmp_path):
    """A run that is killed between its last save and its last validation has no step left when it is resumed."""
    out = tmp_path / "out"
    run(train_fp32, work, "--keep-best", "--steps", 4, "--out", out)
    state = progress(out / "latest")
    (out / "latest" / "trainer_state.json").write_text(json.dumps(state | {"validated": False, "best": None}))
    (out / "best").unlink()
    train_fp32("--resume", out)
    assert os.readlink(out / "best") == "step-00000004"
    assert {key: progress(out / "latest")[key] for key in ("best", "validated")} == {"best": state["best"], "validated": True}


def test_the_end_says_which_step_was_the_best(train_fp32, work, tmp_path):
    """What is merged is of the last step. A new run in the same folder does not leave the link to the other run's best."""
    out = tmp_path / "out"
    run(train_fp32, work, "--keep-best", "--steps", 2, "--out", out)
    state = progress(out / "latest")
    (out / "latest" / "trainer_state.json").write_text(json.dumps(state | {"best": state["best"] | {"loss": 0.001}}))
    said = train_fp32("--resume", out, "--steps", 4).stdout.decode()
    assert f"the lowest validation loss was 0.001000, at step 2: {out}/best is of that step\n" in said
    assert os.readlink(out / "best") == "step-00000002"
    run(train_fp32, work, "--steps", 1, "--out", out)
    assert not os.path.lexists(out / "best")


def test_a_validation_counts_once(train_fp32, work, tmp_path):
    """Although the sample after it was interrupted, and made again by the resumed run. Other data of the same name are compared anew."""
    out, log, data = tmp_path / "out", tmp_path / "log", tmp_path / "val"
    write_text(data, 2000)
    options = ("--val-data", data, "--eval-batches", 1, "--early-stopping", 9, "--save-every", 2, "--lr", 0.3, "--log", log, "--out", out)
    run(train_fp32, work, *options, "--steps", 6)
    state = progress(out / "latest")
    assert state["best"]["worse_since"] > 0 and state["validated"]
    (out / "latest" / "trainer_state.json").write_text(json.dumps(state | {"evaluated": False}))
    train_fp32("--resume", out, "--steps", 7)
    assert [line["step"] for line in read_log(log) if "val_loss" in line] == [2, 4, 6, 7]
    assert progress(out / "latest")["best"]["worse_since"] <= state["best"]["worse_since"] + 1
    write_text(data, 1500)
    train_fp32("--resume", out, "--val-data", data, "--steps", 8)
    assert progress(out / "latest")["best"]["step"] == 8


def test_going_on_from_an_earlier_save(train_fp32, work, tmp_path):
    """The best save is again the one that was the best by then, and not a later one, which is written anew."""
    out, log = tmp_path / "out", tmp_path / "log"
    run(train_fp32, work, "--keep-best", "--keep", 0, "--save-every", 2, "--steps", 6, "--out", out)
    later = os.readlink(out / "best")
    train_fp32("--resume", out / "step-00000002", "--lr", 0.3, "--steps", 12, "--keep", 1, "--log", log)
    best = os.readlink(out / "best")
    assert later == "step-00000006" and best == "step-00000002" and (out / best).is_dir()


def test_a_validation_without_a_loss(train_fp32, work, tmp_path):
    """Its loss would be 0, the best of all."""
    something = {"prompt": "what", "completion": "this"}
    lines = [{"prompt": "what is it, after all, that they learn", "completion": "this"}] * 3 + [something] * 9
    for name, examples in ("nothing", lines), ("something", [something] * 9):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in examples))
    error = train_fp32("--model", work / "model", "--data", "something.jsonl", "--val-data", "nothing.jsonl", "--seq-len", 16, "--batch", 1,
                       "--eval-batches", 1, "--steps", 2, cwd=tmp_path, code=2).stderr.decode()
    assert re.search(r"train: --val-data: the \d+ sequences that a validation reads have no token with a loss; .*\n", error), error


@pytest.mark.parametrize("patience", [1, 3])
def test_a_run_ends_early(train_fp32, work, tmp_path, patience):
    out, log = tmp_path / "out", tmp_path / "log"
    text = run(train_fp32, work, "--early-stopping", patience, "--steps", 200, "--out", out, "--log", log).stdout.decode()
    losses = validations(log)
    steps, best = sorted(losses), min(losses, key=losses.get)
    assert best == steps[-1 - patience] and steps == list(range(2, steps[-1] + 1, 2))
    assert re.search(rf"^--early-stopping {patience}: no validation was better than that of step {best}, {losses[best]:.6f}$", text, re.M)
    assert os.readlink(out / "latest") == f"step-{steps[-1]:08}"
    again = train_fp32("--resume", out).stdout.decode()
    assert f"--early-stopping {patience}: no validation was better" in again and not re.search(r"^step +\d+/", again, re.M)
    assert train_fp32("--resume", out, "--early-stopping", 0, "--steps", steps[-1] + 2, "--log", log)
    assert read_log(log)[-1]["step"] == steps[-1] + 2


@pytest.mark.parametrize("options, said", [
    (("--keep-best",), "--keep-best: nothing is saved without --out"),
    (("--keep-best", "--out", "out", "--eval-every", 0), "--keep-best compares validations"),
    (("--early-stopping", 2, "--eval-every", 0), "--early-stopping compares validations"),
    (("--early-stopping", -1), "--early-stopping")])
def test_mistakes(train_fp32, work, options, said, tmp_path):
    given = ("--model", work / "model", "--data", work / "text", "--eval-every", 2, *options)
    if "--eval-every" in options:
        given = ("--model", work / "model", "--data", work / "text", *options)
    error = train_fp32(*given, "--steps", 2, code=2, cwd=tmp_path).stderr.decode()
    assert said in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_best_must_be_a_link(train_fp32, work, tmp_path):
    (tmp_path / "out" / "best").mkdir(parents=True)
    error = run(train_fp32, work, "--keep-best", "--steps", 2, "--out", tmp_path / "out", code=2).stderr.decode()
    assert "has a best that no save has linked there" in error
