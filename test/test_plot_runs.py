"""dev/plot_runs.py: the curves of training logs, and its message for a file that is not a log."""

import json
import math
import struct
import sys

import plot_runs
import pytest
from trainer_runs import make, read_log, refused_by_script, write_text

USUALLY = "fp32"  # see conftest.py


def lines_of(steps, start=4.0, **changes):
    lines = [{"step": i + 1, "loss": start - 0.01 * i, "grad_norm": 1.0, "lr": 1e-3, "ms": 5.0, "tokens_per_second": 1e4 + i}
             for i in range(steps)]
    return [line | changes for line in lines] + [{"step": i, "val_loss": start - 0.009 * i} for i in (steps // 2, steps)]


@pytest.fixture
def logs(tmp_path):
    for name, lines in {"a": lines_of(300), "b": lines_of(60, start=5.0), "c": lines_of(300, lr=2e-3),
                        "no_validation": lines_of(40)[:40], "one_step": lines_of(1)[:1], "more/a": lines_of(20)}.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def plot(logs, *names):
    """The bytes of the picture."""
    out = logs / "runs.png"
    assert plot_runs.main([*(str(logs / f"{name}.jsonl") for name in names), "--out", str(out)]) in (0, None)
    return out.read_bytes()


def size(png):
    assert png.startswith(b"\x89PNG")
    return struct.unpack(">II", png[16:24])


def test_draws(logs):
    """Each set of logs gives another picture, with a panel for each figure in the logs."""
    pictures = [plot(logs, *names) for names in (["a"], ["b"], ["a", "b"], ["b", "a"], ["a", "c"], ["a", "more/a"],
                                                 ["no_validation"], ["a", "no_validation"], ["one_step"])]
    assert len(set(pictures)) == len(pictures)
    heights = [size(picture)[1] for picture in pictures]
    assert heights[0] == pytest.approx(heights[2], rel=0.02)
    assert heights[6] == pytest.approx(0.75 * heights[0], rel=0.05)  # three panels of four


def test_what_is_drawn(logs, monkeypatch):
    """Each run's own points, under its name, on the panel of their figure."""
    from matplotlib.axes import Axes
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, **style: drawn.append((list(x), list(y), style)))
    monkeypatch.setattr(Axes, "legend", lambda axes: None)
    plot(logs, "a", "b")
    named = [(x, y, style["label"]) for x, y, style in drawn if "label" in style]
    assert [label for _, _, label in named] == 4 * ["a.jsonl", "b.jsonl"]
    losses, validations, rates = named[0:2], named[2:4], named[4:6]
    assert losses[1][:2] == (list(range(1, 61)), [5.0 - 0.01 * i for i in range(60)])
    assert validations[0][:2] == ([150, 300], pytest.approx([4.0 - 0.009 * 150, 4.0 - 0.009 * 300]))
    assert rates[0][1] == 300 * [1e-3]
    [pale] = [y for _, y, style in drawn if "label" not in style and y[0] == 4.0]
    assert pale == [4.0 - 0.01 * i for i in range(300)] and losses[0][1] == plot_runs.smooth(pale)


def test_both_losses_in_one_panel(logs, monkeypatch):
    """Pale steps, their mean and the validations of each run, named after it if there are several."""
    from matplotlib.axes import Axes
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, **style: drawn.append((len(x), style.get("label"))))
    monkeypatch.setattr(Axes, "legend", lambda axes: None)
    for names in (["a"], ["a", "no_validation"]):
        plot_runs.main(["--losses", *(str(logs / f"{name}.jsonl") for name in names), "--out", str(logs / "losses.png")])
    assert drawn[:3] == [(300, None), (300, "training loss"), (2, "validation loss")]
    assert drawn[3:] == [(300, None), (300, "a.jsonl, training"), (2, "a.jsonl, validation"), (40, None),
                         (40, "no_validation.jsonl, training")]
    size((logs / "losses.png").read_bytes())


def test_smooth():
    assert plot_runs.smooth([3.0, 5.0]) == [3.0, 5.0]
    values = [float(i % 7) for i in range(350)]
    smoothed = plot_runs.smooth(values)
    assert len(smoothed) == 350 and smoothed[:2] == [0.0, 0.5]
    assert all(smoothed[i] == pytest.approx(sum(values[i - 2:i + 1]) / 3) for i in range(2, 350))


