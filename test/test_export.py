"""Exported GGUF files: their tensors and keys are those of llama.cpp's converter and quantizer, and the trainer, transformers
and llama.cpp read them."""

import ctypes
import importlib.util
import json
import os
import random
import re
import struct
import time
import urllib.request

import gguf
import known_tokenizers as known
import numpy as np
import peft
import pytest
import tokenizers
import torch
import transformers
from adapter_files import make_adapter, validated
from conftest import MORE
from gguf_files import as_gguf
from model_files import GEMMA3_ROPE, GRANITE, LINEAR, LLAMA3, LONGROPE, MINISTRAL3, TRAINED_ON_60, VOCAB, YARN
from reference_runs import open_with_transformers
from safetensors.torch import load_file, save_file
from trainer_runs import formats_probe, make, random_tokens, refused, running, small_disk, taken_and_planned, wait_for_line, write_shard, write_text

USUALLY = "fp32"
SMALL = ("--heads", 4, "--channels", 64)
GROUPED = (*SMALL, "--kv-heads", 2, "--mlp-width", 256)
MODELS = {
    "gpt2": SMALL,
    "llama": GROUPED,
    "llama-tied": (*GROUPED, "--tied", "--rope", LLAMA3),
    "llama-wide": ("--heads", 4, "--kv-heads", 2, "--channels", 256, "--mlp-width", 512, "--rope", LINEAR),
    "llama-odd": ("--heads", 3, "--channels", 48, "--mlp-width", 92),
    "mistral": (*GROUPED, "--rope", YARN),
    "qwen2": (*GROUPED, "--tied"),
    "qwen3": (*GROUPED, "--head-size", 32),
    "smollm3": (*GROUPED, "--tied"),
    "phi3": ("--heads", 4, "--channels", 96, "--kv-heads", 2, "--mlp-width", 128, "--rope", LONGROPE, "--config", TRAINED_ON_60),
    "ministral3": (*GROUPED, "--rope", MINISTRAL3),
    "granite": (*GROUPED, "--tied", "--config", GRANITE),
    "gemma": (*GROUPED, "--head-size", 32, "--tied"),
    "gemma2": (*GROUPED, "--head-size", 32, "--tied", "--window", 9,
               "--config", '{"query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}'),
    "gemma3_text": (*GROUPED, "--layers", 6, "--head-size", 32, "--tied", "--window", 9, "--config", '{"query_pre_attn_scalar": 32}',
                    "--rope", GEMMA3_ROPE.replace("50.0", "10000.0")),
    "olmo2": GROUPED,
    "bloom": SMALL,
}
TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "iq4_nl": 25, "q4_k_s": 14, "q4_k_m": 15,
         "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18}
ARCHITECTURES = {"mistral": "llama", "ministral3": "mistral3", "gemma3_text": "gemma3"}
PERMUTED = ("llama", "mistral3", "smollm3", "granite")  # architectures whose converter is that of Llama
ROPE_TENSORS = {"llama-tied": {"rope_freqs.weight"}, "phi3": {"rope_factors_long.weight", "rope_factors_short.weight"}}
FEWER_TYPES = ("smollm3", "phi3", "ministral3", "granite", "gemma", "gemma2", "gemma3_text", "olmo2")
LAYERS = 4


def prepare(path, name, dtype="bf16"):
    make(path / "model", "--family", name.split("-")[0], "--layers", LAYERS, "--vocab", VOCAB, "--positions", 64, "--dtype", dtype,
         *MODELS[name])
    write_shard(path / "data.bin", random_tokens(VOCAB, 3000))
    return path


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """The folder of a model, which no test changes."""
    return request.param, prepare(tmp_path_factory.mktemp(request.param), request.param)


def export(train, work, name, *options, of="model", type_=None, **more):
    """Exports a model without training, and returns what was printed to stderr."""
    keys = "".join(f",{key}={value}" for key, value in ({"type": type_} if type_ else {}).items() | more.items())
    return train("--model", of, *options, "--steps", 0, "--export", name + keys, cwd=work).stderr.decode()


def keys_of(path):
    """PyPI's gguf takes many seconds to read a vocabulary of 150,000 tokens; test_keys_are_those_that_gguf_reads compares it."""
    data = memoryview(path.read_bytes())
    assert bytes(data[:8]) == b"GGUF\3\0\0\0"
    at = 16

    def number(kind):
        nonlocal at
        (value,) = struct.unpack_from("<" + kind, data, at)
        at += struct.calcsize("<" + kind)
        return value

    def text():
        nonlocal at
        length = number("Q")
        at += length
        return str(data[at - length:at], "utf-8")

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            of = number("I")
            return [value(of) for _ in range(number("Q"))]
        return number("BbHhIif?__Qqd"[kind])

    return {text(): value(number("I")) for _ in range(number("Q"))}


def test_keys_are_those_that_gguf_reads(train_fp32, model):
    name, work = model
    export(train_fp32, work, "keys.gguf")
    read = {key: f.contents() for key, f in gguf.GGUFReader(work / "keys.gguf").fields.items() if not key.startswith("GGUF.")}
    assert keys_of(work / "keys.gguf") == read and len(read) > 10
    (work / "keys.gguf").unlink()


def tensors_of(path):
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def floats_of(path):
    return {name: gguf.quants.dequantize(t.data, t.tensor_type).reshape([*map(int, t.shape[::-1])])
            for name, t in tensors_of(path).items()}


def wanted_tensors(folder):
    """A model's tensors in fp32, under their names and with their rows as in a GGUF."""
    model = open_with_transformers(folder).float()
    arch = ARCHITECTURES.get(model.config.model_type, model.config.model_type)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, tensors = gguf.get_tensor_name_map(number, model.config.num_hidden_layers), {}
    for name, w in model.state_dict().items():
        if name == "lm_head.weight" and (model.config.tie_word_embeddings or arch in ("gpt2", "bloom")):
            continue
        if re.search(r"\.c_(attn|proj|fc)\.weight", name):
            w = w.T
        name, w = as_gguf(name, w.numpy(), model.config, names)
        tensors[name] = np.ascontiguousarray(w)
    return tensors


