"""A mistake in an option is reported in one line that names what is wrong, with exit code 2, and nothing is written."""

import shutil

import pytest
from bad_input_models import cut, given, work
from trainer_runs import command, read_log, refused, saved_bytes

USUALLY = "fp32"  # see conftest.py


@pytest.mark.quick
def test_the_good_options_are_good(train, work):
    train(*command({}), cwd=work)
    assert len(read_log(work / "log")) == 3 and saved_bytes(work / "out")


NUMBERS = {  # an option, and values below and above its range
    "--batch": (0, 1 << 31), "--chunk-rows head": (-1, 1 << 31), "--seq-len": (0, 1 << 31), "--grad-accum": (0, 1 << 31), "--steps": (-1, "1e13"),
    "--lr": (-1e-9, "inf"), "--min-lr": (-1, "inf"), "--warmup": (-1, "1e13"), "--weight-decay": (-1, "inf"),
    "--optimizer beta1": (-0.1, 1), "--optimizer beta2": (-0.1, 1), "--optimizer eps": (0, "inf"), "--clip": (-1, "inf"), "--seed": (-1, 1 << 64),
    "--print-every": (-1, "1e13"), "--eval-every": (-1, "1e13"), "--eval-batches": (0, 1 << 31), "--threads": (-1, 5000),
    "--sample every": (-1, "1e13"), "--sample tokens": (-1, 1 << 31), "--sample temperature": (-1, "inf"),
    "--sample top-k": (-1, 1 << 31), "--save-every": (-1, "1e13"), "--keep": (-1, 1 << 31)}


@pytest.mark.quick
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


