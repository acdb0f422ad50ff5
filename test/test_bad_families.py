"""Models of other families that cannot be trained: one line names what is wrong, and nothing is written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_runs import make, refused, write_text

USUALLY = "fp32"  # see conftest.py

LAYER = "model.layers.1."
LLAMA = ("--family", "llama", "--layers", 2, "--heads", 4, "--kv-heads", 2, "--channels", 32, "--positions", 64)
PREPARED = {"llama": (*LLAMA, "--shard-size", "30KB"), "mistral": ("--family", "mistral", *LLAMA[2:], "--window", 8),
            "tied": (*LLAMA, "--tied"), "bloom": ("--family", "bloom", "--heads", 4, "--channels", 32)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared")
    for name, options in PREPARED.items():
        make(path / name, *options)
    write_text(path / "text")
    return path


@pytest.fixture
def families(prepared, tmp_path):
    """Folders to damage; that of llama has shards."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_the_families_are_good(train, families):
    for name in PREPARED:
        error = train("--model", name, "--steps", 0, "--prompt", "x", "--sample", "tokens=1", cwd=families).stderr
        assert error == b""


SETTINGS = [
    ("llama", {"model_type": "mixtral"}, ["'model_type' is \"mixtral\"", "mistral"]),
    ("llama", {"model_type": "qwen2_moe"}, ["qwen2_moe"]),
    ("llama", {"model_type": ["llama"]}, ["'model_type' is [\"llama\"]"]),
    ("llama", {"num_local_experts": 8}, ["'num_local_experts' is 8"]),
    ("llama", {"num_attention_heads": 3, "head_dim": None}, ["hidden_size 32", "num_attention_heads 3"]),
    ("llama", {"num_key_value_heads": 3}, ["4 heads", "3 key/value heads"]),
    ("llama", {"num_hidden_layers": 2**40}, ["'num_hidden_layers' is 1099511627776"]),
    ("llama", {"num_hidden_layers": -2}, ["'num_hidden_layers' is -2"]),
    ("llama", {"hidden_size": 32.5}, ["'hidden_size' is 32.5"]),
    ("llama", {"intermediate_size": "96"}, ["'intermediate_size' is \"96\""]),
    ("llama", {"rms_norm_eps": -1e-5}, ["'rms_norm_eps' is -1e-05"]),
    ("llama", {"vocab_size": [256]}, ["'vocab_size' is [256]"]),
    ("mistral", {"attention_bias": True}, ["'attention_bias' is true"]),
    ("llama", {"mlp_bias": True}, ["'mlp_bias' is true"]),
    ("llama", {"hidden_act": "gelu"}, ["'hidden_act' is \"gelu\""]),
    ("llama", {"rope_parameters": {"rope_type": "proportional", "factor": 4.0}}, ["\"proportional\"", "linear"]),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, ["'short_factor' is missing"]),
    ("llama", {"rope_scaling": {"type": "yarn"}}, ["'factor' is missing"]),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}}, ["'beta_fast' 1"]),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": "1"}}, ["'mscale' is \"1\""]),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": -1}}, ["'attention_factor' is -1"]),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}}, ["'truncate' is 1"]),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 0}}, ["'factor' is 0"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, ["'factor' is 0"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": -2}}, ["'factor' is -2"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": float("nan")}}, ["broken JSON"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, ["'factor' is \"2\""]),
    ("llama", {"rope_parameters": {"rope_theta": 0}}, ["'rope_theta' is 0"]),
    ("llama", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
     ["quantization_config", "fp4"]),
    ("tied", {"tie_word_embeddings": False}, ["lm_head.weight", "missing"]),
    ("mistral", {"sliding_window": 0}, ["'sliding_window' is 0"]),
    ("mistral", {"sliding_window": -4096}, ["'sliding_window' is -4096"]),
    ("mistral", {"sliding_window": 2.5}, ["'sliding_window' is 2.5"]),
    ("mistral", {"sliding_window": "all"}, ["'sliding_window' is \"all\""]),
    ("bloom", {"n_head": 3}, ["hidden_size 32", "n_head 3"]),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, ["apply_residual_connection_post_layernorm"]),
    ("bloom", {"tie_word_embeddings": False}, ["'tie_word_embeddings' is false"]),
]


@pytest.mark.parametrize("model, change, named", SETTINGS, ids=str)
def test_settings_of_families(train_fp32, families, model, change, named):
    path = families / model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(train_fp32, families, {"--model": model}, f"{model}", *named)


