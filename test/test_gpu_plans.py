"""Plans for a GPU by its name (--plan --gpu), in any build: they are those of the CUDA build to the byte, the answer comes
first, and well-known models need no files."""

import json
import re
import resource
import shutil
import subprocess

import pytest
from trainer_runs import ENVIRONMENT, ROOT, binaries, plan_of

CUDA = ROOT / "build/cuda-bf16/train"
LLAMA_8B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072, "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192}}
# The parameters that the makers publish, by summing the tensors of their files.
PARAMETERS = {
    "smollm3-3b": 3075098624, "gemma-2b": 2506172416, "gemma-7b": 8537680896, "gemma-3-270m": 268098176, "gemma-3-1b": 999885952,
    "gemma-3-4b": 3880263168, "gemma-3-12b": 11766034176, "gemma-3-27b": 27009346304, "phi-3-mini": 3821079552,
    "phi-3-medium": 13960238080, "phi-3.5-mini": 3821079552, "phi-4": 14659507200, "phi-4-mini": 3836021760,
    "ministral-3-3b": 3429006336, "ministral-3-8b": 8489553920, "ministral-3-14b": 13506073600,
    "gemma-2-2b": 2614341888, "gemma-2-9b": 9241705984, "gemma-2-27b": 27227128320, "olmo-2-7b": 7298617344,
    "olmo-2-13b": 13716198400, "olmo-3-7b": 7298011136, "olmo-3-32b": 32233522176,
    "granite-3.3-2b": 2533539840, "granite-3.3-8b": 8170864640,
    "llama-2-7b": 6738415616, "llama-2-13b": 13015864320, "llama-2-70b": 68976648192, "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496, "llama-3.1-8b": 8030261248, "llama-3.1-70b": 70553706496, "llama-3.1-405b": 405853388800,
    "llama-3.2-1b": 1235814400, "llama-3.2-3b": 3212749824, "llama-3.3-70b": 70553706496, "tinyllama-1.1b": 1100048384,
    "smollm2-135m": 134515008, "smollm2-360m": 361821120, "smollm2-1.7b": 1711376384, "mistral-7b": 7248023552,
    "mistral-7b-v0.1": 7241732096, "mistral-7b-v0.2": 7241732096, "mistral-7b-v0.3": 7248023552, "mistral-nemo-12b": 12247782400,
    "mistral-small-24b": 23572403200, "qwen2-0.5b": 494032768, "qwen2-1.5b": 1543714304,
    "qwen2-7b": 7615616512, "qwen2-72b": 72706203648, "qwen2.5-0.5b": 494032768, "qwen2.5-1.5b": 1543714304, "qwen2.5-3b": 3085938688,
    "qwen2.5-7b": 7615616512, "qwen2.5-14b": 14770033664, "qwen2.5-32b": 32763876352, "qwen2.5-72b": 72706203648,
    "deepseek-r1-distill-qwen-1.5b": 1777088000, "deepseek-r1-distill-qwen-7b": 7615616512, "deepseek-r1-distill-qwen-14b": 14770033664,
    "deepseek-r1-distill-qwen-32b": 32763876352, "ministral-8b": 8019808256, "qwen3-0.6b": 596049920, "qwen3-1.7b": 1720574976, "qwen3-4b": 4022468096, "qwen3-4b-2507": 4022468096,
    "qwen3-8b": 8190735360,
    "qwen3-14b": 14768307200, "qwen3-32b": 32762123264, "distilgpt2": 81912576, "gpt2": 124439808, "gpt2-medium": 354823168,
    "gpt2-large": 774030080, "gpt2-xl": 1557611200, "bloom-560m": 559214592, "bloom-1b1": 1065314304, "bloom-1b7": 1722408960,
    "bloom-3b": 3002557440, "bloom-7b1": 7069016064, "bloom-176b": 176247271424}


def run(binary, *options, **keys):
    return subprocess.run([binary, "--plan", *map(str, options)], capture_output=True, text=True, timeout=300, env=ENVIRONMENT, **keys)


def answer(binary, *options):
    """The lines before the empty one with which the plan's report begins."""
    ran = run(binary, *options)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split("\n\n")[0].split("\n")


@pytest.fixture(scope="module")
def program():
    """One trainer: the planner beside it is the same in both precisions. A CUDA build plans itself, and the plans are in bf16."""
    found = [binary for binary in binaries() if binary.device == "cpu" or binary.precision == "bf16"]
    return found[0].path if found else pytest.skip("no build for a CPU, and none in bf16")


# ---- the CUDA build's plan

