"""The GGUF of Gemma 3 270M compared with transformers, which reads the same file: losses, continuations, a chat's tokens,
and thirty steps of LoRA.

Takes some minutes on a CPU and needs data/gemma3.gguf, which dev/get_gemma3.sh gets, so it is run by `make test-gemma3` and
not by `make test`, with the trainer in fp32.
"""

import json

import numpy as np
import peft
import pytest
import torch
import transformers
from known_tokenizers import encode_all
from reference_runs import greedy, open_with_transformers, run_reference
from trainer_runs import ROOT, by_key, formats_probe, read_log, sampled

FILE = ROOT / "data" / "gemma3.gguf"
SEQ_LEN, BATCH, MINUTES = 128, 2, 60
COLOURS = "red blue green amber black white brown pink grey gold".split()
THINGS = "stone river lamp horse cloud wheel bread tower glass".split()
# The third is longer than a window, of 512 tokens, and says in its second half what depends on its first.
TEXTS = ("The capital of France is Paris.", "Water boils at 100 degrees Celsius at sea level.\nIt freezes at 0 degrees.",
         "\n".join(f"Line {i}: the {COLOURS[7 * i % 10]} {THINGS[5 * i % 9]} stands near the {COLOURS[3 * i % 10]} {THINGS[2 * i % 9]}."
                   for i in range(1, 49)))
PROMPTS = "The capital of France is", "def fibonacci(n):\n    "


@pytest.fixture(scope="session")
def folder():
    """build/gemma3, the dequantized weights in fp32, which is made if it does not exist."""
    if not FILE.exists():
        pytest.fail(f"there is no {FILE}: dev/get_gemma3.sh gets it")
    path = ROOT / "build" / "gemma3"
    if not (path / "tokenizer_config.json").exists():
        source = {"pretrained_model_name_or_path": FILE.parent, "gguf_file": FILE.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        model.hf_quantizer = None  # the weights are dequantized, but transformers would not save a model that has one
        del model.config.quantization_config
        model.save_pretrained(path)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def write_wide_shard(path, tokens):
    """A shard of tokens of four bytes, for the vocabulary is of 262144."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240801, 7, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype=np.uint32).tobytes())
    return path


def loss_of(train, model, tokens, work):
    """The mean loss of a sequence."""
    shard = write_wide_shard(work / "sequence.bin", tokens)
    train("--model", model, "--val-data", shard, "--batch", 1, "--seq-len", len(tokens) - 1, "--eval-batches", 1, "--steps", 0,
          "--sample", "tokens=0", "--log", work / "log", minutes=MINUTES)
    [loss] = by_key(read_log(work / "log"), "val_loss").values()
    return loss


@torch.no_grad()
def expected_loss(model, tokens):
    tokens = torch.tensor(tokens)
    return torch.nn.functional.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:]).item()


def test_losses(train, folder, tokenizer, tmp_path):
    """Of the file as it is, in 4 to 8 bits, beside the dequantized weights."""
    model = open_with_transformers(folder).float()
    for text in TEXTS:
        tokens = tokenizer(text)["input_ids"]
        got, expected = loss_of(train, FILE, tokens, tmp_path), expected_loss(model, tokens)
        print(f"mean loss of {len(tokens)} tokens: {got:.6f}, transformers {expected:.6f}")
        assert got == pytest.approx(expected, rel=0, abs=1e-4 if train.precision == "fp32" else 5e-2)


def test_tokens(tokenizer, tmp_path):
    """Also of a conversation in Gemma's format, for which the file has no template."""
    for text in (*TEXTS, *PROMPTS):
        tokens = np.frombuffer(formats_probe("tokens", FILE, data=text.encode()), np.int32)
        assert tokens.tolist() == tokenizer(text)["input_ids"]
    line = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    formats_probe("tokenizer", FILE, tmp_path)
    [got] = encode_all(tmp_path, [json.dumps(line)], "auto", command="examples")
    got = np.array(got, dtype=np.int32)
    assert (got & 0x7fffffff).tolist() == [2, 105, 2364, 107, 10979, 106, 107, 105, 4368, 107, 9259, 106, 107]
    assert (got[got >= 0] & 0x7fffffff).tolist() == [9259, 106]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy(train_fp32, folder, tokenizer, prompt, tmp_path):
    """40 tokens, or up to the end of the text."""
    expected = greedy(folder, tokenizer(prompt)["input_ids"], 40)
    if 1 in expected:  # <eos>
        expected = expected[:expected.index(1)]
    got = sampled(train_fp32, "--model", FILE, "--steps", 0, "--prompt", prompt, "--sample", "tokens=40", cwd=tmp_path)
    assert got.decode() == prompt + tokenizer.decode(expected)


def test_lora(train, folder, tokenizer, tmp_path):
    """Thirty steps on the base in 4 to 8 bits, within 1e-3 of PEFT's on the dequantized weights at each. An adapter merged into
    a GGUF in fp32 has the same loss. At a rate of 1e-3 rounding makes more than 1e-3 of difference."""
    text = (ROOT / "dev" / "data" / "tinyshakespeare.txt").read_text()
    training, held_out = (tokenizer(part)["input_ids"] for part in (text[:60000], text[-12000:]))
    shards = write_wide_shard(tmp_path / "train.bin", training), write_wide_shard(tmp_path / "val.bin", held_out)
    config = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)
    peft.get_peft_model(open_with_transformers(folder).float(), config).save_pretrained(tmp_path / "adapter")
    data = ("--adapter", tmp_path / "adapter", "--data", shards[0], "--val-data", shards[1], "--batch", BATCH, "--seq-len", SEQ_LEN,
            "--steps", 30, "--warmup", 5, "--lr", 2e-4, "--eval-batches", 4)
    train("--model", FILE, *data, "--log", tmp_path / "log", "--sample", "tokens=0", "--out", tmp_path / "out", minutes=MINUTES)
    expected, got = run_reference("--model", folder, *data), read_log(tmp_path / "log")
    for key in ("loss", "val_loss"):
        ours, theirs = by_key(got, key), by_key(expected, key)
        print(key, *(f"{loss:.3f}" for loss in ours.values()), "differs by at most", max(abs(ours[step] - theirs[step]) for step in theirs))
        assert ours == pytest.approx(theirs, rel=0, abs=1e-3 if train.precision == "fp32" else 5e-2)
    losses = list(by_key(got, "loss").values())
    assert len(losses) == 30 and np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1

    tokens, exported = held_out[:SEQ_LEN + 1], tmp_path / "exported.gguf"
    before = loss_of(train, tmp_path / "out", tokens, tmp_path)
    train("--model", tmp_path / "out", "--steps", 0, "--export", f"{exported},type=f32", minutes=MINUTES)
    after = loss_of(train, exported, tokens, tmp_path)
    print(f"trained: {before:.6f}, exported: {after:.6f}")
    assert after == pytest.approx(before, rel=0, abs=1e-4 if train.precision == "fp32" else 5e-2)
