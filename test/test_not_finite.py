"""Numbers that are not finite are named, in weights of every format and in adapters. Saves of a training that
has gone wrong do not replace a good one."""

import json
import re
import shutil

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from trainer_runs import make, random_tokens, read_log, saved_bytes, write_shard

USUALLY = "fp32"  # see conftest.py

DATA = ("--data", "data.bin", "--batch", 2, "--seq-len", 32, "--sample", "tokens=0")
VALIDATION = ("--val-data", "data.bin", "--batch", 2, "--seq-len", 32, "--steps", 0)


@pytest.fixture(scope="module", name="folder")
def fixture_folder(tmp_path_factory):
    work = tmp_path_factory.mktemp("not_finite")
    make(work / "model", "--family", "llama", "--layers", 2, "--heads", 4, "--channels", 64, "--mlp-width", 96, "--vocab", 256,
         "--positions", 64)
    write_shard(work / "data.bin", random_tokens(256, 2000))
    return work


@pytest.fixture
def work(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def spoil(path, name, value, generator):
    """Writes a value somewhere into a tensor of a file."""
    tensors = load_file(path)
    tensors[name].view(-1)[int(generator.integers(tensors[name].numel()))] = value
    save_file(tensors, path, metadata={"format": "pt"})


def not_finite(train, work, *options, named=()):
    error = train(*options, cwd=work, code=2).stderr.decode()
    assert error.startswith("train: ") and error.count("\n") == 1, error
    for name in named:
        assert name in error, error
    return error


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("trained, file, tensor", [
    ((), "model.safetensors", "model.layers.1.mlp.up_proj.weight"), ((), "trainer_state.safetensors", "v.norm.weight"),
    (("--train", "lora", "--lora-rank", 2), "adapter_model.safetensors", None),
    (("--train", "lora", "--lora-rank", 2), "trainer_state.safetensors", None)], ids=["weights", "state", "adapter", "adapter's state"])
def test_a_save_that_is_resumed(train_fp32, work, trained, file, tensor, value):
    """The save from which it was copied, and in whose folder the run would go on, stays as it was. With steps left and without."""
    train_fp32("--model", "model", *DATA, *trained, "--steps", 2, "--out", "out", cwd=work)
    before = saved_bytes(work / "out")
    shutil.copytree(work / "out" / "latest", work / "copy")
    names = list(load_file(work / "copy" / file))
    named = tensor or next(name for name in names if file.startswith("adapter") or name.startswith("v."))
    assert named in names, names
    spoil(work / "copy" / file, named, value, np.random.default_rng(4))
    for steps in ((), ("--steps", 4)):
        error = train_fp32("--resume", "copy", *steps, cwd=work, code=2).stderr.decode().splitlines()[-1]  # after one about "out"
        assert error.startswith(f'train: copy/{file}: tensor "{named}" has a number that is not finite'), error
    assert saved_bytes(work / "out") == before


FORMATS = [(), ("--base", "nf4"), ("--base", "nf4-double"), ("--base", "all=8bit"), ("--base", "mlp=nf4,attention=8bit"),
           ("--base", "all=bf16"), ("--base", "head=nf4"), ("--base", "head=8bit"), ("--offload", "weights=disk"), ("--offload", "embeddings=disk")]


@pytest.mark.parametrize("options", FORMATS, ids=str)
def test_a_weight(train_fp32, work, options):
    """In a linear layer's weight, and in the head's."""
    generator = np.random.default_rng(FORMATS.index(options))
    whole = load_file(work / "model" / "model.safetensors")
    for name in (generator.choice([name for name in whole if "proj" in name]), "lm_head.weight"):
        spoil(work / "model" / "model.safetensors", name, generator.choice([np.nan, np.inf, -np.inf]), generator)
        lora = ("--model", "model", "--train", "lora", *DATA, "--steps", 2, *options)
        not_finite(train_fp32, work, *lora, "--out", "out", named=(name,))
        not_finite(train_fp32, work, "--model", "model", *VALIDATION, *options, named=(name,))
        if "nf4" in options or "nf4-double" in options:
            not_finite(train_fp32, work, *lora, "--save-base", "base", named=(name,))
        assert not (work / "base").exists() and not (work / "out").exists()
        save_file(whole, work / "model" / "model.safetensors", metadata={"format": "pt"})


def test_scales_of_nf4(train_fp32, work):
    generator = np.random.default_rng(1)
    for base, scales in (("nf4", "absmax"), ("nf4-double", "nested_absmax")):
        train_fp32("--model", "model", "--train", "lora", *DATA, "--steps", 1, "--base", base, "--save-base", base, cwd=work)
        path = work / base / "model.safetensors"
        name = generator.choice([name for name in load_file(path) if name.endswith("." + scales)])
        spoil(path, name, np.nan, generator)
        for more in ((), ("--offload", "weights=disk")):
            not_finite(train_fp32, work, "--model", base, *VALIDATION, *more, named=(name,))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_scales_of_a_gguf(train_fp32, work, kind):
    """In the scales of a matrix's blocks; the half that is changed is a block's last one."""
    make(work / "wide", "--family", "llama", "--layers", 1, "--heads", 4, "--channels", 256, "--mlp-width", 256, "--vocab", 256,
         "--positions", 64)
    write_gguf(work / "m.gguf", transformers.AutoModelForCausalLM.from_pretrained(work / "wide", dtype=torch.float32), "llama",
               types=[kind])
    tensor = next(t for t in gguf.GGUFReader(work / "m.gguf").tensors if t.name == "blk.0.ffn_up.weight")
    width = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
    at = int(tensor.data_offset) + 3 * width + {"Q8_0": 0, "Q4_1": 2}[kind]
    content = bytearray((work / "m.gguf").read_bytes())
    content[at:at + 2] = np.float16(np.nan).tobytes()
    (work / "m.gguf").write_bytes(content)
    for more in ((), ("--offload", "weights=disk")):
        not_finite(train_fp32, work, "--model", "m.gguf", *VALIDATION, *more, named=("m.gguf", "ffn_up.weight"))


def test_adapters(train_fp32, work):
    """Such adapters are neither used nor merged, and neither is a merge of finite numbers whose result is not
    finite."""
    generator = np.random.default_rng(2)
    for kind in ("lora", "prompt"):
        train_fp32("--model", "model", "--train", kind, *DATA, "--steps", 1, "--out", kind, cwd=work)
        path = work / kind / "adapter_model.safetensors"
        good = load_file(path)
        name = generator.choice(list(good))
        spoil(path.resolve(), name, np.nan, generator)
        for run in (("--model", "model", "--adapter", kind), ("--resume", kind)):
            not_finite(train_fp32, work, *run, "--steps", 0, *(("--merge", "merged") if kind == "lora" else VALIDATION),
                       named=(name, "adapter_model.safetensors"))
    train_fp32("--model", "model", "--train", "lora", *DATA, "--steps", 1, "--out", "large", cwd=work)
    path = (work / "large" / "adapter_model.safetensors").resolve()
    save_file({name: torch.full_like(t, 3e19) for name, t in load_file(path).items()}, path, metadata={"format": "pt"})
    not_finite(train_fp32, work, "--model", "model", "--adapter", "large", "--steps", 0, "--merge", "merged", named=("--merge", "inf"))
    assert not (work / "merged").exists()


def test_a_validation_and_a_sample(train_fp32, work):
    """The weights are finite, and the computation overflows."""
    path = work / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: t * (1e30 if "down_proj" in name or "up_proj" in name else 1) for name, t in tensors.items()}, path,
              metadata={"format": "pt"})
    not_finite(train_fp32, work, "--model", "model", *VALIDATION, "--log", "log", named=("validation loss is",))
    assert not read_log(work / "log")
    not_finite(train_fp32, work, "--model", "model", "--steps", 0, "--prompt", "a", named=("sample", "nan"))


