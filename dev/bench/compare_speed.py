#!/usr/bin/env python3
"""Compares the time of a training step in ./train, PyTorch and llm.c. They take turns; each turn is a process
of its own.

Peers for a new GPT-2 (dN): train, torch (eager), torch.compile, and llm.c from a built checkout that the
environment's LLMC names. For a Hugging Face folder: train, and transformers with sdpa or eager attention, and
compiled; with --lora-rank, PEFT's LoRA with its base in the build's precision or in NF4. Without --peers, all
that are installed take part.

Adds the comparison to a page of results, dev/results/speed-DEVICE.md, with one table of all comparisons, and
to the JSON file beside that page, which has all that was measured. A comparison with the same settings is
replaced. --rewrite makes the tables again from the JSON file and measures nothing.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import shlex
import statistics
import sys

import results
from results import ENVIRONMENT, MIB, PeerFailed, fail, write_tokens

FOLDER = pathlib.Path(__file__).resolve().parent
NOTES = {
    "train": "`train`: `./train --bench` on random tokens; weights in the build's precision, bf16 with an fp32 master",
    "torch": "`torch`: PyTorch eager with scaled_dot_product_attention, fused AdamW where the device has it, clipping "
             "by the global norm, a vocabulary padded to 50304; in bf16 autocast over fp32 weights, which is nearest "
             "to ./train's bf16 weights with an fp32 master",
    "torch.compile": "`torch.compile`: the same, its model compiled; compiling is not in the times",
    "llm.c": "`llm.c`: its own trainer; it times a step without validation and sampling; on a CPU it "
             "is in fp32, and does not clip; on a GPU it recomputes GELU unless --llmc-options has -r 0",
    "transformers": "`transformers`: its own model with scaled_dot_product_attention, fused AdamW where the device has "
                    "it, clipping by the global norm; in bf16 autocast over fp32 weights, which is nearest to ./train's "
                    "bf16 weights with an fp32 master",
    "transformers.eager": "`transformers.eager`: the same with attention written out",
    "transformers.compile": "`transformers.compile`: `transformers`, its model compiled; compiling is not in the times",
    "transformers.bf16": "`transformers.bf16`: `transformers` with weights and optimizer in bf16 and nothing behind "
                         "them: less work, and less exact, than ./train's",
    "transformers.bf16.compile": "`transformers.bf16.compile`: the same, compiled",
    "peft": "`peft`: PEFT's LoRA of --lora-rank at all linear layers of `transformers`' model, which is frozen and in the "
            "precision; sdpa, adapters in fp32, in bf16 under autocast",
    "peft.compile": "`peft.compile`: the same, compiled",
    "peft.nf4": "`peft.nf4`: PEFT's LoRA beside bitsandbytes' NF4, double quantized",
    "peft.nf4.compile": "`peft.nf4.compile`: the same, compiled",
}
FOLDER_PEERS = {"transformers": [], "transformers.eager": ["--attention", "eager"], "transformers.compile": ["--compile"],
                "transformers.bf16": ["--weights", "bf16"],
                "transformers.bf16.compile": ["--weights", "bf16", "--compile"]}
LORA_PEERS = {"peft": [], "peft.compile": ["--compile"], "peft.nf4": ["--nf4"],
              "peft.nf4.compile": ["--nf4", "--compile"]}


def median_of(times):
    if not times:
        raise PeerFailed("printed no step times")
    return {"median": statistics.median(times), "min": min(times), "all": times}


class Train:
    """This repository's trainer."""

    def __init__(self, options):
        self.options = options
        build = f"build/{options.device}-{options.precision}/train"
        self.binary = options.train or results.ROOT / build
        if not os.path.exists(self.binary):
            fail(f"--train {results.shown([self.binary])}: no such file; "
                 f"make DEVICE={options.device} PRECISION={options.precision} builds {build}")

    def command(self):
        o = self.options
        lora = ["--train", "lora", "--lora-rank", o.lora_rank, "--lora-alpha", 2 * o.lora_rank] if o.lora_rank else []
        return [self.binary, "--bench", "json", "--warmup", o.warmup, "--steps", o.steps, "--model",
                o.model, "--batch", o.batch, "--seq-len", o.seq_len, "--threads", o.threads, *lora,
                *shlex.split(o.train_options)]

    def turn(self):
        command, o = self.command(), self.options
        output, resident = results.run(command, ENVIRONMENT, o.timeout)
        raw = results.last_json(output, command)
        if (raw["device"], raw["precision"]) != (o.device, o.precision):
            fail(f"--train {results.shown([self.binary])}: it is a {raw['device']} {raw['precision']} build, wanted "
                 f"is {o.device} {o.precision}")
        step = raw["step_ms"]
        return {"step_ms": {"median": step["median"], "min": step["min"]}, "raw": raw,
                "peak_bytes": raw["taken_bytes"] if o.device == "cuda" else resident}, {}


