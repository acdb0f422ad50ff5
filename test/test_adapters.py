"""LoRA and soft prompts of every family compared with PEFT: gradients, steps, files; and options change no
bit."""

import json
import shutil

import numpy as np
import peft
import pytest
import torch
from adapter_files import GIVEN, OPTIONS, STEPS, make_adapter, of_files, trained, validated, with_adapter
from model_files import DATA, linked, prepare
from reference_runs import GRADIENT_BOUND, LOSS_BOUND, gradients_in_bf16, open_with_transformers, run_reference
from safetensors.torch import load_file, save_file
from trainer_runs import by_key, make, random_tokens, read_log, refused, saved_bytes, write_shard

# For each model: the targets of its adapter, and settings besides rank and alpha. They cover parts of joined
# tensors, different ranks and scales, all layers and a single one.
USUALLY = "fp32"  # see conftest.py
LORA = {
    "gpt2": ("all-linear", {}),
    "llama": ("all-linear", {"rank_pattern": {"v_proj": 5}, "alpha_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 9}}),
    "llama-tied": (["q_proj", "v_proj", "up_proj"], {"use_rslora": True}),
    "mistral": (["k_proj", "down_proj"], {"rank_pattern": {"layers.0.self_attn.k_proj": 1}}),
    "qwen2": ("all-linear", {"rank_pattern": {"k_proj": 30}}),  # more than its outputs
    "qwen3": (["o_proj", "gate_proj"], {}),
    "bloom": ("all-linear", {"use_rslora": True}),
}


@pytest.fixture(scope="module", params=LORA)
def lora(request, tmp_path_factory):
    work = prepare(tmp_path_factory.mktemp(request.param), request.param, OPTIONS)
    targets, more = LORA[request.param]
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM",
                                       fan_in_fan_out=request.param == "gpt2", **more))
    return work


@pytest.fixture(scope="module", params=("gpt2", "llama", "bloom"))
def prompt(request, tmp_path_factory):
    work = prepare(tmp_path_factory.mktemp(request.param), request.param, OPTIONS)
    make_adapter(work, peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
    return work


@pytest.fixture
def work(lora, tmp_path):
    return linked(tmp_path, lora, "adapter")


@pytest.fixture
def prompt_work(prompt, tmp_path):
    return linked(tmp_path, prompt, "adapter")


def data_of(work):
    return ("--model", work / "model", "--adapter", work / "adapter", "--data", work / "data.bin", *DATA[4:])


def check_gradients(train, work):
    """After a first step with beta1 0 they are in AdamW's m."""
    data = (*data_of(work), "--grad-accum", 2, "--steps", 1)
    run_reference(*data, "--dump-gradients", work / "expected")
    train(*data, "--optimizer", "beta1=0", "--clip", 0, "--sample", "tokens=0", "--out", work / "out")
    expected = load_file(work / "expected")
    state = load_file(work / "out" / "trainer_state.safetensors")
    gradients = {n.removeprefix("m."): t for n, t in state.items() if n.startswith("m.")}
    assert sum(g.numel() for g in gradients.values()) == sum(g.numel() for g in expected.values())
    rounded = gradients_in_bf16(data) if train.precision == "bf16" else expected
    for name, got in gradients.items():
        gradient = of_files(name, got.shape[0], expected)
        assert got.shape == gradient.shape and gradient.norm() > 1e-6, name
        off = (of_files(name, got.shape[0], rounded) - gradient).norm()
        assert (got - gradient).norm() <= max(GRADIENT_BOUND[train.precision] * gradient.norm(), 1.2 * off), name


def check_steps(train, work):
    options = (*data_of(work), "--steps", 20, *STEPS, "--val-data", work / "data.bin", "--eval-every", 8,
               "--eval-batches", 2)
    expected = run_reference(*options)
    train(*options, "--log", work / "log", "--sample", "tokens=0")
    log, bound = read_log(work / "log"), LOSS_BOUND[train.precision]
    assert by_key(log, "loss") == pytest.approx(by_key(expected, "loss"), rel=0, abs=bound)
    assert by_key(log, "val_loss") == pytest.approx(by_key(expected, "val_loss"), rel=0, abs=bound)
    losses = list(by_key(log, "loss").values())
    assert losses[-1] != losses[0]


def test_gradients(train, work):
    check_gradients(train, work)


def test_twenty_steps(train, work):
    check_steps(train, work)


def test_gradients_of_a_prompt(train, prompt_work):
    check_gradients(train, prompt_work)


def test_twenty_steps_of_a_prompt(train, prompt_work):
    check_steps(train, prompt_work)


@torch.no_grad()
def logits(model, work):
    tokens = torch.from_numpy(np.fromfile(work / "data.bin", dtype=np.uint16, offset=1024)[:37].astype(np.int64))
    return model(tokens[None]).logits[0, -37:]


def test_a_prompt_begins_as_embeddings(train, tmp_path):
    """The embeddings of random tokens, or of a text's tokens, which are repeated if the text is short."""
    make(tmp_path / "model", "--channels", 24, "--heads", 3, "--vocab", 256, "--dtype", "bf16")
    rows = load_file(tmp_path / "model" / "model.safetensors")["wte.weight"].float()
    options = ("--model", "model", "--train", "prompt", "--soft-prompt", 5, "--steps", 0)
    for name, text in (("drawn", ()), ("text", ("--soft-prompt", "5:ab"))):
        train(*options, *text, "--out", name, cwd=tmp_path)
        prompt = load_file(tmp_path / name / "adapter_model.safetensors")["prompt_embeddings"].float()
        tokens = [torch.nonzero((rows == row).all(1)).item() for row in prompt]
        assert len(set(tokens)) > 2 if name == "drawn" else bytes(tokens) == b"ababa"


def check_files(train, work, bound):
    """PEFT opens a save with the same base; a validation and a resumed run use the saved adapter."""
    train(*DATA, "--adapter", "adapter", "--steps", 3, *STEPS, "--out", "out", "--sample", "tokens=0", cwd=work)
    model = with_adapter(work / "model", work / "out")
    tokens = np.fromfile(work / "data.bin", dtype=np.uint16, offset=1024).astype(np.int64)
    windows = torch.stack([torch.from_numpy(tokens[at:at + 38]) for at in range(0, 6 * 37, 37)])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(windows[:, :-1]).logits[:, -37:].flatten(0, 1),
                                                 windows[:, 1:].flatten()).item()
    got = validated(train, work, "--model", "model", "--adapter", "out")
    assert got == pytest.approx(loss, rel=0, abs=bound)
    assert got == validated(train, work, "--resume", "out")
    assert abs(validated(train, work, "--model", "model") - got) > bound