def wanted_type(kind, name, columns, tied):
    """The type of a matrix, as llama-quantize chooses it (src/llama-quant.cpp)."""
    if kind in ("f32", "f16", "bf16", "q8_0"):
        return kind.upper() if kind != "q8_0" or columns % 32 == 0 else "F16"
    base = kind.upper().removesuffix("_S").removesuffix("_M")
    block = 256 if "_K" in base else 32
    layer = re.match(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down)", name)
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        base = "Q8_0" if columns % block else "Q6_K"
    elif kind in ("q4_k_m", "q5_k_m") and layer:
        i = int(layer[1])
        if i < LAYERS // 8 or i >= 7 * LAYERS // 8 or (i - LAYERS // 8) % 3 == 2:
            base = "Q6_K"
    elif kind == "q4_k_s" and layer and layer[2] != "ffn_down" and int(layer[1]) < 4:
        base = "Q5_K"
    if "_K" in base and columns % 256:
        base = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}[base]
    return "F16" if columns % 32 else base


def ggml():
    """ggml's own quantizers, from a package that brings llama.cpp; None without it."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None:
        return None
    library = ctypes.CDLL(spec.submodule_search_locations[0] + "/xllamacpp.abi3.so", mode=os.RTLD_LAZY)
    library.ggml_quantize_chunk.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def quantized(w, kind):
    """The bytes of a matrix in this type; None if there is no package that knows them."""
    if "_K" not in kind.name and kind.name != "IQ4_NL":
        return gguf.quants.quantize(w, kind)
    library, block, size = ggml(), *gguf.GGML_QUANT_SIZES[kind]
    if library is None:
        return None
    out = np.zeros((w.shape[0], w.shape[1] // block * size), np.uint8)
    assert library.ggml_quantize_chunk(int(kind), w.ctypes.data, out.ctypes.data, 0, *w.shape, None) == out.nbytes
    return out


@pytest.mark.parametrize("kind", TYPES)
def test_tensors(train_fp32, model, kind):
    """Names, shapes, rows, types and bytes."""
    name, work = model
    if name in FEWER_TYPES and kind not in ("f32", "q8_0"):
        pytest.skip("types do not depend on the family")
    export(train_fp32, work, f"{kind}.gguf", type_=kind.upper())
    ours, wanted = tensors_of(work / f"{kind}.gguf"), wanted_tensors(work / "model")
    tied = "output.weight" not in wanted
    assert ours.keys() == wanted.keys() | ROPE_TENSORS.get(name, set())
    for key, w in wanted.items():
        stays = w.ndim == 1 or key == "position_embd.weight"
        type_ = gguf.GGMLQuantizationType["F32" if stays else wanted_type(kind, key, w.shape[-1], tied)]
        assert (ours[key].tensor_type.name, tuple(ours[key].shape[::-1])) == (type_.name, w.shape), key
        expected = quantized(w, type_)
        if expected is None:  # without llama.cpp: as near as its formats are
            near = gguf.quants.dequantize(ours[key].data, type_)
            assert np.abs(near - w).max() < 0.1 * np.abs(w).max(), key
        else:
            np.testing.assert_array_equal(ours[key].data.view(np.uint8).ravel(), expected.view(np.uint8).ravel(), key)
    assert not (work / f"{kind}.gguf.tmp").exists()


def test_keys(train_fp32, model):
    """Those that llama.cpp's converter writes for such a config.json."""
    name, work = model
    said = export(train_fp32, work, "keys.gguf", type_="q4_k_m")
    keys, config = keys_of(work / "keys.gguf"), json.loads((work / "model/config.json").read_text())
    family = config["model_type"]
    arch = ARCHITECTURES.get(family, family)
    width, heads = config.get("hidden_size", config.get("n_embd")), config.get("num_attention_heads", config.get("n_head"))
    wanted = {"general.architecture": arch, "general.type": "model", "general.name": "Model", "general.file_type": 15,
              "general.quantization_version": 2, f"{arch}.block_count": config.get("num_hidden_layers", LAYERS), f"{arch}.embedding_length": width,
              f"{arch}.attention.head_count": heads, "tokenizer.ggml.model": "none", f"{arch}.vocab_size": VOCAB,
              f"{arch}.feed_forward_length": config.get("intermediate_size", 4 * width),
              f"{arch}.context_length": config.get("seq_length", width) if family == "bloom" else 64}
    if family in ("gpt2", "bloom"):
        wanted[f"{arch}.attention.layer_norm_epsilon"] = np.float32(1e-5)
    else:
        size = config.get("head_dim") or width // heads
        wanted |= {f"{arch}.attention.head_count_kv": config["num_key_value_heads"], f"{arch}.attention.key_length": size,
                   f"{arch}.attention.value_length": size, f"{arch}.attention.layer_norm_rms_epsilon": np.float32(1e-5),
                   f"{arch}.rope.freq_base": 500.0 if name in ("llama-wide", "gemma3_text") else 10000.0}
    if family == "bloom":
        wanted["bloom.attention.head_count_kv"] = heads
    if arch in PERMUTED:
        wanted[f"{arch}.rope.dimension_count"] = size
    scaling = {"llama-wide": {"type": "linear", "factor": 3.0}, "gemma3_text": {"type": "linear", "factor": 3.0},
               "mistral": {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 32.0,
                           "yarn_beta_slow": 1.0},
               "ministral3": {"type": "yarn", "factor": 4.0, "original_context_length": 8, "yarn_beta_fast": 32.0,
                              "yarn_beta_slow": 1.0, "yarn_log_multiplier": 1.0},
               "phi3": {"original_context_length": 60, "attn_factor": np.float32(np.sqrt(1 + np.log(64 / 60) / np.log(60)))}}
    wanted |= {f"{arch}.rope.scaling.{key}": value for key, value in scaling.get(name, {}).items()}
    more = {"ministral3": {"attention.temperature_scale": np.float32(0.3)}, "phi3": {"rope.dimension_count": 18, "attention.sliding_window": 0},
            "gemma2": {"attention.sliding_window": 9, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
            "gemma3_text": {"attention.sliding_window": 9},
            "granite": {"attention.scale": np.float32(0.1), "embedding_scale": 3.0, "residual_scale": np.float32(0.22),
                        "logit_scale": np.float32(1.7)}}
    wanted |= {f"{arch}.{key}": value for key, value in more.get(name, {}).items()}
    count = sum(t.n_elements for t in tensors_of(work / "keys.gguf").values())
    wanted["general.size_label"] = gguf.utility.model_weight_count_rounded_notation(int(count))
    assert keys == wanted
    assert "no tokenizer" in said and said.count("\n") == 2


def test_the_trainer_reads_it(train, model):
    """With the same loss; quantized, with that of the dequantized weights."""
    name, work = model
    own = "f32" if train.precision == "fp32" else "bf16"
    export(train, work, f"own-{own}.gguf")
    assert keys_of(work / f"own-{own}.gguf")["general.file_type"] == TYPES[own]
    assert validated(train, work, "--model", f"own-{own}.gguf") == validated(train, work, "--model", "model")
    for kind in ("f16", "q8_0", "q4_0", "q5_1", "iq4_nl", "q4_k_m", "q5_k_m", "q6_k") if train.precision == "fp32" else ():
        export(train, work, "quantized.gguf", type_=kind)
        export(train, work, "dequantized.gguf", of="quantized.gguf", type_="f32")
        floats, wanted = floats_of(work / "dequantized.gguf"), floats_of(work / "quantized.gguf")
        assert floats.keys() == wanted.keys()
        for key, w in wanted.items():
            np.testing.assert_array_equal(floats[key], w, key)
        losses = [validated(train, work, "--model", f"{q}quantized.gguf") for q in ("", "de")]
        assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-6)


