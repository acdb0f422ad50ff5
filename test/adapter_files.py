"""Shared by tests: LoRA adapters and soft prompts, made with PEFT, and runs of them."""

import numpy as np
import peft
import torch
import transformers
from model_files import DATA, MODELS
from reference_runs import open_with_transformers
from trainer_runs import by_key, figures, read_log, saved_bytes

OPTIONS = {**MODELS, "gpt2": ("--heads", 3, "--channels", 48)}
GIVEN = {"--model": "model", "--data": "data.bin", "--batch": "2", "--seq-len": "16"}
STEPS = ("--lr", 3e-3, "--warmup", 4, "--clip", 2)


def randomized(model):
    """Makes all tensors of the adapter nonzero: PEFT's B starts as zero, and A would have no gradient."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def make_adapter(work, config):
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    randomized(peft.get_peft_model(model, config)).save_pretrained(work / "adapter")


# The LoRA matrices A of these layers are joined in the trainer's state, under the name of the first.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def of_files(name, rows, tensors):
    """The part of the files' tensors that belongs to a tensor of the state with this many rows."""
    whole = next(n for n in tensors if name in n)
    for parts in TOGETHER:
        for first in parts:
            if name.endswith(f"{first}.lora_A") and tensors[whole].shape[0] != rows:
                names = [whole.replace(first, part) for part in parts]
                return torch.cat([tensors[n] for n in names if n in tensors])
    return tensors[whole]


def with_adapter(model, adapter):
    return peft.PeftModel.from_pretrained(open_with_transformers(model).float(), adapter).eval()


def validated(train, work, *options):
    """The loss of the data's first sequences, without training."""
    train("--val-data", "data.bin", *DATA[4:], "--steps", 0, "--eval-batches", 2, "--log", "log", *options, cwd=work)
    return by_key(read_log(work / "log"), "val_loss")[0]


def validated_windows(work):
    """The sequences that validated() reads, with the token that follows each."""
    tokens = np.fromfile(work / "data.bin", dtype=np.uint16, offset=1024).astype(np.int64)
    return torch.stack([torch.from_numpy(tokens[at:at + 38]) for at in range(0, 6 * 37, 37)])


def trained(train, work, name, *options):
    train(*DATA, "--adapter", "adapter", "--steps", 4, "--out", name, "--log", f"{name}.log", "--sample", "tokens=0",
          *options, cwd=work)
    return figures(read_log(work / f"{name}.log")), saved_bytes(work / name)
