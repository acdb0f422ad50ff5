#!/usr/bin/env python3
"""Generates greedily from token 0 with transformers and its cache. Prints one JSON object with the tokens and
the time of each. dev/bench/generation.py runs it to compare it with ./train."""

import argparse
import json
import time

import torch
import transformers


class Moments:
    """A streamer that only records times; the prompt comes first."""

    def __init__(self):
        self.all = []

    def put(self, _):
        self.all.append(time.perf_counter())

    def end(self):
        pass


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--weights", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=0, help="0 for PyTorch's choice")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16 if options.weights == "bf16" else torch.float32, local_files_only=True).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=options.tokens, min_new_tokens=options.tokens, pad_token_id=0)
    moments = Moments()
    with torch.inference_mode():
        prompt = torch.zeros((1, 1), dtype=torch.long)
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=moments)
    print(json.dumps({"tokens": made[0, 1:].tolist(), "moments": moments.all[1:]}))


if __name__ == "__main__":
    main()