class Torch:
    """A script that times steps in PyTorch."""

    def __init__(self, options, script, *more):
        self.options, self.script, self.more = options, script, more
        module = "torch" if script == "torch_gpt2.py" else "transformers"
        if not importlib.util.find_spec(module):
            fail(f"--peers: this Python has no {module}; dev/venv.sh makes .venv, then use .venv/bin/python")

    def command(self):
        o = self.options
        return [sys.executable, FOLDER / self.script, "--model", o.model, "--batch", o.batch, "--seq-len",
                o.seq_len, "--precision", o.precision, "--device", o.device, "--threads", o.threads, "--warmup",
                o.warmup, "--steps", o.steps, *self.more]

    def turn(self):
        command, o = self.command(), self.options
        output, resident = results.run(command, {**ENVIRONMENT, "OMP_NUM_THREADS": str(o.threads)}, o.timeout)
        raw = results.last_json(output, command)
        versions = {"PyTorch": raw["torch"]} | ({"PyTorch's CUDA": raw["cuda"]} if o.device == "cuda" else {})
        versions |= {"transformers": raw["transformers"]} if "transformers" in raw else {}
        return {"step_ms": median_of(raw["steps_ms"]), "raw": raw,
                "peak_bytes": raw["peak_bytes"] if o.device == "cuda" else resident}, versions


class LlmC:
    """The C trainer on a CPU, the CUDA trainer on a GPU. Neither is part of this repository."""

    STEP_TIME = {"cpu": r"step \d+: train loss .*\(took ([\d.]+) ms\)", "cuda": r"step +\d+/\d+ \|.*\| ([\d.]+) ms \|"}
    BINARY = {"cpu": "train_gpt2", "cuda": "train_gpt2cu"}

    @staticmethod
    def shape_on_a_cpu(folder):
        """(batch, length) from the source of its C trainer, which has no options for them."""
        source = pathlib.Path(folder) / "train_gpt2.c"
        text = source.read_text(encoding="utf-8", errors="replace") if source.exists() else ""
        found = [re.search(rf"^ *int {name} = (\d+);", text, re.MULTILINE) for name in ("B", "T")]
        return tuple(int(match[1]) if match else default for match, default in zip(found, (4, 64)))

    @staticmethod
    def unfit(options):
        """The reason why llm.c cannot take part in this comparison, or None."""
        if options.device == "cpu":
            batch, length = LlmC.shape_on_a_cpu(os.environ.get("LLMC", ""))
            if (options.model, options.batch, options.seq_len) != ("d12", batch, length):
                return f"that checkout's C trainer does --model d12 --batch {batch} --seq-len {length} only"
        elif (options.precision != "bf16" or options.model not in ("d6", "d12", "d24", "d36", "d48") or
              options.seq_len > 1024):
            return ("llm.c's CUDA trainer does --precision bf16, --model d6, d12, d24, d36 or d48 and --seq-len up to "
                    "1024 only")
        return None

    def __init__(self, options):
        self.options = options
        folder = os.environ.get("LLMC")
        if not folder:
            fail("--peers llm.c: the environment's LLMC must name a built checkout of llm.c")
        if unfit := self.unfit(options):
            fail(f"--peers llm.c: {unfit}")
        self.folder = pathlib.Path(folder).resolve()
        if not (self.folder / self.BINARY[options.device]).exists():
            fail(f"LLMC={folder}: there is no {self.BINARY[options.device]}; make {self.BINARY[options.device]} there")
        self.tokens = results.ROOT / "build/bench/tokens.bin"
        if options.device == "cuda":
            write_tokens(self.tokens, 8 * options.batch * options.seq_len + 1)

    def command(self):
        o = self.options
        binary = self.folder / self.BINARY[o.device]
        if o.device == "cpu":
            return ["stdbuf", "-oL", binary]  # it takes no options, and prints times line by line
        # No validation except at the first and last step, with one batch; no sampling.
        return [binary, "-i", self.tokens, "-j", self.tokens, "-e", o.model, "-b", o.batch, "-t", o.seq_len, "-x",
                o.warmup + o.steps, "-v", 1000000, "-m", 1, "-s", 0, "-h", 0, *shlex.split(o.llmc_options)]

    def turn(self):
        command, o = self.command(), self.options
        wanted = o.warmup + o.steps

        def times(output):
            return [float(ms) for ms in re.findall(self.STEP_TIME[o.device], output)]

        output, resident = results.run(command, {**ENVIRONMENT, "OMP_NUM_THREADS": str(o.threads)}, o.timeout,
                                       cwd=self.folder, enough=lambda output: len(times(output)) >= wanted)
        turn = {"step_ms": median_of(times(output)[o.warmup:wanted]), "raw": {"steps_ms": times(output)},
                "peak_bytes": None if o.device == "cuda" else resident}
        return turn, {"llm.c": results.commit_of(self.folder)}


