#!/usr/bin/env python3
"""How well a step's time is predicted: 20 configurations, planned with rates just measured, and run.

    dev/bench/predict.py [--fp32 build/cpu-fp32/train] [--bf16 build/cpu-bf16/train] [--model data/smollm2]
                         [--only TEXT] [--rates FOLDER] [--out PAGE.md] [--raw FILE]

Writes a section of dev/results/predicted.md that is named by this machine's CPU; with --only it only prints.
Each build measures its rates with --calibrate, or --rates names a folder with fp32.json and bf16.json. Every
configuration is planned with --plan --rates, then run with --bench. Its measured time is the median of its
steps. If the prediction is off by more than 10%, the bench is run once more and the smaller median counts,
because other work on a machine can only add time; the table says so. This takes about ten minutes on a
machine that does nothing else.
"""

import os
import pathlib
import statistics
import tempfile

import results
from results import ENVIRONMENT, PeerFailed, fail, write_tokens

SECONDS = 6  # of measured steps, for each configuration
GOOD, FAIR = 0.10, 0.20
LORA = ["--train", "lora", "--lora-rank", 16]
CONFIGURATIONS = [
    ("fp32", "d12", 4, 64, []),
    ("fp32", "d12", 1, 1024, ["--recompute", "norm"]),
    ("fp32", "d4", 8, 128, []),
    ("fp32", "d6", 2, 512, ["--recompute", "block"]),
    ("fp32", "llama:d6", 4, 128, ["--grad-accum", 4]),
    ("fp32", "llama:d6", 1, 2048, ["--recompute", "norm"]),
    ("fp32", "qwen3:d4", 4, 256, ["--optimizer", "sgd"]),
    ("fp32", "bloom:d4", 4, 256, []),
    ("fp32", "FOLDER", 2, 256, LORA),
    ("fp32", "FOLDER", 1, 256, [*LORA, "--offload", "weights=disk"]),
    ("bf16", "d12", 4, 64, []),
    ("bf16", "d12", 2, 512, ["--chunk-rows", "head=256"]),
    ("bf16", "d6", 4, 256, ["--state-formats", "m=8bit,v=8bit,master=split"]),
    ("bf16", "llama:d6", 4, 256, ["--grad-accum", 2, "--recompute", "ffn"]),
    ("bf16", "llama:d6", 1, 2048, ["--offload", "inputs=auto", "--recompute", "block"]),
    ("bf16", "qwen3:d6", 4, 128, ["--recompute", "attention"]),
    ("bf16", "bloom:d6", 2, 512, []),
    ("bf16", "FOLDER", 2, 256, []),
    ("bf16", "FOLDER", 2, 256, [*LORA, "--base", "nf4"]),
    ("bf16", "FOLDER", 1, 512, [*LORA, "--offload", "weights=disk,inputs=auto"]),
]


def parse(arguments):
    parser = results.OptionParser(description=__doc__.splitlines()[0])
    results.add_out(parser, results.ROOT / "dev/results/predicted.md")
    parser.add_argument("--fp32", default=str(results.ROOT / "build/cpu-fp32/train"))
    parser.add_argument("--bf16", default=str(results.ROOT / "build/cpu-bf16/train"))
    parser.add_argument("--model", default=str(results.ROOT / "data/smollm2"), help="SmolLM2's folder")
    parser.add_argument("--only", default="", help="configurations whose line has this text")
    parser.add_argument("--rates", type=pathlib.Path, help="a folder with fp32.json and bf16.json")
    parser.add_argument("--phases", action="store_true", help="print each phase, predicted and measured")
    return parser.parse_args(arguments)


def calibrate(binaries, folder):
    """Measures each build's rates into a file of the folder; returns what each printed."""
    said = []
    for precision, binary in binaries.items():
        command = [binary, "--calibrate", folder / f"{precision}.json"]
        said.append(results.run(command, ENVIRONMENT)[0].strip().rpartition(":")[0] + f" ({precision})")
    return said


def words(model, batch, seq_len, options):
    name = "SmolLM2-135M" if model == "FOLDER" else model
    return " ".join(map(str, [name, f"{batch} x {seq_len}", *options]))


def bench(command, predicted):
    steps = min(20, max(3, round(SECONDS / predicted)))
    return results.json_of([*command, "--bench", "json", "--warmup", "1", "--steps", steps])