def test_transformers_reads_it(train_fp32, model):
    name, work = model
    if name in ("llama-tied", "llama-wide", "mistral", "phi3"):
        pytest.skip("transformers does not read these scalings of a GGUF")
    if name in ("smollm3", "ministral3", "granite", "gemma", "olmo2"):
        pytest.skip("transformers does not read these families of a GGUF")
    export(train_fp32, work, "theirs.gguf")
    config = transformers.AutoConfig.from_pretrained(work / "model")  # it reads the vocabulary's size from the tokenizer
    theirs = transformers.AutoModelForCausalLM.from_pretrained(work, gguf_file="theirs.gguf", config=config, dtype=torch.float32).eval()
    tokens = torch.from_numpy(random_tokens(VOCAB, 40)[None])
    with torch.no_grad():
        logits, wanted = theirs(tokens).logits, open_with_transformers(work / "model").float()(tokens).logits
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)


def test_the_length_that_a_bloom_states(train_fp32, tmp_path):
    """ALiBi has no limit, but llama.cpp takes no longer texts. Saves, exports and what is made of these keep it; a new model has
    that of BLOOM's own models."""
    work, config = prepare(tmp_path, "bloom"), tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"seq_length": 96}))
    write_shard(work / "data.bin", random_tokens(VOCAB, 400))
    write_text(work / "text", 2000)
    step = ("--batch", 1, "--seq-len", 16, "--steps", 1, "--sample", "tokens=0", "--out")
    train_fp32("--model", "model", "--data", "data.bin", *step, "out", cwd=work)
    train_fp32("--model", "bloom:d2", "--data", "text", *step, "new", cwd=work)
    export(train_fp32, work, "a.gguf", of="out")
    export(train_fp32, work, "b.gguf", of="a.gguf")
    export(train_fp32, work, "new.gguf", of="new")
    for name, length in {"out/config.json": 96, "a.gguf": 96, "b.gguf": 96, "new/config.json": 2048, "new.gguf": 2048}.items():
        stated = (keys_of(work / name)["bloom.context_length"] if name.endswith("gguf") else
                  json.loads((work / name).read_text())["seq_length"])
        assert stated == length, name


# ---- adapters


@pytest.fixture(scope="module", params=("gpt2", "llama", "qwen2", "bloom"))
def adapted(request, tmp_path_factory):
    """A model and a LoRA whose layers have different scales."""
    work = prepare(tmp_path_factory.mktemp(f"adapted-{request.param}"), request.param)
    ends = {"gpt2": "c_attn", "bloom": "query_key_value"}.get(request.param, "v_proj")
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM",
                                       rank_pattern={ends: 8}, alpha_pattern={ends: 20}))
    return work


def test_a_merged_adapter(train_fp32, adapted):
    """The file is that of the merged folder."""
    with_adapter = ("--adapter", "adapter")
    if not (adapted / "merged").exists():
        train_fp32("--model", "model", *with_adapter, "--steps", 0, "--merge", "merged", cwd=adapted)
    for kind in ("f32", "q4_k_m"):
        export(train_fp32, adapted, "a.gguf", *with_adapter, type_=kind)
        export(train_fp32, adapted, "b.gguf", of="merged", type_=kind)
        a, b = tensors_of(adapted / "a.gguf"), tensors_of(adapted / "b.gguf")
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name].data, b[name].data, name)
        assert keys_of(adapted / "a.gguf") == keys_of(adapted / "b.gguf") | {"general.name": "A"}


def test_a_merged_adapter_on_nf4(train_fp32, adapted):
    """Matrices of a base in NF4 are dequantized, also if they are streamed from its files."""
    train_fp32("--model", "model", "--base", "nf4", "--steps", 0, "--save-base", "nf4", cwd=adapted)
    export(train_fp32, adapted, "nf4.gguf", "--adapter", "adapter", of="nf4", type_="q8_0")
    whole = (adapted / "nf4.gguf").read_bytes()
    export(train_fp32, adapted, "nf4.gguf", "--adapter", "adapter", "--offload", "weights=disk,embeddings=disk", of="nf4", type_="q8_0")
    plain = floats_of(adapted / "nf4.gguf")
    (adapted / "first.gguf").write_bytes(whole)
    wanted = floats_of(adapted / "first.gguf")
    assert plain.keys() == wanted.keys()
    for name, w in wanted.items():
        np.testing.assert_array_equal(plain[name], w, name)
    train_fp32("--model", "nf4", "--adapter", "adapter", "--steps", 0, "--merge", "of-nf4", cwd=adapted)
    export(train_fp32, adapted, "merged.gguf", of="of-nf4", type_="q8_0")
    for name, w in floats_of(adapted / "merged.gguf").items():
        np.testing.assert_array_equal(w, wanted[name], name)


def test_an_adapter(train_fp32, adapted):
    """Its tensors, which llama.cpp adds to those of the model: alpha / rank B A."""
    export(train_fp32, adapted, "lora.gguf", "--adapter", "adapter", part="adapter", type_="f32")
    export(train_fp32, adapted, "base.gguf", type_="f32")
    export(train_fp32, adapted, "with.gguf", "--adapter", "adapter", type_="f32")
    keys, tensors = keys_of(adapted / "lora.gguf"), floats_of(adapted / "lora.gguf")
    base, merged = floats_of(adapted / "base.gguf"), floats_of(adapted / "with.gguf")
    arch = json.loads((adapted / "model/config.json").read_text())["model_type"]
    assert keys == {"general.architecture": arch, "general.type": "adapter", "adapter.type": "lora", "general.name": "Lora",
                    "adapter.lora.alpha": keys["adapter.lora.alpha"], "general.quantization_version": 2}
    names = {name.rpartition(".")[0] for name in tensors}
    assert len(names) == len(tensors) / 2 == LAYERS * (7 if arch in ("llama", "qwen2") else 4)
    for name, w in merged.items():
        wanted = base[name]
        if name in names:
            a, b = tensors[name + ".lora_a"], tensors[name + ".lora_b"]
            assert a.shape[0] == b.shape[1] == (8 if re.search("attn_(v|qkv)", name) else 4)
            wanted = wanted + keys["adapter.lora.alpha"] / a.shape[0] * b @ a
        np.testing.assert_allclose(w, wanted, rtol=0, atol=2e-5, err_msg=name)
    export(train_fp32, adapted, "lora.gguf", "--adapter", "adapter", part="adapter", type_="q8_0")
    assert {t.tensor_type.name for name, t in tensors_of(adapted / "lora.gguf").items() if name.endswith("a")} == {"Q8_0"}
    assert {t.tensor_type.name for name, t in tensors_of(adapted / "lora.gguf").items() if name.endswith("b")} == {"F16"}


