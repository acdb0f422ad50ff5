#!/usr/bin/env python3
"""Forward and backward of one block by length: ./train compared with three kinds of attention in PyTorch.

The kinds are dense attention, flash attention and the Blockwise Parallel Transformer. Writes a section of
dev/results/context.md with time and memory, and block.png beside it.

    dev/bench/block.py --train build/cpu-fp32/train [--longest 65536] [--seconds 600] [--out PAGE.md] [--raw FILE]

The block is of Llama's kind in fp32, with 512 channels, 8 heads and an MLP 1408 wide, on a sequence of 1024
tokens and more. ./train's is the only block of a model with a vocabulary of 256, with --recompute block
--chunk-rows mlp=auto, and also with attention in chunks and keys in a file. Its time is the least of its bench's
steps, without the head; its memory is the plan's for a step. PyTorch's memory is the increase of its resident
memory. That of the Blockwise Parallel Transformer, of whose many small tensors malloc keeps memory, is
measured in a run of its own that returns freed memory at once. A kind that would take more than --memory, or
a pass longer than --seconds, is left out from there on.
"""

import pathlib
import sys
import tempfile

import results
from results import ENVIRONMENT, MIB, PeerFailed, fail

sys.path.append(str(results.ROOT / "dev"))
import figures

FOLDER = pathlib.Path(__file__).resolve().parent
KINDS = {"dense": "dense attention", "flash": "flash attention (sdpa)", "blockwise": "Blockwise Parallel Transformer",
         "train": "./train --chunk-rows mlp=auto", "chunks": "./train, all chunks"}
OURS = {"train": [], "chunks": ["--chunk-rows", "attention=auto", "--offload", "keys=auto"]}
FRUGAL_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "10000000", "MALLOC_TRIM_THRESHOLD_": "0"}
STEPS = {1024: 5, 2048: 3, 4096: 2}  # else 1; the fastest counts


def parse(arguments):
    parser = results.OptionParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", default=str(results.ROOT / "build/cpu-fp32/train"))
    parser.add_argument("--longest", type=results.positive, default=65536)
    parser.add_argument("--memory", type=results.positive, default=8192, help="MiB that a kind may take")
    parser.add_argument("--seconds", type=results.positive, default=600, help="that a kind may take for one pass")
    results.add_out(parser, results.ROOT / "dev/results/context.md")
    return parser.parse_args(arguments)


def of_torch(kind, length):
    command = [sys.executable, FOLDER / "torch_block.py", "--kind", kind, "--length", length, "--steps"]
    timed = results.json_of([*command, STEPS.get(length, 1)])
    if kind != "blockwise":
        return timed
    frugal, _ = results.run([*command, 1], ENVIRONMENT | FRUGAL_MALLOC)
    return {"seconds": timed["seconds"], "bytes": results.last_json(frugal, command)["bytes"]}


def of_train(kind, train, folder, length):
    command = [train, "--model", folder, "--batch", 1, "--seq-len", length, "--recompute", "block", "--chunk-rows", "mlp=auto",
               *OURS[kind], "--sample", "tokens=0"]
    plan = results.json_of([*command, "--plan", "json"])
    steps = STEPS.get(length, 1)
    bench = results.json_of([*command, "--bench", "json", "--warmup", int(steps > 1), "--steps", steps])
    totals = plan["totals"]
    return {"seconds": (bench["forward_ms"]["min"] + bench["backward_ms"]["min"]) / 1000,
            "bytes": totals["activations"] + totals["workspace"]}


def goes_on(o, kind, of):
    """True if the next length, twice as long, should be tried."""
    more = 4 if kind == "dense" else 2
    return not of or (max(f["bytes"] for f in of.values()) * more <= o.memory * MIB and
                      max(f["seconds"] for f in of.values()) * 4 <= o.seconds)


def make_model(folder, positions):
    import make_model  # slow to import
    make_model.main(["--out", str(folder), "--family", "llama", "--layers", "1", "--channels", "512", "--heads", "8",
                     "--vocab", "256", "--positions", str(positions)])


def measure(o, folder):
    """{kind: {length: figures}}."""
    measured = {kind: {} for kind in KINDS}
    length = 1024
    while length <= o.longest:
        for kind, of in measured.items():
            if not goes_on(o, kind, of):
                continue
            of[length] = of_train(kind, o.train, folder, length) if kind in OURS else of_torch(kind, length)
            print(f"{length} tokens, {KINDS[kind]}: {of[length]['seconds']:.2f} s, {of[length]['bytes'] / MIB:.0f} MiB",
                  flush=True)
        length *= 2
    return measured


def draw(measured, path):
    pyplot = figures.pyplot(fail)
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for kind, of in measured.items():
        lengths = list(of)
        times.plot(lengths, [of[n]["seconds"] for n in lengths], marker="o", label=KINDS[kind])
        memory.plot(lengths, [of[n]["bytes"] / MIB for n in lengths], marker="o", label=KINDS[kind])
    for axes, what in ((times, "seconds, forward and backward"), (memory, "MiB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=what)
        axes.grid(True, which="both", alpha=0.3)
    times.legend()
    figures.save(figure, path, fail)


def table(measured):
    lengths = list(measured["train"])

    def cell(figures):
        return f"{figures['seconds']:.2f} s, {figures['bytes'] / MIB:.0f} MiB" if figures else ""

    return results.markdown(["tokens", *KINDS.values()],
                            [[f"{n:,}", *(cell(of.get(n)) for of in measured.values())] for n in lengths])


def main(arguments=None):
    o = parse(arguments)
    facts = results.machine("cpu")
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_model(folder, o.longest)
            measured = measure(o, folder)
    except PeerFailed as failed:
        fail(failed)
    picture = o.out.with_name("block.png")
    lines = ["Measured and written by `dev/bench/block.py`, which says how: forward and backward of one block.", "",
             *results.facts_list(facts), "", f"![Time and memory by length]({picture.name})", "", *table(measured)]
    results.write_section(o.out, "Long context", "One block, by length", lines)
    results.write_raw(o.raw, {"machine": facts, "measured": measured})
    draw(measured, picture)


if __name__ == "__main__":
    main()