def test_labels_tell_runs_apart():
    assert plot_runs.labels_of(["/x/a.jsonl", "/x/b.jsonl"]) == ["a.jsonl", "b.jsonl"]
    assert plot_runs.labels_of(["/x/1/log", "/x/2/log"]) == ["1/log", "2/log"]
    assert plot_runs.labels_of(["/x/log", "/x/log"]) == ["/x/log", "/x/log"]


def test_says_how_runs_ended(logs, capsys):
    plot(logs, "a", "no_validation")
    first, second = capsys.readouterr().out.splitlines()
    loss = sum(4.0 - 0.01 * i for i in range(297, 300)) / 3
    assert first.endswith(f"a.jsonl: 300 steps, loss {loss:.4f} over the last 3, best validation 1.3000 at step 300, "
                          "10,150 tokens/s")
    assert second.endswith("no_validation.jsonl: 40 steps, loss 3.6100 over the last 1, 10,020 tokens/s")


def test_a_resumed_log_and_what_is_no_number(tmp_path):
    """The last line of a step counts; NaN, null and infinity are not drawn. Steps from 0 are those of an older version."""
    lines = ['{"step": 0, "loss": 9}', '{"step": 1, "loss": null}', '{"step": 2, "loss": NaN}', '{"step": 3, "loss": 1e999}',
             "", '{"step": 0, "loss": 4}', '{"step": 4, "loss": 3}', '{"kind": "something else"}']
    (tmp_path / "log").write_text("\n".join(lines))
    run = plot_runs.Run(str(tmp_path / "log"))
    assert run.points == {"loss": ((1, 5), (4.0, 3.0))} and math.isfinite(run.points["loss"][1][0])


def test_of_a_real_run(train, tmp_path, capsys):
    make(tmp_path / "model", "--layers", 1, "--heads", 1, "--channels", 16, "--positions", 32)
    write_text(tmp_path / "text")
    train("--model", "model", "--data", "text", "--batch", 1, "--seq-len", 16, "--steps", 12, "--eval-every", 5,
          "--sample", "tokens=0", "--log", "log", cwd=tmp_path)
    plot_runs.main([str(tmp_path / "log"), "--out", str(tmp_path / "runs.png")])
    size((tmp_path / "runs.png").read_bytes())
    best = min(line["val_loss"] for line in read_log(tmp_path / "log") if "val_loss" in line)
    assert f"12 steps, loss {read_log(tmp_path / 'log')[-2]['loss']:.4f} over the last 1, best validation {best:.4f} " in \
        capsys.readouterr().out


@pytest.mark.parametrize("text, named", [
    (None, "No such file"), ("", "no step with a loss"), ('{"step": 1}', "no step with a loss"),
    ('{"step": 0, "lo', "line 1: not a line"), ('{"step": 0, "loss": 1}\n{"step": 1, "loss": "x"}', "line 2: not a line"),
    ("3", "line 1: not a line"), ("[]\n", "line 1: not a line"), ('{"step": -1, "loss": 1}', "line 1: not a line"),
    ('{"step": 1e999, "loss": 1}', "line 1: not a line"), (f'{{"step": {10**30}, "loss": 1}}', "line 1: not a line"),
    (f'{{"step": 1, "loss": {10**400}}}', "line 1: not a line"), ("[" * sys.getrecursionlimit() * 20, "line 1: not a line"),
    ('{"step": 0, "loss": null}', "nothing in it is a number"), ("\xff\xfe", "decode"),
], ids=lambda value: str(value)[:30])
def test_damaged_log(logs, capsys, text, named):
    if text is not None:
        (logs / "bad").write_text(text, encoding="latin-1")
    arguments = [str(logs / "bad"), "--out", str(logs / "out.png")]
    refused_by_script(plot_runs, capsys, arguments, str(logs / "bad"), named)
    assert not (logs / "out.png").exists()


@pytest.mark.parametrize("out", ["/nowhere/runs.png", "runs.xyz", "/proc/runs.png"])
def test_bad_out(logs, capsys, monkeypatch, out):
    monkeypatch.chdir(logs)
    refused_by_script(plot_runs, capsys, [str(logs / "a.jsonl"), "--out", out], f"--out {out}")