# ---- tokenizers


def with_tokenizer(work, tokenizer, family="llama", **settings):
    """A model with the vocabulary of a tokenizer, and three tokens more."""
    size = tokenizer.get_vocab_size() + 3
    make(work / "model", "--family", family, "--layers", 1, "--heads", 2, "--channels", 32, "--vocab", size)
    tokenizer.save(str(work / "model/tokenizer.json"))
    (work / "model/tokenizer_config.json").write_text(json.dumps(settings))
    return size


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def templates_of(keys):
    return {key.removeprefix("tokenizer."): value for key, value in keys.items() if key.startswith("tokenizer.chat_template")}


@pytest.mark.parametrize("by", ["settings", "files", "chat_template.json"])
def test_chat_templates(train_fp32, tmp_path, by):
    """Those that the trainer uses, wherever they are, also after a round trip through a GGUF and a save."""
    named = {"default": CHATML, "tool_use": "{{ tools }}"} if by != "chat_template.json" else {"default": CHATML}
    as_list = [{"name": name, "template": text} for name, text in named.items()]
    in_settings = {"settings": {"chat_template": as_list}, "files": {"chat_template": "old"}}
    with_tokenizer(tmp_path, known.smollm2(), **in_settings.get(by, {}))
    if by == "files":
        (tmp_path / "model/chat_template.jinja").write_text(CHATML)
        (tmp_path / "model/additional_chat_templates").mkdir()
        (tmp_path / "model/additional_chat_templates/tool_use.jinja").write_text(named["tool_use"])
    if by == "chat_template.json":
        (tmp_path / "model/chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    wanted = {"chat_template": CHATML} | ({} if len(named) == 1 else {"chat_template.tool_use": "{{ tools }}", "chat_templates": ["tool_use"]})
    export(train_fp32, tmp_path, "model.gguf")
    assert templates_of(keys_of(tmp_path / "model.gguf")) == wanted
    write_text(tmp_path / "text")
    train_fp32("--model", "model.gguf", "--train", "lora", "--data", "text", "--batch", 1, "--seq-len", 16, "--steps", 1, "--sample", "tokens=0",
               "--out", "out", cwd=tmp_path)
    saved = json.loads((tmp_path / "out/latest/tokenizer_config.json").read_text())["chat_template"]
    assert saved == (CHATML if len(named) == 1 else as_list)
    export(train_fp32, tmp_path, "again.gguf", of="model.gguf")
    assert templates_of(keys_of(tmp_path / "again.gguf")) == wanted


@pytest.mark.parametrize("of", ["model", "model.gguf"])
def test_the_template_that_was_trained(train_fp32, tmp_path, of):
    """--chat-format replaces the model's own template in what is exported and saved."""
    with_tokenizer(tmp_path, known.smollm2(), chat_template=[{"name": "default", "template": "old"}, {"name": "more", "template": "older"}])
    export(train_fp32, tmp_path, "model.gguf")
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 4)
    train_fp32("--model", of, "--data", "chats.jsonl", "--chat-format", "chatml", "--batch", 1, "--seq-len", 64, "--steps", 1, "--sample", "tokens=0",
               *(("--train", "lora") if of == "model.gguf" else ()), "--out", "out", "--export", "trained.gguf", cwd=tmp_path)
    exported = templates_of(keys_of(tmp_path / "trained.gguf"))
    saved = tmp_path / "out/latest"
    assert list(exported) == ["chat_template"] and "<|im_start|>" in exported["chat_template"]
    assert exported["chat_template"] == (saved / "chat_template.jinja").read_text()
    assert "chat_template" not in json.loads((saved / "tokenizer_config.json").read_text())
    if of == "model":
        export(train_fp32, tmp_path, "later.gguf", of="out")
        assert templates_of(keys_of(tmp_path / "later.gguf")) == exported


BY_BYTES = {"gpt-2": (known.gpt2, "gpt2"), "smollm": (known.smollm2, "llama"), "llama-bpe": (known.llama3, "llama"),
            "qwen2": (known.qwen, "qwen2"), "bloom": (known.bloom, "bloom")}


