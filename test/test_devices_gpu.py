"""Training on several GPUs, emulated: one process for each, between which NCCL is emulated too (test/gpu/nccl.cpp). Runs have
the same bits whatever each rank keeps and in every order of the devices' work, and they are those of ranks on a CPU within
rounding."""

import json
import os
import re
import shlex
import signal
import subprocess

import numpy as np
import pytest
from emulated_runs import BOUND, BUILD, DATA, FAULT, logged, losses, on_cpu, play, played
from machines import Machines, need_machines
from model_files import linked, prepare
from trainer_runs import ROOT, ranks_of, read_log, running, saved_bytes, taken_and_planned, unlike_ranks, wait_for_end, wait_for_line

pytestmark = pytest.mark.skipif(not (BUILD / "nccl_faults").exists(), reason="no CUDA Toolkit")

FAULTS = {
    "part_sizes": "sends 256 of type 1 as its part 1, and rank 1 receives 128",
    "part_types": "of type 7 as its part 1",
    "another_order": "as its part 1, and rank . receives",
    "nobody_receives": "did not receive what rank 0 sent",
    "nobody_sends": "waited too long for rank 1 to send part 1",
    "outside_of_a_group": "outside of a group",
    "two_streams": "on two streams",
    "captured": "while its stream is captured",
    "after_abort": "that was aborted",
    "asked_after_abort": "that was aborted",
    "after_destroy": "or destroyed",
    "never_connects": "waited too long for the other ranks to connect",
    "two_streams_in_a_group": "a group with two communicators or streams",
    "another_stream_captured": "an exchange while a stream is captured",
    "end_without_start": "the end of a group that was not begun",
    "unknown_peer": "a peer that does not exist",
    "part_for_itself": "a part for the rank itself",
    "two_parts_for_a_peer": "two parts for one peer in a group",
    "behind_the_end": "260 bytes at .* 0 bytes into an allocation of 256",
    "nobody_wrote": "which nobody wrote",
    "no_memory_for_a_peer": "no memory for the buffers of a peer",
    "host_memory": "not on the device",
    "gather_before_update": "race between streams: ncclGroup reads",
    "sum_before_arrival": "race between streams",
    "received_before_sum": "race between streams",
    # Which of the two comes first depends on how the ranks run.
    "overwritten_before_sent": r"race between streams: (ncclGroup reads|\S*fill\S* writes)",
}


def test_all_faults_are_here():
    assert set(play(BUILD / "nccl_faults").stdout.split()) == set(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(name):
    for seed in range(1, 4):
        right = play(BUILD / "nccl_faults", name, "right", seed=seed)
        assert right.returncode == 0, right.stderr
        wrong = play(BUILD / "nccl_faults", name, "wrong", seed=seed, GPU_PATIENCE="1")
        assert wrong.returncode == FAULT and re.search(FAULTS[name], wrong.stderr), wrong.stderr


# --- The trainer.

MODEL = {"llama": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--mlp-width", 72)}
STEPS = (*DATA, "--batch", 1, "--steps", 4, "--lr", "1e-2", "--warmup", 1, "--val-data", "data.bin", "--eval-every", 2,
         "--eval-batches", 2)
# What GPUs that are emulated are called.
NAMES = {"A100": "NVIDIA A100 80GB PCIe", "4090": "NVIDIA GeForce RTX 4090", "H100": "NVIDIA H100 80GB HBM3"}
# The --zero of three runs, and their options.
CASES = {
    "full": ((1, 2, 3), ()),
    "LoRA on NF4": ((1, 2, 3), ("--train", "lora", "--lora-rank", 3, "--base", "nf4", "--lora-dropout", 0.1)),
    "several micro-batches": ((1, 1, 0), ("--grad-accum", 6)),
}
MORE_CASES = {
    "four micro-batches": ((1, 0, 1), ("--grad-accum", 8)),
    "by block": ((3, 2, 0), ("--by-block", "--grad-accum", 4)),
    "update in backward": ((1, 3, 0), ("--by-block", "--update-in-backward")),
    "state on disk": ((3, 2, 1), ("--offload", "state=disk")),
    "updates by the hosts": ((3, 2, 1), ("--offload", "state=host,updates=host")),
    "a rank without state, updates by the hosts": ((3, 2, 1), ("--train", "lora", "--lora-rank", 1, "--offload", "state=host,updates=host")),
    "a rank without state on disk": ((1, 2, 3), ("--train", "lora", "--lora-rank", 1, "--offload", "state=disk,updates=host")),
    "updates in backward by the hosts": ((1, 3, 0), ("--by-block", "--update-in-backward", "--offload", "state=disk,updates=host")),
    "weights in host memory": ((1, 1, 0), ("--offload", "weights=host,gradients=host,state=host")),
}


# Only make test-more builds the trainer in fp32.
@pytest.fixture(params=[pytest.param("fp32", marks=pytest.mark.more), "bf16"])
def precision(request):
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("llama"), "llama", MODEL)


def gpus(precision, count=2, **environment):
    return played(precision, GPU_COUNT=str(count), **environment)


def linked_folder(path, folder):
    path.mkdir()
    return linked(path, folder)


def results(train, path, folder, *options):
    log, files, printed = logged(train, path, folder, *options, data=())
    return ([{k: v for k, v in line.items() if k != "waited_ms"} for line in log],
            {k: v for k, v in files.items() if k.endswith("safetensors")}, printed)


# The environments of the runs, and whether steps are replayed as graphs: recorded in the second step, replayed from the third on.
ORDERS = [({"GPU_ORDER": "late", "GPU_SEED": "3"}, "on"), ({"GPU_ORDER": "early", "GPU_SEED": "4"}, "on"),
          ({"GPU_ORDER": "random", "GPU_SEED": "5"}, "off")]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.more) for name in MORE_CASES)])
