"""A mistake is reported in one line that names what is wrong, with exit code 2, and nothing is written."""

import json
import os
import shutil
import struct
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from trainer_runs import (binaries, listing, make, random_tokens, read_log, saved_bytes, small_disk, write_shard,
                          write_text)

SMALL = ("--layers", 2, "--heads", 3, "--channels", 48, "--positions", 64)
# What a run would write if the mistake were not found. None of it may exist afterwards.
GOOD = {"--model": "model", "--data": "text", "--batch": 2, "--seq-len": 24, "--steps": 2, "--sample tokens": 4,
        "--out": "out", "--log": "log"}


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


def command(options):
    """Options from a dict; None leaves one out, True is a flag, and "--offload weights" is a key of --offload."""
    parts = []
    for name, value in (GOOD | options).items():
        option, _, key = name.partition(" ")
        if value is not None:
            parts += [option] if value is True else [option, f"{key}={value}" if key else str(value)]
    return parts


def refused(train, folder, options, *named):
    """Runs with these options in place of the good ones; returns the line."""
    before = listing(folder)
    error = train(*command(options), cwd=folder, code=2).stderr.decode()
    assert error.startswith("train: ") and error.count("\n") == 1 and error.endswith("\n"), error
    for name in named:
        assert name in error, error
    assert listing(folder) == before
    return error


def test_the_good_options_are_good(train, work):
    train(*command({}), cwd=work)
    assert len(read_log(work / "log")) == 3 and saved_bytes(work / "out")


# ---- options

NUMBERS = {  # an option, and values below and above its range
    "--batch": (0, 1 << 31), "--chunk-rows head": (-1, 1 << 31), "--seq-len": (0, 1 << 31), "--grad-accum": (0, 1 << 31), "--steps": (-1, "1e13"),
    "--lr": (-1e-9, "inf"), "--min-lr": (-1, "inf"), "--warmup": (-1, "1e13"), "--weight-decay": (-1, "inf"),
    "--optimizer beta1": (-0.1, 1), "--optimizer beta2": (-0.1, 1), "--optimizer eps": (0, "inf"), "--clip": (-1, "inf"), "--seed": (-1, 1 << 64),
    "--print-every": (-1, "1e13"), "--eval-every": (-1, "1e13"), "--eval-batches": (0, 1 << 31), "--threads": (-1, 5000),
    "--sample every": (-1, "1e13"), "--sample tokens": (-1, 1 << 31), "--sample temperature": (-1, "inf"),
    "--sample top-k": (-1, 1 << 31), "--save-every": (-1, "1e13"), "--keep": (-1, 1 << 31)}


@pytest.mark.parametrize("option", NUMBERS)
def test_numbers(train, work, option):
    for value in (*NUMBERS[option], "seven", "7x", "nan", ""):
        refused(train, work, {option: value}, option, str(value))
    if option not in ("--lr", "--min-lr", "--weight-decay", "--optimizer beta1", "--optimizer beta2", "--optimizer eps", "--clip",
                      "--sample temperature"):
        for value in ("1.5", "010"):  # CLI11 would read the second as octal 8
            refused(train, work, {option: value}, option, value)