@pytest.mark.parametrize("pre", BY_BYTES)
def test_byte_level_tokenizers(train_fp32, tmp_path, pre):
    make_tokenizer, family = BY_BYTES[pre]
    tokenizer = make_tokenizer()
    special = [t for t in json.loads(tokenizer.to_str())["added_tokens"] if t["special"]]
    size = with_tokenizer(tmp_path, tokenizer, family, eos_token=special[-1]["content"], chat_template="{{ messages }}",
                          add_bos_token=False)
    assert export(train_fp32, tmp_path, "model.gguf") == f"exported the model in f32 as model.gguf\n"
    keys, model = keys_of(tmp_path / "model.gguf"), json.loads(tokenizer.to_str())["model"]
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", pre)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    wanted = sorted(vocabulary, key=vocabulary.get) + [f"[PAD{i}]" for i in range(size - 3, size)]
    assert keys["tokenizer.ggml.tokens"] == wanted
    controls = {t["content"] for t in special}
    assert keys["tokenizer.ggml.token_type"] == [3 if t in controls else 5 if t.startswith("[PAD") else 1 for t in wanted]
    assert keys["tokenizer.ggml.merges"] == [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    assert keys["tokenizer.ggml.eos_token_id"] == special[-1]["id"]
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert keys["tokenizer.ggml.add_bos_token"] == (pre == "llama-bpe")
    # The trainer reads it: the same samples, of the same tokens.
    samples = [train_fp32("--model", m, "--steps", 0, "--prompt", "All human beings 123\n", "--sample", "tokens=12,temperature=0",
                          cwd=tmp_path).stdout for m in ("model", "model.gguf")]
    assert samples[0] == samples[1]
    # What a GGUF's vocabulary takes is planned: the 300,000 strings of Qwen's are 28 MB.
    write_text(tmp_path / "text")
    said = train_fp32("--model", "model.gguf", "--train", "lora", "--data", "text", "--batch", 1, "--seq-len", 16, "--steps", 1, "--sample",
                      "tokens=0", cwd=tmp_path).stdout.decode()
    taken, planned = taken_and_planned(said)
    assert taken <= planned <= taken + 24
    export(train_fp32, tmp_path, "again.gguf", of="model.gguf")
    again = keys_of(tmp_path / "again.gguf")
    assert {key: value for key, value in again.items() if key != "general.name"} == {
        key: value for key, value in keys.items() if key != "general.name"}


class Keys(gguf.GGUFWriter):
    """Collects the keys that gguf's own functions add."""

    def __init__(self):
        super().__init__(None, "llama")
        self.kv_data[0].clear()

    def of(self, prefix):
        return {key: value.value for key, value in self.kv_data[0].items() if key.startswith(prefix)}


@pytest.mark.parametrize("pre", BY_BYTES)
def test_special_tokens_are_those_that_gguf_finds(train_fp32, tmp_path, pre):
    make_tokenizer, family = BY_BYTES[pre]
    tokenizer = make_tokenizer()
    special = [t["content"] for t in json.loads(tokenizer.to_str())["added_tokens"] if t["special"]]
    marks = dict(zip(("eos_token", "bos_token", "unk_token", "pad_token"), special[::-1]))
    size = with_tokenizer(tmp_path, tokenizer, family, chat_template="{{ messages }}", **marks)
    export(train_fp32, tmp_path, "model.gguf")
    wanted = Keys()
    gguf.SpecialVocab(tmp_path / "model", n_vocab=size).add_to_gguf(wanted, quiet=True)
    ours = keys_of(tmp_path / "model.gguf")
    assert len(wanted.of("tokenizer")) > 1
    assert {key: ours.get(key) for key in wanted.of("tokenizer")} == wanted.of("tokenizer")


def test_sampling_is_what_gguf_finds(train_fp32, tmp_path):
    with_tokenizer(tmp_path, known.smollm2())
    settings = {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 0.6, "do_sample": True}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(settings))
    export(train_fp32, tmp_path, "model.gguf")
    wanted = Keys()
    gguf.Metadata.load(None, tmp_path / "model").set_gguf_meta_model(wanted)
    ours = keys_of(tmp_path / "model.gguf")
    found = {key: pytest.approx(value) for key, value in wanted.of("general.sampling").items()}
    assert len(found) == 4 and {key: value for key, value in ours.items() if key.startswith("general.sampling")} == found


def test_a_sentencepiece_tokenizer(train_fp32, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    file = known.sentencepiece_file("tokenizer.model.v1")
    library = sentencepiece.SentencePieceProcessor(model_file=str(file))
    make(tmp_path / "model", "--family", "llama", "--layers", 1, "--heads", 2, "--channels", 32, "--vocab",
         library.get_piece_size() + 2)
    (tmp_path / "model/tokenizer.model").write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": 2}))
    export(train_fp32, tmp_path, "model.gguf")
    keys = keys_of(tmp_path / "model.gguf")
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("llama", "default")
    tokens = range(library.get_piece_size())
    pads = [f"[PAD{library.get_piece_size() + i}]" for i in range(2)]
    assert keys["tokenizer.ggml.tokens"] == [library.id_to_piece(t) for t in tokens] + pads
    assert keys["tokenizer.ggml.scores"] == [np.float32(library.get_score(t)) for t in tokens] + [-10000, -10000]
    kinds = [(library.is_unknown, 2), (library.is_control, 3), (library.is_unused, 5), (library.is_byte, 6)]
    assert keys["tokenizer.ggml.token_type"] == [next((n for asks, n in kinds if asks(t)), 1) for t in tokens] + [5, 5]
    samples = [train_fp32("--model", m, "--steps", 0, "--prompt", "All human beings 123\n", "--sample", "tokens=12,temperature=0",
                          cwd=tmp_path).stdout for m in ("model", "model.gguf")]
    assert samples[0] == samples[1]


def changed_tokenizer(folder, change):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))


def test_tokenizers_that_llama_cpp_does_not_have(train_fp32, tmp_path):
    """Another normalizer than NFC, and merges that are not ignored where llama.cpp ignores them."""
    def replaces(tokenizer):
        tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "e"}, "content": "o"}

    def merges(tokenizer):
        tokenizer["model"]["ignore_merges"] = not tokenizer["model"]["ignore_merges"]

    for make_tokenizer, family, change, said in ((known.llama3, "llama", replaces, 'its normalizer is "Replace", and llama.cpp has none'),
                                                 (known.llama3, "llama", merges, '"Donau", which no merge makes'),
                                                 (known.smollm2, "llama", merges, "")):
        work = tmp_path / f"{make_tokenizer.__name__}-{change.__name__}"
        work.mkdir()
        with_tokenizer(work, make_tokenizer(), family)
        changed_tokenizer(work / "model", change)
        ran = train_fp32("--model", "model", "--steps", 0, "--export", "model.gguf", cwd=work, code=2 if said else 0)
        assert said in ran.stderr.decode()


