"""A model whose layers differ in windows, heads, their sizes and the MLP's width, compared with PyTorch; and every way of
training, placing and answering keeps its bits and its plan."""

import itertools
import json

import numpy as np
import pytest
from model_files import fused
from reference_runs import GRADIENT_BOUND, LOSS_BOUND, expected_logits, gradients_in_bf16, greedy, last_logits, open_with_transformers, run_reference
from safetensors.torch import load_file
from trainer_runs import by_key, figures, random_tokens, read_log, sampled, saved_bytes, taken_and_planned, write_shard
from uneven_model import LAYERS, NARROW, SMALL, WIDE, make_uneven

VOCAB = 301
DATA = ("--model", "model", "--data", "data.bin", "--batch", 3, "--seq-len", 37, "--sample", "tokens=0")
LORA = ("--train", "lora", "--lora-rank", 3)
LONG = ("--batch", 1, "--seq-len", 300, "--recompute", "block", "--chunk-rows", "attention=256,mlp=64")
LEVELS = ("none", "gelu", "norm", "ffn", "attention", "block")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    path = tmp_path_factory.mktemp("uneven")
    make_uneven(path / "model", VOCAB, 320)
    write_shard(path / "data.bin", random_tokens(VOCAB, 3000))
    return path


def run(train, work, out, *options, steps=3):
    """Its log and its saved numbers. The program itself fails if it takes other memory than planned, to the byte."""
    printed = train(*DATA, "--steps", steps, "--out", out / "out", "--log", out / "log", *options, cwd=work).stdout.decode()
    taken, planned = taken_and_planned(printed)
    assert taken <= planned
    return figures(read_log(out / "log")), saved_bytes(out / "out")


def test_gradients_and_losses(train, work, tmp_path):
    """After a first step with beta1 0, gradients are in AdamW's m."""
    data = ("--model", work / "model", "--data", work / "data.bin", "--batch", 3, "--seq-len", 37)
    run_reference(*data, "--steps", 1, "--dump-gradients", tmp_path / "expected")
    run(train, work, tmp_path, "--optimizer", "beta1=0", "--clip", 0, steps=1)
    expected, state = load_file(tmp_path / "expected"), load_file(tmp_path / "out" / "trainer_state.safetensors")
    gradients = {name.removeprefix("m."): tensor for name, tensor in state.items() if name.startswith("m.")}
    assert sum(g.numel() for g in gradients.values()) == sum(g.numel() for g in expected.values())
    rounded = gradients_in_bf16(data) if train.precision == "bf16" else expected
    for name, got in gradients.items():
        gradient = fused(name, expected)
        bound = max(GRADIENT_BOUND[train.precision] * gradient.norm(), 1.2 * (fused(name, rounded) - gradient).norm())
        assert (got - gradient).norm() <= bound, name

    options = ("--steps", 8, "--lr", 1e-3, "--warmup", 2, "--val-data", work / "data.bin", "--eval-every", 4, "--eval-batches", 2)
    expected = run_reference(*data, *options)
    train(*data, *options, "--log", tmp_path / "log2", "--sample", "tokens=0")
    for key in ("loss", "val_loss"):
        assert by_key(read_log(tmp_path / "log2"), key) == pytest.approx(by_key(expected, key), rel=0, abs=LOSS_BOUND[train.precision])


def test_logits_and_answers(train_fp32, work, tmp_path):
    """Of a save; answers keep keys of layers of different widths."""
    run(train_fp32, work, tmp_path)
    model = open_with_transformers(tmp_path / "out").float()
    tokens = random_tokens(VOCAB, 700)
    contexts, chosen = np.stack([tokens[at:at + 33] for at in range(0, 400, 100)]), list(range(0, VOCAB, 11))
    got, expected = last_logits(train_fp32, tmp_path / "out", contexts, chosen), expected_logits(model, contexts, chosen)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) <= 1e-5

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["layer_sizes"] == LAYERS
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": None}))
    got = sampled(train_fp32, "--model", tmp_path / "out", "--data", "data.bin", "--batch", 1, "--seq-len", 60, "--steps", 1, "--lr", 0,
                  "--sample", "tokens=50", cwd=work)
    assert list(map(int, got.split())) == greedy(tmp_path / "out", [0], 50)


def test_several_answers_at_a_time(train_fp32, tmp_path):
    make_uneven(tmp_path / "model", 256, 320)
    questions = [{"prompt": "to be or not to be"[:3 + i]} for i in range(7)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))

    def answers(batch):
        out = train_fp32("--model", "model", "--prompts", "prompts.jsonl", "--raw-prompt", "--sample", "tokens=24,temperature=0",
                         "--batch", batch, cwd=tmp_path).stdout
        return [json.loads(line) for line in out.decode().splitlines()]

    assert answers(3) == answers(1) and len(answers(8)) == 7