@pytest.mark.parametrize("options, named", [
    ({"--speed": 3}, ["--speed"]),
    ({"-x": True}, ["-x"]),
    ({"--schedule": "step"}, ["--schedule", "step", "cosine"]),
    ({"--recompute": "all"}, ["--recompute", "all", "gelu", "block"]),
    ({"--recompute": "norm:1"}, ["--recompute", "norm:1", "2"]),
    ({"--recompute": "norm:2,block:1"}, ["--recompute", "norm:2,block:1", "3", "2"]),
    ({"--recompute": "norm:0,block:2"}, ["--recompute", "norm:0"]),
    ({"--recompute": "norm,block:1"}, ["--recompute", "norm"]),
    ({"--recompute": "norm:two"}, ["--recompute", "norm:two"]),
    ({"--recompute": ""}, ["--recompute"]),
    ({"--recompute": "norm:1,"}, ["--recompute", "norm:1,"]),
    ({"--memory": "3"}, ["--memory", "3", "GiB"]),
    ({"--memory": "8QB"}, ["--memory", "8QB", "GiB"]),
    ({"--memory": ""}, ["--memory"]),
    ({"--memory": "-1GiB"}, ["--memory", "-1GiB"]),
    ({"--memory": "nanGiB"}, ["--memory", "nanGiB"]),
    ({"--memory": "1KiB"}, ["--memory", "1KiB", "least"]),
    ({"--memory": "8GiB", "--recompute": "norm"}, ["--memory", "8GiB", "--recompute", "norm"]),
    ({"--memory": "8GiB", "--steps": 0}, ["--memory", "--steps"]),
    ({"--memory host": "8GiB"}, ["--memory host=8GiB", "--memory"]),
    ({"--batch": "auto", "--memory": "1KiB"}, ["--batch", "auto"]),
    ({"--batch": "Auto"}, ["--batch", "Auto"]),
    ({"--update-in-backward": True, "--advanced clip": "model"}, ["--update-in-backward", "--clip"]),
    ({"--update-in-backward": True, "--clip": 0, "--grad-accum": 2}, ["--update-in-backward", "--grad-accum"]),
    ({"--advanced attention": "flash"}, ["--advanced attention", "flash", "common", "hopper"]),
    # No build has it for heads of 16.
    ({"--advanced attention": "hopper"}, ["--advanced attention=hopper", "attention=common"]),
    ({"--optimizer": "lion"}, ["--optimizer", "lion", "adamw"]),
    ({"--state-formats master": "fp16"}, ["--state-formats master", "fp16", "split"]),
    ({"--state-formats m": "4bit"}, ["--state-formats m", "4bit", "8bit"]),
    ({"--state-formats v": "fp16"}, ["--state-formats v", "fp16", "8bit"]),
    ({"--optimizer": "sgd", "--state-formats m": "8bit"}, ["--state-formats m=8bit", "--optimizer sgd"]),
    ({"--optimizer": "sgd", "--state-formats v": "fp32"}, ["--state-formats v=fp32", "--optimizer sgd"]),
    ({"--model": "d13"}, ["--model", "d13", "d12", "d24"]),
    ({"--model": "d0"}, ["--model", "d0"]),
    ({"--model": "nowhere"}, ["--model", "nowhere"]),
    ({"--model": "text"}, ["--model", "text"]),
    ({"--model": "two\nlines"}, ["--model", "two"]),
    ({"--seq-len": 65}, ["--seq-len", "65", "64"]),
    ({"--batch": 1000}, ["--batch", "1000"]),
    ({"--batch": 1 << 20, "--seq-len": 1 << 20}, ["--batch", "--seq-len", str(1 << 20)]),
    ({"--min-lr": 0.2, "--lr": 0.1}, ["--min-lr", "0.2", "--lr", "0.1"]),
    ({"--plan": "xml"}, ["--plan", "xml", "json"]),
    *[({option: ""}, [option, "empty"]) for option in ("--advanced algorithms", "--out", "--log", "--resume", "--timeline")],
    ({"--save-every": 1, "--out": None}, ["--save-every", "--out"]),
    ({"--val-data": "text", "--data": None}, ["--val-data", "--data"]),
    ({"--prompt": 65 * "x"}, ["--prompt", "65", "64"]),
    ({"--model": "model300", "--data": "shard.bin", "--prompt": "x"}, ["--prompt", "vocab.json"]),
    ({"--log": "nowhere/log"}, ["--log", "nowhere/log"]),
    ({"--log": "model"}, ["--log", "model"]),
    ({"--log": "text"}, ["--log text", "data"]),
    ({"--timeline": "./text"}, ["--timeline ./text", "data"]),
    ({"--data": "shard.bin", "--model": "model300", "--val-data": "shard.bin", "--log": "shard.bin"}, ["--log shard.bin"]),
    ({"--out": "text"}, ["--out", "text"]),
    ({"--out": "text/out"}, ["--out", "text"]),
    ({"--out": "model"}, ["--out", "model"]),  # has files that are not our links
    ({"--out": "/proc/out"}, ["--out", "/proc"]),
], ids=str)
def test_options(train, work, options, named):
    refused(train, work, options, *named)


@pytest.mark.parametrize("options, named", [
    ({"--log": "out"}, ["--log out", "--out"]),
    ({"--log": "up/../out/"}, ["--log up/../out/"]),
    ({"--log": "out/config.json"}, ["out/config.json", "part of out"]),
    ({"--log": "out/up/../trainer_state.safetensors"}, ["part of out"]),
    ({"--log": "out/latest"}, ["part of out"]),
    ({"--log": "out/.lock"}, ["part of out"]),
    ({"--log": "out/step-00000002/log"}, ["part of out"]),
    ({"--log": "dangling"}, ["--log dangling", "part of out"]),
    ({"--log": "model/config.json"}, ["--log model/config.json", "part of model"]),
    ({"--log": "model/tokenizer.json"}, ["part of model"]),  # does not exist yet
    ({"--log": "up/../hard"}, ["--log up/../hard", "part of model"]),
    ({"--log": "soft"}, ["--log soft", "part of model"]),
    ({"--log": "hard text"}, ["--log hard text", "data"]),
    ({"--log": "notes"}, ["--log notes", "is no file that --log writes"]),
    # Checked before the weights are read.
    ({"--log": "nowhere/log", "--model": "broken"}, ["--log nowhere/log"]),
    ({"--log": "up/../same", "--timeline": "same"}, ["--log up/../same", "--timeline"]),
    ({"--timeline": "model/model.safetensors"}, ["--timeline model/model.safetensors", "part of model"]),
    ({"--timeline": "notes"}, ["--timeline notes"]),
    ({"--timeline": "up"}, ["--timeline up", "directory"]),
    ({"--out": "model/out.safetensors"}, ["--out model/out.safetensors", "part of model"]),
], ids=str)
def test_outputs(train, work, options, named):
    """No output may be an input, another output, or a part of a save or a model, whatever its path looks
    like."""
    (work / "up").mkdir()
    (work / "dangling").symlink_to("out/config.json")
    (work / "soft").symlink_to("model/vocab.json")
    (work / "hard").hardlink_to(work / "model" / "model.safetensors")
    (work / "hard text").hardlink_to(work / "text")
    (work / "notes").write_text('{"stories": "mine"}')
    shutil.copytree(work / "model", work / "broken")
    cut(100)(work / "broken")
    refused(train, work, options, *named)