def test_orders_change_no_bit(model, precision, name, tmp_path):
    zeros, options = (CASES | MORE_CASES)[name]
    on_gpus = [results(gpus(precision, **environment), tmp_path / str(n), model, *STEPS, *options, "--devices", 2, "--zero", zero,
                       "--advanced", f"graph={graph}") for n, (zero, (environment, graph)) in enumerate(zip(zeros, ORDERS))]
    assert on_gpus[0][:2] == on_gpus[1][:2] == on_gpus[2][:2]
    without_host = [str(option).replace("state=host,updates=host", "state=disk").replace(",updates=host", "").replace("=host", "=disk")
                    for option in options]
    on_cpus = results(on_cpu(precision), tmp_path / "cpus", model, *STEPS, *without_host, "--devices", 2)
    np.testing.assert_allclose(losses(on_gpus[0][0]), losses(on_cpus[0]), rtol=BOUND[precision])
    for _, _, printed in on_gpus:
        taken, planned = taken_and_planned(printed)
        assert taken <= planned


@pytest.mark.more
def test_one_rank_measures_the_products(model, tmp_path):
    """The other uses what the first has written. A file that has everything gives the same bits again."""
    folder = linked_folder(tmp_path / "measured", model)
    logs = []
    for measures in (True, False):
        ran = gpus("bf16")(*STEPS, "--devices", 2, "--advanced", "algorithms=found.json", "--log", "log.jsonl", cwd=folder, minutes=5)
        assert (ran.stdout + ran.stderr).count(b"measuring ") == measures
        logs.append(losses(read_log(folder / "log.jsonl")).tolist())
    assert logs[0] == logs[1]


def shared_mappings(pid):
    """The bytes of each file in memory that a rank has mapped for its weights, by the file's number."""
    mappings = {}
    for line in open(f"/proc/{pid}/maps"):
        if "memfd:llmc-weights" in line:
            addresses, _, _, _, file = line.split()[:5]
            first, end = (int(address, 16) for address in addresses.split("-"))
            mappings[file] = mappings.get(file, 0) + end - first
    return mappings


@pytest.mark.parametrize("options, offload, files", [
    (("--grad-accum", 4), "weights=host", 1),
    (("--train", "lora", "--lora-rank", 3, "--base", "nf4"), "weights=host,embeddings=host", 2)], ids=["full", "lora"])
def test_weights_in_host_memory_are_there_once(model, tmp_path, options, offload, files):
    """The two ranks have mapped the same files, as large as the plan says, and train what they train with weights on the GPUs."""
    asked = (*STEPS, *options, "--devices", 2, "--zero", 1)
    there = results(gpus("bf16"), tmp_path / "host", model, *asked, "--offload", offload)
    here = results(gpus("bf16"), tmp_path / "device", model, *asked)
    assert there[:2] == here[:2]
    taken, planned = taken_and_planned(there[2])
    assert taken <= planned
    plan = json.loads(gpus("bf16")(*asked, "--offload", offload, "--plan", "json", cwd=model).stdout)
    assert 0 < plan["host"]["shared"] <= plan["outside_device"]["pinned_host"]
    with running(gpus("bf16"), *asked, "--steps", 10000, "--eval-every", 0, "--print-every", 1, "--offload", offload, cwd=model, text=True) as run:
        wait_for_line(run, r"^step +2/")
        first, second = (shared_mappings(rank) for rank in ranks_of(run))
    assert first == second and len(first) == files and 0 <= sum(first.values()) - plan["host"]["shared"] < files * 4096, (first, second)


