"""Free memory on a CPU: a plan for more is refused before anything is allocated, whatever the limit."""

import contextlib
import json
import math
import re

import pytest
from limited_runs import cgroup, run
from tokenizers import ByteLevelBPETokenizer
from trainer_runs import make, write_text

USUALLY = "fp32"  # see conftest.py

MIB = 1 << 20


@pytest.fixture(autouse=True)
def on_a_cpu(train):
    if train.device != "cpu":
        pytest.skip("of a CPU's memory")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("given") / "text", 500_000)


LARGE = ("--model", "d4", "--batch", 64, "--seq-len", 128, "--steps", 2)
LIMITS = {"cgroup": "memory.(limit_in_bytes|max)", "ulimit": "ulimit -v"}


@contextlib.contextmanager
def limited(kind, size):
    """The arguments of run() for such a limit."""
    if kind == "ulimit":
        yield {"address_space": size}
    else:
        with cgroup(size) as folder:
            yield {"inside": folder}


def refused(result, limit):
    """The MiB that are free, from the one line that refuses the plan."""
    error = result.stderr.decode()
    assert result.returncode == 2 and error.count("\n") == 1, (result.returncode, error)
    return float(re.search(rf"the plan takes [\d.]+ MiB and ([\d.]+) are free \(.*{limit}", error)[1])


@pytest.mark.parametrize("kind", LIMITS)
def test_a_plan_beyond_the_limit_is_refused(train, text, tmp_path, kind):
    """The plan is on stdout, and nothing is saved. The alternative that the line suggests then fits."""
    size = 220 * MIB
    with limited(kind, size) as limits:
        result = run(train, *LARGE, "--data", text, "--out", tmp_path / "out", **limits)
        free = refused(result, LIMITS[kind])
        assert free < size / MIB and b"  in all; " in result.stdout and b"step " not in result.stdout
        assert not list((tmp_path / "out").glob("step*"))
        [budget] = re.findall(r"--memory (\d+MiB)", result.stderr.decode())
        result = run(train, *LARGE, "--data", text, "--memory", budget, **limits)
        assert result.returncode == 0, result.stderr
        assert b"step     2/2" in result.stdout


@pytest.mark.parametrize("kind", LIMITS)
def test_a_bench_and_a_generation_are_refused_too(train, text, kind):
    with limited(kind, 220 * MIB) as limits:
        refused(run(train, *LARGE[:-2], "--bench", "--warmup", "0", "--steps", "1", **limits), LIMITS[kind])
        generation = ("--model", "d12", "--data", text, "--steps", 0, "--prompt", "a", "--sample", "tokens=9")
        refused(run(train, *generation, **limits, timeout=30), LIMITS[kind])


@pytest.mark.parametrize("kind", LIMITS)
def test_a_plan_is_only_remarked_upon(train, kind):
    with limited(kind, 220 * MIB) as limits:
        result = run(train, *LARGE, "--plan", "json", **limits)
        assert result.returncode == 0 and json.loads(result.stdout)["batch"] == 64
        assert re.search(rf"^here the plan takes [\d.]+ MiB and [\d.]+ are free \(.*{LIMITS[kind]}",
                         result.stderr.decode())
        assert not run(train, "--plan", **limits).stderr


@pytest.mark.parametrize("kind", LIMITS)
def test_batch_auto_takes_what_is_free(train, text, kind):
    """And it prints the limit. With more memory it takes more."""
    batches = []
    for size in (160 * MIB, 240 * MIB):
        with limited(kind, size) as limits:
            result = run(train, "--model", "d2", "--data", text, "--batch", "auto", "--seq-len", 128, "--steps", 1,
                         "--recompute", "none", **limits)
        assert result.returncode == 0, result.stderr
        said = re.search(rf"--batch auto: (\d+) sequences, the most that fit ([\d.]+) MiB \(.*{LIMITS[kind]}",
                         result.stdout.decode())
        assert float(said[2]) < size / MIB
        batches.append(int(said[1]))
    assert 1 <= batches[0] < batches[1]


