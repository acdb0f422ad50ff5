"""The optimizer's state in every format: its size, that runs repeat and resume to the bit, and that it
learns."""

import json

import pytest
from safetensors.torch import load_file
from trainer_runs import ROOT, figures, make, read_log, saved_bytes, write_text

MOMENTS = [("--state-formats", f"m={m},v={v}") for m, v in (("bf16", "bf16"), ("8bit", "8bit"), ("fp32", "8bit"))]
SGD = ("--optimizer", "sgd")
FORMATS = {"fp32": [*MOMENTS, SGD],
           "bf16": [("--state-formats", "master=split"), ("--state-formats", "master=none"), ("--state-formats", "master=split", *MOMENTS[1]),
                    ("--state-formats", "master=none", *MOMENTS[0]), ("--state-formats", "master=none", *SGD)]}


def name_of(options):
    return " ".join(options)


def pytest_generate_tests(metafunc):
    """A test with the argument train_in runs once for each binary and format that it has."""
    if "train_in" in metafunc.fixturenames:
        from trainer_runs import binaries
        cases = [(train, options) for train in binaries() for options in FORMATS[train.precision]]
        metafunc.parametrize("train_in", cases, ids=[f"{train} {name_of(options)}" for train, options in cases])


# ---- its size

STATE = ("weights", "gradients", "optimizer_m", "optimizer_v", "master")


def bytes_per_parameter(train, *options):
    plan = train.plan("--model", "d12", *options)
    return sum(plan["totals"][kind] for kind in STATE) / plan["parameters"]


@pytest.mark.parametrize("options, size", [
    ((), 2 + 2 + 4 + 4 + 4),
    (("--state-formats", "master=split"), 14),
    (("--state-formats", "master=split", *MOMENTS[0]), 10),
    (("--state-formats", "master=split", *MOMENTS[1]), 8 + 8 / 256),  # two scales per block
    (("--state-formats", "master=none", *MOMENTS[1]), 6 + 8 / 256),
    (("--state-formats", "master=none", *SGD), 4),
], ids=str)
def test_bytes_of_bf16(train_bf16, options, size):
    """For GPT-2 124M, whose padding is less than a thousandth."""
    assert size <= bytes_per_parameter(train_bf16, *options) < 1.001 * size


@pytest.mark.parametrize("options, size", [((), 16), (MOMENTS[0], 12), (MOMENTS[1], 10 + 8 / 256), (SGD, 8)], ids=str)
def test_bytes_of_fp32(train_fp32, options, size):
    assert size <= bytes_per_parameter(train_fp32, *options) < 1.001 * size


def test_plan_names_the_buffers(train_bf16):
    plan = train_bf16.plan("--model", "d2", "--state-formats", "master=split", *MOMENTS[1])
    buffers = {b["name"]: (b["kind"], b["dtype"]) for b in plan["buffers"] if b["kind"] in STATE}
    assert buffers == {"weights": ("weights", "bf16"), "gradients": ("gradients", "bf16"),
                       "m": ("optimizer_m", "byte"), "m_scale": ("optimizer_m", "fp32"),
                       "v": ("optimizer_v", "byte"), "v_scale": ("optimizer_v", "fp32"),
                       "master_low": ("master", "int16")}


# ---- the same numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("given")
    make(path / "model", "--layers", 2, "--heads", 3, "--channels", 48, "--positions", 64)
    write_text(path / "text")
    return path


DATA = ("--model", "model", "--data", "text", "--batch", 2, "--seq-len", 24, "--sample", "tokens=0", "--lr", 1e-3,
        "--warmup", 2)


def trained(train, folder, out, *options):
    """The figures and the saved files of six steps; the save of the third is kept."""
    train(*DATA, "--steps", 6, "--save-every", 3, "--keep", 0, "--out", out, "--log", f"{out}.log", *options,
          cwd=folder)
    return figures(read_log(folder / f"{out}.log")), saved_bytes(folder / out)


