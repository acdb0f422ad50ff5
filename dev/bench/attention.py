#!/usr/bin/env python3
"""Compares llmc/attention.cuh with PyTorch's naive attention and scaled_dot_product_attention: time and
memory by head size and length. They take turns; each turn is a process of its own that runs one length.

The naive attention may take as much memory as --memory says; if it needs more, its row has the size of its T
x T array. Writes a page of results.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys

import results
from results import ENVIRONMENT, MIB, PeerFailed, fail

FOLDER = pathlib.Path(__file__).resolve().parent
KINDS = ("train", "hopper", "sdpa", "naive")
HOPPER_HEADS = (64, 128)  # the head sizes of llmc/attention_hopper.cuh, in bf16
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


def does(kind, precision, head_size):
    return kind != "hopper" or precision == "bf16" and head_size in HOPPER_HEADS


def head_sizes_of(kind, options, precision):
    return [size for size in options.head_sizes if does(kind, precision, size)]


def command_of(kind, options, precision, length):
    sweep = ["--head-sizes", ",".join(map(str, head_sizes_of(kind, options, precision))), "--tokens", options.tokens,
             "--channels", options.channels, "--precision", precision, "--threads", options.threads, "--seconds", options.seconds]
    if kind in ("train", "hopper"):
        return [options.binary, "--lengths", length, *sweep, *(["--attention", kind] if kind == "hopper" else [])]
    return [sys.executable, FOLDER / "torch_attention.py", "--kind", kind, "--length", length, *sweep, "--device",
            options.device, *(["--memory", options.memory * MIB] if kind == "naive" else [])]


def turn(kind, options, precision, length):
    """The lines that one process printed."""
    command = command_of(kind, options, precision, length)
    output, _ = results.run(command, {**ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads)}, options.timeout)
    try:
        lines = [json.loads(line) for line in output.splitlines()]
    except ValueError:
        raise PeerFailed(f"{results.shown(command)}: printed no JSON lines") from None
    if [line["head_size"] for line in lines] != head_sizes_of(kind, options, precision):
        raise PeerFailed(f"{results.shown(command)}: it did not do all head sizes")
    return lines


def take_turns(options, kinds):
    """All lines with kind and round, and {kind, precision and length: why it failed}; a failure ends those
    turns."""
    lines, failed = [], {}
    for precision in options.precisions:
        for length in options.lengths:
            print(f"{precision}, length {length}", flush=True)
            for number in range(1, options.rounds + 1):
                for kind in kinds:
                    key = f"{kind} {precision} {length}"
                    if key in failed or not head_sizes_of(kind, options, precision):
                        continue
                    try:
                        found = turn(kind, options, precision, length)
                    except PeerFailed as error:
                        failed[key] = str(error)
                        print(f"{key}: failed: {error}", file=sys.stderr)
                        continue
                    lines += [{"kind": kind, "round": number, **line} for line in found]
    return lines, failed


def score_bytes(options, precision, head_size, length):
    """The bytes of one (batch, heads, T, T) array; the naive attention keeps several."""
    return options.tokens * (options.channels // head_size) * length * ELEMENT_BYTES[precision]


def median_ms(lines, key):
    times = [line[key] for line in lines if key in line]
    return statistics.median(times) if times else None


def three_digits(x):
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def cells_of(kind, lines, base_ms, scores):
    """Forward ms, backward ms, their sum relative to ours, and MiB of forward and backward."""
    forward, backward = median_ms(lines, "forward_ms"), median_ms(lines, "backward_ms")
    if any(line.get("out_of_memory") for line in lines):
        return ["out of memory", "", "", f"T x T: {scores / MIB:.0f}"]
    if forward is None:
        return ["failed", "", "", ""]
    taken = max(line["peak_bytes"] if "peak_bytes" in line else 2 * line["bytes"] for line in lines)
    ratio = f"{(forward + backward) / base_ms:.2f}" if base_ms else ""
    return [three_digits(forward), three_digits(backward), ratio, f"{taken / MIB:.1f}"]


def table(options, kinds, lines, precision):
    header = ["length x head size", "batch x heads"]
    for kind in kinds:
        header += [f"{kind} forward ms", "backward ms", *([] if kind == "train" else ["/ train"]), "MiB"]
    rows = []
    for length in options.lengths:
        for size in options.head_sizes:
            case = [line for line in lines if (line["precision"], line["seq_len"], line["head_size"]) ==
                    (precision, length, size)]
            ours = [line for line in case if line["kind"] == "train"]
            base_ms = median_ms(ours, "forward_ms") + median_ms(ours, "backward_ms") if ours else None
            row = [f"{length} x {size}", f"{options.tokens // length} x {options.channels // size}"]
            for kind in kinds:
                cells = cells_of(kind, [line for line in case if line["kind"] == kind], base_ms,
                                 score_bytes(options, precision, size, length)) if does(kind, precision, size) else [""] * 4
                row += cells[:2] + cells[3:] if kind == "train" else cells
            rows.append(row)
    return results.markdown(header, rows)


def report(options, kinds, lines, failed):
    torch = {"PyTorch": line["torch"] for line in lines if "torch" in line}
    facts = results.machine(options.device) | torch | {"threads": options.threads}
    rounds = f"Medians of {options.rounds} rounds" if options.rounds > 1 else "One round"
    commands = [results.shown(command_of(kind, options, "bf16" if kind == "hopper" else options.precisions[0],
                                         options.lengths[0])) for kind in kinds]
    text = [f"# Causal attention, {options.device}: time and memory by length and head size", "",
            "Measured and written by `dev/bench/attention.py`.", "", *results.facts_list(facts),
            *(f"- {key} failed: {why}" for key, why in failed.items()), "",
            "Commands, for the first precision and length:", "", *(f"    {command}" for command in commands), "",
            f"{rounds}, in turn. Batch x length is {options.tokens} tokens and heads x head size is {options.channels} "
            "channels everywhere. `train` is llmc/attention.cuh" +
            (", `hopper` llmc/attention_hopper.cuh" if "hopper" in kinds else "") + "; its MiB are q, k, v, out, "
            "lse and their gradients, and it takes nothing else on a GPU. PyTorch's are what forward and backward took "
            "at the most, inputs included" +
            (", as its allocator counts. " if options.device == "cuda" else ", as the process's resident set grew. ") +
            f"`naive` was given {options.memory} MiB; where they were too few, the MiB are those of one array of "
            "scores, of which it keeps several.", ""]
    for precision in options.precisions:
        text += [f"## {precision}", "", *table(options, kinds, lines, precision), ""]
    results.write(options.out, text[:-1])
    results.write_raw(options.raw, {"machine": facts, "commands": commands, "failed": failed, "lines": lines,
                                    "memory_mib": options.memory, "rounds": options.rounds})
    print(f"written: {options.out}")


def free_mib(device):
    """Half of a CPU machine's free memory, or nine tenths of a GPU's, because other processes use some."""
    if device == "cuda":
        return int(results.ask_gpu("memory.free") or 0) * 9 // 10
    meminfo = pathlib.Path("/proc/meminfo").read_text()
    return int(meminfo.split("MemAvailable:")[1].split()[0]) // 1024 // 2


def has_hopper(options):
    """True if llmc/attention_hopper.cuh is used on this GPU."""
    return (options.device == "cuda" and results.ask_gpu("compute_cap") == "9.0" and "bf16" in options.precisions and
            bool(head_sizes_of("hopper", options, "bf16")))


def numbers(text):
    """An argparse type: whole positive numbers, separated by commas."""
    return [results.positive(word) for word in text.split(",")]


def parse_options(arguments):
    parser = results.OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, positive = parser.add_argument, results.positive
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where a GPU answers nvidia-smi)")
    add("--precision", choices=("fp32", "bf16", "both"), default="both")
    add("--head-sizes", type=numbers, help="(default: 16,32,64,128)")
    add("--lengths", type=numbers, help="(default: 256,1024,4096,8192,16384)")
    add("--tokens", type=positive, help="batch x length (default: 16384)")
    add("--channels", type=positive, help="heads x head size (default: 256 on a CPU, 2048 on a GPU)")
    add("--threads", type=positive, default=results.cores())
    add("--rounds", type=positive, help="(default: 3)")
    add("--seconds", type=float, help="that a case is repeated for (default: 0.2)")
    add("--memory", type=positive, help="MiB for the naive attention (default: half of what a CPU has left, nine "
                                        "tenths of what a GPU has)")
    add("--timeout", type=positive, default=3600, help="seconds that a turn may take")
    add("--binary", help="built from attention.cpp (default: build/bench/DEVICE/attention)")
    add("--quick", action="store_true", help="small shapes and one round, to see that it works")
    results.add_out(parser, said="dev/results/attention-DEVICE.md")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if results.gpu_answers() else "cpu")
    defaults = ({"head_sizes": [16, 64], "lengths": [64, 256], "tokens": 256, "channels": 64, "rounds": 1,
                 "seconds": 0.01} if options.quick else
                {"head_sizes": [16, 32, 64, 128], "lengths": [256, 1024, 4096, 8192, 16384], "tokens": 16384,
                 "channels": 256 if options.device == "cpu" else 2048, "rounds": 3, "seconds": 0.2})
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.precisions = ["fp32", "bf16"] if options.precision == "both" else [options.precision]
    options.memory = options.memory or free_mib(options.device)
    target = f"build/bench/{options.device}/attention"
    options.binary = options.binary or results.ROOT / target
    if not pathlib.Path(options.binary).exists():
        fail(f"--binary {results.shown([options.binary])}: no such file; make DEVICE={options.device} {target}")
    options.out = options.out or results.ROOT / f"dev/results/attention-{options.device}.md"
    return options


def main(arguments=None):
    options = parse_options(arguments)
    torch = importlib.util.find_spec("torch")
    kinds = [kind for kind in KINDS if kind == "train" or (has_hopper(options) if kind == "hopper" else torch)]
    if not torch:
        print("PyTorch is left out: this Python has none; dev/venv.sh makes .venv", file=sys.stderr)
    lines, failed = take_turns(options, kinds)
    if not lines:
        fail("; ".join(f"{key}: {why}" for key, why in failed.items()))
    report(options, kinds, lines, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
