"""Lets the tests import the scripts of dev/ and dev/data/, and gives the trainer's tests its binaries."""

import collections
import itertools
import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# As in trainer_runs.py, for PyTorch in scripts that tests start: threads that wait sleep.
os.environ["OMP_WAIT_POLICY"] = "passive"
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "dev" / "data")]
# make test-more runs what make test leaves out: tests that are marked `more`, and the other precision of test
# files whose subject is the same in both. These files name the usual one: USUALLY = "fp32".
MORE = bool(os.environ.get("MORE_TESTS"))
# Files that take long begin first, the longest before others, so that no worker still has one when the others have ended.
LONG = ("emulated", "devices_gpu", "tokenizers", "devices_ends", "devices", "emulated_kernels", "memory", "export", "json_lines",
        "streamed_training", "bench_scripts", "families", "attention_rows", "gpu_plans", "streaming", "quantized_base", "embeddings", "train")


# A test's signals must reach its runs, even if these tests were started with signals ignored (by nohup, or &
# in a script). A run would inherit an ignored signal, but not a handler.
for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))


def pytest_configure(config):
    config.addinivalue_line("markers", "quick: make quick runs it")
    config.addinivalue_line("markers", "more: slow, and seldom finds what others do not; make test-more runs it")
    config.addinivalue_line("markers", "usually(precision): make test runs it in this precision only")
    config.addinivalue_line("markers", "on_a_cpu(reason): not with a GPU's binary")
    config.addinivalue_line("markers", "not_played(reason): not on the GPU that test/gpu plays; on real ones it runs")


def pytest_generate_tests(metafunc):
    """A test with the argument `train` runs once for each binary; train_fp32 and train_bf16 are those of one
    precision."""
    mark = metafunc.definition.get_closest_marker("usually")
    usually = "" if MORE else mark.args[0] if mark else getattr(metafunc.module, "USUALLY", "")
    for name in {"train", "train_fp32", "train_bf16"} & set(metafunc.fixturenames):
        from trainer_runs import binaries  # imported here because other tests need no binary
        wanted = name.removeprefix("train").removeprefix("_") or usually
        metafunc.parametrize(name, [b for b in binaries() if wanted in ("", b.precision)], ids=str, scope="session")


def pairwise(items):
    """Leaves out tests whose every pair of parameters other tests have: of a function with three parameters or more (the
    binary is one), make test runs a choice in which each two values of different parameters occur together, make
    test-more all combinations. The choice is always the same. Such a test must not skip some combinations: just these may be chosen."""
    functions = collections.defaultdict(dict)
    for item in items:
        if hasattr(item, "callspec"):
            values = enumerate(item.callspec._idlist)  # one name for each parametrize or fixture
            functions[item.nodeid.partition("[")[0]][item] = set(itertools.combinations(values, 2))
    left_out = set()
    for pairs in functions.values():
        missing = set().union(*pairs.values())
        left_out |= pairs.keys() if missing else set()
        while missing:
            best = max(pairs, key=lambda item: len(pairs[item] & missing))
            missing -= pairs[best]
            left_out.discard(best)
    return [item for item in items if item not in left_out]


def pytest_collection_modifyitems(config, items):
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for name, is_excluded in (("not_played", any(getattr(value, "is_played", False) for value in values)),
                                  ("on_a_cpu", any(getattr(value, "device", "cpu") != "cpu" for value in values))):
            mark = item.get_closest_marker(name)
            if mark and is_excluded:
                item.add_marker(pytest.mark.skip(reason=f"{name}: {mark.args[0]}"))
    kept = items if MORE else pairwise([item for item in items if not item.get_closest_marker("more")])
    if "TEST_PART" in os.environ:  # "3/16": every sixteenth test, from the third on
        number, parts = map(int, os.environ["TEST_PART"].split("/"))
        kept = kept[number - 1::parts]
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    names = [f"test_{name}" for name in LONG]
    items[:] = sorted(kept, key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))


def pytest_collection_finish(session):
    """PyTorch computes small references here. With more threads than free cores, as when tests run in
    parallel, its threads would wait for each other ten times as long as they compute."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_terminal_summary(terminalreporter, config):
    """Adds the seconds of each file to those of the C++ tests; make test prints the ten longest."""
    if "TEST_SECONDS" in os.environ and not hasattr(config, "workerinput"):
        seconds = collections.Counter()
        for reports in terminalreporter.stats.values():
            for report in reports:
                seconds[getattr(report, "nodeid", "").split("::")[0]] += getattr(report, "duration", 0)
        with open(os.environ["TEST_SECONDS"], "a") as file:
            file.writelines(f"{took:5.0f} {name}\n" for name, took in seconds.items() if name)


@pytest.fixture(scope="session")
def bad_disk(tmp_path_factory):
    """A library that makes file systems fail as it is told (bad_disk.cpp)."""
    library = tmp_path_factory.mktemp("bad_disk") / "bad_disk.so"
    source = pathlib.Path(__file__).with_name("bad_disk.cpp")
    subprocess.run(["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", source, "-o", library], check=True)
    return library
