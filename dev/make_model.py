#!/usr/bin/env python3
"""Writes a small random GPT-2 as a Hugging Face folder, for tests.

Every tensor matters: biases and layernorm gains are random too, and matrices are scaled by their inputs, so that
activations and gradients are neither tiny nor saturated as they would be under GPT-2's own initialisation.
"""

import argparse
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@torch.no_grad()
def random_model(config, seed):
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:  # Conv1D weights are (inputs, outputs); embeddings end in channels
            inputs = config.n_embd if name.endswith(("wte.weight", "wpe.weight")) else parameter.shape[0]
            parameter.copy_(noise / inputs**0.5)
        elif name.endswith(".bias"):
            parameter.copy_(0.1 * noise)
        else:
            parameter.copy_(1 + 0.2 * noise)
    return model


def save(model, folder, dtype, prefix):
    """With the prefix tensors are named transformer.h.0..., without it h.0... as in GPT-2's published files."""
    os.makedirs(folder, exist_ok=True)
    model = model.to(DTYPES[dtype])
    model.config.save_pretrained(folder)
    tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    if not prefix:
        tensors = {name.removeprefix("transformer."): p for name, p in tensors.items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--positions", type=int, default=64, help="longest sequence")
    parser.add_argument("--vocab", type=int, default=256, help="vocabulary size")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the stored weights")
    parser.add_argument("--prefix", action="store_true", help="name tensors transformer.*")
    options = parser.parse_args(arguments)
    if options.channels % options.heads:
        print(f"make_model.py: --channels {options.channels} is no multiple of --heads {options.heads}",
              file=sys.stderr)
        sys.exit(2)
    config = GPT2Config(n_layer=options.layers, n_head=options.heads, n_embd=options.channels,
                        n_positions=options.positions, vocab_size=options.vocab, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, bos_token_id=options.vocab - 1, eos_token_id=options.vocab - 1)
    save(random_model(config, options.seed), options.out, options.dtype, options.prefix)


if __name__ == "__main__":
    main()