def work_in(folder, path):
    for name in ("model", "text"):
        (path / name).symlink_to(folder / name)
    return path


def test_runs_repeat_and_resume(train_in, folder, tmp_path):
    """To the bit, with any number of threads."""
    train, options = train_in
    work = work_in(folder, tmp_path)
    log, files = trained(train, work, "a", *options)
    assert trained(train, work, "b", *options, "--threads", 1) == (log, files)
    step = work / "a" / "step-00000003"
    train("--resume", step, "--out", "resumed", "--log", work / "resumed.log", cwd=work)
    assert figures(read_log(work / "resumed.log")) == log[3:]
    assert saved_bytes(work / "resumed") == files
    state = json.loads((work / "a" / "trainer_state.json").read_text())
    assert options[1] in state["formats"]


def test_split_is_the_fp32_master(train_bf16, folder, tmp_path):
    """The same losses and weights to the bit, with moments in any format; and the same master."""
    work = work_in(folder, tmp_path)
    for i, moments in enumerate([(), *MOMENTS, SGD]):
        whole = trained(train_bf16, work, f"whole{i}", *moments)
        split = trained(train_bf16, work, f"split{i}", "--state-formats", "master=split", *moments)
        assert whole[0] == split[0]
        assert whole[1]["model.safetensors"] == split[1]["model.safetensors"]
    master, weights, low = (load_file(work / path) for path in (
        "whole0/trainer_state.safetensors", "split0/model.safetensors", "split0/trainer_state.safetensors"))
    for name, tensor in weights.items():
        name = name.removeprefix("transformer.")
        high = tensor.view(dtype=low["master_low." + name].dtype).int() * 65536
        joined = (high + low["master_low." + name].int()).view(dtype=tensor.float().dtype)
        assert joined.equal(master["master." + name]), name


# ---- learning

# After 100 steps on Shakespeare's plays the loss is near 2.8, from 5.5 at the start. Over four seeds, the
# formats changed the mean loss of the last ten steps by at most 0.0048.
STEPS = 100
BOUND = 0.01
LEARN = ("--model", "d2", "--batch", 4, "--seq-len", 64, "--steps", STEPS, "--sample", "tokens=0", "--eval-batches", 1)


@pytest.fixture(scope="module")
def final_loss(tmp_path_factory):
    """The final loss of a run with these options, made once; checks that it learned."""
    path, known = tmp_path_factory.mktemp("learning"), {}

    def run(train, *options):
        if (train, options) not in known:
            train(*LEARN, *options, "--log", path / "log", cwd=ROOT)
            losses = [line["loss"] for line in read_log(path / "log") if "loss" in line]
            assert len(losses) == STEPS and losses[0] > 5
            known[train, options] = sum(losses[-10:]) / 10
            assert known[train, options] < 3.6
        return known[train, options]
    return run


@pytest.mark.parametrize("options", [MOMENTS[0], MOMENTS[1], (*MOMENTS[1], "--optimizer", "beta2=0.999")], ids=str)
def test_moments_learn_as_fp32(train, final_loss, options):
    assert final_loss(train, *options) == pytest.approx(final_loss(train, *options[4:]), rel=0, abs=BOUND)


@pytest.mark.parametrize("options", [(), MOMENTS[1]], ids=str)
def test_no_master_learns_as_fp32(train_bf16, final_loss, options):
    fp32 = final_loss(train_bf16)
    assert final_loss(train_bf16, "--state-formats", "master=none", *options) == pytest.approx(fp32, rel=0, abs=BOUND)


def test_sgd_learns(train_bf16, final_loss):
    """More slowly than AdamW, and without a master as well as with one."""
    sgd = (*SGD, "--lr", 0.1)
    fp32 = final_loss(train_bf16, *sgd)
    assert final_loss(train_bf16) < fp32
    assert final_loss(train_bf16, "--state-formats", "master=none", *sgd) == pytest.approx(fp32, rel=0, abs=BOUND)
