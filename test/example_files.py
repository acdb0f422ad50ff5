"""Shared by tests: files of examples to fine-tune on, one JSON object a line, and a tokenizer for them."""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer_runs import ROOT


def says(role, content):
    return {"role": role, "content": content}


def lines_of(examples):
    return [json.dumps(example) for example in examples]


VOCAB = 380


def words(choose, count):
    return " ".join(choose.choice(WORDS) for _ in range(count))


WORDS = (ROOT / "dev" / "data" / "tinyshakespeare.txt").read_text().split()[:400]


def write_examples(path, count, seed=0, most=4):
    """Writes all kinds of lines, most of them short, and one that is longer than a sequence."""
    choose, examples = random.Random(seed), []
    for i in range(count):
        a, b, c = (words(choose, choose.randint(1, most)) for _ in range(3))
        examples.append([{"text": a}, {"prompt": a, "completion": " " + b},
                         {"messages": [says("user", a), says("assistant", b)]},
                         {"messages": [says("system", "Go."), says("user", a), says("assistant", b), says("user", c),
                                       says("assistant", a)], "id": i}][choose.randrange(4)])
    examples[count // 3] = {"text": words(choose, 80)}
    examples[count // 2] = {"prompt": words(choose, 1), "completion": words(choose, 80)}
    path.write_text("\n".join(lines_of(examples)) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator([" ".join(WORDS)], trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer
