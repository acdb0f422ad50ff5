"""Shared by tests: what bitsandbytes' matrices hold."""

import contextlib

import bitsandbytes
import gguf
import torch


def floats_of(weight, state):
    """The values of a bitsandbytes matrix, from its codes. bitsandbytes' own dequantization on a CPU is wrong
    if rows are not whole blocks (0.50.2)."""
    scales = state.absmax
    if state.nested:
        blocks = torch.arange(len(scales)) // state.state2.blocksize
        scales = state.state2.code[scales.long()] * state.state2.absmax[blocks] + state.offset
    codes = torch.stack([weight.flatten() >> 4, weight.flatten() & 15], dim=1).flatten()[:state.shape.numel()].long()
    return (state.code[codes] * scales[torch.arange(len(codes)) // state.blocksize]).reshape(state.shape)


@contextlib.contextmanager
def one_thread():
    """With more threads, bitsandbytes adds up the scales' mean in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def dequantized_head(w, head):
    """The values of a matrix in this format, by bitsandbytes and PyPI's gguf."""
    if head == "8bit":
        kind = gguf.GGMLQuantizationType.Q8_0
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), kind), kind))
    with one_thread():
        return floats_of(*bitsandbytes.functional.quantize_4bit(w, quant_type="nf4", blocksize=64,
                                                                compress_statistics=True))
