"""dev/compare_losses.py passes within its tolerances and fails beyond them."""

import json

import compare_losses
import pytest

BASE = [{"step": 0, "loss": 4.0, "grad_norm": 2.0, "lr": 0.1, "ms": 1.0}, {"step": 1, "val_loss": 3.9},
        {"step": 1, "loss": 3.5, "grad_norm": 1.0, "lr": 0.1, "ms": 1.0}]


def changed(index, **values):
    return [record | values if i == index else record for i, record in enumerate(BASE)]


def compare_logs(tmp_path, a, b, *options):
    for name, records in (("a", a), ("b", b)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return compare_losses.main([str(tmp_path / "a"), str(tmp_path / "b"), *options])


@pytest.mark.parametrize("other, options, code", [
    (BASE, ["--tolerance", "0"], 0),
    (changed(0, ms=9.0, lr=0.2), ["--tolerance", "0"], 0),  # speed and settings are not compared
    (changed(0, loss=4.00009), [], 0),
    (changed(0, loss=4.00011), [], 1),
    (changed(2, loss=3.4), ["--tolerance", "0.2"], 0),
    (changed(1, val_loss=3.8), [], 1),
    (changed(0, grad_norm=2.00019), [], 0),  # relative
    (changed(0, grad_norm=2.00022), [], 1),
    (changed(0, grad_norm=2.1), ["--norm-tolerance", "0.06"], 0),
    (changed(0, grad_norm=2.1), ["--norm-tolerance", "0.04"], 1),
    (changed(0, loss=4.1), ["--norm-tolerance", "1"], 1),
    (changed(2, loss=None), ["--tolerance", "1e9"], 1),  # NaN is never close
    (BASE[:2], [], 1),  # ended early
    (BASE + [{"step": 1, "loss": 9.0}], [], 1),  # the last line of a step counts
])
def test_exit_code(tmp_path, other, options, code):
    assert compare_logs(tmp_path, BASE, other, *options) == code
    assert compare_logs(tmp_path, other, BASE, *options) == code


def test_nan_in_both_fails(tmp_path):
    assert compare_logs(tmp_path, changed(0, loss=None), changed(0, loss=None)) == 1


def test_table_marks_the_step(tmp_path, capsys):
    compare_logs(tmp_path, BASE, changed(2, loss=3.25))
    marked = [line for line in capsys.readouterr().out.splitlines() if line.endswith("<<<")]
    assert len(marked) == 1
    # BASE is of a version that counted steps from 0; they are shown from 1.
    assert marked[0].split() == ["2", "loss", "3.5000000", "3.2500000", "2.50e-01", "<<<"]


@pytest.mark.parametrize("text, message", [
    (None, "No such file"), ("", "no step with a loss"), ('{"step": 0, "lo', "line 1: not a line"),
    ('{"step": 0, "loss": 1}\n{"step": 1, "loss": "x"}\n', "line 2: not a line"), ("3\n", "line 1: not a line"),
])
def test_unreadable_log(tmp_path, capsys, text, message):
    if text is not None:
        (tmp_path / "log").write_text(text)
    with pytest.raises(SystemExit) as ended:
        compare_losses.main([str(tmp_path / "log"), str(tmp_path / "log")])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_plot(tmp_path):
    assert compare_logs(tmp_path, BASE, changed(2, loss=3.4), "--plot", str(tmp_path / "plot.png")) == 1
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
