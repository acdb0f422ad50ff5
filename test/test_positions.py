"""Longer sequences than a model was trained on: scaled rotary positions, and learned positions that are
extended."""

import json

import numpy as np
import pytest
import torch
from model_files import fused
from reference_runs import GRADIENT_BOUND, LOSS_BOUND, expected_logits, last_logits, open_with_transformers, run_reference
from safetensors.torch import load_file
from trainer_runs import by_key, make, random_tokens, read_log, saved_bytes, write_shard

VOCAB = 151
LENGTH = 45  # length of sequences; models are trained on shorter ones unless stated otherwise
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 1e4}
# A scaling, the positions with it, and other properties of the model.
SCALINGS = {
    "yarn": (YARN, 64, "llama", "--heads", 4, "--kv-heads", 2, "--channels", 56),
    "yarn beyond the positions": (YARN, 16, "llama", "--heads", 3, "--channels", 60),
    "attention factor": (YARN | {"attention_factor": 1.7}, 64, "qwen3", "--heads", 4, "--kv-heads", 2, "--channels", 40,
                         "--head-size", 26),
    "mscale": (YARN | {"mscale": 1.3, "mscale_all_dim": 0.4}, 64, "qwen2", "--heads", 4, "--channels", 48),
    "one mscale": (YARN | {"mscale": 1.3, "mscale_all_dim": 0}, 64, "qwen2", "--heads", 4, "--channels", 48),
    "betas": (YARN | {"beta_fast": 3, "beta_slow": 0.4}, 64, "mistral", "--heads", 4, "--channels", 72, "--window", 9),
    "no truncation": (YARN | {"beta_fast": 3, "beta_slow": 0.4, "truncate": False}, 64, "llama", "--heads", 2,
                      "--channels", 76),
    "betas that meet": (YARN | {"beta_fast": 2, "beta_slow": 2, "truncate": False}, 64, "llama", "--heads", 2,
                        "--channels", 76),
    "factor of positions": (YARN | {"factor": None}, 56, "llama", "--heads", 2, "--channels", 32),
    "no original": ({key: YARN[key] for key in ("rope_type", "factor", "rope_theta")}, 16, "llama", "--heads", 2,
                    "--channels", 32),
    "llama3 with no original": ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}, 64,
                                "llama", "--heads", 2, "--channels", 32),
    "dynamic": (DYNAMIC, 19, "llama", "--heads", 4, "--kv-heads", 1, "--channels", 56),
    "dynamic of qwen": (DYNAMIC | {"factor": 7.3}, 24, "qwen3", "--heads", 3, "--channels", 60),
    "dynamic within the positions": (DYNAMIC, 64, "mistral", "--heads", 3, "--channels", 60),
}


def model_of(path, family, positions, *options, rope=None):
    given = ("--rope", json.dumps(rope)) if rope else ()
    return make(path / "model", "--family", family, "--positions", positions, "--vocab", VOCAB, *given, *options)


def contexts_of(length=LENGTH, count=2):
    tokens = random_tokens(VOCAB, count * length)
    return np.stack([tokens[at:at + length] for at in range(0, count * length, length)])


def check_logits(train, folder, length=LENGTH):
    """The logits after a context agree with transformers', as closely as in the tests of families: they are
    computed from fp32 losses times the length, and such a loss is about 13."""
    chosen = list(range(0, VOCAB, 17))
    expected = expected_logits(open_with_transformers(folder), contexts_of(length), chosen)
    got = last_logits(train, folder, contexts_of(length), chosen)
    assert np.linalg.norm(got - expected) <= 1e-5 * length / 13 * np.linalg.norm(expected)
    return expected


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings(train_fp32, tmp_path, name):
    rope, positions, family, *options = SCALINGS[name]
    check_logits(train_fp32, model_of(tmp_path, family, positions, *options, rope=rope))


@pytest.mark.parametrize("name", ["yarn", "mscale", "dynamic"])
def test_the_older_spelling(train_fp32, tmp_path, name):
    """rope_scaling with `type`, and what a save says of it."""
    rope, positions, family, *options = SCALINGS[name]
    path = model_of(tmp_path, family, positions, *options, rope=rope) / "config.json"
    config = json.loads(path.read_text())
    older = config.pop("rope_parameters")
    config["rope_theta"], older["type"] = older.pop("rope_theta"), older.pop("rope_type")
    path.write_text(json.dumps(config | {"rope_scaling": older}))
    expected = check_logits(train_fp32, tmp_path / "model")
    train_fp32("--model", "model", "--out", "out", "--steps", 0, cwd=tmp_path)
    again = open_with_transformers(tmp_path / "out")
    assert np.array_equal(expected_logits(again, contexts_of(), list(range(0, VOCAB, 17))), expected)


