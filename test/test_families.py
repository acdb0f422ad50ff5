"""Every family compared with transformers' own model: gradients, steps, generation, files; and options change
no bit."""

import json
import shutil

import numpy as np
import pytest
import torch
from model_files import DATA, MODELS, MORE_MODELS, VOCAB, fused, linked, prepare, starting_at_0, trained
from reference_runs import (GRADIENT_BOUND, LOSS_BOUND, expected_logits, gradients_in_bf16, greedy, last_logits,
                            open_with_transformers, run_reference)
from safetensors.torch import load_file
from trainer_runs import by_key, read_log, sampled, saved_bytes


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.quick] * (name == "llama")) for name in MODELS])
def folder(request, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=MODELS | MORE_MODELS)
def any_folder(request, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def work(folder, tmp_path):
    return linked(tmp_path, folder)


@pytest.fixture
def any_work(any_folder, tmp_path):
    return linked(tmp_path, any_folder)


def test_gradients(train, work):
    """Gradients of every tensor. After a first step with beta1 0 they are in AdamW's m. In bf16 those of the
    heads' norms, sums over few channels of terms that nearly cancel, have the largest rounding errors; their
    bound comes from transformers' own bf16."""
    data = ("--model", work / "model", "--data", work / "data.bin", *DATA[4:], "--grad-accum", 2, "--steps", 1)
    run_reference(*data, "--dump-gradients", work / "expected")
    train(*data, "--optimizer", "beta1=0", "--clip", 0, "--sample", "tokens=0", "--out", work / "out")
    expected, state = load_file(work / "expected"), load_file(work / "out" / "trainer_state.safetensors")
    gradients = {name.removeprefix("m."): tensor for name, tensor in state.items() if name.startswith("m.")}
    assert sum(g.numel() for g in gradients.values()) == sum(g.numel() for g in expected.values())
    rounded = gradients_in_bf16(data) if train.precision == "bf16" else expected
    for name, got in gradients.items():
        gradient = fused(name, expected)
        assert got.shape == gradient.shape and gradient.norm() > 1e-6
        bound = max(GRADIENT_BOUND[train.precision] * gradient.norm(), 1.2 * (fused(name, rounded) - gradient).norm())
        assert (got - gradient).norm() <= bound, name


def test_twenty_steps(train, work):
    options = ("--model", work / "model", "--data", work / "data.bin", *DATA[4:], "--steps", 20, "--lr", 3e-3,
               "--warmup", 4, "--clip", 2, "--val-data", work / "data.bin", "--eval-every", 8, "--eval-batches", 2)
    expected = run_reference(*options)
    train(*options, "--log", work / "log", "--sample", "tokens=0")
    log, bound = read_log(work / "log"), LOSS_BOUND[train.precision]
    assert by_key(log, "loss") == pytest.approx(by_key(expected, "loss"), rel=0, abs=bound)
    assert by_key(log, "val_loss") == pytest.approx(by_key(expected, "val_loss"), rel=0, abs=bound)


@pytest.mark.usually("fp32")
def test_logits_of_a_save(train, any_work):
    """A save opens in transformers without missing tensors, and has the same logits and loss there as here.
    In bf16, logits of random weights are off by a percent or two in transformers as well; those of six
    contexts show how much rounding alone does."""
    work = any_work
    train(*DATA, "--steps", 3, "--val-data", "data.bin", "--eval-batches", 2, "--out", "out", "--log", "log",
          "--sample", "tokens=0", cwd=work)
    model = open_with_transformers(work / "out").float()
    tokens = np.fromfile(work / "data.bin", dtype=np.uint16, offset=1024).astype(np.int64)
    windows = torch.stack([torch.from_numpy(tokens[at:at + 38]) for at in range(0, 6 * 37, 37)])
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    [validated] = by_key(read_log(work / "log"), "val_loss").values()
    bound = 1e-5 if train.precision == "fp32" else 1e-2
    assert validated == pytest.approx(loss, rel=0, abs=bound)

    contexts, chosen = np.stack([tokens[at:at + 13] for at in range(100, 700, 100)]), list(range(0, VOCAB, 11))
    got, expected = last_logits(train, work / "out", contexts, chosen), expected_logits(model, contexts, chosen)
    off = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    if train.precision == "bf16":
        rounded = expected_logits(model.bfloat16(), contexts, chosen)
        bound = max(bound, 1.25 * np.linalg.norm(rounded - expected) / np.linalg.norm(expected))
    assert off <= bound < 0.03


def test_greedy(train_fp32, any_work):
    """50 tokens, each with the cache, after token 0; here after a step that changes nothing."""
    model = starting_at_0(any_work / "model", any_work / "plain")
    got = sampled(train_fp32, "--model", "plain", *DATA[2:4], "--batch", 1, "--seq-len", 60, "--steps", 1, "--lr", 0,
                  "--sample", "tokens=50", cwd=any_work)
    assert list(map(int, got.split())) == greedy(model, [0], 50)


@pytest.mark.usually("fp32")
def test_longrope_of_longer_sequences(train, tmp_path):
    """Sequences that are longer than the model was trained on use the other list of divisors, for all their positions."""
    prepare(tmp_path, "phi3-longrope")
    data = ("--model", tmp_path / "model", "--data", tmp_path / "data.bin", "--batch", 2, "--steps", 2)
    for length in (60, 61):
        expected = run_reference(*data, "--seq-len", length)
        train(*data, "--seq-len", length, "--log", tmp_path / f"log{length}", "--sample", "tokens=0")
        got = by_key(read_log(tmp_path / f"log{length}"), "loss")
        assert got == pytest.approx(by_key(expected, "loss"), rel=0, abs=LOSS_BOUND[train.precision])


@pytest.mark.usually("fp32")
def test_memory_options_change_no_bit(train, work):
    """Each level, a mix of levels, threads, and updates in backward, which compute the norm block by
    block."""
    first = trained(train, work, "none", "--recompute", "none", "--grad-accum", 2)
    for level in ("gelu", "norm", "ffn", "attention", "block", "block:1,norm:1"):
        assert first == trained(train, work, level.replace(":", ""), "--recompute", level, "--grad-accum", 2)
    assert first == trained(train, work, "one", "--threads", 1, "--grad-accum", 2)
    by_block = trained(train, work, "a", "--advanced", "clip=block")
    assert by_block == trained(train, work, "b", "--advanced", "clip=block", "--update-in-backward")


@pytest.mark.parametrize("options", [(), ("--grad-accum", 3, "--by-block")], ids=str)
def test_update_in_backward_without_clipping_changes_no_bit(train, work, options):
    """Nor of the logged norm."""
    after = trained(train, work, "a", "--clip", 0, *options)
    assert after == trained(train, work, "b", "--clip", 0, "--update-in-backward", *options)


@pytest.mark.usually("bf16")
def test_resume_is_the_unbroken_run(train, work):
    train(*DATA, "--steps", 6, "--save-every", 3, "--keep", 0, "--out", "out", "--sample", "tokens=0", cwd=work)
    whole = saved_bytes(work / "out" / "step-00000006")
    shutil.rmtree(work / "out" / "step-00000006")
    train("--resume", "out/step-00000003", cwd=work)
    assert saved_bytes(work / "out" / "step-00000006") == whole


def test_saves_are_of_the_family(train_fp32, any_work):
    work = any_work
    train_fp32(*DATA, "--steps", 1, "--lr", 0, "--out", "out", "--sample", "tokens=0", cwd=work)
    before = {}
    for file in (work / "model").glob("*.safetensors"):
        before |= load_file(file)
    after = load_file(work / "out" / "model.safetensors")
    for name, tensor in before.items():
        full = name if name in after else "transformer." + name
        assert torch.equal(after.pop(full), tensor.float()), name
    assert not after
    old, new = (json.loads((work / f / "config.json").read_text()) for f in ("model", "out"))
    assert new["model_type"] == old["model_type"] and new["architectures"] == old["architectures"]
