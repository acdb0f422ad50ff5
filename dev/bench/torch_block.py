#!/usr/bin/env python3
"""Times forward and backward of one Llama-like block in PyTorch, in fp32 on the CPU, and measures its memory.
Prints one JSON object. dev/bench/block.py runs it.

--kind dense computes all scores; flash calls scaled_dot_product_attention; blockwise is the Blockwise
Parallel Transformer (Liu and Abbeel, arXiv:2305.19370): for each chunk of queries, attention goes over chunks
of keys with a running softmax, the feed-forward part follows at once, and backward recomputes the chunk.
"""

import argparse
import ctypes
import json
import math
import pathlib
import re
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """RMSNorm, causal attention, RMSNorm, SwiGLU. Rotary positions are left out: they cost the same in all
    kinds."""

    def __init__(self, kind, channels, heads, width, chunk):
        super().__init__()
        self.kind, self.heads, self.chunk = kind, heads, chunk
        self.norm_1, self.norm_2 = nn.RMSNorm(channels), nn.RMSNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.projection = nn.Linear(channels, channels, bias=False)
        self.gate_up = nn.Linear(channels, 2 * width, bias=False)
        self.down = nn.Linear(width, channels, bias=False)

    def rest(self, x, attention):
        """The rest of the block after attention's output (B, heads, T, size)."""
        x = x + self.projection(attention.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        if self.kind == "dense":
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return self.rest(x, scores.masked_fill(future, -math.inf).softmax(-1) @ v)
        if self.kind == "flash":
            return self.rest(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        parts = [checkpoint(self.of_queries, first, x[:, first:first + self.chunk], q[:, :, first:first + self.chunk], k, v,
                            use_reentrant=False) for first in range(0, x.shape[1], self.chunk)]
        return torch.cat(parts, 1)

    def of_queries(self, first, x, q, k, v):
        most = q.new_full((*q.shape[:3], 1), -math.inf)
        total, out = torch.zeros_like(most), torch.zeros_like(q)
        for key in range(0, first + q.shape[2], self.chunk):
            most, total, out = checkpoint(self.of_keys, first - key, q, k[:, :, key:key + self.chunk],
                                          v[:, :, key:key + self.chunk], most, total, out, use_reentrant=False)
        return self.rest(x, out / total)

    @staticmethod
    def of_keys(ahead, q, k, v, most, total, out):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if ahead == 0:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        now = torch.maximum(most, scores.amax(-1, keepdim=True))
        p, before = (scores - now).exp(), (most - now).exp()
        return now, total * before + p.sum(-1, keepdim=True), out * before + p @ v


def resident(what):
    """The process's resident memory in bytes: now (VmRSS), or the most since forget_peak() (VmHWM)."""
    return 1024 * int(re.search(rf"{what}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])


def forget_peak():
    """Resets the peak, and returns free memory to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("dense", "flash", "blockwise"), required=True)
    for name, value in (("length", 1024), ("channels", 512), ("heads", 8), ("width", 1408), ("chunk", 512), ("steps", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    o = parser.parse_args(arguments)
    torch.manual_seed(1)
    block = Block(o.kind, o.channels, o.heads, o.width, o.chunk)
    small = torch.randn(1, o.chunk, o.channels, requires_grad=True)
    block(small).sum().backward()  # lets libraries allocate what they allocate once
    x = torch.randn(1, o.length, o.channels, requires_grad=True)
    d_out = torch.randn(1, o.length, o.channels)
    forget_peak()
    before, seconds = resident("VmRSS"), []
    for _ in range(o.steps):
        x.grad = None
        start = time.perf_counter()
        block(x).backward(d_out)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": min(seconds), "bytes": resident("VmHWM") - before}))


if __name__ == "__main__":
    main()