def test_the_original_positions_beside_the_scaling(train_fp32, tmp_path):
    """In config.json itself, where transformers looks first."""
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    path = model_of(tmp_path, "llama", 64, "--heads", 2, "--channels", 32, rope=rope) / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"].pop("original_max_position_embeddings", None)
    path.write_text(json.dumps(config | {"original_max_position_embeddings": 16}))
    check_logits(train_fp32, tmp_path / "model")


@pytest.fixture(params=["attention factor", "betas", "dynamic"])
def scaled(request, tmp_path):
    """Options to train a model, with weights that both precisions can store, on sequences longer than in its
    training."""
    rope, positions, family, *options = SCALINGS[request.param]
    model = model_of(tmp_path, family, positions, *options, "--dtype", "bf16", rope=rope)
    data = write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 2000))
    return "--model", model, "--data", data, "--batch", 3, "--seq-len", LENGTH


def test_gradients(train_fp32, tmp_path, scaled):
    """Gradients of what the positions rotate, and of earlier layers. After a first step with beta1 0 they are
    in AdamW's m."""
    run_reference(*scaled, "--steps", 1, "--dump-gradients", tmp_path / "expected")
    train_fp32(*scaled, "--steps", 1, "--optimizer", "beta1=0", "--clip", 0, "--sample", "tokens=0", "--out", tmp_path / "out")
    expected, state = load_file(tmp_path / "expected"), load_file(tmp_path / "out" / "trainer_state.safetensors")
    for name in ("layers.0.self_attn.qkv_proj.weight", "layers.1.self_attn.qkv_proj.weight", "embed_tokens.weight"):
        gradient, got = fused(name, expected), state["m." + name]
        assert got.shape == gradient.shape
        assert (got - gradient).norm() <= GRADIENT_BOUND["fp32"] * gradient.norm(), name


def test_steps(train, tmp_path, scaled):
    run = (*scaled, "--val-data", scaled[3], "--steps", 8, "--lr", 1e-3, "--warmup", 2, "--eval-every", 4,
           "--eval-batches", 2)
    expected = run_reference(*run)
    train(*run, "--log", tmp_path / "log", "--sample", "tokens=0")
    log = read_log(tmp_path / "log")
    for key in ("loss", "val_loss"):
        assert by_key(log, key) == pytest.approx(by_key(expected, key), rel=0, abs=LOSS_BOUND[train.precision])


OPTIONS = {"llama": "yarn:4", "mistral": "linear:2", "qwen2": "dynamic:2.5", "qwen3": "llama3:8"}
SMALL = ("--heads", 4, "--kv-heads", 2, "--channels", 56)


@pytest.fixture(params=OPTIONS)
def plain(request, tmp_path):
    """A model without a scaling, with fewer positions than sequences have tokens, and its options."""
    model_of(tmp_path, request.param, 24, *SMALL)
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 2000))
    return tmp_path, OPTIONS[request.param]


RUN = ("--model", "model", "--data", "data.bin", "--batch", 2, "--seq-len", LENGTH, "--sample", "tokens=0")


