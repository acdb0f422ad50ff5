#!/usr/bin/env python3
"""Times training steps of GPT-2 in PyTorch on random tokens, as ./train --bench does; prints one JSON object.

PyTorch at its best: scaled_dot_product_attention, a vocabulary padded to 50304, fused AdamW, foreach norms; in bf16
autocast over fp32 weights. dev/bench/compare.py runs it beside ./train.
"""

import argparse
import json
import resource
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, PADDED_VOCABULARY, POSITIONS = 50257, 50304, 1024


def sizes(model):
    """(layers, heads, channels) of dN, as ./train has them."""
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


def make_optimizer(model):
    """AdamW over matrices with decay and vectors without, in one fused kernel where the device has one."""
    groups = [{"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0}]
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
    try:
        return torch.optim.AdamW(groups, fused=True, **settings), "fused"
    except RuntimeError:
        return torch.optim.AdamW(groups, **settings), "foreach"


class Steps:
    def __init__(self, options):
        self.options = options
        torch.manual_seed(1)
        layers, heads, channels = options.model
        self.model = GPT2(layers, heads, channels, max(POSITIONS, options.seq_len)).to(options.device)
        self.optimizer, self.optimizer_kind = make_optimizer(self.model)
        self.loss = torch.compile(self.model) if options.compile else self.model
        self.loss_before = None

    def step(self):
        """A step, the copy of its tokens to the device included; its loss is read once the next step is under way."""
        o = self.options
        window = torch.randint(VOCABULARY, (o.batch, o.seq_len + 1), pin_memory=o.device == "cuda")
        window = window.to(o.device, non_blocking=True)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(o.device, torch.bfloat16, enabled=o.precision == "bf16"):
            loss = self.loss(window[:, :-1], window[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.loss_before is not None:
            self.loss_before.item()
        self.loss_before = loss.detach()

    def times(self, count):
        """The milliseconds of `count` steps, each from the end of the one before to its own."""
        cuda = self.options.device == "cuda"

        def mark():
            if not cuda:
                return time.perf_counter()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        marks = [mark()]
        for _ in range(count):
            self.step()
            marks.append(mark())
        if cuda:
            torch.cuda.synchronize()
        return [a.elapsed_time(b) if cuda else 1000 * (b - a) for a, b in zip(marks, marks[1:])]


def peak_bytes(device):
    if device == "cuda":
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=sizes, default="d12", help="d1 to d12, d24, d36, d48")
    add("--batch", type=int, default=4)
    add("--seq-len", type=int, default=64)
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=0, help="CPU threads, 0 for PyTorch's choice")
    add("--warmup", type=int, default=2, help="steps that are not timed")
    add("--steps", type=int, default=5, help="steps that are timed")
    add("--compile", action="store_true", help="torch.compile the model")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    run = Steps(options)
    warmup_ms, steps_ms = run.times(max(1, options.warmup)), run.times(options.steps)
    print(json.dumps({
        "device": options.device, "precision": options.precision, "compile": options.compile,
        "threads": torch.get_num_threads(), "optimizer": run.optimizer_kind, "warmup_ms": warmup_ms,
        "steps_ms": steps_ms, "peak_bytes": peak_bytes(options.device), "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parameters": sum(p.numel() for p in run.model.parameters())}))


if __name__ == "__main__":
    main()
