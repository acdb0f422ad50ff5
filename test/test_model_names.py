"""What names of models say: of which shape a plan is, in how many bits, and that a family is not supported. The table has names
of public repositories, and what their config.json says."""

import concurrent.futures
import re
import subprocess

from trainer_runs import ROOT

USUALLY = "fp32"

# A known model; with " nf4" if the name says 4 bits; "!" and what is not supported; or "": the name says nothing.
MIXTURE, IMAGES, FORMAT = "!a mixture of experts", "!a model of images, sound or video", "!a quantized format other than bitsandbytes' NF4 and GGUF"
NAMES = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": "llama-3.1-8b nf4",
    "unsloth/Llama-3.2-1B-Instruct-unsloth-bnb-4bit": "llama-3.2-1b nf4",
    "unsloth/llama-3-8b-bnb-4bit": "llama-3-8b nf4",
    "unsloth/mistral-7b-v0.3-bnb-4bit": "mistral-7b-v0.3 nf4",
    "unsloth/Qwen3-14B-unsloth-bnb-4bit": "qwen3-14b nf4",
    "unsloth/Qwen3-4B-Instruct-2507-unsloth-bnb-4bit": "qwen3-4b-2507 nf4",
    "unsloth/Qwen3-4B-Thinking-2507": "qwen3-4b-2507",
    "unsloth/Qwen2.5-7B-bnb-4bit": "qwen2.5-7b nf4",
    "unsloth/Mistral-Nemo-Base-2407-bnb-4bit": "mistral-nemo-12b nf4",
    "unsloth/DeepSeek-R1-Distill-Llama-8B-unsloth-bnb-4bit": "llama-3.1-8b nf4",
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF": "llama-3.1-8b",
    "bartowski/Qwen2.5-Coder-32B-Instruct-GGUF": "qwen2.5-32b",
    "bartowski/gemma-2-9b-it-GGUF": "gemma-2-9b",
    "allenai/OLMo-2-1124-7B": "olmo-2-7b",
    "Qwen/Qwen3-8B-GGUF": "qwen3-8b",
    "someone/Qwen3-0.6B-Q4_K_M-GGUF": "qwen3-0.6b nf4",
    "NousResearch/Hermes-3-Llama-3.1-8B": "llama-3.1-8b",
    "NousResearch/Hermes-3-Llama-3.2-3B": "llama-3.2-3b",
    "NousResearch/Hermes-2-Pro-Llama-3-8B": "llama-3-8b",
    "NousResearch/Hermes-2-Pro-Mistral-7B": "mistral-7b",
    "NousResearch/Nous-Hermes-2-Mixtral-8x7B-DPO": MIXTURE,
    "NousResearch/Yarn-Llama-2-7b-128k": "",
    "NousResearch/Meta-Llama-3.1-8B": "llama-3.1-8b",
    "teknium/OpenHermes-2.5-Mistral-7B": "mistral-7b",
    "cognitivecomputations/dolphin-2.9-llama3-8b": "llama-3-8b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "deepseek-r1-distill-qwen-1.5b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "deepseek-r1-distill-qwen-7b",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "llama-3.3-70b",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "qwen3-8b",
    "deepseek-ai/DeepSeek-R1": "!deepseek-r1",
    "deepseek-ai/DeepSeek-V3.1": "!deepseek-v3",
    "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct": "!deepseek-v2",
    "deepseek-ai/deepseek-coder-6.7b-instruct": "",
    "deepseek-ai/deepseek-llm-7b-chat": "",
    "HuggingFaceTB/SmolLM2-360M-Instruct": "smollm2-360m",
    "HuggingFaceTB/SmolLM3-3B": "smollm3-3b",
    "HuggingFaceTB/SmolLM-135M": "",
    "HuggingFaceTB/SmolVLM-Instruct": IMAGES,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "tinyllama-1.1b",
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": "",
    "microsoft/phi-4": "phi-4",
    "microsoft/Phi-3.5-mini-instruct": "phi-3.5-mini",
    "ibm-granite/granite-3.3-2b-instruct": "granite-3.3-2b",
    "ibm-granite/granite-3.1-8b-base": "granite-3.3-8b",
    "ibm-granite/granite-4.0-h-micro": "!granite-4",
    "mistralai/Ministral-3-8B-Instruct-2512": "ministral-3-8b",
    "microsoft/Phi-4-mini-instruct": "phi-4-mini",
    "microsoft/Phi-4-mini-flash-reasoning": "!phi-4-mini-flash",
    "microsoft/phi-2": "!phi-2",
    "google/gemma-3n-E4B-it": "!gemma-3n",
    "google/gemma-4-12B-it": "!gemma-4",
    "unsloth/gemma-3-12b-it-bnb-4bit": "gemma-3-12b nf4",
    "ibm-granite/granite-3.0-1b-a400m-instruct": MIXTURE,
    "allenai/OLMoE-1B-7B-0924": MIXTURE,
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b-v0.1",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-small-24b",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "!mistral-small-3.2",
    "mistralai/Ministral-8B-Instruct-2410": "ministral-8b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": MIXTURE,
    "mistralai/Pixtral-12B-2409": IMAGES,
    "Qwen/Qwen2.5-Coder-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-Math-7B-Instruct": "",
    "Qwen/Qwen2.5-7B-Instruct-1M": "",
    "Qwen/Qwen2.5-VL-7B-Instruct": IMAGES,
    "Qwen/Qwen2.5-7B-Instruct-AWQ": FORMAT,
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": FORMAT,
    "Qwen/Qwen3-8B-FP8": FORMAT,
    "Qwen/Qwen1.5-MoE-A2.7B": MIXTURE,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": MIXTURE,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": MIXTURE,
    "Qwen/Qwen3.5-0.8B": "!qwen3.5",
    "Qwen/Qwen3-VL-8B-Instruct": IMAGES,
    "Qwen/Qwen3-Embedding-0.6B": "",
    "Qwen/QwQ-32B": "",
    "mlx-community/Qwen3-4B-4bit": FORMAT,
    "TeichAI/Qwen3-14B-gpt-oss-Distill": "qwen3-14b",
    "meta-llama/Llama-3.2-11B-Vision-Instruct": IMAGES,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "!llama-4",
    "nvidia/Llama-3.1-Nemotron-Nano-8B-v1": "",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": "!nvidia-nemotron",
    "google/gemma-3-270m": "gemma-3-270m",
    "google/codegemma-7b-it": "",
    "openai/gpt-oss-20b": "!gpt-oss",
    "openai-community/gpt2-large": "gpt2-large",
    "uer/gpt2-chinese-cluecorpussmall": "",
    "bigscience/bloomz-560m": "bloom-560m",
    "tiiuae/falcon-7b": "!falcon",
    "tiiuae/Falcon3-7B-Base": "",
    "EleutherAI/pythia-410m": "!pythia",
    "HuggingFaceH4/zephyr-7b-beta": "",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "",
    # without an organisation, and with a letter or a number too few or too many: no other model's shape
    "Qwen3.5-4B": "!qwen3.5", "gemma-3-270m": "gemma-3-270m", "ministral-3b": "", "ministral-7b": "", "llama3.1-8b": "llama-3.1-8b",
    "qwen2.5-4b": "", "qwen-3-8b": "", "smollm-1.7b": "", "mixtral-7b": MIXTURE, "lama-3.1-8b": "", "llama-3.1-80b": "",
}
OPTIONS = "--train", "lora", "--batch", 1, "--seq-len", 16, "--plan"