def test_the_option(train_fp32, plain):
    """transformers opens what was trained; a resumed run equals the uninterrupted one; a save has no other
    scaling."""
    work, scaling = plain
    said = train_fp32(*RUN, "--steps", 4, "--save-every", 2, "--keep", 0, "--out", "out", "--rope-scaling", scaling,
                      "--val-data", "data.bin", "--log", "log", cwd=work).stdout.decode()
    assert f"--rope-scaling {scaling}: sequences of up to {int(24 * float(scaling.split(':')[1]))} tokens" in said
    check_logits(train_fp32, work / "out")
    sequences = [random_tokens(VOCAB, 2000)[at:at + LENGTH + 1] for at in range(0, 16 * LENGTH, LENGTH)]
    with torch.no_grad():
        batch = torch.from_numpy(np.stack(sequences))
        logits = open_with_transformers(work / "out")(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    assert by_key(read_log(work / "log"), "val_loss")[4] == pytest.approx(loss, abs=1e-5)
    whole = saved_bytes(work / "out" / "step-00000004")
    train_fp32("--resume", "out/step-00000002", "--out", "again", cwd=work)
    assert saved_bytes(work / "again") == whole
    train_fp32("--model", "out", *RUN[2:], "--steps", 1, "--rope-scaling", scaling, "--out", "more", cwd=work)
    assert (work / "more" / "config.json").read_bytes() == (work / "out" / "config.json").read_bytes()
    for other in ("yarn:1.5", "dynamic:1.9"):
        error = train_fp32("--model", "out", *RUN[2:], "--rope-scaling", other, cwd=work, code=2).stderr.decode()
        assert f"--rope-scaling {other}" in error and "already" in error and error.count("\n") == 1


@pytest.mark.parametrize("first, then", [("llama3:8", "yarn:16"), ("yarn:4", "yarn:8"), ("linear:2", "linear:4"),
                                         ("dynamic:2.5", "yarn:8"), ("linear:2", "dynamic:4"), ("llama3:2", "llama3:4")])
def test_one_scaling_takes_the_place_of_another(train_fp32, tmp_path, first, then):
    """As if the model never had the first one: a factor counts from the positions before any scaling."""
    model_of(tmp_path, "llama", 24, *SMALL)
    scale = ("--steps", 0, "--rope-scaling")
    train_fp32("--model", "model", *scale, first, "--out", "first", cwd=tmp_path)
    said = train_fp32("--model", "first", *scale, then, "--out", "both", cwd=tmp_path).stderr.decode()
    assert f"--rope-scaling {then}: sequences of up to {24 * int(then.split(':')[1])} tokens" in said
    train_fp32("--model", "model", *scale, then, "--out", "directly", cwd=tmp_path)
    configs = [(tmp_path / name / "config.json").read_bytes() for name in ("first", "both", "directly")]
    assert configs[0] != configs[1] == configs[2]
    check_logits(train_fp32, tmp_path / "both")


def test_with_an_adapter(train_fp32, tmp_path):
    """The option is given again with the adapter; a merged model has the scaling in its config.json."""
    model_of(tmp_path, "llama", 24, *SMALL)
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 2000))
    adapter = ("--rope-scaling", "yarn:2")
    said = train_fp32(*RUN, "--steps", 3, "--train", "lora", *adapter, "--out", "lora", "--merge", "merged", "--val-data",
                      "data.bin", "--log", "log", "--eval-batches", 1, cwd=tmp_path).stdout.decode()
    assert "give the option with the adapter again" in said
    validate = ("--val-data", "data.bin", "--batch", 2, "--seq-len", LENGTH, "--steps", 0, "--eval-batches", 1)
    train_fp32("--model", "model", "--adapter", "lora", *adapter, *validate, "--log", "with", cwd=tmp_path)
    train_fp32("--model", "merged", *validate, "--log", "merged.log", cwd=tmp_path)
    losses = [by_key(read_log(tmp_path / log), "val_loss") for log in ("log", "with", "merged.log")]
    assert losses[0][3] == losses[1][0] == pytest.approx(losses[2][0], abs=1e-5)
    check_logits(train_fp32, tmp_path / "merged")


def test_dynamic_in_generation(train_fp32, tmp_path):
    """Within the trained positions it scales nothing: a longer text continues from its latest half."""
    model_of(tmp_path, "llama", 24, *SMALL)
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 300))
    run = ("--data", "data.bin", "--batch", 1, "--seq-len", 20, "--steps", 1, "--lr", 0, "--sample", "tokens=70,temperature=0")
    plain = train_fp32("--model", "model", *run, cwd=tmp_path).stdout
    scaled = train_fp32("--model", "model", *run, "--rope-scaling", "dynamic:3", cwd=tmp_path).stdout
    assert plain.split(b"--- ")[-1] == scaled.split(b"--- ")[-1]
    refusal = train_fp32(*RUN[:-2], "--rope-scaling", "dynamic:3", cwd=tmp_path, code=2).stderr.decode()
    assert "dynamic" in refusal and "--sample tokens=0" in refusal and refusal.count("\n") == 1


def test_dynamic_of_examples(train_fp32, tmp_path):
    """Packed examples have lengths of their own, which does not matter within the trained positions."""
    make(tmp_path / "model", "--family", "llama", "--positions", 24, "--vocab", 256, *SMALL)
    (tmp_path / "data.jsonl").write_text('{"text": "one two three"}\n{"text": "four five"}\n')
    run = ("--model", "model", "--data", "data.jsonl", "--rope-scaling", "dynamic:3", "--steps", 1, "--batch", 1,
           "--sample", "tokens=0")
    train_fp32(*run, "--seq-len", 24, cwd=tmp_path)
    refusal = train_fp32(*run, "--seq-len", 25, cwd=tmp_path, code=2).stderr.decode()
    assert "--seq-len 25" in refusal and "examples share them: at most 24" in refusal and refusal.count("\n") == 1


# ---- learned positions

GPT2 = ("--heads", 3, "--channels", 48)


@pytest.mark.parametrize("trained, grown", [(24, 45), (24, 101), (1, 50), (24, 24)])
def test_learned_positions_grow(train_fp32, tmp_path, trained, grown):
    """Rows are interpolated between the trained ones, as torch does with aligned corners: the first and the last
    row stay."""
    model_of(tmp_path, "gpt2", trained, *GPT2)
    said = train_fp32("--model", "model", "--positions", grown, "--steps", 0, "--out", "out", cwd=tmp_path).stderr.decode()
    assert ("linear between two" in said) == (grown > trained)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    before = {name.removeprefix("transformer."): tensor for name, tensor in before.items()}
    after = {name.removeprefix("transformer."): tensor for name, tensor in after.items()}
    rows = torch.nn.functional.interpolate(before["wpe.weight"].double().T[None], grown, mode="linear", align_corners=True)
    torch.testing.assert_close(after.pop("wpe.weight"), rows[0].T.float(), rtol=0, atol=2e-7)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items()) and len(after) == len(before) - 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["n_positions"] == config["n_ctx"] == grown
    if grown >= LENGTH:
        check_logits(train_fp32, tmp_path / "out")


