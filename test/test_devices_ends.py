"""How a run on several devices ends before its time: ranks that are killed, stopped or slow, signals to any of them, a disk that is
full or fails.
Whatever happens, all ranks end, with one line and one exit code, and leave nothing behind; and the last save is good."""

import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import time

import pytest
from trainer_runs import (IS_MPICH, Train, make, processes_below, random_tokens, ranks_of, read_log, running, saved_bytes, shared_memory_of, small_disk,
                          unlike_ranks, wait_for_end, wait_for_line, write_shard)

USUALLY = "fp32"
LONG = ("--model", "model", "--data", "data.bin", "--batch", 2, "--seq-len", 24, "--schedule", "constant", "--warmup", 1, "--lr", "1e-2",
        "--steps", 10**6, "--print-every", 1, "--sample", "tokens=0", "--save-every", 5, "--log", "log",
        "--out", "out", "--devices", 3)


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "model", "--family", "llama", "--layers", 2, "--heads", 4, "--channels", 64, "--positions", 64, "--vocab", 256,
         "--kv-heads", 2)
    write_shard(tmp_path / "data.bin", random_tokens(256, 4000))
    return tmp_path


pytestmark = pytest.mark.on_a_cpu("test_devices_gpu.py trains on several GPUs")


@contextlib.contextmanager
def ranks_running(train, *options, cwd):
    """A run and the processes of its ranks. At the end all must be gone, with MPI's launcher and the shared memory that they had."""
    processes, shared = set(), set()
    with running(train, *LONG, *options, cwd=cwd, text=True, stderr=-1) as process:
        ranks = []

        def find_ranks():
            while len(ranks) < 3 and process.poll() is None:
                ranks[:] = ranks_of(process)
            processes.update(processes_below(process.pid))
            shared.update(shared_memory_of(ranks))
            return ranks
        process.find_ranks = find_ranks
        yield process
        process.communicate(timeout=60)
    wait_for_end(processes)
    assert not [path for path in shared if pathlib.Path(path).exists()]


def ends(process, code, within=30):
    """Waits for a run that must end now, with this exit code and within `within` seconds; returns what it printed."""
    began = time.monotonic()
    out, error = process.communicate(timeout=60)
    took = time.monotonic() - began
    assert took < within and process.returncode == code, (took, process.returncode, error)
    return out, error


def launcher_of(process):
    return next(processes_below(process.pid))


# ---- ranks that are lost

@pytest.mark.parametrize("killed", [0, 2])
def test_a_rank_that_is_killed_ends_all(train_fp32, folder, killed):
    """All ranks are gone 5 seconds later, or 9 on a busy machine. The bound is below 10 seconds, when an alarm ends ranks that wait
    for others, and 15, when the starter ends a launcher that is stuck: neither may be needed."""
    with ranks_running(train_fp32, cwd=folder) as process:
        wait_for_line(process, r"^step +12/")
        os.kill(process.find_ranks()[killed], signal.SIGKILL)
        error = ends(process, 2, within=9)[1]
    who, how = f"rank {killed}", r"signal 9 \(Killed\)"
    if IS_MPICH:  # its launcher may name another rank, which its library UCX ended, with lines of its own
        assert error.count("train: ") == 1, error
        who, how, error = "a rank", r"signal (6|9|15) \(\w+\)", error.splitlines(keepends=True)[-1]
    assert re.fullmatch(rf"train: --devices 3: {who} \(host \S+\) was ended by {how} in step \d+; the last save: "
                        r"out/step-000000\d+\n", error), error
    train_fp32("--resume", "out", "--steps", 40, "--devices", 3, cwd=folder)


@pytest.mark.parametrize("moments", [5, pytest.param(50, marks=pytest.mark.more)])
def test_ranks_that_are_killed_at_random_moments(train_fp32, folder, moments):
    """Some while they start, some in a step, many in a save, as each step is saved. --resume auto always goes on, and the end is
    that of an unbroken run."""
    chance = random.Random(moments)
    steps = 0
    for _ in range(moments):
        with ranks_running(train_fp32, "--save-every", 1, "--resume", "auto", cwd=folder) as process:
            if chance.random() < 0.8:
                wait_for_line(process, r"^step +\d+/")
            time.sleep(chance.uniform(0, 0.3))
            ranks = process.find_ranks()
            os.kill(chance.choice(ranks), signal.SIGKILL)
            error = ends(process, 2)[1].splitlines()
        assert len([line for line in error if line.startswith("train: ")]) == 1, error
        saves = sorted((folder / "out").glob("step-????????"))
        if saves:
            step = int(saves[-1].name[5:])
            assert step >= steps, "a save was lost"
            steps = step
    train_fp32(*LONG, "--resume", "auto", "--steps", steps + 3, cwd=folder)
    train_fp32(*LONG, "--steps", steps + 3, "--out", "whole", "--log", "whole.log", cwd=folder)
    assert saved_bytes(folder / "out" / "latest") == saved_bytes(folder / "whole" / "latest")
    assert {line["step"]: line["loss"] for line in read_log(folder / "log")} == \
        {line["step"]: line["loss"] for line in read_log(folder / "whole.log")}