def test_algorithms_of_products(train, work):
    if train.device == "cpu":
        refused(train, work, {"--advanced algorithms": "found.json"}, "--advanced algorithms=found.json", "GPU", "oneDNN")
        return
    for name, content in {"short": '{"matmul_algorithms": 1, "mach', "empty": "", "version": '{"matmul_algorithms": 2}',
                          "machines": '{"matmul_algorithms": 1, "machines": 3}'}.items():
        (work / name).write_text(content)
        refused(train, work, {"--advanced algorithms": name}, f"{name}: ")
    for name in ("model", "model/config.json", "nowhere/found.json"):
        refused(train, work, {"--advanced algorithms": name}, name)


def test_tf32_is_fp32s_on_a_gpu(train, work):
    if (train.device, train.precision) == ("cuda", "fp32"):
        pytest.skip("it has it")
    refused(train, work, {"--advanced tf32": "on"}, "--advanced tf32=on", "fp32", "for the CPU" if train.device == "cpu" else "PRECISION=fp32")


# ---- data


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
    """A model's folder has no built-in text; neither has a new model outside the project's folder."""
    refused(train, work, {"--data": None}, "--data is missing", "--prompt", "--steps 0")
    refused(train, work, {"--data": None, "--model": "d1"}, "--data", "dev/data/tinyshakespeare.txt")


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


# ---- model folders


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


def past_the_end(fields):
    begin, end = fields["h.1.mlp.c_fc.weight"]["data_offsets"]
    fields["h.1.mlp.c_fc.weight"]["data_offsets"] = [begin + (1 << 30), end + (1 << 30)]


def overlap(fields):
    fields["h.1.mlp.c_fc.weight"]["data_offsets"] = fields["h.0.mlp.c_fc.weight"]["data_offsets"]


NAME = "h.1.mlp.c_fc.weight"


@pytest.mark.parametrize("damage, named", [
    (cut(0), []), (cut(7), []), (cut(100), []), (cut(-1), []), (cut(20000), []),
    (lambda folder: (folder / "model.safetensors").unlink(), []),
    (rewrite_header(past_the_end), [NAME]),
    (rewrite_header(overlap), ["mlp.c_fc.weight", "overlap"]),
    (rewrite_header(lambda fields: fields[NAME].update(dtype="I32")), [NAME, "I32"]),
    (rewrite_header(lambda fields: fields[NAME].update(dtype="F31")), [NAME, "F31"]),
    (rewrite_header(lambda fields: fields[NAME].update(dtype="BF16")), [NAME]),
    (rewrite_header(lambda fields: fields[NAME].update(shape=[192, 48])), [NAME, "[192, 48]", "[48, 192]"]),
    (rewrite_header(lambda fields: fields[NAME].update(shape=[-48, -192])), [NAME]),
    (rewrite_header(lambda fields: fields[NAME].update(shape=[1 << 62, 48, 192])), [NAME]),
    (with_tensors(lambda tensors: tensors.pop(NAME)), [NAME, "missing"]),
    (with_tensors(lambda tensors: tensors.pop("wte.weight")), ["wte.weight", "missing"]),
], ids=["empty", "7 bytes", "100 bytes", "last byte", "half", "gone", "past the end", "overlap", "I32", "F31", "BF16",
        "transposed", "negative", "overflow", "no c_fc", "no wte"])
def test_safetensors(train, work, damage, named):
    damage(work / "model")
    refused(train, work, {}, "model", *named)


@pytest.mark.parametrize("change, named", [
    ({"n_layer": "two"}, ["n_layer"]), ({"n_layer": None}, ["n_layer"]), ({"n_layer": 0}, ["'n_layer' is 0"]),
    ({"n_layer": 3}, ["h.2."]), ({"n_head": 5}, ["n_embd", "48", "n_head", "5"]), ({"n_embd": 1 << 40}, ["n_embd"]),
    ({"vocab_size": -1}, ["vocab_size"]), ({"n_positions": 32}, ["wpe.weight"]),
    ({"model_type": "mixtral"}, ["model_type", "mixtral"]), ({"activation_function": "relu"}, ["activation_function"]),
    ({"tie_word_embeddings": False}, ["tie_word_embeddings"]), ({"n_inner": 100}, ["n_inner"]),
    ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
    ({"layer_norm_epsilon": "1e-6"}, ["layer_norm_epsilon"]), ({"add_cross_attention": True}, ["add_cross_attention"]),
], ids=str)
def test_config(train, work, change, named):
    path = work / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(train, work, {"--data": "text"}, "model", *named)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"n_layer": 2', "\x00\x01"])
