"""adapter_config.json is read as PEFT does: each field of its configurations is followed, refused by name, or
known to change nothing. Also what an adapter's folder says of the model that it was trained with."""

import dataclasses
import json
import shutil

import peft
import pytest
import torch
import transformers
from adapter_files import GIVEN, OPTIONS, make_adapter, validated, validated_windows, with_adapter
from gguf_files import write_gguf
from model_files import DATA, prepare
from safetensors.torch import load_file
from trainer_runs import command, make, random_tokens, read_log, refused, write_shard

USUALLY = "fp32"  # see conftest.py

# Ways to say which layers have a LoRA, with which rank and scale.
HONOURED = {
    "r": {"r": 3},
    "lora_alpha": {"lora_alpha": 3.5},
    "lora_dropout": {"lora_dropout": 0.3},
    "use_rslora": {"use_rslora": True, "r": 5},
    "target_modules": {"target_modules": r".*layers\.[1-9]\d*\.(?:self_attn\.[qv]_proj|mlp\.up_proj)"},
    "target_modules-all": {"target_modules": "all-linear"},
    "exclude_modules": {"exclude_modules": r"(?P<all>.*)\.0\.self_attn\.q_proj"},
    "exclude_modules-list": {"exclude_modules": ["up_proj", "layers.1.self_attn.q_proj"]},
    "layers_to_transform": {"layers_to_transform": 1},
    "layers_pattern": {"layers_to_transform": [0, 7], "layers_pattern": ["h", "layers"]},
    "rank_pattern": {"rank_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 6}},
    "alpha_pattern": {"alpha_pattern": {r"self_attn.[qv]_proj": 11}},
    "init_lora_weights": {"init_lora_weights": "gaussian"},
    "bias": {"bias": "none"},
}

# Refused values of each field: values that PEFT refuses, or that make it build another model.
REFUSED = [
    {"r": -1}, {"r": 0}, {"r": 3}, {"r": 1000000000}, {"r": 4.5}, {"rank_pattern": {"q_proj": 3}},
    {"rank_pattern": {"q_proj": 0}}, {"rank_pattern": 5},
    {"alpha_pattern": {"q_proj": "x"}}, {"alpha_pattern": {"(*ACCEPT)": 3}}, {"alpha_pattern": {r"\Qq_proj": 3}},
    {"target_modules": []}, {"target_modules": ["nosuch"]}, {"target_modules": "q_proj"}, {"target_modules": None},
    {"target_modules": 7}, {"target_modules": ["q_proj"]}, {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]},
    {"target_modules": ["q_proj", "v_proj", "up_proj", "input_layernorm"]},
    {"target_modules": ["q_proj", "v_proj", "up_proj", "lm_head"]}, {"target_modules": ".*("},
    {"exclude_modules": ["q_proj"]}, {"exclude_modules": ".*v_proj"}, {"exclude_modules": [1]},
    {"layers_to_transform": [0]}, {"layers_to_transform": "0"}, {"layers_pattern": "layers"},
    {"layers_to_transform": [0, 1], "layers_pattern": "h"}, {"layers_to_transform": [1], "target_modules": ".*q_proj"},
    {"init_lora_weights": "mica"}, {"bias": "lora_only"}, {"task_type": "SEQ_CLS"}, {"use_rslora": 1},
    {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [1]}, {"use_dora": True}, {"use_qalora": True},
    {"layer_replication": [[0, 2]]}, {"lora_bias": True}, {"target_parameters": ["q_proj.weight"]},
    {"alora_invocation_tokens": [1]}, {"megatron_config": {"hidden_size": 4}}, {"velora_config": {"rank": 1}},
    {"monteclora_config": {"rank": 1}}, {"use_bdlora": {"nblocks": 2}}, {"arrow_config": {"top_k": 1}},
    {"kasa_config": {"beta": 1}}, {"lora_dropout": 1.5},
]

# Settings that do not change what a loaded adapter computes.
IDLE = {"fan_in_fan_out": True, "megatron_core": "none", "loftq_config": {"loftq_bits": 2}, "eva_config": {"rho": 3},
        "corda_config": {"cov_chunk": 2}, "lora_ga_config": {"direction": "ArB2r"}, "qalora_group_size": 3,
        "runtime_config": {"ephemeral_gpu_offload": True}, "ensure_weight_tying": True, "auto_mapping": {"x": "y"},
        "peft_version": "0.1", "revision": "main", "inference_mode": False, "base_model_name_or_path": "elsewhere",
        "task_type": None, "peft_type": "LORA"}