def test_the_last_good_save_stays(train, work):
    """A learning rate destroys the model: its later saves are not good and do not replace a good one."""
    run = ("--model", "model", *DATA, "--optimizer", "sgd", "--schedule", "constant", "--warmup", 0, "--clip", 0, "--save-every", 1,
           "--keep", 1, "--out", "out")
    good = train(*run, "--lr", 0.1, "--steps", 3, cwd=work)
    assert b"last good" not in good.stdout + good.stderr
    assert [path.name for path in sorted((work / "out").glob("step-*"))] == ["step-00000003"]
    first = json.loads((work / "out" / "trainer_state.json").read_text())["first_loss"]
    result = train("--resume", "out", "--lr", 30, "--steps", 6, "--log", "log", cwd=work)
    losses = {line["step"]: line["loss"] for line in read_log(work / "log") if "loss" in line}
    bad = [step for step, loss in losses.items() if loss > first + max(1, first)]
    last_good = max(step for step in {3, *losses} - set(bad) if step + 1 not in bad)
    assert bad and max(bad) == 6 > last_good
    assert last_good == 3 or f"saved step {last_good}" in result.stdout.decode()
    error = result.stderr.decode()
    assert re.search(rf"^out/step-0*{last_good + 1} is not good, as the step after it has a loss of .*, far above the .* of the first "
                     rf"step; the last good save: out/step-0*{last_good}, which out shows$", error, re.MULTILINE), error
    train("--model", "out", *VALIDATION, "--log", "val", cwd=work)
    assert [line["val_loss"] < first + 0.5 for line in read_log(work / "val")] == [True]
    kept = {path.name for path in (work / "out").glob("step-*")}
    assert kept == {f"step-{last_good:08}", "step-00000006"}
    assert result.stderr.decode().endswith(f"; the last good save: out/step-{last_good:08}, which out shows\n")
    state = json.loads((work / "out" / "step-00000006" / "trainer_state.json").read_text())
    assert state["last_good"] == last_good and state["first_loss"] == first
    lines = train("--resume", "out/step-00000006", "--lr", 1000, "--steps", 90, cwd=work, code=2).stderr.decode().splitlines()
    assert f"out/step-00000006: step 6 was not good when it was saved; the last good save: out/step-{last_good:08}" in lines
    error = lines[-1]
    assert re.fullmatch(rf"train: step \d+: the loss is .*; the last good save: out/step-{last_good:08}", error)
    assert (work / "out" / f"step-{last_good:08}" / "model.safetensors").exists()


