#!/usr/bin/env python3
"""What a training step should take on GPUs that nobody has here, by counting: writes dev/results/gpu-predicted.md.

The trainer's own plan names the operations of a step, with their FLOPs and bytes. Its kernels run a small step on the GPU
that test/gpu plays, which counts instructions, sectors, bank passes and tensor FLOPs; ptxas says what registers they
take, and their SASS how many loads a warp has under way. An operation takes the longest of bytes over bandwidth, tensor
FLOPs over the rate that is reached and instructions over the issue rate, and its launches.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import re
import subprocess
import tempfile

from gpu_coverage import commit

ROOT = pathlib.Path(__file__).resolve().parent.parent

# From NVIDIA's data sheets. `products`: the rate that cuBLASLt reaches in bf16, from "Maximum achievable
# matmul FLOPS" in stas00's ml-engineering (compute/accelerator). It has no RTX 4090; for that the A100's
# share of the peak rate is used. `mma`: the share of the peak rate that mma.sync reaches at most; for Hopper,
# this and the latency (in cycles) are from arXiv 2402.13499.
Gpu = collections.namedtuple("Gpu", "arch sms clock bandwidth flops products mma memory warps shared latency tile")
GPUS = {"A100": Gpu("sm_80", 108, 1.41e9, 2.0e12, 312e12, 271.2e12, 1, 80e9, 64, 164 << 10, 466, (128, 256)),
        "4090": Gpu("sm_89", 128, 2.52e9, 1.01e12, 165e12, 165e12 * 271.2 / 312, 1, 24e9, 48, 100 << 10, 542, (128, 128)),
        "H100": Gpu("sm_90a", 132, 1.83e9, 3.35e12, 989e12, 794.5e12, 0.63, 80e9, 64, 228 << 10, 479, (128, 256))}
# Cycles that a tile takes besides its products: fetching the first operands and writing the result. Fitted to
# published rates of cuBLAS on an H100; see PRODUCTS.
TILE_CYCLES = 3000
REACHED = 0.85  # of the bandwidth, if enough loads are in flight
LAUNCH = 3e-6  # seconds, as in llmc/rates_device.h

LLAMA_1B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072, "tie_word_embeddings": True, "rope_theta": 500000.0}
QWEN_1B5 = {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "num_hidden_layers": 28,
            "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768, "tie_word_embeddings": True, "rope_theta": 1000000.0}
# What is trained, make_model.py's options for a narrow model of one layer with the same kernels, and the
# micro-batches of a step.
Setup = collections.namedtuple("Setup", "title model batch seq_len small micro_batches", defaults=[1])
GPT2_SMALL = ("--family", "gpt2", "--heads", 4, "--channels", 256)
SETUPS = [Setup("GPT-2 124M", "d12", 64, 1024, GPT2_SMALL),
          Setup("GPT-2 1558M", "d48", 4, 1024, GPT2_SMALL),
          Setup("GPT-2 1558M in llm.c's step", "d48", 16, 1024, GPT2_SMALL, 8),  # llm.c's tokens per update
          Setup("Llama-3.2-1B", LLAMA_1B, 4, 2048, ("--family", "llama", "--heads", 4, "--kv-heads", 1, "--channels", 256,
                                                    "--mlp-width", 1024, "--tied")),
          Setup("Qwen2.5-1.5B", QWEN_1B5, 16, 1024, ("--family", "qwen2", "--heads", 4, "--kv-heads", 1, "--channels", 512,
                                                     "--mlp-width", 2048, "--tied"))]
COUNTED = (512, 1024, 2048)  # lengths of the sequences to which attention's count by length is fitted
LENGTHS = (4096, 16384, 65536, 524288)
SMALL = ("--chunk-rows", "head=256")  # the head in chunks, as in large steps
VOCABULARY = 4096  # of the small model
# Tokens/s of one GPU. llm.c's numbers are from eight GPUs, which also exchange gradients.
LLMC_A100 = 0.300  # seconds of a step
PUBLISHED = {
    ("GPT-2 124M", "A100"): (524288 / LLMC_A100 / 8, "llm.c, scripts/run_gpt2_124M.sh: 8 GPUs, 300 ms a step"),
    ("GPT-2 124M", "H100"): (18865 * 524288 / 2700 / 8, "llm.c, 10B tokens in 45 minutes on 8 GPUs (modded-nanogpt's README)"),
    ("GPT-2 1558M in llm.c's step", "H100"): (1048576 / 2.80 / 8, "llm.c, scripts/run_gpt2_1558M.sh: 8 GPUs, 2.80 s a step"),
    ("Qwen2.5-1.5B", "H100"): (59e3, "LLMQ's README, bf16, batch 16"),
    ("Qwen2.5-1.5B", "4090"): (14e3, "LLMQ's README, bf16, batch 4"),
}

# Rates of cuBLAS products on an H100 in 16 bits, (m, n, k): (TFLOP/s, source).
PRODUCTS = {
    (8192, 8192, 512): (553, "torch in Triton's tutorial 09-persistent-matmul.py, on a user's H100"),
    (16384, 16384, 1024): (2 * 16384**2 * 1024 / 776e-6 / 1e12, "nvprof in NVIDIA/Fuser, issue 3137"),
    (2048, 2048, 8192): (2 * 2048**2 * 8192 / 87.55e-6 / 1e12, "nvprof in NVIDIA/Fuser, issue 3279"),
}

# The kernels that an operation launches. The script ends if a kernel belongs to no operation, or an operation
# has no kernel.
OPERATIONS = {
    "attention_forward": "((hopper|wide)_)?attention_forward", "attention_backward": "((hopper|wide)_)?attention_backward",
    "attention_delta": "attention_delta",
    "layernorm_forward": "layernorm_forward.*Lb0E", "residual_layernorm_forward": "layernorm_forward.*Lb1E",
    "layernorm_normalize": "layernorm_normalize", "residual_forward": "residual_forward",
    "layernorm_backward": "layernorm_backward|column_sums.*LayernormColumns|add_chunks.*Li2E",
    "rmsnorm_forward": "rmsnorm_forward.*Lb0E", "residual_rmsnorm_forward": "rmsnorm_forward.*Lb1E",
    "rmsnorm_normalize": "rmsnorm_normalize", "rmsnorm_backward": "rmsnorm_backward|column_sums.*RmsnormColumns",
    "bias_backward": "column_sums.*BiasColumns|add_chunks.*Li1E", "gelu_forward": "gelu_forward",
    "gelu_backward": "gelu_backward", "swiglu_forward": "swiglu_forward", "swiglu_backward": "swiglu_backward",
    "rope_forward": "rope.*Lb0E", "rope_backward": "rope.*Lb1E", "embedding_forward": "embedding_forward",
    "embedding_backward": "(token|position)_embedding_backward", "global_norm": "squares|norm_kernel",
    "optimizer_update": "optimizer", "cross_entropy_forward_backward": "cross_entropy.*Lb1E",
    "add_losses": "add_losses", "wide_sum_add": "wide_sum", "matmul": "add_bias|matmul_tiled"}
BESIDE = "set_factors|cross_entropy.*Lb0E"  # kernels that belong to no operation, or to validation


class Kernel(dict):
    """The counts of a kernel in a step, and figures from its code."""


def run(command, **environment):
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=900,
                         env={**os.environ, **environment})
    if ran.returncode:
        raise SystemExit(f"gpu_predicted.py: {' '.join(map(str, command))}: {ran.stdout[-500:]}{ran.stderr[-2000:]}")
    return ran.stdout


def read_counters(text):
    head, *lines = text.splitlines()
    names = head.split()[1:]
    return {line.split()[0]: dict(zip(names, map(int, line.split()[1:]))) for line in lines}


def plan(trainer, gpu, model, batch, seq_len, folder, *more):
    if isinstance(model, dict):
        path = folder / model["model_type"]
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(model))
        model = path
    return json.loads(run([trainer, "--plan", "json", "--model", model, "--batch", batch, "--seq-len", seq_len, *more],
                          GPU=gpu))


def shard(folder):
    """Writes tokens in llm.c's format."""
    import numpy as np
    path, count = folder / "tokens.bin", 20000
    random = np.random.default_rng(1)
    path.write_bytes(np.array([20240520, 1, count] + 253 * [0], np.int32).tobytes() +
                     random.integers(0, VOCABULARY, count).astype(np.uint16).tobytes())
    return path


