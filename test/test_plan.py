"""The memory report: its sums, its addresses, the figures it must reach, and that a run takes what it
says."""

import json
import re
import resource

import pytest
from trainer_runs import cpu_seconds, make, taken_and_planned, write_text

MIB = 1 << 20
LEVELS = ["none", "gelu", "norm", "ffn", "attention", "block"]
ELEMENT = {"fp32": 4, "bf16": 2, "int32": 4, "int16": 2, "byte": 1}


def aligned(size):
    return (size + 255) // 256 * 256


def in_arena(plan):
    """The buffers that are in the arena."""
    return [b for b in plan["buffers"] if b["offset"] is not None]


def peak(buffers):
    """The most bytes that are alive at one time."""
    events = sorted([(b["born"], aligned(b["bytes"])) for b in buffers] +
                    [(b["dies"], -aligned(b["bytes"])) for b in buffers])
    live = most = 0
    for _, size in events:
        live += size
        most = max(most, live)
    return most


def test_schema(train):
    plan = train.plan("--model", "d2", "--batch", 3, "--seq-len", 40, "--recompute", "norm")
    assert list(plan) == ["model", "parameters", "trained", "vocabulary", "device", "precision", "batch", "seq_len", "grad_accum",
                          "head_rows", "mlp_rows", "attention_rows", "recompute", "totals", "outside_device", "host", "activations_lower_bound",
                          "peak_at", "estimated_seconds", "tokens_per_second", "rates", *(["gpu"] if plan["device"] == "cuda" else []),
                          "phases", "operations", "buffers", "memory_setting"]
    assert list(plan["outside_device"].values()) == [0, 0, 0, 0] and list(plan["host"]) == ["pinned", "unpinned"]
    for kind in ("pinned", "unpinned"):  # on a CPU both are in the totals
        assert (plan["host"][kind] > 0) == (plan["device"] == "cuda")
    assert (plan["model"], plan["batch"], plan["seq_len"], plan["recompute"]) == ("d2", 3, 40, "norm")
    assert plan["device"] in ("cpu", "cuda") and plan["precision"] in ("fp32", "bf16")
    assert list(plan["totals"]) == ["weights", "gradients", "optimizer_m", "optimizer_v", "master", "input",
                                    "activations", "workspace", "process", "total"]
    assert all(isinstance(size, int) for size in plan["totals"].values())
    assert re.search(r"forward|head|backward", plan["peak_at"])
    for operation in plan["operations"]:
        assert list(operation) == ["name", "calls", "flops", "bytes", "seconds"]
        assert min(list(operation.values())[1:]) >= 0
    # For one micro-batch and the update, which together are a step here.
    assert sum(o["seconds"] for o in plan["operations"]) == pytest.approx(plan["estimated_seconds"])
    calls = {operation["name"]: operation["calls"] for operation in plan["operations"]}
    assert calls["attention_forward"] == calls["attention_backward"] == 2 and calls["optimizer_update"] >= 1
    for buffer in plan["buffers"]:
        assert list(buffer) == ["name", "kind", "shape", "dtype", "bytes", "offset", "born", "dies"]
        elements = 1
        for dimension in buffer["shape"]:
            elements *= dimension
        assert buffer["bytes"] == elements * ELEMENT[buffer["dtype"]], buffer
        assert 0 <= buffer["born"] < buffer["dies"], buffer
    assert {b["kind"] for b in plan["buffers"]} - {"master"} == {
        "weights", "gradients", "optimizer_m", "optimizer_v", "workspace", "input", "activation", "gradient"}


def test_the_configuration_and_the_setting(train):
    """--plan json has what was asked for, and in memory_setting what was chosen."""
    options = ("--model", "d4", "--batch", 2, "--seq-len", 64, "--lr", 0.25, "--sample", "top-k=7", "--seed", 5)
    plan = json.loads(train(*options, "--plan", "json").stdout)
    run, setting = plan["run"], plan["memory_setting"]
    assert (run["inputs"]["model"], run["inputs"]["seq_len"], run["training"]["lr"], run["training"]["seed"]) == ("d4", 64, 0.25, 5)
    assert run["answers"]["sampling"]["top_k"] == 7 and run["device"]["plan"] and not run["outputs"]["out"]
    assert (setting["batch"], setting["recompute"], setting["weights"], setting["zero"]) == (2, "gelu", "device", "auto")
    budget = f"{plan['totals']['total'] + 1000}B"
    chosen = json.loads(train(*options, "--memory", budget, "--plan", "json").stdout)
    assert chosen["run"]["device"]["memory"] == budget
    for key in ("batch", "grad_accum", "recompute", "head_rows", "mlp_rows", "attention_rows"):
        assert chosen["memory_setting"][key] == chosen[key]