def test_config_that_is_no_json(train, work, text):
    (work / "model" / "config.json").write_text(text)
    refused(train, work, {}, "model/config.json")


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json",
                                  "shard.safetensors", "vocab.json", "merges.txt", "tokenizer.json"])
def test_files_that_are_none(train, work, name, kind):
    """A pipe without a writer, a device without an end, a file of a terabyte: none is waited for or read."""
    folder = work / "model"
    if name in ("vocab.json", "merges.txt"):
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator([], vocab_size=256, show_progress=False)
        bpe.save_model(str(folder))
    if "index" in name or name.startswith("shard"):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "shard.safetensors"}}')
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    error = train(*command({}), cwd=work, code=2).stderr.decode()
    assert error.startswith("train: ") and error.count("\n") == 1 and f"model/{name}: " in error


def test_damaged_tokenizer(train, work):
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        (work / "model" / name).write_text("{nonsense")
        refused(train, work, {}, "model/", "json")
    (work / "model" / "tokenizer.json").write_text('{"model": {"type": "WordPiece"}}')
    refused(train, work, {}, 'model/tokenizer.json: model type "WordPiece" is not supported')


def write_tokenizer(folder, tokens):
    model = {"vocab": {chr(ord("a") + i): i for i in range(tokens)}, "merges": []}
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "decoder": decoder}))


def test_a_tokenizer_larger_than_the_model(train, work):
    write_tokenizer(work / "model", 256)
    train(*command({}), cwd=work)
    write_tokenizer(work / "model", 257)
    refused(train, work, {}, "model: its tokenizer has 257 tokens and its model 256")


@pytest.mark.parametrize("model, named", [
    # The only way for a merge to lead to itself.
    ({"merges": [["a", "b"], ["ab", ""]]}, ["merge 1", "not a pair"]),
    ({"merges": [["a", "b"], ["", "ab"]]}, ["merge 1", "not a pair"]),
    ({"merges": [["a", "b"], ["a", "z"]]}, ["merge 1", '"z"', "not in the vocabulary"]),
    ({"merges": ["a b", "b a"]}, ["merge 1", '"ba"', "not in the vocabulary"]),
    ({"merges": None}, ["merges"]), ({"merges": 3}, ["merges"]), ({"merges": {"a": "b"}}, ["merges"]),
    ({"merges": [["a"]]}, ["merge 0"]), ({"merges": [3]}, ["merge 0"]),
    ({"vocab": None}, ["vocab"]), ({"vocab": {"a": 0, "b": 0}}, ["token 0 is given twice"]),
    ({"vocab": {"a": -1}}, ['"a"']), ({"vocab": {"a": 2**40}}, ['"a"']), ({"vocab": {"a": 1.5}}, ['"a"']),
    ({"dropout": 0.5}, ['"dropout" 0.5']), ({"type": "Unigram"}, ["Unigram"]),
], ids=str)
def test_merges_and_vocabulary(train_fp32, work, model, named):
    good = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": [["a", "b"]]}
    decoder = {"type": "Sequence", "decoders": [{"type": "Fuse"}]}
    path = work / "model" / "tokenizer.json"
    for merges in ([["a", "b"]], [["a", "b"], ["a", "b"]]):  # one given twice counts once
        path.write_text(json.dumps({"model": good | {"merges": merges}, "decoder": decoder}))
        train_fp32("--model", "model", "--steps", 0, "--prompt", "abc", "--sample", "tokens=1", cwd=work)
    path.write_text(json.dumps({"model": good | model, "decoder": decoder}))
    refused(train_fp32, work, {}, "model/tokenizer.json: ", *named)


def test_a_prompt_without_tokens(train, work):
    write_tokenizer(work / "model", 26)
    train(*command({"--prompt": "12 c"}), cwd=work)
    refused(train, work, {"--prompt": "12 45"}, "--prompt", "no token", "12 45")


# ---- models of other families