def peers_of(options):
    """{name: the class of the peer} for a kind of model."""
    if not options.folder:
        return {"train": Train, "torch": lambda o: Torch(o, "torch_gpt2.py"),
                "torch.compile": lambda o: Torch(o, "torch_gpt2.py", "--compile"), "llm.c": LlmC}
    peers = FOLDER_PEERS
    if options.lora_rank:
        peers = {name: ["--lora-rank", options.lora_rank, *more] for name, more in LORA_PEERS.items()}
    return {"train": Train} | {name: lambda o, more=more: Torch(o, "torch_folder.py", *more)
                               for name, more in peers.items()
                               if options.precision == "bf16" or "--weights" not in more}


def choose_peers(options):
    """{name: peer}, and the reasons for those left out that were not asked for by name."""
    known = peers_of(options)
    if options.peers:
        names = options.peers.split(",")
        for name in names:
            if name not in known:
                fail(f"--peers {name}: known are {', '.join(known)}")
        return {name: known[name](options) for name in names}, {}
    left_out = {}
    module = "peft" if options.lora_rank else "transformers" if options.folder else "torch"
    if not importlib.util.find_spec(module):
        left_out |= dict.fromkeys((name for name in known if name.startswith(module)), f"this Python has no {module}")
    if "llm.c" in known:
        why_not = LlmC.unfit(options) if os.environ.get("LLMC") else "the environment names no LLMC"
        if why_not:
            left_out["llm.c"] = why_not
    return {name: make(options) for name, make in known.items() if name not in left_out}, left_out


def take_turns(peers, rounds):
    """[turns], {peer: why it failed}, {what: version}. A peer that fails has no more turns."""
    turns, failed, versions = [], {}, {}
    for number in range(1, rounds + 1):
        for name, peer in peers.items():
            if name in failed:
                continue
            try:
                turn, said = peer.turn()
            except PeerFailed as error:
                failed[name] = str(error)
                print(f"round {number}: {name}: failed: {error}", file=sys.stderr)
                continue
            turns.append({"peer": name, "round": number, **turn})
            versions |= said
            print(f"round {number}: {name}: {turn['step_ms']['median']:.2f} ms a step", flush=True)
    return turns, failed, versions


