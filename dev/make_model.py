#!/usr/bin/env python3
"""Writes a small random model of any family as a Hugging Face folder, for tests.

Every tensor matters: biases and layernorm gains are random too, and matrices are scaled by their number of
inputs. So activations and gradients are neither tiny nor saturated, as they would be with the families' own
initial values.
"""

import argparse
import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, GPT2Config

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROTARY = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "ministral3", "granite", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3")
FAMILIES = ("gpt2", *ROTARY, "bloom")


def config_of(options):
    ends = {"bos_token_id": options.vocab - 1, "eos_token_id": options.vocab - 1, "vocab_size": options.vocab}
    if options.family == "gpt2":
        return GPT2Config(n_layer=options.layers, n_head=options.heads, n_embd=options.channels,
                          n_positions=options.positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ends)
    if options.family == "bloom":
        return BloomConfig(n_layer=options.layers, n_head=options.heads, hidden_size=options.channels, **ends)
    window = {"sliding_window": options.window or None} if options.family in ("mistral", "phi3", "ministral3", "gemma2", "gemma3_text", "olmo3") else {}
    if options.window and options.family in ("qwen2", "qwen3"):
        window = {"use_sliding_window": True, "sliding_window": options.window, "max_window_layers": 0}
    head_size = options.head_size or options.channels // options.heads
    return AutoConfig.for_model(
        options.family, num_hidden_layers=options.layers, num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads or options.heads, hidden_size=options.channels, head_dim=head_size,
        intermediate_size=options.mlp_width or 3 * options.channels, max_position_embeddings=options.positions,
        tie_word_embeddings=options.tied, rope_parameters=json.loads(options.rope), rms_norm_eps=1e-5,
        **(window | {"pad_token_id": None} | ends | json.loads(options.config)))


@torch.no_grad()
def random_model(config, seed):
    model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:  # (outputs, inputs), except in GPT-2's Conv1D; embeddings end in channels
            embeds = name.endswith(("wte.weight", "wpe.weight"))
            inputs = parameter.shape[0 if config.model_type == "gpt2" and not embeds else 1]
            parameter.copy_(noise / inputs**0.5)
        elif name.endswith(".bias"):
            parameter.copy_(0.1 * noise)
        else:  # gains are 1 at first, or 0 where norms add 1
            parameter.add_(0.2 * noise)
    return model


def save(model, folder, dtype, prefix, shard_size):
    """With `prefix`, tensors are named transformer.h.0..., without it h.0... as in GPT-2's published
    files."""
    os.makedirs(folder, exist_ok=True)
    model = model.to(DTYPES[dtype])
    if shard_size or model.config.model_type not in ("gpt2", "bloom"):
        model.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
        return
    model.config.save_pretrained(folder)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    if not prefix:
        tensors = {name.removeprefix("transformer."): p for name, p in tensors.items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--family", choices=FAMILIES, default="gpt2")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=0, help="of keys and values; 0: as many as heads")
    parser.add_argument("--head-size", type=int, default=0, help="0: channels / heads")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--mlp-width", type=int, default=0, help="0: three times the channels")
    parser.add_argument("--window", type=int, default=0, help="keys that a query sees; 0: all")
    parser.add_argument("--rope", default='{"rope_type": "default", "rope_theta": 10000.0}', help="rope_parameters")
    parser.add_argument("--config", default="{}", help="further keys of config.json, or others for these, as JSON")
    parser.add_argument("--tied", action="store_true", help="tie the head to the token embedding")
    parser.add_argument("--positions", type=int, default=64, help="longest sequence")
    parser.add_argument("--vocab", type=int, default=256, help="vocabulary size")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the stored weights")
    parser.add_argument("--prefix", action="store_true", help="name tensors transformer.*")
    parser.add_argument("--shard-size", default="", help="split the weights into files of at most this, as in 100KB")
    options = parser.parse_args(arguments)
    if options.channels % options.heads and not options.head_size:
        print(f"make_model.py: --channels {options.channels} is no multiple of --heads {options.heads}",
              file=sys.stderr)
        sys.exit(2)
    model = random_model(config_of(options), options.seed)
    save(model, options.out, options.dtype, options.prefix, options.shard_size)



if __name__ == "__main__":
    main()
