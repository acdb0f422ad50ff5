#!/usr/bin/env python3
"""Training by PyTorch and transformers' own models: what ./train must agree with.

Reads the same Hugging Face folder, of any family, and the same data in the same order. Examples of JSON lines
go through the model one by one; ./train packs several into a sequence. Takes the same options and writes the
same JSON lines, so dev/compare_losses.py can put two logs side by side. It shares no code with ./train.
"""

import argparse
import bisect
import contextlib
import glob
import itertools
import json
import math
import os
import re
import shutil
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

SHARD_HEADER_BYTES = 1024
SHARD_TOKENS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # by magic and version
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
                   "special_tokens_map.json", "chat_template.jinja")


def fail(message):
    """Ends the program for a user's mistake: one line, exit code 2."""
    print(f"reference.py: {message}", file=sys.stderr)
    sys.exit(2)


def load_model(folder):
    """transformers' model of a Hugging Face folder in fp32, without dropout. All weights must be in the
    files."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        fail(f"--model {folder}: is not a folder with config.json")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True)
    except Exception as error:  # transformers may raise anything for a damaged folder
        fail(f"--model {folder}: {(str(error).strip() or repr(error)).splitlines()[0]}")
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            fail(f"--model {folder}: {kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[0]}")
    return model.eval()


def add_adapter(model, folder):
    """PEFT's model with an adapter to train: LoRA or a soft prompt, without dropout."""
    import peft  # only needed with an adapter
    try:
        model = peft.PeftModel.from_pretrained(model, folder)
    except Exception as error:
        fail(f"--adapter {folder}: {(str(error).strip() or repr(error)).splitlines()[0]}")
    # PEFT does not continue the training of a soft prompt by itself.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith("prompt_encoder."))
    return model.eval()


def file_name(parameter):
    """The name of a PEFT model's parameter in PEFT's files. Other names stay the same."""
    prompt = parameter.startswith("prompt_encoder.")
    return "prompt_embeddings" if prompt else parameter.replace(".default", "")


def save_model(model, source, folder):
    """Writes the model as an fp32 Hugging Face folder, with the source folder's tokenizer files; an adapter
    as PEFT does."""
    model.save_pretrained(folder)
    if hasattr(model, "peft_config"):
        return
    for name in TOKENIZER_FILES:
        origin, target = os.path.join(source, name), os.path.join(folder, name)
        if os.path.exists(origin) and not (os.path.exists(target) and os.path.samefile(origin, target)):
            shutil.copyfile(origin, target)


# The data. A stream is an array of tokens: one shard, or all text files together.


