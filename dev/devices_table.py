#!/usr/bin/env python3
"""What large models take on several GPUs, and how fast a step should be, as Markdown tables, from the plans of a build of
./train that plays GPUs. It makes dev/results/devices.md anew:

    make emulated-build && dev/devices_table.py build/emulated/train-bf16 > dev/results/devices.md

Nothing here was measured: these are plans by nominal rates. What others report stands beside them.
"""

import argparse
import dataclasses
import shlex
import sys
import tempfile

import plan_table

QWEN = {"model_type": "qwen2", "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "tie_word_embeddings": False}
# From the models' own config.json: Qwen/Qwen2.5-7B and -32B.
plan_table.SHAPES |= {
    "qwen2.5-7b": {**QWEN, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                   "intermediate_size": 18944},
    "qwen2.5-32b": {**QWEN, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "intermediate_size": 27648}}


@dataclasses.dataclass
class Table:
    """Rows of a table are one model in one step: on each of `on` (a GPU and the options that say how many) in each of `ways`."""
    title: str
    model: str
    step: str
    on: list
    ways: list
    beside: str  # what others report


ALL = "--state-formats master=split"
TABLES = [
    Table("GPT-2 1558M in llm.c's step", "d48", "--batch 16 --seq-len 1024 --grad-accum 64",
          [("A100", "--devices 8"), ("H100", "--devices 8")],
          ["--zero 0", "--zero 1", "--zero 2 --by-block --recompute block", "--zero 3 --by-block --recompute block"],
          "A step has 1,048,576 tokens. llm.c reports 46,800 tokens/s for each H100, and gradients that shrink from 2971 to 371 MiB "
          "when they are divided."),
    Table("Qwen2.5-7B, all weights", "qwen2.5-7b", f"{ALL} --seq-len 1024 --batch 16 --grad-accum 32",
          [("4090", "--devices 4 --memory 24000MiB,host=500GiB"), ("H100", "--devices 8 --memory 80000MiB")],
          [""], "LLMQ reports 10,900 tokens/s on 4 x RTX 4090 and 112,000 on 8 x H100, in bf16."),
    Table("Qwen2.5-32B, all weights, in host memory", "qwen2.5-32b", f"{ALL} --seq-len 1024 --batch 16 --grad-accum 64",
          [("4090", "--devices 4 --memory 24000MiB,host=1000GiB")], [""],
          "LLMQ reports 2,200 tokens/s on 4 x RTX 4090. The ranks of a machine have the weights in host memory once, and "
          "each has its slice of the optimizer's state, but a copy of the gradients."),
    Table("Qwen2.5-32B, all weights, in less than 500 GB of host memory", "qwen2.5-32b", f"{ALL} --seq-len 1024 --batch 4 --grad-accum 32",
          [("4090", "--devices 4")],
          ["--by-block --update-in-backward --advanced clip=block --recompute block --chunk-rows head=0 "
           "--offload weights=host,state=host,inputs=host"],
          "Each block is updated in backward, so that no gradients are kept. A step has 131,072 tokens: all of them go through a "
          "block together, and the inputs of the blocks are in host memory too."),
    Table("Llama-3.1-8B, all weights", "llama-3.1-8b", f"{ALL} --seq-len 4096 --batch 1",
          [("4090", "--devices 8 --grad-accum 8 --memory 24000MiB"),
           ("A100", "--devices 16 --machines 2 --network 100Gbit/s --grad-accum 16 --memory 80000MiB"),
           ("A100", "--devices 16 --machines 2 --network 100Gbit/s --grad-accum 256 --memory 80000MiB")],
          [""], ""),
    Table("Llama-3.1-70B, LoRA on bf16", "llama-3.1-70b", "--train lora --seq-len 4096 --batch 1 --grad-accum 8",
          [("H100", "--devices 8 --memory 80000MiB")], [""], ""),
    Table("Llama-3.1-70B, LoRA on NF4", "llama-3.1-70b", "--train lora --base nf4-double --seq-len 4096 --batch 1 --grad-accum 4",
          [("4090", "--devices 4 --memory 24000MiB")], [""], ""),
    Table("BLOOM-176B, a soft prompt", "bloom-176b", "--train prompt --soft-prompt 16 --seq-len 2032",
          [("A100", "--devices 8")], [f"--zero 3 --recompute block --batch {n} --grad-accum 8" for n in (1, 2)] +
          ["--zero 3 --recompute block --batch 2 --grad-accum 16 --by-block"],
          "As a pipeline over 8 x A100-80, its author counts 57 GB a GPU."),
]

COLUMNS = {"GPUs": "---", "with": "---", "weights, MiB": "---:", "gradients": "---:", "state": "---:", "activations": "---:",
           "all of a rank": "---:", "pinned memory of a machine, GiB": "---:", "sent by a rank in a step, GB": "---:", "a step, s": "---:",
           "waiting for ranks": "---:", "tokens/s": "---:", "of each": "---:"}


def row(gpu, on, way, plan):
    if isinstance(plan, str):
        return [gpu, f"`{on} {way}`".replace(" `", "`"), "does not fit: " + plan, *[""] * (len(COLUMNS) - 3)]
    totals, ranks = plan["totals"], plan["ranks"]
    kinds = [totals["weights"], totals.get("gradients", 0),
             sum(totals.get(kind, 0) for kind in ("optimizer_m", "optimizer_v", "master")), totals["activations"], totals["total"]]
    devices = ranks["devices"]
    shared = plan["host"].get("shared", 0)
    pinned = (plan["outside_device"]["pinned_host"] - shared) * devices / ranks["machines"] + shared
    chose = f"; chosen: {plan_table.chosen(plan)}" if "choice" in plan else ""
    return [f"{devices} x {gpu}", f"`{on} {way}`".replace(" `", "`") + chose, *(f"{kind / 2**20:,.0f}" for kind in kinds),
            f"{pinned / 2**30:.1f}", f"{ranks['sent_bytes'] / 1e9:.2f}", f"{plan['estimated_seconds']:.3g}",
            f"{100 * ranks['waited_seconds'] / plan['estimated_seconds']:.1f}%", f"{plan['tokens_per_second']:,.0f}",
            f"{plan['tokens_per_second'] / devices:,.0f}"]


def section(table, trainer_of, folder):
    model = plan_table.model_folder(table.model, folder)
    rows = [row(gpu, on, way, trainer_of(gpu).plan("--model", model, *shlex.split(f"{table.step} {on} {way}")))
            for gpu, on in table.on for way in table.ways]
    lines = [COLUMNS.keys(), COLUMNS.values(), *rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    beside = f"{table.beside}\n\n" if table.beside else ""
    return f"## {table.title}\n\n{beside}    ./train --plan --model {table.model} {table.step} ...\n\n{text}"


INTRODUCTION = """# Plans of several GPUs

What large models should take on several GPUs, and how fast they should be. **Everything here is a plan of the bf16 CUDA build by
nominal rates; no GPU has run it.** What others report was measured, in settings that they do not all name.

    make emulated-build && dev/devices_table.py build/emulated/train-bf16 > dev/results/devices.md

The columns from weights to activations are those of a rank; all of a rank has the CUDA context and NCCL's buffers too. A rank sends as
much as it receives. [devices.md](../guide/devices.md) has the rates of links.
"""


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="a binary that plays GPUs")
    parser.add_argument("--only", nargs="+", default=[""], help="words: the tables whose titles begin with one")
    options = parser.parse_args(arguments)
    trainers = {gpu: plan_table.Trainer(options.train, [], gpu) for gpu in ("A100", "H100", "4090")}
    plan_table.check_gpus(list(trainers.values()))
    print(INTRODUCTION, end="")
    with tempfile.TemporaryDirectory() as folder:
        for table in TABLES:
            if table.title.startswith(tuple(options.only)):
                print("\n" + section(table, trainers.get, folder), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