REFUSED_PROMPT = [{"num_virtual_tokens": 4}, {"num_virtual_tokens": 0}, {"token_dim": 8}, {"num_transformer_submodules": 2},
                  {"modules_to_save": ["lm_head"]}, {"prompt_tuning_init": "NOISE"}, {"task_type": None}]
IDLE_PROMPT = {"num_attention_heads": 3, "num_layers": 9, "prompt_tuning_init": "RANDOM", "prompt_tuning_init_text": "x",
               "tokenizer_name_or_path": "x", "tokenizer_kwargs": {"a": 1}, "auto_mapping": {"x": "y"}, "peft_version": "0.1",
               "revision": "x", "inference_mode": False, "base_model_name_or_path": "x", "peft_type": "PROMPT_TUNING"}


def test_every_field_of_peft_is_known():
    """A field that a newer PEFT adds must be handled here and in llmc/adapter_files.cpp."""
    def fields(config):
        return {field.name for field in dataclasses.fields(config)}

    honoured = {key for change in HONOURED.values() for key in change}
    assert fields(peft.LoraConfig) == honoured | {key for change in REFUSED for key in change} | set(IDLE)
    assert fields(peft.PromptTuningConfig) == {key for change in REFUSED_PROMPT for key in change} | set(IDLE_PROMPT)


@pytest.fixture(scope="module", name="folder")
def fixture_folder(tmp_path_factory):
    work = prepare(tmp_path_factory.mktemp("llama-tied"), "llama-tied", OPTIONS)
    make_adapter(work, peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
    (work / "adapter").rename(work / "prompt")
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules=["q_proj", "v_proj", "up_proj"],
                                       task_type="CAUSAL_LM"))
    return work


@pytest.fixture
def work(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def change(work, settings, adapter="adapter"):
    """Writes settings into adapter_config.json, in their order."""
    path = work / adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def loss_of_peft(work, adapter="adapter"):
    windows, model = validated_windows(work), with_adapter(work / "model", work / adapter)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(windows[:, :-1]).logits[:, -37:].flatten(0, 1),
                                                 windows[:, 1:].flatten()).item()


