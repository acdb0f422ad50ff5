"""--chunk-rows mlp=: MLPs in chunks of rows. On a CPU they change no bit if no gradient is summed over rows; otherwise
they change rounding."""

import shutil

import peft
import pytest
import reference
from adapter_files import OPTIONS, make_adapter, trained as adapter_trained, validated
from model_files import DATA, fused, linked, prepare, trained
from safetensors.torch import load_file
from trainer_runs import losses, make, random_tokens, read_log, refused, saved_bytes, write_shard

USUALLY = "fp32"  # see conftest.py

FAMILIES = ("gpt2", "llama", "qwen3", "gemma3_text", "bloom")
ATTENTION = {"gpt2": ["attn.c_attn", "attn.c_proj"], "bloom": ["query_key_value"]}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return prepare(tmp_path_factory.mktemp(family), family, OPTIONS)


@pytest.fixture
def work(folder, tmp_path):
    return linked(tmp_path, folder)


def lora(work, family, targets):
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM",
                                       fan_in_fan_out=family == "gpt2"))


def close_to(train, value, of_bf16):
    """On a CPU a row's result is the same beside any other rows. On a GPU cuBLASLt chooses an algorithm by the number of rows: it
    may sum in another order, which fp32 shows, and fuse a bias and GELU for some rows and round once more for others."""
    return value if train.device == "cpu" else pytest.approx(value, rel=1e-5 if train.precision == "fp32" else of_bf16)


def check_equal(train, chunks, whole):
    if train.device == "cpu":
        assert chunks == whole
        return
    (steps, _), (expected, _) = chunks, whole
    for step, other in zip(steps, expected, strict=True):
        assert step["loss"] == close_to(train, other["loss"], 1e-3)
        assert step["grad_norm"] == close_to(train, other["grad_norm"], 1e-2)


@pytest.mark.parametrize("rows", [8, 40, 104, 112])
def test_frozen_mlps_are_the_same_to_the_bit(train, work, family, rows):
    lora(work, family, ATTENTION.get(family, ["q_proj", "o_proj"]))
    for options in ((), ("--grad-accum", 2, "--recompute", "block", "--dropout", 0.2)):
        if "--dropout" in options and family not in ("gpt2", "bloom"):
            options = (*options[:-2], "--train", "lora", "--lora-dropout", 0.1)
        whole = adapter_trained(train, work, "whole", *options)
        check_equal(train, adapter_trained(train, work, "chunks", *options, "--chunk-rows", f"mlp={rows}"), whole)


@pytest.mark.parametrize("options", [("--train", "lora", "--lora-targets", "attention"),
                                     ("--train", "lora", "--lora-targets", "attention", "--base", "nf4")], ids=" ".join)
def test_a_chunk_of_one_row(train, work, family, options):
    """33 rows in chunks of 8 or 16 leave one."""
    options = ("--model", "model", "--data", "data.bin", "--batch", 1, "--seq-len", 33, "--steps", 2, "--sample", "tokens=0", *options)
    for rows in ("all", 8, 16):
        train(*options, "--chunk-rows", f"mlp={rows}", "--out", f"rows{rows}", cwd=work)
    whole, *chunks = (saved_bytes(work / f"rows{rows}") for rows in ("all", 8, 16))
    assert train.device != "cpu" or (chunks[0] == whole and chunks[1] == whole)


@pytest.mark.parametrize("rows", [8, 48])
def test_lora_at_the_mlp(train, work, family, rows):
    """Also with dropout: the loss and the gradients (in m after a step) are the same except for rounding.
    (The library sums thin products of few rows in another order.)"""
    lora(work, family, "all-linear")
    step = ("--adapter", "adapter", "--steps", 1, "--optimizer", "beta1=0", "--clip", 0, "--sample", "tokens=0")
    for options in ((), ("--train", "lora", "--lora-dropout", 0.2)):
        for name, more in (("whole", ()), ("chunks", ("--chunk-rows", f"mlp={rows}"))):
            train(*DATA, *step, *options, *more, "--out", name, "--log", f"{name}.log", cwd=work)
        whole, chunks = (load_file(work / name / "trainer_state.safetensors") for name in ("whole", "chunks"))
        first, wanted = (losses(read_log(work / f"{name}.log"))[0] for name in ("chunks", "whole"))
        assert first == pytest.approx(wanted, rel=1e-6 if train.precision == "fp32" else 1e-4)
        for name in (name for name in whole if name.startswith("m.")):
            # Some numbers are rounded in the other direction: 2^-8 each.
            bound = 1e-6 if train.precision == "fp32" else 1e-2
            assert (chunks[name] - whole[name]).norm() <= bound * whole[name].norm(), name