def test_growing_is_resumed(train_fp32, tmp_path):
    """The extended positions are trained; a resumed run takes them from the save, and generates with them."""
    model_of(tmp_path, "gpt2", 24, *GPT2)
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 2000))
    train_fp32(*RUN, "--positions", 60, "--steps", 4, "--save-every", 2, "--keep", 0, "--out", "out", cwd=tmp_path)
    whole = saved_bytes(tmp_path / "out" / "step-00000004")
    said = train_fp32("--resume", "out/step-00000002", "--out", "again", cwd=tmp_path).stdout.decode()
    assert saved_bytes(tmp_path / "again") == whole and "linear between" not in said
    check_logits(train_fp32, tmp_path / "out", 57)
    sampled = [train_fp32(*run, "--steps", 0, "--val-data", "data.bin", "--seq-len", 50, "--batch", 2, cwd=tmp_path).stderr
               for run in (("--resume", "out"), ("--model", "out"))]
    assert sampled[0] == sampled[1]


# ---- mistakes

REFUSED = [
    ("llama", {"--rope-scaling": "yarn"}, "--rope-scaling yarn"), ("llama", {"--rope-scaling": "yarn:"}, "yarn:"),
    ("llama", {"--rope-scaling": "yarn:1"}, "above 1"), ("llama", {"--rope-scaling": "yarn:4x"}, "yarn:4x"),
    ("llama", {"--rope-scaling": "yarn:nan"}, "yarn:nan"), ("llama", {"--rope-scaling": "default:2"}, "default:2"),
    ("llama", {"--rope-scaling": "longrope:4"}, "longrope:4"), ("llama", {"--rope-scaling": ""}, "--rope-scaling"),
    ("llama", {"--rope-scaling": "yarn:1e6"}, "2^21"), ("gpt2", {"--rope-scaling": "yarn:4"}, "--positions N"),
    ("bloom", {"--rope-scaling": "yarn:4"}, "ALiBi"), ("bloom", {"--positions": 99}, "ALiBi"),
    ("llama", {"--positions": 99}, "--rope-scaling yarn"), ("gpt2", {"--positions": 23}, "has 24"),
    ("gpt2", {"--positions": 0}, "--positions"), ("gpt2", {"--seq-len": 25}, "--positions N"),
    ("llama", {"--seq-len": 25}, "--rope-scaling yarn:2 stretches"),
    ("llama", {"--seq-len": 97}, "--rope-scaling yarn:8 stretches"),
    ("llama", {"--seq-len": 97, "--rope-scaling": "yarn:4"}, "the model's 96 positions\n"),
    ("gpt2", {"--model": "d2", "--positions": 99}, "new one"),
    ("llama", {"--model": "llama:d2", "--rope-scaling": "yarn:4"}, "new one"),
]


@pytest.mark.parametrize("family, options, named", REFUSED, ids=str)
def test_mistakes(train_fp32, tmp_path, family, options, named):
    shape = GPT2 if family == "gpt2" else ("--heads", 4, "--channels", 32)
    model_of(tmp_path, family, 24, *shape)
    options = {"--model": "model", "--steps": 0, "--out": "out"} | options
    error = train_fp32(*(part for pair in options.items() for part in pair), cwd=tmp_path, code=2).stderr.decode()
    assert named in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_resume_keeps_its_positions(train_fp32, tmp_path):
    model_of(tmp_path, "llama", 24, *SMALL)
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, 2000))
    train_fp32(*RUN, "--steps", 1, "--rope-scaling", "yarn:2", "--out", "out", cwd=tmp_path)
    for other in ("yarn:4", "linear:2"):
        error = train_fp32("--resume", "out", "--rope-scaling", other, cwd=tmp_path, code=2).stderr.decode()
        assert "--resume out" in error and "--rope-scaling" in error and error.count("\n") == 1


def test_a_scaled_model_names_the_next_factor(train_fp32, tmp_path):
    model_of(tmp_path, "llama", 24, *SMALL)
    train_fp32("--model", "model", "--steps", 0, "--rope-scaling", "llama3:8", "--out", "out", cwd=tmp_path)
    error = train_fp32("--model", "out", "--steps", 0, "--seq-len", 193, cwd=tmp_path, code=2).stderr.decode()
    assert "the model's 192 positions; --rope-scaling yarn:16 stretches them\n" in error
