#!/usr/bin/env python3
"""Times training steps of GPT-2 in PyTorch on random tokens, as ./train --bench does; prints one JSON object.

Written for speed: scaled_dot_product_attention, a vocabulary padded to 50304. dev/bench/compare_speed.py runs it to
compare it with ./train.
"""

import argparse

import torch
import torch.nn.functional as F
import torch_steps
from torch import nn

VOCABULARY, PADDED_VOCABULARY, POSITIONS = 50257, 50304, 1024


def sizes(model):
    """(layers, heads, channels) of dN, as in ./train."""
    layers = int(model[1:]) if model[:1] == "d" and model[1:].isdigit() else 0
    if 1 <= layers <= 12:
        return layers, layers, 64 * layers
    known = {24: (16, 1024), 36: (20, 1280), 48: (25, 1600)}
    if layers not in known:
        raise argparse.ArgumentTypeError(f"{model}: known are d1 to d12, d24, d36 and d48")
    return layers, *known[layers]


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.attention_out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for part in self.qkv(self.ln_1(x)).split(C, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, heads, channels, positions):
        super().__init__()
        self.wte = nn.Embedding(PADDED_VOCABULARY, channels)
        self.wpe = nn.Embedding(positions, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=sizes, default="d12", help="d1 to d12, d24, d36, d48")
    torch_steps.add_options(parser)
    options = parser.parse_args(arguments)
    positions = max(POSITIONS, options.seq_len)
    torch_steps.main(options, lambda: (GPT2(*options.model, positions), VOCABULARY))


if __name__ == "__main__":
    main()
