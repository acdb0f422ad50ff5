"""What is free on a CPU: a plan beyond it is refused before anything is taken, whatever limits it."""

import contextlib
import json
import os
import pathlib
import re
import resource
import subprocess

import pytest
from trainer_runs import ENVIRONMENT, write_text

MIB = 1 << 20


@pytest.fixture(autouse=True)
def on_a_cpu(train):
    if train.device != "cpu":
        pytest.skip("of a CPU's memory")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("given") / "text", 500_000)


def own_cgroups():
    """Where cgroups can be tried: this process's own, of version 1 and 2, as (version, folder)."""
    paths = [line.split(":", 2) for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines()]
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ")
        root, at = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        for _, names, path in paths:
            if version and (names == "" if version == 2 else "memory" in names.split(",")):
                inside = path.removeprefix(root) if root != "/" else path
                yield version, pathlib.Path(at + inside)


@contextlib.contextmanager
def cgroup(size):
    """A new cgroup with so many bytes; the test is skipped where none can be made."""
    for version, parent in own_cgroups():
        folder = parent / f"llmc-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(size))
        except OSError:  # the controller is not for children here
            folder.rmdir()
            continue
        try:
            yield folder
        finally:
            folder.rmdir()
        return
    pytest.skip("no cgroup can be made here")


def run(train, *options, inside=None, address_space=None, timeout=100):
    """A run in a cgroup, or with a limit of its addresses, when it has ended."""
    def limit():
        if inside:
            (inside / "cgroup.procs").write_text("0")
        if address_space:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    return subprocess.run(train.command(*options, "--threads", 2, "--sample-tokens", 0), env=ENVIRONMENT,
                          preexec_fn=limit, capture_output=True, timeout=timeout)


LARGE = ("--model", "d4", "--batch", 64, "--seq-len", 128, "--steps", 2)
LIMITS = {"cgroup": "memory.(limit_in_bytes|max)", "ulimit": "ulimit -v"}


@contextlib.contextmanager
def limited(kind, size):
    """The options of run() for such a limit."""
    if kind == "ulimit":
        yield {"address_space": size}
    else:
        with cgroup(size) as folder:
            yield {"inside": folder}


def refused(result, limit):
    """The MiB that are free by the one line that says no."""
    error = result.stderr.decode()
    assert result.returncode == 2 and error.count("\n") == 1, (result.returncode, error)
    return float(re.search(rf"the plan takes [\d.]+ MiB and ([\d.]+) are free \(.*{limit}", error)[1])


@pytest.mark.parametrize("kind", LIMITS)
def test_a_plan_beyond_the_limit_is_refused(train, text, tmp_path, kind):
    """With its plan on stdout, and nothing saved. What is said to be chosen instead then fits."""
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
def test_a_bench_and_a_generation_are_refused_too(train, kind):
    with limited(kind, 220 * MIB) as limits:
        refused(run(train, *LARGE[:-2], "--bench", "--bench-warmup", 0, "--bench-steps", 1, **limits), LIMITS[kind])
        refused(run(train, "--model", "d12", "--steps", 0, "--prompt", "a", **limits, timeout=30), LIMITS[kind])


@pytest.mark.parametrize("kind", LIMITS)
def test_a_plan_is_only_remarked_upon(train, kind):
    with limited(kind, 220 * MIB) as limits:
        result = run(train, *LARGE, "--plan", "--json", **limits)
        assert result.returncode == 0 and json.loads(result.stdout)["batch"] == 64
        assert re.search(rf"^here the plan takes [\d.]+ MiB and [\d.]+ are free \(.*{LIMITS[kind]}",
                         result.stderr.decode())
        assert not run(train, "--plan", **limits).stderr


@pytest.mark.parametrize("kind", LIMITS)
def test_batch_auto_takes_what_is_free(train, text, kind):
    """And says what keeps it from more; with more memory it takes more."""
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


def test_batch_auto_is_capped(train, text):
    """By the data, and without data by tokens: a sensible step, however much is free."""
    for options, batch, why in ((("--data", text), 449_999 // 128 // 10, "a tenth of the data"),
                                ((), 512, "64 Ki tokens")):
        result = run(train, "--model", "d1", "--batch", "auto", "--seq-len", 128, "--plan", "--memory", "8GiB", *options)
        assert re.findall(rf"--batch auto: (\d+) sequences, {why}", result.stdout.decode()) == [str(batch)]
    assert b"64 Ki tokens" in train("--help").stdout


def test_the_plan_is_there_when_a_run_is_killed(train, text):
    """It is written line by line, also into a pipe."""
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