CASES = [
    ("RTX 4090", "--model llama-3.1-8b --train lora --batch 1 --seq-len 4096"),
    ("RTX 3060", "--model llama-3.1-8b --train lora --base nf4-double --batch 2 --seq-len 1024"),
    ("H100", "--model llama-3.1-8b --batch 4 --seq-len 4096"),
    ("4060 Ti 16GB", "--model qwen3-8b --train lora --batch 1 --seq-len 2048"),
    ("A100 40GB", "--model bloom-7b1 --batch 2 --seq-len 1000 --state-formats auto"),
    ("L40S", "--model mistral-7b-v0.1 --train lora --lora-rank 64 --base nf4 --batch 1 --seq-len 9000"),
    ("RTX 5090", "--model d48 --batch 32 --seq-len 1024 --recompute block"),
    ("RTX 3090", "--model d12 --batch auto --seq-len 1024"),
    ("RTX 3080", "--model qwen2.5-1.5b --train lora --batch 1 --seq-len auto"),
    ("B200", "--model llama-3.1-70b --devices 8 --batch 1 --seq-len 4096"),
    ("RTX 4080", "--model llama-3.1-8b --batch 1 --seq-len 2048 --memory 14GiB,host=40GiB"),
    ("A6000", "--model gpt2-xl --steps 0 --batch 4"),
    ("RTX 4090", "--model smollm2-135m --train prompt --soft-prompt 30 --batch 7 --seq-len 333 --dropout 0"),
    ("RTX 3060", "--model llama-3.1-8b --train lora --batch 1 --seq-len 512 --memory 10GiB"),
]
REFUSED = [
    ("RTX 3050", "--model llama-3.1-70b --batch 1 --seq-len 128", "does not fit the GPU RTX 3050"),
    ("GB10", "--model llama-3.1-70b --batch 1", "does not fit the GPU GB10"),
    ("RTX 3060", "--model llama-3.1-70b --batch 2 --devices 4 --seq-len 131072", "does not fit 4 GPUs RTX 3060"),
    ("RTX 4090", "--model llama-3.1-8b --batch 1 --memory 8GiB", "the least that this takes on the RTX 4090 is 12"),
    ("RTX 4080", "--model llama-3.1-8b --batch 1 --memory 1GiB,host=100MiB", "needed with a larger host= in --memory."),
    ("RTX 4080", "--model llama-3.1-8b --batch 1 --memory 14GiB,host=2GiB --offload state=host", "--memory host=2GiB: what the RTX 4080"),
    ("RTX 3060", "--model llama-3.1-8b --train lora --batch auto", "--batch auto: a batch of 1 takes"),
]


@pytest.mark.skipif(not CUDA.exists(), reason="no CUDA build")
@pytest.mark.parametrize("gpu, options", CASES, ids=lambda value: value.split(" --")[0])
def test_it_is_that_of_the_cuda_build(program, gpu, options):
    """Byte for byte: all of the JSON, with every buffer's address, times and the choice."""
    ours, theirs = (run(binary, "json", "--gpu", gpu, *options.split()) for binary in (program, CUDA))
    assert ours.returncode == 0 and (ours.stdout, ours.stderr) == (theirs.stdout, theirs.stderr), ours.stderr + theirs.stderr
    plan = json.loads(ours.stdout)
    assert plan["device"] == "cuda" and plan["precision"] == "bf16" and plan["buffers"]


@pytest.mark.parametrize("gpu, options, says", REFUSED, ids=lambda value: value.split(" --")[0])
def test_refusals(program, gpu, options, says):
    """In one line, about the GPU and not about this machine; the CUDA build's is the same."""
    ran = run(program, "--gpu", gpu, *options.split())
    assert ran.returncode == 2 and not ran.stdout and says in ran.stderr and "TMPDIR" not in ran.stderr, ran.stderr
    assert [line for line in ran.stderr.splitlines() if line.startswith("train: ")] == ran.stderr.splitlines()[-1:]
    if CUDA.exists():
        assert run(CUDA, "--gpu", gpu, *options.split()).stderr == ran.stderr


@pytest.mark.skipif(not (ROOT / "build/emulated/train-bf16").exists(), reason="no emulated GPU")
def test_it_is_that_of_the_gpu_itself(program):
    """A CUDA build on the GPU that is named plans the same: its context, its rates."""
    options = ["json", "--model", "d12", "--batch", "4", "--seq-len", "512"]
    there = subprocess.run([ROOT / "build/emulated/train-bf16", "--plan", *options], capture_output=True, text=True, timeout=300,
                           env={**ENVIRONMENT, "GPU": "H100"})
    assert there.returncode == 0, there.stderr
    here, there = plan_of(run(program, *options, "--gpu", "H100", "--recompute", "gelu").stdout), plan_of(there.stdout)
    del here["planned_gpu"]
    assert here == there