def table_rows(comparison):
    """The rows of a comparison's peers."""
    s, turns = comparison["settings"], comparison["turns"]
    tokens = s["batch"] * s["seq_len"]
    medians = {name: {t["round"]: t["step_ms"]["median"] for t in turns if t["peer"] == name}
               for name in comparison["commands"]}
    base = medians.get("train", {})
    rows = []
    for name in medians:
        if name in comparison["failed"]:
            rows.append([name, "failed", "", "", "", ""])
            continue
        times = medians[name]
        ms = statistics.median(times.values())
        ratios = [times[number] / base[number] for number in times if number in base]  # drift affects both
        peak = [t["peak_bytes"] for t in turns if t["peer"] == name and t["peak_bytes"]]
        rows.append([name, f"{ms:.2f}", f"{min(times.values()):.2f} to {max(times.values()):.2f}",
                     f"{1000 * tokens / ms:.0f}", f"{statistics.median(ratios):.2f}" if ratios else "",
                     f"{max(peak) / MIB:.0f}" if peak else ""])
    return rows


HEADER = ["ms a step", "over the rounds", "tokens/s", "time / train's", "peak MiB"]
KEY = ("model", "precision", "batch", "seq_len", "device", "lora_rank", "train_options", "llmc_options")
OWN = ("date", "commit", "load of the machine before")  # facts that each comparison has for itself


def name_of(comparison):
    s = comparison["settings"]
    lora = f", LoRA of rank {s['lora_rank']}" if s["lora_rank"] else ""
    return f"{pathlib.Path(s['model']).name}{lora}, {s['batch']} x {s['seq_len']}, {s['precision']}"


def order_of(comparison):
    """Sorts by model and length, with fp32 before bf16."""
    s = comparison["settings"]
    return pathlib.Path(s["model"]).name, s["lora_rank"], s["seq_len"], s["batch"], s["precision"] != "fp32"


def shared_facts(comparisons):
    """The facts of the machine and of tools in which all comparisons agree that have them."""
    facts = {}
    for c in comparisons:
        for what, said in c["machine"].items():
            facts.setdefault(what, set()).add(said)
    return {what: said.pop() for what, said in facts.items() if what not in OWN and len(said) == 1}


def remarks_of(comparison, shared):
    """What a comparison has that others do not: its versions, and the peers that did not run."""
    facts = [f"{what}: {said}" for what, said in comparison["machine"].items() if what not in OWN and what not in shared]
    facts += [f"`{name}` failed: {why}" for name, why in comparison["failed"].items()]
    facts += [f"`{name}` is left out: {why}" for name, why in comparison["left_out"].items()]
    return "; ".join(facts)


def section_of(comparisons):
    """The lines of all comparisons: their machine, a table of times, a table of the runs, and the commands."""
    shared = shared_facts(comparisons)
    gpu = comparisons[0]["settings"]["device"] == "cuda"
    memory = ("what the process took of the device; PyTorch's is what its allocator reserved" if gpu else
              "the most that was resident in the process, libraries included")
    names = dict.fromkeys(name for c in comparisons for name in c["commands"])
    rows = [[name_of(c), *row] for c in comparisons for row in table_rows(c)]
    runs = []
    for c in comparisons:
        s, machine = c["settings"], c["machine"]
        runs.append([name_of(c), f"{s['rounds']} x {s['steps']} after {s['warmup']}", *(machine[what] for what in OWN),
                     f"`{s['train_options']}`" if s["train_options"] else "", remarks_of(c, shared)])
    commands = dict.fromkeys(f"    {command}" for c in comparisons for command in c["commands"].values())
    return ["Measured and written by `dev/bench/compare_speed.py`, which says how.", "", *results.facts_list(shared), "",
            "A time is the median over the rounds of each round's median step. The peers of a comparison take turns, and each "
            "turn is a process of its own. Times are divided round by round, and the median of the ratios is shown. "
            f"Peak MiB is {memory}.", "",
            *(f"- {NOTES[name]}." for name in names), "",
            *results.markdown(["model, batch x length, precision", "peer", *HEADER], rows), "",
            *results.markdown(["comparison", "rounds x steps", "date", "commit", "load before", "options of `train`", "remarks"],
                              runs), "",
            "Commands of the peers, each once:", "", *commands]