def test_the_launching_process_is_killed(train_fp32, folder):
    """Its ranks do not stay behind."""
    with ranks_running(train_fp32, cwd=folder) as process:
        wait_for_line(process, r"^step +3/")
        process.find_ranks()
        process.kill()


def test_mpis_launcher_is_killed(train_fp32, folder):
    """It removes no shared memory then, so the launching process does it."""
    with ranks_running(train_fp32, cwd=folder) as process:
        wait_for_line(process, r"^step +3/")
        process.find_ranks()
        os.kill(launcher_of(process), signal.SIGKILL)
        error = ends(process, 2)[1]
    assert re.fullmatch(r"train: --devices 3: MPI's launcher was ended by signal 9 \(Killed\) in step \d+; the last save: \S+\n", error), error


def test_mpis_launcher_is_stuck(train_fp32, folder):
    """OpenMPI's sometimes is if a rank is killed while it starts. Here it is stopped before a rank is killed. MPICH's other ranks end
    too, so that any may be named."""
    with ranks_running(train_fp32, cwd=folder) as process:
        wait_for_line(process, r"^step +7/")
        ranks = process.find_ranks()
        os.kill(launcher_of(process), signal.SIGSTOP)
        os.kill(ranks[1], signal.SIGKILL)
        error = ends(process, 2)[1]
    lost = "[0-2]" if IS_MPICH else 1
    assert re.fullmatch(rf"train: --devices 3: rank {lost} \(host \S+\) ended without a word in step \d+; the last save: \S+\n", error), error


@pytest.mark.parametrize("stopped, who", [(0, r"rank [12] \(host \S+\): "), (2, r"(rank 1 \(host \S+\): )?")], ids=["0", "2"])
def test_a_rank_that_does_not_answer(train_fp32, folder, stopped, who):
    """As if its machine hung, or its network were cut. One of the others says so after that time."""
    with ranks_running(train_fp32, "--advanced", "patience=3", cwd=folder) as process:
        wait_for_line(process, r"^step +12/")
        os.kill(process.find_ranks()[stopped], signal.SIGSTOP)
        error = ends(process, 2)[1]
    assert re.fullmatch(rf"train: {who}no sign of life from rank {stopped} \(host \S+\) for 3 s \(--advanced patience\), in step \d+; "
                        r"the last save: out/step-\d+\n", error), error
    train_fp32(*LONG, "--resume", "auto", "--steps", 40, cwd=folder)
    train_fp32(*LONG, "--steps", 40, "--out", "whole", "--log", "whole.log", cwd=folder)
    assert saved_bytes(folder / "out" / "latest") == saved_bytes(folder / "whole" / "latest")


def test_a_slow_rank_is_waited_for(train_fp32, folder):
    """One that is stopped for less than that time, several times."""
    with ranks_running(train_fp32, "--advanced", "patience=4", cwd=folder) as process:
        wait_for_line(process, r"^step +2/")
        rank = process.find_ranks()[1]
        for _ in range(3):
            os.kill(rank, signal.SIGSTOP)
            time.sleep(1.5)
            os.kill(rank, signal.SIGCONT)
            wait_for_line(process, r"^step ")
        process.send_signal(signal.SIGTERM)
        out, error = ends(process, 128 + signal.SIGTERM)
    assert error == "stopping after this micro-batch; Ctrl-C again: at once, without saving\n"
    step = re.search(r"interrupted after step (\d+)", out)[1]
    train_fp32(*LONG, "--steps", step, "--out", "whole", cwd=folder)
    assert saved_bytes(folder / "out" / "latest") == saved_bytes(folder / "whole" / "latest")


