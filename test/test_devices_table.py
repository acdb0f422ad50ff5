"""dev/devices_table.py: the cells of a row are those of ./train's plan."""

import shlex

import devices_table
import plan_table
import pytest
from trainer_runs import make


def test_cells_of_a_row(train, tmp_path):
    model = make(tmp_path / "llama", "--family", "llama", "--layers", 4, "--heads", 4, "--channels", 64, "--positions", 512, "--vocab", 301)
    table = devices_table.Table("a", str(model), "--seq-len 64 --train lora", [("A100", "--devices 4"), ("H100", "--devices 2")], ["--zero 3"],
                                "Others report more.")
    text = devices_table.section(table, lambda gpu: plan_table.Trainer(train.path, [], None), tmp_path)
    assert text.startswith("## a\n\nOthers report more.\n\n    ./train --plan --model")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == list(devices_table.COLUMNS) and len(rows) == 4
    for cells, gpu, on in zip(rows[2:], ("4 x A100", "2 x H100"), ("--devices 4", "--devices 2")):
        plan = train.plan("--model", model, *shlex.split(f"{table.step} {on} --zero 3"), "--sample", "tokens=0")
        assert cells[:2] == [gpu, f"`{on} --zero 3`"]
        assert cells[2] == f"{plan['totals']['weights'] / 2**20:,.0f}" and cells[6] == f"{plan['totals']['total'] / 2**20:,.0f}"
        assert float(cells[9]) == pytest.approx(plan["estimated_seconds"], rel=1e-2)


def test_a_build_that_plays_no_gpus(train, capsys):
    if train.is_played:
        pytest.skip("it plays GPUs")
    with pytest.raises(SystemExit):
        devices_table.main([train.path])
    assert "plays no GPUs" in capsys.readouterr().err