# ---- names

@pytest.mark.parametrize("name, is_called, gib", [
    ("RTX 4090", "RTX 4090", 23.5), ("4090", "RTX 4090", 23.5), ("NVIDIA GeForce RTX 4090", "RTX 4090", 23.5),
    ("rtx4090", "RTX 4090", 23.5), ("RTX-4090 24GB", "RTX 4090", 23.5), ("4060ti", "RTX 4060 Ti", 7.6),
    ("RTX 4060 Ti 16 GB", "RTX 4060 Ti 16GB", 15.5), ("3060", "RTX 3060", 11.6), ("RTX 3080 12GB", "RTX 3080 12GB", 11.6),
    ("h100", "H100", 79.1), ("H100 SXM5 80GB", "H100", 79.1), ("h100 pcie", "H100 PCIe", 79.1), ("NVIDIA H100 80GB HBM3", "H100", 79.1),
    ("A100", "A100", 79.1), ("a100 80gb", "A100-SXM4-80GB", 79.1), ("A100 40GB", "A100-SXM4-40GB", 39.3), ("A100-SXM4-40GB", "A100-SXM4-40GB", 39.3),
    ("l4", "L4", 22), ("L40", "L40", 44.3), ("l40s", "L40S", 44.3), ("A10G", "A10G", 22), ("a10", "A10", 22), ("a6000", "RTX A6000", 47.4),
    ("RTX 6000 Ada", "RTX 6000 Ada Generation", 47.3), ("RTX PRO 6000", "RTX PRO 6000 Blackwell Workstation Edition", 94.9),
    ("A100 PCIe 80GB", "A100 80GB PCIe", 79.1), ("GH200 144GB", "GH200 144G HBM3e", 139.5), ("4090 24G", "RTX 4090", 23.5),
    ("GH200", "GH200 480GB", 94.5), ("5090", "RTX 5090", 31.3), ("4070 ti super", "RTX 4070 Ti SUPER", 15.5),
    ("RTX 4090 Laptop", "RTX 4090 Laptop", 15.5), ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop", 7.6),
    ("4060", "RTX 4060", 7.6), ("3080 laptop 8gb", "RTX 3080 Laptop 8GB", 7.6), ("AGX Orin", "Jetson AGX Orin 64GB", 61),
    ("Jetson Orin Nano", "Jetson Orin Nano 8GB", 7.4), ("DGX Spark", "GB10", 119), ("NVIDIA DGX Spark", "GB10", 119)])
def test_gpus_by_the_names_that_people_use(program, name, is_called, gib):
    plan = json.loads(run(program, "json", "--gpu", name, "--model", "d2", "--batch", "1").stdout)
    assert plan["planned_gpu"]["name"] == is_called
    assert plan["planned_gpu"]["bytes"] == pytest.approx(gib * 2**30, rel=2e-3)


@pytest.mark.parametrize("name, is_called, count", [
    ("2x RTX 3090", "RTX 3090", 2), ("4x H100", "H100", 4), ("8xH100", "H100", 8), ("RTX 3090 x2", "RTX 3090", 2), ("dual 3090", "RTX 3090", 2),
    ("2 x 4090", "RTX 4090", 2), ("2x4090", "RTX 4090", 2), ("2\u00d7 RTX 4090", "RTX 4090", 2), ("4090 X 2", "RTX 4090", 2), ("H100x8", "H100", 8),
    ("2 RTX 3060", "RTX 3060", 2), ("8 x NVIDIA H100 80GB HBM3", "H100", 8), ("4x 4060 Ti 16GB", "RTX 4060 Ti 16GB", 4), ("1x L4", "L4", 1),
    ("DGX H100", "H100", 8), ("Two RTX 5090", "RTX 5090", 2), ("8 GB RTX 3050", "RTX 3050", 1), ("16x A100-SXM4-40GB", "A100-SXM4-40GB", 16)])
def test_several_gpus_by_their_name(program, name, is_called, count):
    """They are --devices."""
    options = ["json", "--model", "d2", "--batch", "1"]
    plan = plan_of(run(program, *options, "--gpu", name).stdout)
    assert plan["planned_gpu"]["name"] == is_called
    assert plan == plan_of(run(program, *options, "--gpu", is_called, "--devices", count).stdout)


def test_several_gpus_and_the_same_devices(program):
    assert answer(program, "--gpu", "2x RTX 3090", "--devices", "2", "--model", "d2", "--batch", "1")[0].startswith("fits each of 2 GPUs RTX 3090")