SLOW_PRODUCTS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int dnnl_primitive_execute(void* primitive, void* stream, int count, void* arguments) {
    usleep(4000);
    return ((int (*)(void*, void*, int, void*))dlsym(RTLD_NEXT, "dnnl_primitive_execute"))(primitive, stream, count, arguments);
}
"""


@pytest.mark.parametrize("slow", [0, 2])
def test_the_line_of_a_step_names_the_slow_rank(train_fp32, folder, slow):
    """Each product of that rank takes 4 ms longer. The first rank prints the line, and waits unless it is the slow one."""
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", folder / "slow.so"], input=SLOW_PRODUCTS, text=True, check=True)
    train = Train(train_fp32.path, **unlike_ranks(folder, f"[ $RANK = {slow} ] && export LD_PRELOAD={folder}/slow.so"))
    waited = r"\d\.\d%" if slow == 0 else r"[2-9]\d\.\d%"
    with ranks_running(train, "--save-every", 0, cwd=folder) as process:
        for _ in range(2):
            wait_for_line(process, rf"^step .* \| waited {waited} \| rank {slow} is slow \| \d+:\d+ left$")
        process.find_ranks()
        process.send_signal(signal.SIGTERM)
        ends(process, 128 + signal.SIGTERM)


def test_a_rank_that_does_something_else_is_waited_for(train_fp32, folder):
    """The first rank samples for longer than that time."""
    train_fp32(*LONG, "--advanced", "patience=3", "--steps", 2, "--sample", "every=1,tokens=4000", cwd=folder)


# ---- signals

@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
@pytest.mark.parametrize("to", ["the launching process", "rank 0", "rank 2"])
def test_a_signal_stops_all_after_the_same_micro_batch(train_fp32, folder, sent, to):
    """All stop, with one save, wherever it is sent."""
    with ranks_running(train_fp32, "--save-every", 0, cwd=folder) as process:
        wait_for_line(process, r"^step +7/")
        ranks = process.find_ranks()
        os.kill(ranks[int(to[-1])] if to.startswith("rank") else process.pid, sent)
        out, error = ends(process, 128 + sent)
    step = int(re.search(r"interrupted after step (\d+)", out)[1])
    assert [f.name for f in (folder / "out").glob("step-*")] == [f"step-{step:08}"] and error.count("\n") <= 1, error
    train_fp32("--resume", "out", "--steps", step + 2, "--devices", 3, cwd=folder)


def test_a_signal_asks_for_a_save(train_fp32, folder):
    with ranks_running(train_fp32, "--save-every", 0, cwd=folder) as process:
        wait_for_line(process, r"^step +3/")
        process.send_signal(signal.SIGUSR1)
        wait_for_line(process, r"^saved step \d+ in out")
        wait_for_line(process, r"^step +\d+/")
        process.send_signal(signal.SIGTERM)


def test_two_signals_end_at_once(train_fp32, folder):
    slow = ("--seq-len", 60, "--batch", 64, "--grad-accum", 300)
    with ranks_running(train_fp32, *slow, cwd=folder) as process:
        wait_for_line(process, "^data: ")
        time.sleep(0.5)
        process.find_ranks()
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode in (130, 2)


# ---- the disk

def test_a_full_disk_ends_all(train_fp32, folder, tmp_path):
    """Only the first rank writes, and says so."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        error = train_fp32(*LONG, "--steps", 4, "--out", disk / "out", "--devices", 2, cwd=folder, code=2).stderr
    assert error.count(b"\n") == 1 and b"rank" not in error


def test_a_full_disk_of_another_rank_ends_all(train_fp32, folder):
    """Each rank keeps its part of the state in a file of its own. The rank that has no room for it says so, and which one it is."""
    with small_disk(folder / "disk", "64k") as disk:
        train = Train(train_fp32.path, **unlike_ranks(folder, f"[ $RANK = 2 ] && export TMPDIR={disk}"))
        error = train(*LONG, "--offload", "state=disk", "--steps", 4, cwd=folder, code=2).stderr.decode()
    assert re.fullmatch(r"train: rank 2 \(host \S+\): --offload state=disk: \S+ MiB cannot be had in \S+/disk \(TMPDIR names another folder\): "
                        r"No space left on device\n", error), error


def test_a_disk_of_another_rank_that_fails_ends_all(train_fp32, folder, bad_disk):
    """In the middle of a step. What was saved is good."""
    train = Train(train_fp32.path, **unlike_ranks(folder, f"[ $RANK = 2 ] && export LD_PRELOAD={bad_disk} BAD_DISK_FAILS={folder}/now"))
    with ranks_running(train, "--offload", "state=disk", cwd=folder) as process:
        wait_for_line(process, r"^step +7/")
        process.find_ranks()
        (folder / "now").touch()
        error = ends(process, 2)[1]
    assert re.fullmatch(r"train: rank 2 \(host \S+\): \S+: what --offload state=disk keeps there cannot be (read|written): Input/output error, "
                        r"in step \d+; the last save: out/step-\d+\n", error), error
    train_fp32("--resume", "out", "--steps", 20, "--devices", 3, cwd=folder)
