"""dev/plan_table.py: a case's row has ./train's plan, next to the same step with everything on the device."""

import re
import stat

import plan_table
import pytest
from trainer_runs import make

USUALLY = "fp32"  # see conftest.py

STEP = ("--train", "lora", "--lora-rank", "4", "--batch", "2", "--seq-len", "64")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make(tmp_path_factory.mktemp("plans") / "llama", "--family", "llama", "--layers", 4, "--heads", 4,
                "--channels", 64, "--positions", 512, "--vocab", 301)


def rows_of(capsys, train, tmp_path, *lines, options=()):
    """{case: cells by column} from a run of the script on these cases."""
    (tmp_path / "cases.txt").write_text("\n".join(lines))
    plan_table.main([train.path, "--cases", str(tmp_path / "cases.txt"), *options])
    text = capsys.readouterr().out
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        name, _, command, _, head, line, row = section.strip().split("\n")
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (head, line, row)]
        assert len(cells[0]) == len(cells[1]) == len(cells[2])
        found[name] = dict(zip(cells[0], cells[2])) | {"command": command.strip()}
    return found


def test_rows(train, llama, tmp_path, capsys):
    rows = rows_of(capsys, train, tmp_path, f"disk | {llama} | {' '.join(STEP)} | --offload weights=disk \\",
                   "  --offload inputs=auto --recompute block", "# no case", f"as it is | {llama} | {' '.join(STEP)} |")
    disk, resident = rows["disk"], rows["as it is"]
    assert disk["command"].split() == ["./train", "--plan", "--sample", "tokens=0", "--model", str(llama), *STEP,
                                       "--offload", "weights=disk", "--offload", "inputs=auto", "--recompute", "block"]
    plan = train.plan("--model", llama, *STEP, "--sample", "tokens=0", "--offload", "weights=disk,inputs=auto", "--recompute",
                      "block")
    fastest = train.plan("--model", llama, *STEP, "--sample", "tokens=0", "--memory", "1000GiB")
    parked = "offloaded" if train.device == "cpu" else "pinned_host"
    assert plan["outside_device"]["on_disk"] > 0 and plan["outside_device"][parked] > 0
    assert disk["planned on the device, MiB"] == f"{plan['totals']['total'] / 2**20:,.0f}"
    assert disk["a step, s"] == f"{plan['estimated_seconds']:.3g}"
    assert disk["tokens/s"] == f"{2 * 64 / plan['estimated_seconds']:,.0f}"
    assert disk["resident, s (GiB)"].split()[0] == f"{fastest['estimated_seconds']:.3g}"
    assert disk["times that"] == f"{plan['estimated_seconds'] / fastest['estimated_seconds']:.2f}"
    assert float(disk["times that"]) >= 1 and resident["chosen"] == "as given"
    phases = [phase for phase in plan["phases"] if phase["seconds"] >= 1e-3 * plan["estimated_seconds"]]
    assert len(phases) >= 3 and len(disk["what bounds it"].split(";")) == len(phases)
    for phase in phases:
        said = re.search(rf"{phase['name']} [\d.e+-]+ s: {phase['bound_by']}(?:, (\d+)% waiting for the disk)?",
                         disk["what bounds it"])
        assert float(said[1] or 0) == pytest.approx(100 * phase["disk"] / phase["seconds"], abs=0.51)


def test_what_was_chosen(train, llama, tmp_path, capsys):
    """For a budget that is large enough, and for one that nothing fits."""
    rows = rows_of(capsys, train, tmp_path, f"room | {llama} | {' '.join(STEP)} | --memory 8GiB",
                   f"none | {llama} | {' '.join(STEP)} | --memory 1MiB")
    assert rows["room"]["chosen"] == "`--recompute none --chunk-rows head=0 --batch 2 --grad-accum 1`"
    assert rows["room"]["times that"] == "1.00"
    assert rows["none"]["planned on the device, MiB"] == "does not fit"
    assert "the least that this takes is" in rows["none"]["what bounds it"]


