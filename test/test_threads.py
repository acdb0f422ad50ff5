"""Threads: as many as OpenMP grants, whatever was asked for, with the same bits. Too few resources are
reported in one line."""

import resource
import subprocess

import pytest
from trainer_runs import ENVIRONMENT, figures, make, read_log, write_text

USUALLY = "bf16"  # see conftest.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("given")
    make(path / "model", "--layers", 2, "--heads", 2, "--channels", 48, "--positions", 150)
    write_text(path / "text")
    return path


@pytest.fixture(autouse=True)
def on_a_cpu(train):
    if train.device != "cpu":
        pytest.skip("a GPU computes")


def run(train, folder, log, *options, limits=(), **environment):
    """Three steps, with resource limits; returns the process after it has ended."""
    command = train.command("--model", folder / "model", "--data", folder / "text", "--batch", 3, "--seq-len", 150,
                            "--steps", 3, "--sample", "tokens=4", "--log", log, *options)

    def limit():
        for kind, size in limits:
            resource.setrlimit(kind, (size, size))
    return subprocess.run(command, env={**ENVIRONMENT, **environment}, preexec_fn=limit, capture_output=True,
                          timeout=120)


@pytest.fixture(scope="module")
def losses(folder, tmp_path_factory):
    """The log of a run with one thread, for each binary."""
    known = {}

    def of(train):
        if str(train) not in known:
            log = tmp_path_factory.mktemp("one") / "log"
            assert run(train, folder, log, "--threads", 1).returncode == 0
            known[str(train)] = figures(read_log(log))
        return known[str(train)]
    return of


def test_a_cpu_without_avx_512(train, folder, losses, tmp_path):
    """oneDNN has no products of bf16 there; they are made in fp32."""
    old = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    logs = []
    for threads in (1, 3):
        result = run(train, folder, tmp_path / f"log{threads}", "--threads", threads, **old)
        assert result.returncode == 0, result.stderr
        logs.append(figures(read_log(tmp_path / f"log{threads}")))
    assert logs[0] == logs[1]
    usual = losses(train)
    for line, wanted in zip(logs[0], usual, strict=True):
        assert line.keys() == wanted.keys()
        assert line.get("loss", 0) == pytest.approx(wanted.get("loss", 0), rel=2e-3 if train.precision == "bf16" else 1e-5)


@pytest.mark.parametrize("asked, granted, environment", [
    (2, 2, {}), (3, 3, {"OMP_DYNAMIC": "true"}), (2, 1, {"OMP_THREAD_LIMIT": "1"}), (5, 3, {"OMP_THREAD_LIMIT": "3"}),
    (2, 1, {"OMP_MAX_ACTIVE_LEVELS": "0"}), (3, 3, {"OMP_PLACES": "{0}", "OMP_PROC_BIND": "close"}),
    (0, None, {"OMP_NUM_THREADS": "3,2", "OMP_MAX_ACTIVE_LEVELS": "3"}),
    (0, None, {"OMP_NUM_THREADS": "3", "OMP_THREAD_LIMIT": "2", "OMP_DYNAMIC": "true"})], ids=str)
def test_fewer_threads_than_asked_for_change_no_bit(train, folder, losses, tmp_path, asked, granted, environment):
    result = run(train, folder, tmp_path / "log", "--threads", asked, **environment)
    assert result.returncode == 0, result.stderr
    assert figures(read_log(tmp_path / "log")) == losses(train)
    said = f"--threads {asked}: OpenMP grants {granted}" in result.stderr.decode()
    assert said == (granted is not None and granted < asked)


def runs_or_says_one_line(result, log, losses):
    """True if the run completed. If not, checks that it says why in one line."""
    error = result.stderr.decode()
    if result.returncode == 0:
        assert figures(read_log(log)) == losses
        return True
    assert result.returncode == 2 and error.startswith("train: ") and error.count("\n") == 1, error
    return False


@pytest.mark.parametrize("threads", [2, 9])
def test_little_address_space(train, folder, losses, tmp_path, threads):
    """From the size at which the libraries can be loaded to the size at which everything runs."""
    ran = []
    for kib in range(50_000, 210_000, 7_500):
        result = run(train, folder, tmp_path / "log", "--threads", threads,
                     limits=[(resource.RLIMIT_AS, kib << 10), (resource.RLIMIT_CORE, 0)])
        before_main = result.returncode == 127 or result.stderr.startswith(b"\nlibgomp: Out of memory")
        if ran or not before_main:  # otherwise the libraries did not even load
            ran.append(runs_or_says_one_line(result, tmp_path / "log", losses(train)))
    assert not ran[0] and ran[-1]


def test_threads_that_cannot_start(train, folder, tmp_path):
    result = run(train, folder, tmp_path / "log", "--threads", 1000, limits=[(resource.RLIMIT_AS, 300_000 << 10)])
    assert not runs_or_says_one_line(result, tmp_path / "log", [])
    assert "of 1000 threads only " in result.stderr.decode()


@pytest.mark.parametrize("name", ["OMP_STACKSIZE", "GOMP_STACKSIZE"])
@pytest.mark.parametrize("size", ["1K", "16K", "20K", "100G"])
def test_any_stack_size(train, folder, losses, tmp_path, name, size):
    result = run(train, folder, tmp_path / "log", "--threads", 2, **{name: size})
    assert runs_or_says_one_line(result, tmp_path / "log", losses(train))