def verdict(train, name):
    """What the program makes of a name: in the form of the table."""
    ran = subprocess.run(train.command("--model", name, *OPTIONS), env=train.environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode in (0, 2)
    said = ran.stderr.splitlines()[0] if ran.stderr else f"{name} is not here: the plan is for the shape of {name}"
    if ran.returncode == 0:
        shape = re.fullmatch(rf"{re.escape(name)} is not here: the plan is for the shape of (\S+)( with --base nf4, as the name says 4 bits)?", said)
        return shape[1] + (" nf4" if shape[2] else "")
    other = re.fullmatch(rf"train: --model {re.escape(name)}: (.+) is not supported; there are gpt2, llama, .+ and --model list prints .+", said)
    if other:
        return "!" + other[1]
    assert re.search("`hf download .*` gets it" if "/" in name else "--model list prints those that a plan knows$", said), said
    return ""


def test_what_names_of_public_models_say(train, monkeypatch, tmp_path):
    monkeypatch.setitem(train.environment, "HF_HOME", str(tmp_path))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        said = dict(zip(NAMES, pool.map(lambda name: verdict(train, name), NAMES)))
    assert {name: (said[name], NAMES[name]) for name in NAMES if said[name] != NAMES[name]} == {}


def test_a_name_of_4_bits_has_the_plan_of_nf4(train):
    plans = [train.plan("--model", *model, *OPTIONS[:-1]) for model in (["unsloth/Qwen3-0.6B-bnb-4bit"], ["qwen3-0.6b", "--base", "nf4"])]
    assert plans[0].pop("model") != plans[1].pop("model") and plans[0] == plans[1]
    assert plans[0]["totals"] != train.plan("--model", "unsloth/Qwen3-0.6B-bnb-4bit", "--base", "none", *OPTIONS[:-1])["totals"]


def test_a_run_says_it_too(train, tmp_path):
    """Nothing is downloaded first that could not be read then. A mistyped path is no such name."""
    (tmp_path / "out").mkdir()
    (tmp_path / "x.txt").write_text("To be, or not to be: that is the question.\n" * 100)
    for model, says in (("google/gemma-4-12B", "gemma-4 is not supported"), ("gemma-4-12B", "gemma-4 is not supported"),
                        ("out/gemma-run", "there is no such file or folder"), ("./gemma-run", "is not a folder with config.json")):
        error = train("--model", model, "--data", "x.txt", code=2, cwd=tmp_path).stderr.decode()
        assert says in error and error.count("\n") == 1, error


def test_the_list_of_known_models(train, tmp_path):
    """It is that of the guide. A folder of this name is a model's."""
    names = [line.split()[0] for line in train("--model", "list").stdout.decode().splitlines()]
    listed = (ROOT / "dev/guide/memory.md").read_text().split("`--model list` prints them:\n\n")[1].split("\n\n")[0]
    assert len(names) == len(set(names)) > 50 and set(names) == set(re.findall(r"[a-z0-9][a-z0-9.-]+", listed))
    (tmp_path / "list").mkdir()
    assert b"list is not a folder with config.json" in train("--model", "list", cwd=tmp_path, code=2).stderr


def test_weights_that_a_name_says_are_in_4_bits_are_not_trained(train):
    """The line names what the user wrote: the model's name."""
    error = train("--model", "unsloth/Qwen3-0.6B-bnb-4bit", *OPTIONS[2:], code=2).stderr.decode().splitlines()[-1]
    assert error == ("train: --model unsloth/Qwen3-0.6B-bnb-4bit: its name asks for --base nf4: quantized weights are not trained; "
                     "--train lora or prompt trains beside them")