def test_an_adapter_is_no_model(train_fp32, families):
    """With and without the model's own config.json beside it."""
    (families / "tied" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for name in ("config.json", "model.safetensors"):
        refused(train_fp32, families, {"--model": "tied"}, "--model tied", "is an adapter", "--adapter")
        (families / "tied" / name).unlink()


INDEX = "model.safetensors.index.json"


def with_index(change):
    def damage(folder):
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def with_shard(change):
    """Damages the shard that has the second layer's q_proj."""

    def damage(folder):
        name = json.loads((folder / INDEX).read_text())["weight_map"][LAYER + "self_attn.q_proj.weight"]
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return damage


Q_PROJ = LAYER + "self_attn.q_proj.weight"
NORM = "model.norm.weight"


def another_shard(names):
    names[Q_PROJ] = next(file for file in names.values() if file != names[Q_PROJ])


@pytest.mark.parametrize("damage, named", [
    (with_index(another_shard), [Q_PROJ, "missing", INDEX]),
    (with_index(lambda names: names.update({Q_PROJ: "model-00009-of-00009.safetensors"})), ["model-00009", "No such"]),
    (with_index(lambda names: names.update({Q_PROJ: "../tied/model.safetensors"})), [Q_PROJ, "not the name of a file"]),
    (with_index(lambda names: names.update({Q_PROJ: "/etc/passwd"})), [Q_PROJ, "not the name of a file"]),
    (with_index(lambda names: names.update({Q_PROJ: ".."})), ["llama/..", "directory"]),
    (with_index(lambda names: names.update({Q_PROJ: ""})), ["llama/", "directory"]),
    (with_index(lambda names: names.update({Q_PROJ: "config.json"})), ["config.json"]),
    (with_index(lambda names: names.update({Q_PROJ: None})), [Q_PROJ, "not the name of a file"]),
    (with_index(lambda names: names.update({"model.layers.2.mlp.up_proj.weight": names[Q_PROJ]})),
     ["model.layers.2.mlp.up_proj.weight", "missing"]),
    (with_index(lambda names: names.pop(Q_PROJ)), [Q_PROJ, "missing"]),
    (lambda folder: (folder / INDEX).unlink(), ["neither model.safetensors nor", INDEX]),
    (lambda folder: (folder / INDEX).write_text('{"metadata": {}}'), [INDEX, "weight_map"]),
    (lambda folder: (folder / INDEX).write_text('{"weight_map": []}'), [INDEX, "weight_map"]),
    (with_shard(lambda tensors: tensors.pop(Q_PROJ)), [Q_PROJ, "missing"]),
    (with_shard(lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 16)})), [Q_PROJ, "[32, 16]", "[32, 32]"]),
    (with_shard(lambda tensors: tensors.update({Q_PROJ: torch.zeros(1024)})), [Q_PROJ, "[1024]", "[32, 32]"]),
    (with_shard(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].double()})), [Q_PROJ, "F64"]),
    (with_shard(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.uint8)})), [Q_PROJ, "U8"]),
], ids=["another shard", "no such shard", "outside", "absolute", "parent", "empty name", "no shard", "null",
        "one too many", "one too few", "no index", "no map", "list", "not in its shard", "shape", "rank", "F64", "U8"])
def test_shards_of_weights(train_fp32, families, damage, named):
    assert len(list((families / "llama").glob("*.safetensors"))) > 2
    damage(families / "llama")
    refused(train_fp32, families, {"--model": "llama"}, "llama", *named)


def generated(train, folder):
    """Generates, and returns the text with the messages on stderr."""
    ran = train("--model", folder, "--steps", 0, "--prompt", "To be", "--sample", "tokens=9,temperature=0")
    return ran.stdout, ran.stderr.decode()


def test_tensors_of_no_use(train_fp32, families):
    """They are ignored, as in transformers, and reported unless they are known to be harmless."""
    path = families / "tied" / "model.safetensors"
    tensors = load_file(path)
    before = generated(train_fp32, families / "tied")
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | harmless, path)
    assert generated(train_fp32, families / "tied") == before
    save_file(tensors | harmless | {"model.layers.2.mlp.up_proj.weight": torch.ones(3), "score.weight": torch.ones(2)},
              path)
    text, notes = generated(train_fp32, families / "tied")
    assert text == before[0] and notes.count("\n") == 1
    assert "tied: \"model.layers.2.mlp.up_proj.weight\" and 1 more tensors" in notes and "left out" in notes


def test_a_tied_head(train_fp32, families):
    """It may be in the files under either of its names or both, and is one matrix."""
    path = families / "tied" / "model.safetensors"
    tensors, before = load_file(path), generated(train_fp32, families / "tied")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": embedding}, path)
    assert generated(train_fp32, families / "tied") == before
    other = embedding.clone()
    other[255, 31] += 1
    save_file(tensors | {"lm_head.weight": other, "model.embed_tokens.weight": embedding}, path)
    refused(train_fp32, families, {"--model": "tied"}, "tied: lm_head.weight is not model.embed_tokens.weight",
            "tie_word_embeddings")
    save_file(tensors | {"lm_head.weight": other[:200].clone(), "model.embed_tokens.weight": embedding}, path)
    refused(train_fp32, families, {"--model": "tied"}, "lm_head.weight", "[200, 32]", "[256, 32]")
    save_file(tensors, path)
    refused(train_fp32, families, {"--model": "tied"}, "model.embed_tokens.weight", "missing")
