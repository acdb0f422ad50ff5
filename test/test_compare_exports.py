"""dev/compare_exports.py: what it finds between two GGUF files, and its runs of the trainer and of a converter that is one here."""

import subprocess
import sys

import compare_exports
import gguf
import numpy as np
import pytest
from trainer_runs import ENVIRONMENT, ROOT, make

USUALLY = "fp32"
# Exports by the trainer, as the type that is asked for or another one.
CONVERTER = """
import subprocess, sys
model, outtype, out = sys.argv[1], sys.argv[sys.argv.index("--outtype") + 1], sys.argv[sys.argv.index("--outfile") + 1]
if outtype == "f16": sys.exit("one line\\nNotImplementedError: no such vocabulary")
outtype = {{"bf16": "f32"}}.get(outtype, outtype)
subprocess.run([{train!r}, "--model", model, "--steps", "0", "--export", f"{{out}},type={{outtype}}"], check=True)
"""


def write(path, add=None, **changed):
    """A GGUF with three keys and two tensors, some of them changed; None leaves one out."""
    settings = {"a": 7, "b": ["x", "y", "z"], "c": "text", "matrix": np.arange(64, dtype=np.float32).reshape(2, 32),
                "row": np.ones(4, np.float32)} | changed
    writer = gguf.GGUFWriter(path, "llama")
    if settings["a"] is not None:
        (writer.add_uint32 if isinstance(settings["a"], int) else writer.add_float32)("a", settings["a"])
    if settings["b"] is not None:
        writer.add_array("b", settings["b"])
    writer.add_string("c", settings["c"])
    for name in ("matrix", "row"):
        if settings[name] is not None:
            writer.add_tensor(name, settings[name])
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return path


MATRIX = np.arange(64, dtype=np.float32).reshape(2, 32)


@pytest.mark.parametrize("changed, said", [
    ({}, []),
    ({"a": 8}, ["key a: 7, and the converter has 8"]),
    ({"a": 7.0}, ["key a: of type UINT32, and the converter has FLOAT32"]),
    ({"a": None}, ["key a: only the export has it, 7"]),
    ({"b": ["x", "?", "z"]}, ["key b: 1 of 3 elements; element 1 is 'y', and the converter has '?'"]),
    ({"b": ["x", "y"]}, ["key b: 3 elements, and the converter has 2"]),
    ({"b": [1, 2, 3]}, ["key b: of type ARRAY of STRING, and the converter has ARRAY of INT32"]),
    ({"c": "y" * 90}, [f"key c: 'text', and the converter has '{'y' * 56}..."]),
    ({"row": None}, ["tensor row: only the export has it"]),
    ({"matrix": MATRIX.astype(np.float16)}, ["tensor matrix: F32, and the converter has F16"]),
    ({"matrix": MATRIX.reshape(4, 16)}, ["tensor matrix: shape [32, 2], and the converter has [16, 4]"]),
    ({"matrix": MATRIX + np.float32([[2, *[0] * 31], [0] * 32])}, ["tensor matrix: 1 of 256 bytes"]),
], ids=str)
def test_differences(tmp_path, changed, said):
    ours, theirs = write(tmp_path / "ours"), write(tmp_path / "theirs", **changed)
    lines, compared = compare_exports.differences(ours, theirs)
    assert lines == said and compared == "4 keys and 2 tensors"
    back, _ = compare_exports.differences(theirs, ours)
    assert len(back) == len(said) and all("only the converter has it" in line for line in back if "None" in str(changed))


def test_runs(train_fp32, tmp_path):
    make(tmp_path / "model", "--family", "llama", "--layers", 1, "--heads", 2, "--channels", 64, "--vocab", 256)
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp/convert_hf_to_gguf.py").write_text(CONVERTER.format(train=train_fp32.path))

    def compare(*types, llama_cpp="llama.cpp", code=0):
        ran = subprocess.run([sys.executable, ROOT / "dev/compare_exports.py", "--llama-cpp", llama_cpp, "--model", "model", "--train",
                              train_fp32.path, "--types", *types], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout, ran.stderr
    said, _ = compare("f32", "q8_0")
    assert [line.split(": ")[0] for line in said.splitlines()] == ["model, f32", "model, q8_0"] and said.count("tensors; no differences\n") == 2
    said, _ = compare("bf16", code=1)
    assert "  key general.file_type: 32, and the converter has 0\n" in said and "  tensor token_embd.weight: BF16, and the converter has F32\n" in said
    assert "  tensor output_norm.weight" not in said
    _, error = compare("f16", code=2)
    assert error == "compare_exports.py: convert_hf_to_gguf.py: NotImplementedError: no such vocabulary\n"
    _, error = compare("f32", llama_cpp="nowhere", code=2)
    assert error == "compare_exports.py: --llama-cpp nowhere: there is no convert_hf_to_gguf.py in it\n"