def test_each_rank_has_weights_that_it_updates_whole(model):
    """With --zero 0 a rank updates the weights in host memory by itself, so it needs its own."""
    plan = json.loads(gpus("bf16")(*STEPS, "--devices", 2, "--zero", 0, "--offload", "weights=host", "--plan", "json", cwd=model).stdout)
    assert "shared" not in plan["host"] and plan["outside_device"]["pinned_host"] > 0


@pytest.mark.more
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", ["full", "LoRA on NF4"])
def test_four_gpus(model, precision, name, zero, tmp_path):
    options = (*STEPS, *CASES[name][1], "--devices", 4, "--zero", zero)
    runs = [results(gpus(precision, 4, GPU_ORDER=order), tmp_path / order, model, *options) for order in ("late", "random")]
    assert runs[0][:2] == runs[1][:2]
    on_cpus = results(on_cpu(precision), tmp_path / "cpus", model, *options)
    np.testing.assert_allclose(losses(runs[0][0]), losses(on_cpus[0]), rtol=BOUND[precision])


def test_gpus_of_two_machines(model, tmp_path):
    """Two in each. Sums are made inside a machine first, in the same order whatever each rank keeps."""
    need_machines()
    runs = []
    for zero, order in ((0, "late"), (1, "random"), (2, "early"), (3, "late")):
        train = gpus("bf16", 2, GPU_ORDER=order)
        folder = linked_folder(tmp_path / str(zero), model)
        Machines(folder, (2, 2)).run(train, *STEPS, "--zero", zero, "--log", "log.jsonl", "--out", "out", cwd=folder)
        runs.append((losses(read_log(folder / "log.jsonl")).tolist(), saved_bytes(folder / "out")))
    assert all(run == runs[0] for run in runs)
    on_cpus = results(on_cpu("bf16"), tmp_path / "cpus", model, *STEPS, "--devices", 4)
    np.testing.assert_allclose(runs[0][0], losses(on_cpus[0]), rtol=BOUND["bf16"])


@pytest.mark.parametrize("environment, devices, said", [
    ({"GPU_COUNT": "2"}, 3, "--devices 3: this machine has 2 GPUs"),
    ({"GPU_COUNT": "4", "CUDA_VISIBLE_DEVICES": "1,3"}, 3, "--devices 3: this machine has 2 GPUs in CUDA_VISIBLE_DEVICES=1,3"),
    ({"GPU_COUNT": "0"}, 2, "none answers"),
    ({"GPU_COUNT": "2", "NCCL_LIBRARY": "/nowhere/libnccl.so.2"}, 2, "NCCL cannot be loaded: /nowhere/libnccl.so.2"),
    ({"GPU_COUNT": "2", "NCCL_LIBRARY": __file__}, 2, f"NCCL cannot be loaded: {__file__}: invalid ELF header"),
], ids=str)
def test_gpus_that_are_not_there(model, tmp_path, environment, devices, said):
    ran = played("bf16", **environment)(*STEPS, "--devices", devices, cwd=model, code=2)
    assert said in ran.stderr.decode() and ran.stderr.count(b"\n") == 1


@pytest.mark.parametrize("lacks", ["ncclSend", "ncclCommGetAsyncError"])
def test_an_nccl_that_is_too_old(model, tmp_path, lacks):
    """A library with all of NCCL's functions but one."""
    names = re.findall(r'function\("(nccl\w+)"\)', (ROOT / "llmc/ranks_transfers.h").read_text())
    assert lacks in names
    source = "".join(f"void {name}() {{}}\n" for name in names if name != lacks)
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", tmp_path / "libnccl.so.2"], input=source, text=True, check=True)
    train = gpus("bf16", NCCL_LIBRARY=str(tmp_path / "libnccl.so.2"))
    error = train(*STEPS, "--devices", 2, cwd=model, code=2).stderr.decode()
    assert error == f"train: --devices: this NCCL has no {lacks}: it needs to be 2.7 or later\n"