def mix64(x):
    """The finalizer of splitmix64, as in llmc/random.h; wraps modulo 2**64."""
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
    """The order of `count` things in an epoch: `what` is 0 for the streams and 1 + f for the windows of
    stream f.

    A Feistel network on two digits (llmc/random.h). Numbers that it moves out of range go through it
    again.
    """
    lows = 1
    while lows * lows < count:
        lows *= 2
    lows, highs = np.uint64(lows), np.uint64(-(-count // lows))
    order = np.arange(count, dtype=np.uint64)
    again = np.arange(count)
    with np.errstate(over="ignore"):
        while len(again):
            low, high = order[again] % lows, order[again] // lows
            for half in range(0, 24, 2):
                low = (low + random_bits(seed, epoch, what, high + np.uint64(half << 56))) % lows
                high = (high + random_bits(seed, epoch, what, low + np.uint64(half + 1 << 56)) % highs) % highs
            order[again] = high * lows + low
            again = again[order[again] >= count]
    return order.tolist()


def window_count(stream, seq_len):
    """Of an epoch of training, whose windows begin anywhere in the first seq_len tokens."""
    return max(1, (len(stream) - seq_len) // seq_len)


def training_sequences(streams, seq_len, seed):
    """The sequences of all epochs, without end. Each has seq_len + 1 tokens: the inputs, and the targets
    shifted by one."""
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
        for window in range((len(stream) - 1) // seq_len):
            yield stream[window * seq_len:(window + 1) * seq_len + 1]


def expand(option, patterns):
    """The files that names and globs stand for, sorted within each pattern."""
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
    token = SHARD_TOKENS.get((magic, version))
    if not token:
        known = " or ".join(f"{m}, {v}" for m, v in SHARD_TOKENS)
        fail(f"{path}: header {magic}, {version} is not that of a token shard ({known})")
    if os.path.getsize(path) != SHARD_HEADER_BYTES + token.itemsize * count:
        fail(f"{path}: the header promises {count} tokens, the file has "
             f"{os.path.getsize(path) - SHARD_HEADER_BYTES} bytes of them")
    return np.memmap(path, dtype=token, mode="r", offset=SHARD_HEADER_BYTES, shape=(count,)) if count else []


def read_streams(paths):
    if paths[0].endswith(".bin"):
        return [read_shard(path) for path in paths]
    return [np.concatenate([read_file(path) for path in paths])]


def load_data(data, val_data, seq_len):
    """Training and validation streams. Without --val-data, the last tenth of each text file is for
    validation.

    If these tenths are too short for a sequence, all of the text is trained on.
    """
    paths = expand("--data", data)
    if val_data:
        return read_streams(paths), read_streams(expand("--val-data", val_data))
    if paths[0].endswith(".bin"):
        return read_streams(paths), []
    texts = [read_file(path) for path in paths]
    if sum(len(text) // 10 for text in texts) <= seq_len:
        return [np.concatenate(texts)], []
    cuts = [len(text) - len(text) // 10 for text in texts]
    return ([np.concatenate([text[:cut] for text, cut in zip(texts, cuts)])],
            [np.concatenate([text[cut:] for text, cut in zip(texts, cuts)])])


def check_streams(what, streams, seq_len):
    for stream in streams:
        if len(stream) <= seq_len:
            fail(f"--seq-len {seq_len}: {what} data has a stream of only {len(stream)} tokens, "
                 f"{seq_len + 1} are needed")


# JSON lines. An example is its tokens and, for each, whether it has a loss. A sequence is a list of examples.


class Examples:
    """Makes examples from JSON lines, with the tokenizer and chat template of a model's folder, or as
    bytes."""

    def __init__(self, folder, loss_on):
        self.loss_on, self.tokenizer = loss_on, None
        if any(os.path.exists(os.path.join(folder, name)) for name in TOKENIZER_FILES):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def ids(self, text):
        if not self.tokenizer:
            return list(text.encode())
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def ends(self):
        """The tokens around a text: the one that begins a document of the data, and the one that ends a
        text."""
        if not self.tokenizer:
            return [], []
        vocabulary, end = self.tokenizer.get_vocab(), self.tokenizer.eos_token_id
        usual = [vocabulary[mark] for mark in ("<|endoftext|>", "<|begin_of_text|>", "<s>") if mark in vocabulary]
        begin = next((token for token in [*usual, self.tokenizer.bos_token_id, end] if token is not None), None)
        return [[] if token is None else [token] for token in (begin, end)]

    def of_pieces(self, pieces):
        """The tokens of the joined (text, kind) pieces. A token that crosses a border belongs to the piece
        after it."""
        tokens, kinds, text = self.ids("".join(text for text, _ in pieces)), [], ""
        for piece, kind in pieces:
            text += piece
            front = self.ids(text)
            same = next((i for i, (a, b) in enumerate(zip(front, tokens)) if a != b), min(len(front), len(tokens)))
            kinds += [kind] * (same - len(kinds))
        return tokens, [kind == "answer" or kind == "prompt" and self.loss_on == "all" for kind in kinds]

    def conversation(self, messages):
        """A conversation, as the template writes it. An answer is what the template adds for an assistant's
        message, with the token that ends it. No token of a message with "weight": 0 or "train": false has a
        loss."""
        def render(count, **options):
            return self.tokenizer.apply_chat_template(messages[:count], tokenize=False, **options)

        whole = render(len(messages))
        kinds = ["prompt"] * len(whole)
        for i, message in enumerate(messages):
            if message.get("weight", 1) == 0 or message.get("train", True) is False:
                begin, end = len(render(i)) if i else 0, len(render(i + 1))
                kinds[begin:end] = ["never"] * (end - begin)
                continue
            if message["role"] != "assistant":
                continue
            before = render(i, add_generation_prompt=True) if i else ""
            if not whole.startswith(before):  # the template has no such prompt, or adds white space to it
                before = render(i)
            end = len(render(i + 1).rstrip("\n"))
            kinds[len(before):end] = ["answer"] * (end - len(before))
        pieces = []
        for kind, part in itertools.groupby(zip(whole, kinds), lambda pair: pair[1]):
            pieces.append(("".join(character for character, _ in part), kind))
        return self.of_pieces(pieces)

    def read(self, line):
        example = json.loads(line)
        if "messages" in example:
            tokens, learnt = self.conversation(example["messages"])
        else:
            begin, end = self.ends()
            if "completion" in example:
                tokens, learnt = self.of_pieces([(example["prompt"], "prompt"), (example["completion"], "answer")])
            else:
                tokens = self.ids(example["text"])
                learnt = [True] * len(tokens)
            if tokens[:1] != begin:
                tokens, learnt = begin + tokens, [self.loss_on == "all"] * len(begin) + learnt
            if tokens[-1:] != end:
                tokens, learnt = tokens + end, learnt + [True] * len(end)
        return np.array(tokens), np.array(learnt)

    def parts(self, line, seq_len):
        """The examples of a line: a text is divided into as many parts as needed, others are cut."""
        tokens, learnt = self.read(line)
        goes_on = "text" in json.loads(line)
        starts = range(0, len(tokens) - 1, seq_len) if goes_on else (0,)
        return [(tokens[at:at + seq_len + 1], learnt[at:at + seq_len + 1]) for at in starts]

    def read_files(self, paths, seq_len):
        """For each file, the list of its examples."""
        files = []
        for path in paths:
            with open(path, encoding="utf-8-sig") as file:
                text = file.read()
            lines = map(json.dumps, json.loads(text)) if text.lstrip().startswith("[") else text.split("\n")
            files.append([part for line in lines if line.strip() for part in self.parts(line, seq_len)])
        return files


def packed(examples, seq_len):
    """Best fit: each example goes, whole, into the fullest sequence that it fits, of seq_len targets."""
    sequences, room = [], []  # room: (rows left, number), sorted
    for example in examples:
        rows = len(example[0]) - 1
        place = bisect.bisect_left(room, (rows, 0))
        left, number = room.pop(place) if place < len(room) else (seq_len, len(sequences))
        if number == len(sequences):
            sequences.append([])
        sequences[number].append(example)
        if left > rows:
            bisect.insort(room, (left - rows, number))
    return sequences


def alone(examples, seq_len):
    """For a soft prompt: each example has a sequence of its own."""
    return [[example] for example in examples]


def shuffled(sequences, seed):
    for epoch in itertools.count():
        yield from (sequences[i] for i in permutation(len(sequences), seed, epoch, 1))


def load_examples(data, val_data, examples, seq_len, pack):
    """Sequences to train and to validate on. Without --val-data the latter are the last tenth of each
    file."""
    files, held_out = examples.read_files(expand("--data", data), seq_len), []
    if val_data:
        held_out = examples.read_files(expand("--val-data", val_data), seq_len)
    elif any(learnt[1:].any() for file in files for _, learnt in file[len(file) - len(file) // 10:]):
        held_out = [file[len(file) - len(file) // 10:] for file in files]
        files = [file[:len(file) - len(file) // 10] for file in files]
    return (pack([example for file in part for example in file], seq_len) for part in (files, held_out))


def is_examples(path):
    """True if a file has examples in JSON, by its name or its first bytes (llmc/data_files.h)."""
    extension = os.path.splitext(path)[1].lower()
    with open(path, "rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf")
    begins = re.match(rb'\s*(\{[ \t]*"|\[\s*\{\s*")', start)
    return extension in (".jsonl", ".ndjson", ".jsonlines", ".json-lines", ".json") or begins and extension not in (".txt", ".text")


# Training.


def learning_rate(step, options):
    peak, low, steps, warmup = options.lr, options.min_lr, options.steps, options.warmup
    if step < warmup:
        return peak * (step + 1) / warmup
    if options.schedule == "constant":
        return peak
    start = warmup
    if options.schedule == "wsd":  # warm up, stay constant, decay over the last fifth
        start = max(warmup, steps - max(1, steps // 5))
    progress = max(0, step - start) / max(1, steps - start)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if options.schedule == "cosine" else 1 - progress
    return low + left * (peak - low)


def tokens_to_learn(sequences):
    return sum(int(learnt[1:].sum()) for _, learnt in itertools.chain.from_iterable(sequences))


class AdamW:
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019); only matrices get weight decay."""

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


def positions_of(config):
    """The longest sequence. Some scalings of rotary positions extend what the config says; ALiBi has no
    limit."""
    positions, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("yarn", "dynamic") and rope.get("factor"):
        positions = max(positions, int(rope["factor"] * rope.get("original_max_position_embeddings", positions)))
    return positions


class Trainer:
    def __init__(self, options):
        self.options = options
        self.model = load_model(options.model)
        self.vocab_size = self.model.config.vocab_size
        positions = positions_of(self.model.config)
        if positions and options.seq_len > positions:
            fail(f"--seq-len {options.seq_len}: the model has {positions} positions")
        if options.adapter:
            self.model = add_adapter(self.model, options.adapter)
        self.packs = all(map(is_examples, expand("--data", options.data)))
        if self.packs:
            examples = Examples(options.model, options.loss_on)
            pack = alone if hasattr(self.model, "prompt_encoder") else packed
            train, self.held_out = load_examples(options.data, options.val_data, examples, options.seq_len, pack)
            self.sequences = shuffled(train, options.seed)
        else:
            self.read_streams(options)
        self.model.to(options.device)
        self.trained = {file_name(n): p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = AdamW(self.trained.values(), options.beta1, options.beta2, options.eps,
                               options.weight_decay)

    def read_streams(self, options):
        train, val_streams = load_data(options.data, options.val_data, options.seq_len)
        has_tokenizer = any(os.path.exists(os.path.join(options.model, name)) for name in TOKENIZER_FILES)
        if has_tokenizer and any(stream.dtype == np.uint8 for stream in train + val_streams):
            fail("text is read as bytes here, and the model has a tokenizer: dev/data/tokenize_text.py makes shards of it")
        check_streams("training", train, options.seq_len)
        self.sequences = training_sequences(train, options.seq_len, options.seed)
        if options.eval_every:
            if not val_streams:
                fail("--eval-every: there is no validation data, give --val-data")
            check_streams("validation", val_streams, options.seq_len)
        self.held_out = list(validation_sequences(val_streams, options.seq_len)) if val_streams else []

    def loss_of_examples(self, sequences):
        """The sum of the losses of packed sequences. Each example goes through the model by itself."""
        total = torch.zeros((), device=self.options.device)
        for tokens, learnt in itertools.chain.from_iterable(sequences):
            tokens = torch.from_numpy(tokens.astype(np.int64))
            targets = torch.where(torch.from_numpy(learnt), tokens, -100)[1:].to(self.options.device)
            logits = self.logits(tokens[None, :-1].to(self.options.device))
            total = total + F.cross_entropy(logits[0].float(), targets, ignore_index=-100, reduction="sum")
        return total

    def logits(self, inputs):
        """The logits for each input token. A soft prompt's rows come first and are left out: they have no
        targets."""
        with torch.autocast(torch.device(self.options.device).type, torch.bfloat16,
                            enabled=self.options.precision == "bf16"):
            return self.model(inputs, use_cache=False).logits[:, -inputs.shape[1]:]

    def part_of_mean(self, batch, batches):
        """The contribution of one batch to the mean loss of all. With examples, the mean is over tokens with
        a loss."""
        if not self.packs:
            return self.loss(batch) * len(batch) / sum(map(len, batches))
        return self.loss_of_examples(batch) / max(1, sum(map(tokens_to_learn, batches)))

    def loss(self, sequences):
        """Mean loss of a list of sequences."""
        tokens = torch.from_numpy(np.stack(sequences).astype(np.int64))
        if tokens.max() >= self.vocab_size:
            fail(f"--data: token {tokens.max()} does not fit the model's vocabulary of {self.vocab_size}")
        tokens = tokens.to(self.options.device)
        logits = self.logits(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def validation_loss(self):
        batch = self.options.batch
        sequences = self.held_out[:self.options.eval_batches * batch * self.options.grad_accum]
        chunks = [sequences[at:at + batch] for at in range(0, len(sequences), batch)]
        return sum(self.part_of_mean(chunk, chunks).item() for chunk in chunks)

    def step(self, step):
        """One optimizer step; returns its line of the log."""
        options, start = self.options, time.perf_counter()
        self.model.zero_grad()
        loss = 0.0
        batches = [list(itertools.islice(self.sequences, options.batch)) for _ in range(options.grad_accum)]
        for batch in batches:
            micro_loss = self.part_of_mean(batch, batches)
            micro_loss.backward()
            loss += micro_loss.item()
        gradients = {name: p.grad for name, p in self.trained.items()}
        if step == 0 and options.dump_gradients:
            save_file({name: g.cpu().contiguous() for name, g in gradients.items()}, options.dump_gradients)
        norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
        lr = learning_rate(step, options)
        self.optimizer.update(lr, options.clip / norm if 0 < options.clip < norm else 1.0)
        if torch.device(options.device).type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        tokens = options.grad_accum * options.batch * options.seq_len
        return {"step": step + 1, "loss": loss, "grad_norm": norm, "lr": lr, "ms": 1000 * seconds,
                "tokens_per_second": tokens / seconds}

    def train(self):
        """Trains and yields the lines of the log."""
        for step in range(self.options.steps):
            if self.options.eval_every and step > 0 and step % self.options.eval_every == 0:
                yield {"step": step, "val_loss": self.validation_loss()}
            yield self.step(step)
        if self.held_out and self.options.steps:
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


COEFFICIENTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def adamw(text):
    """An argparse type: "adamw", "beta1=0.9" and the like, with commas between them, as a dict."""
    chosen = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if part == "adamw":
            continue
        if key not in COEFFICIENTS:
            raise argparse.ArgumentTypeError(f"{part} is none of adamw, beta1=, beta2= and eps=")
        chosen[key] = number(float, 0)(value)
    return chosen


def parse_options(arguments):
    parser = OptionParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                          formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, whole, real = parser.add_argument, number(int, 0), number(float, 0)
    positive = number(int, 1)
    add("--model", required=True, help="Hugging Face folder: config.json, model.safetensors")
    add("--adapter", help="a folder of PEFT's: train that beside the frozen model")
    add("--data", required=True, nargs="+", action="extend", help="training .bin shards or text files, or globs")
    add("--val-data", nargs="+", action="extend", help="validation files or globs")
    add("--loss-on", choices=("completions", "all"), default="completions", help="what is learnt of JSON lines")
    add("--batch", type=positive, default=8, help="sequences in a micro-batch")
    add("--seq-len", type=positive, default=128, help="tokens in a sequence")
    add("--grad-accum", type=positive, default=1, help="micro-batches in a step")
    add("--steps", type=whole, default=1500)
    add("--lr", type=real, default=5e-5, help="highest learning rate")
    add("--min-lr", type=real, default=0.0, help="learning rate at the schedule's end")
    add("--warmup", type=whole, default=30, help="steps of linear warm-up")
    add("--schedule", choices=("cosine", "linear", "constant", "wsd"), default="cosine")
    add("--weight-decay", type=real, default=0.1, help="of matrices only")
    add("--optimizer", type=adamw, action="append", default=[],
        help="AdamW's coefficients, as the trainer takes them: beta1=0.9,beta2=0.95,eps=1e-8")
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
    for key, value in COEFFICIENTS.items():
        for chosen in options.optimizer:
            value = chosen.get(key, value)
        setattr(options, key, value)
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
