"""Training on several machines, which are simulated on this one. Sums are made inside a machine first."""

import hashlib
import json
import pathlib
import re
import subprocess

import pytest
from machines import Machines, Networked, need_machines, need_networks, ranks_in
from trainer_runs import make, random_tokens, read_log, saved_bytes, shared_memory_of, wait_for_end, write_shard

USUALLY = "fp32"
STEP = ("--model", "model", "--data", "data.bin", "--batch", 2, "--seq-len", 24, "--threads", 1)
BASE = (*STEP, "--val-data", "data.bin", "--steps", 4, "--warmup", 1, "--lr", "1e-2", "--eval-every", 2, "--eval-batches", 2,
        "--sample", "tokens=0", "--log", "log", "--out", "out")


pytestmark = pytest.mark.on_a_cpu("test_devices_gpu.py has machines with GPUs")


@pytest.fixture(autouse=True)
def means():
    need_machines()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("machines")
    make(work / "model", "--family", "llama", "--layers", 2, "--heads", 4, "--channels", 64, "--positions", 64, "--vocab", 256,
         "--kv-heads", 2)
    write_shard(work / "data.bin", random_tokens(256, 4000))
    return work


@pytest.fixture
def folder(work, tmp_path):
    for file in work.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def results(folder, out="out", log="log"):
    save, = (folder / out / "latest").glob("*model.safetensors")  # a model's, or an adapter's
    weights = hashlib.sha1(save.read_bytes()).hexdigest()
    lines = [{k: v for k, v in line.items() if "loss" in k or k == "grad_norm"} for line in read_log(folder / log)]
    return weights, lines


# ---- the same training

@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 1), (1, 2)], ids=str)
def test_ranks_that_are_alone_have_the_bits_of_one_device(train_fp32, folder, ranks):
    """So have those that are not grouped by machine: both send everything directly."""
    train_fp32(*BASE, "--grad-accum", 3, cwd=folder)
    one = results(folder)
    for zero in (1, 3):
        Machines(folder, ranks).run(train_fp32, *BASE, "--zero", zero, "--out", f"out{zero}", "--log", f"log{zero}", cwd=folder)
        assert results(folder, f"out{zero}", f"log{zero}") == one


@pytest.mark.parametrize("ranks, more", [((2, 2), ()), ((2, 2, 2), ()), ((3, 3), ("--by-block", "--update-in-backward")),
                                         ((2, 2), ("--train", "lora", "--lora-rank", 3, "--base", "nf4"))], ids=str)
def test_sums_inside_machines(train, folder, ranks, more):
    """Terms are added in another order than on one device, but in the same one whatever each rank keeps."""
    machines = Machines(folder, ranks)
    train(*BASE, *more, "--grad-accum", machines.count, cwd=folder)
    _, one = results(folder)
    all_results = []
    for zero in (0, 1, 2, 3):
        machines.run(train, *BASE, *more, "--zero", zero, "--out", f"out{zero}", "--log", f"log{zero}", cwd=folder)
        all_results.append(results(folder, f"out{zero}", f"log{zero}"))
    assert all(r == all_results[0] for r in all_results)
    for line, expected in zip(all_results[0][1], one, strict=True):
        for key, value in expected.items():
            assert line[key] == pytest.approx(value, rel=1e-6 if train.precision == "fp32" else 2e-2)


@pytest.mark.parametrize("more", [(), ("--zero", 3), ("--train", "lora", "--base", "nf4", "--zero", 3)], ids=str)
def test_bytes_over_the_network_are_those_of_the_plan(train, folder, more):
    step = (*STEP, *more)
    ranks = json.loads(train(*step, "--devices", 6, "--machines", 3, "--plan", "json", cwd=folder).stdout)["ranks"]
    links = json.loads(Machines(folder, (2, 2, 2)).run(train, *step, "--steps", 3, "--bench", "json", cwd=folder))["links"]
    assert links["to_machines"]["bytes"] == ranks["network"]["sent_by_a_machine"] / 2
    assert links["to_ranks"]["bytes"] + links["to_machines"]["bytes"] == ranks["sent_bytes"]


@pytest.mark.more
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
def test_calibration_of_unequal_machines(train_fp32, folder, ranks):
    """A rank that is alone on its machine takes part when the others measure the link inside theirs."""
    Machines(folder, ranks).run(train_fp32, "--threads", 1, "--calibrate", "rates.json", cwd=folder)
    rates = json.loads((folder / "rates.json").read_text())
    assert rates["network"] > 0 and ("to_ranks" in rates["transfers"]) == (ranks[0] > 1)


# ---- networks

@pytest.fixture
def networked():
    need_networks()
    return Networked


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_cut_link_ends_all(train_fp32, folder, networked, ranks):
    """With this many ranks on each of two machines. Two share memory."""
    with networked(folder, 2, ranks) as machines:
        options = (*BASE, "--schedule", "constant", "--steps", 10**6, "--save-every", 5, "--print-every", 1, "--advanced", "patience=2")
        environment = machines.environment(train_fp32)
        command = [*machines.command, train_fp32.path, *map(str, options)]
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True) as process:
            for line in process.stdout:
                if line.startswith("saved step"):
                    break
            trainers = ranks_in(folder, train_fp32)
            processes, shared = {*trainers, *machines.processes()}, shared_memory_of(trainers)
            assert len(trainers) == machines.count and bool(shared) == (ranks > 1)
            machines.connect(2, "down")
            wait_for_end(trainers)
            machines.connect(2)  # the launcher waits for its daemon there
            printed = process.communicate(timeout=60)[0]
        assert process.returncode == 2, printed
        wait_for_end(processes)
        assert not machines.processes() and not [path for path in shared if pathlib.Path(path).exists()]
        assert re.search(rf"no sign of life from rank {'1' if ranks == 1 else '[23]'} \(host machine2\).* for 2 s", printed), printed
        assert "the last save: out/step-" in printed
    if ranks > 1:
        return
    # What was saved goes on here, to the bits of a run that no link broke.
    step = int(re.search(r"the last save: out/step-(\d+)", printed)[1])
    whole = (*BASE, "--schedule", "constant", "--grad-accum", 2, "--save-every", 5, "--steps", step + 3)
    train_fp32(*whole, "--devices", 2, "--resume", "auto", cwd=folder)
    train_fp32(*whole, "--out", "whole", "--log", "whole.log", cwd=folder)
    assert saved_bytes(folder / "out" / "latest") == saved_bytes(folder / "whole" / "latest")
