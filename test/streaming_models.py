"""Shared by tests of what lives outside the device: models with adapters, wide blocks, and plans of them."""

import json

import peft
import pytest
from adapter_files import OPTIONS, make_adapter
from model_files import DATA, VOCAB, linked
from trainer_runs import make, random_tokens, write_shard

FAMILIES = ("gpt2", "llama", "qwen3", "bloom")
DISK = ("--offload", "weights=disk")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """Five layers, so that blocks come and go; of Llama in several files, of Qwen3 in fp16."""
    work = tmp_path_factory.mktemp(request.param)
    more = {"llama": ("--shard-size", "20KB"), "qwen3": ("--dtype", "fp16"), "bloom": ("--dtype", "fp32")}
    make(work / "model", "--family", request.param, "--layers", 5, "--vocab", VOCAB, "--positions", 64, "--dtype", "bf16",
         *OPTIONS[request.param], *more.get(request.param, ()))
    write_shard(work / "data.bin", random_tokens(VOCAB, 3000))
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM"))
    return work


@pytest.fixture
def work(folder, tmp_path):
    return linked(tmp_path, folder, "adapter")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Twelve blocks of 3 million parameters each."""
    return make_wide(tmp_path_factory.mktemp("wide"), 12)


@pytest.fixture(scope="module")
def wide4(tmp_path_factory):
    """Four of these blocks, for runs that save: 48 chunks of state, more than a ring has slots."""
    return make_wide(tmp_path_factory.mktemp("wide4"), 4)


def make_wide(work, layers):
    make(work / "model", "--family", "llama", "--layers", layers, "--channels", 512, "--heads", 8, "--vocab", VOCAB,
         "--positions", 64, "--dtype", "bf16", "--shard-size", "50MB")
    write_shard(work / "data.bin", random_tokens(VOCAB, 3000))
    return work


LORA = (*DATA, "--train", "lora", "--lora-rank", 2)


def plan(train, work, *options):
    return json.loads(train(*LORA, "--steps", 1, *options, "--plan", "json", cwd=work).stdout)


def read_steps(work):
    done = json.loads((work / "out" / "trainer_state.json").read_text())["step"]
    return range(done)


ELSEWHERE = (("--offload", "state=disk"), DISK, ("--offload", "state=disk", *DISK))
GRADIENTS = ("--offload", "gradients=disk")
ALL = (*GRADIENTS, *ELSEWHERE[2], "--offload", "inputs=auto")


def full_plan(train, work, *options):
    return json.loads(train(*DATA, "--steps", 1, *options, "--plan", "json", cwd=work).stdout)