@pytest.mark.parametrize("other", ["4090", pytest.param("H100", marks=pytest.mark.more)])
def test_unlike_gpus(model, tmp_path, other):
    """They train together, like two of one kind, and a line says what that costs."""
    said, logs = [], []
    for second in ("A100", other):
        train = gpus("bf16", **unlike_ranks(tmp_path, f"[ $RANK = 1 ] && export GPU={second}"))
        folder = linked_folder(tmp_path / second, model)
        said.append(train(*STEPS, "--devices", 2, "--log", "log.jsonl", cwd=folder, minutes=5).stderr.decode())
        logs.append(losses(read_log(folder / "log.jsonl")))
    assert said == ["", f"rank 1 has a {NAMES[other]} and rank 0 a {NAMES['A100']}: every step takes as long as on the slowest GPU, and what "
                    "fits is what fits on the smallest\n"]
    np.testing.assert_allclose(*logs, rtol=BOUND["bf16"])


@pytest.mark.skipif(bool(subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode), reason="not allowed to mount")
def test_a_container_with_little_shared_memory(model, tmp_path):
    train = played("bf16", GPU_COUNT="2")
    line = shlex.join(map(str, train.command(*STEPS, "--devices", 2)))
    ran = subprocess.run(["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=4m tmpfs /dev/shm && {line}"], cwd=model, env=train.environment,
                         capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
    assert re.search(r"NCCL: .*: unhandled system error .*; /dev/shm has \S+ MiB free, .* --shm-size=1g", ran.stderr), ran.stderr


def test_ranks_that_share_a_gpu(model, tmp_path):
    """As under a launcher that lets every rank see the first GPU only."""
    train = played("bf16", CUDA_VISIBLE_DEVICES="0")
    command = ["mpirun", "-n", "2", "--oversubscribe", *map(str, train.command(*STEPS, "--devices", 2))]
    environment = {**train.environment, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ran = subprocess.run(command, cwd=model, env=environment, capture_output=True, text=True, timeout=120)
    assert "ranks 0 and 1 have the same GPU" in ran.stderr


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.more) for zero in (1, 2)), 3])
def test_bench_says_where_the_time_of_each_rank_goes(model, zero):
    """Exchanges between GPUs are timed in their streams."""
    bench = json.loads(gpus("bf16")("--model", "model", "--batch", 2, "--seq-len", 32, "--grad-accum", 2, "--devices", 2, "--zero", zero, "--warmup", 1,
                                    "--steps", 3, "--bench", "json", "--advanced", "graph=off", cwd=model).stdout)
    assert [rank["rank"] for rank in bench["ranks"]] == [0, 1]
    for rank in bench["ranks"]:
        parts = {part: rank[f"{part}_ms"] for part in ("computing", "exchange_hidden", "exchange_not_hidden", "waiting")}
        assert all(ms >= 0 for ms in parts.values()) and parts["exchange_hidden"] + parts["exchange_not_hidden"] > 0, bench["ranks"]
        assert parts["exchange_not_hidden"] + parts["waiting"] > 0 and parts["computing"] > 0, bench["ranks"]
    first = bench["ranks"][0]
    step = sum(first[f"{part}_ms"] for part in ("computing", "exchange_not_hidden", "waiting"))
    assert step == pytest.approx(bench["step_ms"]["mean"], rel=0.01)


@pytest.mark.parametrize("rank, group, when", [(0, 20, ""), (1, 20, ""), (1, 1, ""), (0, 20, ":queued"), (1, 20, ":queued")])
def test_a_network_that_fails(model, tmp_path, rank, group, when):
    """NCCL's kernels wait for ever then, and both ranks with them, unless a rank's host notices before it waits."""
    train = played("bf16", GPU_COUNT="2", NCCL_BREAKS=f"{rank}:{group}{when}", GPU_PATIENCE="1000")
    ran = train(*STEPS, "--zero", 2, "--devices", 2, cwd=model, code=2)
    who = "" if rank == 0 else r"rank 1 \(host \S+\): "
    where = "before the first step" if group == 1 else r"in step \d; the last save: none"
    said = rf"train: {who}NCCL: an exchange failed: unhandled system error \(NCCL_DEBUG=INFO prints more\).*, {where}\n"
    assert re.fullmatch(said, ran.stderr.decode()), ran.stderr


def test_a_gpu_that_is_lost(model, tmp_path):
    """kill -9 of one rank ends the others, which wait in NCCL."""
    with running(gpus("bf16"), *STEPS, "--steps", 10000, "--eval-every", 0, "--print-every", 1, "--devices", 2, cwd=model, text=True,
                 stderr=-1) as run:
        wait_for_line(run, r"^step +2/")
        ranks = ranks_of(run)
        os.kill(ranks[1], signal.SIGKILL)
        error = run.communicate(timeout=60)[1]
        assert run.returncode == 2 and re.search(r"rank 1 \(host \S+\) was ended by signal 9", error), error
    wait_for_end(ranks)