def test_files(train, work):
    check_files(train, work, 1e-5 if train.precision == "fp32" else 1e-2)


def test_files_of_a_prompt(train, prompt_work):
    check_files(train, prompt_work, 1e-5 if train.precision == "fp32" else 1e-2)


def test_merge(train_fp32, work):
    """The merged folder is a plain model, with the logits of the base and its adapter."""
    before = validated(train_fp32, work, "--model", "model", "--adapter", "adapter", "--merge", "merged")
    assert validated(train_fp32, work, "--model", "merged") == pytest.approx(before, rel=0, abs=1e-5)
    merged, adapted = open_with_transformers(work / "merged").float(), with_adapter(work / "model", work / "adapter")
    got, expected = logits(merged, work), logits(adapted, work)
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_memory_options_change_no_bit(train_fp32, work):
    first = trained(train_fp32, work, "none", "--recompute", "none", "--grad-accum", 2)
    for level in ("gelu", "norm", "ffn", "attention", "block", "block:1,norm:1"):
        name = level.replace(":", "")
        assert first == trained(train_fp32, work, name, "--recompute", level, "--grad-accum", 2)
    assert first == trained(train_fp32, work, "one", "--threads", 1, "--grad-accum", 2)
    by_block = trained(train_fp32, work, "a", "--advanced", "clip=block")
    assert by_block == trained(train_fp32, work, "b", "--advanced", "clip=block", "--update-in-backward")
    free = trained(train_fp32, work, "c", "--clip", 0)
    assert free == trained(train_fp32, work, "d", "--clip", 0, "--update-in-backward")


def test_resume_is_the_unbroken_run(train, work):
    shutil.copytree(work / "adapter", work / "begin")
    train(*DATA, "--adapter", "begin", "--steps", 6, "--save-every", 3, "--keep", 0, "--out", "out", "--sample", "tokens=0",
          cwd=work)
    whole = saved_bytes(work / "out" / "step-00000006")
    shutil.rmtree(work / "out" / "step-00000006")
    shutil.rmtree(work / "begin")  # the save has its final values
    train("--resume", "out/step-00000003", cwd=work)
    assert saved_bytes(work / "out" / "step-00000006") == whole


@pytest.fixture
def one_work(tmp_path):
    """A Llama with an adapter, for tests whose subject is the same in all families."""
    work = prepare(tmp_path, "llama", OPTIONS)
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM"))
    return work


def refusal(train, work, *options):
    error = train(*options, cwd=work, code=2).stderr.decode()
    assert error.count("\n") == 1
    return error