def test_added_tokens_of_a_sentencepiece_tokenizer(train_fp32, tmp_path):
    """Whichever file adds them, they are in the export, and texts have the same tokens."""
    pytest.importorskip("sentencepiece")
    file = known.sentencepiece_file("tokenizer.model.v1").read_bytes()
    size = 32002
    for where in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        work = tmp_path / where
        work.mkdir()
        make(work / "model", "--family", "llama", "--layers", 1, "--heads", 2, "--channels", 32, "--vocab", size)
        (work / "model/tokenizer.model").write_bytes(file)
        marks = {"<|im_start|>": size - 2, "<|im_end|>": size - 1}
        listed = [{"id": token, "content": mark, "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
                  for mark, token in marks.items()]
        if where == "added_tokens.json":
            (work / "model" / where).write_text(json.dumps(marks))
        elif where == "tokenizer_config.json":
            (work / "model" / where).write_text(json.dumps({"added_tokens_decoder": {str(each.pop("id")): each for each in listed}}))
        else:
            from_library = json.loads(known.from_sentencepiece("tokenizer.model.v1").to_str())
            from_library["added_tokens"] += listed
            (work / "model" / where).write_text(json.dumps(from_library))
        export(train_fp32, work, "model.gguf")
        keys = keys_of(work / "model.gguf")
        assert keys["tokenizer.ggml.tokens"][-2:] == list(marks) and keys["tokenizer.ggml.token_type"][-2:] == [3, 3], where


def test_a_space_that_nothing_puts_before_a_text(train_fp32, tmp_path):
    pytest.importorskip("sentencepiece")
    for prepends in (True, False):
        work = tmp_path / f"{prepends}"
        work.mkdir()
        make(work / "model", "--family", "llama", "--layers", 1, "--heads", 2, "--channels", 32, "--vocab", 32000)
        tokenizer = json.loads(known.from_sentencepiece("tokenizer.model.v1").to_str())
        steps = tokenizer["normalizer"]["normalizers"]
        tokenizer["normalizer"]["normalizers"] = [step for step in steps if prepends or step["type"] != "Prepend"]
        assert len(steps) == 2
        (work / "model/tokenizer.json").write_text(json.dumps(tokenizer))
        export(train_fp32, work, "model.gguf")
        assert keys_of(work / "model.gguf").get("tokenizer.ggml.add_space_prefix", True) == prepends
        write_text(work / "text", 500)
        said = [train_fp32("--model", m, "--val-data", "text", "--seq-len", 16, "--steps", 0, cwd=work).stdout for m in ("model", "model.gguf")]
        assert b"validation loss" in said[0] and said[0].splitlines()[-1] == said[1].splitlines()[-1]


def test_a_head_that_is_not_the_embedding(train_fp32, tmp_path):
    work = prepare(tmp_path, "gpt2")
    export(train_fp32, work, "model.gguf", type_="f32")
    tensors = floats_of(work / "model.gguf")
    for factor, code in ((1, 0), (-1, 2)):
        writer = gguf.GGUFWriter(work / "head.gguf", "gpt2")
        for key, field in gguf.GGUFReader(work / "model.gguf").fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0])
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        writer.add_tensor("output.weight", factor * tensors["token_embd.weight"])
        writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
        ran = train_fp32("--model", "head.gguf", "--val-data", "data.bin", "--seq-len", 16, "--steps", 0, cwd=work, code=code)
        assert code == 0 or 'tensor "output.weight" is not "token_embd.weight"' in ran.stderr.decode()


def test_the_end_of_a_turn_is_exported_of_a_gguf_too(train_fp32, tmp_path):
    with_tokenizer(tmp_path, known.smollm2(), eos_token="<|endoftext|>")
    export(train_fp32, tmp_path, "base.gguf")
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 4)
    turns = []
    for of in ("model", "base.gguf"):
        train_fp32("--model", of, "--train", "lora", "--data", "chats.jsonl", "--chat-format", "chatml", "--batch", 1, "--seq-len", 32, "--steps", 1,
                   "--sample", "tokens=0", "--export", "trained.gguf", cwd=tmp_path)
        turns.append(keys_of(tmp_path / "trained.gguf").get("tokenizer.ggml.eot_token_id"))
    assert turns[0] == turns[1] is not None


