"""Data that cannot be trained on: one line names what is wrong, and nothing is written."""

import shutil
import struct
import subprocess

import numpy as np
import pytest
from bad_input_models import given, work
from trainer_runs import refused, write_shard

USUALLY = "fp32"  # see conftest.py


@pytest.mark.parametrize("option", ["--data", "--val-data"])
@pytest.mark.parametrize("value, named", [
    ("nowhere", ["nowhere"]), ("*.csv", ["*.csv"]), ("model", ["model", "directory"]), ("empty", ["empty"]),
    ("mixed*", ["mixed.bin", "mixed.txt"]), ("/dev/null", ["/dev/null"])])
def test_files_of_data(train, work, option, value, named):
    (work / "empty").touch()
    (work / "mixed.txt").write_bytes(bytes(500))
    write_shard(work / "mixed.bin", [1] * 500)
    error = refused(train, work, {option: value}, *named)
    assert option in error


def test_no_data(train, work):
    """A model's folder has no built-in text; neither has a new model where the program is alone."""
    refused(train, work, {"--data": None}, "--data is missing", "--prompt", "--steps 0")
    alone = shutil.copy(train.path, work / "alone")
    ran = subprocess.run([alone, "--model", "d1", "--steps", "3"], cwd=work, env=train.environment, capture_output=True, check=False)
    assert ran.returncode == 2 and ran.stderr.startswith(b"train: --data is missing: only new models of less than 12 layers are trained on dev/data/tinyshakespeare.txt ")
    assert ran.stderr.count(b"\n") == 1


def test_an_empty_prompt(train, work):
    refused(train, work, {"--prompt": ""}, "--prompt: the text is empty")


def test_too_little_data(train, work):
    (work / "short").write_bytes(b"x" * 20)
    refused(train, work, {"--data": "short"}, "short", "24")
    refused(train, work, {"--val-data": "short"}, "short", "24")


def header(*fields):
    return np.array(fields + (0,) * (256 - len(fields)), dtype=np.int32).tobytes()


@pytest.mark.parametrize("content, named", [
    (header(20240519, 1, 100) + bytes(200), ["20240519"]),
    (header(20240520, 7, 100) + bytes(200), ["7"]),
    (header(20240801, 1, 100) + bytes(400), ["1", "7"]),
    (header(20240801, 7, 100) + bytes(200), ["100", "4 bytes", "200"]),
    (header(20240520, 1, 100)[:1000], ["1000"]),
    (header(20240520, 1, 100) + bytes(198), ["100", "198"]),
    (header(20240520, 1, 100) + bytes(202), ["100", "202"]),
    (header(20240520, 1, -1) + bytes(200), ["-1"]),
    (header(20240520, 1, 0), ["0"]),
    (header(20240520, 1, 1 << 30) + bytes(200), [str(1 << 30)]),
    (header(20240520, 1, 100) + struct.pack("<100H", *[0] * 77, 300, *[0] * 22), ["300", "77"]),
], ids=["magic", "version", "version of 32 bits", "16 bits for 32", "short header", "short", "long", "negative", "none", "huge", "token"])
@pytest.mark.parametrize("option", ["--data", "--val-data"])
def test_shards(train, work, option, content, named):
    (work / "bad.bin").write_bytes(content)
    refused(train, work, {"--model": "model300", "--data": "shard.bin", option: "bad.bin"}, "bad.bin", *named)


def test_text_for_a_model_of_tokens(train, work):
    refused(train, work, {"--model": "model300"}, "text", "256", "300")