def test_totals(train):
    plan = train.plan("--model", "d2", "--batch", 3, "--seq-len", 40)
    totals = plan["totals"]
    for kind in ("weights", "gradients", "optimizer_m", "optimizer_v", "master", "input", "workspace"):
        assert totals[kind] == sum(b["bytes"] for b in plan["buffers"] if b["kind"] == kind), kind
    assert totals["activations"] == max(b["offset"] + aligned(b["bytes"]) for b in in_arena(plan))
    assert totals["total"] == sum(size for kind, size in totals.items() if kind != "total")
    # Tensors are padded to 256 elements, and wte to 128 rows: slightly more than the parameters themselves.
    width = ELEMENT[plan["precision"]]
    assert plan["parameters"] * width <= totals["weights"] == totals["gradients"] < 1.01 * plan["parameters"] * width
    assert totals["optimizer_m"] == totals["optimizer_v"] == totals["weights"] // width * 4
    assert totals["master"] == (totals["optimizer_m"] if plan["precision"] == "bf16" else 0)


def test_batch(train, tmp_path):
    """A batch has inputs, targets, rows by token, and where each token's rows begin; on a GPU the next batch
    exists too. Runs without batches have none."""
    make(tmp_path / "model", "--layers", 1, "--heads", 1, "--channels", 8, "--vocab", 300, "--positions", 100)
    copies = 2 if train.device == "cuda" else 1
    for batch, seq_len, starts in ((3, 40, 3 * 40 + 1), (4, 100, 300 + 1)):
        plan = train.plan("--model", tmp_path / "model", "--batch", batch, "--seq-len", seq_len)
        [fed] = [b for b in plan["buffers"] if b["kind"] == "input"]
        assert (fed["name"], fed["shape"]) == ("batch", [copies, 3 * batch * seq_len + starts])
        assert plan["totals"]["input"] == fed["bytes"] and fed["offset"] is None
    assert train.plan("--model", tmp_path / "model", "--steps", 0)["totals"]["input"] == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", ["d12", "d48"])
def test_placement(train, model, level):
    plan = train.plan("--model", model, "--batch", 4, "--seq-len", 1024, "--recompute", level)
    buffers = in_arena(plan)
    assert peak(buffers) == plan["activations_lower_bound"]
    assert plan["activations_lower_bound"] <= plan["totals"]["activations"] <= 1.01 * plan["activations_lower_bound"]
    buffers.sort(key=lambda b: b["offset"])
    for i, low in enumerate(buffers):
        assert low["offset"] % 256 == 0
        for high in buffers[i + 1:]:
            if high["offset"] >= low["offset"] + low["bytes"]:
                break
            assert low["dies"] <= high["born"] or high["dies"] <= low["born"], (low, high)


@pytest.mark.usually("bf16")
@pytest.mark.parametrize("model, parameters", [("d12", 124439808), ("d24", 354823168), ("d36", 774030080),
                                               ("d48", 1557611200)])
def test_parameters_of_gpt2(train, model, parameters):
    assert train.plan("--model", model)["parameters"] == parameters


@pytest.mark.parametrize("level, mib", [("gelu", 1326), ("norm", 1182)])
def test_less_than_llm_c(train_bf16, level, mib):
    """llm.c's own figures for GPT-2 124M."""
    plan = train_bf16.plan("--model", "d12", "--batch", 4, "--seq-len", 1024, "--recompute", level)
    assert plan["totals"]["activations"] <= mib * MIB


@pytest.mark.usually("bf16")
def test_recompute_takes_less(train):
    sizes = [train.plan("--model", "d12", "--recompute", level)["totals"]["activations"] for level in LEVELS]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.usually("bf16")
def test_no_buffer_grows_with_seq_len_squared(train):
    """The same number of tokens in long and in short sequences."""
    short, long = (train.plan("--model", "d12", "--batch", batch, "--seq-len", seq_len, "--sample", "tokens=0",
                              "--chunk-rows", "head=256")
                   for batch, seq_len in ((8, 256), (2, 1024)))
    assert abs(long["totals"]["activations"] / short["totals"]["activations"] - 1) < 0.001
    assert len(in_arena(long)) == len(in_arena(short))
    for a, b in zip(in_arena(short), in_arena(long)):
        assert a["name"] == b["name"] and b["bytes"] <= 1.001 * a["bytes"]


@pytest.mark.usually("bf16")
def test_takes_no_memory_and_no_time(train):
    assert cpu_seconds(lambda: train("--model", "d48", "--batch", 32, "--seq-len", 1024, "--plan")) < 1


LINES = {"activations": "activations", "parameters": "weights", "parameter gradients": "gradients",
         "AdamW optimizer state m": "optimizer_m", "AdamW optimizer state v": "optimizer_v",
         "master copy of params": "master", "batch": "input", "workspace": "workspace",
         "the process itself (about)": "process", "in all": "total"}
