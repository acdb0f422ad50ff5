#!/usr/bin/env python3
"""The longest sequence that LoRA can train on in a budget of memory: ./train, and transformers with PEFT.

    dev/bench/longest_context.py --memory 2GiB [--cgroup FOLDER] [--train ./train] [--model data/smollm2]
                                 [--out PAGE.md] [--raw FILE]

Writes a section of dev/results/context.md.

PyTorch runs with sdpa and checkpoints every block; its longest sequence is found by trying, in multiples of
256 tokens. ./train plans its longest for --memory of 16 MiB less, then runs steps of four times PyTorch's
longest. Both are timed at PyTorch's longest. All of this runs in a cgroup whose memory is limited to the
budget. Without --cgroup, processes may not map more memory of their own (prlimit --data), touched or not;
PyTorch's libraries alone map much.
"""

import pathlib
import re
import statistics
import sys

import results
from results import ENVIRONMENT, PeerFailed, fail

STEP = 256
OTHERS = 16  # MiB of the cgroup, for what it holds before ./train plans
MORE = 4  # ./train must run this many times PyTorch's longest
FOLDER = results.ROOT / "dev/bench"


def size(text):
    """An argparse type: bytes, from a text such as 2GiB."""
    found = re.fullmatch(r"(\d+)(MiB|GiB)", text)
    if not found:
        raise ValueError
    return int(found[1]) << (20 if found[2] == "MiB" else 30)


def parse(arguments):
    parser = results.OptionParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=size, default="2GiB")
    parser.add_argument("--cgroup", type=pathlib.Path, help="the folder of one, limited to --memory")
    parser.add_argument("--train", default=str(results.ROOT / "train"))
    parser.add_argument("--model", default=str(results.ROOT / "data/smollm2"))
    parser.add_argument("--lora-rank", type=results.positive, default=16)
    parser.add_argument("--rounds", type=results.positive, default=3, help="of timing, in turn")
    results.add_out(parser, results.ROOT / "dev/results/context.md")
    options = parser.parse_args(arguments)
    if options.cgroup and limit_of(options.cgroup) != options.memory:
        fail(f"--cgroup {options.cgroup}: does not limit memory to --memory {options.memory >> 20}MiB")
    return options


def limit_of(cgroup):
    """The cgroup's memory limit in bytes; None if it has none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


class Peers:
    def __init__(self, options):
        self.options = options
        enter = f'echo $$ > "{options.cgroup}/cgroup.procs" && exec "$@"'
        self.limit = ["sh", "-c", enter, "sh"] if options.cgroup else ["prlimit", f"--data={options.memory}"]
        self.lora = ["--lora-rank", options.lora_rank, "--model", options.model, "--batch", 1]
        self.precision = self.plan(64)["precision"]

    def ours(self, *more):
        budget = ["--memory", f"{(self.options.memory >> 20) - OTHERS}MiB", "--sample", "tokens=0"]
        command = [self.options.train, "--train", "lora", *self.lora, *budget, *more]
        return results.json_of([*self.limit, *command])

    def plan(self, tokens):
        return self.ours("--seq-len", tokens, *self.scaling(tokens), "--plan", "json")

    def longest_plan(self):
        return self.ours("--rope-scaling", "yarn:128", "--seq-len", "auto", "--plan", "json")

    def scaling(self, tokens):
        """The option for sequences beyond the model's positions. Its factor does not matter for timing."""
        return ["--rope-scaling", "yarn:64"] if tokens > 2048 else []

    def step(self, tokens, steps=1):
        """./train's bench with this many tokens."""
        return self.ours("--seq-len", tokens, *self.scaling(tokens), "--bench", "json", "--warmup", "1", "--steps", steps)

    def torch(self, tokens, steps=1):
        """Milliseconds of PyTorch's steps; None if its memory does not suffice."""
        command = [sys.executable, FOLDER / "torch_folder.py", "--checkpoint", *self.lora, "--precision", self.precision,
                   "--seq-len", tokens, "--warmup", 1, "--steps", steps]
        try:
            output, _ = results.run([*self.limit, *command], ENVIRONMENT)
        except PeerFailed as failed:
            if re.search("alloc|emory|SIGKILL|SIGABRT", str(failed)):
                return None
            raise
        return results.last_json(output, command)["steps_ms"]

    def longest_of_torch(self):
        fits, fails = 0, 1
        while self.torch(fails * STEP) is not None:
            fits, fails = fails, 2 * fails
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.torch(middle * STEP) is None:
                fails = middle
            else:
                fits = middle
        return fits * STEP


def main(arguments=None):
    o = parse(arguments)
    facts = results.machine("cpu")
    try:
        peers = Peers(o)
        theirs = peers.longest_of_torch()
        if theirs == 0:
            fail(f"--memory: PyTorch does not train on {STEP} tokens in it")
        print(f"PyTorch: {theirs} tokens", flush=True)
        plan = peers.longest_plan()
        print(f"./train, by plan: {plan['seq_len']} tokens", flush=True)
        more = peers.step(MORE * theirs)
        print(f"./train, run: {MORE * theirs} tokens, {more['step_ms']['median'] / 1000:.1f} s a step", flush=True)
        times = {"torch": [], "train": []}
        for _ in range(o.rounds):
            times["torch"] += peers.torch(theirs)
            times["train"].append(peers.step(theirs)["step_ms"]["median"])
    except PeerFailed as failed:
        fail(failed)
    median = {peer: statistics.median(of) / 1000 for peer, of in times.items()}
    budget = f"{o.memory >> 20} MiB{' of a cgroup' if o.cgroup else ' that a process may map'}"
    lines = ["Measured and written by `dev/bench/longest_context.py`, which says how.", "", *results.facts_list(facts),
             f"- model: {results.shown([o.model])}, rank {o.lora_rank}, batch 1, {peers.precision}", "",
             *results.markdown(["", "transformers and PEFT", "`./train`"],
                               [["longest sequence, tokens", f"{theirs:,}", f"{plan['seq_len']:,} by plan"],
                                ["run, tokens", f"{theirs:,}", f"{MORE * theirs:,}"],
                                ["a step of that, s", f"{median['torch']:.1f}", f"{more['step_ms']['median'] / 1000:.1f}"],
                                ["a step of PyTorch's longest, s", f"{median['torch']:.1f}", f"{median['train']:.1f}"]])]
    results.write_section(o.out, "Long context", f"LoRA in {budget}", lines)
    results.write_raw(o.raw, {"machine": facts, "torch_longest": theirs, "planned": plan["seq_len"],
                              "planned_seconds": plan["estimated_seconds"], "more": more, "times_ms": times})


if __name__ == "__main__":
    main()
