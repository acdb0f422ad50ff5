"""--offload inputs=: inputs of layers that wait outside the device change no bit, and take the memory that is planned."""

import pytest
from adapter_files import trained
from model_files import DATA, linked
from streaming_models import DISK, LORA, folder, plan, wide, wide4, work
from trainer_runs import Train, saved_bytes, small_disk

USUALLY = "bf16"  # see conftest.py


@pytest.mark.parametrize("options", [(), ("--recompute", "none", "--grad-accum", 2), ("--recompute", "block"),
                                     (*DISK, "--recompute", "block:2,gelu:3")], ids=str)
@pytest.mark.parametrize("inputs", ["auto:1", "auto:4", "auto"])
def test_parked_inputs_change_no_bit(train, work, options, inputs):
    assert trained(train, work, "a", *options) == trained(train, work, "b", *options, "--offload", f"inputs={inputs}")


@pytest.mark.parametrize("options", [(), ("--update-in-backward",)], ids=str)
def test_parking_in_full_training(train, wide4, tmp_path, options):
    work = linked(tmp_path, wide4)
    for name, more in (("a", ()), ("b", ("--offload", "inputs=auto", "--recompute", "block"))):
        train(*DATA, "--steps", 3, "--sample", "tokens=0", "--out", name, *options, *more, cwd=work)
    assert saved_bytes(work / "a") == saved_bytes(work / "b")


def test_parking_keeps_two_inputs(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    options = ("--batch", 8, "--seq-len", 64, "--recompute", "block")
    kept, parked = plan(train, work, *options), plan(train, work, *options, "--offload", "inputs=auto")
    one = 8 * 64 * 512 * (4 if train.precision == "fp32" else 2)
    assert one % 4096 == 0  # otherwise a sector would be partly used
    assert kept["totals"]["activations"] - parked["totals"]["activations"] == (12 - 2) * one - 2 * 4096
    assert parked["outside_device"]["offloaded" if train.device == "cpu" else "pinned_host"] == (12 - 2) * one


def test_parking_needs_room(train, wide, tmp_path):
    if train.device == "cuda":
        pytest.skip("the inputs wait in host memory")
    work = linked(tmp_path, wide)
    with small_disk(tmp_path / "small", "4m") as folder:
        small = Train(train.path, TMPDIR=str(folder))
        error = small(*LORA, "--steps", 1, "--batch", 32, "--seq-len", 64, "--offload", "inputs=auto", cwd=work, code=2).stderr.decode()
    assert error.startswith("train: --offload inputs=") and "TMPDIR" in error and error.count("\n") == 1


def test_parking_of_some_layers_is_not_chosen_for(train, wide, tmp_path):
    work = linked(tmp_path, wide)
    error = train(*LORA, "--steps", 1, "--offload", "inputs=auto:3", "--memory", "1GiB", cwd=work, code=2).stderr.decode()
    assert "--offload inputs=" in error
    context = 0 if train.device == "cpu" else plan(train, work)["totals"]["process"] >> 20
    chosen = plan(train, work, "--offload", "inputs=auto", *DISK, "--memory", f"{250 + context}MiB")
    assert chosen["totals"]["total"] <= 250 + context << 20