def test_a_save_whose_last_update_destroyed_the_model(train, work):
    """Its own loss was good. The save before is still there, is named when a loss is not finite, and is continued."""
    run = ("--model", "model", *DATA, "--optimizer", "sgd", "--schedule", "constant", "--warmup", 0, "--clip", 0, "--save-every", 1,
           "--keep", 1, "--out", "out")
    train(*run, "--lr", 0.1, "--steps", 3, cwd=work)
    lines = train("--resume", "out", "--lr", 1000, "--weight-decay", 1000, "--steps", 99, cwd=work, code=2).stderr.decode().splitlines()
    assert re.fullmatch(r"out/step-00000004 is not good, as the step after it has a (loss of|gradient).*; the last good save: "
                        "out/step-00000003, which out shows", lines[0])
    newest = int(re.fullmatch(r"train: step (\d+): the loss is .*; the last good save: out/step-00000003", lines[-1])[1]) - 1
    assert {path.name for path in (work / "out").glob("step-*")} == {"step-00000003", f"step-{newest:08}"}
    result = train(*run, "--lr", 0.1, "--steps", 5, "--resume", "auto", cwd=work)
    assert b"resuming out at step 3\n" in result.stdout
    assert result.stderr.decode() == (f"--resume out: step {newest} was not good when it was saved; going on from the last good save, "
                                      "step-00000003\n")
    assert [path.name for path in (work / "out").glob("step-*")] == ["step-00000005"]
    train(*run[:-1], "whole", "--lr", 0.1, "--steps", 5, cwd=work)
    assert saved_bytes(work / "out") == saved_bytes(work / "whole")


def test_the_last_good_save_is_continued(train, work):
    """The wrong data make the later saves bad. The folder shows the last good one, from which the run continues as if
    nothing had happened."""
    write_shard(work / "calm.bin", np.full(2000, 7))
    calm = ("--data", "calm.bin", *DATA[2:], "--schedule", "constant", "--warmup", 0)
    train("--model", "model", *calm, "--lr", 0.01, "--steps", 40, "--out", "base", cwd=work)
    run = ("--model", "base", *calm, "--lr", 1e-3, "--save-every", 1, "--keep", 2)
    train(*run, "--steps", 2, "--out", "out", cwd=work)
    error = train("--resume", "out", "--data", "data.bin", "--steps", 6, cwd=work).stderr.decode()
    assert error.count("; the last good save: out/step-00000002, which out shows\n") == 4
    kept = sorted(path.name for path in (work / "out").glob("step-*"))
    assert kept == ["step-00000002", "step-00000005", "step-00000006"]
    assert (work / "out" / "latest").readlink().name == "step-00000002"

    said = " out: step 6 was not good when it was saved; going on from the last good save, step-00000002\n"
    for option in ("--model", "--resume"):
        prompt = ("--steps", 0, "--prompt", "a", "--sample", "tokens=9", "--seed", 1)
        shown, good = (train(option, folder, *prompt, cwd=work) for folder in ("out", "out/step-00000002"))
        assert shown.stdout == good.stdout and shown.stderr.decode() == option + said + good.stderr.decode()

    # A bad save stays bad when it is saved again before it has made a step.
    error = train("--resume", "out/step-00000006", "--steps", 6, "--out", "copy", cwd=work).stderr.decode()
    assert "copy/step-00000006 is of a step with a loss or a gradient that was not good when it was saved before" in error
    assert json.loads((work / "copy" / "trainer_state.json").read_text())["last_good"] is None

    result = train(*run, "--steps", 4, "--out", "out", "--resume", "auto", cwd=work)
    assert b"resuming out at step 2\n" in result.stdout and result.stderr.decode() == "--resume" + said
    assert sorted(path.name for path in (work / "out").glob("step-*")) == ["step-00000003", "step-00000004"]
    train(*run, "--steps", 4, "--out", "whole", cwd=work)
    assert saved_bytes(work / "out") == saved_bytes(work / "whole")


def test_a_gradient_of_zero_is_not_good(train, work):
    """All weights are zero, and so are all gradients; the loss is finite."""
    path = work / "model" / "model.safetensors"
    save_file({name: torch.zeros_like(t) for name, t in load_file(path).items()}, path, metadata={"format": "pt"})
    run = ("--model", "model", *DATA, "--steps", 2, "--save-every", 1, "--keep", 1, "--out", "out")
    result = train(*run, "--log", "log", cwd=work)
    assert [line["grad_norm"] for line in read_log(work / "log")] == [0, 0]
    assert "out/step-00000002 is of a step with a gradient of zero; the last good save: none" in result.stderr.decode()
    assert json.loads((work / "out" / "trainer_state.json").read_text())["last_good"] is None
    result = train("--resume", "out", "--steps", 3, cwd=work)
    assert "out: step 2 was not good when it was saved; the last good save: none" in result.stderr.decode()
