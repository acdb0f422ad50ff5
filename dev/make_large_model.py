#!/usr/bin/env python3
"""Writes a Hugging Face folder with the shape of a large model and random weights, shard by shard.

It is for measuring what a model costs that does not fit into memory. Its losses mean nothing.

    dev/make_large_model.py --shape llama-2-7b --out data/llama-2-7b
"""

import argparse
import json
import math
import os

import torch
import transformers
from safetensors.torch import save_file

LLAMA = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
SHAPES = {
    "llama-2-7b": transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000, **LLAMA),
    "tinyllama-1.1b": transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
        vocab_size=32000, **LLAMA),
    "bloom-176b": transformers.BloomConfig(hidden_size=14336, n_layer=70, n_head=112, vocab_size=250880),
}
POOL = 1 << 24  # random numbers that all tensors are taken from, each from its own offset


def tensors_of(config):
    """The names and shapes in such a model's files."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    return {name: tuple(w.shape) for name, w in model.state_dict().items() if name not in tied}


def random_tensor(pool, shape, number, layers):
    """Values like those of a new model: gains are one, and matrices are so small that the residual stream
    stays finite."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    n = math.prod(shape)
    start = number * 7919 % (POOL // 2)
    repeats = -(-(start + n) // POOL)
    # The largest is 7 GB.
    return pool.repeat(repeats)[start:start + n].reshape(shape).mul_(1 / math.sqrt(2 * layers))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="as many blocks; else as the model has")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--shard-gb", type=float, default=1.0)
    options = parser.parse_args(arguments)
    config = SHAPES[options.shape]
    if options.layers:
        config.num_hidden_layers = options.layers
    os.makedirs(options.out, exist_ok=True)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(options.out)
    pool = (torch.randn(POOL, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    shards, shard, size = [], {}, 0
    for number, (name, shape) in enumerate(tensors_of(config).items()):
        shard[name] = random_tensor(pool, shape, number, config.num_hidden_layers)
        size += 2 * math.prod(shape)
        if size > options.shard_gb * 1e9:
            shards.append(list(shard))
            save_file(shard, f"{options.out}/part-{len(shards):05d}.safetensors", metadata={"format": "pt"})
            shard, size = {}, 0
    if shard:
        shards.append(list(shard))
        save_file(shard, f"{options.out}/part-{len(shards):05d}.safetensors", metadata={"format": "pt"})
    index = {name: f"part-{i + 1:05d}.safetensors" for i, names in enumerate(shards) for name in names}
    with open(f"{options.out}/model.safetensors.index.json", "w", encoding="utf-8") as f:
        json.dump({"metadata": {}, "weight_map": index}, f, indent=1)


if __name__ == "__main__":
    main()
