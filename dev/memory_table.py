#!/usr/bin/env python3
"""Shows which buffers use the activations' memory at a step's peak: MiB of each, by --recompute level,
compared with llm.c. Use it to see what a level saves, and to make the tables of dev/results/memory.md anew
after a change of the step.

Asks ./train --plan; nothing is allocated. A column lists what is alive at the moment when the sum is largest.
llm.c's columns come from the formula in its train_gpt2.cu with cuDNN's attention; llm.c allocates every
buffer for the whole run. Arguments after -- are passed to ./train:

    dev/memory_table.py --train build/cpu-bf16/train --models d12 d24 --markdown -- --chunk-rows head=256
"""

import argparse
import json
import re
import subprocess
import sys

MIB = 1 << 20
LLM_C_LEVELS = {"none": 0, "gelu": 1, "norm": 2}  # its option -r
ROWS = {"norm_1": "norm_1 + norm_2", "norm_2": "norm_1 + norm_2"}  # small or equal buffers that share a row
STATISTICS = "layernorm mean, rstd"


def fail(message):
    print(f"memory_table.py: {message}", file=sys.stderr)
    sys.exit(2)


def ask(train, *arguments):
    try:
        result = subprocess.run([train, *map(str, arguments)], capture_output=True, text=True)
    except OSError as error:
        fail(f"--train {train}: {error.strerror}; build it with make")
    if result.returncode != 0:
        fail(f"{' '.join(map(str, (train, *arguments)))}: {result.stderr.strip()}")
    return result.stdout


def levels_of(train):
    """The levels that the binary's --help memory lists."""
    found = re.search(r"--recompute LEVEL.*?: ([a-z_]+(, [a-z_]+)*)", " ".join(ask(train, "--help", "memory").split()))
    if not found:
        fail(f"--train {train}: its --help memory lists no levels of --recompute; give --levels")
    return found.group(1).split(", ")


def plan_of(train, model, options, level):
    return json.loads(ask(train, "--plan", "json", "--model", model, "--batch", options.batch, "--seq-len",
                          options.seq_len, "--recompute", level, "--sample", "tokens=0", *options.more))


def row_of(buffer):
    name = buffer["name"]
    return STATISTICS if re.fullmatch(r"ln_._(mean|rstd)", name) else ROWS.get(name, name)


def aligned(size):
    """The bytes that a buffer takes in the arena."""
    return (size + 255) // 256 * 256


def at_the_peak(plan):
    """{row: bytes} of what is alive at the peak; the sum is the plan's activations_lower_bound."""
    takes = [b for b in plan["buffers"] if b["offset"] is not None]
    live = most = peak = 0
    for time, size in sorted([(b["born"], aligned(b["bytes"])) for b in takes] +
                             [(b["dies"], -aligned(b["bytes"])) for b in takes]):
        live += size
        if live > most:
            most, peak = live, time
    rows = {}
    for b in takes:
        alive = b["born"] <= peak < b["dies"]
        rows[row_of(b)] = rows.get(row_of(b), 0) + alive * aligned(b["bytes"])
    return rows


def sizes_of(plan):
    """The sizes that llm_c() takes, read from a plan without recomputation."""
    shapes = {}
    for b in plan["buffers"]:
        shapes.setdefault(b["name"], []).append(b["shape"])
    return {"L": len(shapes["qkv"]), "B": plan["batch"], "T": plan["seq_len"], "C": shapes["residual"][0][-1],
            "NH": shapes["attention_lse"][0][1], "Vp": shapes["logits"][0][-1],
            "s": {"bf16": 2, "fp32": 4}[plan["precision"]]}


def llm_c(level, L, B, T, C, NH, Vp, s):
    """{row: bytes} of llm.c's activations: L layers, NH heads, s bytes per value, Vp the padded vocabulary.

    Its encoded and residual3 are our residual, residual2 our residual_middle, atty our attention, fch and
    fch_gelu our up and gelu, output our logits. Its two scratch buffers and output hold all gradients of
    activations.
    """
    btc, bt = B * T * C * s, B * T
    r = LLM_C_LEVELS[level]
    return {"residual": btc + L * btc, "norm_1 + norm_2": 0 if r >= 2 else 2 * L * btc, "qkv": L * 3 * btc,
            "attention": L * btc, "attention_lse": L * B * NH * T * 4, "residual_middle": L * btc, "up": L * 4 * btc,
            "gelu": (L if r == 0 else 1) * 4 * btc, "norm_f": btc, STATISTICS: (4 * L + 2) * bt * 4,
            "logits": bt * max(3 * C, Vp) * s, "losses": bt * 4, "scratch_bt4c": 4 * btc, "scratch_btc": btc}


def columns_of(plans, sizes):
    """[(title, {row: bytes}, planned bytes)]; llm.c's column is next to ours if it has the level."""
    columns = []
    for level, plan in plans.items():
        columns.append((level, at_the_peak(plan), plan["totals"]["activations"]))
        if level in LLM_C_LEVELS:
            theirs = llm_c(level, **sizes)
            columns.append((f"llm.c -r {LLM_C_LEVELS[level]}", theirs, sum(theirs.values())))
    return columns


def table_of(columns):
    """Lists of cells, the header first. Rows below 0.01 MiB everywhere are not shown, but are counted in the
    sums."""
    names = list(dict.fromkeys(name for _, rows, _ in columns for name in rows))
    sized = [name for name in names if max(rows.get(name, 0) for _, rows, _ in columns) >= 0.005 * MIB]
    table = [["MiB", *(title for title, _, _ in columns)]]
    for name in sized:
        table.append([name, *(f"{rows[name] / MIB:.2f}" if rows.get(name) else "" for _, rows, _ in columns)])
    table.append(["alive at the peak", *(f"{sum(rows.values()) / MIB:.2f}" for _, rows, _ in columns)])
    table.append(["planned in all", *(f"{planned / MIB:.2f}" for _, _, planned in columns)])
    return table


def print_table(table, markdown):
    widths = [max(map(len, column)) for column in zip(*table)]
    left, between, right = ("| ", " | ", " |") if markdown else ("", "  ", "")
    for i, cells in enumerate(table):
        padded = [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))]
        print(f"{left}{between.join(padded)}{right}")
        if markdown and i == 0:
            print("|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|")


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default="./train", help="the binary to ask (default: ./train)")
    parser.add_argument("--models", nargs="+", default=["d12", "d24", "d36", "d48"], help="dN, or folders of models")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--levels", nargs="+", help="of --recompute (default: all that the binary has)")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    options = parser.parse_args(arguments[:cut])
    options.more = arguments[cut + 1:]
    levels = options.levels or levels_of(options.train)
    for model in options.models:
        plans = {level: plan_of(options.train, model, options, level) for level in levels}
        sizes = sizes_of(plans.get("none") or plan_of(options.train, model, options, "none"))
        first = next(iter(plans.values()))
        title = f"{model}: {first['precision']}, batch {options.batch}, seq_len {options.seq_len}"
        print(f"**{title}**\n" if options.markdown else title)
        print_table(table_of(columns_of(plans, sizes)), options.markdown)
        print()


if __name__ == "__main__":
    sys.exit(main())
