"""--memory chooses what lives outside the device."""

import itertools
import json
import re
import subprocess

import pytest
import rate_files
from model_files import linked
from streaming_models import folder, wide, wide4, work
from trainer_runs import Train, saved_bytes, small_disk, taken_and_planned

USUALLY = "bf16"  # see conftest.py

RESIDENT = ("--offload", "weights=device,gradients=device,state=device,inputs=device")
# With these options no other micro-batch is possible.
ONE = ("--data", "data.bin", "--model", "model", "--batch", 1, "--seq-len", 37, "--sample", "tokens=0")
KINDS = {"full": (), "adapter": ("--train", "lora", "--lora-rank", 2), "consumed": ("--update-in-backward", "--clip", 0)}


def moves_trained(train, kind):
    """Skips the test where --memory leaves what is trained on the device."""
    if train.device != "cpu" and kind != "adapter":
        pytest.skip("on a GPU it moves if --memory offers host memory")


def least(train, work, *options):
    """The smallest budget, in MiB."""
    error = train(*options, "--memory", "1MiB", "--plan", cwd=work, code=2).stderr.decode()
    assert error.count("\n") == 1, error
    return float(re.search(r"the least that this takes is ([\d.]+) MiB", error)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_below_what_is_resident_moves_it(train, wide4, tmp_path, kind):
    """The plan says what moves, the run takes that memory, and no bit changes. With a budget for everything,
    nothing moves."""
    moves_trained(train, kind)
    work = linked(tmp_path, wide4)
    options = (*ONE, *KINDS[kind], "--steps", 2)
    resident, few = least(train, work, *options, *RESIDENT), least(train, work, *options)
    assert few < resident - 4
    train(*options, "--out", "resident", cwd=work)
    for i, share in enumerate((0, 0.5, 1)):
        budget = ("--memory", f"{few + 0.1 + share * (resident - 1 - few):.1f}MiB")
        chosen = json.loads(train(*options, *budget, "--plan", "json", cwd=work).stdout)
        moved = chosen["choice"][0]["placements"]
        assert "disk" in moved or "inputs=" in moved
        assert any(chosen["outside_device"].values()) and chosen["choice"][0]["bytes"] == chosen["totals"]["total"]
        said = train(*options, *budget, "--out", f"out{i}", cwd=work).stdout.decode()
        taken, planned = taken_and_planned(said)
        assert moved in said and taken <= planned <= float(budget[1][:-3]) + 0.05
        assert saved_bytes(work / f"out{i}") == saved_bytes(work / "resident")
    # On a GPU, what is resident and recomputed may be slower than what is read from a disk.
    everything = resident if train.device == "cpu" else train.plan(*options, *RESIDENT, "--recompute", "none", cwd=work)["totals"]["total"] / 2**20
    roomy = json.loads(train(*options, "--memory", f"{everything + 0.1:.1f}MiB", "--plan", "json", cwd=work).stdout)
    assert roomy["choice"][0]["placements"] == "" and not any(roomy["outside_device"].values())


def test_memory_chooses_how_far_ahead_blocks_come(train, wide, tmp_path):
    """0 if nothing else fits; many if the disk is slower than computing, so that blocks are still there when
    backward begins."""
    work = linked(tmp_path, wide)
    options = (*ONE, *KINDS["adapter"], "--steps", 2, "--offload", "weights=disk,embeddings=device")
    few, two_rooms = least(train, work, *options), least(train, work, *options, "--prefetch", 1)
    assert few < two_rooms - 3
    train(*options, "--out", "out1", cwd=work)
    slow = rate_files.write(tmp_path / "slow", rate_files.rates_of(train, transfers=1e8))
    fast = rate_files.write(tmp_path / "fast", rate_files.rates_of(train, transfers=1e15))
    for budget, rates, ahead in ((few + 0.1, fast, 0), (two_rooms + 200, fast, 1), (two_rooms + 200, slow, 16), (two_rooms + 12, slow, 2)):
        command = (*options, "--memory", f"{budget:.1f}MiB")
        chosen = json.loads(train(*command, "--rates", rates, "--plan", "json", cwd=work).stdout)
        said = re.search(r"--prefetch (\d+)", chosen["choice"][0]["placements"])
        assert (int(said[1]) if said else 1) == ahead
        assert sum(b["name"] == "streamed_block" for b in chosen["buffers"]) == min(ahead + 1, 12)
        asked = json.loads(train(*command, "--prefetch", ahead, "--rates", rates, "--plan", "json", cwd=work).stdout)
        assert asked["totals"] == chosen["totals"]
        train(*command, "--rates", rates, "--out", f"out{ahead}", cwd=work)
        assert saved_bytes(work / f"out{ahead}") == saved_bytes(work / "out1"), ahead
        saved = json.loads((work / f"out{ahead}" / "trainer_state.json").read_text())["options"]
        assert saved.get("--prefetch", ["1"]) == [str(ahead)]


def test_the_state_may_have_other_rooms(train, wide4, tmp_path):
    """The bits are the same. A block has as many slots as chunks, which are fetched while it is computed."""
    work = linked(tmp_path, wide4)
    options = (*ONE, "--steps", 2, "--update-in-backward", "--offload", "weights=disk")
    plans = {}
    for rooms in (32, 1, 5, "block"):
        train(*options, "--offload", f"state=disk:{rooms}", "--out", f"out{rooms}", "--sample", "tokens=0", cwd=work)
        plans[rooms] = json.loads(train(*options, "--offload", f"state=disk:{rooms}", "--plan", "json", cwd=work).stdout)
        assert saved_bytes(work / f"out{rooms}") == saved_bytes(work / "out32"), rooms
    count = {rooms: sum(b["name"] == "streamed_state" for b in plan["buffers"]) for rooms, plan in plans.items()}
    block = (4 + 3 * 3) * 512 * 512 + 2 * 512
    assert count == {32: 32, 1: 1, 5: 5, "block": -(-block // (1 << 18))} and count["block"] != 32
    error = train(*ONE, "--steps", 2, "--offload", "state=device:5", cwd=work, code=2).stderr.decode()
    assert "--offload state" in error and error.count("\n") == 1


MIXES = (("device",), ("disk",), ("device", "embeddings=disk"), ("disk", "embeddings=disk"))


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_the_fastest_mix_that_fits_is_chosen(train, wide4, tmp_path, kind):
    """Among all configurations that can be given by hand, by their own estimates. An adapter needs no larger
    micro-batch for its blocks to be read once."""
    moves_trained(train, kind)
    work = linked(tmp_path, wide4)
    # With a larger prefetch distance, all four blocks would stay.
    options = (*ONE, "--grad-accum", 4, "--prefetch", 1, *KINDS[kind], "--steps", 1)
    resident, few = least(train, work, *options, *RESIDENT), least(train, work, *options)
    together = 0
    for share in (0.02, 0.3, 0.6, 0.95):
        budget = ("--memory", f"{few + share * (resident - few):.1f}MiB")
        chosen = json.loads(train(*options, *budget, "--plan", "json", cwd=work).stdout)
        by_hand = []
        for weights, gradients, state, park, order in itertools.product(MIXES, ("device", "disk"), ("device", "disk"), ("device", "auto"),
                                                                        ((), ("--by-block",))):
            where = ("--offload", f"weights={','.join(weights)},gradients={gradients},state={state},inputs={park}", *order)
            stay = weights[0] == gradients == "device"
            if kind == "adapter" and "disk" in (gradients, state) or order and stay or kind == "full" and len(weights) > 1:
                continue
            command = train.command(*options, *budget, *where, "--plan", "json")
            planned = subprocess.run(command, cwd=work, env=train.environment, capture_output=True)
            if planned.returncode == 0:
                by_hand.append(json.loads(planned.stdout)["estimated_seconds"])
        assert min(by_hand) * 0.98 <= chosen["estimated_seconds"] <= min(by_hand) * 1.05, (share, by_hand)
        together += "--by-block" in chosen["choice"][0]["placements"]
    assert together or kind == "full"


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_a_resumed_run_has_what_was_chosen(train, wide4, tmp_path, kind):
    moves_trained(train, kind)
    work = linked(tmp_path, wide4)
    options = (*ONE, *KINDS[kind], "--schedule", "constant")
    budget = f"{least(train, work, *options) + 0.1:.1f}MiB"
    train(*options, "--steps", 4, "--out", "whole", cwd=work)
    train(*options, "--steps", 2, "--memory", budget, "--out", "out", cwd=work)
    chosen = json.loads(train(*options, "--steps", 2, "--memory", budget, "--plan", "json", cwd=work).stdout)
    saved = json.loads((work / "out" / "trainer_state.json").read_text())["options"]
    assert "--memory" not in saved and saved["--offload.weights"] == ["disk"]
    resumed = json.loads(train("--resume", "out", "--steps", 4, "--plan", "json", cwd=work).stdout)
    assert resumed["outside_device"] == chosen["outside_device"] and resumed["totals"] == chosen["totals"]
    anew = json.loads(train("--resume", "out", "--steps", 4, "--memory", "8GiB", "--plan", "json", cwd=work).stdout)
    assert not any(anew["outside_device"].values())
    train("--resume", "out", "--steps", 4, cwd=work)
    assert saved_bytes(work / "out") == saved_bytes(work / "whole")
    assert b"validation loss" in train("--resume", "out", "--steps", 0, "--val-data", "data.bin", cwd=work).stdout


def test_a_full_disk_is_not_chosen(train, wide4, tmp_path):
    """The line names the folder that is full."""
    moves_trained(train, "full")
    work = linked(tmp_path, wide4)
    options = (*ONE, "--steps", 1)
    enough = least(train, work, *options) + 20
    train(*options, "--memory", f"{enough:.1f}MiB", "--plan", cwd=work)
    with small_disk(tmp_path / "small", "4m") as folder:
        small = Train(train.path, TMPDIR=str(folder))
        error = small(*options, "--memory", f"{enough:.1f}MiB", "--plan", cwd=work, code=2).stderr.decode()
    assert "--offload state=disk" not in error and f". Less is needed with a TMPDIR with more room: {folder} has 4.0 MiB.\n" in error and error.count("\n") == 1
