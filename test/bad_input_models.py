"""Shared by tests of mistakes: a model and data that are good, and what damages a file of tensors."""

import json
import shutil
import struct

import pytest
from safetensors.torch import load_file, save_file
from trainer_runs import make, random_tokens, write_shard, write_text

SMALL = ("--layers", 2, "--heads", 3, "--channels", 48, "--positions", 64)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    path = tmp_path_factory.mktemp("given")
    make(path / "model", *SMALL)
    make(path / "model300", *SMALL, "--vocab", 300)
    write_text(path / "text")
    write_shard(path / "shard.bin", random_tokens(300, 500))
    return path


@pytest.fixture
def work(given, tmp_path):
    """A copy that tests may damage."""
    shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    return tmp_path


def rewrite_header(change):
    """Damages model.safetensors: change(header) returns the new header."""

    def damage(folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        fields = json.loads(data[8:8 + length])
        change(fields)
        text = json.dumps(fields).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length:])

    return damage


def with_tensors(change):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def cut(count):
    def damage(folder):
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:count])

    return damage
