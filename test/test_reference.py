"""dev/reference.py compared with transformers: logits, gradients, optimizer steps, files."""

import itertools
import json

import make_model
import numpy as np
import pytest
import reference
import torch
from reference_runs import run_reference
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

VOCAB, POSITIONS = 97, 24


def make(folder, *options):
    make_model.main(["--out", str(folder), "--vocab", str(VOCAB), "--positions", str(POSITIONS), *options])
    return str(folder)


def transformers_model(folder):
    return GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def write_text(path, size=4000):
    path.write_bytes(np.random.default_rng(0).integers(0, VOCAB, size, dtype=np.uint8).tobytes())
    return str(path)


def assert_close(actual, expected):
    """Within 1e-5 of the largest expected value."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("options", [
    ["--layers", "1", "--heads", "1", "--channels", "32"],
    ["--layers", "3", "--heads", "6", "--channels", "48", "--prefix"],
    ["--dtype", "bf16"],
    ["--dtype", "fp16", "--prefix"],
    ["--family", "llama", "--kv-heads", "2", "--shard-size", "100KB"],
    ["--family", "bloom"],
], ids=" ".join)
def test_loads_every_weight(tmp_path, options):
    folder = make(tmp_path / "model", *options)
    stored = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        stored |= load_file(file)
    model = reference.load_model(folder)
    assert not model.training and len(stored) == len(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        expected = stored[name] if name in stored else stored[name.removeprefix("transformer.")]
        assert parameter.dtype == torch.float32 and torch.equal(parameter, expected.float())


def test_a_missing_weight_is_one_line(tmp_path, capsys):
    folder = make(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["h.1.ln_2.bias"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit) as ended:
        reference.load_model(folder)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "h.1.ln_2.bias" in error and error.count("\n") == 1


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_steps(tmp_path, clip):
    """Losses, norms and weights of a run, and its files, compared with transformers under
    torch.optim.AdamW."""
    folder, text = make(tmp_path / "model"), write_text(tmp_path / "text")
    steps, batch, accumulate, seq_len, seed = 5, 2, 3, 16, 7
    reference.main(["--model", folder, "--data", text, "--steps", str(steps), "--batch", str(batch),
                    "--grad-accum", str(accumulate), "--seq-len", str(seq_len), "--seed", str(seed),
                    "--schedule", "constant", "--lr", "1e-3", "--warmup", "0", "--clip", str(clip), "--eval-every", "2",
                    "--eval-batches", "3", "--log", str(tmp_path / "log"), "--out", str(tmp_path / "out"),
                    "--dump-gradients", str(tmp_path / "gradients")])
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    log = [line for line in lines if "loss" in line]
    validations = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert [line["step"] for line in log] == list(range(1, steps + 1)) and list(validations) == [2, 4, 5]

    model = transformers_model(folder)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}],
                                  lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    train, held_out = reference.load_data([text], None, seq_len)
    sequences = reference.training_sequences(train, seq_len, seed)

    def loss_of(rows):
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        logits = model(tokens[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    for step, line in enumerate(log):
        optimizer.zero_grad()
        # One batch of all rows has the same gradient as the mean over micro-batches.
        loss = loss_of(list(itertools.islice(sequences, batch * accumulate)))
        loss.backward()
        if step == 0:
            dumped = load_file(tmp_path / "gradients")
            for name, p in model.named_parameters():
                assert_close(dumped.pop(name), p.grad)
            assert not dumped
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
        assert norm > 0.5, "clipping would not matter"
        optimizer.step()
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)

    rows = list(itertools.islice(reference.validation_sequences(held_out, seq_len), 3 * batch * accumulate))
    assert validations[5] == pytest.approx(loss_of(rows).item(), abs=1e-5)
    saved = transformers_model(tmp_path / "out").state_dict()
    for name, p in model.named_parameters():
        before, after, expected = start[name], saved[name], p.detach()
        if name.endswith("c_attn.bias"):
            # Softmax ignores what the keys' biases add, so their gradient is rounding noise, which Adam turns
            # into full steps. Queries and values remain.
            before, after, expected = (torch.cat([t.chunk(3)[0], t.chunk(3)[2]]) for t in (before, after, expected))
        # Compared in norm, because Adam also magnifies the rounding of single gradients near zero.
        assert (after - expected).norm() < 1e-3 * (expected - before).norm(), name


@pytest.mark.parametrize("schedule, expected", [
    ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ("linear", [0.5, 1, 1, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44, 0.36, 0.28]),
    ("cosine", [0.5, 1, 1, 0.9804226, 0.9236068, 0.8351141, 0.7236068, 0.6, 0.4763932, 0.3648859, 0.2763932,
                0.2195774]),
    ("wsd", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0.6]),
])
def test_schedules(schedule, expected):
    """Warm-up of 2 steps to 1, then down to 0.2 at step 12; the last 12 // 5 = 2 steps are wsd's decay."""
    options = reference.parse_options(["--model", "-", "--data", "-", "--lr", "1", "--min-lr", "0.2", "--warmup",
                                       "2", "--steps", "12", "--schedule", schedule])
    assert [reference.learning_rate(step, options) for step in range(12)] == pytest.approx(expected, abs=1e-7)


def test_bf16_is_close_but_not_equal(tmp_path):
    arguments = ("--model", make(tmp_path / "model"), "--data", write_text(tmp_path / "text"),
                 "--steps", 3, "--seq-len", 24, "--warmup", 0, "--lr", 3e-4, "--batch", 4)
    exact, rounded = run_reference(*arguments), run_reference(*arguments, "--precision", "bf16")
    assert len(exact) == 4
    for a, b in zip(exact, rounded, strict=True):
        name = "loss" if "loss" in a else "val_loss"  # the last line
        assert 0 < abs(a[name] - b[name]) < 0.03


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"wte.weight": 7}}',
                                   '{"weight_map": {"wte.weight": "nowhere.safetensors"}}', "\xff", "[" * 100000])
def test_a_damaged_index_is_one_line(tmp_path, capsys, index):
    folder = make(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors.index.json").write_bytes(index.encode("latin1"))
    with pytest.raises(SystemExit) as ended:
        reference.load_model(folder)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and folder in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments, message", [
    (["--seq-len", "25"], "the model has 24 positions"),
    (["--seq-len", "24", "--eval-every", "1", "--val-data", "nowhere*"], "--val-data nowhere*: no such file"),
    (["--schedule", "step"], "invalid choice: 'step'"),
    (["--batch", "0"], "--batch: 0 must be at least 1"),
])
def test_mistakes_are_one_line(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run_reference("--model", make(tmp_path / "model"), "--data", write_text(tmp_path / "text"), *arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