def small_step(trainer, gpu, setup, folder, *more):
    """The counts of one step of the small model by kernel, on an emulated GPU like `gpu`: those of two steps
    minus those of one."""
    import make_model
    # Attention has smaller tiles on a 4090.
    plays = "H100" if gpu.arch == "sm_90a" else "A100" if gpu.shared > 100 << 10 else "4090"
    model = folder / f"small-{setup.small[1]}"
    if not model.exists():
        make_model.main(list(map(str, ["--out", model, "--layers", 1, "--positions", 2048, "--dtype", "bf16",
                                       "--vocab", VOCABULARY, *setup.small])))
    counted = []
    for steps in (1, 2):
        path = folder / "-".join(map(str, [plays, model.name, setup.seq_len, steps, *more]))
        if not path.exists():
            run([trainer, "--model", model, "--data", shard(folder), "--batch", 1, "--seq-len", setup.seq_len, "--steps", steps,
                 "--eval-batches", 1, "--sample", "tokens=0", "--advanced", "graph=off", *SMALL, *more], GPU=plays, GPU_COUNTERS=str(path))
        counted.append(read_counters(path.read_text()))
    once, twice = counted
    kernels = {}
    for name, counts in twice.items():
        least = {key: counts[key] for key in ("threads", "shared_bytes")}
        kernels[name] = Kernel({key: n - once.get(name, {}).get(key, 0) for key, n in counts.items()} | least)
    plan_of_it = plan(trainer, plays, model, 1, setup.seq_len, folder, *SMALL)
    return {name: k for name, k in kernels.items() if k["launches"]}, totals(plan_of_it["operations"])


ONCE = {"optimizer_update", "global_norm"}  # once per step, not per micro-batch