@pytest.mark.parametrize("first, others", [
    ((), [("--recompute", level) for level in LEVELS] + [("--recompute", "block:2,none:1,ffn:3,gelu:1"), ("--offload", "weights=disk,gradients=disk,state=disk"),
                                                         ("--recompute", "block", "--offload", "inputs=auto")]),
    (LONG, [(*LONG, "--offload", "inputs=auto"), (*LONG, "--offload", "weights=disk,state=disk")]),
    (LORA, [(*LORA, "--offload", "weights=disk"), (*LORA, "--recompute", "attention:3,block:4")]),
    ((*LORA, "--base", "nf4", "--save-base", "nf4-folder"), [(*LORA, "--model", "nf4-folder"), (*LORA, "--model", "nf4-folder", "--offload", "weights=disk", "--recompute", "block")]),
], ids=["full", "chunks", "lora", "nf4"])
def test_options_change_no_bit(train, work, tmp_path, first, others):
    def here(options):
        return [tmp_path / "nf4" if word == "nf4-folder" else word for word in options]

    bits = run(train, work, tmp_path / "first", *here(first))
    for i, options in enumerate(others):
        assert run(train, work, tmp_path / str(i), *here(options)) == bits, options


@pytest.mark.parametrize("options, zeros", [((), (1, 3)), ((*LORA, "--base", "nf4"), (3,))], ids=["full", "nf4"])
def test_two_ranks_have_the_bits_of_one_device(train_fp32, work, tmp_path, options, zeros):
    bits = run(train_fp32, work, tmp_path / "one", *options, "--grad-accum", 2)
    for zero in zeros:
        assert run(train_fp32, work, tmp_path / str(zero), *options, "--grad-accum", 2, "--devices", 2, "--zero", zero) == bits


def test_chunks_compute_the_same(train_fp32, work, tmp_path):
    whole, _ = run(train_fp32, work, tmp_path / "whole", *LONG[:4])
    for offload in ((), ("--offload", "keys=auto")):
        chunks, _ = run(train_fp32, work, tmp_path / f"chunks{len(offload)}", *LONG, *offload)
        assert by_key(chunks, "loss") == pytest.approx(by_key(whole, "loss"), rel=1e-5)
        assert by_key(chunks, "grad_norm") == pytest.approx(by_key(whole, "grad_norm"), rel=1e-4)


def test_lora_is_that_of_peft(train_fp32, work, tmp_path):
    """Its losses and, of the frozen model in NF4, those beside the matrices in full."""
    log, _ = run(train_fp32, work, tmp_path, *LORA)
    data = ("--model", work / "model", "--data", work / "data.bin", "--batch", 3, "--seq-len", 37)
    expected = run_reference(*data, "--steps", 1, "--adapter", tmp_path / "out")
    train_fp32(*data, "--steps", 1, "--adapter", tmp_path / "out", "--train", "lora", "--sample", "tokens=0", "--log", tmp_path / "log2")
    assert by_key(read_log(tmp_path / "log2"), "loss") == pytest.approx(by_key(expected, "loss"), rel=0, abs=1e-5)
    nf4, _ = run(train_fp32, work, tmp_path / "nf4", *LORA, "--base", "nf4")
    assert by_key(nf4, "loss") == pytest.approx(by_key(log, "loss"), rel=0.1)


def test_resume_is_the_unbroken_run(train, work, tmp_path):
    _, whole = run(train, work, tmp_path / "whole", "--schedule", "constant", steps=4)
    run(train, work, tmp_path / "half", "--schedule", "constant", steps=2)
    train("--resume", tmp_path / "half" / "out", "--steps", 4, cwd=work)
    assert saved_bytes(tmp_path / "half" / "out") == whole


def test_chosen_levels_are_the_best_there_are(train_fp32, tmp_path):
    make_uneven(tmp_path / "model", VOCAB, 128, [WIDE, SMALL, NARROW], channels=64)
    given = ("--model", tmp_path / "model", "--batch", 2, "--seq-len", 80, "--sample", "tokens=0", "--chunk-rows", "head=0",
             "--offload", "weights=device,gradients=device,state=device,inputs=device", "--state-formats", "m=fp32,v=fp32")
    every, texts = [], set()
    for levels in itertools.product(LEVELS, repeat=3):
        plan = train_fp32.plan(*given, "--recompute", ",".join(f"{level}:1" for level in levels))
        every.append((plan["estimated_seconds"], plan["totals"]["total"]))
    sizes = sorted({size for _, size in every})
    for budget in [*sizes[::12], sizes[-1]]:
        plan = train_fp32.plan(*given, "--memory", f"{budget}B")
        best = min(seconds for seconds, size in every if size <= budget)
        assert plan["totals"]["total"] <= budget and plan["estimated_seconds"] == pytest.approx(best, rel=1e-6)
        texts.add(plan["recompute"])
    assert len(texts) > 4


@pytest.mark.parametrize("wrong, named", [
    ([WIDE] * 6, "a list of 7 layers"), ([WIDE] * 6 + [WIDE | {"heads": 5}], "5 heads are not a multiple of 3"),
    ([WIDE] * 6 + [WIDE | {"head_size": 7}], "'head_size' is 7, but must be even"), ([WIDE] * 6 + [{}], "'heads' is missing")])
def test_wrong_layers(train_fp32, work, tmp_path, wrong, named):
    config = json.loads((work / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_sizes": wrong}))
    (tmp_path / "model.safetensors").symlink_to(work / "model" / "model.safetensors")
    assert named in train_fp32("--model", tmp_path, "--steps", 0, "--plan", code=2).stderr.decode()