def test_all_that_changes_no_bit_beside_it(train, work):
    """Recompute levels, threads, accumulation block by block, offloading, blocks and state on disk."""
    options = ("--chunk-rows", "mlp=40", "--grad-accum", 2)
    first = trained(train, work, "first", *options, "--recompute", "none")
    assert losses(first[0]) == pytest.approx(losses(trained(train, work, "whole", "--grad-accum", 2)[0]),
                                             rel=1e-6 if train.precision == "fp32" else 1e-3)
    for more in (("--recompute", "gelu"), ("--recompute", "block:1,ffn:1"), ("--threads", 1), ("--offload", "inputs=auto"),
                 ("--offload", "weights=disk,state=disk")):
        assert trained(train, work, "other", *options, *more) == first, more
        shutil.rmtree(work / "other")
    in_backward = ("--chunk-rows", "mlp=40", "--advanced", "clip=block")
    assert (trained(train, work, "a", *in_backward) ==
            trained(train, work, "b", *in_backward, "--update-in-backward", "--recompute", "block"))


def test_resume(train, work):
    options = (*DATA, "--steps", 4, "--sample", "tokens=0", "--save-every", 2, "--keep", 0)
    train(*options, "--chunk-rows", "mlp=16", "--out", "out", cwd=work)
    whole = saved_bytes(work / "out")
    shutil.rmtree(work / "out" / "step-00000004")
    train("--resume", "out/step-00000002", cwd=work)
    assert saved_bytes(work / "out") == whole


def test_validation_and_a_base_in_nf4(train, work, family):
    lora(work, family, ATTENTION.get(family, ["q_proj", "o_proj"]))
    whole = validated(train, work, "--model", "model")
    assert validated(train, work, "--model", "model", "--chunk-rows", "mlp=24") == close_to(train, whole, 1e-3)
    nf4 = ("--base", "nf4")
    check_equal(train, adapter_trained(train, work, "a", *nf4, "--chunk-rows", "mlp=24"), adapter_trained(train, work, "b", *nf4))


def test_a_quantized_matrix_is_made_once_for_all_chunks(train, tmp_path):
    work = prepare(tmp_path, "llama", OPTIONS)
    options = ("--model", work / "model", "--batch", 3, "--seq-len", 37, "--train", "lora", "--base", "nf4", "--recompute", "block")

    def made(*more):
        plan = train.plan(*options, "--steps", 1, *more)
        return sum(o["calls"] for o in plan["operations"] if o["name"].startswith("dequantize"))

    assert made("--chunk-rows", "mlp=8") <= made()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
