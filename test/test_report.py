"""--report, --log, --tensorboard and the line on a terminal: what a run shows of itself. The page is opened in a
browser by slow_report.py (make test-report)."""

import csv
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest
from report_files import RUN, page_data, write_log
from trainer_runs import ROOT, figures, read_log, refused, running, write_text

USUALLY = "fp32"  # see conftest.py

FIGURES = ("loss", "grad_norm", "lr", "tokens_per_second", "val_loss")


@pytest.fixture
def work(tmp_path):
    write_text(tmp_path / "text")
    return tmp_path


def points(curve):
    return dict(zip(curve["x"], curve["mean"]))


def steps_of(records, key="loss"):
    return [record["step"] for record in records if key in record]


def test_a_page_shows_what_the_log_has(train, work):
    train(*RUN, "--steps", 12, "--eval-every", 5, "--log", "log", "--report", "run.html", cwd=work)
    page, log = page_data(work / "run.html"), read_log(work / "log")
    [run] = page["runs"]
    for key in FIGURES:
        assert points(run["curves"][key]) == pytest.approx({line["step"]: line[key] for line in log if key in line}, rel=1e-5)
    smoothed = 0
    for i, line in enumerate((line for line in log if "loss" in line), 1):
        smoothed += (line["loss"] - smoothed) * max(2 / (i + 1), 0.05)
    assert run["curves"]["smoothed"]["mean"][-1] == pytest.approx(smoothed, rel=1e-5)
    assert page["state"] == "done" and page["steps"] == 12 and "12 steps read" in page["data"]
    assert [sample["step"] for sample in run["samples"]] == [12] and run["samples"][0]["text"]
    assert page["options"]["--batch"] == "1" and page["options"]["--sample tokens"] == "3"
    plan = train(*RUN, "--plan", cwd=work).stdout.decode()
    assert re.search(r"\d+\.\d\d  in all", plan)[0] in page["plan"]
    # Nothing is loaded from anywhere.
    text = (work / "run.html").read_text()
    assert "default-src 'none'" in text and set(re.findall(r"\w+://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}


def test_a_plan_shows_what_lives_when(train, work):
    train("--plan", "--model", "d3", "--seq-len", 40, "--recompute", "block", "--report", "plan.html", "--timeline", "t.json", cwd=work)
    page, timeline = page_data(work / "plan.html")["memory"], json.loads((work / "t.json").read_text())
    events = timeline["operations"]
    assert page["kinds"] == timeline["kinds"] and page["every"] == 1
    assert page["moments"] == [[e["range"], e["name"], e["bytes"]] for e in events]
    lives = {row[0]: row[6] for row in page["table"]}
    for name in ("qkv", "logits", "residual"):
        alive, shown = 0, lives[name] + [len(events)] * (len(lives[name]) % 2)
        for i, event in enumerate(events):
            if event["name"] == name:
                alive += {"take": 1, "release": -1, "operation": 0}[event["event"]]
            spans = [first <= i < end for first, end in zip(shown[::2], shown[1::2])]
            # A gap of one operation may be closed.
            assert any(spans) >= (alive > 0), (name, i)
            assert alive > 0 or not any(spans) or any(first < i < end and end - first > 1 for first, end in zip(shown[::2], shown[1::2]))
    assert len(lives["qkv"]) > 2  # it is made again in backward


def test_a_long_plan_is_shown_in_part(train, work):
    arguments = ("--plan", "--model", "d48", "--seq-len", 64, "--report", "plan.html", "--timeline", "t.json")
    train(*arguments, cwd=work)
    page, timeline = page_data(work / "plan.html")["memory"], json.loads((work / "t.json").read_text())
    totals = [sum(e["bytes"]) for e in timeline["operations"]]
    every = page["every"]
    assert every > 1 and len(page["moments"]) <= 1500
    assert [sum(m[2]) for m in page["moments"]] == [max(totals[i:i + every]) for i in range(0, len(totals), every)]


def test_a_plan_for_a_gpu_has_a_page(train, work):
    train("--plan", "--gpu", "H100", "--model", "d12", "--report", "plan.html", cwd=work)
    page = page_data(work / "plan.html")
    assert page["state"] == "plan" and "H100" in page["plan"] and page["memory"]["moments"]


@pytest.mark.parametrize("steps, width", [(5_000, 4), pytest.param(100_000, 64, marks=pytest.mark.more)])
def test_many_steps_stay_a_small_page_with_every_spike(train, work, steps, width):
    at = steps // 2 + 321
    write_log(work / "long.jsonl", steps, spike=at)
    train("--plan", "--model", "d1", "--report", "plan.html", "--report-with", "long.jsonl", cwd=work)
    assert (work / "plan.html").stat().st_size < 1.5e6
    curve = page_data(work / "plan.html")["runs"][1]["curves"]["loss"]
    assert 1000 <= len(curve["x"]) <= 2000 and curve["x"][-1] == steps and curve["width"] == width
    spike = curve["max"].index(100)
    assert curve["x"][spike] - width < at <= curve["x"][spike] and curve["min"][spike] < 5
    first, last = curve["x"][10] + 1, curve["x"][11]
    assert curve["mean"][11] == pytest.approx(sum(5 - i / steps for i in range(first, last + 1)) / width, rel=1e-5)


def test_no_text_becomes_markup(train, work):
    text = "</script><script>alert(1)</script><!--"
    log = work / "<b>&log"
    write_log(log, 3)
    train(*RUN, "--seq-len", 64, "--steps", 2, "--prompt", text, "--report", "run.html", "--report-with", log.name, cwd=work)
    page = page_data(work / "run.html")
    assert page["options"]["--prompt"] == text and page["runs"][0]["samples"][0]["text"].startswith(text)
    assert page["runs"][1]["name"] == log.name
    data = (work / "run.html").read_text().split('type="application/json">')[1].split("</script>")[0]
    assert "<" not in data


def test_a_page_is_always_complete(train, work):
    seen = set()
    with running(train, *RUN, "--steps", 10**6, "--save-every", 1, "--out", "out", "--report", "run.html", cwd=work, stdout=-3) as process:
        while len(seen) < 10:
            assert process.poll() is None
            if (work / "run.html").exists():
                curves = page_data(work / "run.html")["runs"][0]["curves"]
                seen.add(curves["loss"]["x"][-1] if "loss" in curves else 0)
            time.sleep(0.005)
        process.terminate()
        assert process.wait(timeout=60) == 143
    assert page_data(work / "run.html") and not (work / "run.html.tmp").exists()


def test_a_page_goes_on_after_a_resume(train, work):
    train(*RUN, "--steps", 4, "--out", "out", "--log", "log", "--report", "run.html", cwd=work)
    train("--resume", "out", "--steps", 6, cwd=work)
    assert list(points(page_data(work / "run.html")["runs"][0]["curves"]["loss"])) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("options, named", [
    ({"--report": "nowhere/run.html"}, ["--report nowhere/run.html", "No such file"]), ({"--report": "other.html"}, ["--report other.html", "another name"]),
    ({"--report": "."}, ["--report .", "directory"]), ({"--report": "run.html", "--report-with": "gone"}, ["--report-with: gone"]),
    ({"--report": "run.html", "--report-with": "text"}, ["--report-with text", "--log"]),
    ({"--report": "run.html", "--report-with": "log", "--log": "log"}, ["--report-with log", "this run writes it"]),
    ({"--report-with": "log"}, ["--report-with log", "--report FILE"]), ({"--tensorboard": "text"}, ["--tensorboard text"]),
    ({"--report": "run.html", "--log": "run.html"}, ["run.html", "too"]), ({"--report": "run.html", "--steps": 0}, ["--report run.html", "--steps 0"]),
    ({"--report-to": "wandb"}, ["--log", "log_to_wandb.py"]), ({"--report-to": "tensorboard"}, ["--tensorboard DIR"])],
    ids=lambda value: "")
def test_refused(train, work, options, named):
    (work / "other.html").write_text("<html>somebody's own</html>")
    refused(train, work, dict(zip(RUN[::2], RUN[1::2])) | {"--steps": 1} | options, *named)


# ---- logs

def test_a_log_counts_from_1_and_repeats_nothing(train, work):
    """Also after a kill that cut a line, and from an older save than the log's end."""
    options = (*RUN, "--schedule", "constant", "--eval-every", 2, "--save-every", 2, "--keep", 0)
    train(*options, "--steps", 6, "--out", "out", "--log", "log.csv", cwd=work)
    train(*options, "--steps", 6, "--log", "log", "--loss-by-position", "by.csv", "--out", "again", "--tensorboard", "board", cwd=work)
    whole, by_position = figures(read_log(work / "log")), read_log(work / "by.csv")
    assert steps_of(whole) == [1, 2, 3, 4, 5, 6] and steps_of(whole, "val_loss") == [2, 4, 6]
    rows = list(csv.DictReader((work / "log.csv").open()))
    assert figures([{key: json.loads(value) for key, value in row.items() if value} for row in rows]) == whole
    for path in (work / "log", work / "by.csv"):
        path.write_text(path.read_text() + '{"step": 7, "lo')
    train("--resume", "again/step-00000004", cwd=work)
    train("--resume", "out/step-00000004", cwd=work)
    assert figures(read_log(work / "log")) == whole and read_log(work / "by.csv") == by_position
    assert figures([{key: json.loads(value) for key, value in row.items() if value}
                    for row in csv.DictReader((work / "log.csv").open())]) == whole
    # A finished run validates again; that takes the place of the line before.
    train("--resume", "again", cwd=work)
    assert figures(read_log(work / "log")) == whole


def test_a_log_of_an_older_version_goes_on_in_its_count(train, work):
    train(*RUN, "--steps", 3, "--out", "out", "--log", "log", cwd=work)
    before = [record | {"step": record["step"] - ("loss" in record)} for record in read_log(work / "log")]
    (work / "log").write_text("".join(json.dumps(record) + "\n" for record in before))
    train("--resume", "out", "--steps", 5, "--report", "run.html", cwd=work)
    records = read_log(work / "log")
    assert records[:4] == before and steps_of(records) == [0, 1, 2, 3, 4] and steps_of(records, "val_loss") == [3, 5]
    assert list(points(page_data(work / "run.html")["runs"][0]["curves"]["loss"])) == [1, 2, 3, 4, 5]


def test_tensorboard_reads_the_events(train, work):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    options = (*RUN, "--schedule", "constant", "--save-every", 2, "--keep", 0, "--eval-every", 2, "--log", "log", "--out", "out")
    train(*options, "--steps", 5, "--tensorboard", "new/board", cwd=work)
    train("--resume", "out/step-00000002", "--steps", 6, cwd=work)
    events, log = EventAccumulator(str(work / "new" / "board"), size_guidance={"scalars": 0}), read_log(work / "log")
    events.Reload()
    assert len(list((work / "new" / "board").iterdir())) == 2
    for tag, key in {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/learning_rate": "lr", "eval/loss": "val_loss"}.items():
        expected = [(line["step"], line[key]) for line in log if key in line]
        got = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in got] == [step for step, _ in expected], tag
        assert [value for _, value in got] == pytest.approx([value for _, value in expected], rel=1e-6)
        assert abs(events.Scalars(tag)[0].wall_time - time.time()) < 600


@pytest.mark.parametrize("tool", ["wandb", "trackio"])
def test_scripts_send_a_log(tmp_path, tool):
    """They call the tool, for which another module stands in here, as its documentation says."""
    (tmp_path / f"{tool}.py").write_text(
        "import json, sys\n"
        "class Run:\n"
        "    def log(self, metrics, step=None): print(json.dumps([metrics, step]))\n"
        "    def finish(self): print('finished')\n"
        "def init(project, name=None): print(project, name); return Run()\n"
        "log, finish = Run().log, Run().finish\n")
    (tmp_path / "log").write_text('{"step":1,"loss":5.5,"lr":0.1,"ms":3}\n{"step":1,"val_loss":5.25}\n')
    command = [sys.executable, ROOT / "scripts" / f"log_to_{tool}.py"]
    sent = subprocess.run([*command, "log", "books", "first"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True, check=True).stdout.splitlines()
    assert sent == ["books first", '[{"train/loss": 5.5, "train/learning_rate": 0.1}, 1]', '[{"eval/loss": 5.25}, 1]', "finished"]
    assert tool in subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True).stderr


# ---- the line on a terminal

def on_terminal(train, *arguments, columns, name="xterm", cwd):
    """Runs the binary on a terminal; returns its exit code, what it wrote, and the lines that are then on the screen."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(train.command(*arguments), stdout=theirs, stderr=theirs, cwd=cwd, env=train.environment | {"TERM": name})
    os.close(theirs)
    written = b""
    while True:
        try:
            written += os.read(ours, 1 << 16)
        except OSError:  # the last process has closed it
            break
    os.close(ours)
    screen, at = [""], 0
    for part in re.findall(r"\x1b\[K|.|\n|\r", written.decode()):
        if part == "\r":
            at = 0
        elif part == "\n":
            screen.append("")
            at = 0
        elif part == "\x1b[K":
            screen[-1] = screen[-1][:at]
        else:
            screen[-1] = screen[-1][:at] + part + screen[-1][at + 1:]
            at += 1
    return process.wait(timeout=60), written.decode(), screen


def test_a_terminal_shows_one_line(train, work):
    # The line is drawn ten times a second: steps of this size are long enough on any machine.
    code, written, screen = on_terminal(train, *RUN, "--batch", 4, "--seq-len", 128, "--steps", 60, "--eval-every", 20, "--save-every", 30,
                                        "--out", "out", columns=80, cwd=work)
    drawn = re.findall(r"\r\x1b\[K(step [^\r\n]*)", written)
    assert code == 0 and len(drawn) >= 2 and max(map(len, drawn)) < 80
    assert re.fullmatch(r"step \d+/60  loss \d\.\d{4}  smoothed \d\.\d{4}  \d+k? tokens/s  \d+:\d\d left  \d+ MiB", drawn[0])
    steps = [line for line in screen if line.startswith("step ")]
    # What stays: the validations and the last step's line; each line is whole.
    assert [line.split("loss")[0] for line in steps if "validation" in line] == [f"step {step:>5} validation " for step in (20, 40, 60)]
    assert [line for line in steps if "validation" not in line] == [line for line in screen if line.startswith("step 60/60  loss")]
    assert {"saved step 30 in out", "saved step 60 in out", "--- sample after 60 steps ---"} <= set(screen)


def test_the_line_fits_and_gives_way(train, work):
    code, written, screen = on_terminal(train, *RUN, "--steps", 40, "--lr", 1e3, "--clip", 0, "--warmup", 20, "--print-every", 2,
                                        columns=40, cwd=work)
    kept = [line for line in screen if line.startswith("step ")]
    assert code == 2 and all(len(line) < 40 for line in kept) and re.match(r"step 2/40  loss", kept[0])
    assert screen[-2].startswith("train: step ")  # the error is not drawn over
    for name in ("dumb", ""):
        _, written, screen = on_terminal(train, *RUN, "--steps", 2, columns=80, name=name, cwd=work)
        assert "\x1b" not in written and any(re.match(r"step +2/2 100.0% \| loss", line) for line in screen)
