"""Lets the tests import the scripts of dev/ and dev/data/, and gives those of the trainer its binaries."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "dev" / "data")]


def pytest_generate_tests(metafunc):
    """A test that asks for `train` runs once for each binary; train_fp32 and train_bf16 are those of a precision."""
    for name in {"train", "train_fp32", "train_bf16"} & set(metafunc.fixturenames):
        from trainer_runs import binaries  # not before: other tests need no binary
        wanted = name.removeprefix("train").removeprefix("_")
        metafunc.parametrize(name, [b for b in binaries() if wanted in ("", b.precision)], ids=str, scope="session")