def test_options_for_all(train_fp32, llama, tmp_path, capsys):
    """Arguments after -- are passed to both plans."""
    line = f"more | {llama} | {' '.join(STEP)} | --recompute none"
    few = rows_of(capsys, train_fp32, tmp_path, line, options=("--", "--threads", "1"))["more"]
    many = rows_of(capsys, train_fp32, tmp_path, line, options=("--", "--threads", "4"))["more"]
    assert few["command"].endswith("--threads 1") and few["times that"] == many["times that"] == "1.00"
    for seconds in (lambda row: float(row["a step, s"]), lambda row: float(row["resident, s (GiB)"].split()[0])):
        if train_fp32.device == "cpu":
            assert seconds(few) > 1.5 * seconds(many)
        else:  # a GPU takes the same with any number of threads
            assert seconds(few) == seconds(many)


def test_shapes(train_fp32, tmp_path):
    """The models have as many parameters as their names say."""
    for name, parameters in (("llama-3.1-8b", 8_030_261_248), ("llama-3.1-70b", 70_553_706_496),
                             ("bloom-176b", 176_247_271_424)):
        folder = plan_table.model_folder(name, str(tmp_path))
        options = ("--model", folder, "--train", "prompt", "--soft-prompt", 1, "--batch", 1, "--seq-len", 8, "--offload", "weights=disk,embeddings=disk", "--sample", "tokens=0")
        assert train_fp32.plan(*options)["parameters"] == parameters


def test_cases_of_its_own(train_fp32):
    """The built-in cases are valid, with distinct names and existing shapes."""
    cases = plan_table.cases_of(plan_table.CASES, "CASES")
    assert len({c.name for c in cases}) == len(cases) > 5 and {c.model for c in cases} <= set(plan_table.SHAPES)
    help_text = train_fp32("--help", "all").stdout.decode()
    options = {word for c in cases for word in c.step + c.homes if word.startswith("--")}
    assert all(re.search(rf"^ +{option}[ ,:]", help_text, re.MULTILINE) for option in options)


def test_gpus(llama, tmp_path, capsys):
    """A row for each GPU that a build emulates, by its name, with the sizes in host memory and on disk."""
    played = tmp_path / "played"
    played.write_text('''#!/usr/bin/env python3
import json, os
seconds = {"A100": 3, "4090": 6, "H100": 1}[os.environ["GPU"]]
print(json.dumps({"totals": {"total": 0},
                  "outside_device": {"pinned_host": 5 << 29, "on_disk": 1 << 30, "offloaded": 1 << 31, "working_file": 1 << 32},
                  "estimated_seconds": seconds, "tokens_per_second": 1, "rates": "nominal",
                  "phases": [{"name": "forward", "seconds": seconds, "bound_by": "link", "products": seconds / 2, "disk": 0,
                              "link": seconds / 2, "host": 0}]}))
''')
    played.chmod(played.stat().st_mode | stat.S_IXUSR)
    plan_table.main([str(played), "--only", "8B, all weights, 8", "--gpu", "H100", "A100"])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[6:]]
    assert [(row[0], *row[2:5], row[8]) for row in rows] == [
        ("H100", "2.5", "7.0", "1", "forward 1 s: link, 50% waiting for the link"),
        ("A100", "2.5", "7.0", "3", "forward 3 s: link, 50% waiting for the link")]


@pytest.mark.parametrize("arguments, named", [
    (("no/such/binary",), "no/such/binary"),
    (("{train}", "--cases", "no/such/file"), "no/such/file"),
    (("{train}", "--cases", "{cases}"), "no case is 'a | b | c'"),
    (("{train}", "--only", "9B"), "no case begins with 9B"),
    (("{train}", "--gpu", "A100"), "plays no GPUs"),
    (("{train}", "--cases", "{folder}"), "--model"),
    (("{train}", "--cases", "{folder}", "--", "--no-such-option"), "--no-such-option"),
], ids=str)
def test_mistakes(train_fp32, tmp_path, capsys, arguments, named):
    (tmp_path / "cases").write_text("a | b | c")
    (tmp_path / "folder").write_text("a | no/such/model | --batch 1 | ")
    with pytest.raises(SystemExit) as ended:
        plan_table.main([a.format(train=train_fp32.path, cases=tmp_path / "cases", folder=tmp_path / "folder")
                         for a in arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and named in error and error.count("\n") == 1