@pytest.mark.parametrize("level", ["none", "block"])
def test_nothing_wide_outlives_a_chunk(train, tmp_path, kind, level):
    make(tmp_path / "model", "--family", kind, "--layers", 2, "--heads", 2, "--channels", 64, "--vocab", 300, "--positions", 900)
    options = ("--model", tmp_path / "model", "--batch", 2, "--seq-len", 900, "--chunk-rows", "head=64", "--recompute", level)
    plan, whole = train.plan(*options, "--chunk-rows", "mlp=256"), train.plan(*options)
    wide = {"up", "gelu", "swiglu", "d_up", "d_swiglu", "norm_2", "d_norm_2", "mlp_output", "attention_projected"}
    found = {b["name"]: b["shape"] for b in plan["buffers"] if b["name"] in wide}
    assert {"up", "norm_2", "attention_projected"} <= found.keys()
    assert all(shape[0] in (256, 1800 % 256) and len(shape) == 2 for shape in found.values()), found
    assert plan["totals"]["activations"] < whole["totals"]["activations"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("rows", [8, 64])
def test_gradients_of_chunks(train_bf16, tmp_path, family, rows):
    """Compared with PyTorch in fp32, whose own error is negligible: at most twice the error without
    chunks."""
    make(tmp_path / "model", "--family", family, "--layers", 1, "--heads", 2, "--channels", 64, "--vocab", 500,
         "--positions", 256, "--dtype", "bf16")
    write_shard(tmp_path / "data.bin", random_tokens(500, 6000))
    data = ("--model", tmp_path / "model", "--data", tmp_path / "data.bin", "--batch", 4, "--seq-len", 256, "--steps", 1)
    list(reference.Trainer(reference.parse_options([*map(str, data), "--dump-gradients",
                                                    str(tmp_path / "expected")])).train())
    expected = load_file(tmp_path / "expected")

    def gradients(mlp_rows):
        out = tmp_path / f"out{mlp_rows}"
        train_bf16(*data, "--optimizer", "beta1=0", "--clip", 0, "--sample", "tokens=0", "--chunk-rows", f"mlp={mlp_rows}", "--out", out)
        return load_file(out / "trainer_state.safetensors")

    whole, chunks = gradients(0), gradients(rows)
    names = [name for name in whole if name.startswith("m.")]
    assert len(names) > 8
    for name in names:
        wanted = fused(name.removeprefix("m."), expected)
        of_whole, of_chunks = ((g[name] - wanted).norm() / wanted.norm() for g in (whole, chunks))
        assert of_chunks <= 2 * of_whole, name


@pytest.mark.parametrize("model, length", [("llama:d4", 8192), ("d4", 16384)])
def test_automatic_rows(train, model, length):
    """They cost at most 2% of the estimated step, and options that change no bit do not change them. It takes more rows to fill
    a GPU."""
    most = 8192 if train.device == "cpu" else 8 * length
    options = ("--model", model, "--seq-len", length if train.device == "cpu" else most, "--batch", 1, "--recompute", "block")
    chunks, whole = train.plan(*options, "--chunk-rows", "mlp=auto,head=0"), train.plan(*options, "--chunk-rows", "head=0")
    assert 0 < chunks["mlp_rows"] < most and whole["mlp_rows"] == 0
    assert chunks["estimated_seconds"] <= 1.02 * whole["estimated_seconds"]
    for neutral in (("--threads", 1), ("--optimizer", "sgd"), ("--recompute", "none")):
        assert train.plan(*options, *neutral, "--chunk-rows", "mlp=auto")["mlp_rows"] == chunks["mlp_rows"], neutral
    assert train.plan("--model", "d4", "--batch", 1, "--seq-len", 64, "--chunk-rows", "mlp=auto")["mlp_rows"] == 0


def test_memory_chooses_chunks_where_all_rows_do_not_fit(train):
    length = 16384 if train.device == "cpu" else 131072
    options = ("--model", "llama:d4", "--batch", 1, "--seq-len", length, "--sample", "tokens=0")
    whole = [train.plan(*options, "--recompute", "block", "--chunk-rows", f"mlp={rows},head=64")["totals"]["total"]
             for rows in (0, "auto")]
    assert whole[1] < whole[0]
    budget = ("--memory", f"{sum(whole) // 2 >> 20}MiB")
    chosen = train.plan(*options, *budget)
    assert chosen["mlp_rows"] > 0 and chosen["choice"][0]["mlp_rows"] == chosen["mlp_rows"]
    resident = ("--offload", "weights=device,gradients=device,state=device,inputs=device")
    error = train(*options, *budget, *resident, "--chunk-rows", "mlp=0,attention=0", "--plan",
                  code=2).stderr.decode()
    assert "the least that this takes" in error
    assert train.plan(*options, "--memory", "1000GiB")["mlp_rows"] == 0


@pytest.mark.parametrize("value, named", [("-3", "--chunk-rows mlp"), ("some", "--chunk-rows mlp"), ("12", "multiple of 8"),
                                          ("1048576", "a micro-batch has ")])
def test_what_is_no_number_of_rows(train, tmp_path, value, named):
    prepare(tmp_path, "llama", OPTIONS)
    refused(train, tmp_path, {"--model": "model", "--data": "data.bin", "--chunk-rows mlp": value}, named)
