#!/usr/bin/env python3
"""Writes the first inputs of the fuzz targets into FOLDER/safetensors, FOLDER/shards and FOLDER/json."""

import json
import pathlib
import struct
import sys


def safetensors_seeds():
    def file(header, data=b""):
        return b"\1" + json.dumps(header).encode() + b"\0" + data

    def tensor(dtype, shape, begin, end):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    yield file({})
    yield file({"__metadata__": {"format": "pt"}, "w": tensor("F32", [2, 1], 0, 8)}, bytes(8))
    yield file({"h": tensor("F16", [3], 0, 6), "b": tensor("BF16", [1], 6, 8)}, b"\0\x7c\1\0\xff\xff\x80\x3f")
    yield file({"scalar": tensor("I64", [], 0, 8), "none": tensor("U8", [5, 0], 8, 8)}, bytes(8))
    yield file({"overlap": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 2, 6)}, bytes(6))
    yield file({"huge": tensor("F32", [2**62, 4], 0, 0)})
    header = json.dumps({"w": tensor("F32", [1], 0, 4)}).encode()
    yield b"\0" + struct.pack("<Q", len(header)) + header + bytes(4)


def shard_seeds():
    def shard(choices, seq_len, seed, tokens, magic=20240520, version=1):
        head = struct.pack("<iii", magic, version, len(tokens))
        return bytes([choices, seq_len - 1, seed]) + head + struct.pack(f"<{len(tokens)}H", *tokens)

    yield shard(3, 4, 2, range(40))
    yield shard(3, 1, 3, [50256, 0])
    yield shard(3, 2, 4, [50257, 0, 0, 0])
    yield shard(1, 8, 6, range(9), magic=20240801)
    yield b"\0\3\2" + b"To be, or not to be, that is the question" * 3
    for choices in (4, 12):
        yield bytes([choices, 2, 5]) + b"text in two parts " * 8


def json_seeds():
    config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_ctx": 1024, "n_embd": 768,
              "n_layer": 12, "n_head": 12, "n_inner": None, "activation_function": "gelu_new",
              "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "architectures": ["GPT2LMHeadModel"]}
    yield json.dumps(config).encode()
    yield json.dumps(config | {"n_head": 7, "n_inner": -1}).encode()
    yield b'{"a": [1, -2, 3.5e3, "\\u00e9\\ud83d\\ude00", null, true], "a": {}}'


def main():
    folder = pathlib.Path(sys.argv[1])
    targets = {"safetensors": safetensors_seeds(), "shards": shard_seeds(), "json": json_seeds()}
    for name, seeds in targets.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds):
            (folder / name / f"seed-{number}").write_bytes(seed)


if __name__ == "__main__":
    main()