@pytest.mark.parametrize("name", HONOURED)
def test_what_peft_honours(train_fp32, work, name):
    shutil.rmtree(work / "adapter")
    settings = {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "up_proj"]} | HONOURED[name]
    make_adapter(work, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    if "layers_pattern" in settings:  # the file has the name of the list of blocks
        assert json.loads((work / "adapter" / "adapter_config.json").read_text())["layers_pattern"] == ["h", "layers"]
    got = validated(train_fp32, work, "--model", "model", "--adapter", "adapter")
    assert got == pytest.approx(loss_of_peft(work), rel=0, abs=1e-5)


def test_what_is_refused(train_fp32, work):
    good = (work / "adapter" / "adapter_config.json").read_text()
    for settings in REFUSED:
        change(work, settings)
        refused(train_fp32, work, GIVEN | {"--adapter": "adapter"}, "adapter/adapter_config.json", next(iter(settings)))
        (work / "adapter" / "adapter_config.json").write_text(good)
    good = (work / "prompt" / "adapter_config.json").read_text()
    for settings in REFUSED_PROMPT:
        change(work, settings, "prompt")
        named = ("'" + next(iter(settings)) + "'",) if settings != {"num_virtual_tokens": 4} else ("prompt_embeddings", "shape")
        refused(train_fp32, work, GIVEN | {"--adapter": "prompt"}, "prompt/adapter_", *named)
        (work / "prompt" / "adapter_config.json").write_text(good)


def test_what_changes_nothing(train_fp32, work):
    for adapter, idle in (("adapter", IDLE), ("prompt", IDLE_PROMPT)):
        plain = validated(train_fp32, work, "--model", "model", "--adapter", adapter)
        assert plain == pytest.approx(loss_of_peft(work, adapter), rel=0, abs=1e-5)
        change(work, idle, adapter)
        assert validated(train_fp32, work, "--model", "model", "--adapter", adapter) == plain
    change(work, {"of_a_newer_peft": 3})
    result = train_fp32("--model", "model", "--adapter", "adapter", "--val-data", "data.bin", *DATA[4:], "--steps", 0, cwd=work)
    assert b"'of_a_newer_peft' is not known" in result.stderr


def test_the_first_pattern_that_matches_counts(train_fp32, work):
    """In the file's order, which a save keeps."""
    losses = []
    for keys in (("q_proj", "layers.0.self_attn.q_proj"), ("layers.0.self_attn.q_proj", "q_proj"), (".*v_proj", "a", "v_proj")):
        pattern = {key: value for key, value in zip(keys, (64, 2, 3))}
        change(work, {"alpha_pattern": pattern})
        losses.append(validated(train_fp32, work, "--model", "model", "--adapter", "adapter"))
        assert losses[-1] == pytest.approx(loss_of_peft(work), rel=0, abs=1e-5)
        train_fp32(*DATA, "--adapter", "adapter", "--steps", 1, "--lr", 0, "--sample", "tokens=0", "--out", "out", cwd=work)
        saved = json.loads((work / "out" / "adapter_config.json").read_text())
        assert list(saved["alpha_pattern"].items()) == list(pattern.items())
        assert list(saved) == list(json.loads((work / "adapter" / "adapter_config.json").read_text()))
        shutil.rmtree(work / "out")
    assert abs(losses[0] - losses[1]) > 1e-3


# ---- the model that an adapter was trained with


def trained_beside(train, work, *base, kind="lora"):
    """Makes a folder of saves of an adapter that was trained with a base in these formats; returns its record
    of the base."""
    options = ("--train", kind) if kind == "prompt" else ("--train", "lora", "--lora-rank", 2)
    train(*DATA, *options, *base, "--steps", 2, "--sample", "tokens=0", "--out", "out", cwd=work)
    return json.loads((work / "out" / "adapter_base.json").read_text())


VALIDATION = {"--model": "model", "--data": "data.bin", "--adapter": "out", "--val-data": "data.bin", "--batch": "2", "--seq-len": "16", "--steps": "0",
              "--out": None, "--log": None}

BASES = [
    (("--base", "nf4"), {"linear_layers": {"all": "nf4"}}),
    (("--base", "nf4-double,head=8bit"), {"linear_layers": {"all": "nf4-double"}, "head": "8bit"}),
    (("--base", "mlp=nf4,layers.0.self_attn.q_proj=8bit"),
     {"linear_layers": {"model.layers.0.self_attn.q_proj": "8bit", "mlp.gate_proj": "nf4", "mlp.up_proj": "nf4",
                        "mlp.down_proj": "nf4"}}),
    (("--base", "head=nf4"), {"linear_layers": {}, "head": "nf4-double"}),
]


@pytest.fixture(name="wide")
def fixture_wide(tmp_path):
    """A model whose rows are whole blocks of 8bit."""
    make(tmp_path / "model", "--family", "llama", "--layers", 2, "--heads", 4, "--channels", 64, "--mlp-width", 96, "--vocab", 283,
         "--positions", 64)
    write_shard(tmp_path / "data.bin", random_tokens(283, 3000))
    return tmp_path


@pytest.mark.parametrize("base, record", BASES, ids=str)
def test_the_base_is_recorded(train_fp32, wide, base, record):
    """PEFT opens the folder. Without the options, or with another base, one line says what to give."""
    def loss(*options):
        train_fp32("--val-data", "data.bin", *DATA[4:], "--steps", 0, "--log", "log", *options, cwd=wide)
        return read_log(wide / "log")[-1]["val_loss"]

    assert trained_beside(train_fp32, wide, *base) == record
    peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(wide / "model"), wide / "out")
    line = refused(train_fp32, wide, VALIDATION, "--adapter out", "--base none")
    for option in base[::2]:
        assert f"{option} " in line
    adapted = ("--model", "model", "--adapter", "out")
    wanted = loss(*adapted, *base)
    assert abs(loss(*adapted, "--base", "none") - wanted) > 1e-6
    assert loss("--model", "out") == wanted  # uses the base that the adapter names, quantized as it was
    assert loss("--resume", "out") == wanted
    train_fp32("--resume", "out", "--steps", 3, cwd=wide)
    assert json.loads((wide / "out" / "adapter_base.json").read_text()) == record
    other = train_fp32(*adapted, "--base", "nf4-double", "--val-data", "data.bin", *DATA[4:], "--steps", 0, cwd=wide)
    assert b"was trained beside" in other.stderr and b"all=nf4-double" in other.stderr


