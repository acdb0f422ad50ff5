"""A base in NF4: training and generating with it, bitsandbytes' own folders, and merging an adapter into
it."""

import json

import bitsandbytes
import gguf
import peft
import pytest
import torch
import transformers
from adapter_files import OPTIONS, STEPS, make_adapter, trained, validated, validated_windows
from gguf_files import LLAMA, MODELS as GGUF_MODELS, write_gguf
from model_files import DATA, linked, prepare, starting_at_0
from quantized_models import dequantized_head, floats_of, one_thread
from reference_runs import open_with_transformers
from safetensors.torch import load_file, save_file
from trainer_runs import by_key, random_tokens, read_log, refused, sampled, saved_bytes, write_shard

USUALLY = "fp32"  # see conftest.py

# Some matrices have a number of elements that is not a multiple of NF4's blocks.
FAMILIES = ("llama", "bloom", "qwen3")


def nf4(is_double):
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                           bnb_4bit_use_double_quant=is_double, bnb_4bit_compute_dtype=torch.float32)


def open_nf4(folder, is_double):
    """transformers' model with bitsandbytes' matrices, on the CPU."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map="cpu", dtype=torch.float32, quantization_config=nf4(is_double), attn_implementation="eager").eval()


def dequantized(model):
    """The model with plain layers in place of bitsandbytes'."""
    for name, module in list(model.named_modules()):
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight = torch.nn.Parameter(floats_of(module.weight.data, module.weight.quant_state))
            plain.bias = module.bias
            model.set_submodule(name, plain)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    work = prepare(tmp_path_factory.mktemp(request.param), request.param, OPTIONS)
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM"))
    return work


@pytest.fixture
def work(folder, tmp_path):
    return linked(tmp_path, folder, "adapter")


@pytest.mark.parametrize("base", ["nf4", "nf4-double"])
def test_losses_are_those_of_bitsandbytes(train_fp32, work, base):
    """The losses agree with bitsandbytes' files of the model, and the validation loss with its model and the
    same adapter."""
    is_double = base == "nf4-double"
    options = ("--model", "model", "--adapter", "adapter", *DATA[2:], "--steps", 8, *STEPS)
    train_fp32(*options, "--base", base, "--log", "log", "--sample", "tokens=0", cwd=work)
    got = by_key(read_log(work / "log"), "loss")
    open_nf4(work / "model", is_double).save_pretrained(work / "bnb")
    train_fp32(*options, "--log", "files.log", "--sample", "tokens=0", "--model", "bnb", cwd=work)
    # The mean of the scales in double quantization depends on the number of threads with which bitsandbytes
    # adds them.
    of_files = by_key(read_log(work / "files.log"), "loss")
    assert of_files == pytest.approx(got, rel=0, abs=1e-5) if is_double else of_files == got

    model = peft.PeftModel.from_pretrained(dequantized(open_nf4(work / "model", is_double)), work / "adapter").eval()
    windows = validated_windows(work)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(windows[:, :-1]).logits.flatten(0, 1),
                                                 windows[:, 1:].flatten()).item()
    adapted = ("--model", "model", "--adapter", "adapter", "--base", base)
    assert validated(train_fp32, work, *adapted) == pytest.approx(loss, rel=0, abs=1e-4)
    plain = validated(train_fp32, work, "--model", "model", "--adapter", "adapter")
    assert abs(plain - loss) > 1e-3  # the effect of quantizing is visible


def test_memory_options_change_no_bit(train, work):
    options = ("--base", "nf4-double", "--grad-accum", 2)
    first = trained(train, work, "none", "--recompute", "none", *options)
    for level in ("norm", "block"):
        assert first == trained(train, work, level, "--recompute", level, *options)
    assert first == trained(train, work, "one", "--threads", 1, *options)


def test_resume_is_the_unbroken_run(train_fp32, work):
    train_fp32(*DATA, "--adapter", "adapter", "--base", "nf4", "--steps", 4, "--save-every", 2, "--keep", 0, "--out", "out",
               "--sample", "tokens=0", cwd=work)
    whole = saved_bytes(work / "out" / "step-00000004")
    train_fp32("--resume", "out/step-00000002", cwd=work)
    assert saved_bytes(work / "out" / "step-00000004") == whole