@pytest.mark.parametrize("name, says", [("RTX A5000 Laptop", ["RTX A5000"]), ("GTX 1080", ["RTX 3060", "H100"]),
                                        ("", ["names no GPU"]), ("16GB", ["RTX 3060"]), ("rtx", ["RTX 3060"]),
                                        ("Quadro RTX 6000", ["RTX 6000 Ada"]), ("2080 Ti", ["compute capability 8.0"]),
                                        ("RTX 3060 500GB", ["the RTX 3060 that is known has 11.6 GiB"]),
                                        *((other, ["this trains on GPUs of NVIDIA, and on CPUs"])
                                          for other in ("M2 Max", "Apple M4", "RX 7900 XTX", "MI300X", "Radeon Pro", "Arc A770"))])
def test_a_gpu_that_is_not_known(program, name, says):
    ran = run(program, "--gpu", name, "--model", "d2")
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and all(part in ran.stderr for part in says), ran.stderr
    assert "4060 Ti" not in ran.stderr


@pytest.mark.parametrize("name", PARAMETERS)
def test_well_known_models(program, name):
    plan = json.loads(run(program, "json", "--model", name, "--gpu", "H100", "--steps", "0", "--batch", "1", "--seq-len", "16").stdout)
    assert plan["parameters"] == PARAMETERS[name]


def test_all_well_known_models_are_tested_and_in_the_guide():
    text = (ROOT / "llmc/model_names.cpp").read_text()
    names = re.findall(r'^    (?:\{|\w+\()"([\w.-]+)"', text, re.M)
    guide = (ROOT / "dev/guide/memory.md").read_text()
    listed = re.findall(r"[\w.-]+", " ".join(re.findall(r"^(?:- |  )((?:[a-z0-9.-]+(?:, ?| |$))+)$", guide, re.M)))
    assert sorted(names) == sorted(PARAMETERS) == sorted(listed)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct", "unsloth/llama-3.1-8b"])
def test_a_name_from_the_hub(program, name):
    """Without the model in the cache; a plan is that of its config.json."""
    plans = [plan_of(run(program, "json", "--model", of, "--gpu", "L40S", "--train", "lora", "--batch", "1", "--seq-len", "4096").stdout)
             for of in (name, "llama-3.1-8b")]
    assert plans[0].pop("model") == name and plans[1].pop("model") == "llama-3.1-8b" and plans[0] == plans[1]