def test_a_requeued_run_that_began_with_an_adapter(train_fp32, one_work):
    """The same command goes on from its save, whether it names the adapter as --adapter or as --model."""
    work = one_work
    config = json.loads((work / "adapter/adapter_config.json").read_text())
    (work / "adapter/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "model"}))
    options = (*DATA[2:], "--save-every", 2, "--sample", "tokens=0", "--resume", "auto")
    for name, model in (("a", ("--model", "model", "--adapter", "adapter")), ("b", ("--model", "adapter"))):
        train_fp32(*model, *options, "--out", name, "--steps", 4, cwd=work)
        assert b"nothing is left" in train_fp32(*model, *options, "--out", name, "--steps", 4, cwd=work).stdout
        assert b"resuming" in train_fp32(*model, *options, "--out", name, "--steps", 6, cwd=work).stdout
    assert saved_bytes(work / "a") == saved_bytes(work / "b")
    shutil.copytree(work / "adapter", work / "other")
    assert "goes on with its own" in refusal(train_fp32, work, "--model", "model", "--adapter", "other", *options, "--out", "a", "--steps", 6)


def test_a_run_that_has_merged_is_requeued(train_fp32, one_work):
    work, lora = one_work, ("--model", "model", *DATA[2:], "--train", "lora", "--lora-rank", 2, "--sample", "tokens=0")
    run = (*lora, "--out", "out", "--merge", "merged", "--resume", "auto")
    train_fp32(*run, "--steps", 2, cwd=work)
    merged = (work / "merged/model.safetensors").read_bytes()
    again = train_fp32(*run, "--steps", 2, cwd=work)
    assert b"nothing is left" in again.stdout and b"--merge merged is there already, and stays as it is\n" in again.stderr
    train_fp32("--resume", "out", "--steps", 4, cwd=work)
    assert (work / "merged/model.safetensors").read_bytes() == merged
    assert "is there already" in refusal(train_fp32, work, *lora, "--merge", "merged", "--steps", 2)
    assert "is there already" in refusal(train_fp32, work, "--resume", "out", "--merge", "merged", "--steps", 6)
    assert "a bench only measures" in refusal(train_fp32, work, "--model", "model", "--train", "lora", "--merge", "new", "--bench")


def test_a_folder_of_saves_has_one_kind(train_fp32, one_work):
    """An adapter's saves do not become a model's, nor the other way round."""
    for out, options, kind, other in (("a", ("--train", "lora"), "an adapter", "a model"), ("b", (), "a model", "an adapter")):
        switched = () if options else ("--train", "lora")
        run = ("--model", "model", *DATA[2:], "--steps", 1, "--sample", "tokens=0", "--out", out)
        train_fp32(*run, *options, cwd=one_work)
        said = refusal(train_fp32, one_work, *run, *switched)
        assert f"--out {out} has the saves of {kind}, and this run trains {other}: give another folder" in said
        train_fp32(*run, *options, cwd=one_work)


def test_a_prompt_is_not_merged(train_fp32, prompt_work):
    """It is no part of the weights: what was trained would be lost."""
    for how in (("--train", "prompt", "--soft-prompt", 3), ("--adapter", "adapter")):
        error = refusal(train_fp32, prompt_work, "--model", "model", *DATA[2:], *how, "--steps", 1, "--merge", "merged")
        assert "--merge merged: a soft prompt is no part of the weights: --out saves it" in error


def test_plan_is_what_is_taken(train, work):
    """Every byte that an adapter adds is planned; the model has no gradients or moments."""
    options = ("--model", work / "model", *DATA[4:], "--data", work / "data.bin", "--train", "lora", "--lora-rank", 2,
               "--steps", 2, "--sample", "tokens=0")
    plan = train.plan(*options)
    whole = train.plan(*options[:-6], "--train", "all", "--steps", 2, "--sample", "tokens=0")
    assert "taken from the device" in train(*options).stdout.decode()
    totals, element = plan["totals"], 4 if train.precision == "fp32" else 2
    assert plan["parameters"] == whole["parameters"] == whole["trained"] > 5 * plan["trained"]
    for kind in ("gradients", "optimizer_m", "optimizer_v"):
        assert totals[kind] < 0.3 * whole["totals"][kind]
    adapter = [b["bytes"] for b in plan["buffers"] if b["name"] == "adapter_weights"]
    assert totals["weights"] == whole["totals"]["weights"] + adapter[0] and adapter[0] >= element * plan["trained"]


# ---- bad input


@pytest.fixture
def spoilt(lora, tmp_path):
    """A copy that tests may damage; one family is enough."""
    if "llama-tied" not in lora.name:
        pytest.skip("the checks are the same for all families")
    shutil.copytree(lora, tmp_path, dirs_exist_ok=True)
    return tmp_path


BAD_OPTIONS = [
    ({"--train": "lora", "--lora-rank": "0"}, ["--lora-rank", "0"]),
    ({"--train": "lora", "--lora-rank": "41"}, ["--lora-rank 41", "1 to"]),
    ({"--train": "lora", "--lora-targets": "q_proj,no_proj"}, ["--lora-targets no_proj", "self_attn.q_proj"]),
    ({"--lora-rank": "4"}, ["--lora-rank 4", "--train lora"]),
    ({"--train": "lora", "--adapter": "adapter", "--lora-alpha": "4"}, ["--lora-alpha 4", "--adapter adapter"]),
    ({"--train": "prompt", "--adapter": "adapter"}, ["--train prompt", "adapter is a lora adapter"]),
    ({"--train": "prompt", "--soft-prompt": "64"}, ["soft prompt of 64", "64 positions"]),
    ({"--train": "prompt", "--soft-prompt": "60"}, ["--seq-len 16", "64 positions", "60"]),
    ({"--soft-prompt": "x"}, ["--soft-prompt x", "--train prompt"]),
    ({"--train": "prompt", "--soft-prompt": "x"}, ["--soft-prompt", "no tokenizer"]),
    ({"--merge": "merged"}, ["--merge merged", "no adapter"]),
    ({"--adapter": "adapter", "--merge": "model"}, ["--merge model", "there already"]),
    ({"--train": "lora", "--model": "d2", "--data": "data.bin"}, ["--model d2", "folder"]),
    ({"--adapter": "model"}, ["model", "is no adapter"]),
    ({"--adapter": "nowhere"}, ["nowhere", "is no adapter"]),
    ({"--model": "adapter", "--adapter": "adapter"}, ["--model adapter", "--adapter"]),
]


@pytest.mark.parametrize("options, named", BAD_OPTIONS, ids=str)
def test_bad_options(train_fp32, spoilt, options, named):
    refused(train_fp32, spoilt, GIVEN | options, *named)


BAD_SETTINGS = [
    ({"peft_type": "IA3"}, ["'peft_type'", "IA3", "LORA"]),
    ({"use_dora": True}, ["'use_dora'", "true"]),
    ({"bias": "all"}, ["'bias'", "all"]),
    ({"modules_to_save": ["lm_head"]}, ["'modules_to_save'", "lm_head"]),
    ({"init_lora_weights": "pissa"}, ["'init_lora_weights'", "pissa"]),
    ({"lora_alpha": 0}, ["'lora_alpha'", "0"]),
    ({"alpha_pattern": {"(": 3}}, ["'alpha_pattern'", "regular expression"]),
    ({"alpha_pattern": {"q_proj": "x"}}, ["alpha_pattern", "q_proj", "x"]),
]


@pytest.mark.parametrize("change, named", BAD_SETTINGS, ids=str)
def test_bad_settings(train_fp32, spoilt, change, named):
    path = spoilt / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(train_fp32, spoilt, GIVEN | {"--adapter": "adapter"}, "adapter/adapter_config.json", *named)


def test_tensors_of_another_model(train_fp32, spoilt):
    path = spoilt / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    first = next(name for name in tensors if name.endswith("lora_A.weight"))

    def check(changed, *named):
        save_file(changed, path, metadata={"format": "pt"})
        refused(train_fp32, spoilt, GIVEN | {"--adapter": "adapter"}, "adapter_model.safetensors", *named)

    check(tensors | {first: tensors[first][:, :-4].contiguous()}, first, "shape")
    check({name: t for name, t in tensors.items() if name != first}, first)
    check(tensors | {first.replace("layers.0", "layers.9"): tensors[first].clone()}, "layers.9", "no LoRA")
    check(tensors | {first.replace("lora_A.weight", "lora_magnitude_vector"): tensors[first][0].clone()},
          "lora_magnitude_vector")
    check({}, "no tensors")
    path.unlink()
    refused(train_fp32, spoilt, GIVEN | {"--adapter": "adapter"}, "adapter", "has no adapter_model.safetensors")


@pytest.mark.parametrize("options", [("--seq-len", 1), ("--seq-len", 257, "--recompute", "block", "--chunk-rows", "attention=128")], ids=str)
def test_products_of_a_single_row(train, tmp_path, options):
    """The gradients of an adapter from one row have one summand each; their layouts differ between layers."""
    make(tmp_path / "model", "--family", "llama", "--layers", 2, "--heads", 4, "--kv-heads", 2, "--channels", 64, "--mlp-width", 96,
         "--vocab", 256, "--positions", 512)
    write_shard(tmp_path / "data.bin", random_tokens(256, 2000))
    run = ("--model", "model", "--train", "lora", "--data", "data.bin", "--batch", 1, "--steps", 2, "--sample", "tokens=0", "--log", "log")
    train(*run, *options, cwd=tmp_path)
    assert all(0 < line["grad_norm"] < 100 for line in read_log(tmp_path / "log") if "grad_norm" in line)