def test_merged_is_the_trained_model(train_fp32, work):
    """The adapter is merged into the dequantized weights, and the logits are those that were trained."""
    before = validated(train_fp32, work, "--model", "model", "--adapter", "adapter", "--base", "nf4-double", "--merge",
                       "merged")
    assert validated(train_fp32, work, "--model", "merged") == pytest.approx(before, rel=0, abs=1e-5)
    open_with_transformers(work / "merged")


@pytest.mark.parametrize("family, base", [("gpt2", "nf4-double"), ("llama", "nf4"), ("llama-tied", "nf4-double"),
                                          ("mistral", "nf4-double"), ("qwen2", "nf4"), ("qwen3", "nf4-double"),
                                          ("bloom", "nf4")])
def test_saved_base_is_that_of_transformers(train, tmp_path, family, base):
    """Byte for byte, with the same precision. transformers opens it as its own, and so do we."""
    work = prepare(tmp_path, family, OPTIONS)
    dtype = torch.float32 if train.precision == "fp32" else torch.bfloat16
    train("--model", "model", "--base", base, "--steps", 0, "--save-base", "base", cwd=work)
    with one_thread():
        config = nf4(base == "nf4-double")
        config.bnb_4bit_compute_dtype = dtype
        theirs = transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=dtype, device_map="cpu",
                                                                   quantization_config=config).eval()
    theirs.save_pretrained(work / "bnb")
    assert (work / "base" / "model.safetensors").read_bytes() == (work / "bnb" / "model.safetensors").read_bytes()
    settings = [json.loads((work / name / "config.json").read_text())["quantization_config"] for name in ("base", "bnb")]
    assert settings[0] == {key: value for key, value in settings[1].items() if not key.startswith("_")}
    opened = transformers.AutoModelForCausalLM.from_pretrained(work / "base", dtype=dtype, device_map="cpu")
    matrices = [[floats_of(m.weight.data, m.weight.quant_state) for m in model.modules()
                 if isinstance(m, bitsandbytes.nn.Linear4bit)] for model in (opened, theirs)]
    assert len(matrices[0]) == len(matrices[1]) > 0 and all(map(torch.equal, *matrices))
    options = ("--seq-len", 37, "--batch", 3, "--eval-batches", 1, "--steps", 0, "--val-data", "data.bin", "--model")
    said = [train(*options, *model, cwd=work).stdout for model in (("base",), ("model", "--base", base))]
    assert said[0] == said[1] and b"validation loss" in said[0]
    train("--model", "base", "--steps", 0, "--save-base", "again", cwd=work)
    assert saved_model(work / "again") == saved_model(work / "base")