LAYER = "model.layers.1."
LLAMA = ("--family", "llama", "--layers", 2, "--heads", 4, "--kv-heads", 2, "--channels", 32, "--positions", 64)
PREPARED = {"llama": (*LLAMA, "--shard-size", "30KB"), "mistral": ("--family", "mistral", *LLAMA[2:], "--window", 8),
            "tied": (*LLAMA, "--tied"), "bloom": ("--family", "bloom", "--heads", 4, "--channels", 32)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    path = tmp_path_factory.mktemp("prepared")
    for name, options in PREPARED.items():
        make(path / name, *options)
    write_text(path / "text")
    return path


@pytest.fixture
def families(prepared, tmp_path):
    """Folders to damage; that of llama has shards."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_the_families_are_good(train, families):
    for name in PREPARED:
        error = train("--model", name, "--steps", 0, "--prompt", "x", "--sample", "tokens=1", cwd=families).stderr
        assert error == b""


SETTINGS = [
    ("llama", {"model_type": "mixtral"}, ["'model_type' is \"mixtral\"", "mistral"]),
    ("llama", {"model_type": "qwen2_moe"}, ["qwen2_moe"]),
    ("llama", {"model_type": ["llama"]}, ["'model_type' is [\"llama\"]"]),
    ("llama", {"num_local_experts": 8}, ["'num_local_experts' is 8"]),
    ("llama", {"num_attention_heads": 3, "head_dim": None}, ["hidden_size 32", "num_attention_heads 3"]),
    ("llama", {"num_key_value_heads": 3}, ["4 heads", "3 key/value heads"]),
    ("llama", {"num_hidden_layers": 2**40}, ["'num_hidden_layers' is 1099511627776"]),
    ("llama", {"num_hidden_layers": -2}, ["'num_hidden_layers' is -2"]),
    ("llama", {"hidden_size": 32.5}, ["'hidden_size' is 32.5"]),
    ("llama", {"intermediate_size": "96"}, ["'intermediate_size' is \"96\""]),
    ("llama", {"rms_norm_eps": -1e-5}, ["'rms_norm_eps' is -1e-05"]),
    ("llama", {"vocab_size": [256]}, ["'vocab_size' is [256]"]),
    ("llama", {"attention_bias": True}, ["'attention_bias' is true"]),
    ("llama", {"mlp_bias": True}, ["'mlp_bias' is true"]),
    ("llama", {"hidden_act": "gelu"}, ["'hidden_act' is \"gelu\""]),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, ["\"longrope\"", "linear"]),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, ["\"longrope\""]),
    ("llama", {"rope_scaling": {"type": "yarn"}}, ["'factor' is missing"]),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}}, ["'beta_fast' 1"]),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": "1"}}, ["'mscale' is \"1\""]),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": -1}}, ["'attention_factor' is -1"]),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}}, ["'truncate' is 1"]),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 0}}, ["'factor' is 0"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, ["'factor' is 0"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": -2}}, ["'factor' is -2"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": float("nan")}}, ["broken JSON"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, ["'factor' is \"2\""]),
    ("llama", {"rope_parameters": {"rope_theta": 0}}, ["'rope_theta' is 0"]),
    ("llama", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
     ["quantization_config", "fp4"]),
    ("tied", {"tie_word_embeddings": False}, ["lm_head.weight", "missing"]),
    ("mistral", {"sliding_window": 0}, ["'sliding_window' is 0"]),
    ("mistral", {"sliding_window": -4096}, ["'sliding_window' is -4096"]),
    ("mistral", {"sliding_window": 2.5}, ["'sliding_window' is 2.5"]),
    ("mistral", {"sliding_window": "all"}, ["'sliding_window' is \"all\""]),
    ("bloom", {"n_head": 3}, ["hidden_size 32", "n_head 3"]),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, ["apply_residual_connection_post_layernorm"]),
    ("bloom", {"tie_word_embeddings": False}, ["'tie_word_embeddings' is false"]),
]


@pytest.mark.parametrize("model, change, named", SETTINGS, ids=str)
def test_settings_of_families(train_fp32, families, model, change, named):
    path = families / model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(train_fp32, families, {"--model": model}, f"{model}", *named)


def test_an_adapter_is_no_model(train_fp32, families):
    """With and without the model's own config.json beside it."""
    (families / "tied" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for name in ("config.json", "model.safetensors"):
        refused(train_fp32, families, {"--model": "tied"}, "--model tied", "is an adapter", "--adapter")
        (families / "tied" / name).unlink()


INDEX = "model.safetensors.index.json"


def with_index(change):
    def damage(folder):
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def with_shard(change):
    """Damages the shard that has the second layer's q_proj."""

    def damage(folder):
        name = json.loads((folder / INDEX).read_text())["weight_map"][LAYER + "self_attn.q_proj.weight"]
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return damage


Q_PROJ = LAYER + "self_attn.q_proj.weight"
NORM = "model.norm.weight"


def another_shard(names):
    names[Q_PROJ] = next(file for file in names.values() if file != names[Q_PROJ])


@pytest.mark.parametrize("damage, named", [
    (with_index(another_shard), [Q_PROJ, "missing", INDEX]),
    (with_index(lambda names: names.update({Q_PROJ: "model-00009-of-00009.safetensors"})), ["model-00009", "No such"]),
    (with_index(lambda names: names.update({Q_PROJ: "../tied/model.safetensors"})), [Q_PROJ, "not the name of a file"]),
    (with_index(lambda names: names.update({Q_PROJ: "/etc/passwd"})), [Q_PROJ, "not the name of a file"]),
    (with_index(lambda names: names.update({Q_PROJ: ".."})), ["llama/..", "directory"]),
    (with_index(lambda names: names.update({Q_PROJ: ""})), ["llama/", "directory"]),
    (with_index(lambda names: names.update({Q_PROJ: "config.json"})), ["config.json"]),
    (with_index(lambda names: names.update({Q_PROJ: None})), [Q_PROJ, "not the name of a file"]),
    (with_index(lambda names: names.update({"model.layers.2.mlp.up_proj.weight": names[Q_PROJ]})),
     ["model.layers.2.mlp.up_proj.weight", "missing"]),
    (with_index(lambda names: names.pop(Q_PROJ)), [Q_PROJ, "missing"]),
    (lambda folder: (folder / INDEX).unlink(), ["neither model.safetensors nor", INDEX]),
    (lambda folder: (folder / INDEX).write_text('{"metadata": {}}'), [INDEX, "weight_map"]),
    (lambda folder: (folder / INDEX).write_text('{"weight_map": []}'), [INDEX, "weight_map"]),
    (with_shard(lambda tensors: tensors.pop(Q_PROJ)), [Q_PROJ, "missing"]),
    (with_shard(lambda tensors: tensors.update({Q_PROJ: torch.zeros(32, 16)})), [Q_PROJ, "[32, 16]", "[32, 32]"]),
    (with_shard(lambda tensors: tensors.update({Q_PROJ: torch.zeros(1024)})), [Q_PROJ, "[1024]", "[32, 32]"]),
    (with_shard(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].double()})), [Q_PROJ, "F64"]),
    (with_shard(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.uint8)})), [Q_PROJ, "U8"]),
], ids=["another shard", "no such shard", "outside", "absolute", "parent", "empty name", "no shard", "null",
        "one too many", "one too few", "no index", "no map", "list", "not in its shard", "shape", "rank", "F64", "U8"])