def test_a_known_shape_is_that_of_its_config(program, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    options = ["--gpu", "RTX 4090", "--train", "lora", "--base", "nf4", "--batch", "1", "--seq-len", "20000"]
    plans = [plan_of(run(program, "json", "--model", of, *options).stdout) for of in (tmp_path, "llama-3.1-8b")]
    assert plans[0].pop("model") == str(tmp_path) and plans[1].pop("model") == "llama-3.1-8b" and plans[0] == plans[1]


def test_a_plan_without_a_gpu_knows_the_models_too(program):
    """It is for this machine then, in this build's precision."""
    plan = json.loads(run(program, "json", "--model", "gpt2", "--batch", "1", "--seq-len", "64").stdout)
    assert plan["parameters"] == PARAMETERS["gpt2"] and "planned_gpu" not in plan
    assert plan["device"] == ("cuda" if "cuda" in str(program) else "cpu")


# ---- the answer

def test_it_fits(program):
    fits, speed = answer(program, "--gpu", "RTX 4090", "--model", "smollm2-135m", "--batch", "2", "--seq-len", "512", "--recompute", "gelu")
    assert re.fullmatch(r"fits the RTX 4090: full training with 2 x 512 tokens at a time takes \d\.\d\d GiB of the 22\.34 that a run may use", fits)
    assert re.fullmatch(r"about \d+ tokens/s, [\d.]+ s for a step of 1024 tokens, by the GPU's nominal rates", speed)


def test_it_fits_with_recomputing(program):
    options = ["--gpu", "RTX 3060", "--model", "llama-3.1-8b", "--train", "lora", "--base", "nf4-double", "--batch", "1", "--seq-len", "4096"]
    fits, _, costs = answer(program, *options)
    plan = json.loads(run(program, "json", *options).stdout)
    assert fits.startswith("fits the RTX 3060: LoRA with 1 x 4096 tokens")
    assert costs == f"cost of fitting: a step takes {100 * plan['choice'][0]['slower']:.1f}% longer than if the GPU could keep everything"
    assert plan["planned_gpu"]["fits"] and plan["totals"]["total"] <= plan["planned_gpu"]["usable_bytes"]
    assert plan["host"]["pinned"] < 2**20 and "offload" not in plan["choice"][0]["placements"]


def test_it_fits_with_the_hosts_memory(program):
    options = ["--gpu", "RTX 4090", "--model", "llama-3.1-8b", "--batch", "1", "--seq-len", "1024"]
    fits, _, costs = answer(program, *options)
    plan = json.loads(run(program, "json", *options).stdout)
    assert fits.startswith("fits the RTX 4090: full training")
    assert plan["host"]["pinned"] > 60 << 30 and "disk" not in plan["choice"][0]["placements"]
    assert f"{plan['host']['pinned'] / 2**30:.1f} GiB of the host's memory, pinned" in costs
    moved = plan["moved"]["from_host"] + plan["moved"]["to_host"]
    assert f"{moved / 1e9:.0f} GB over the link to the host in each step" in costs and moved > 1e11, costs


def test_it_fits_with_files(program):
    """Without host= in --memory, what leaves the GPU are frozen weights, which are read from the model's files."""
    options = ["--gpu", "RTX 3060", "--model", "llama-3.1-8b", "--train", "lora", "--memory", "10GiB"]
    fits, _, costs = answer(program, *options)
    plan = json.loads(run(program, "json", *options).stdout)
    assert fits.startswith("fits the RTX 3060: LoRA") and plan["choice"][0]["placements"].split()[:2] == ["--offload", "weights=disk"]
    assert f"{plan['moved']['disk_read'] / 1e9:.0f} GB read from the disk in each step" in costs and plan["moved"]["disk_read"] > 1e10


def test_the_host_has_the_memory_of_all_its_gpus(program):
    options = ["--gpu", "RTX 3060", "--model", "llama-3.2-3b", "--batch", "1", "--seq-len", "2048", "--devices", "4"]
    for machines in (1, 2):
        costs = answer(program, *options, "--machines", machines)[2]
        plan = json.loads(run(program, "json", *options, "--machines", machines).stdout)
        assert f"{4 // machines * plan['host']['pinned'] / 2**30:.1f} GiB of each host's memory, pinned" in costs, costs
        assert plan["host"]["pinned"] > 1 << 30 and "over each GPU's link" in costs


def test_it_does_not_fit_as_asked(program):
    """With --recompute nothing is chosen: the plan is shown, and the first line says what would fit."""
    ran = run(program, "--gpu", "RTX 4090", "--model", "llama-3.1-8b", "--batch", "1", "--recompute", "gelu")
    assert ran.returncode == 0 and ran.stdout.startswith("does not fit the RTX 4090: full training")
    first = ran.stdout.split("\n")[0]
    assert "GPUs that have room: " in first and first.endswith("without --recompute, the plan chooses what to recompute and to offload")
    assert not json.loads(run(program, "json", "--gpu", "RTX 4090", "--model", "llama-3.1-8b", "--batch", "1", "--recompute",
                              "gelu").stdout)["planned_gpu"]["fits"]


def test_nothing_fits(program):
    """One line about the GPU, not about this machine."""
    ran = run(program, "--gpu", "RTX 3050", "--model", "llama-3.1-70b", "--batch", "1", "--seq-len", "512")
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and not ran.stdout
    assert "does not fit the GPU RTX 3050: of its 7.6 GiB a run may use 7.2, and this one needs at least " in ran.stderr
    assert re.search(r"GPUs that have room with \d+\.\d GiB of the host's memory: A2 ", ran.stderr) and "--train lora" in ran.stderr
    assert "TMPDIR" not in ran.stderr and "/tmp" not in ran.stderr
    least = float(re.search(r"at least ([\d.]+) \(", ran.stderr).group(1))
    rooms = [float(gib) for gib in re.findall(r"\((\d+) GiB\)", ran.stderr)]
    assert rooms and all(gib > least for gib in rooms)


# Each is (GPU, options, the message as a pattern): OPTIONS are those of the smallest plan.
OPTIONS = r"\(--recompute [^()]+\)"
SENTENCES = [
    ("RTX 3050", "--model llama-3.1-70b --batch 1 --seq-len 128",  # all is in host memory already, so more devices do not help
     rf"this does not fit the GPU RTX 3050: of its 7\.6 GiB a run may use 7\.2, and this one needs at least 1\d\.\d {OPTIONS}\. Less is needed "
     r"with --train lora, a shorter --seq-len or a smaller --model\. GPUs that have room with \d+\.\d GiB of the host's memory: A2 \(14 GiB\), [^.]+\."),
    ("RTX 3050", "--model bloom-176b --train lora --seq-len auto",
     rf"this does not fit the GPU RTX 3050: of its 7\.6 GiB [^.]+\.2, and this one needs at least 8\.\d {OPTIONS}\. "
     r"Less is needed with --base nf4 or a smaller --model\. GPUs that have room with \d+\.\d GiB of the host's memory: RTX 3080 \(10 GiB\), [^.]+\."),
    ("GB10", "--model llama-3.1-70b --batch 4",
     rf"this does not fit the GPU GB10: of its 119\.0 GiB a run may use 113\.1, and this one needs at least 1\d{{3}}\.\d {OPTIONS}\. "
     r"Less is needed with --train lora, a smaller --batch, a shorter --seq-len, more --devices or a smaller --model\."),
    ("RTX 3060", "--model llama-3.1-70b --batch 1 --devices 4 --seq-len 131072",
     rf"this does not fit 4 GPUs RTX 3060: of each one's 11\.6 GiB a run may use 11\.0, and this one needs at least 14\.\d {OPTIONS}\. "
     r"Less is needed with --train lora, a shorter --seq-len or a smaller --model\. GPUs that have room with \d+\.\d GiB of the host's memory: [^.]+\."),
    ("RTX 4090", "--model llama-3.1-8b --batch 1 --memory 8GiB",
     rf"--memory 8GiB: the least that this takes on the RTX 4090 is \d{{6}}\.\d MiB {OPTIONS}\. The largest part of that, 30633\.0 MiB, is for "
     r"the optimizer's state m\. Less is needed with host=SIZE in --memory, which lets more be offloaded to the host's memory\."),
    ("RTX 3060", "--model llama-3.1-8b --train lora --base nf4 --batch 1 --memory 1GiB,host=1MiB --offload weights=device,state=device,inputs=device",
     rf"--memory 1GiB: the least that this takes on the RTX 3060 is \d{{4}}\.\d MiB {OPTIONS}\. The largest part of that, 3744\.0 MiB, is for "
     r"quantized weights\. Less is needed with a larger host= in --memory\."),
    ("RTX 3060", "--model llama-3.1-8b --batch 8 --devices 4 --memory 1GiB,host=30GiB",
     rf"--memory 1GiB: the least that this takes on each RTX 3060 is \d{{4}}\.\d MiB {OPTIONS}\. The largest part of that, 2004\.0 MiB, is for "
     r"weights\. Less is needed with a larger host= in --memory\."),
    ("RTX 3060", "--model d48 --batch 1 --memory 1GiB --offload weights=device,state=device,inputs=device",
     rf"--memory 1GiB: the least that this takes on the RTX 3060 is \d{{5}}\.\d MiB {OPTIONS}\. The largest part of that, \d{{4}}\.\d MiB, is for "
     r"the optimizer's state m\. Less is needed with a shorter --seq-len, more --devices or a smaller --model\."),
    ("RTX 3060", "--model d12 --batch 1 --seq-len 1024 --optimizer sgd --offload weights=host,state=host,inputs=host --memory 300MiB,host=9GiB --prefetch 0 "
     "--offload gradients=device --sample tokens=0",
     rf"--memory 300MiB: the least that this takes on the RTX 3060 is \d{{3}}\.\d MiB {OPTIONS}\. The largest part of that, 237\.4 MiB, is for "
     r"gradients\. Less is needed with --update-in-backward, which keeps the gradients of one block only\."),
    ("RTX 3060", "--model d2 --batch 1 --seq-len 16 --memory 100MiB,host=9GiB",
     rf"--memory 100MiB: the least that this takes on the RTX 3060 is \d{{3}}\.\d MiB {OPTIONS}\. The largest part of that, \d+\.\d MiB, is for "
     r"the process itself\. Less is needed with a shorter --seq-len[^.]* or a smaller --model\."),
    ("RTX 4080", "--model llama-3.1-8b --batch 1 --memory 14GiB,host=2GiB --offload state=host",
     r"--memory host=2GiB: what the RTX 4080 offloads takes at least \d+\.\d MiB of its host's memory"),
    ("RTX 3060", "--model llama-3.1-8b --batch 8 --devices 4 --memory 9GiB,host=3GiB --offload state=host",
     r"--memory host=3GiB: what each of 4 GPUs RTX 3060 offloads takes at least \d+\.\d MiB of its host's memory"),
    ("RTX 3060", "--model llama-3.1-8b --train lora --batch auto",
     r"--batch auto: a batch of 1 takes \d+\.\d MiB and there are 11288\.7 \(95% of what is free: the memory of the RTX 3060\)"),
]


@pytest.mark.parametrize("gpu, options, says", SENTENCES, ids=lambda value: value.split(" --offload")[0] if value.startswith("--model") else "")
def test_the_sentences_of_a_refusal(program, gpu, options, says):
    ran = run(program, "--gpu", gpu, *options.split())
    assert ran.returncode == 2 and re.fullmatch(f"train: {says}\n", ran.stderr), ran.stderr


def test_an_integrated_gpu_has_no_memory_beside_it(program):
    """What is kept in the host's memory is in the same memory there, so it has no room for that."""
    ran = run(program, "--gpu", "RTX 3050", "--model", "llama-3.1-8b", "--batch", "1", "--offload", "weights=device,state=device")
    least = float(re.search(r"at least ([\d.]+) \(--rec.*=host", ran.stderr)[1])
    assert 100 < least < 113 and re.search(r"GPUs that have room with \d+\.\d GiB of the host's memory: GH200", ran.stderr), ran.stderr


@pytest.mark.parametrize("by", ["the command line", "a file"])
def test_values_that_only_a_gpu_allows(program, tmp_path, by):
    """A build for a CPU offloads no activations to the host, and leaves it to the planner to know that."""
    (tmp_path / "run.toml").write_text('gpu = "RTX 3060"\n\n[offload]\ninputs = "host"\n')
    options = ["--gpu", "RTX 3060", "--offload", "inputs=host"] if by == "the command line" else ["--config", tmp_path / "run.toml"]
    plan = json.loads(run(program, "json", "--model", "d12", "--batch", "1", "--recompute", "block", *options).stdout)
    assert plan["planned_gpu"]["name"] == "RTX 3060" and plan["host"]["pinned"] > 1 << 20


def test_the_longest_context(program):
    options = ["--gpu", "RTX 4090", "--model", "llama-3.1-8b", "--train", "lora", "--batch", "1", "--memory", "17GiB"]
    plan = json.loads(run(program, "json", *options, "--seq-len", "auto").stdout)
    assert plan["seq_len"] % 64 == 0 and 1024 < plan["seq_len"] < 131072 and plan["totals"]["total"] <= 17 << 30
    longer = run(program, "json", *options, "--seq-len", plan["seq_len"] + 64)
    assert longer.returncode == 2 and "--memory 17GiB: the least that this takes on the RTX 4090 is" in longer.stderr


@pytest.mark.parametrize("options", ["--gpu 4090 --train lora", pytest.param("--gpu 3060 --train lora --base nf4", marks=pytest.mark.more),
                                     pytest.param("--gpu 4090 --train lora --devices 2", marks=pytest.mark.more)])
def test_the_longest_context_without_offloading_comes_first(program, options):
    """Plans of that length, and of 64 tokens more, say the same."""
    options = ["--model", "llama-3.1-8b", *options.split()]
    without, longest, fits = answer(program, *options, "--seq-len", "auto")[:3]
    tokens, step = re.search(r"^--seq-len auto: without offloading (\d+) tokens, the most that fit .*; a step takes (\S+) s by estimate$",
                             without).groups()
    assert re.fullmatch(r"  with offloading 131072 tokens, all of the model's positions; a step takes \d+ s by estimate", longest)
    assert fits.startswith("fits ") and "x 131072 tokens" in fits
    plan, more = (json.loads(run(program, "json", *options, "--batch", 1, "--seq-len", int(tokens) + n).stdout) for n in (0, 64))
    assert float(step) == pytest.approx(plan["estimated_seconds"], rel=1e-2)
    assert "--offload" not in plan["choice"][0]["placements"] and "--offload" in more["choice"][0]["placements"]
    assert json.loads(run(program, "json", *options, "--seq-len", "auto").stdout)["seq_len"] == 131072


def test_nothing_fits_without_offloading(program):
    without, longest = answer(program, "--gpu", "3060", "--model", "llama-3.1-8b", "--train", "lora", "--seq-len", "auto")[:2]
    assert without == "--seq-len auto: not even 64 tokens fit without offloading" and longest.startswith("  with offloading 131072 tokens")


def test_a_length_that_needs_no_offloading_is_said_once(program):
    first, fits = answer(program, "--gpu", "H100", "--model", "gpt2", "--seq-len", "auto")[:2]
    assert first.startswith("--seq-len auto: 1024 tokens, all of the model's positions; a step takes ") and fits.startswith("fits the H100")


def test_a_chosen_batch_and_its_time_come_first(program):
    options = ["--gpu", "4090", "--model", "llama-3.1-8b", "--train", "lora", "--batch", "auto"]
    first, fits = answer(program, *options)[:2]
    plan = json.loads(run(program, "json", *options).stdout)
    assert re.fullmatch(rf"--batch auto: {plan['batch']} sequences, .*; a step takes {plan['estimated_seconds']:.3g} s by estimate", first)
    assert fits.startswith(f"fits the RTX 4090: LoRA with {plan['batch']} x 128 tokens")


def test_what_rounds_to_nothing_is_no_cost(program):
    options = ["--gpu", "4090", "--model", "llama-3.2-1b", "--train", "lora", "--batch", "4096", "--seq-len", "128", "--recompute", "block"]
    assert 1 << 20 < json.loads(run(program, "json", *options).stdout)["host"]["pinned"] < 0.05 * 2**30
    assert not any("cost of fitting" in line for line in answer(program, *options))


def test_neighbours_that_differ_by_a_thousandth_are_not_shown(program):
    options = ["--gpu", "RTX 4090", "--model", "llama-3.1-8b", "--train", "lora", "--batch", "1", "--seq-len", "4096"]
    choice = json.loads(run(program, "json", *options).stdout)["choice"]
    worth = [c for c in choice[1:] if (c["seconds"] < 0.999 * choice[0]["seconds"] if c["seconds"] < choice[0]["seconds"] else
                                       c["bytes"] < 0.999 * choice[0]["bytes"])]
    assert len(choice) > 1 + len(worth) and run(program, *options).stdout.count("  next ") == len(worth)


@pytest.mark.parametrize("options, says", [
    ("--gpu H100", "add --plan"),
    ("--plan --gpu H100 --rates rates.json", "nominal rates"),
    ("--model llama-3.1-8b --steps 1", "only --plan needs no more"),
    ("--plan --gpu H100 --model unknown-8b", "is not a folder with config.json"),
    ("--plan --gpu H100 --model lama-3.1-8b", "; models are not downloaded: give the folder of one; --model list prints those that a plan knows"),
    ("--plan --gpu 2xH100 --devices 4 --model d2", "--gpu 2xH100 is 2 GPUs, and --devices 4: leave one of these numbers out"),
    ("--plan --gpu 0xH100 --model d2", "--devices: "),
    ("--plan --gpu H100 --model ./gpt2-large", "is not a folder with config.json"),
    ("--plan --gpu H100 --model /models/x/gpt2-large", "is not a folder with config.json"),
    ("--plan --gpu 3060 --memory 40GiB", "--memory 40GiB: the RTX 3060 of --gpu has 11.6 GiB"),
    ("--plan --gpu H100 --memory 79GB,host=x", "'x' is no number of bytes"),
])
def test_mistakes(program, tmp_path, options, says):
    ran = subprocess.run([program, *options.split()], capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=tmp_path)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and says in ran.stderr, ran.stderr


@pytest.mark.parametrize("options", ["--model llama-3.1-8b", "--model llama-3.2-1b --train lora --base nf4", "--model gpt2 --memory 2400MiB"])
def test_a_chosen_length_has_the_plan_of_that_length(program, options):
    plan = plan_of(run(program, "json", "--gpu", "RTX 4090", *options.split(), "--seq-len", "auto").stdout)
    same = run(program, "json", "--gpu", "RTX 4090", *options.split(), "--batch", 1, "--seq-len", plan["seq_len"])
    assert plan_of(same.stdout) == plan


@pytest.mark.parametrize("options, seconds", [
    ("--gpu 4090 --model llama-3.1-8b --train lora --batch 1 --seq-len 4096", 2),
    ("--gpu 4090 --model llama-3.1-8b --batch 1 --seq-len 4096", 2),
    ("--gpu H100 --model llama-3.1-8b --batch 4 --seq-len 4096", 2),
    ("--gpu 4090 --model llama-3.1-70b --batch 1 --seq-len 2048", 5),
    ("--gpu 3060 --model llama-3.1-70b --train lora --base nf4 --batch 1 --seq-len 1024", 5),
    ("--gpu 4090 --model qwen3-8b --train lora --batch 1 --seq-len auto", 5),
    ("--gpu H100 --model llama-3.1-8b --seq-len auto", 5),
    ("--gpu 3060 --model llama-3.1-8b --batch 4 --seq-len auto", 5),
    ("--gpu 3060 --model llama-3.1-70b --train lora --base nf4 --batch 1 --seq-len auto", 5),
])
def test_answers_come_soon(program, options, seconds):
    """Of processor time, and four times the seconds of a quiet machine: where another test runs on the same core's other
    thread, this one takes twice as long."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    form = "table" if "auto" in options else "json"  # a table also says how long sequences fit without offloading
    assert run(program, form, *options.split()).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4 * seconds


@pytest.mark.on_a_cpu("its plans for other GPUs need no planner")
def test_a_missing_planner_is_named(train, tmp_path):
    (tmp_path / "build").mkdir()
    alone = shutil.copy(train.path, tmp_path / "build/train")
    ran = subprocess.run([alone, "--plan", "--model", "d12", "--gpu", "H100"], env=train.environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr == (
        f"train: --gpu H100: there is no {tmp_path}/planner, which plans for GPUs: make builds it beside this program\n")
