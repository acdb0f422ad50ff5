"""Shared by tests: small random models of every family, with data, and runs of them."""

import json

import torch
from trainer_runs import figures, make, random_tokens, read_log, saved_bytes, write_shard


def starting_at_0(folder, path):
    """The same model without a token that ends a text, and with 0 as the token that begins one."""
    path.mkdir()
    for file in folder.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            (path / file.name).symlink_to(file.resolve())
    config = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": None}))
    return path


LLAMA3 = json.dumps({"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 16})
LINEAR = json.dumps({"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0})
YARN = json.dumps({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16})
# 18 of 24 channels are rotated.
PARTIAL = json.dumps({"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75})
LONGROPE = json.dumps({"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                       "short_factor": [1 + 0.02 * i for i in range(9)], "long_factor": [1 + 0.4 * i for i in range(9)]})
TRAINED_ON_60 = json.dumps({"original_max_position_embeddings": 60})
MINISTRAL3 = json.dumps(json.loads(YARN) | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
                                            "original_max_position_embeddings": 8})
SMOLLM3 = json.dumps({"no_rope_layers": [1, 0]})
OLMO3_ROPE = json.dumps({"full_attention": json.loads(YARN), "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}})
GRANITE = json.dumps({"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 1.7})
GEMMA2 = json.dumps({"query_pre_attn_scalar": 13, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0})
GEMMA3 = json.dumps({"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 13})
GEMMA3_ROPE = json.dumps({"full_attention": json.loads(LINEAR), "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}})
# Odd shapes: grouped heads, numbers of heads that are not powers of two, head sizes other than channels /
# heads, tied and not tied, windows, scalings, files in shards.
MODELS = {
    "llama": ("--heads", 6, "--kv-heads", 2, "--channels", 60, "--mlp-width", 92),
    "llama-tied": ("--heads", 4, "--kv-heads", 1, "--channels", 40, "--tied", "--rope", LLAMA3, "--shard-size", "40KB"),
    "llama-linear": ("--heads", 3, "--channels", 48, "--head-size", 20, "--rope", LINEAR),
    "mistral": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--window", 7),
    "qwen2": ("--heads", 6, "--kv-heads", 3, "--channels", 48, "--tied"),
    "qwen2-window": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--window", 5),
    "qwen3": ("--heads", 4, "--kv-heads", 2, "--channels", 56, "--head-size", 18),
    "smollm3": ("--heads", 4, "--kv-heads", 2, "--channels", 56, "--tied", "--config", SMOLLM3),
    "phi3": ("--heads", 4, "--kv-heads", 2, "--channels", 96, "--window", 9, "--rope", PARTIAL),
    "ministral3": ("--heads", 6, "--kv-heads", 2, "--channels", 48, "--head-size", 12, "--rope", MINISTRAL3),
    "granite": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--tied", "--config", GRANITE),
    "gemma": ("--heads", 4, "--kv-heads", 1, "--channels", 56, "--head-size", 18, "--tied"),
    "gemma2": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--head-size", 18, "--tied", "--window", 9, "--config", GEMMA2),
    "gemma3_text": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--head-size", 20, "--tied", "--window", 7,
                    "--rope", GEMMA3_ROPE, "--config", GEMMA3),
    "olmo2": ("--heads", 6, "--kv-heads", 2, "--channels", 48),
    "olmo3": ("--heads", 4, "--channels", 48, "--window", 9, "--rope", OLMO3_ROPE, "--config", '{"layer_types": ["sliding_attention", "full_attention"]}'),
    "bloom": ("--heads", 6, "--channels", 48),
    "bloom-prefix": ("--heads", 8, "--channels", 64, "--prefix"),
}
# Further combinations of tied, shards and others, only for the tests of files, logits and generation.
MORE_MODELS = {
    "mistral-tied": ("--heads", 3, "--channels", 60, "--window", 6, "--tied", "--shard-size", "60KB"),
    "mistral-yarn": ("--heads", 4, "--kv-heads", 2, "--channels", 72, "--window", 40, "--rope", YARN),
    "qwen2-shards": ("--heads", 5, "--kv-heads", 1, "--channels", 40, "--shard-size", "30KB"),
    "qwen3-tied": ("--heads", 6, "--kv-heads", 3, "--channels", 48, "--head-size", 14, "--tied", "--shard-size", "30KB"),
    "llama-biases": ("--heads", 3, "--channels", 36, "--config", '{"attention_bias": true}'),
    "qwen3-biases": ("--heads", 4, "--kv-heads", 1, "--channels", 32, "--config", '{"attention_bias": true}'),
    "qwen2-mixed": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--window", 5, "--config", '{"max_window_layers": 1}'),
    "phi3-longrope": ("--heads", 4, "--channels", 96, "--tied", "--rope", LONGROPE, "--config", TRAINED_ON_60),
    "bloom-shards": ("--heads", 11, "--channels", 88, "--shard-size", "99KB"),
}
VOCAB = 301
DATA = ("--model", "model", "--data", "data.bin", "--batch", 3, "--seq-len", 37)
# Tensors that are joined in a row of the trainer's tables.
FUSED = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
         "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}


def prepare(path, name, models=MODELS | MORE_MODELS):
    """A random model, with weights that both precisions can store, and data. No test writes here."""
    options = models[name]
    make(path / "model", "--family", name.split("-")[0], "--layers", 2, "--vocab", VOCAB, "--positions", 64,
         "--dtype", "bf16", *options)
    assert len(list((path / "model").glob("*.safetensors"))) > 1 or "--shard-size" not in options
    write_shard(path / "data.bin", random_tokens(VOCAB, 3000))
    return path


def linked(path, folder, *more):
    for name in ("model", "data.bin", *more):
        (path / name).symlink_to(folder / name)
    return path


def fused(name, tensors):
    """The tensor of a row, by its name in a training state, from the tensors of a model's files."""
    for prefix in ("", "model.", "transformer."):
        for row, parts in FUSED.items():
            if row in name and prefix + name.replace(row, parts[0]) in tensors:
                return torch.cat([tensors[prefix + name.replace(row, part)] for part in parts])
        if prefix + name in tensors:
            return tensors[prefix + name]
    raise KeyError(name)


def trained(train, work, name, *options):
    train(*DATA, "--steps", 4, "--out", name, "--log", f"{name}.log", "--sample", "tokens=0", *options, cwd=work)
    return figures(read_log(work / f"{name}.log")), saved_bytes(work / name)
