"""Memory options: how much they save, and that they do not change the training (to the bit where
promised)."""

import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import time

import pytest
import reference
import torch
from reference_runs import open_with_transformers
from safetensors.torch import load_file
from trainer_runs import (cpu_seconds, figures, make, peak, random_tokens, read_log, running, saved_bytes, taken_and_planned,
                          wait_for_line, write_shard, write_text)

MIB = 1 << 20
LEVELS = ["none", "gelu", "norm", "ffn", "attention", "block"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model and data of most tests; no test writes here."""
    path = tmp_path_factory.mktemp("given")
    make(path / "model", "--layers", 3, "--heads", 3, "--channels", 48, "--positions", 64)
    write_text(path / "text")
    return path


DEFAULTS = {"--batch": 3, "--seq-len": 20, "--sample tokens": 0, "--chunk-rows head": 0, "--steps": 4, "--eval-every": 2,
            "--lr": 1e-3}


def trained(train, folder, out, *options):
    """The figures and the saved files of four steps."""
    chosen = {"--model": folder / "model", "--data": folder / "text", **DEFAULTS}
    given = [(*name.split(), value) for name, value in chosen.items() if name not in options]
    defaults = (part for name, *key, value in given for part in (name, f"{key[0]}={value}" if key else value))
    train(*defaults, "--out", out, "--log", f"{out}.log", *options)
    return figures(read_log(f"{out}.log")), saved_bytes(out)


# ---- the figures that GPT-2 must reach, in MiB of activations at batch 4, seq-len 1024, bf16


@pytest.mark.parametrize("model, level, mib", [
    ("d12", "gelu", 925), ("d12", "norm", 780), ("d12", "ffn", 510), ("d12", "block", 175),
    ("d48", "norm", 6200), ("d48", "ffn", 3850), ("d48", "block", 800)])
def test_gates(train_bf16, model, level, mib):
    plan = train_bf16.plan("--model", model, "--batch", 4, "--seq-len", 1024, "--recompute", level, "--chunk-rows", "head=256")
    assert plan["totals"]["activations"] <= mib * MIB
    assert plan["totals"]["activations"] <= 1.01 * plan["activations_lower_bound"]


def activations(train, *options):
    return train.plan("--sample", "tokens=0", *options)["totals"]["activations"]


@pytest.mark.usually("bf16")
def test_a_checkpointed_layer_costs_its_input(train, tmp_path):
    """With `block`, each further layer costs one (B, T, C) tensor, and memory grows linearly with T."""
    for layers in (4, 13):
        make(tmp_path / f"{layers}", "--layers", layers, "--heads", 4, "--channels", 128, "--positions", 2048)
    sizes = {(layers, seq_len): activations(train, "--model", tmp_path / f"{layers}", "--batch", 2, "--seq-len", seq_len,
                                            "--recompute", "block") for layers in (4, 13) for seq_len in (512, 2048)}
    width = {"fp32": 4, "bf16": 2}[train.precision]
    assert sizes[13, 512] - sizes[4, 512] == 9 * 2 * 512 * 128 * width
    assert 3.7 < sizes[13, 2048] / sizes[13, 512] < 4.05


@pytest.mark.usually("bf16")
def test_each_level_takes_less(train):
    sizes = [activations(train, "--model", "d12", "--batch", 4, "--seq-len", 256, "--recompute", level)
             for level in LEVELS]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(LEVELS)


# ---- what a process really takes


@pytest.mark.usually("fp32")
@pytest.mark.parametrize("goes_on", [("--steps", 10**6), ("--steps", 0, "--prompt", "a", "--sample", f"tokens={10**6}")],
                         ids=str)
def test_reading_a_save_stays_in_the_plan(train, tmp_path, goes_on):
    """The save's files are larger than everything that the plan has besides the state."""
    if train.device != "cpu":
        pytest.skip("of a CPU's memory")
    write_text(tmp_path / "text")
    out = tmp_path / "out"
    train("--model", "d6", "--data", tmp_path / "text", "--batch", 1, "--seq-len", 16, "--sample", "tokens=0",
          "--threads", 2, "--steps", 1, "--out", out)
    options = ("--resume", out, *goes_on)  # a run that goes on for long, so that its memory can be read
    assert (out / "model.safetensors").stat().st_size > 20 * MIB
    line = rb"^a" if "--prompt" in goes_on else rb"^taken from"  # the text begins with its prompt
    assert peak(train, *options, line=line) < total(train.plan(*options))


@pytest.mark.parametrize("threads", [1, 4, 16])
@pytest.mark.parametrize("model, seq_len", [("d1", 16), ("d2", 512), ("d4", 128), ("d4", 1024)])
def test_a_run_never_takes_more_than_its_plan(train, tmp_path, model, seq_len, threads):
    """At no moment, not even before the first step; and not for small models either."""
    if train.device != "cpu":
        pytest.skip("of a CPU's memory")
    write_text(tmp_path / "text", 60000)
    options = ("--model", model, "--data", tmp_path / "text", "--batch", max(1, 1024 // seq_len), "--seq-len", seq_len,
               "--threads", threads, "--steps", 10000, "--sample", "tokens=0", "--print-every", 1)
    assert peak(train, *options, line=rb"^step +4/") <= total(train.plan(*options))


# The options of an export of a model, or of its adapter.
EXPORTS = {"f32": ("--export", "x.gguf,type=f32"), "q8_0": ("--export", "x.gguf,type=q8_0"),
           "of NF4, f32": ("--base", "nf4-double", "--export", "x.gguf,type=f32"),
           "of NF4, q4_k_m": ("--base", "nf4-double", "--export", "x.gguf,type=q4_k_m"),
           "of NF4 and an adapter": ("--base", "nf4-double", "--adapter", "adapter", "--export", "x.gguf,type=f32"),
           "after training": ("--base", "nf4-double", "--train", "lora", "--data", "data.bin", "--batch", 1, "--seq-len", 16, "--steps", 1,
                              "--sample", "tokens=0", "--export", "x.gguf,type=f32"),
           "an adapter": ("--adapter", "adapter", "--export", "x.gguf,type=f32,part=adapter")}


@pytest.fixture(scope="module")
def exported(train_fp32, tmp_path_factory):
    """Models of 112 MiB in fp32, in which no tensor has more than 8, and an adapter for one."""
    work = tmp_path_factory.mktemp("exported")
    for family in ("llama", "gpt2"):
        make(work / family, "--family", family, "--layers", 6, "--heads", 4, "--channels", 512, "--vocab", 4096, "--dtype", "bf16",
             *(("--mlp-width", 2048) if family == "llama" else ("--positions", 64)))
    write_shard(work / "data.bin", random_tokens(4096, 3000))
    train_fp32("--model", "llama", "--train", "lora", "--data", "data.bin", "--batch", 1, "--seq-len", 16, "--steps", 1, "--warmup", 0, "--sample",
               "tokens=0", "--out", "adapter", cwd=work)
    return work


def peak_until_the_end(train, *options, cwd):
    """The peak memory of a run, in bytes, looked at a thousand times a second."""
    most = 0
    process = subprocess.Popen([train.path, *map(str, options)], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=train.environment)
    status = pathlib.Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())  # none at the very end
        most = max(most, 1024 * int(found[1]) if found else 0)
        time.sleep(0.001)
    assert process.returncode == 0, process.stderr.read()
    return most


@pytest.mark.parametrize("family, kind", [*(("llama", kind) for kind in EXPORTS), ("gpt2", "f32"), ("gpt2", "of NF4, f32")])
def test_an_export_stays_in_the_plan(train_fp32, exported, family, kind):
    """Also where the file is larger than all that the plan has: it is written piece by piece."""
    if train_fp32.device != "cpu":
        pytest.skip("of a CPU's memory")
    options = ("--model", family, "--threads", 2, *(() if kind == "after training" else ("--steps", 0)), *EXPORTS[kind])
    plan = json.loads(train_fp32(*options, "--plan", "json", cwd=exported).stdout)
    taken = peak_until_the_end(train_fp32, *options, cwd=exported)
    assert plan["totals"]["weights"] < taken <= total(plan)
    if kind in ("of NF4, f32", "of NF4 and an adapter"):
        assert (exported / "x.gguf").stat().st_size > total(plan)


# ---- the same bits


@pytest.fixture(scope="module")
def baseline(folder, tmp_path_factory):
    """A run that keeps all activations, once for each binary."""
    known = {}

    def of(train, *options):
        key = (str(train), options)
        if key not in known:
            known[key] = trained(train, folder, tmp_path_factory.mktemp("none") / "out", "--recompute", "none", *options)
        return known[key]
    return of


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("options", [(), ("--grad-accum", 2), ("--advanced", "clip=block",)], ids=str)
def test_recompute_changes_no_bit(train, folder, baseline, tmp_path, level, options):
    assert trained(train, folder, tmp_path / "out", "--recompute", level, *options) == baseline(train, *options)


@pytest.mark.usually("bf16")
@pytest.mark.parametrize("heads, channels, batch, seq_len", [(1, 8, 1, 1), (2, 74, 2, 33), (1, 128, 1, 64)])
def test_recompute_of_other_shapes(train, folder, tmp_path, heads, channels, batch, seq_len):
    make(tmp_path / "model", "--layers", 2, "--heads", heads, "--channels", channels, "--positions", 64)
    runs = [trained(train, folder, tmp_path / level, "--model", tmp_path / "model", "--batch", batch, "--seq-len",
                    seq_len, "--recompute", level) for level in LEVELS]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("level", LEVELS)
def test_update_in_backward_changes_no_bit(train, folder, baseline, tmp_path, level):
    """Also compared with a run that clips each block's gradient."""
    assert trained(train, folder, tmp_path / "out", "--recompute", level, "--advanced", "clip=block",
                   "--update-in-backward") == baseline(train, "--advanced", "clip=block")


def test_update_in_backward_without_clipping(train, folder, tmp_path):
    """The logged norm is the same too: sums of squares are added in one order, whenever a unit was
    updated."""
    plain = trained(train, folder, tmp_path / "plain", "--clip", 0)
    assert plain == trained(train, folder, tmp_path / "out", "--clip", 0, "--update-in-backward")


@pytest.mark.usually("bf16")
def test_update_in_backward_holds_one_block(train):
    """The embeddings' gradient grows until the end of backward; besides it only one block's exists at a
    time."""
    options = ("--model", "d12", "--batch", 1, "--seq-len", 64, "--recompute", "block", "--clip", 0,
               "--sample", "tokens=0")
    plan, whole = train.plan(*options, "--update-in-backward"), train.plan(*options)
    assert plan["totals"]["gradients"] == 0
    rooms = sorted((b["born"], b["dies"], b["bytes"]) for b in plan["buffers"] if b["kind"] == "parameter_gradient")
    width = {"fp32": 4, "bf16": 2}[train.precision]
    assert len(rooms) == 14 and sum(size for _, _, size in rooms) == whole["totals"]["gradients"]
    embeddings, last, *blocks = rooms
    assert embeddings[2] == (50304 + 1024) * 768 * width and embeddings[1] > blocks[-1][1]
    assert all(before[1] < after[0] for before, after in itertools.pairwise([last, *blocks]))
    saved = whole["totals"]["total"] - plan["totals"]["total"]
    assert saved > whole["totals"]["gradients"] - embeddings[2] - 1.5 * blocks[0][2]


# ---- every option with every other

NEUTRAL = {  # change no bit of a loss
    "block": ("--recompute", "block"), "mix": ("--recompute", "block:1,ffn:1,gelu:1"),
    "attention": ("--recompute", "attention"), "split": ("--state-formats", "master=split"),
    "consumed": ("--update-in-backward",)}
CHANGING = {  # change the arithmetic, in the same way every time
    "head": ("--chunk-rows", "head=7"), "no master": ("--state-formats", "master=none"), "m bf16": ("--state-formats", "m=bf16"),
    "v bf16": ("--state-formats", "v=bf16"), "m 8bit": ("--state-formats", "m=8bit"), "v 8bit": ("--state-formats", "v=8bit"),
    "sgd": ("--optimizer", "sgd")}


def together(train, *choices):
    """True if these options can be combined, in this binary."""
    names = [" ".join((name, *(str(value).partition("=")[0] for value in values if "=" in str(value)))) for name, *values in choices if name]
    return (len(set(names)) == len(names) and not ("--state-formats master" in names and train.precision == "fp32")
            and not ({"--state-formats m", "--state-formats v"} & set(names) and "--optimizer" in names))


@pytest.fixture(scope="module", params=[(3, 48, 3, 20), (5, 40, 2, 33)], ids=["C48", "C40"])
def outcome(request, tmp_path_factory):
    """The losses, norms and weights that options lead to. Each run is made once for each binary and shape."""
    heads, channels, batch, seq_len = request.param
    path = tmp_path_factory.mktemp("matrix")
    make(path / "model", "--layers", 3, "--heads", heads, "--channels", channels, "--positions", 64)
    write_text(path / "text")
    known = {}

    def of(train, *choices):
        key = (str(train), frozenset(choices))
        if key not in known:
            log, files = trained(train, path, path / str(len(known)), "--advanced", "clip=block", "--batch", batch, "--seq-len",
                                 seq_len, *(part for choice in choices for part in choice))
            known[key] = log, files["model.safetensors"]
        return known[key]
    return of


@pytest.mark.parametrize("count", [1, 2])
def test_neutral_options_together(train, outcome, count):
    tried = 0
    for names in itertools.combinations(NEUTRAL, count):
        choices = [NEUTRAL[name] for name in names]
        if together(train, *choices):
            assert outcome(train, *choices) == outcome(train), names
            tried += 1
    assert tried >= {"fp32": 4, "bf16": 5}[train.precision] if count == 1 else 3


@pytest.mark.usually("bf16")
@pytest.mark.parametrize("name", CHANGING)
def test_changing_options_with_neutral_ones(train, outcome, name):
    if not together(train, CHANGING[name]):
        pytest.skip("for bf16 weights")
    alone = outcome(train, CHANGING[name])
    assert name == "head" or alone != outcome(train)
    for neutral in NEUTRAL.values():
        if together(train, CHANGING[name], neutral):
            assert outcome(train, CHANGING[name], neutral) == alone, neutral


@pytest.mark.usually("bf16")
def test_changing_options_together(train, outcome):
    """The results are reproducible: a second run adds options that change no bit."""
    for names in itertools.combinations(CHANGING, 2):
        choices = [CHANGING[name] for name in names]
        if together(train, *choices):
            both = outcome(train, *choices)
            assert outcome(train, *choices, NEUTRAL["mix"], NEUTRAL["consumed"]) == both, names
            if "head" not in names:  # in fp32 its rounding may not be visible
                assert all(both != outcome(train, choice) for choice in choices), names


# ---- the head in chunks


def test_head_rows_change_the_rounding_only(train, folder, baseline, tmp_path):
    """Chunks that divide the 60 rows and chunks that do not; the bits are the same every time."""
    log, _ = baseline(train)
    bound = {"fp32": 1e-5, "bf16": 5e-3}[train.precision]
    for rows in (1, 7, 20, 59, 60, 1000):
        got, files = trained(train, folder, tmp_path / f"{rows}", "--chunk-rows", f"head={rows}")
        assert (got, files) == trained(train, folder, tmp_path / f"{rows}again", "--chunk-rows", f"head={rows}",
                                       "--recompute", "block")
        for key in ("loss", "val_loss", "grad_norm"):
            assert [line[key] for line in got if key in line] == pytest.approx(
                [line[key] for line in log if key in line], rel=10 * bound if key == "grad_norm" else 0, abs=bound)
        if rows >= 60:
            assert got == log


def test_no_whole_logits(train):
    for rows, expected in ((100, {100, 1}), (256, {256, 1}), (0, {4 * 1024, 1})):
        plan = train.plan("--model", "d12", "--batch", 4, "--seq-len", 1024, "--chunk-rows", f"head={rows}")
        assert {b["shape"][0] for b in plan["buffers"] if b["name"] == "logits"} <= expected | {4 * 1024 % max(rows, 1)}


ROWS = ["--chunk-rows", "head=auto"]


@pytest.mark.usually("bf16")
@pytest.mark.parametrize("options", [(), ("--model", "d4"), ("--model", "d12", "--batch", 4, "--seq-len", 256),
                                     ("--model", "d12", "--batch", 4, "--seq-len", 1024)], ids=str)
def test_automatic_head_rows(train, options):
    """They cost at most 2% of the estimated step, and options that change no bit do not change the choice."""
    plan = train.plan(*options, "--recompute", "none")
    whole = train.plan(*options, "--recompute", "none", "--chunk-rows", "head=0")
    assert plan["estimated_seconds"] <= 1.02 * whole["estimated_seconds"]
    assert total(plan) <= total(whole)
    for neutral in (ROWS, ("--threads", 1), ("--threads", 5), ("--recompute", "block"), ("--optimizer", "sgd"),
                    ("--advanced", "clip=block", "--update-in-backward")):
        assert train.plan(*options, *neutral)["head_rows"] == plan["head_rows"], neutral


def test_automatic_head_rows_differ(train):
    """All rows at once if launches cost as much as the head, few rows for a large batch."""
    assert train.plan("--batch", 1)["head_rows"] == 0
    large = train.plan("--model", "d12", "--batch", 64, "--seq-len", 1024)["head_rows"]
    assert 64 <= large <= 32768


@pytest.mark.usually("fp32")
def test_a_resume_keeps_the_head_rows(train, folder, tmp_path):
    """The choice is saved and holds even if another batch would lead to another choice; generation chooses
    none."""
    run = ("--model", folder / "model", "--data", folder / "text", "--seq-len", 20, "--batch", 4, "--sample", "tokens=0")
    train(*run, "--steps", 1, "--out", tmp_path / "out")
    rows = train.plan(*run)["head_rows"]
    saved = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["options"]
    assert saved["--chunk-rows.head"] == [str(rows)]
    assert train.plan("--resume", tmp_path / "out", "--batch", 100)["head_rows"] == rows
    train(*run, "--steps", 1, "--out", tmp_path / "again", *ROWS)
    saved = json.loads((tmp_path / "again" / "trainer_state.json").read_text())["options"]
    assert saved["--chunk-rows.head"] == [str(rows)]


@pytest.mark.parametrize("rows", [8, 32])
def test_gradient_of_the_head_in_chunks(train_bf16, tmp_path, rows):
    """Compared with PyTorch in fp32, whose own error is negligible: at most twice the error without
    chunks."""
    make(tmp_path / "model", "--layers", 1, "--heads", 2, "--channels", 64, "--vocab", 500, "--positions", 256,
         "--dtype", "bf16")
    write_shard(tmp_path / "data.bin", random_tokens(500, 6000))
    data = ("--model", tmp_path / "model", "--data", tmp_path / "data.bin", "--batch", 4, "--seq-len", 256, "--steps", 1)
    list(reference.Trainer(reference.parse_options([*map(str, data), "--dump-gradients",
                                                    str(tmp_path / "expected")])).train())
    expected = load_file(tmp_path / "expected")

    def error(head_rows, name):
        out = tmp_path / f"out{head_rows}"
        train_bf16(*data, "--optimizer", "beta1=0", "--clip", 0, "--sample", "tokens=0", "--chunk-rows", f"head={head_rows}", "--out", out)
        got = load_file(out / "trainer_state.safetensors")["m." + name]
        wanted = expected["transformer." + name]
        return ((got - wanted).norm() / wanted.norm()).item()

    for name in ("wte.weight", "ln_f.weight", "ln_f.bias"):
        assert error(rows, name) <= 2 * error(0, name), name


# ---- samples


@pytest.mark.usually("fp32")
def test_a_sample_takes_what_its_tokens_need(train, tmp_path):
    """Sampling takes memory for the sample's tokens, not for training's whole window. If the window is much
    longer than the sample, sampling does not decide the peak; if it does, the plan says so."""
    make(tmp_path / "model", "--family", "llama", "--layers", 3, "--heads", 2, "--channels", 64, "--positions", 8192)
    options = ("--model", tmp_path / "model", "--batch", 1, "--seq-len", 8192, "--recompute", "block", "--chunk-rows", "mlp=64,attention=128,head=64")

    def sampling(*more):
        text = train(*options, *more, "--plan").stdout.decode()
        [peak] = re.findall(r"^ +[\d.]+  (activations.*)", text, re.MULTILINE)
        return {name: float(mib) for name, mib in re.findall(r"^(.*) uses ([\d.]+) MiB", text, re.MULTILINE)}, peak

    uses, peak = sampling()
    row = 3 * 2 * 64 * {"fp32": 4, "bf16": 2}[train.precision]  # for keys and values
    assert uses["sampling"] < 2 * 201 * row / MIB + 1 and "a sample's continuation" not in uses
    assert "which" not in peak and activations(train, *options, "--sample", "tokens=200") == activations(train, *options)
    uses, _ = sampling("--sample", "tokens=20000")  # a continuation, of half a window, is processed in parts
    cache = 8192 * row / MIB
    assert cache < uses["a sample's continuation"] < cache + 2048 * 64 * 60 / MIB
    _, peak = sampling("--seq-len", 64, "--chunk-rows", "mlp=0,attention=0,head=0", "--prompt", 6000 * "x")
    assert peak.startswith("activations, which sampling needs; a step's peak is ")


def test_a_long_prompt_goes_in_parts(train_fp32, tmp_path):
    """It is continued as by transformers. Each part attends to those before it; the last part has the
    rest."""
    make(tmp_path / "model", "--family", "llama", "--layers", 2, "--heads", 4, "--kv-heads", 2, "--channels", 32, "--positions", 8192)
    text = write_text(tmp_path / "text", 3 * 2048 + 1).read_text()
    model = open_with_transformers(tmp_path / "model").float()
    wanted = list(text.encode())
    with torch.no_grad():
        out = model(torch.tensor([wanted]), use_cache=True, logits_to_keep=1)
        for _ in range(8):
            wanted.append(int(out.logits[0, -1].argmax()))
            out = model(torch.tensor([wanted[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    options = ("--model", tmp_path / "model", "--steps", 0, "--prompt", text, "--sample", "temperature=0", "--max-new-tokens")
    assert train_fp32(*options, 8).stdout == bytes(wanted) + b"\n"
    parts = [float(re.search(r"sampling uses ([\d.]+)", train_fp32(*options, n, "--plan").stdout.decode())[1]) for n in (8, 1008)]
    assert parts[1] - parts[0] == pytest.approx(1000 * 2 * 2 * 16 * 4 / MIB, abs=0.02)


# ---- --memory


def total(plan):
    return plan["totals"]["total"]


def of_a_gpu(train):
    """Bytes that any run takes on a GPU and not on a CPU: the CUDA context and cuBLASLt's workspace."""
    return train.plan("--model", "d1")["totals"]["process"] + 32 * MIB if train.device == "cuda" else 0


@pytest.fixture(scope="module")
def brute_force(train_bf16, tmp_path_factory):
    """(the model's options, every configuration of a small model as (seconds, bytes, its options))."""
    path = tmp_path_factory.mktemp("brute")
    make(path / "model", "--layers", 3, "--heads", 2, "--channels", 64, "--vocab", 300, "--positions", 128)
    given = ("--model", path / "model", "--seq-len", 80, "--sample", "tokens=0")
    every = []
    for batch, rows in ((2, 0), (2, 64), (1, 0), (1, 64)):
        for levels in itertools.product(LEVELS, repeat=3):
            options = ("--recompute", ",".join(f"{level}:1" for level in levels), "--chunk-rows", f"head={rows}", "--batch", batch,
                       "--grad-accum", 2 // batch)
            plan = train_bf16.plan(*given, *options)
            every.append((plan["estimated_seconds"], total(plan), options))
    return given, every


def test_choice_is_the_best_there_is(train_bf16, brute_force):
    """Compared with all configurations in any order, at budgets from the smallest to the largest."""
    given, every = brute_force
    sizes = sorted({size for _, size, _ in every})
    least, most = sizes[0], sizes[-1]
    chosen = set()
    for budget in [least, *(least + (most - least) * i // 23 for i in range(1, 24)), *sizes[5::40]]:
        plan = train_bf16.plan(*given, "--batch", 2, "--memory", f"{budget}B")
        best = min(seconds for seconds, size, _ in every if size <= budget)
        assert total(plan) <= budget
        assert plan["estimated_seconds"] == pytest.approx(best, rel=1e-6)
        [choice, *others] = plan["choice"]
        assert choice["bytes"] == total(plan) and choice["seconds"] == pytest.approx(best, rel=1e-6)
        fastest = min(seconds for seconds, _, _ in every)
        assert choice["slower"] == pytest.approx(best / fastest - 1, abs=1e-6)
        for other in others:
            assert (other["seconds"] < choice["seconds"]) != (other["bytes"] < choice["bytes"])
        chosen.add((choice["recompute"], choice["batch"], choice["head_rows"]))
    assert len(chosen) > 10


def test_too_little_memory_says_the_least(train_bf16, brute_force):
    """It names the least for a run that is all in memory. If more may move (to host memory beside a GPU),
    that budget is enough."""
    given, every = brute_force
    least = min(size for _, size, _ in every)
    host = ("--memory", "host=1GiB") if train_bf16.device == "cuda" else ()
    assert total(train_bf16.plan(*given, "--batch", 2, "--memory", f"{least - 1}B", *host)) < least
    given = (*given, "--offload", "weights=device,gradients=device,state=device,inputs=device")
    error = train_bf16(*given, "--batch", 2, "--memory", f"{least - 1}B", "--plan", code=2).stderr.decode()
    assert error.count("\n") == 1 and f"{math.ceil(10 * least / MIB) / 10:.1f} MiB" in error and "--memory" in error
    assert "--recompute block" in error


@pytest.mark.parametrize("model", ["d6", "d12"])
@pytest.mark.parametrize("level", LEVELS)
def test_no_slower_than_a_level_that_fits(train, model, level):
    options = ("--model", model, "--batch", 4, "--seq-len", 256, "--sample", "tokens=0")
    plan = train.plan(*options, "--recompute", level)
    chosen = train.plan(*options, "--memory", f"{int(1.05 * total(plan))}B")
    assert chosen["estimated_seconds"] <= plan["estimated_seconds"]
    assert total(chosen) <= 1.05 * total(plan)


@pytest.mark.usually("bf16")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_what_is_chosen_fits_when_measured(train, tmp_path, share):
    write_text(tmp_path / "text", 60000)
    shape = ("--batch", 4, "--seq-len", 64) if train.is_played else ("--batch", 8, "--seq-len", 256)
    options = ("--model", "d4", "--data", tmp_path / "text", *shape, "--sample", "tokens=0")
    error = train(*options, "--memory", "1B", "--plan", code=2).stderr.decode()
    least, most = float(re.search(r"([\d.]+) MiB", error)[1]), total(train.plan(*options, "--recompute", "none")) / MIB
    budget = least + 0.1 + share * (most - least)
    text = train(*options, "--memory", f"{budget:.1f}MiB", "--steps", 2).stdout.decode()
    assert float(re.search(r"taken from the device: ([\d.]+)", text)[1]) <= budget + (0 if train.device == "cpu" else 128)


def unread_library_bytes(pid):
    """The pages of the executable and its libraries that a plan counts and a process has not read. A plan counts
    at most 7.5 MiB of each file."""
    sizes, with_code = {}, set()
    for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, access, _, device, inode, *_ = line.split()
        if inode == "0" or not access.startswith("r-"):
            continue
        begin, end = (int(address, 16) for address in span.split("-"))
        sizes[device, inode] = sizes.get((device, inode), 0) + end - begin
        if "x" in access:
            with_code.add((device, inode))
    resident = int(re.search(r"RssFile:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) << 10
    return sum(min(sizes[file], 15 << 19) for file in with_code) - resident


@pytest.mark.usually("fp32")
@pytest.mark.parametrize("threads", [1, 8, 64, *(pytest.param(threads, marks=pytest.mark.more) for threads in (2, 16))])
def test_the_plan_holds_with_many_threads(train, tmp_path, threads):
    """The plan is not much more than what a run takes. The difference is what libraries' pages would take that
    were not read; and what each thread is given, 1.5 MiB for its stack and heap and up to 1.5 MiB for what
    products copy. A thread without work never uses that."""
    if train.device != "cpu":
        pytest.skip("a GPU computes")
    make(tmp_path / "model", "--layers", 1, "--heads", 1, "--channels", 128, "--positions", 384)
    write_text(tmp_path / "text", 60000)
    options = ("--model", tmp_path / "model", "--data", tmp_path / "text", "--batch", 32, "--seq-len", 384, "--chunk-rows", "head=256",
               "--sample", "tokens=0", "--threads", threads)
    with running(train, *options, "--steps", 1000, "--print-every", 1) as process:
        wait_for_line(process, b"^step +2/")
        unread = unread_library_bytes(process.pid) / MIB
    assert 0 <= unread < 15
    bound = unread + 10 + 3 * threads
    for _ in range(3):
        text = train(*options, "--steps", 2).stdout.decode()
        taken, planned = taken_and_planned(text)
        assert taken <= planned
        if planned <= taken + bound:
            return
    # If other work keeps threads from starting, those that run do everything, and the others make no copies.
    assert threads > 1 and os.getloadavg()[0] > 2 * os.cpu_count()
    assert planned <= taken + bound + train.plan(*options)["totals"]["workspace"] / MIB


@pytest.mark.usually("bf16")
def test_choice_of_a_large_model_is_quick(train):
    plans = []
    seconds = cpu_seconds(lambda: plans.append(train.plan("--model", "d48", "--batch", 16, "--seq-len", 1024, "--memory", "40GiB")))
    assert seconds < 4 and total(plans[0]) <= 40 << 30


@pytest.mark.usually("fp32")
def test_a_run_with_memory_resumes_as_it_ran(train, folder, tmp_path):
    """The save names what was chosen, so a resumed run has the same bits."""
    budget = f"{total(train.plan('--model', folder / 'model', '--batch', 1, '--seq-len', 20)) + 65536}B"
    log, files = trained(train, folder, tmp_path / "whole", "--memory", budget, "--batch", 6, "--steps", 6)
    trained(train, folder, tmp_path / "out", "--memory", budget, "--batch", 6, "--steps", 3, "--schedule", "constant")
    saved = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["options"]
    assert "--memory" not in saved and {"--recompute", "--batch", "--grad-accum", "--chunk-rows.head"} <= set(saved)
    trained(train, folder, tmp_path / "constant", "--memory", budget, "--batch", 6, "--steps", 6, "--schedule",
            "constant")
    train("--resume", tmp_path / "out", "--steps", 6)
    assert saved_bytes(tmp_path / "out") == saved_bytes(tmp_path / "constant")


@pytest.mark.usually("fp32")
def test_a_resume_with_another_budget_chooses_anew(train, folder, tmp_path):
    """The save's own choice does not hold for anything that --memory may choose."""
    chosen = {"--by-block", "--offload.weights", "--offload.gradients", "--offload.state", "--offload.inputs", "--prefetch", "--chunk-rows.mlp",
              "--chunk-rows.head", "--recompute"}
    options = ("--by-block", "--offload", "weights=disk,gradients=disk,state=disk:4,inputs=auto", "--prefetch", 2, "--chunk-rows",
               "mlp=8,head=16", "--recompute", "block")
    if train.device != "cpu":
        pytest.skip("a GPU has the host's memory too")
    train("--model", folder / "model", "--data", folder / "text", "--batch", 2, "--grad-accum", 2, "--seq-len", 20, "--steps", 1,
          "--sample", "tokens=0", "--out", tmp_path / "out", *options)
    saved = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["options"]
    assert chosen <= set(saved)
    train("--resume", tmp_path / "out", "--memory", "1GiB", "--steps", 2)
    saved = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["options"]
    assert not chosen & set(saved) - {"--chunk-rows.mlp", "--chunk-rows.head", "--recompute"}
    assert saved["--recompute"] != ["block"] and saved.get("--chunk-rows.mlp", ["0"]) == ["0"] and saved["--chunk-rows.head"] == ["0"]


@pytest.mark.usually("fp32")
def test_batch_auto(train):
    options = ("--model", "d4", "--seq-len", 128, "--sample", "tokens=0")
    for budget in (300 * MIB + of_a_gpu(train), 500 * MIB + of_a_gpu(train)):
        plan = train.plan(*options, "--batch", "auto", "--memory", f"{budget}B")
        assert total(plan) <= budget < total(train.plan(*options, "--batch", plan["batch"] + 1))
    # This uses the free memory of the machine.
    assert train.plan(*options, "--batch", "auto")["batch"] > plan["batch"]


@pytest.mark.usually("fp32")
def test_resume_auto_keeps_the_sequences_of_a_step(train, folder, tmp_path):
    """The same command, as a requeued job gives it, however --memory divided them."""
    step = ("--model", folder / "model", "--data", folder / "text", "--seq-len", 60, "--sample", "tokens=0")
    budget = total(train.plan(*step, "--batch", 8, "--recompute", "block"))
    run = (*step, "--batch", 32, "--out", tmp_path / "out", "--memory", f"{budget}B", "--resume", "auto")
    for steps in (1, 2, 3):
        train(*run, "--steps", steps)
        saved = json.loads((tmp_path / "out" / "latest" / "trainer_state.json").read_text())["options"]
        assert int(saved["--batch"][0]) * int(saved.get("--grad-accum", ["1"])[0]) == 32


@pytest.mark.usually("fp32")
def test_batch_auto_leaves_steps(train, folder):
    """An epoch has ten of them, however many micro-batches a step has."""
    for accumulated in (1, 2, 5):
        plan = train.plan("--model", folder / "model", "--data", folder / "text", "--seq-len", 20, "--sample", "tokens=0", "--batch", "auto",
                          "--grad-accum", accumulated)
        assert plan["batch"] == 179 // accumulated // 10  # of 4000 bytes a tenth is held out


@pytest.mark.usually("fp32")
def test_batch_auto_with_memory_resumes(train, folder, tmp_path):
    """The save has the batch that was found, and the given options; the budget does not apply again."""
    budget = 40 + of_a_gpu(train) // MIB  # with the program and its libraries
    run = ("--model", folder / "model", "--data", folder / "text", "--seq-len", 20, "--sample", "tokens=0",
           "--recompute", "norm", "--schedule", "constant", "--batch", "auto", "--memory", f"{budget}MiB")
    train(*run, "--steps", 2, "--out", tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["options"]
    assert "--memory" not in saved and saved["--recompute"] == ["norm"] and int(saved["--batch"][0]) > 1
    train("--resume", tmp_path / "out", "--steps", 4)
    train(*run, "--steps", 4, "--out", tmp_path / "whole")
    assert saved_bytes(tmp_path / "out") == saved_bytes(tmp_path / "whole")


@pytest.mark.usually("fp32")
def test_no_micro_batch_beyond_the_data(train, folder):
    """Otherwise the run could not be resumed."""
    options = ("--model", folder / "model", "--data", folder / "text", "--seq-len", 60, "--batch", 4, "--grad-accum", 64)
    plan = train.plan(*options, "--memory", "2GiB")
    assert plan["batch"] * plan["grad_accum"] == 256 and plan["batch"] <= 64  # of 4000 bytes
    huge = train.plan("--batch", 4096, "--grad-accum", 1 << 20, "--memory", "900GiB")
    assert huge["batch"] * huge["grad_accum"] == 1 << 32


def test_validation_is_the_same_whatever_was_chosen(train_fp32, folder, tmp_path):
    losses = []
    little = f"{37 + of_a_gpu(train_fp32) // MIB}MiB"
    for i, options in enumerate((("--memory", little), ("--memory", "2GiB"), ("--recompute", "block"))):
        log = tmp_path / f"{i}.log"
        train_fp32("--model", folder / "model", "--data", folder / "text", "--seq-len", 12, "--batch", 12, "--steps", 1,
                   "--eval-batches", 1, "--sample", "tokens=0", "--log", log, *options)
        losses.append(read_log(log)[-1]["val_loss"])
    assert losses == pytest.approx(losses[:1] * 3, rel=0, abs=1e-5)


def test_smaller_state_only_where_it_helps(train_bf16):
    """With enough memory nothing lossy is chosen. With too little, lossless formats come first."""
    options = ("--model", "d12", "--batch", 1, "--seq-len", 256, "--sample", "tokens=0", "--state-formats", "auto")

    def within(mib):
        plan = train_bf16.plan(*options, "--memory", f"{mib * MIB + of_a_gpu(train_bf16)}B")
        assert total(plan) <= mib * MIB + of_a_gpu(train_bf16)
        return plan["choice"][0]["formats"]

    assert [within(mib) for mib in (3000, 1800, 1300)] == ["", " --state-formats master=split", " --state-formats master=split,m=8bit,v=8bit"]


@pytest.mark.parametrize("channels", [5, 7])
def test_odd_channels_in_chunks(train, tmp_path, channels):
    make(tmp_path / "model", "--layers", 2, "--heads", 1, "--channels", channels, "--positions", 64)
    write_text(tmp_path / "text")
    run = ("--model", tmp_path / "model", "--data", tmp_path / "text", "--batch", 4, "--seq-len", 64, "--steps", 3,
           "--sample", "tokens=0")
    losses = []
    for rows in (0, 100):
        train(*run, "--chunk-rows", f"head={rows}", "--log", tmp_path / f"{rows}")
        losses += [line["loss"] for line in read_log(tmp_path / f"{rows}") if "loss" in line]
    assert losses[:3] == pytest.approx(losses[3:], rel=0, abs=5e-3)