HOST_LINES = {"pinned host memory beside that": "pinned",
              "host memory that is not pinned beside that, of the tokenizer and of reading the data": "unpinned"}


def check_summary(text, begins, plan):
    """The summary agrees with the plan, in at most ten lines of memory, and in two more for a GPU's host."""
    head = r"^(\w+): (\d+) parameters; .*\nvocabulary .*\n(?:text is read as bytes: .*\n)?"
    summary = re.search(rf"{head}{begins}, in MiB:\n((?: +[\d.]+  .*\n)+)", text, re.MULTILINE)
    assert (summary[1], int(summary[2])) == (plan["model"], plan["parameters"])
    lines = {what: float(mib) for mib, what in re.findall(r"([\d.]+)  ([^;\n]*)", summary[3])}
    sizes = {what: plan["totals"][kind] for what, kind in LINES.items()}
    sizes |= {what: plan["host"][kind] for what, kind in HOST_LINES.items()}
    assert lines == {what: round(size / MIB, 2) for what, size in sizes.items() if size}
    assert summary[3].count("\n") <= (12 if plan["device"] == "cuda" else 10)
    assert f"activations; a step's peak is {plan['activations_lower_bound'] / MIB:.2f} ({plan['peak_at']})\n" in text


@pytest.mark.usually("bf16")
def test_thousands_of_layers_take_no_time(train, tmp_path):
    """Processor time of a plan grows linearly with the layers, not quadratically."""
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "gpt2", "vocab_size": 300, "n_positions": 128, "n_layer": 1000, "n_head": 2, "n_embd": 64}))

    def seconds(*options):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        train("--model", tmp_path, "--seq-len", 64, "--plan", *options)
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

    assert seconds() < 1
    assert seconds("--memory", "1400MiB") < 5


def test_text(train):
    arguments = ("--model", "d12", "--batch", 4, "--seq-len", 1024)
    text, plan = train(*arguments, "--plan").stdout.decode(), train.plan(*arguments)
    check_summary(text, "takes", plan)
    assert "allocating" not in text and " free" not in text
    assert text.splitlines()[-1] == f"in all: {plan['totals']['total'] / MIB:.2f} MiB"
    assert {line.split(" ")[0] for line in text.splitlines()} > {b["name"] for b in plan["buffers"]} - {"library"}


@pytest.mark.usually("fp32")
def test_a_training_prints_a_summary(train, tmp_path):
    """It prints no table. The free memory is not known to the MiB in this test."""
    write_text(tmp_path / "text")
    arguments = ("--model", "d2", "--data", "text", "--batch", 2, "--seq-len", 24, "--sample", "tokens=0")
    text = train(*arguments, "--steps", 2, cwd=tmp_path).stdout.decode()
    check_summary(text, "allocating", json.loads(train(*arguments, "--plan", "json", cwd=tmp_path).stdout))
    [free] = re.findall(r"in all; (\d+) are free\n", text)
    assert 0 < int(free) < 1 << 24 and "residual" not in text and "born" not in text
    assert text.index(" are free") < text.index("step     1/2 ")


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_takes_what_was_planned(train, tmp_path, level):
    """Measured after the first step, when everything has been touched.

    The process's own memory is an estimate, and a rough one on a GPU. On a CPU a run may take less than
    planned: what has not been touched yet.
    """
    unknown = 4 if train.device == "cpu" else 128
    write_text(tmp_path / "text", 60000)
    shape = ("--batch", 2, "--seq-len", 64) if train.is_played else ("--batch", 8, "--seq-len", 256)
    arguments = ("--model", "d4", "--data", "text", *shape, "--recompute", level)
    text = train(*arguments, "--steps", 1, "--sample", "tokens=0", cwd=tmp_path).stdout.decode()
    taken, planned = taken_and_planned(text)
    process = train.plan(*arguments[:2])["totals"]["process"] / MIB
    assert 0.97 * (planned - process) <= taken <= planned + unknown


def test_model_of_a_folder(train, tmp_path):
    make(tmp_path / "model", "--layers", 3, "--heads", 5, "--channels", 40, "--vocab", 300, "--positions", 48)
    plan = train.plan("--model", tmp_path / "model", "--seq-len", 48)
    assert plan["parameters"] == 300 * 40 + 48 * 40 + 3 * (12 * 40 * 40 + 13 * 40) + 2 * 40
    assert {tuple(b["shape"]) for b in plan["buffers"] if b["name"] == "qkv"} == {(8, 48, 120)}


@pytest.mark.usually("fp32")
def test_a_name_in_no_encoding(train, tmp_path):
    make(tmp_path / "model", "--layers", 1, "--heads", 1, "--channels", 16)
    (tmp_path / "model").rename(tmp_path / "m\udcff")  # the byte ff
    assert train.plan("--model", tmp_path / "m\udcff", "--timeline", tmp_path / "t.json")["model"].endswith("m\ufffd")