def comparisons_of(path):
    """The comparisons in a page's JSON file; none if there is no such file."""
    try:
        return json.loads(path.read_text())["comparisons"] if path.exists() else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or 'not a file of compare_speed.py'}")


def write_page(out, device, comparisons):
    results.write_section(out, f"Times of training steps, {device}", "Training steps beside other programs",
                          section_of(comparisons))


def report(options, peers, left_out, turns, failed, versions):
    o = options
    new = {"settings": {key: getattr(o, key) for key in (*KEY, "threads", "steps", "warmup", "rounds")},
           "machine": results.machine(o.device) | versions | {"threads": o.threads},
           "commands": {name: results.shown(peer.command()) for name, peer in peers.items()},
           "failed": failed, "left_out": left_out, "turns": turns}
    new["settings"]["model"] = results.shown([o.model])
    raw = o.out.with_suffix(".json")
    kept = [c for c in comparisons_of(raw) if any(c["settings"][key] != new["settings"][key] for key in KEY)]
    comparisons = sorted([*kept, new], key=order_of)
    write_page(o.out, o.device, comparisons)
    results.write_raw(raw, {"comparisons": comparisons})
    print("\n".join(results.markdown(["", *HEADER], table_rows(new))))
    print(f"written: {o.out}, {raw}")


def parse_options(arguments):
    parser = results.OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, positive = parser.add_argument, results.positive
    add("--model", default="d12", help="dN as in ./train --help, or a Hugging Face folder")
    add("--batch", type=positive, default=4)
    add("--seq-len", type=positive, default=64)
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where a GPU answers nvidia-smi)")
    add("--precision", choices=("fp32", "bf16"), help="(default: bf16 on cuda, fp32 on the cpu)")
    add("--threads", type=positive, default=results.cores(), help="of every peer, on the CPU")
    add("--steps", type=positive, default=5, help="timed in a turn")
    add("--warmup", type=positive, default=2, help="steps of a turn before those")
    add("--rounds", type=positive, default=3)
    add("--peers", help=f"of {', '.join(NOTES)}, with commas between (default: all that there are for the model)")
    add("--lora-rank", type=positive, default=0, help="train LoRA of this rank beside a frozen folder, not all of it")
    add("--train", help="the trainer's binary (default: that of the device and precision in build/)")
    add("--train-options", default="", help="more options for the trainer, in one word: '--recompute none --chunk-rows head=0' "
                                            "keeps what the peers keep")
    add("--llmc-options", default="", help="more options for llm.c's CUDA trainer, in one word: '-r 0 -ge 2' recomputes "
                                           "nothing and has cuBLASLt do GELU")
    add("--timeout", type=positive, default=3600, help="seconds that a turn may take")
    add("--rewrite", action="store_true", help="make the tables again from the page's JSON file")
    add("--out", type=results.result_path, help="a page of results (default: dev/results/speed-DEVICE.md)")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if results.gpu_answers() else "cpu")
    options.precision = options.precision or ("bf16" if options.device == "cuda" else "fp32")
    options.folder = pathlib.Path(options.model).is_dir()
    if options.lora_rank and not options.folder:
        fail("--lora-rank: LoRA is of a Hugging Face folder, and --model is none")
    options.out = options.out or results.ROOT / f"dev/results/speed-{options.device}.md"
    return options


def main(arguments=None):
    options = parse_options(arguments)
    if options.rewrite:
        comparisons = comparisons_of(options.out.with_suffix(".json"))
        if not comparisons:
            fail(f"--rewrite: {options.out.with_suffix('.json')} has no comparisons")
        write_page(options.out, options.device, comparisons)
        return 0
    peers, left_out = choose_peers(options)
    turns, failed, versions = take_turns(peers, options.rounds)
    if not turns:
        fail("; ".join(f"{name}: {why}" for name, why in failed.items()))
    report(options, peers, left_out, turns, failed, versions)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
