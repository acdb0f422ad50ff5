#!/usr/bin/env python3
"""What a step of large models takes on GPUs with little memory, as Markdown tables, from the plans of a build
of ./train. Each step is compared with the same step with unlimited memory, by the same estimate of time. Use
it to make the tables of dev/results/plans.md anew, or to plan other models and budgets.

A case is a line: a name | a model | what a step computes | placements and budgets. Its first comparison is a
step with everything on the device, with the options of the third field; --memory chooses its fastest
settings. A model is a name in SHAPES, or a folder of which config.json is enough. Arguments after -- are
passed to every ./train:

    dev/plan_table.py build/cuda-bf16/train
    dev/plan_table.py build/emulated/train-bf16 --gpu A100 H100 4090 --only 8B 70B
    dev/plan_table.py build/cuda-bf16/train --cases more.txt -- --rates rates.json
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile

LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
         "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}}
# From the models' own config.json: meta-llama/Llama-3.1-8B and -70B, bigscience/bloom.
SHAPES = {
    "llama-3.1-8b": {**LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                     "intermediate_size": 14336},
    "llama-3.1-70b": {**LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                      "intermediate_size": 28672},
    "bloom-176b": {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880,
                   "layer_norm_epsilon": 1e-5}}

CASES = """
8B, all weights | llama-3.1-8b | --batch 8 --seq-len 8192 --state-formats master=split | \
    --memory 24000MiB,host=112GiB --update-in-backward
8B, all weights, 8-bit moments | llama-3.1-8b | --batch 8 --seq-len 8192 --state-formats master=split,m=8bit,v=8bit | \
    --memory 24000MiB,host=112GiB --update-in-backward
8B, all weights, 4096 tokens a sequence | llama-3.1-8b | --batch 16 --seq-len 4096 --state-formats master=split | \
    --memory 24000MiB,host=112GiB --update-in-backward
8B, all weights, block by block | llama-3.1-8b | --batch 1 --seq-len 8192 --grad-accum 8 --state-formats master=split | \
    --recompute block --chunk-rows head=4096 --offload weights=host,state=host:block,inputs=auto --by-block \
    --update-in-backward
70B, LoRA on NF4 in host memory | llama-3.1-70b | --train lora --batch 1 --seq-len 4096 --base nf4-double | \
    --memory 24000MiB,host=112GiB
70B, LoRA on bf16 in host memory | llama-3.1-70b | --train lora --batch 1 --seq-len 4096 | \
    --memory 24000MiB,host=160GiB
70B, LoRA on bf16 on a disk | llama-3.1-70b | --train lora --batch 1 --seq-len 4096 | --memory 24000MiB --offload weights=disk
70B, LoRA on bf16 on a disk, 64k tokens | llama-3.1-70b | --train lora --batch 16 --seq-len 4096 | \
    --memory 24000MiB,host=112GiB --offload weights=disk
176B, soft prompt | bloom-176b | --train prompt --soft-prompt 16 --batch 1 --seq-len 2032 | \
    --memory 24000MiB --offload weights=disk
176B, soft prompt, embeddings on the disk too | bloom-176b | \
    --train prompt --soft-prompt 16 --batch 1 --seq-len 2032 | \
    --memory 24000MiB --offload weights=disk,embeddings=disk
176B, soft prompt, 48k tokens | bloom-176b | --train prompt --soft-prompt 16 --batch 24 --seq-len 2032 | \
    --memory 24000MiB,host=112GiB --offload weights=disk
176B, soft prompt, in host memory | bloom-176b | --train prompt --soft-prompt 16 --batch 1 --seq-len 2032 | \
    --memory 24000MiB,host=400GiB
"""
ALL_THE_MEMORY = "1000000GiB"
WAITS = ("disk", "link", "host", "exchange")


def fail(message):
    print(f"plan_table.py: {message}", file=sys.stderr)
    sys.exit(2)


class Case:
    def __init__(self, line, source):
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 4 or not all(parts[:3]):
            fail(f"{source}: no case is '{line}': a name | a model | what a step computes | where things live")
        self.name, self.model = parts[:2]
        try:
            self.step, self.homes = (shlex.split(part) for part in parts[2:])
        except ValueError as error:
            fail(f"{source}: '{line}': {error}")


def cases_of(text, source):
    """The cases in a text. A line that ends in a backslash continues in the next; one that begins with # is a
    comment."""
    lines = [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines()]
    return [Case(line, source) for line in lines if line and not line.startswith("#")]


class Trainer:
    """A binary that makes plans, with the options that all plans share, for its own GPU or for one that an
    emulated build plays."""

    def __init__(self, path, more, gpu):
        self.path, self.more, self.gpu = path, more, gpu
        self.environment = {**os.environ, "GPU": gpu} if gpu else dict(os.environ)

    def plan(self, *options):
        """The plan or, if it does not fit, ./train's message about the least that it takes."""
        command = [self.path, "--plan", "json", "--sample", "tokens=0", *options, *self.more]
        try:
            result = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        except OSError as error:
            fail(f"{self.path}: {error.strerror}")
        if result.returncode == 0:
            return json.loads(result.stdout)
        said = result.stderr.strip().splitlines()
        if result.returncode == 2 and said and any(part in said[-1] for part in ("takes at least", "take at least", "the least that this takes")):
            return said[-1].removeprefix("train: ")
        fail(said[-1] if said else f"{self.path}: ended with {result.returncode}")

    def seconds_of_a_product(self):
        plan = self.plan("--model", "d2", "--batch", "64")
        return plan["phases"][0]["products"] if isinstance(plan, dict) else 0


