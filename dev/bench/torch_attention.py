#!/usr/bin/env python3
"""Times causal attention in PyTorch, forward and backward. Prints JSON lines like those of attention.cpp.

--kind naive is the definition, softmax(Q K^T, masked) V; --kind sdpa is scaled_dot_product_attention.
"""

import argparse
import ctypes
import functools
import json
import math
import re
import resource
import time

import torch
import torch.nn.functional as F

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def naive(q, k, v, future):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(future, -math.inf).softmax(dim=-1) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Memory:
    """The most device memory used since the start, beyond what was used then."""

    def __init__(self, device):
        self.device = device
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the high-water mark to what is resident now
        self.start = self.status("VmRSS")

    @staticmethod
    def status(key):
        with open("/proc/self/status") as file:
            return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", file.read()).group(1))

    def peak(self):
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() - self.start
        return self.status("VmHWM") - self.start


def limit_memory(device, limit):
    """Limits memory, so that asking for more fails in PyTorch instead of killing some process of this
    machine."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    else:
        limit += Memory.status("VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def milliseconds(options, f):
    """As milliseconds() in attention.cpp."""
    def clock(calls):
        start = time.perf_counter()
        for _ in range(calls):
            f()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    clock(1)
    calls = int(min(1000, max(1, 0.01 / clock(1))))
    times, start = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < options.seconds:
        times.append(clock(calls))
    return 1000 * sorted(times)[len(times) // 2]


def make_inputs(options, batch, T, heads, head_size):
    """q, k, v (batch, heads, T, head size), columns of one packed array as in a model, and the output's
    gradient."""
    settings = {"device": options.device, "dtype": DTYPES[options.precision]}
    packed = torch.randn(batch, T, 3, heads, head_size, **settings)
    q, k, v = (part.detach().requires_grad_() for part in packed.permute(2, 0, 3, 1, 4).unbind())
    return (q, k, v), torch.randn(batch, T, heads, head_size, **settings).transpose(1, 2)


def attention_of(options, qkv):
    if options.kind == "sdpa":
        return functools.partial(sdpa, *qkv)
    T = qkv[0].shape[2]
    return functools.partial(naive, *qkv, torch.ones(T, T, dtype=torch.bool, device=options.device).triu(1))


def warm_up(options):
    """Lets libraries allocate what they allocate once, at their first call."""
    qkv, dout = make_inputs(options, 1, 64, 1, 16)
    torch.autograd.grad(attention_of(options, qkv)(), qkv, dout)


def measure(options, head_size):
    memory = Memory(options.device)
    qkv, dout = make_inputs(options, options.tokens // options.length, options.length, options.channels // head_size,
                            head_size)
    attention = attention_of(options, qkv)
    torch.autograd.grad(attention(), qkv, dout)
    peak = memory.peak()
    forward_ms = milliseconds(options, attention)
    out = attention()
    backward_ms = milliseconds(options, lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True))
    return {"forward_ms": forward_ms, "backward_ms": backward_ms, "peak_bytes": peak}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kind", choices=("naive", "sdpa"), required=True)
    add("--head-sizes", default="16,32,64,128")
    add("--length", type=int, required=True)
    add("--tokens", type=int, default=16384, help="batch x length")
    add("--channels", type=int, default=256, help="heads x head size")
    add("--precision", choices=tuple(DTYPES), default="fp32")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=0)
    add("--seconds", type=float, default=0.2, help="that a case is repeated for")
    add("--memory", type=int, default=0, help="bytes that may be taken; 0: all")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warm_up(options)
    if options.memory:
        limit_memory(options.device, options.memory)
    for head_size in map(int, options.head_sizes.split(",")):
        try:
            measured = measure(options, head_size)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            measured = {"out_of_memory": True}
        print(json.dumps({"head_size": head_size, "seq_len": options.length, "batch": options.tokens // options.length,
                          "heads": options.channels // head_size, "precision": options.precision, **measured,
                          "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