def with_ends(work, ends, template):
    """A chat model whose answers end with <stop> if its template says so, and whose generation_config.json has these ends."""
    tokenizer = tokenizers.Tokenizer.from_str(known.smollm2().to_str().replace("<|im_end|>", "<stop>"))
    with_tokenizer(work, tokenizer, eos_token="<|endoftext|>", **({"chat_template": template} if template else {}))
    ids = {token: tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<stop>", "<|im_start|>")}
    numbers = [ids[end] for end in ends]
    (work / "model/generation_config.json").write_text(json.dumps({"eos_token_id": numbers if len(numbers) > 1 else numbers[0]}))
    return ids["<stop>"]


STOP, TEXT, START = "<stop>", "<|endoftext|>", "<|im_start|>"
ANSWERS = CHATML.replace("<|im_end|>", STOP) + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("ends, template, has_end", [
    ([STOP, TEXT], ANSWERS, True), ([TEXT, STOP], ANSWERS, True), ([STOP, START, TEXT], ANSWERS, True), ([TEXT, STOP, START], ANSWERS, True),
    ([TEXT], ANSWERS, True), ([STOP, TEXT], ANSWERS.replace(STOP, TEXT), False), ([TEXT], ANSWERS.replace(STOP, TEXT), False),
    ([STOP, TEXT], None, True), ([TEXT, STOP], None, True), ([TEXT], None, False)], ids=str)
def test_the_end_of_an_answer(train_fp32, tmp_path, ends, template, has_end):
    """The one that the template writes, however many generation_config.json has; without a template, one that does not end a text."""
    stop = with_ends(tmp_path, ends, template)
    for of, name in (("model", "first.gguf"), ("first.gguf", "again.gguf")):
        export(train_fp32, tmp_path, name, of=of)
        assert keys_of(tmp_path / name).get("tokenizer.ggml.eot_token_id") == (stop if has_end else None), name


def test_a_model_of_bytes(train, tmp_path):
    """It becomes a byte-level tokenizer without merges."""
    write_text(tmp_path / "text")
    train("--model", "llama:d1", "--data", "text", "--steps", 3, "--batch", 2, "--seq-len", 32, "--sample", "tokens=0", "--out", "out",
          "--export", "bytes.gguf", cwd=tmp_path)
    keys = keys_of(tmp_path / "bytes.gguf")
    spell = known.byte_spelling()
    assert keys["tokenizer.ggml.tokens"] == [spell[byte] for byte in range(256)] and keys["tokenizer.ggml.add_bos_token"] is False
    assert keys["general.name"] == "Bytes"
    samples = [train("--model", m, "--steps", 0, "--prompt", "def \xe9", "--sample", "tokens=20,temperature=0", cwd=tmp_path).stdout
               for m in ("out", "bytes.gguf")]
    assert samples[0] == samples[1]


# ---- runs


def test_a_trained_model(train, tmp_path):
    """The exported weights are those of the save, also of ranks that have slices of them."""
    work = prepare(tmp_path, "llama")
    for ranks in ((), ("--devices", 2, "--zero", 3, "--by-block")) if train.device == "cpu" else ((),):
        train("--model", "model", "--data", "data.bin", "--batch", 2, "--seq-len", 24, "--steps", 2, "--grad-accum", 2, "--out", "out",
              "--sample", "tokens=0", "--export", "trained.gguf", *ranks, cwd=work)
        wanted, ours = wanted_tensors(work / "out"), floats_of(work / "trained.gguf")
        assert ours.keys() == wanted.keys()
        for name, w in wanted.items():
            np.testing.assert_array_equal(ours[name], w, name)
        os.unlink(work / "trained.gguf")


def test_a_killed_export(train_fp32, tmp_path):
    """It leaves the file that was there before."""
    make(tmp_path / "model", "--family", "llama", "--layers", 6, "--heads", 8, "--channels", 512, "--vocab", 8000)
    for name in ("old", "new"):
        export(train_fp32, tmp_path, f"{name}.gguf", type_="q8_0")
    old = (tmp_path / "old.gguf").read_bytes()
    (tmp_path / "new.gguf").write_bytes(b"GGUF before")
    with running(train_fp32, "--model", "model", "--steps", 0, "--export", "new.gguf,type=q8_0", cwd=tmp_path) as process:
        part = tmp_path / "new.gguf.tmp"
        while not part.exists() and process.poll() is None:
            time.sleep(0.001)
        process.kill()
    assert (tmp_path / "new.gguf").read_bytes() in (b"GGUF before", old)
    export(train_fp32, tmp_path, "new.gguf", type_="q8_0")  # what is left does not matter
    assert (tmp_path / "new.gguf").stat().st_size == len(old) and not part.exists()


def with_large_weight(work):
    """Gives the last token, which the data do not have, an embedding that F16 cannot hold."""
    path = next((work / "model").glob("*.safetensors"))
    tensors = {name: w.float() for name, w in load_file(path).items()}
    tensors["model.embed_tokens.weight"][VOCAB - 1, 5] = 70000
    save_file(tensors, path, {"format": "pt"})
    write_shard(work / "data.bin", random_tokens(VOCAB - 1, 3000))


def test_a_value_beyond_f16(train_fp32, tmp_path):
    """It is found at the end, and what was trained is not lost."""
    work = prepare(tmp_path, "llama")
    with_large_weight(work)
    why = "--export m.gguf: model.embed_tokens.weight has 70000, which F16 cannot hold: bf16 or f32 can"
    error = train_fp32("--model", "model", "--steps", 0, "--export", "m.gguf,type=f16", cwd=work, code=2).stderr.decode()
    assert error.splitlines()[-1] == f"train: {why}" and not list(work.glob("m.gguf*"))
    run = ("--model", "model", "--data", "data.bin", "--batch", 2, "--seq-len", 24, "--steps", 2, "--sample", "tokens=0")
    for more, again in (((), "--model m.gguf.model"), (("--out", "out"), "--resume out")):
        error = train_fp32(*run, *more, "--export", "m.gguf,type=f16", cwd=work, code=2).stderr.decode()
        assert error.splitlines()[-1] == f"train: {why}; what was trained is saved: {again} --steps 0 --export FILE exports it"
        train_fp32(*again.split(), "--steps", 0, "--export", f"{len(more)}.gguf", cwd=work)
    a, b = floats_of(work / "0.gguf"), floats_of(work / "2.gguf")
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_a_full_disk_loses_nothing(train_fp32, tmp_path):
    """The disk becomes full during the export of a model with its adapter."""
    work = prepare(tmp_path, "llama")
    run = ("--model", "model", "--data", "data.bin", "--batch", 2, "--seq-len", 24, "--steps", 300, "--print-every", 1, "--sample", "tokens=0",
           "--train", "lora", "--lora-rank", 2)
    with small_disk(work / "disk", "4m") as disk:
        # The pipe is too small for the lines of all steps, so the run waits until they are read.
        with running(train_fp32, *run, "--export", "disk/m.gguf", cwd=work, stderr=-1, pipesize=4096) as process:
            wait_for_line(process, rb"^step +1/")
            (disk / "filler").write_bytes(bytes(3_600_000))
            error = process.communicate(timeout=60)[1].decode().splitlines()[-1]
        assert process.returncode == 2 and "No space left" in error, error
        assert error.endswith("; what was trained is saved: --model model --adapter disk/m.gguf.adapter --steps 0 --export FILE exports it")
        assert sorted(os.listdir(disk)) == ["filler", "m.gguf.adapter"]
        train_fp32("--model", "model", "--adapter", "disk/m.gguf.adapter", "--steps", 0, "--export", "later.gguf", cwd=work)


@pytest.mark.parametrize("options, said", [
    ({"--export": "m.gguf,type=q3_k"}, ["'q3_k' is none of f32, f16, bf16, q8_0, q4_0,", "q5_k_m, q6_k"]),
    ({"--export": "m.gguf,part=all"}, ["'all' is none of model, adapter"]),
    ({"--export": "m.gguf,kind=f16"}, ["--export", "kind"]),
    ({"--export": "type=f16"}, ["--export type=f16", "--export FILE"]),
    ({"--export": "m.gguf,part=adapter"}, ["part=adapter", "no adapter"]),
    ({"--export": "m.gguf,part=adapter,type=q4_0", "--train": "lora"}, ["part=adapter", "not in q4_0"]),
    ({"--export": "m.gguf,part=adapter,type=iq4_nl", "--train": "lora"}, ["part=adapter", "not in iq4_nl"]),
    ({"--export": "m.gguf", "--train": "prompt"}, ["--export m.gguf", "no soft prompts"]),
    ({"--export": "model"}, ["--export model", "Is a directory"]),
    ({"--export": "text"}, ["--export text", "is a file of the data"]),
    ({"--export": "data.bin"}, ["--export data.bin", "no file that --export writes"]),
    ({"--export": "nowhere/m.gguf"}, ["--export nowhere/m.gguf", "No such file"]),
    ({"--export": "model/config.json"}, ["is a part of model"]),
    ({"--export": "log"}, ["--export log is --log too"]),
    ({"--export": "m" * 253}, ["File name too long"]),
    ({"--export": "m.gguf", "--rope-scaling": "dynamic:2"}, ["--export m.gguf", 'no rotary scaling "dynamic"']),
    ({"--export": "m.gguf", "--bench": True, "--steps": 1, "--log": None, "--out": None, "--sample tokens": None}, ["--export", "bench"]),
], ids=str)
def test_bad_exports(train_fp32, tmp_path, options, said):
    """Found before the first step."""
    make(tmp_path / "model", "--family", "llama", "--layers", 2, "--vocab", 256, *GROUPED)
    write_text(tmp_path / "text")
    write_shard(tmp_path / "data.bin", [1, 2, 3])
    refused(train_fp32, tmp_path, options, *said)


def test_too_little_room(train_fp32, tmp_path):
    """Found before the first step."""
    work = prepare(tmp_path, "llama")
    write_text(work / "text")
    with small_disk(work / "disk", "100k"):
        refused(train_fp32, work, {"--export": "disk/m.gguf", "--model": "model", "--data": "data.bin"}, "--export disk/m.gguf: the file takes ",
                "are free there")


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "Llama-2-7b-chat-hf", "bloom-7b1", "my-model", "qwen2.5-0.5B-v1.2", "Model v2",
                                  "Mistral-7B-Instruct-v0.3", "tiny-32k-lora-small"])
