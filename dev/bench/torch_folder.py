#!/usr/bin/env python3
"""Times training steps of a Hugging Face folder's model with transformers on random tokens, as ./train
--bench does. Prints one JSON object. dev/bench/compare_speed.py runs it to compare it with ./train."""

import argparse

import torch
import torch.nn.functional as F
import torch_steps
import transformers
from torch import nn


class Loss(nn.Module):
    """The mean loss of transformers' own model. Logits are converted to fp32, as in transformers' loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def nf4(precision):
    """bitsandbytes' NF4 with double quantization, for all linear layers but the head."""
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if precision == "bf16" else torch.float32)


def load(options):
    """The model, in evaluation mode because ./train has no dropout, and its vocabulary. With LoRA the model
    is frozen and in `precision`, and PEFT's adapters are fp32, which is PEFT's default."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    frozen_in_bf16 = options.lora_rank and options.precision == "bf16"
    more = {"quantization_config": nf4(options.precision)} if options.nf4 else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16 if options.weights == "bf16" or frozen_in_bf16 else torch.float32,
        attn_implementation=options.attention, local_files_only=True, **more)
    vocabulary = model.config.vocab_size
    if options.lora_rank:
        import peft
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=options.lora_rank, lora_alpha=2 * options.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    if options.checkpoint:  # transformers does that only in training mode
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return Loss(model).train(), vocabulary
    return Loss(model).eval(), vocabulary


def parse_options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--weights", choices=("fp32", "bf16"), default="fp32",
                        help="bf16: without fp32 ones behind them, which ./train has")
    parser.add_argument("--lora-rank", type=int, default=0, help="train PEFT's LoRA of all linear layers")
    parser.add_argument("--nf4", action="store_true", help="the frozen model in bitsandbytes' NF4")
    parser.add_argument("--checkpoint", action="store_true", help="keep blocks' inputs, and make the rest again")
    torch_steps.add_options(parser)
    return parser.parse_args(arguments)


def main():
    options = parse_options()
    torch_steps.main(options, lambda: load(options), attention=options.attention, weights=options.weights,
                     transformers=transformers.__version__)


if __name__ == "__main__":
    main()