def of_step(operations, micro_batches):
    """The operations of a step, from those of the plan, which are for one micro-batch."""
    return [o if o["name"] in ONCE else o | {key: micro_batches * o[key] for key in ("flops", "bytes", "calls")}
            for o in operations]


def totals(operations):
    """FLOPs, bytes and calls by name; products of all shapes are added up."""
    sums = collections.defaultdict(collections.Counter)
    for o in operations:
        sums[o["name"].split()[0]].update({key: o[key] for key in ("flops", "bytes", "calls")})
    return sums


def base_name(kernel):
    """The part of a mangled name after its length: layernorm_forward_kernelI13..."""
    return re.sub(r"^_Z\d+", "", kernel)


def kernels_of(operation, kernels):
    return [name for name in kernels if re.match(OPERATIONS[operation], base_name(name))]


def check_claims(kernels, operations):
    for name in kernels:
        claims = [o for o in OPERATIONS if name in kernels_of(o, kernels)]
        if len(claims) != 1 and not re.match(BESIDE, base_name(name)):
            raise SystemExit(f"gpu_predicted.py: kernel {name} is of the operations {claims}: see OPERATIONS")
    for operation in operations:
        if operation not in OPERATIONS or (operation != "matmul" and not kernels_of(operation, kernels)):
            raise SystemExit(f"gpu_predicted.py: no kernel is known of {operation}: see OPERATIONS")


# --- From SASS.

def cubins(binary, folder):
    """The SASS of the binary's PTX by architecture, from the same ptxas as in a build for that GPU. Also the
    kernels' registers, and the ratio of their SASS to their PTX instructions."""
    tools = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin",
                             *map(str, ROOT.glob(".venv/lib/*/site-packages/triton/backends/nvidia/bin"))])
    subprocess.run(["cuobjdump", "-xptx", "all", str(pathlib.Path(binary).resolve())], cwd=folder, check=True,
                   capture_output=True, env={**os.environ, "PATH": tools})
    sass, usage, ratios = {}, {}, {}
    for gpu in GPUS.values():
        [ptx] = folder.glob(f"*.{'sm_90a' if gpu.arch == 'sm_90a' else 'sm_80'}.ptx")
        cubin = folder / f"{gpu.arch}.cubin"
        if not cubin.exists():
            run(["ptxas", f"-arch={gpu.arch}", "-O3", ptx, "-o", cubin], PATH=tools)
        sass[gpu.arch] = functions(run(["cuobjdump", "-sass", cubin], PATH=tools))
        usage[gpu.arch] = {name: int(registers) for name, registers in re.findall(
            r"Function (\w+):\s+REG:(\d+)", run(["cuobjdump", "-res-usage", cubin], PATH=tools))}
        of_ptx = ptx_loops(ptx.read_text())
        ratios[gpu.arch] = {name: sass_a_ptx(code, of_ptx.get(name, [])) for name, code in sass[gpu.arch].items()}
    return sass, usage, ratios


