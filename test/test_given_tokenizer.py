"""--tokenizer: a new model has the tokenizer that is given, in training, in its saves, and wherever a save is used."""

import json
import re
import shutil

import numpy as np
import pytest
import sentencepiece
import torch
from reference_runs import LOSS_BOUND, open_with_transformers
from tokenizers import ByteLevelBPETokenizer
from trainer_runs import read_log
from transformers import AutoTokenizer, PreTrainedTokenizerFast

USUALLY = "fp32"  # see conftest.py
END = "<|endoftext|>"
TEXT = "To be, or not to be: that is the question.\nÇa coûte 3 €, 日本語 🙂\r\n\ttabs  and  spaces\n" * 30
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + END + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
RUN = "--batch", 2, "--seq-len", 24, "--sample", "tokens=0"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The same vocabulary in each kind of file, and a tokenizer.model."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "text.txt").write_text(TEXT, newline="")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=300, special_tokens=[END], show_progress=False)
    for name in ("files", "json", "chats", "model"):
        (folder / name).mkdir()
    bpe.save_model(str(folder / "files"))
    (folder / "files/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": END}))
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END)
    fast.save_pretrained(folder / "json")
    fast.chat_template = CHAT
    fast.save_pretrained(folder / "chats")
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT.split("\n")), model_prefix=str(folder / "model/tokenizer"), vocab_size=320,
                                             model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
                                             remove_extra_whitespaces=False, minloglevel=2)
    (folder / "model/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>",
                                                                     "eos_token": "</s>"}))
    return folder


def begun(train, work, out, tokenizer, *options):
    """A new model's folder, as it is before its training."""
    train(*options, "--tokenizer", tokenizer, "--steps", 0, "--out", out, cwd=work)
    return work / out


@pytest.mark.parametrize("model, kind", [("d1", "json"), ("d1", "json/tokenizer.json"), ("d1", "files"), ("d1", "files/vocab.json"), ("llama:d1", "model"),
                                         ("llama:d1", "model/tokenizer.model"), ("qwen3:d1", "vocabulary.gguf")])