def test_shards_of_weights(train_fp32, families, damage, named):
    assert len(list((families / "llama").glob("*.safetensors"))) > 2
    damage(families / "llama")
    refused(train_fp32, families, {"--model": "llama"}, "llama", *named)


def generated(train, folder):
    """Generates, and returns the text with the messages on stderr."""
    ran = train("--model", folder, "--steps", 0, "--prompt", "To be", "--sample", "tokens=9,temperature=0")
    return ran.stdout, ran.stderr.decode()


def test_tensors_of_no_use(train_fp32, families):
    """They are ignored, as in transformers, and reported unless they are known to be harmless."""
    path = families / "tied" / "model.safetensors"
    tensors = load_file(path)
    before = generated(train_fp32, families / "tied")
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | harmless, path)
    assert generated(train_fp32, families / "tied") == before
    save_file(tensors | harmless | {"model.layers.2.mlp.up_proj.weight": torch.ones(3), "score.weight": torch.ones(2)},
              path)
    text, notes = generated(train_fp32, families / "tied")
    assert text == before[0] and notes.count("\n") == 1
    assert "tied: \"model.layers.2.mlp.up_proj.weight\" and 1 more tensors" in notes and "left out" in notes


def test_a_tied_head(train_fp32, families):
    """It may be in the files under either of its names or both, and is one matrix."""
    path = families / "tied" / "model.safetensors"
    tensors, before = load_file(path), generated(train_fp32, families / "tied")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": embedding}, path)
    assert generated(train_fp32, families / "tied") == before
    other = embedding.clone()
    other[255, 31] += 1
    save_file(tensors | {"lm_head.weight": other, "model.embed_tokens.weight": embedding}, path)
    refused(train_fp32, families, {"--model": "tied"}, "tied: lm_head.weight is not model.embed_tokens.weight",
            "tie_word_embeddings")
    save_file(tensors | {"lm_head.weight": other[:200].clone(), "model.embed_tokens.weight": embedding}, path)
    refused(train_fp32, families, {"--model": "tied"}, "lm_head.weight", "[200, 32]", "[256, 32]")
    save_file(tensors, path)
    refused(train_fp32, families, {"--model": "tied"}, "model.embed_tokens.weight", "missing")


# ---- saves


@pytest.fixture
def saved(work, train):
    """The folder with `out`, a save of two steps, in it."""
    train(*command({"--log": None}), cwd=work)
    return work


RESUME = {name: None for name in GOOD} | {"--steps": 4}


def test_resume_of_what_is_none(train, work):
    (work / "hollow").mkdir()
    for folder in ("hollow", "nowhere", "model", "text"):
        refused(train, work, RESUME | {"--resume": folder}, folder)


def test_resume_of_another_model(train, saved):
    make(saved / "deeper", *SMALL, "--layers", 3)
    make(saved / "fewer heads", *SMALL, "--heads", 2)
    for model in ("deeper", "fewer heads", "d2"):
        refused(train, saved, RESUME | {"--resume": "out", "--model": model}, "--resume out", model)


def test_resume_of_another_precision(train, saved):
    others = [other for other in binaries() if other.precision != train.precision]
    if not others:
        pytest.skip("TRAIN_BINARIES has one precision")
    refused(others[0], saved, RESUME | {"--resume": "out"}, "out", train.precision, others[0].precision)


@pytest.mark.parametrize("master", ["split", "none"])
def test_master_of_fp32_weights(train_fp32, work, master):
    refused(train_fp32, work, {"--state-formats master": master}, f"--state-formats master={master}", "fp32", "PRECISION=bf16")