def test_names(train_fp32, tmp_path, name):
    """Those that gguf, which llama.cpp's converter uses, reads from a folder's name."""
    make(tmp_path / name, "--family", "llama", "--layers", 1, "--vocab", VOCAB, *GROUPED)
    export(train_fp32, tmp_path, "m.gguf", of=name)
    keys = keys_of(tmp_path / "m.gguf")
    count = int(sum(t.n_elements for t in tensors_of(tmp_path / "m.gguf").values()))
    full, _, *parts = gguf.Metadata.get_model_id_components(name, count)
    wanted = dict(zip(("basename", "finetune", "version", "size_label"), parts)) | {"name": gguf.Metadata.id_to_title(full)}
    if wanted["size_label"] is None:
        wanted["size_label"] = gguf.utility.model_weight_count_rounded_notation(count)
    for key, value in wanted.items():
        assert keys.get(f"general.{key}") == value, key


# ---- llama.cpp


def expect_same_tokens(ours, theirs):
    """That two greedy texts have the same tokens, up to a token that is almost as likely as ours: llama.cpp takes either of two
    such tokens, from run to run, as it rounds keys and values to 16 bits."""
    text = ""
    for token in theirs["logprobs"]["content"]:
        if not ours.startswith(text + token["token"]):
            gaps = [token["logprob"] - other["logprob"] for other in token["top_logprobs"] if ours.startswith(text + other["token"])]
            assert gaps and min(gaps) < 0.03, (ours, theirs)
            return
        text += token["token"]
    assert text == ours


def server(path, context=64, lora=None):
    """llama.cpp with this model and adapter. With more than one thread they wait for each other in loops, on a busy machine for
    a thousand times as long as they compute."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.n_gpu_layers = str(path), context, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if lora:
        adapter = xllamacpp.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = str(lora), 1.0
        params.lora_adapters = [adapter]
    return xllamacpp.Server(params)


def test_llama_cpp_stops_at_the_end_of_an_answer(train_fp32, tmp_path):
    with_ends(tmp_path, [STOP, TEXT], ANSWERS)
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 8)
    train_fp32("--model", "model", "--data", "chats.jsonl", "--batch", 4, "--seq-len", 32, "--steps", 30, "--lr", 0.01, "--sample", "tokens=0",
               "--export", "trained.gguf", cwd=tmp_path)
    answer = server(tmp_path / "trained.gguf").handle_completions(
        {"prompt": f"<|im_start|>user\nab{STOP}\n<|im_start|>assistant\n", "n_predict": 20, "temperature": 0})
    answer = (json.loads(answer) if isinstance(answer, str) else answer)["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("cd", "stop")


def test_llama_cpp_has_the_same_tokens_of_pieces(train_fp32, tmp_path):
    """It puts a space before a text, and after each special token."""
    library = pytest.importorskip("sentencepiece")
    make(tmp_path / "model", "--family", "llama", "--layers", 1, "--heads", 2, "--channels", 32, "--vocab", 1400)
    library.SentencePieceTrainer.train(
        sentence_iterator=iter((known.SCRIPTS + known.TEXTS["code"]).splitlines()), model_prefix=str(tmp_path / "model/tokenizer"),
        model_type="bpe", vocab_size=1400, byte_fallback=True, normalization_rule_name="identity", character_coverage=0.98,
        remove_extra_whitespaces=False, minloglevel=2, control_symbols=["<ctl>"])
    export(train_fp32, tmp_path, "model.gguf")
    llama = server(tmp_path / "model.gguf")
    choose = random.Random(0)
    parts = ["<s>", "</s>", "<ctl>", " ", "  ", "\n", "a", "the ", " free", "▁", "é", "日本", "12", "\t", "🙂"]
    for text in ("".join(choose.choices(parts, k=choose.randrange(1, 9))) for _ in range(80)):
        asked = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(llama.listening_address + "/tokenize", asked)) as answer:
            theirs = json.load(answer)["tokens"]
        ours = formats_probe("tokens", tmp_path / "model.gguf", data=text.encode())
        assert np.frombuffer(ours, np.int32).tolist() == theirs, text


def test_llama_cpp_generates_the_same(train_fp32, tmp_path):
    """Small models of bytes, trained a little, and an adapter."""
    pytest.importorskip("xllamacpp")

    def theirs(path, prompt, count, lora=None):
        answer = server(path, 256, lora).handle_completions(
            {"prompt": prompt, "n_predict": count, "temperature": 0, "top_k": 1, "logprobs": 5})
        answer = json.loads(answer) if isinstance(answer, str) else answer
        return answer["choices"][0]

    def ours(prompt, count, *options):
        text = train_fp32(*options, "--steps", 0, "--prompt", prompt, "--sample", f"tokens={count},temperature=0", cwd=tmp_path).stdout
        return text.decode().removeprefix(prompt).removesuffix("\n")

    write_text(tmp_path / "text", 20000)
    for family in ("gpt2", "llama", "qwen3", *(("qwen2", "bloom") if MORE else ())):
        train_fp32("--model", f"{family}:d4", "--data", "text", "--steps", 40, "--batch", 4, "--seq-len", 64, "--sample", "tokens=0", "--out",
                   family, "--export", f"{family}.gguf", cwd=tmp_path)
        expect_same_tokens(ours("def ", 40, "--model", family), theirs(tmp_path / f"{family}.gguf", "def ", 40))
        export(train_fp32, tmp_path, "q.gguf", of=family, type_="q4_k_m")
        expect_same_tokens(ours("def ", 16, "--model", "q.gguf"), theirs(tmp_path / "q.gguf", "def ", 16))
    train_fp32("--model", "llama", "--data", "text", "--train", "lora", "--steps", 20, "--batch", 4, "--seq-len", 64, "--sample", "tokens=0",
               "--out", "lora", "--export", "lora.gguf,part=adapter", cwd=tmp_path)
    expect_same_tokens(ours("def ", 40, "--model", "llama", "--adapter", "lora"),
                       theirs(tmp_path / "llama.gguf", "def ", 40, tmp_path / "lora.gguf"))