def test_tokens_and_loss_are_those_of_transformers(train, work, tmp_path, model, kind):
    """Of the folder that a new model is saved as, which has the tokenizer's size and ends. It trains on as many tokens."""
    if kind.endswith("gguf"):
        train("--model", "d1", "--tokenizer", "json", "--steps", 0, "--export", kind, cwd=work)
    given = AutoTokenizer.from_pretrained(work / ("json" if kind == "vocabulary.gguf" else kind.split("/")[0]))
    folder = begun(train, work, tmp_path / "begun", kind, "--model", model)
    config, saved = json.loads((folder / "config.json").read_text()), AutoTokenizer.from_pretrained(folder)
    assert config["vocab_size"] == len(given) == len(saved)
    assert config["eos_token_id"] == given.eos_token_id
    tokens = given(TEXT, add_special_tokens=False)["input_ids"]
    assert saved(TEXT, add_special_tokens=False)["input_ids"] == tokens
    tokens = [given.bos_token_id if given.bos_token_id is not None else given.eos_token_id, *tokens]
    ran = train("--model", model, "--tokenizer", kind, "--data", "text.txt", "--val-data", "text.txt", "--steps", 1, "--lr", 0, *RUN, "--log",
                tmp_path / "log", cwd=work).stdout.decode()
    assert f"data: {len(tokens)} tokens" in ran and f"vocabulary {len(given)}, " in ran and "read as bytes" not in ran
    windows = torch.tensor(np.array([tokens[i:i + 25] for i in range(0, len(tokens) - 24, 24)]))
    with torch.no_grad():
        logits = open_with_transformers(folder).float()(windows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    said = train("--model", model, "--tokenizer", kind, "--val-data", "text.txt", "--steps", 0, *RUN, "--eval-batches", 1000, cwd=work).stdout.decode()
    assert float(re.search(r"validation loss ([\d.]+)", said)[1]) == pytest.approx(expected, abs=LOSS_BOUND[train.precision])


def test_a_save_has_it(train, work, tmp_path):
    """What began with --tokenizer is resumed, prompted, exported and trained further without it, and although it is gone."""
    shutil.copytree(work / "json", tmp_path / "given")
    command = ("--model", "d1", "--data", work / "text.txt", *RUN, "--tokenizer", "given", "--log", "log", "--out", "out")
    train(*command, "--steps", 4, cwd=tmp_path)
    first = [line["loss"] for line in read_log(tmp_path / "log") if "loss" in line]
    shutil.rmtree(tmp_path / "out")
    train(*command, "--steps", 4, "--save-every", 2, "--keep", 9, cwd=tmp_path)
    (tmp_path / "given").rename(tmp_path / "moved")
    for resume in (("--resume", "out"), (*command, "--resume", "auto", "--steps", 6)):
        assert b"text is read as bytes" not in train(*resume, *(() if "auto" in resume else ("--steps", 5)), cwd=tmp_path).stdout
    assert [line["loss"] for line in read_log(tmp_path / "log") if "loss" in line][:4] == first
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out/latest")("To be", add_special_tokens=False)["input_ids"]
    assert tokens == AutoTokenizer.from_pretrained(tmp_path / "moved")("To be", add_special_tokens=False)["input_ids"]
    assert train("--resume", "out", "--steps", 0, "--prompt", "To be", "--sample", "tokens=4", cwd=tmp_path).stdout.startswith(b"To be")
    train("--model", "out", "--steps", 0, "--export", "out.gguf", cwd=tmp_path)
    assert b"To be" in train("--model", "out.gguf", "--prompt", "To be", "--sample", "tokens=4", cwd=tmp_path).stdout
    error = train("--resume", "out", "--tokenizer", work / "files", code=2, cwd=tmp_path).stderr.decode()
    assert error == f"train: --tokenizer {work}/files: --resume out goes on with --tokenizer given: leave --tokenizer out\n"


def test_a_plan_knows_it(train, work, tmp_path):
    options = ("--model", "d12", "--data", work / "text.txt", "--batch", 1, "--seq-len", 24)
    with_it, without = (train.plan(*options, *more) for more in (("--tokenizer", work / "json"), ()))
    assert with_it["vocabulary"] == 300 and without["vocabulary"] == 256
    # The embedding has 44 rows more. A model of bytes has as many positions as its sequences, the other 1024.
    assert with_it["parameters"] - without["parameters"] == 768 * (300 - 256 + 1024 - 24)
    says = b"text is read as bytes: --tokenizer gives a new model tokens, such as GPT-2's 50257\n"
    for more, is_said in (((), 1), (("--tokenizer", work / "json"), 0)):
        assert train(*options, "--plan", *more).stdout.count(says) == is_said
    ran = train("--model", "d1", "--data", work / "text.txt", "--steps", 1, *RUN).stdout
    assert ran.count(says) == 1


def test_chats_of_a_new_model(train, work, tmp_path):
    """They are written by the chat template beside the tokenizer, which the save has too."""
    chat = [{"role": "user", "content": "To be?"}, {"role": "assistant", "content": "or not"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    given = AutoTokenizer.from_pretrained(work / "chats")
    tokens = given.apply_chat_template(chat, return_dict=False)
    options = ("--model", "d1", "--tokenizer", work / "chats", "--data", "chats.jsonl")
    shown = train(*options, "--show-example", 1, cwd=tmp_path).stdout.decode()
    assert f": {len(tokens)} tokens; " in shown and f"<|user|>To be?{END}<|assistant|>⟦or not{END}⟧" in shown
    train(*options, "--steps", 2, "--batch", 1, "--seq-len", 40, "--sample", "tokens=0", "--out", "out", cwd=tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT
    # A tokenizer without a chat template, and without the special tokens of a chat format.
    error = train("--model", "d1", "--tokenizer", work / "json", "--data", "chats.jsonl", "--steps", 1, code=2, cwd=tmp_path).stderr.decode()
    assert "chat" in error and error.count("\n") == 1, error


def test_mistakes(train, work, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "x.gguf").write_text("{}")
    for options, says in ((("--model", work / "json", "--tokenizer", work / "files"), f"--tokenizer {work}/files is for a new model, such as --model d12"),
                          (("--tokenizer", work / "none"), f"--tokenizer {work}/none: neither a GGUF file, nor a folder with tokenizer.json"),
                          (("--tokenizer", "x.json"), "--tokenizer x.json: neither a GGUF file, nor a folder"),
                          (("--tokenizer", work / "files/merges.txt"), "nor the first of these files in a folder"),
                          (("--tokenizer", "x.gguf"), "x.gguf"), (("--tokenizer", ""), "--tokenizer is empty where DIR|FILE|ORG/NAME is needed"),
                          (("--tokenizer", work / "json", "--log", work / "json/tokenizer.json"), "is a part of")):
        error = train(*options, "--data", work / "text.txt", "--steps", 1, *RUN, code=2, cwd=tmp_path).stderr.decode()
        assert says in error and error.count("\n") == 1, error