TEXTS = {"bytes": ("d2", "text"), "tokens": ("model", "text"), "examples": ("model", "lines.jsonl")}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Data that are read, tokenized or packed before anything is planned, and a model with a tokenizer."""
    work = tmp_path_factory.mktemp("texts")
    lines = write_text(work / "text").read_text().splitlines() * 600
    (work / "text").write_text("\n".join(lines))
    (work / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines if line.strip()))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(work / "text")], vocab_size=2000)
    make(work / "model", "--layers", 2, "--heads", 2, "--channels", 64, "--positions", 128, "--vocab", tokenizer.get_vocab_size())
    tokenizer.save(str(work / "model" / "tokenizer.json"))
    return work


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("more", [0, 6])
def test_a_budget_of_all_there_is_fits(train, texts, kind, more):
    """--memory N in a cgroup of N or slightly more, which also has to hold what was read before and the
    kernel's share."""
    model, data = TEXTS[kind]
    options = ("--model", model if model == "d2" else texts / model, "--data", texts / data, "--batch", 16, "--seq-len", 64,
               "--steps", 2)
    least = train(*options, "--threads", 2, "--sample", "tokens=0", "--memory", "1MiB", "--plan", "--offload", "weights=device,state=device,gradients=device,inputs=device", code=2).stderr.decode()
    least = math.ceil(float(re.search(r"least that this takes is ([\d.]+) MiB", least)[1]))
    for budget in (least + 8, least + 20):
        with cgroup((budget + more) * MIB) as folder:
            result = run(train, *options, "--memory", f"{budget}MiB", inside=folder)
            assert result.returncode == 0, (budget, result.stderr)
            taken = re.search(rb"taken from the device: ([\d.]+) MiB; planned: ([\d.]+)", result.stdout)
            assert float(taken[1]) <= float(taken[2]) <= budget


def test_a_budget_for_another_machine_is_planned_as_it_is(train):
    """If the budget is below a limit, the plan uses what is left of the budget, and says so. A budget above
    all limits is meant for another machine."""
    with cgroup(100 * MIB) as folder:
        options = ("--plan", "--model", "d4", "--batch", 8, "--seq-len", 128)
        inside = run(train, *options, "--memory", "100MiB", inside=folder).stdout.decode()
        left = int(re.search(r"^--memory 100MiB, of which (\d+) MiB are left \(.*memory\.(?:limit_in_bytes|max)\): --rec", inside)[1])
        assert 80 < left < 100 and float(re.search(r"^  takes ([\d.]+) MiB", inside, re.MULTILINE)[1]) <= left
        beyond = run(train, *options, "--memory", "300MiB", inside=folder).stdout.decode()
        assert beyond.startswith("--memory 300MiB: --recompute")


def test_batch_auto_is_capped(train, text):
    """The limit comes from the data, or without data from the number of tokens: a sensible step, however much
    is free."""
    for options, batch, why in ((("--data", text), 449_999 // 128 // 10, "a tenth of the data"),
                                ((), 512, "64 Ki tokens")):
        result = run(train, "--model", "d1", "--batch", "auto", "--seq-len", 128, "--plan", "--memory", "8GiB", *options)
        assert re.findall(rf"--batch auto: (\d+) sequences, {why}", result.stdout.decode()) == [str(batch)]
    assert b"64 Ki tokens" in train("--help", "all").stdout


def test_the_plan_is_there_when_a_run_is_killed(train, text):
    """The plan is written line by line, even into a pipe."""
    process = train.start(*LARGE[:-2], "--steps", 10**6, "--data", text, "--batch", 2)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if b"in all; " in line:
            break
    process.kill()
    process.stdout.close()
    process.wait()
    assert b"in all; " in lines[-1] and lines[0].startswith(b"d4: ")
