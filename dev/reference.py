#!/usr/bin/env python3
"""GPT-2 training in plain PyTorch: what ./train must agree with.

Reads the same Hugging Face folder and the same data in the same order, takes the same options and writes the same
JSON lines, so that dev/compare.py can put two logs side by side. It shares no code with ./train and none with
transformers; test/test_reference.py holds it against the latter.
"""

import argparse
import contextlib
import glob
import itertools
import json
import math
import os
import shutil
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024


def fail(message):
    """Ends the program for a user's mistake: one line, exit code 2."""
    print(f"reference.py: {message}", file=sys.stderr)
    sys.exit(2)


# The model. Modules are named as in Hugging Face's files, so a parameter's name is its tensor's name.


class Conv1D(nn.Module):
    """A linear layer whose weight is stored (inputs, outputs), as GPT-2's files have it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        return F.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(channels, 3 * channels)
        self.c_proj = Conv1D(channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2)  # (B, heads, T, head size)
                   for part in self.c_attn(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // self.heads)
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, channels, inner):
        super().__init__()
        self.c_fc = Conv1D(channels, inner)
        self.c_proj = Conv1D(inner, channels)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        channels, eps = config["n_embd"], config["layer_norm_epsilon"]
        self.ln_1 = nn.LayerNorm(channels, eps)
        self.attn = Attention(channels, config["n_head"])
        self.ln_2 = nn.LayerNorm(channels, eps)
        self.mlp = MLP(channels, config["n_inner"] or 4 * channels)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config["vocab_size"], config["n_embd"])
        self.wpe = nn.Embedding(config["n_positions"], config["n_embd"])
        self.h = nn.ModuleList(Block(config) for _ in range(config["n_layer"]))
        self.ln_f = nn.LayerNorm(config["n_embd"], config["layer_norm_epsilon"])

    def forward(self, tokens):
        """Logits (B, T, vocabulary) of tokens (B, T); the head's weight is the token embedding."""
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def read_config(folder):
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        fail(f"--model {folder}: cannot read config.json: {error}")
    config = {"layer_norm_epsilon": 1e-5, "n_inner": None, "activation_function": "gelu_new"} | config
    for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
        if key not in config:
            fail(f"{path}: {key} is missing")
    if config["n_embd"] % config["n_head"]:
        fail(f"{path}: n_embd {config['n_embd']} is no multiple of n_head {config['n_head']}")
    if config["activation_function"] not in ("gelu_new", "gelu_pytorch_tanh"):
        fail(f"{path}: activation_function is {config['activation_function']}, must be gelu_new")
    # Key, and the value that GPT-2 has: other values are other arithmetic.
    for key, expected in {"tie_word_embeddings": True, "scale_attn_weights": True,
                          "scale_attn_by_inverse_layer_idx": False}.items():
        if config.get(key, expected) != expected:
            fail(f"{path}: {key} is {config[key]}, must be {expected}")
    return config


def shards_of(path):
    """The files that hold a model's tensors: this one, or those that the index beside it names."""
    index = path + ".index.json"
    if os.path.exists(path) or not os.path.exists(index):
        return [path]
    with open(index, encoding="utf-8") as file:
        names = json.load(file)["weight_map"].values()
    return [os.path.join(os.path.dirname(path), name) for name in sorted(set(names))]


def load_model(folder):
    """The model of a Hugging Face folder in fp32, and its config."""
    config = read_config(folder)
    path = os.path.join(folder, "model.safetensors")
    stored = {}
    for shard in shards_of(path):
        try:
            stored |= load_file(shard)
        except (OSError, SafetensorError) as error:
            fail(str(error) if shard in str(error) else f"{shard}: {error}")
    tensors = {name.removeprefix("transformer."): tensor.float() for name, tensor in stored.items()}
    with torch.device("meta"):
        model = GPT2(config)
    for name, parameter in model.named_parameters():
        if name not in tensors:
            fail(f"{path}: tensor {name} is missing")
        if tensors[name].shape != parameter.shape:
            fail(f"{path}: {name} has shape {tuple(tensors[name].shape)}, must be {tuple(parameter.shape)}")
    # Files may also hold the tied head and old versions' causal masks: those are left out.
    model.load_state_dict({name: tensors[name] for name, _ in model.named_parameters()}, assign=True)
    return model, config


