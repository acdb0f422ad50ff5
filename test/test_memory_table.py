"""dev/memory_table.py: llm.c's formula against known figures, and our columns against --plan json."""

import re

import memory_table
import pytest

MIB = 1 << 20
GPT2 = {"L": 12, "B": 4, "T": 1024, "C": 768, "NH": 12, "Vp": 50304, "s": 2}
GPT2_XL = {"L": 48, "B": 32, "T": 1024, "C": 1600, "NH": 25, "Vp": 50304, "s": 2}


def tables(train, capsys, *arguments):
    """{title: {row: [cells]}} of what the script prints; each table's first row is its header."""
    memory_table.main(["--train", train.path, *map(str, arguments), "--markdown"])
    found, rows = {}, None
    for line in capsys.readouterr().out.splitlines():
        if title := re.fullmatch(r"\*\*(.+)\*\*", line):
            rows = found[title.group(1)] = {}
        elif line.startswith("| "):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name] = cells
    return found


@pytest.mark.parametrize("level, mib", [("gelu", 1326), ("norm", 1182)])
def test_formula_gives_what_llm_c_prints(level, mib):
    assert round(sum(memory_table.llm_c(level, **GPT2).values()) / MIB) == mib


def test_formula_of_levels():
    none, gelu, norm = (memory_table.llm_c(level, **GPT2_XL) for level in ("none", "gelu", "norm"))
    assert none["norm_1 + norm_2"] == gelu["norm_1 + norm_2"] == 9600 * MIB and norm["norm_1 + norm_2"] == 0
    assert none["gelu"] == 48 * gelu["gelu"] == 48 * norm["gelu"]
    narrow = GPT2 | {"Vp": 128}  # then the head's buffer is as wide as the gradient of qkv
    assert memory_table.llm_c("gelu", **narrow)["logits"] == 4 * 1024 * 3 * 768 * 2
    wide = memory_table.llm_c("gelu", **GPT2 | {"s": 4})
    assert wide["qkv"] == 2 * memory_table.llm_c("gelu", **GPT2)["qkv"]
    assert wide["attention_lse"] == memory_table.llm_c("gelu", **GPT2)["attention_lse"]


@pytest.mark.parametrize("settings", [("d12", 4, 1024), ("d3", 3, 40)], ids=str)
def test_columns_sum_to_the_plan(train, settings):
    model, batch, seq_len = settings
    for level in memory_table.levels_of(train.path):
        plan = train.plan("--model", model, "--batch", batch, "--seq-len", seq_len, "--recompute", level,
                          "--sample", "tokens=0")
        rows = memory_table.at_the_peak(plan)
        assert sum(rows.values()) == plan["activations_lower_bound"]
        assert rows.keys() == {memory_table.row_of(b) for b in plan["buffers"] if b["offset"] is not None}


@pytest.mark.parametrize("model, sizes", [("d12", GPT2), ("d48", GPT2_XL)])
def test_sizes_are_read_from_the_plan(train, model, sizes):
    plan = train.plan("--model", model, "--batch", sizes["B"], "--seq-len", 1024, "--recompute", "none")
    assert memory_table.sizes_of(plan) == sizes | {"s": {"fp32": 4, "bf16": 2}[train.precision]}


def test_levels_are_those_of_the_binary(train):
    levels = memory_table.levels_of(train.path)
    assert levels == ["none", "gelu", "norm", "ffn", "attention", "block"]
    for level in levels:
        assert train.plan("--model", "d1", "--recompute", level)["recompute"] == level


def test_tables(train_bf16, capsys):
    found = tables(train_bf16, capsys, "--models", "d12", "d48", "--batch", 32)
    assert list(found) == ["d12: bf16, batch 32, seq_len 1024", "d48: bf16, batch 32, seq_len 1024"]
    large = found["d48: bf16, batch 32, seq_len 1024"]
    header, layernorms = large["MiB"], large["norm_1 + norm_2"]
    for title in ("none", "gelu", "llm.c -r 0", "llm.c -r 1"):
        assert layernorms[header.index(title)] == "9600.00"
    for title in ("norm", "llm.c -r 2"):
        assert layernorms[header.index(title)] == ""
    for level in memory_table.levels_of(train_bf16.path):
        plan = train_bf16.plan("--model", "d48", "--batch", 32, "--seq-len", 1024, "--recompute", level,
                               "--sample", "tokens=0")
        column = header.index(level)
        assert large["planned in all"][column] == f"{plan['totals']['activations'] / MIB:.2f}"
        shown = sum(float(cells[column] or 0) for name, cells in large.items()
                    if name not in ("MiB", "alive at the peak", "planned in all"))
        assert shown == pytest.approx(float(large["alive at the peak"][column]), abs=0.1)


def test_levels_asked_for(train_bf16, capsys):
    (table,) = tables(train_bf16, capsys, "--models", "d12", "--levels", "norm").values()
    assert table["MiB"] == ["norm", "llm.c -r 2"] and table["planned in all"][1] == "1182.05"


def test_options_for_all(train_bf16, capsys):
    """Arguments after -- are passed to every plan: with 256 rows of the head at a time, the sum is as in
    dev/results/memory.md."""
    memory_table.main(["--train", train_bf16.path, "--models", "d12", "--levels", "gelu", "--", "--chunk-rows", "head=256"])
    last = capsys.readouterr().out.splitlines()[-2].split()
    assert last[:4] == ["planned", "in", "all", "922.76"] or train_bf16.device != "cpu"


def test_plain_text(train_bf16, capsys):
    memory_table.main(["--train", train_bf16.path, "--models", "d2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "d2: bf16, batch 4, seq_len 1024" and lines[1].startswith("MiB ")
    assert not any("|" in line for line in lines) and len(set(map(len, lines[1:-1]))) == 1


@pytest.mark.parametrize("arguments, named", [
    (["--train", "nowhere/train"], "nowhere/train: No such file"), (["--models", "d13"], "d13"),
    (["--levels", "some"], "--recompute some"), (["--batch", "0"], "--batch")])
def test_refused(train_bf16, capsys, arguments, named):
    with pytest.raises(SystemExit) as ended:
        memory_table.main(["--train", train_bf16.path, *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("memory_table.py: ") and error.count("\n") == 1, error
    assert named in error
