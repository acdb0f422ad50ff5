#!/usr/bin/env python3
"""Times training steps of a Hugging Face folder's model by transformers on random tokens, as ./train --bench does;
prints one JSON object. dev/bench/compare.py runs it beside ./train."""

import argparse

import torch
import torch.nn.functional as F
import torch_steps
import transformers
from torch import nn


class Loss(nn.Module):
    """The mean loss of transformers' own model; its logits become fp32, as they do in transformers' loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def load(options):
    """The model in evaluation mode, as ./train has no dropout, and its vocabulary."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16 if options.weights == "bf16" else torch.float32,
        attn_implementation=options.attention, local_files_only=True)
    return Loss(model).eval(), model.config.vocab_size


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--weights", choices=("fp32", "bf16"), default="fp32",
                        help="bf16: without fp32 ones behind them, which ./train has")
    torch_steps.add_options(parser)
    options = parser.parse_args(arguments)
    torch_steps.main(options, lambda: load(options), attention=options.attention, weights=options.weights,
                     transformers=transformers.__version__)


if __name__ == "__main__":
    main()