def save_model(model, source, folder):
    """Writes an fp32 Hugging Face folder with the config and the tokenizer files of the source folder."""
    os.makedirs(folder, exist_ok=True)
    for name in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"):
        origin, target = os.path.join(source, name), os.path.join(folder, name)
        if os.path.exists(origin) and not (os.path.exists(target) and os.path.samefile(origin, target)):
            shutil.copyfile(origin, target)
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config |= {key: "float32" for key in ("dtype", "torch_dtype") if key in config}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.named_parameters()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})


# The data. A stream is an array of tokens: one shard, or all text files together.


def mix64(x):
    """The finaliser of splitmix64, as in llmc/random.h; wraps modulo 2**64."""
    with np.errstate(over="ignore"):
        x = np.asarray(x, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def random_bits(seed, a, b=0, c=0):
    """64 random bits for the counter (a, b, c); any of them may be an array."""
    bits = mix64(seed)
    for counter in (a, b, c):
        bits = mix64(bits ^ np.asarray(counter, dtype=np.uint64))
    return bits


def permutation(count, seed, epoch, what):
    """The order of count things in an epoch: what is 0 for the streams and 1 + f for the windows of stream f."""
    return np.argsort(random_bits(seed, epoch, what, np.arange(count)), kind="stable").tolist()


def window_count(stream, seq_len):
    return max(1, (len(stream) - seq_len) // seq_len)


def training_sequences(streams, seq_len, seed):
    """All epochs' sequences without end, each of seq_len + 1 tokens: inputs and, shifted by one, targets."""
    for epoch in itertools.count():
        for f in permutation(len(streams), seed, epoch, 0):
            stream, offset = streams[f], 0
            if len(stream) >= 2 * seq_len:
                offset = int(random_bits(seed, epoch, f + 1, 1 << 63)) % seq_len
            for window in permutation(window_count(stream, seq_len), seed, epoch, f + 1):
                start = offset + window * seq_len
                yield stream[start:start + seq_len + 1]


def validation_sequences(streams, seq_len):
    for stream in streams:
        for window in range(window_count(stream, seq_len)):
            yield stream[window * seq_len:(window + 1) * seq_len + 1]


def expand(option, patterns):
    """The files that names and globs stand for, sorted inside each pattern."""
    paths = []
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not matches:
            fail(f"{option} {pattern}: no such file")
        paths += matches
    if len({path.endswith(".bin") for path in paths}) > 1:
        fail(f"{option}: .bin shards and text files cannot be mixed")
    return paths


def read_file(path):
    try:
        return np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        fail(f"{path}: {error.strerror}")


def read_shard(path):
    """The tokens of an llm.c shard, mapped into memory."""
    if os.path.getsize(path) < SHARD_HEADER_BYTES:
        fail(f"{path}: shorter than a shard's header of {SHARD_HEADER_BYTES} bytes")
    magic, version, count = np.fromfile(path, dtype="<i4", count=3).tolist()
    if (magic, version) != (SHARD_MAGIC, SHARD_VERSION):
        fail(f"{path}: header {magic}, {version} is not that of a token shard ({SHARD_MAGIC}, {SHARD_VERSION})")
    if os.path.getsize(path) != SHARD_HEADER_BYTES + 2 * count:
        fail(f"{path}: the header promises {count} tokens, the file has "
             f"{os.path.getsize(path) - SHARD_HEADER_BYTES} bytes of them")
    return np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=(count,)) if count else []


def read_streams(paths):
    if paths[0].endswith(".bin"):
        return [read_shard(path) for path in paths]
    return [np.concatenate([read_file(path) for path in paths])]


def load_data(data, val_data):
    """Training and validation streams; text without --val-data keeps each file's last tenth for validation."""
    paths = expand("--data", data)
    if val_data:
        return read_streams(paths), read_streams(expand("--val-data", val_data))
    if paths[0].endswith(".bin"):
        return read_streams(paths), []
    texts = [read_file(path) for path in paths]
    cuts = [len(text) - len(text) // 10 for text in texts]
    return ([np.concatenate([text[:cut] for text, cut in zip(texts, cuts)])],
            [np.concatenate([text[cut:] for text, cut in zip(texts, cuts)])])


def check_streams(what, streams, seq_len):
    for stream in streams:
        if len(stream) <= seq_len:
            fail(f"--seq-len {seq_len}: {what} data has a stream of only {len(stream)} tokens, "
                 f"{seq_len + 1} are needed")


# Training.


def learning_rate(step, options):
    peak, low, steps, warmup = options.lr, options.min_lr, options.steps, options.warmup
    if step < warmup:
        return peak * (step + 1) / warmup
    if options.schedule == "constant":
        return peak
    start = warmup
    if options.schedule == "wsd":  # warm up, stay, decay over the last fifth
        start = max(warmup, steps - max(1, steps // 5))
    progress = max(0, step - start) / max(1, steps - start)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if options.schedule == "cosine" else 1 - progress
    return low + left * (peak - low)


class AdamW:
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019); only matrices decay."""

    def __init__(self, parameters, beta1, beta2, eps, weight_decay):
        self.parameters = list(parameters)
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0

    @torch.no_grad()
    def update(self, lr, gradient_scale):
        self.steps += 1
        correction1, correction2 = 1 - self.beta1**self.steps, 1 - self.beta2**self.steps
        for p, m, v in zip(self.parameters, self.m, self.v):
            gradient = p.grad * gradient_scale
            m.mul_(self.beta1).add_(gradient, alpha=1 - self.beta1)
            v.mul_(self.beta2).add_(gradient.square(), alpha=1 - self.beta2)
            change = (m / correction1) / ((v / correction2).sqrt() + self.eps)
            if p.ndim == 2:
                change += self.weight_decay * p
            p -= lr * change


class Trainer:
    def __init__(self, options):
        self.options = options
        self.model, config = load_model(options.model)
        self.vocab_size = config["vocab_size"]
        if options.seq_len > config["n_positions"]:
            fail(f"--seq-len {options.seq_len}: the model has {config['n_positions']} positions")
        train, self.val_streams = load_data(options.data, options.val_data)
        check_streams("training", train, options.seq_len)
        self.sequences = training_sequences(train, options.seq_len, options.seed)
        if options.eval_every:
            if not self.val_streams:
                fail("--eval-every: there is no validation data, give --val-data")
            check_streams("validation", self.val_streams, options.seq_len)
        self.model.to(options.device)
        self.optimizer = AdamW(self.model.parameters(), options.beta1, options.beta2, options.eps,
                               options.weight_decay)

    def loss(self, sequences):
        """Mean loss of a list of sequences."""
        tokens = torch.from_numpy(np.stack(sequences).astype(np.int64))
        if tokens.max() >= self.vocab_size:
            fail(f"--data: token {tokens.max()} does not fit the model's vocabulary of {self.vocab_size}")
        tokens = tokens.to(self.options.device)
        with torch.autocast(torch.device(self.options.device).type, torch.bfloat16,
                            enabled=self.options.precision == "bf16"):
            logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def validation_loss(self):
        batch, total, count = self.options.batch, 0.0, 0
        sequences = itertools.islice(validation_sequences(self.val_streams, self.options.seq_len),
                                     self.options.eval_batches * batch * self.options.grad_accum)
        while chunk := list(itertools.islice(sequences, batch)):
            total += self.loss(chunk).item() * len(chunk)
            count += len(chunk)
        return total / count

    def step(self, step):
        """One optimizer step; returns its line of the log."""
        options, start = self.options, time.perf_counter()
        self.model.zero_grad()
        loss = 0.0
        for _ in range(options.grad_accum):
            micro_loss = self.loss(list(itertools.islice(self.sequences, options.batch))) / options.grad_accum
            micro_loss.backward()
            loss += micro_loss.item()
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        if step == 0 and options.dump_gradients:
            save_file({name: g.cpu().contiguous() for name, g in gradients.items()}, options.dump_gradients)
        norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        lr = learning_rate(step, options)
        self.optimizer.update(lr, options.clip / norm if 0 < options.clip < norm else 1.0)
        if torch.device(options.device).type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        tokens = options.grad_accum * options.batch * options.seq_len
        return {"step": step, "loss": loss, "grad_norm": norm, "lr": lr, "ms": 1000 * seconds,
                "tokens_per_second": tokens / seconds}

    def train(self):
        """The lines of the log, as they come about."""
        for step in range(self.options.steps):
            if self.options.eval_every and step > 0 and step % self.options.eval_every == 0:
                yield {"step": step, "val_loss": self.validation_loss()}
            yield self.step(step)
        if self.val_streams and self.options.steps:
            yield {"step": self.options.steps, "val_loss": self.validation_loss()}


class OptionParser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


def number(kind, minimum):
    """An argparse type: an int or float that is finite and not below the minimum."""

    def parse(text):
        value = kind(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} must be at least {minimum}")
        return value

    parse.__name__ = kind.__name__
    return parse


def parse_options(arguments):
    parser = OptionParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                          formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, whole, real = parser.add_argument, number(int, 0), number(float, 0)
    positive = number(int, 1)
    add("--model", required=True, help="Hugging Face folder: config.json, model.safetensors")
    add("--data", required=True, nargs="+", action="extend", help="training .bin shards or text files, or globs")
    add("--val-data", nargs="+", action="extend", help="validation files or globs")
    add("--batch", type=positive, default=8, help="sequences in a micro-batch")
    add("--seq-len", type=positive, default=128, help="tokens in a sequence")
    add("--grad-accum", type=positive, default=1, help="micro-batches in a step")
    add("--steps", type=whole, default=1500)
    add("--lr", type=real, default=1e-3, help="highest learning rate")
    add("--min-lr", type=real, default=0.0, help="learning rate at the schedule's end")
    add("--warmup", type=whole, default=30, help="steps of linear warm-up")
    add("--schedule", choices=("cosine", "linear", "constant", "wsd"), default="cosine")
    add("--weight-decay", type=real, default=0.1, help="of matrices only")
    add("--beta1", type=real, default=0.9)
    add("--beta2", type=real, default=0.95)
    add("--eps", type=real, default=1e-8)
    add("--clip", type=real, default=1.0, help="largest gradient norm, 0 for no clipping")
    add("--seed", type=whole, default=1337, help="of the data's order")
    add("--eval-every", type=whole, default=0, help="steps between validations, 0 for none")
    add("--eval-batches", type=positive, default=8, help="steps whose sequences make a validation")
    add("--log", help="also write the JSON lines to this file")
    add("--out", help="save the trained model to this folder")
    add("--dump-gradients", metavar="FILE", help="save the first step's gradients, before clipping")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast over fp32 weights")
    add("--threads", type=whole, default=0, help="CPU threads, 0 for PyTorch's choice")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        fail(f"--device {options.device}: PyTorch finds no CUDA device")
    return options


def main(arguments=None):
    options = parse_options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    trainer = Trainer(options)
    with open(options.log, "w", encoding="utf-8") if options.log else contextlib.nullcontext() as log:
        for record in trainer.train():
            line = json.dumps(record)
            print(line, flush=True)
            if log:
                print(line, file=log, flush=True)
    if options.out:
        save_model(trainer.model, options.model, options.out)


if __name__ == "__main__":
    main()