def measure(binary, rates, model, batch, seq_len, options):
    """A configuration's plan, and its benches; there is a second one if the first is off."""
    command = [binary, "--model", model, "--batch", batch, "--seq-len", seq_len, *options]
    data = []
    if not pathlib.Path(model).exists():  # a bench of a new model uses GPT-2's tokens
        data = ["--data", rates.with_name("tokens.bin")]
        write_tokens(data[1], 2 * batch * seq_len)
    plan = results.json_of([*command, *data, "--sample", "tokens=0", "--plan", "json", "--rates", rates])
    predicted = plan["estimated_seconds"]
    runs = [bench(command, predicted)]
    if abs(1000 * predicted / runs[0]["step_ms"]["median"] - 1) > GOOD:
        runs.append(bench(command, predicted))
    return plan, runs


def row_of(precision, configuration, plan, runs):
    best = min(runs, key=lambda run: run["step_ms"]["median"])
    measured = best["step_ms"]["median"]
    predicted = 1000 * plan["estimated_seconds"]
    return {"configuration": words(*configuration), "precision": precision, "predicted_ms": predicted,
            "measured_ms": measured, "fastest_ms": best["step_ms"]["min"], "off": predicted / measured - 1,
            "runs": [run["step_ms"] for run in runs], "phases": plan["phases"],
            "measured_phases": {p["name"]: best.get(p["name"] + "_ms", {}).get("median") for p in plan["phases"]}}


def bounds(row):
    return ", ".join(f"{p['name']}: {p['bound_by']}" for p in row["phases"])


def table(rows, facts):
    good = sum(abs(row["off"]) <= GOOD for row in rows)
    fair = sum(abs(row["off"]) <= FAIR for row in rows)
    spread = statistics.median(row["measured_ms"] / row["fastest_ms"] - 1 for row in rows)
    lines = ["Measured and written by `dev/bench/predict.py`.", "", *results.facts_list(facts),
             f"- noise: a configuration's median step takes {100 * spread:.1f}% longer than its fastest, in the median",
             f"- run a second time, as the first was off by more than 10%, and the faster taken: "
             f"{sum(len(row['runs']) > 1 for row in rows)}", "",
             f"Within 10%: {good} of {len(rows)}; within 20%: {fair} of {len(rows)}.", ""]
    lines += results.markdown(
        ["configuration", "precision", "predicted, ms", "measured, ms", "off", "what bounds it"],
        [[row["configuration"], row["precision"], f"{row['predicted_ms']:.0f}", f"{row['measured_ms']:.0f}",
          f"{100 * row['off']:+.1f}%", bounds(row)] for row in rows])
    return lines


def main(arguments=None):
    o = parse(arguments)
    binaries = {"fp32": o.fp32, "bf16": o.bf16}
    wanted = [c for c in CONFIGURATIONS if o.only in f"{c[0]} {words(*c[1:])}"]
    if not (pathlib.Path(o.model) / "config.json").exists() and any(c[1] == "FOLDER" for c in wanted):
        fail(f"--model {o.model}: is not there; dev/make_smollm2.py makes it")
    rows, facts = [], results.machine("cpu")
    with tempfile.TemporaryDirectory() as folder:
        try:
            rates = o.rates or pathlib.Path(folder)
            if not o.rates:
                facts["calibration"] = "; ".join(calibrate(binaries, rates))
            for precision, model, *rest in wanted:
                given = o.model if model == "FOLDER" else model
                plan, runs = measure(binaries[precision], rates / f"{precision}.json", given, *rest)
                rows.append(row_of(precision, (model, *rest), plan, runs))
                row = rows[-1]
                print(f"{precision} {row['configuration']}: predicted {row['predicted_ms']:.0f} ms, measured "
                      f"{row['measured_ms']:.0f}, fastest {row['fastest_ms']:.0f}: {100 * row['off']:+.1f}%", flush=True)
                for phase in row["phases"] if o.phases else []:
                    print(f"    {phase['name']}: {1000 * phase['seconds']:.0f} ms, measured "
                          f"{row['measured_phases'][phase['name']] or 0:.0f}, {phase['bound_by']}")
        except PeerFailed as failed:
            fail(failed)
    facts["load of the machine after"] = f"{os.getloadavg()[0]:.1f}"
    if not o.only:
        results.write_section(o.out, "Predicted and measured times of a step on CPUs", facts["CPU"], table(rows, facts))
        results.write_raw(o.raw, {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