def check_gpus(trainers):
    """Checks that the binary plays these GPUs. One for a real GPU ignores the variable, and all columns would
    be equal."""
    trainer = trainers[0]
    if trainer.gpu:
        other = Trainer(trainer.path, trainer.more, "4090" if trainer.gpu == "A100" else "A100")
        if trainer.seconds_of_a_product() == other.seconds_of_a_product():
            fail(f"--gpu {trainer.gpu}: {trainer.path} plays no GPUs; make emulated-build makes one that does")


def chosen(plan):
    """What --memory chose, without what the command gave."""
    if "choice" not in plan:
        return "as given"
    c = plan["choice"][0]
    rows = {"head": c["head_rows"], "mlp": c["mlp_rows"], "attention": c["attention_rows"]}
    chunks = ",".join(f"{key}={count}" for key, count in rows.items() if key == "head" or count)
    text = f"--recompute {c['recompute']} --chunk-rows {chunks}"
    text += f" --batch {c['batch']} --grad-accum {c['grad_accum']}{c['formats']}{c['placements']}"
    return f"`{text}`"


def bounds(plan):
    """For each phase, what bounds its time and how much of it is waiting. A phase of less than a thousandth
    of the step, such as an adapter's update, is left out."""
    texts = []
    for phase in plan["phases"]:
        if phase["seconds"] < 1e-3 * plan["estimated_seconds"]:
            continue
        waits = [f"{100 * phase[w] / phase['seconds']:.0f}% waiting for the {w}" for w in WAITS
                 if phase.get(w, 0) / phase["seconds"] >= 0.005]
        texts.append(", ".join([f"{phase['name']} {phase['seconds']:.3g} s: {phase['bound_by']}", *waits]))
    return "; ".join(texts)


COLUMNS = {"": "---", "planned on the device, MiB": "---:", "pinned host memory, GiB": "---:", "on a disk, GiB": "---:",
           "a step, s": "---:", "tokens/s": "---:", "resident, s (GiB)": "---:", "times that": "---:",
           "what bounds it": "---", "chosen": "---"}


def row(label, plan, resident):
    if isinstance(plan, str):
        return [label, "does not fit", *[""] * 6, plan, ""]
    elsewhere, seconds = plan["outside_device"], plan["estimated_seconds"]
    on_disk = sum(elsewhere[kind] for kind in ("on_disk", "offloaded", "working_file"))
    beside = ["does not fit", ""]
    if isinstance(resident, dict):
        least = resident["estimated_seconds"]
        beside = [f"{least:.3g} ({resident['totals']['total'] / 2**30:,.0f})", f"{seconds / least:.2f}"]
    return [label, f"{plan['totals']['total'] / 2**20:,.0f}", f"{elsewhere['pinned_host'] / 2**30:.1f}",
            f"{on_disk / 2**30:.1f}", f"{seconds:.3g}", f"{plan['tokens_per_second']:,.0f}", *beside, bounds(plan),
            chosen(plan)]


def table(rows):
    lines = [COLUMNS.keys(), COLUMNS.values(), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def model_folder(name, folder):
    """The folder of a case's model: one that exists, or a new one in `folder` with the config.json of
    SHAPES."""
    if name not in SHAPES:
        return name
    path = os.path.join(folder, name)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as f:
        json.dump(SHAPES[name], f)
    return path


def section(case, trainers):
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", model_folder(case.model, folder)]
        rows = []
        for trainer in trainers:
            plan = trainer.plan(*model, *case.step, *case.homes)
            resident = trainer.plan(*model, *case.step, "--memory", ALL_THE_MEMORY)
            label = trainer.gpu or (plan if isinstance(plan, dict) else {}).get("rates", "nominal")
            rows.append(row(label, plan, resident))
    command = shlex.join(["./train", "--plan", "--sample", "tokens=0", "--model", case.model, *case.step, *case.homes,
                          *trainers[0].more])
    return f"## {case.name}\n\n    {command}\n\n{table(rows)}"


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", help="the binary")
    parser.add_argument("--cases", help="a file of cases, in place of those here")
    parser.add_argument("--only", nargs="+", default=[""], help="words: the cases whose names begin with one")
    parser.add_argument("--gpu", nargs="+", default=[None], help="GPUs that an emulated build plays; else the build's own")
    options = parser.parse_args(arguments[:cut])
    text, source = CASES, "CASES"
    if options.cases:
        source = options.cases
        try:
            with open(source, encoding="utf-8") as f:
                text = f.read()
        except (OSError, UnicodeDecodeError) as error:
            fail(f"--cases {source}: {getattr(error, 'strerror', None) or 'is no text'}")
    cases = [c for c in cases_of(text, source) if c.name.startswith(tuple(options.only))]
    if not cases:
        fail(f"{source}: no case" + (f" begins with {' or '.join(options.only)}" if options.only != [""] else ""))
    trainers = [Trainer(options.train, arguments[cut + 1:], gpu) for gpu in options.gpu]
    check_gpus(trainers)
    for i, case in enumerate(cases):
        print(("\n" if i else "") + section(case, trainers), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
