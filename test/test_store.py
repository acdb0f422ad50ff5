"""Matrices that are stored in fewer bits than the build computes with, selected by name (--base)."""

import json

import bitsandbytes
import peft
import pytest
from adapter_files import OPTIONS, make_adapter, trained, validated
from model_files import DATA, linked, prepare
from quantized_models import dequantized_head, floats_of, one_thread
from safetensors.torch import load_file, save_file
from trainer_runs import refused, saved_bytes

USUALLY = "fp32"  # see conftest.py

WIDTHS = {
    "gpt2": ("--heads", 3, "--channels", 96),
    "llama": ("--heads", 6, "--kv-heads", 2, "--channels", 96, "--mlp-width", 160),
    "bloom": ("--heads", 6, "--channels", 96),
}
STORED = [("all=bf16",), ("mlp=nf4",), ("attention=8bit", "mlp=nf4-double"), ("all=nf4", "attention=bf16"),
          ("all=8bit", "mlp.down_proj=bf16", "mlp.c_proj=bf16", "mlp.dense_4h_to_h=bf16")]


def kept(w, kind, by_outputs):
    """The value of a matrix that is stored in this format."""
    if kind == "bf16":
        return w.bfloat16().float()
    w = w if by_outputs else w.T.contiguous()
    if kind == "nf4":
        with one_thread():
            w = floats_of(*bitsandbytes.functional.quantize_4bit(w, quant_type="nf4", blocksize=64, compress_statistics=False))
    else:
        w = dequantized_head(w, "8bit" if kind == "8bit" else "nf4")
    return w if by_outputs else w.T.contiguous()


def write_plain(work, stored, by_outputs, narrow):
    """Writes the model with the values of its stored matrices; returns the bytes of all of them in these
    formats."""
    tensors = {name: t.float() for path in (work / "model").glob("*.safetensors") for name, t in load_file(path).items()}
    formats = dict(text.split("=") for text in stored)
    seen = set()
    for name, w in tensors.items():
        if w.dim() != 2 or not name.endswith(".weight") or not any(part in f".{name}" for part in (".h.", ".layers.")):
            continue
        groups = ("all", "mlp" if ".mlp." in name else "attention", name.removesuffix(".weight"))
        for target, kind in formats.items():
            if target in groups or groups[2].endswith("." + target):
                tensors[name] = kept(w.bfloat16().float() if narrow else w, kind, by_outputs)
                seen.add(target)
    assert seen == {t for t in formats if "." not in t} | {t for t in formats if "." in t and any(t in n for n in tensors)}
    (work / "plain").mkdir()
    save_file(tensors, work / "plain" / "model.safetensors", metadata={"format": "pt"})
    (work / "plain" / "config.json").write_text((work / "model" / "config.json").read_text())


@pytest.fixture(scope="module", params=WIDTHS)
def folder(request, tmp_path_factory):
    work = prepare(tmp_path_factory.mktemp(request.param), request.param, WIDTHS)
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM",
                                       fan_in_fan_out=request.param == "gpt2"))
    (work / "family").write_text(request.param)
    return work


@pytest.fixture
def work(folder, tmp_path):
    return linked(tmp_path, folder, "adapter", "family")


@pytest.mark.parametrize("stored", STORED, ids=",".join)
def test_losses_are_those_of_what_is_kept(train, work, stored):
    """Computed by torch, bitsandbytes and PyPI's gguf. Layers that a family does not have are not named."""
    family = (work / "family").read_text()
    names = {"gpt2": "c_", "llama": "down_proj", "bloom": "dense"}[family]
    stored = tuple(s for s in stored if "." not in s or names in s)
    write_plain(work, stored, family != "gpt2", train.precision == "bf16")
    options = ("--adapter", "adapter", "--model")
    plain = validated(train, work, *options, "plain")
    bound = 1e-5 if train.precision == "fp32" else 4e-3
    assert validated(train, work, *options, "model", "--base", ",".join(stored)) == pytest.approx(plain, rel=0, abs=bound)
    assert validated(train, work, *options, "model", "--base", ",".join(stored), "--merge", "merged") == pytest.approx(
        validated(train, work, "--model", "merged"), rel=0, abs=bound)
    if train.precision == "fp32" and any("nf4" in s for s in stored):
        assert abs(plain - validated(train, work, *options, "model")) > 1e-4  # its effect is visible


def test_training_and_resume(train, work):
    options = ("--base", "mlp=nf4,attention=bf16")
    first = trained(train, work, "none", "--recompute", "none", *options)
    assert first == trained(train, work, "block", "--recompute", "block", *options)
    train(*DATA, "--adapter", "adapter", *options, "--steps", 4, "--save-every", 2, "--keep", 0, "--out", "out", "--sample", "tokens=0", cwd=work)
    whole = saved_bytes(work / "out" / "step-00000004")
    train("--resume", "out/step-00000002", cwd=work)
    assert saved_bytes(work / "out" / "step-00000004") == whole


def test_a_base_is_a_format_for_all(train, work):
    assert trained(train, work, "a", "--base", "nf4") == trained(train, work, "b", "--base", "all=nf4")


def test_the_plan_says_what_is_saved(train, work):
    def plan(*options):
        return json.loads(train(*DATA, "--train", "lora", "--steps", 1, *options, "--plan", "json", cwd=work).stdout)

    config = json.loads((work / "model" / "config.json").read_text())
    layers, width = config.get("num_hidden_layers") or config["n_layer"], 4 if train.precision == "fp32" else 2
    of_llama = 96 * (96 + 64) + 96 * 96 + 3 * 96 * 160
    elements = layers * (of_llama if (work / "family").read_text() == "llama" else 12 * 96 * 96)
    reports = plan(), plan("--base", "all=8bit")
    assert reports[1]["stored"]["saved_bytes"] == elements * width - elements // 32 * 34
    assert reports[1]["stored"]["widening_seconds"] > 0 and "stored" not in reports[0]
    gained = reports[0]["totals"]["weights"] - reports[1]["totals"]["weights"]
    # Equal except for alignment.
    assert abs(gained - reports[1]["stored"]["saved_bytes"]) <= 1024 * 4 * layers * width


BAD = [
    ({"--base": "mlp"}, "--base mlp"), ({"--base": "mlp=int3"}, "fp32, bf16, 8bit"), ({"--base": "=bf16"}, "--base =bf16"),
    ({"--base": "nothing=bf16"}, "--base nothing"),
    ({"--base": "all=8bit"}, "60 columns"), ({"--base": "all=bf16", "--train": None}, "not trained"),
    ({"--base": "all=bf16", "--offload weights": "disk"}, "--save-base DIR"), ({"--base": "all=bf16", "--save-base": "b"}, "--save-base"),
]


@pytest.mark.parametrize("options, named", BAD, ids=str)
def test_what_cannot_be_kept_is_refused(train, tmp_path, options, named):
    prepare(tmp_path, "llama", OPTIONS)
    refused(train, tmp_path, {"--model": "model", "--data": "data.bin", "--train": "lora"} | options, named)


def test_a_narrow_build_stores_no_more(train_bf16, tmp_path):
    prepare(tmp_path, "llama", OPTIONS)
    refused(train_bf16, tmp_path, {"--model": "model", "--data": "data.bin", "--train": "lora", "--base": "mlp=fp32"}, "computes in bf16")
