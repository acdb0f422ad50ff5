"""Runs with a limit of their memory: in a cgroup, or of their address space."""

import contextlib
import os
import pathlib
import resource
import subprocess

import pytest
from trainer_runs import ENVIRONMENT


def own_cgroups():
    """This process's own cgroups of version 1 and 2 as (version, folder), if tests may make cgroups there."""
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
    """A new cgroup with this memory limit; skips the test if it cannot be made."""
    for version, parent in own_cgroups():
        folder = parent / f"llmc-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(size))
        except OSError:  # the controller is not available for children here
            folder.rmdir()
            continue
        try:
            yield folder
        finally:
            folder.rmdir()
        return
    pytest.skip("no cgroup can be made here")


def run(train, *options, inside=None, address_space=None, timeout=100):
    """A run in a cgroup, or with a limit of its address space; returns it after it has ended."""
    def limit():
        if inside:
            (inside / "cgroup.procs").write_text("0")
        if address_space:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    return subprocess.run(train.command("--threads", 2, "--sample", "tokens=0", *options), env=ENVIRONMENT,
                          preexec_fn=limit, capture_output=True, timeout=timeout)