@pytest.mark.parametrize("options", [{"--state-formats m": "8bit"}, {"--state-formats v": "bf16"}, {"--optimizer": "sgd"}], ids=str)
def test_resume_in_other_formats(train, saved, options):
    error = refused(train, saved, RESUME | {"--resume": "out"} | options, "out",
                    *(f"{name.split()[-1]}={value}" if " " in name else f"{name} {value}" for name, value in options.items()))
    assert "--optimizer adamw --state-formats master=fp32,m=fp32,v=fp32" in error


def test_resume_with_another_master(train_bf16, work):
    train_bf16(*command({"--log": None}), cwd=work)
    refused(train_bf16, work, RESUME | {"--resume": "out", "--state-formats master": "split"}, "out", "--state-formats master=split",
            "--state-formats master=fp32")


@pytest.mark.parametrize("damage, named", [
    (lambda state: state.pop("step"), "step"),
    (lambda state: state.update(step=-1), "step"),
    (lambda state: state.update(sequences="4"), "sequences"),
    (lambda state: state.update(precision="fp8"), "precision"),
    (lambda state: state.update(options=[]), "options"),
    (lambda state: state.update(formats=8), "formats"),
    (lambda state: state.update(evaluated=1), "evaluated"),
    (lambda state: state.update(others=[-1]), "others"),
    (lambda state: state.update(directory=3), "directory"),
    (lambda state: state.update(data={"--data": 3}), "data"),
    (lambda state: state["options"].update({"--batch": 3}), "--batch"),
    (lambda state: state["options"].update({"--batch": ["x"]}), "--batch"),
    (lambda state: state["options"].update({"--batch": []}), "--batch"),
], ids=["no step", "step", "sequences", "precision", "options", "formats", "evaluated", "others", "directory", "data",
        "number", "no number", "nothing"])
def test_resume_of_a_damaged_state(train, saved, damage, named):
    path = saved / "out" / "latest" / "trainer_state.json"
    state = json.loads(path.read_text())
    damage(state)
    path.write_text(json.dumps(state))
    refused(train, saved, RESUME | {"--resume": "out"}, named)


def test_resume_of_damaged_tensors(train, saved):
    path = saved / "out" / "latest" / "trainer_state.safetensors"
    tensors = load_file(path)
    path.write_bytes(path.read_bytes()[:-10])
    refused(train, saved, RESUME | {"--resume": "out"}, "trainer_state.safetensors")
    tensors.pop("v.ln_f.bias")
    save_file(tensors, path)
    refused(train, saved, RESUME | {"--resume": "out"}, "trainer_state.safetensors", "v.ln_f.bias")


def test_resume_where_data_is_gone(train, saved):
    (saved / "text").unlink()
    refused(train, saved, RESUME | {"--resume": "out"}, "--data", "text")


@pytest.mark.parametrize("options", [
    {"--log": "out/config.json"}, {"--log": "out/latest/trainer_state.json"}, {"--log": "out/step-00000002/log"},
    {"--timeline": "out/model.safetensors"}, {"--out": "out/latest/more"}, {"--out": "other", "--log": "out/.lock"}],
    ids=str)
def test_outputs_of_a_resume(train, saved, options):
    refused(train, saved, RESUME | {"--resume": "out"} | options, "part of ", *list(options.items())[-1])


LORA = {"--train": "lora", "--lora-rank": 2}


@pytest.mark.parametrize("options, said", [
    (LORA | {"--merge": "nowhere/"}, None), (LORA | {"--merge": "a/b/merged"}, None),
    (LORA | {"--merge": "text/merged"}, "--merge text/merged: cannot make the folder: Not a directory"),
    (LORA | {"--merge": "/proc/merged"}, "--merge /proc/merged: cannot make the folder: "),
    (LORA | {"--merge": "m" * 252}, "cannot make the folder: File name too long"),
    (LORA | {"--merge": "dangling"}, "--merge dangling: is there already"),
    (LORA | {"--merge": "out/step-00000002"}, "--merge out/step-00000002: is a part of out: "),
    (LORA | {"--merge": "log"}, "--merge log: is --log too"),
    (LORA | {"--base": "nf4", "--save-base": "text/base"}, "--save-base text/base: cannot make the folder: Not a directory"),
    (LORA | {"--base": "nf4", "--save-base": "dangling"}, "--save-base dangling: is there already"),
    (LORA | {"--base": "nf4", "--save-base": "same", "--merge": "same/"}, "is --merge too"),
], ids=str)
def test_folders_that_cannot_be_made(train_fp32, work, options, said):
    """Found before the training. A missing folder, or a slash after its name, is not a mistake."""
    (work / "dangling").symlink_to("nothing")
    if said:
        refused(train_fp32, work, options, said)
    else:
        train_fp32(*command(options), cwd=work)
        assert (work / options["--merge"] / "model.safetensors").exists()