def ptx_loops(ptx):
    """{kernel: for each jump back, how many instructions it repeats}."""
    found, name, depth = {}, None, 0
    for line in ptx.splitlines():
        depth += line.count("{") - line.count("}")
        if match := re.match(r"(?:\.visible |\.weak )?\.entry (\w+)", line):
            name, labels, count = match[1], {}, 0
            found[name] = []
        elif name and depth == 0 and line.startswith("}"):
            name = None
        elif name and (match := re.match(r"(\$\w+):", line)):
            labels[match[1]] = count
        elif name and (match := re.match(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s*(.*);", line)):
            count += 1
            if match[1].startswith("bra") and match[2] in labels:
                found[name].append(count - labels[match[2]])
    return found


def sass_a_ptx(code, of_ptx):
    """For a kernel that is one loop, too long for ptxas to unroll: the loop's SASS instructions per PTX
    instruction. Else 1."""
    of_sass = list(map(len, loops(code)))
    if len(of_sass) != 1 or len(of_ptx) != 1 or min(of_sass + of_ptx) <= 100:
        return 1
    return of_sass[0] / of_ptx[0]


def functions(sass):
    """{kernel: [(address, instruction)]}."""
    found, code = {}, []
    for line in sass.splitlines():
        if match := re.search(r"Function : (\w+)", line):
            code = found[match[1]] = []
        elif match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
            code.append((int(match[1], 16), re.sub(r"^@!?U?P\w+ ", "", match[2])))
    return found


def loops(code):
    """For each jump back, the instructions that it repeats."""
    for at, text in code:
        match = re.match(r"BRA\b.*?0x([0-9a-f]+)", text)
        if match and int(match[1], 16) < at:
            yield [t for a, t in code if int(match[1], 16) <= a <= at]


def loads_under_way(code):
    """The most bytes that a lane has requested before it needs one of them or waits for its copies to shared
    memory."""
    most = waiting = copies = 0
    registers = set()
    for _, text in code:
        word, _, operands = text.partition(" ")
        used = set(map(int, re.findall(r"\bR(\d+)", operands)))
        if word.startswith("LDGSTS"):
            copies += 16 if ".128" in word else 8 if ".64" in word else 4
            most = max(most, waiting + copies)
            continue
        if word.startswith("DEPBAR"):
            copies = 0
        load = re.match(r"LDG\.\S*", word)
        into = re.match(r"(?:P\w+, )?R(\d+)", operands) if load else None
        if used - ({int(into[1])} if into else set()) & registers:
            registers, waiting = set(), 0
        if into:
            size = 16 if ".128" in word else 8 if ".64" in word else 2 if "16" in word else 1 if "8" in word else 4
            registers |= set(range(int(into[1]), int(into[1]) + max(1, size // 4)))
            waiting += size
            most = max(most, waiting + copies)
    return most


def warps_on(gpu, registers, threads, shared):
    """The number of warps that a multiprocessor holds at a time, as whole blocks."""
    warps = math.ceil(threads / 32)
    by_registers = 65536 // (math.ceil(registers * 32 / 256) * 256) // warps
    by_shared = gpu.shared // (shared + 1024)
    return min(gpu.warps // warps, by_registers, by_shared, 32 if gpu.warps == 64 else 24) * warps


# --- The time.

def product_share(gpu, m, n, k):
    """The share of the best rate that a product of this shape reaches: whole waves of a library's tiles, each
    of which takes TILE_CYCLES besides its products. A long sum may be split into up to 16, each with tiles of
    its own."""
    tiles = math.ceil(m / gpu.tile[0]) * math.ceil(n / gpu.tile[1])
    cycles = 2 * gpu.tile[0] * gpu.tile[1] / (gpu.products / gpu.sms) * gpu.clock  # for one step of k
    idle = TILE_CYCLES / cycles  # in steps of k
    shares = (tiles * s / (math.ceil(tiles * s / gpu.sms) * gpu.sms) * (k / s) / (k / s + idle)
              for s in (1, 2, 4, 8, 16) if s == 1 or k // s >= 512)
    return max(shares)


def product_seconds(gpu, name, flops, bytes_, calls):
    """The seconds of all calls under each bound, and the number of launches."""
    m, n, k = map(int, re.search(r"(\d+) x (\d+) x (\d+)", name).groups())
    return {"tensor": flops / (gpu.products * product_share(gpu, m, n, k)), "memory": bytes_ / (gpu.bandwidth * REACHED)}, calls


def unit_of(operation, small, kernels, code):
    """The small step's counts of an operation, per FLOP if it has some, else per byte; and its launches per
    call."""
    mine = kernels_of(operation, kernels)
    measure = "flops" if small[operation]["flops"] else "bytes"
    by_measure = {key: sum(kernels[k][key] * (code[k]["sass"] if key == "instructions" else 1) for k in mine) /
                  small[operation][measure] for key in ("instructions", "tensor_flops", "distinct_sectors")}
    under_way = min((code[k]["little"] for k in mine if kernels[k]["global_bytes"] * 4 > kernels[mine[0]]["global_bytes"]),
                    default=1)
    return {**by_measure, "launches": sum(kernels[k]["launches"] for k in mine) / small[operation]["calls"],
            "under_way": under_way, "hopper": any("hopper" in k for k in mine)}


def operation_seconds(gpu, cost, unit):
    """The seconds under each bound, and the launches: an operation's unit, scaled to its work."""
    times = cost["flops"] or cost["bytes"]
    # Data that a kernel reads again are in a cache; data that the next kernel reads come from memory.
    moved = cost["bytes"] if cost["flops"] else max(cost["bytes"], unit["distinct_sectors"] * times * 32)
    rate = gpu.products if unit["hopper"] else min(gpu.products, gpu.flops * gpu.mma)
    return {"tensor": unit["tensor_flops"] * times / rate,
            "memory": moved / (gpu.bandwidth * min(REACHED, unit["under_way"])),
            "issue": unit["instructions"] * times / (4 * gpu.sms * gpu.clock)}, unit["launches"] * cost["calls"]


def row_name(operation):
    """The row of the tables that has this operation. Products of all shapes share two rows."""
    if not operation.startswith("matmul"):
        return operation
    return "products of the head" if re.search(r"rows of|50304|128256|151936", operation) else "products"


def step_of(gpu, operations, units):
    """[(name, seconds, bound, launches, roofline)] by operation, the longest first."""
    rows = collections.defaultdict(lambda: [0, "", 0, 0])
    for cost in sorted(operations, key=lambda o: not o["name"].startswith("matmul")):
        name = row_name(cost["name"])
        if name != cost["name"]:
            bounds, launches = product_seconds(gpu, cost["name"], cost["flops"], cost["bytes"], cost["calls"])
        else:
            bounds, launches = operation_seconds(gpu, cost, units[name])
        bound = max(bounds, key=bounds.get)
        row = rows[name]
        row[0] += bounds[bound] + launches * LAUNCH
        row[1], row[2] = bound, row[2] + launches
        row[3] += max(cost["flops"] / (gpu.products if "products" in name else gpu.flops), cost["bytes"] / gpu.bandwidth)
    return sorted(((name, *row) for name, row in rows.items()), key=lambda row: -row[1])


def facts(gpu, kernels, sass, usage, ratios):
    """Figures of each kernel's code on a GPU: registers, warps per multiprocessor, and bytes in flight
    compared with those needed. If TMA loads, the bytes in flight are the rings of tiles in a block's shared
    memory."""
    # Little's law, with twice the latency of an idle GPU.
    needed = gpu.bandwidth / gpu.sms * 2 * gpu.latency / gpu.clock
    said = {}
    for name, k in kernels.items():
        warps = warps_on(gpu, usage[gpu.arch][name], k["threads"], k["shared_bytes"])
        code = sass[gpu.arch][name]
        bytes_ = 32 * warps * loads_under_way(code)
        if any(text.startswith("UTMALDG") for _, text in code):
            bytes_ = warps // math.ceil(k["threads"] / 32) * k["shared_bytes"]
        said[name] = {"registers": usage[gpu.arch][name], "warps": warps, "instructions": len(code), "under_way": bytes_,
                      "loop": max(map(len, loops(code)), default=0), "little": bytes_ / needed, "sass": ratios[gpu.arch][name]}
    return said


# --- What is written.

def rounded(x):
    """Rounds to five digits, so that files differ only if values really do."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    return float(f"{x:.5g}") if isinstance(x, float) else x


def readable(names):
    said = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"^void |\(.*|__nv_", "", line) for line in said.splitlines()]


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|",
            *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def tokens(setup):
    """The tokens of a step."""
    return setup.micro_batches * setup.batch * setup.seq_len


def headline(setup):
    times = f"{setup.micro_batches} x " if setup.micro_batches > 1 else ""
    return f"{setup.title}, {times}{setup.batch} x {setup.seq_len}"


def step_tables(setup, steps):
    names = list(dict.fromkeys(row[0] for step in steps.values() for row in step))
    rows = []
    for name in names:
        cells = [next(row for row in step if row[0] == name) for step in steps.values()]
        if max(c[1] / sum(row[1] for row in step) for c, step in zip(cells, steps.values())) < 0.005:
            continue
        rows.append([name, round(cells[0][3]), *(f"{1e3 * c[1]:.2f} ({c[2]}, {100 * c[4] / c[1]:.0f}%)" for c in cells)])
    return [f"### {headline(setup)}", "",
            *table(["operation", "launches", *(f"{gpu}, ms" for gpu in steps)], rows)]


def step_gates(totals_, optimism):
    """The project's gates for whole steps, and whether each is met. `optimism`: the counted time of llm.c's
    own step divided by its real time."""
    lines = []

    def verdict(counted, with_error):
        return "met" if with_error else "met as counted, not with that error" if counted else "not met"

    ms = 1e3 * totals_["GPT-2 124M", "H100"]
    lines.append(f"- GPT-2 124M, 64 x 1024, in at most 115 ms on an H100: {ms:.0f} ms as counted, {ms / optimism:.0f} with the "
                 f"count's error on llm.c's step: {verdict(ms <= 115, ms / optimism <= 115)}.")
    for (title, gpu), (published, _) in PUBLISHED.items():
        if not title.startswith("GPT-2"):
            continue
        setup = next(s for s in SETUPS if s.title == title)
        ratio = tokens(setup) / totals_[title, gpu] / published
        lines.append(f"- 1.1 times llm.c's tokens/s, {title} on {gpu}: {ratio:.2f} times as counted, {ratio * optimism:.2f} with "
                     f"that error: {verdict(ratio >= 1.1, ratio * optimism >= 1.1)}.")
    return lines


def what_shapes_cost(plans, steps):
    """The steps with gates, if all products ran at one rate: that of the best shape, or that of a sum over
    768."""
    said = []
    for key in [key for key in PUBLISHED if key[0].startswith("GPT-2")]:
        gpu, step = GPUS[key[1]], steps[key]
        flops = sum(o["flops"] for o in plans[key] if o["name"].startswith("matmul"))
        products = sum(row[1] - row[3] * LAUNCH for row in step if row[0].startswith("products"))
        rest = sum(row[1] for row in step) - products
        short = gpu.products * product_share(gpu, gpu.tile[0] * gpu.sms, gpu.tile[1], 768)
        said.append(f"{key[0]} on {key[1]} {1e3 * (rest + products):.0f} by shape, {1e3 * (rest + flops / gpu.products):.0f} at "
                    f"the best rate, {1e3 * (rest + flops / short):.0f} at {short / 1e12:.0f} TFLOP/s")
    return ["A product has the rate of its shape: tiles come in whole waves, and each waits for its first operands and writes its "
            "result. On an H100 a sum over K = 768 takes a sixth of its time for that. The steps with gates, in ms, by shape, and "
            "with all products at the rate of the best shape or at that of K = 768: " + "; ".join(said) + ".", ""]


def kernel_gates(kernels):
    """The gates for single kernels."""
    moves = {name: k for name, k in kernels.items() if not k["tensor_flops"] and k["global_sectors"] > 1000}
    poor = {n: k["global_bytes"] / 32 / k["global_sectors"] for n, k in moves.items()}
    banks = {n: k["shared_passes"] / k["shared_requests"] for n, k in kernels.items() if k["shared_requests"]}

    def listed(values, bad):
        found = [(n, v) for n, v in values.items() if bad(v)]
        return "; ".join(f"{r} {v:.2f}" for r, (_, v) in zip(readable([n for n, _ in found]), found)) if found else "met by all"

    return [f"- 90% of the bytes of sectors used, by kernels that only move memory: {listed(poor, lambda v: v < 0.9)}, of each request by itself.",
            f"- At most 1.1 accesses a bank: {listed(banks, lambda v: v > 1.1)}."]


def roofline_gate(totals_, steps):
    slow = collections.defaultdict(list)
    for (title, gpu), step in steps.items():
        for name, seconds, _, launches, roofline in step:
            if roofline < 0.7 * (seconds - launches * LAUNCH) and seconds > 0.005 * totals_[title, gpu]:
                slow[name].append(f"{roofline / (seconds - launches * LAUNCH):.2f}")
    return ["- Nothing under 70% of its roofline, launches aside, where it takes half a per cent of a step: " +
            ("; ".join(f"{name} {min(v)} to {max(v)}" for name, v in slow.items()) or "met by all") + "."]


def fitted(counts):
    """The line a + b / T that is nearest to counts by length {T: value per FLOP}, as a function of T."""
    lengths = list(counts)
    x, y = [1 / n for n in lengths], [counts[n] for n in lengths]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)
    return lambda length: mean_y + slope * (1 / length - mean_x)


def hopper_kernels(trainer, plans, folder, from_sass):
    """A table: attention on an H100 with the kernels of all GPUs and with Hopper's own."""
    gpu, rows = GPUS["H100"], []
    for setup in SETUPS:
        cells = []
        for more in (("--advanced", "attention=common"), ()):
            kernels, small = small_step(trainer, gpu, setup, folder, *more)
            code = facts(gpu, kernels, *from_sass)
            units = {name: unit_of(name, small, kernels, code) for name in ("attention_forward", "attention_backward")}
            attention = [o for o in plans[setup.title, "H100"] if o["name"] in units]
            # Forward is faster, so it comes first here.
            for _, seconds, bound, launches, roofline in reversed(step_of(gpu, attention, units)):
                seconds -= launches * LAUNCH
                cells.append(f"{1e3 * seconds:.2f} ({bound}, {100 * roofline / seconds:.0f}%)")
        rows.append([setup.title, *cells])
    return ["## Hopper's own kernels", "", "Attention of a step on an H100, ms, by the kernels of all GPUs (`--advanced attention=common`) and "
            "by Hopper's own, which run there as it comes; launches aside.", "",
            *table(["step", "forward", "backward", "forward, Hopper's", "backward, Hopper's"], rows)]


def attention_by_length(trainer, folder, from_sass):
    """A table: the TFLOP/s of attention alone by length, for Llama-3.2-1B's heads; bounds as in
    operation_seconds()."""
    setup, rows = next(s for s in SETUPS if s.title == "Llama-3.2-1B"), []
    for gpu_name, gpu in GPUS.items():
        by_length = {}
        for length in COUNTED:
            kernels, small = small_step(trainer, gpu, setup._replace(seq_len=length), folder)
            by_length[length] = kernels, small, facts(gpu, kernels, *from_sass)
        for name in ("attention_forward", "attention_backward"):
            units = {length: unit_of(name, small, kernels, code) for length, (kernels, small, code) in by_length.items()}
            line = {key: fitted({n: unit[key] for n, unit in units.items()}) for key in ("tensor_flops", "instructions")}
            rates = []
            for length in LENGTHS:
                unit = {**units[COUNTED[-1]], **{key: of(length) for key, of in line.items()}}
                bounds, _ = operation_seconds(gpu, {"flops": 1, "bytes": 0, "calls": 0}, unit)
                rates.append(1 / max(bounds.values()) / 1e12)
            rows.append([name, gpu_name, *(f"{rate:.0f}" for rate in rates), f"{rates[-1] / rates[0]:.3f}"])
    return ["## Attention by length", "", f"TFLOP/s, as counted: instructions and tensor FLOPs a FLOP of causal attention of T tokens "
            f"are a + b / T, fitted to played steps of {', '.join(map(str, COUNTED))} tokens. Last the rate of the longest beside "
            "that of the shortest.", "",
            *table(["operation", "GPU", *(f"{n:,}" for n in LENGTHS), "ratio"], rows)]


def llmc_seconds(operations, step):
    """The time of llm.c's step on an A100 by the same method: the same products and elementwise operations,
    and FlashAttention 2's products."""
    gpu = GPUS["A100"]
    attention = sum(o["flops"] * (5 / 7 if "backward" in o["name"] else 1) for o in operations
                    if o["name"].startswith("attention"))  # theirs has 5 products in backward
    return sum(row[1] for row in step if not row[0].startswith("attention")) + attention / gpu.products


def product_checks():
    """Rates of products by shape, compared with published ones."""
    gpu, lines = GPUS["H100"], []
    for shape, (published, source) in PRODUCTS.items():
        counted = gpu.products * product_share(gpu, *shape) / 1e12
        lines.append(f"- cuBLAS on an H100, {' x '.join(map(str, shape))}: {counted:.0f} TFLOP/s by the method, {published:.0f} "
                     f"published ({source}): {abs(100 * (counted / published - 1)):.0f}% too {'fast' if counted > published else 'slow'}.")
    return lines


def checks(theirs):
    """Compares the method's results with published ones."""
    gpu = GPUS["A100"]
    return [*product_checks(),
            f"- llm.c's step of GPT-2 124M on an A100, 64 x 1024: the operations above with FlashAttention 2's products "
            f"at cuBLASLt's rate are {1e3 * theirs:.0f} ms; published: about 300, on 8 GPUs that exchange gradients too. "
            f"The count is {abs(100 * (1 - theirs / LLMC_A100)):.0f}% too {'fast' if theirs < LLMC_A100 else 'slow'}.",
            f"- FlashAttention 2's forward pass on an A100 (heads of 128): tensor FLOPs by the method "
            f"{gpu.products / 1e12:.0f} TFLOP/s, published at most 230 (arXiv 2307.08691): "
            f"{100 * (gpu.products / 230e12 - 1):.0f}% too fast.",
            f"- FlashAttention 3's on an H100: {GPUS['H100'].products / 1e12:.0f} by the method, published at most 740 "
            f"(arXiv 2407.08608): {100 * (GPUS['H100'].products / 740e12 - 1):.0f}% too fast.", ""]


def left_apart(plans, steps):
    """The time that one kernel would save that adds a block's output and computes the next block's norm."""
    lines = []
    for setup in SETUPS:
        for gpu_name, gpu in GPUS.items():
            add = totals(plans[setup.title, gpu_name])["residual_forward"]
            # One of three transfers.
            saved = add["bytes"] / 3 / (gpu.bandwidth * REACHED) + add["calls"] * LAUNCH
            share = saved / sum(row[1] for row in steps[setup.title, gpu_name])
            lines.append(f"{setup.title} on {gpu_name} {1e3 * saved:.2f} ms, {100 * share:.1f}%")
    return ["A block's last addition and the first norm of the next are two kernels: in one, the sum would not be read again, "
            "and a launch a block less. That is " + "; ".join(lines) + ". It is left: the norm is of the next block, which "
            "may make it again in backward, and what happens in a block's range would not be the same for all blocks.", ""]


def kernel_table(gpu_name, kernels, code):
    order = sorted(kernels, key=lambda n: -kernels[n]["instructions"])
    rows = []
    for name, text in zip(order, readable(order)):
        k, c = kernels[name], code[name]
        rows.append([f"`{text}`", c["instructions"], c["loop"], c["registers"], k["shared_bytes"], c["warps"],
                     c["under_way"], f"{min(9.99, c['little']):.2f}",
                     f"{k['global_bytes'] / 32 / max(1, k['global_sectors']):.2f}",
                     f"{k['shared_passes'] / k['shared_requests']:.2f}" if k["shared_requests"] else ""])
    return [f"### {gpu_name}", "", *table(["kernel", "SASS", "largest loop", "registers", "shared bytes", "warps", "bytes under way",
                                           "of Little's", "sector use", "passes a bank"], rows)]


HEAD = ["# Predicted times of steps on GPUs", "",
        "**Nothing here was measured**; [gpu-h200.md](gpu-h200.md) compares these times with an H200's. `make gpu-predicted` makes "
        "this page from the program, whose kernels it runs on an emulated GPU (`dev/gpu_predicted.py`).", "",
        " ".join(__doc__.split("\n\n")[1].split()) + " The counts are of PTX, as executed on models of one narrow layer, in "
        "proportion to bytes or FLOPs; where a kernel is one long loop, times the instructions that this has in SASS beside "
        "those in PTX.", ""]
TOO_FAST = ["What overlaps badly, waits for latency or runs at lower clocks is not in the count: the steps above are "
            "to be read as the least that these kernels take.", ""]


class Counted:
    """The counts from the emulated GPU: by operation, for the steps, and by kernel, for the tables of
    kernels."""

    def __init__(self, trainer, folder):
        self.trainer, self.folder = trainer, folder
        self.from_sass = cubins(trainer, folder)
        self.units, self.every, self.codes = collections.defaultdict(dict), {}, collections.defaultdict(dict)

    def units_of(self, setup, gpu_name, operations):
        kernels, small = small_step(self.trainer, GPUS[gpu_name], setup, self.folder)
        check_claims(kernels, totals(operations))
        code = facts(GPUS[gpu_name], kernels, *self.from_sass)
        self.every.update(kernels)
        self.codes[gpu_name].update(code)
        self.units[setup.title][gpu_name] = {name: unit_of(name, small, kernels, code) for name in small
                                             if name in OPERATIONS and name != "matmul"}
        return self.units[setup.title][gpu_name]

    def kernel_gates(self):
        return kernel_gates(self.every)

    def attention(self, plans):
        return [*hopper_kernels(self.trainer, plans, self.folder, self.from_sass),
                *attention_by_length(self.trainer, self.folder, self.from_sass)]

    def kernel_tables(self):
        lines = ["## Kernels", ""]
        for gpu_name in ("A100", "H100"):
            code = self.codes[gpu_name]
            lines += kernel_table(gpu_name, {n: k for n, k in self.every.items() if n in code}, code)
        return lines


class Kept:
    """The same as Counted, from the files of an earlier run. The parts of the Markdown that are about kernels
    alone are kept."""

    def __init__(self, units, text):
        self.units, self.lines = units, text.splitlines()

    def units_of(self, setup, gpu_name, operations):
        known = self.units[setup.title][gpu_name]
        missing = [name for name in totals(operations) if name != "matmul" and name not in known]
        if missing:
            raise SystemExit(f"gpu_predicted.py: --keep-counts: nothing was counted of {missing[0]} on {gpu_name}: run it without")
        return known

    def section(self, title):
        begin = self.lines.index(f"## {title}")
        end = next((i for i in range(begin + 1, len(self.lines)) if self.lines[i].startswith("## ")), len(self.lines))
        return self.lines[begin:end]

    def kernel_gates(self):
        return [line for line in self.lines if line.startswith(("- 90% of the bytes", "- At most 1.1 accesses"))]

    def attention(self, _):
        return self.section("Hopper's own kernels") + self.section("Attention by length")

    def kernel_tables(self):
        return self.section("Kernels")


def step_row(setup, gpu_name, p, seconds):
    """The row of a step in the first table."""
    speed, room = tokens(setup) / seconds, p["totals"]["total"] / GPUS[gpu_name].memory
    published, source = PUBLISHED.get((setup.title, gpu_name), (0, ""))
    return [headline(setup), gpu_name, p["head_rows"], f"{1e3 * seconds:.0f}" + (" (does not fit)" if room > 1 else ""),
            f"{speed:.0f}", f"{published:.0f}" if published else "", f"{speed / published:.2f}" if published else "", source]


def predicted(trainer, folder, counts):
    """The lines of the file."""
    steps, totals_, plans, rows = {}, {}, {}, []
    for setup in SETUPS:
        for gpu_name, gpu in GPUS.items():
            p = plan(trainer, gpu_name, setup.model, setup.batch, setup.seq_len, folder, "--grad-accum", setup.micro_batches)
            key = setup.title, gpu_name
            plans[key] = of_step(p["operations"], setup.micro_batches)
            steps[key] = step_of(gpu, plans[key], counts.units_of(setup, gpu_name, plans[key]))
            totals_[key] = sum(row[1] for row in steps[key])
            rows.append(step_row(setup, gpu_name, p, totals_[key]))
    theirs = llmc_seconds(plans["GPT-2 124M", "A100"], steps["GPT-2 124M", "A100"])
    lines = [*HEAD, f"Made at {commit()}.", "", "## Steps", "", *table(["step", "GPU", "head rows", "ms", "tokens/s", "published", "ratio", "source"], rows),
             *what_shapes_cost(plans, steps),
             "## Gates", "", *step_gates(totals_, min(1, theirs / LLMC_A100)), *counts.kernel_gates(),
             *roofline_gate(totals_, steps), "",
             "## The method on what was published", "", *checks(theirs), *TOO_FAST,
             "## Left apart", "", *left_apart(plans, steps), *counts.attention(plans),
             "## Operations", "", "In brackets: what bounds it, and the share of its roofline.", ""]
    for setup in SETUPS:
        lines += step_tables(setup, {gpu: steps[setup.title, gpu] for gpu in GPUS})
    return lines + counts.kernel_tables()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--trainer", default=ROOT / "build/emulated/train-bf16", help="make emulated-build makes it")
    parser.add_argument("--out", default=ROOT / "dev/results/gpu-predicted.md")
    parser.add_argument("--units", default=ROOT / "dev/results/gpu-predicted.json",
                        help="what was counted by operation: dev/gpu_compare.py reads it")
    parser.add_argument("--keep", help="a folder for what was counted, which is not counted again")
    parser.add_argument("--keep-counts", action="store_true",
                        help="run no kernels: take what was counted from the files of an earlier run, and plan and add up anew")
    options = parser.parse_args(arguments)
    trainer, out, units = (pathlib.Path(path) for path in (options.trainer, options.out, options.units))
    with tempfile.TemporaryDirectory() as path:
        folder = pathlib.Path(options.keep or path)
        folder.mkdir(exist_ok=True)
        if options.keep_counts:
            counts = Kept(json.loads(units.read_text()), out.read_text())
        else:
            counts = Counted(trainer.resolve(), folder)
        lines = predicted(trainer.resolve(), folder, counts)
    out.write_text("\n".join(lines).rstrip() + "\n")
    if not options.keep_counts:
        units.write_text(json.dumps(rounded(counts.units), indent=1, sort_keys=True) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