def test_a_base_that_is_not_quantized(train_fp32, work):
    """An adapter of such a base is not used by mistake with files in NF4, or with a GGUF."""
    assert trained_beside(train_fp32, work, kind="prompt") == {"linear_layers": {}}
    train_fp32("--model", "model", "--base", "nf4", "--train", "lora", "--lora-rank", 2, "--save-base", "nf4", *DATA[2:], "--steps", 1, cwd=work)
    refused(train_fp32, work, VALIDATION | {"--model": "nf4"}, "--adapter out", "not quantized", "--base none")
    train_fp32(*command(VALIDATION | {"--model": "nf4", "--base": "none"}), cwd=work)
    (work / "out" / "adapter_base.json").write_text('{"linear_layers": []}')
    refused(train_fp32, work, VALIDATION, "adapter_base.json", "linear_layers")


def test_a_saved_base_is_the_same(train_fp32, work):
    """Whether it is quantized now or was quantized when it was saved."""
    train_fp32(*DATA, "--train", "lora", "--lora-rank", 2, "--base", "nf4", "--save-base", "nf4", "--steps", 2, "--sample", "tokens=0",
               "--out", "out", cwd=work)
    assert json.loads((work / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(work / "nf4")
    losses = [validated(train_fp32, work, *options) for options in (
        ("--model", "out"), ("--model", "nf4", "--adapter", "out"), ("--model", "model", "--base", "nf4", "--adapter", "out"))]
    assert losses[0] == losses[1] == losses[2]


def test_an_adapter_on_another_model(train_fp32, work):
    """Is used, and said; not if the model is the one that it was trained on, whichever of its names is given."""
    train_fp32(*DATA, "--steps", 1, "--sample", "tokens=0", "--out", "saves", cwd=work)
    for name, model in (("first", "model"), ("second", "saves")):
        train_fp32("--model", model, *DATA[2:], "--train", "lora", "--lora-rank", 2, "--steps", 1, "--sample", "tokens=0", "--out", name,
                   cwd=work)
    for adapter, model, differs in (("first", "model", False), ("first", "saves", True), ("second", "saves", False),
                                    ("second", "saves/latest", False), ("second", "model", True)):
        said = train_fp32("--model", model, "--adapter", adapter, *DATA[2:], "--steps", 0, "--val-data", DATA[3], cwd=work).stderr.decode()
        assert (f"--adapter {adapter} was trained on {work}/" in said and f"this run uses it on {model}\n" in said) == differs, said


def test_a_base_in_a_gguf(train_fp32, wide):
    model = transformers.AutoModelForCausalLM.from_pretrained(wide / "model", dtype=torch.float32)
    write_gguf(wide / "m.gguf", model, "llama")
    train_fp32("--model", "m.gguf", "--train", "lora", *DATA[2:], "--steps", 2, "--sample", "tokens=0", "--out", "out", cwd=wide)
    record = json.loads((wide / "out" / "adapter_base.json").read_text())
    assert "8bit" in record["linear_layers"].values()
    refused(train_fp32, wide, VALIDATION, "--adapter out", "--base none")
    assert validated(train_fp32, wide, "--model", "out") == validated(train_fp32, wide, "--model", "m.gguf", "--adapter", "out")


def test_an_adapter_as_the_model(train_fp32, work):
    """Its base is found by the name in the adapter, relative to the current folder or to the adapter, and is
    used."""
    wanted = validated(train_fp32, work, "--model", "model", "--adapter", "adapter")
    for name in (str(work / "model"), "model", "../model"):
        change(work, {"base_model_name_or_path": name})
        assert validated(train_fp32, work, "--model", "adapter") == wanted
    sampled = [train_fp32("--model", *options, "--steps", 0, "--prompt", "a", "--sample", "tokens=9", cwd=work, code=2).stderr
               for options in (("adapter",), ("model", "--adapter", "adapter"))]
    assert sampled[0] == sampled[1] and b"tokenizer" in sampled[0]
    train_fp32("--model", "adapter", *DATA[2:], "--steps", 2, "--save-every", 1, "--keep", 0, "--sample", "tokens=0", "--out", "out",
               cwd=work)
    whole = load_file(work / "out" / "adapter_model.safetensors")
    shutil.rmtree(work / "out" / "step-00000002")
    train_fp32("--resume", "out/step-00000001", cwd=work)
    again = load_file(work / "out" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert train_fp32.plan("--model", work / "adapter", "--steps", 1)["trained"] == sum(map(torch.numel, whole.values()))
    for name in ("org/model-7b", ""):
        change(work, {"base_model_name_or_path": name})
        refused(train_fp32, work, GIVEN | {"--model": "adapter"}, "--model adapter", f"'{name}'", "--adapter")
    refused(train_fp32, work, GIVEN | {"--model": "adapter", "--adapter": "out"}, "--model adapter", "--adapter out")