@pytest.mark.parametrize("option", ["--log", "--timeline", "--loss-by-position"])
def test_a_fifo_as_an_output(train_fp32, work, option):
    """A FIFO without a reader is not waited for. With a reader, it gets the lines."""
    os.mkfifo(work / "fifo")
    options = {"--log": None, "--val-data": "text", option: "fifo"}
    refused(train_fp32, work, options, f"{option} fifo: is a FIFO that no process reads")
    with open(os.open(work / "fifo", os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        train_fp32(*command(options), cwd=work)
        assert json.loads(reader.read() if option == "--timeline" else reader.readline())


@pytest.mark.parametrize("name", ["fifo", "/dev/null", "text", "model"])
def test_a_calibration_replaces_no_other_file(train_fp32, work, name):
    os.mkfifo(work / "fifo")
    before = listing(work)
    error = train_fp32("--calibrate", name, cwd=work, code=2).stderr.decode()
    assert error.startswith(f"train: --calibrate {name}: ") and error.count("\n") == 1 and listing(work) == before


@pytest.mark.parametrize("target", ["nothing", "text"])
def test_a_lock_that_is_a_link(train_fp32, work, target):
    """The file that the link leads to is neither created nor emptied."""
    (work / "out").mkdir()
    (work / "out" / ".lock").symlink_to(f"../{target}")
    refused(train_fp32, work, {}, "--out out: out/.lock is a symbolic link")


def test_a_log_on_a_full_disk(train_fp32, work):
    """The training so far is saved."""
    error = train_fp32(*command({"--log": "/dev/full"}), cwd=work, code=2).stderr.decode()
    assert error == "train: --log /dev/full: No space left on device\n" and os.readlink(work / "out" / "latest") == "step-00000001"


def test_no_room_for_a_merge(train_fp32, work):
    """Neither for as many saves as exist at once, nor for both."""
    with small_disk(work / "disk", "1m") as disk:
        (disk / "filler").write_bytes(bytes(900_000))
        refused(train_fp32, work, LORA | {"--merge": "disk/merged"}, "--merge disk/merged: the merged model takes ", "KiB")
        refused(train_fp32, work, LORA | {"--out": "disk/out", "--save-every": 1, "--steps": 3, "--lora-rank": 4},
                "--out disk/out: a save takes ", "3 of them")
        (disk / "filler").write_bytes(bytes(730_000))
        refused(train_fp32, work, LORA | {"--out": "disk/out", "--merge": "disk/merged"}, "--merge disk/merged", " of --out, ")


def test_no_room_for_a_save(train, work):
    """Found before the training; an unfinished save is removed to make space."""
    with small_disk(work / "disk", "1m") as disk:
        (disk / "filler").write_bytes(bytes(700000))
        refused(train, work, {"--out": "disk/out"}, "--out disk/out: a save takes ", " KiB, and ", " KiB are free there")
        (disk / "out" / "step-00000007.tmp").mkdir(parents=True)
        (disk / "filler").rename(disk / "out" / "step-00000007.tmp" / "model.safetensors")
        train(*command({"--out": "disk/out"}), cwd=work)


def test_disk_full(train, work):
    """The save that does not fit is removed; the one before is complete, and another run can continue from
    it."""
    with small_disk(work / "disk", "2m") as disk:
        options = {"--out": "disk/out", "--save-every": 1, "--keep": 0, "--steps": 9, "--log": None}
        error = train(*command(options), cwd=work, code=2).stderr.decode()
        assert error.startswith("train: disk/out/step-") and error.count("\n") == 1 and "No space left" in error
        steps = sorted(path.name for path in (disk / "out").glob("step-*"))
        assert steps and len(steps) < 9 and os.readlink(disk / "out" / "latest") == steps[-1]
        train(*command({"--steps": len(steps), "--schedule": "cosine", "--resume": "disk/out", "--out": "elsewhere",
                        "--model": None}), cwd=work)
        assert saved_bytes(work / "elsewhere") == saved_bytes(disk / "out")


# ---- numbers that are not finite


def test_weights_that_are_no_numbers(train, work):
    with_tensors(lambda tensors: tensors["h.0.ln_1.weight"].fill_(float("nan")))(work / "model")
    error = train(*command({}), cwd=work, code=2).stderr.decode()
    assert error.startswith('train: model: tensor "h.0.ln_1.weight" has nan') and error.count("\n") == 1
    assert not (work / "out").exists()


def test_a_loss_that_is_no_number(train, work):
    """The run stops at once; the save from before is named and complete."""
    options = {"--lr": 1000, "--weight-decay": 1000, "--schedule": "constant", "--warmup": 0, "--save-every": 1,
               "--keep": 0, "--steps": 100, "--clip": 0}
    *dead, error = train(*command(options), cwd=work, code=2).stderr.decode().splitlines()
    assert all("far above" in line for line in dead), dead
    assert error.startswith("train: step ") and error.endswith("; the last good save: out/step-00000001"), error
    assert (work / "out" / "step-00000001" / "model.safetensors").exists()
    step = int(error.split()[2].rstrip(":")) - 1
    assert [line["step"] for line in read_log(work / "log")] == list(range(step))


# ---- the machine


def test_a_cpu_without_products_in_bf16(train_bf16, tmp_path):
    if train_bf16.device != "cpu":
        pytest.skip("of a CPU")
    ran = subprocess.run(train_bf16.command("--model", "d1", "--plan"), capture_output=True, text=True,
                         env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and "make PRECISION=fp32" in ran.stderr
