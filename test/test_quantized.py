"""Quantized weights equal, byte for byte, those of bitsandbytes (NF4) and of PyPI's gguf (GGUF's formats)."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trainer_runs import formats_probe as probe

GGML_FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
SHAPES = [(1, 64), (64, 64), (7, 128), (48, 576), (300, 1000), (3, 5), (1, 17), (1, 65), (2048, 2048)]


@pytest.fixture(scope="module", name="bnb")
def fixture_bnb():
    torch.set_num_threads(1)  # with several, the mean of the scales is added up in another order
    return pytest.importorskip("bitsandbytes")


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def parts_of(data, count, double):
    """The parts of a matrix in memory by name, each aligned to 16 bytes."""
    blocks = -(-count // 64)
    sizes = {"codes": -(-count // 2), "absmax": blocks * (1 if double else 4), "quant_map": 64}
    if double:
        sizes |= {"nested_absmax": -(-blocks // 256) * 4, "nested_map": 1024, "nested_offset": 4}
    parts, at = {}, 0
    for name, size in sizes.items():
        parts[name] = data[at:at + size]
        at += -(-size // 16) * 16
    assert at == len(data)
    return parts


def weights(shape, dtype, kind):
    generator = torch.Generator().manual_seed(shape[0] + shape[1])
    w = torch.randn(shape, generator=generator) * 0.02
    if kind == "coarse":  # many elements between two values, and blocks of zeros
        w = torch.round(w * 400) / 64
        w.view(-1)[:shape[0] * shape[1] // 3] = 0
    return w.to(dtype)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["normal", "coarse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_is_that_of_bitsandbytes(bnb, shape, dtype, kind, double):
    w = weights(shape, dtype, kind)
    codes, state = bnb.functional.quantize_4bit(w, quant_type="nf4", compress_statistics=double, blocksize=64)
    name = "nf4-double" if double else "nf4"
    ours = probe("quantize", name, "bf16" if dtype == torch.bfloat16 else "fp32", data=bytes_of(w))
    parts = parts_of(ours, w.numel(), double)
    assert parts["codes"] == bytes_of(codes)
    assert parts["quant_map"] == bytes_of(state.code)
    if double:
        assert np.frombuffer(parts["nested_offset"], np.float32)[0] == state.offset.item()
        assert parts["nested_map"] == bytes_of(state.state2.code)
        assert parts["nested_absmax"] == bytes_of(state.state2.absmax)
    assert parts["absmax"] == bytes_of(state.absmax)
    again = bnb.functional.dequantize_4bit(codes, state).float().numpy().reshape(-1)
    floats = np.frombuffer(probe("dequantize", name, w.numel(), data=ours), np.float32)
    if dtype == torch.bfloat16:
        floats = torch.from_numpy(floats.copy()).bfloat16().float().numpy()
    np.testing.assert_array_equal(floats, again)


def quantized_linear(bnb, double=True, storage=torch.uint8):
    linear = bnb.nn.Linear4bit(128, 40, bias=False, quant_type="nf4", compress_statistics=double,
                               quant_storage=storage)
    linear.weight = bnb.nn.Params4bit(weights((40, 128), torch.bfloat16, "normal"), requires_grad=False,
                                      quant_type="nf4", compress_statistics=double, quant_storage=storage)
    return linear.to("cpu")


def write_folder(path, tensors):
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors",
              metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("double", [False, True])
def test_files_of_bitsandbytes_are_read_and_written(bnb, tmp_path, double, storage):
    linear = quantized_linear(bnb, double, storage)
    tensors = linear.state_dict(prefix="layer.")
    folder = write_folder(tmp_path / "theirs", tensors)
    data = probe("nf4", folder, "layer.weight")
    floats = np.frombuffer(probe("dequantize", "nf4-double" if double else "nf4", 40 * 128, data=data), np.float32)
    wanted = bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state).float()
    np.testing.assert_array_equal(torch.from_numpy(floats.copy()).bfloat16().float(), wanted.reshape(-1))
    ours = tmp_path / "ours"
    ours.mkdir()
    probe("copy", folder, "layer.weight", ours / "model.safetensors")
    copied = load_file(ours / "model.safetensors")
    assert copied.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bytes_of(copied[name]) == bytes_of(tensor), name
    stats = {name: tensor for name, tensor in copied.items() if name != "layer.weight"}
    again = bnb.nn.Params4bit.from_prequantized(copied["layer.weight"], stats, device="cpu")
    np.testing.assert_array_equal(bnb.functional.dequantize_4bit(again.data, again.quant_state).float(), wanted)
    assert probe("nf4", ours, "layer.weight") == data
    with safe_open(ours / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


STATE = "layer.weight.quant_state.bitsandbytes__nf4"


def changed_state(**changes):
    def change(tensors):
        state = json.loads(bytes(tensors[STATE].tolist())) | changes
        tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return change


def shortened(name):
    def change(tensors):
        tensors[name] = tensors[name].reshape(-1)[:-1]
    return change


def replaced(name, tensor):
    def change(tensors):
        tensors[name] = tensor
    return change


@pytest.mark.parametrize("change,message", [
    (changed_state(blocksize=128), '"blocksize" is 128'),
    (changed_state(shape=[40, 127]), '"layer.weight" is 2560 bytes'),
    (changed_state(shape=[5120]), '"shape"'),
    (changed_state(quant_type="fp4"), '"quant_type"'),
    (changed_state(dtype="int8"), '"dtype"'),
    (shortened("layer.weight"), '"layer.weight" is 2559 bytes'),
    (shortened("layer.weight.absmax"), '"layer.weight.absmax" is 79 bytes'),
    (shortened("layer.weight.nested_absmax"), '"layer.weight.nested_absmax"'),
    (shortened("layer.weight.nested_quant_map"), '"layer.weight.nested_quant_map"'),
    (replaced("layer.weight.absmax", torch.zeros(80)), '320 bytes of F32 where 80 of U8'),
    (replaced("layer.weight.quant_map", torch.zeros(16)), "not those of NF4"),
    (lambda tensors: tensors.pop("layer.weight.absmax"), '"layer.weight.absmax" is missing'),
    (lambda tensors: tensors.pop("layer.weight"), '"layer.weight" is missing'),
    (lambda tensors: tensors.update({STATE.replace("nf4", "fp4"): tensors.pop(STATE)}), "FP4"),
    (lambda tensors: tensors.update({"layer.SCB": torch.zeros(40)}), "LLM.int8()"),
])
def test_wrong_files_are_refused(bnb, tmp_path, change, message):
    tensors = dict(quantized_linear(bnb).state_dict(prefix="layer."))
    change(tensors)
    error = probe("nf4", write_folder(tmp_path / "wrong", tensors), "layer.weight", code=2)
    assert message in error and error.count("\n") == 1, error


def blocks_of(kind, count):
    """Random blocks with all possible scales, including zeros, subnormal ones, infinity and NaN."""
    size, generator = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1], np.random.default_rng(count)
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    blocks[:count // 4] *= generator.integers(0, 2, (count // 4, size), dtype=np.uint8)  # also scales of zero
    return blocks


def padded(data):
    return data + bytes(-len(data) % 16)


@pytest.mark.parametrize("kind", GGML_FORMATS)
def test_ggml_formats_are_those_of_gguf(kind):
    blocks = blocks_of(kind, 5000)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(-1)
    ours = np.frombuffer(probe("dequantize", kind.lower(), wanted.size, data=padded(blocks.tobytes())), np.float32)
    numbers = ~np.isnan(wanted)
    assert 0 < numbers.sum()
    np.testing.assert_array_equal(ours[numbers].view(np.uint32), wanted[numbers].view(np.uint32))
    assert np.isnan(ours[~numbers]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["normal", "coarse", "tiny", "large"])
def test_q8_0_is_that_of_gguf(kind, dtype):
    """Scales that are subnormal halves, or zero, or blocks of zeros."""
    w = weights((37, 96), dtype, kind)
    if kind in ("tiny", "large"):
        w *= torch.logspace(*((-7, -1) if kind == "tiny" else (0, 7)), 37)[:, None]
    wanted = gguf.quants.quantize(w.float().numpy(), gguf.GGMLQuantizationType.Q8_0).tobytes()
    assert probe("quantize", "q8_0", "bf16" if dtype == torch.bfloat16 else "fp32", data=bytes_of(w)) == padded(wanted)


@pytest.mark.parametrize("kind", GGML_FORMATS)
def test_products_with_a_row(kind):
    rows, columns = 37, 768
    blocks = blocks_of(kind, rows * columns // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])
    for at in {"Q6_K": [209], "Q2_K": [81, 83], "Q3_K": [109]}.get(kind, [1, 3]):
        blocks[:, at] &= 0xbb  # no infinite scales
    matrix = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]).reshape(rows, columns).astype(np.float64)
    x = np.random.default_rng(1).standard_normal(columns).astype(np.float32)
    data = padded(blocks.tobytes()) + x.tobytes()
    ours = np.frombuffer(probe("matvec", kind.lower(), rows, columns, data=data), np.float32)
    np.testing.assert_allclose(ours, matrix @ x, rtol=0, atol=1e-5 * np.abs(matrix @ x).max())
