#!/usr/bin/env python3
"""Exports a model's folder as GGUF and converts it with llama.cpp's own convert_hf_to_gguf.py too, and prints every difference
between the files: keys, their types and values; and tensors, their types, shapes and bytes. It does not compare the order of the
tensors, which readers do not depend on: the export has them block by block, the converter as in the model's files.

    git clone --depth 1 https://github.com/ggml-org/llama.cpp
    dev/compare_exports.py --llama-cpp llama.cpp --model data/smollm2 --train build/cpu-fp32/train

It compares the types that the converter writes without llama-quantize. The converter needs PyTorch, transformers and its own
gguf-py, which is in the checkout. Exit codes: 0 if nothing differs, 1 if something does, 2 if a program fails.
"""

import argparse
import os
import subprocess
import sys
import tempfile

try:
    import gguf
    import numpy as np
except ImportError as error:
    print(f"compare_exports.py: {error.name} is missing: run dev/venv.sh and use .venv/bin/python", file=sys.stderr)
    sys.exit(2)

TYPES = ("f32", "f16", "bf16", "q8_0")


def run(*command):
    """Ends the program if the command fails, with the last line that it printed."""
    try:
        result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    except OSError as error:
        fail(f"{command[0]}: {error.strerror}")
    if result.returncode != 0:
        said = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        fail(f"{os.path.basename(str(command[1 if command[0] == sys.executable else 0]))}: {said[-1]}")


def fail(message):
    print(f"compare_exports.py: {message}", file=sys.stderr)
    sys.exit(2)


def shortened(value):
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def keys_of(reader):
    """{key: (its types, its value)}, without those of the file itself."""
    return {name: ([kind.name for kind in field.types], field.contents()) for name, field in reader.fields.items()
            if not name.startswith("GGUF.")}


def different_values(ours, theirs):
    """Where two values of a key differ, in words."""
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{len(ours)} elements, and the converter has {len(theirs)}"
        places = [i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b]
        at = places[0]
        return f"{len(places)} of {len(ours)} elements; element {at} is {shortened(ours[at])}, and the converter has {shortened(theirs[at])}"
    return f"{shortened(ours)}, and the converter has {shortened(theirs)}"


def different_tensors(ours, theirs):
    """What differs between two tensors of the same name, in words; "" if nothing does."""
    if ours.tensor_type != theirs.tensor_type:
        return f"{ours.tensor_type.name}, and the converter has {theirs.tensor_type.name}"
    if list(ours.shape) != list(theirs.shape):
        return f"shape {[int(n) for n in ours.shape]}, and the converter has {[int(n) for n in theirs.shape]}"
    unequal = int(np.count_nonzero(np.ascontiguousarray(ours.data).view(np.uint8) != np.ascontiguousarray(theirs.data).view(np.uint8)))
    return f"{unequal} of {ours.n_bytes} bytes" if unequal else ""


def differences(ours, theirs):
    """The lines that say what differs between two files, and how much was compared, in words."""
    lines = []
    (keys, tensors), (their_keys, their_tensors) = (
        (keys_of(reader), {tensor.name: tensor for tensor in reader.tensors}) for reader in map(gguf.GGUFReader, (ours, theirs)))
    for what, one, other in (("key", keys, their_keys), ("tensor", tensors, their_tensors)):
        lines += [f"{what} {name}: only the export has it{f', {shortened(one[name][1])}' if what == 'key' else ''}" for name in one if name not in other]
        lines += [f"{what} {name}: only the converter has it{f', {shortened(other[name][1])}' if what == 'key' else ''}"
                  for name in other if name not in one]
    for name, (kinds, value) in keys.items():
        if name in their_keys:
            their_kinds, their_value = their_keys[name]
            if kinds != their_kinds:
                lines.append(f"key {name}: of type {' of '.join(kinds)}, and the converter has {' of '.join(their_kinds)}")
            elif value != their_value:
                lines.append(f"key {name}: {different_values(value, their_value)}")
    for name, tensor in tensors.items():
        if name in their_tensors and (said := different_tensors(tensor, their_tensors[name])):
            lines.append(f"tensor {name}: {said}")
    return lines, f"{len(keys)} keys and {len(tensors)} tensors"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--llama-cpp", required=True, help="folder of llama.cpp's sources")
    parser.add_argument("--model", nargs="+", default=["data/smollm2"], help="folders of models")
    parser.add_argument("--train", default="build/cpu-fp32/train", help="the trainer")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, metavar="TYPE", help=f"of {', '.join(TYPES)}")
    options = parser.parse_args(arguments)
    converter = os.path.join(options.llama_cpp, "convert_hf_to_gguf.py")
    if not os.path.exists(converter):
        fail(f"--llama-cpp {options.llama_cpp}: there is no convert_hf_to_gguf.py in it")
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = (os.path.join(folder, name) for name in ("ours.gguf", "theirs.gguf"))
        for model in options.model:
            for name in options.types:
                run(options.train, "--model", model, "--steps", 0, "--export", f"{ours},type={name}")
                run(sys.executable, converter, model, "--outtype", name, "--outfile", theirs)
                lines, compared = differences(ours, theirs)
                print(f"{model}, {name}: {compared}; {len(lines) or 'no'} difference{'s' if len(lines) != 1 else ''}", flush=True)
                print("".join(f"  {line}\n" for line in lines), end="", flush=True)
                found += len(lines)
                os.remove(ours), os.remove(theirs)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