def saved_model(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_saves_the_base_of_its_adapter(train_fp32, work):
    """PEFT opens the two folders as they are. A resumed run does not change the base, and neither does one
    that starts anew."""
    (work / "base.tmp").mkdir()
    (work / "base.tmp" / "model.safetensors.tmp").touch()  # of a run that was killed
    options = (*DATA, "--adapter", "adapter", "--base", "nf4-double", "--sample", "tokens=0", "--save-base", "base")
    train_fp32(*options, "--steps", 4, "--save-every", 2, "--keep", 0, "--out", "out", cwd=work)
    assert not (work / "base.tmp").exists()
    base, whole = saved_model(work / "base"), saved_bytes(work / "out" / "step-00000004")
    settings = json.loads((work / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str((work / "base").resolve())
    loss = validated(train_fp32, work, "--model", "base", "--adapter", "out")
    assert loss == validated(train_fp32, work, "--model", "model", "--base", "nf4-double", "--adapter", "out")

    model = dequantized(peft.AutoPeftModelForCausalLM.from_pretrained(work / "out", dtype=torch.float32).eval())
    windows = validated_windows(work)
    with torch.no_grad():
        theirs = torch.nn.functional.cross_entropy(model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
    assert loss == pytest.approx(theirs.item(), rel=0, abs=1e-4)

    train_fp32("--resume", "out/step-00000002", cwd=work)
    assert saved_bytes(work / "out" / "step-00000004") == whole and saved_model(work / "base") == base
    train_fp32(*options, "--steps", 5, "--out", "new", "--resume", "auto", cwd=work)
    assert saved_model(work / "base") == base


def test_plan(train, work):
    """The matrices take their 4 bits and scales, and nothing else of the model changes."""
    options = ("--model", str(work / "model"), "--train", "lora", "--batch", 2, "--seq-len", 16)
    plain, small = train.plan(*options), train.plan(*options, "--base", "nf4-double")
    element = 4 if train.precision == "fp32" else 2
    [codes] = [b["bytes"] for b in small["buffers"] if b["name"] == "quantized_weights"]
    matrices = plain["totals"]["weights"] - (small["totals"]["weights"] - codes)
    # Half a byte each, and a map of 1 KiB for each small matrix.
    assert codes < 0.75 * matrices / element + 60000
    assert small["parameters"] == plain["parameters"]


# Tied and not tied, with learned positions and a norm after the embedding; rows that NF4's blocks do not
# divide, and a larger vocabulary than is dequantized at a time.
HEADS = {
    "gpt2": ("--heads", 3, "--channels", 96),
    "llama": ("--heads", 6, "--kv-heads", 2, "--channels", 96, "--mlp-width", 92),
    "llama-tied": ("--heads", 8, "--kv-heads", 2, "--channels", 160, "--tied", "--vocab", 9001, "--shard-size", "3MB"),
    "mistral": ("--heads", 4, "--kv-heads", 2, "--channels", 64, "--window", 7, "--vocab", 4097),
    "qwen2": ("--heads", 6, "--kv-heads", 3, "--channels", 96, "--tied"),
    "qwen3": ("--heads", 4, "--kv-heads", 2, "--channels", 32, "--head-size", 18),
    "bloom": ("--heads", 6, "--channels", 96),
}
FORMATS = [("gpt2", "8bit"), ("llama", "nf4"), ("llama-tied", "nf4"), ("llama-tied", "8bit"), ("mistral", "nf4"),
           ("qwen2", "8bit"), ("qwen3", "nf4"), ("bloom", "8bit")]
HEAD_NAMES = ("lm_head.weight", "embed_tokens.weight", "wte.weight", "word_embeddings.weight")


def write_plain(work, head):
    """Writes the model with a dequantized head (and embedding, if it is tied); returns the head's shape."""
    tensors = {name: t.float() for path in (work / "model").glob("*.safetensors") for name, t in load_file(path).items()}
    name = next(n for end in HEAD_NAMES for n in tensors if n.endswith(end))
    tensors[name] = dequantized_head(tensors[name], head)
    (work / "plain").mkdir()
    save_file(tensors, work / "plain" / "model.safetensors", metadata={"format": "pt"})
    (work / "plain" / "config.json").write_text((work / "model" / "config.json").read_text())
    return tensors[name].shape


@pytest.fixture(scope="module", params=FORMATS, ids="-".join)
def head_folder(request, tmp_path_factory):
    family, head = request.param
    folder = prepare(tmp_path_factory.mktemp("head"), family, HEADS)
    (folder / "head").write_text(head)
    shape = write_plain(folder, head)
    (folder / "shape").write_text(json.dumps(list(shape)))
    make_adapter(folder, peft.LoraConfig(r=4, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM",
                                         fan_in_fan_out=family == "gpt2"))
    return folder


@pytest.fixture
def head_work(head_folder, tmp_path):
    return linked(tmp_path, head_folder, "adapter", "plain", "head", "shape")


def far(got, expected):
    """The relative error of an adapter's tensors."""
    of = [load_file(folder / "adapter_model.safetensors") for folder in (got, expected)]
    assert of[0].keys() == of[1].keys()
    distance = sum((of[0][name] - of[1][name]).float().square().sum() for name in of[0])
    return (distance / sum(t.float().square().sum() for t in of[1].values())).sqrt().item()


def test_a_quantized_head_is_what_it_stands_for(train, head_work):
    """Steps, adapters, losses and samples equal those with a folder whose head other libraries
    dequantized."""
    work, head = head_work, ("--base", f"head={(head_work / 'head').read_text()}")
    runs = {}
    for name, model in (("got", ("--model", "model", *head)), ("wanted", ("--model", "plain")),
                        ("other", ("--model", "model"))):
        train(*model, *DATA[2:], "--adapter", "adapter", "--steps", 6, *STEPS, "--chunk-rows", "head=40", "--out", name, "--log",
              f"{name}.log", "--sample", "tokens=0", cwd=work)
        runs[name] = by_key(read_log(work / f"{name}.log"), "loss")
        runs[name + " validated"] = validated(train, work, *model, "--adapter", "adapter")
    bound = 1e-5 if train.precision == "fp32" else 1e-2
    assert runs["got"] == pytest.approx(runs["wanted"], rel=0, abs=bound)
    assert runs["got validated"] == pytest.approx(runs["wanted validated"], rel=0, abs=bound)
    off, changed = far(work / "got", work / "wanted"), far(work / "other", work / "wanted")
    assert off < 4e-3 if train.precision == "bf16" else off < min(1e-4, changed / 5)
    assert runs["other validated"] != runs["wanted validated"]
    if train.precision == "fp32":
        said = [sampled(train, "--model", starting_at_0(work / model[0], work / f"{model[0]}-0"), *model[1:], *DATA[2:4],
                        "--batch", 1, "--seq-len", 60, "--steps", 1, "--lr", 0, "--train", "lora", "--lora-rank", 4,
                        "--sample", "tokens=50",
                        cwd=work) for model in (("model", *head), ("plain",))]
        assert said[0] == said[1] and len(said[0].split()) == 50


a_few = pytest.mark.parametrize("head_folder", FORMATS[:3], ids="-".join, indirect=True)


@a_few
def test_memory_options_change_no_bit_with_a_quantized_head(train, head_work):
    work, head = head_work, (head_work / "head").read_text()
    options = ("--base", f"head={head}", "--base", "nf4", "--grad-accum", 2)
    first = trained(train, work, "none", "--recompute", "none", "--save-every", 2, "--keep", 0, *options)
    assert first == trained(train, work, "block", "--recompute", "block", "--threads", 1, *options)
    train("--resume", "none/step-00000002", cwd=work)
    assert saved_bytes(work / "none" / "step-00000004") == first[1]


def test_plan_of_a_quantized_head(train, head_work):
    """It takes its codes and scales instead of the matrix, and as many rows as are dequantized at a time."""
    options = ("--model", head_work / "model", "--train", "lora", "--lora-rank", 4, "--batch", 2, "--seq-len", 16)
    rows, columns = json.loads((head_work / "shape").read_text())
    head = (head_work / "head").read_text()
    plain, small = train.plan(*options), train.plan(*options, "--base", f"head={head}")
    n, element = rows * columns, 4 if train.precision == "fp32" else 2
    blocks = -(-n // 64)
    parts = (n // 32 * 34,) if head == "8bit" else (-(-n // 2), blocks, 64, -(-blocks // 256) * 4, 1024, 4)
    wanted = sum(-(-part // 16) * 16 for part in parts)
    [codes] = [b["bytes"] for b in small["buffers"] if b["name"] == "quantized_head"]
    in_16_bits = -(-(-(-rows // 128) * 128 * columns) // 256) * 256 * element
    assert codes == wanted and plain["totals"]["weights"] - small["totals"]["weights"] == in_16_bits - codes
    assert small["parameters"] == plain["parameters"]
    rooms = [b for b in small["buffers"] if b["name"] == "dequantized_head"]
    assert [b["bytes"] for b in rooms] == 2 * [min(rows, 4096) * columns * element] and rooms[0]["dies"] <= rooms[1]["born"]
    assert "taken from the device" in train(*options, "--base", f"head={head}", "--data", head_work / "data.bin", "--steps", 2,
                                            "--sample", "tokens=3").stdout.decode()


@a_few
def test_a_merge_has_the_quantized_head(train_fp32, head_work):
    work, head = head_work, (head_work / "head").read_text()
    before = validated(train_fp32, work, "--model", "model", "--adapter", "adapter", "--base", f"nf4,head={head}",
                       "--merge", "merged")
    assert validated(train_fp32, work, "--model", "merged") == pytest.approx(before, rel=0, abs=1e-5)
    windows = validated_windows(work)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            open_with_transformers(work / "merged")(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
    assert before == pytest.approx(loss.item(), rel=0, abs=1e-5)


@a_few
def test_a_soft_prompt_of_a_quantized_head(train, head_work):
    """It starts from the same rows, which in bf16 were rounded in two ways, and learns the same."""
    work, head = head_work, (head_work / "head").read_text()
    for name, model in (("got", ("--model", "model", "--base", f"head={head}")), ("wanted", ("--model", "plain"))):
        options = (*model, *DATA[2:], "--train", "prompt", "--soft-prompt", 5, "--sample", "tokens=0")
        train(*options, "--steps", 0, "--out", f"{name}-0", cwd=work)
        train(*options, "--steps", 4, "--out", name, cwd=work)
    assert far(work / "got-0", work / "wanted-0") <= (0 if train.precision == "fp32" else 1e-3)
    assert 0 < far(work / "got", work / "wanted-0")
    assert far(work / "got", work / "wanted") < (1e-4 if train.precision == "fp32" else 2e-2)


def test_bad_input(train_fp32, work):
    open_nf4(work / "model", True).save_pretrained(work / "bnb")
    base = {"--model": "bnb", "--data": "data.bin", "--batch": "2", "--seq-len": "16"}
    refused(train_fp32, work, base, "--model bnb", "NF4", "--train lora")
    refused(train_fp32, work, base | {"--train": "lora", "--base": "nf4"}, "--base nf4", "quantized already")
    refused(train_fp32, work, base | {"--model": "model", "--base": "nf4"}, "--base nf4", "--train lora")
    untrained = base | {"--model": "model", "--steps": "0", "--data": None}
    refused(train_fp32, work, untrained | {"--base": "nf4", "--out": "out"}, "--out out", "--save-base")
    refused(train_fp32, work, untrained | {"--save-base": "base"}, "--save-base base", "--base nf4")
    saves = base | {"--model": "model", "--base": "nf4", "--train": "lora"}
    refused(train_fp32, work, saves | {"--save-base": "base", "--base head": "nf4"}, "--save-base base", "head=nf4")
    refused(train_fp32, work, base | {"--model": "model", "--base head": "nf4"}, "--base head=nf4", "--train lora")
    refused(train_fp32, work, base | {"--model": "model", "--base head": "8bit", "--train": "lora"}, "--base head=8bit", "channels")
    refused(train_fp32, work, untrained | {"--base head": "nf4", "--out": "out"}, "--out out")
    refused(train_fp32, work, untrained | {"--model": "d1", "--base head": "nf4", "--out": None}, "--base head=nf4", "--model")
    refused(train_fp32, work, saves | {"--save-base": "bnb"}, "--save-base bnb", "there already")
    refused(train_fp32, work, saves | {"--save-base": "out"}, "--save-base out", "--out")
    refused(train_fp32, work, saves | {"--save-base": ""}, "--save-base", "empty")
    refused(train_fp32, work, saves | {"--save-base": "model", "--resume": "auto"}, "--save-base model", "in NF4")
    path = work / "bnb" / "config.json"
    config = json.loads(path.read_text())
    for change, named in (({"bnb_4bit_quant_type": "fp4"}, "fp4"), ({"quant_method": "gptq"}, "gptq")):
        path.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | change}))
        refused(train_fp32, work, base | {"--train": "lora"}, "bnb/config.json", named)


@pytest.fixture(params=("llama", "qwen3", "bloom"))
def gguf_work(request, tmp_path):
    """A GGUF with matrices in Q8_0, F16, BF16 and F32, a LoRA for its model, and tokens."""
    config, arch = GGUF_MODELS[request.param]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1]**-0.5)
    model.save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model.gguf", model, arch)
    make_adapter(tmp_path, peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    write_shard(tmp_path / "data.bin", random_tokens(160, 3000))
    return tmp_path


def test_a_gguf(train_fp32, gguf_work):
    """Its loss is that of the original model except for the 8 bits, and the loss of its merge with an adapter
    is that of the merged folder. Training continues as usual, and full training is refused."""
    work = gguf_work
    plain = validated(train_fp32, work, "--model", "model")
    assert validated(train_fp32, work, "--model", "model.gguf") == pytest.approx(plain, rel=0, abs=0.02)
    adapted = validated(train_fp32, work, "--model", "model.gguf", "--adapter", "adapter", "--merge", "merged")
    assert adapted != pytest.approx(plain, rel=0, abs=0.02)
    windows = validated_windows(work)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            open_with_transformers(work / "merged")(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
    assert adapted == pytest.approx(loss.item(), rel=0, abs=1e-5)

    options = ("--model", "model.gguf", *DATA[2:], "--adapter", "adapter", "--sample", "tokens=0")
    train_fp32(*options, "--steps", 4, "--save-every", 2, "--keep", 0, "--out", "out", cwd=work)
    whole = saved_bytes(work / "out" / "step-00000004")
    train_fp32("--resume", "out/step-00000002", cwd=work)
    assert saved_bytes(work / "out" / "step-00000004") == whole
    refused(train_fp32, work, {"--model": "model.gguf", "--data": "data.bin"}, "--model model.gguf", "GGUF",
            "--train lora")
    refused(train_fp32, work, {"--model": "model.gguf", "--data": "data.bin", "--train": "lora", "--base head": "nf4"},
            "--base head=nf4", "GGUF")
    (work / "short.gguf").write_bytes((work / "model.gguf").read_bytes()[:-1000])
    refused(train_fp32, work, {"--model": "short.gguf", "--data": "data.bin", "--train": "lora"}, "short.gguf")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_a_gguf_of_a_type(train_fp32, tmp_path, kind):
    """Its elements are those that PyPI's gguf reads, its loss is theirs, and it is the base of a LoRA, also from a disk."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**LLAMA | {"hidden_size": 256, "intermediate_size": 512})
    write_gguf(tmp_path / "model.gguf", transformers.AutoModelForCausalLM.from_config(config), "llama", types=(kind,))
    write_shard(tmp_path / "data.bin", random_tokens(config.vocab_size, 3000))
    train_fp32("--model", "model.gguf", "--steps", 0, "--export", "floats.gguf,type=f32", cwd=tmp_path)
    ours, wanted = [gguf.GGUFReader(tmp_path / name).tensors for name in ("floats.gguf", "model.gguf")]
    wanted = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in wanted}
    assert {t.name for t in ours} == wanted.keys()
    for t in ours:
        assert t.data.tobytes() == wanted[t.name].tobytes(), t.name
    losses = [validated(train_fp32, tmp_path, "--model", name) for name in ("model.gguf", "floats.gguf")]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-6)
    options = ("--model", "model.gguf", "--train", "lora", *DATA[2:], "--steps", 3, "--sample", "tokens=0")
    for number, where in enumerate(((), ("--offload", "weights=disk"))):
        train_fp32(*options, "--out", f"out{number}", *where, cwd=tmp_path)
    assert saved_bytes(tmp_path / "out0") == saved_bytes(tmp_path / "out1")


@pytest.mark.parametrize("keys, found", [
    ({"repo_url": "https://huggingface.co/Some-Org/Small-Llama-1M"}, True), ({"name": "Small Llama 1M", "organization": "Some Org"}, True),
    ({"repo_url": "https://huggingface.co/Some-Org/Small-Llama-1M-Base"}, False),  # it was fine-tuned from this one
    ({"repo_url": "https://elsewhere.org/Some-Org/Small-Llama-1M"}, False), ({}, False)], ids=str)
def test_peft_opens_a_lora_of_a_gguf_that_names_its_model(train_fp32, tmp_path, monkeypatch, keys, found):
    """AutoPeftModelForCausalLM finds the published model, in whose weights the GGUF is, and has this program's loss. Else a line
    says on what the adapter is to be loaded. This program finds the file."""
    config, arch = GGUF_MODELS["llama"]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)

    def add(writer):
        writer.add_name("Small Llama 1M")
        for key, value in keys.items():
            writer.add_string(f"general.base_model.0.{key}", value)

    write_gguf(tmp_path / "model.gguf", model, arch, add, types=("F32",))
    write_shard(tmp_path / "data.bin", random_tokens(160, 3000))
    said = train_fp32("--model", "model.gguf", *DATA[2:], "--train", "lora", "--steps", 3, "--lr", 1e-2, "--sample", "tokens=0",
                      "--out", "out", cwd=tmp_path).stdout.decode()
    base = json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"]
    line = said.splitlines()[-1]
    ours = validated(train_fp32, tmp_path, "--model", "out")
    assert ours == validated(train_fp32, tmp_path, "--model", "model.gguf", "--adapter", "out")
    if not found:
        assert base == str(tmp_path / "model.gguf")
        assert line == 'in Python, PeftModel.from_pretrained(MODEL, "out") loads it on model.gguf\'s original'
        return
    assert line == f'in Python, AutoPeftModelForCausalLM.from_pretrained("out") loads it on {base}'
    assert base.lower().replace("-", "") == "someorg/smallllama1m"
    model.save_pretrained(tmp_path / base)  # PEFT reads a folder of this name as it reads the hub's
    monkeypatch.chdir(tmp_path)
    windows = validated_windows(tmp_path)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            peft.AutoPeftModelForCausalLM.from_pretrained("out")(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
    assert ours == pytest.approx(loss.item(), rel=0, abs=1e-5)
