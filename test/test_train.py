"""Training: gradients, steps and files compared with PyTorch, and that runs repeat to the bit."""

import json
import math
import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from model_files import starting_at_0
from reference_runs import GRADIENT_BOUND, LOSS_BOUND, greedy, open_with_transformers, run_reference
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers, processors
from trainer_runs import (ROOT, by_key, figures, listing, make, random_tokens, read_log, running, sampled, saved_bytes,
                          wait_for_line, write_shard, write_text)
from transformers import GPT2Tokenizer

SMALL = ("--layers", 2, "--heads", 3, "--channels", 48, "--positions", 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model and data of most tests: run with cwd=folder, --model model --data text. No test writes here."""
    path = tmp_path_factory.mktemp("given")
    make(path / "model", *SMALL)
    write_text(path / "text")
    return path


@pytest.fixture
def work(folder, tmp_path):
    """A copy of them in a folder that the test may change."""
    for name in ("model", "text"):
        (tmp_path / name).symlink_to(folder / name)
    return tmp_path


RUN = ("--model", "model", "--data", "text", "--batch", 2, "--seq-len", 24, "--lr", 1e-3)
DATA = (*RUN, "--sample", "tokens=0")


# ---- against PyTorch


@pytest.mark.parametrize("layers, heads, channels, vocab, batch, seq_len, accumulate", [
    (2, 3, 72, 300, 3, 37, 2),     # nothing is a multiple of anything
    (1, 1, 8, 129, 1, 1, 1),       # one token
    (3, 2, 256, 256, 2, 130, 1),   # heads of 128, more than one tile of keys
    (2, 5, 80, 1000, 5, 64, 1),    # heads of 16
])
def test_gradients(train, tmp_path, layers, heads, channels, vocab, batch, seq_len, accumulate):
    """Gradients of every tensor. After a first step with beta1 0 they are in AdamW's m."""
    make(tmp_path / "model", "--layers", layers, "--heads", heads, "--channels", channels, "--vocab", vocab,
         "--positions", seq_len + 3, "--dtype", "bf16")  # weights that both precisions can store
    write_shard(tmp_path / "data.bin", random_tokens(vocab, 2000))
    data = ("--model", tmp_path / "model", "--data", tmp_path / "data.bin", "--batch", batch, "--seq-len", seq_len,
            "--grad-accum", accumulate, "--steps", 1)
    run_reference(*data, "--dump-gradients", tmp_path / "expected")
    train(*data, "--optimizer", "beta1=0", "--clip", 0, "--sample", "tokens=0", "--out", tmp_path / "out")
    expected, state = load_file(tmp_path / "expected"), load_file(tmp_path / "out" / "trainer_state.safetensors")
    gradients = {name.removeprefix("m."): tensor for name, tensor in state.items() if name.startswith("m.")}
    expected = {name.removeprefix("transformer."): gradient for name, gradient in expected.items()}
    assert gradients.keys() == expected.keys() and len(expected) == 12 * layers + 4
    for name, gradient in expected.items():
        assert gradients[name].shape == gradient.shape and gradient.norm() > 1e-6
        assert (gradients[name] - gradient).norm() <= GRADIENT_BOUND[train.precision] * gradient.norm(), name


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_twenty_steps(train, work, schedule):
    """Loss, norm and rate of each step, and validations between them, compared with dev/reference.py in
    fp32."""
    options = ("--model", work / "model", "--data", work / "text", "--batch", 2, "--seq-len", 24, "--grad-accum", 3,
               "--steps", 20, "--lr", 3e-3, "--min-lr", 3e-4, "--warmup", 4, "--schedule", schedule, "--clip", 2,
               "--weight-decay", 0.2, "--seed", 5, "--eval-every", 8,
               "--eval-batches", 3)
    expected = run_reference(*options, "--optimizer", "beta1=0.8,beta2=0.97,eps=1e-6")
    train(*options, "--optimizer", "beta1=0.8,beta2=0.97,eps=1e-6", "--log", work / "log", "--sample", "tokens=0")
    log = read_log(work / "log")
    assert [list(line) for line in log] == [list(line) for line in expected]
    norms = by_key(expected, "grad_norm").values()
    assert min(norms) < 2 < max(norms) and len(norms) == 20  # some steps are clipped
    bound = LOSS_BOUND[train.precision]
    assert by_key(log, "lr") == pytest.approx(by_key(expected, "lr"), rel=1e-12)
    assert by_key(log, "loss") == pytest.approx(by_key(expected, "loss"), rel=0, abs=bound)
    assert by_key(log, "val_loss") == pytest.approx(by_key(expected, "val_loss"), rel=0, abs=bound)
    assert by_key(log, "grad_norm") == pytest.approx(by_key(expected, "grad_norm"), rel=bound)


@pytest.mark.usually("fp32")
def test_order_of_shards(train, tmp_path):
    """Each step reads one sequence, which its loss identifies, over more than two epochs."""
    make(tmp_path / "model", *SMALL, "--vocab", 300)
    for i, count in enumerate((17, 100, 250)):
        write_shard(tmp_path / f"shard_{i}.bin", np.random.default_rng(i).integers(0, 300, count))
    options = ("--model", tmp_path / "model", "--data", tmp_path / "shard_*.bin", "--batch", 1, "--seq-len", 16,
               "--steps", 50, "--lr", 0, "--seed", 3)
    train(*options, "--log", tmp_path / "log", "--sample", "tokens=0")
    got, expected = by_key(read_log(tmp_path / "log"), "loss"), by_key(run_reference(*options), "loss")
    assert got == pytest.approx(expected, rel=0, abs=LOSS_BOUND[train.precision])
    ordered = sorted(expected[step] for step in range(1, 1 + 5 + 14 + 1))  # those of the first epoch
    assert np.median(np.diff(ordered)) > 2 * LOSS_BOUND[train.precision]


def test_transformers_opens_a_save(train, work):
    """No tensor is missing or unexpected, the precision is that of the training, and the loss on the same
    tokens is equal."""
    (work / "held_out").write_bytes((ROOT / "test" / "test_train.py").read_bytes()[:500])
    train(*DATA, "--steps", 5, "--val-data", "held_out", "--out", "out", "--log", "log", cwd=work)
    model = open_with_transformers(work / "out")
    assert {p.dtype for p in model.parameters()} == {torch.float32 if train.precision == "fp32" else torch.bfloat16}
    tokens = torch.tensor(list((work / "held_out").read_bytes()))
    windows = torch.stack([tokens[start:start + 25] for start in range(0, len(tokens) - 24, 24)])[:8 * 2]
    with torch.no_grad():
        logits = model.float()(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    [validated] = by_key(read_log(work / "log"), "val_loss").values()
    assert validated == pytest.approx(loss, rel=0, abs=1e-5 if train.precision == "fp32" else 1e-2)


def test_greedy_bytes(train_fp32, folder):
    """Up to the model's last position, each token with the cache."""
    prompt = b"The end, "
    count = 64 - len(prompt)
    got = sampled(train_fp32, "--model", "model", "--steps", 0, "--prompt", prompt.decode(), "--sample", f"tokens={count}",
                  cwd=folder)
    assert got == prompt + bytes(greedy(folder / "model", list(prompt), count))


def test_a_long_sample_slides(train_fp32, folder):
    """After the model's last position, it continues from the latest half."""
    prompt = list(b"The end, ")
    got = list(sampled(train_fp32, "--model", "model", "--steps", 0, "--prompt", "The end, ", "--sample", "tokens=110",
                       cwd=folder))
    assert len(got) == len(prompt) + 110
    assert got[64:96] == greedy(folder / "model", got[32:64], 32)
    assert got[96:] == greedy(folder / "model", got[64:96], len(got) - 96)


def test_greedy_tokens(train_fp32, tmp_path):
    """Without a tokenizer, tokens are printed as numbers, after token 0; here after a step that changes
    nothing."""
    make(tmp_path / "made", *SMALL, "--vocab", 301)
    model = starting_at_0(tmp_path / "made", tmp_path / "model")
    write_shard(tmp_path / "data.bin", random_tokens(301, 200))
    got = sampled(train_fp32, "--model", "model", "--data", "data.bin", "--batch", 1, "--seq-len", 64, "--steps", 1,
                  "--lr", 0, "--sample", "tokens=63", cwd=tmp_path)
    assert list(map(int, got.split())) == greedy(model, [0], 63)


def test_greedy_with_tokenizer(train_fp32, folder, tmp_path):
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(folder / "text")], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    make(tmp_path / "model", *SMALL, "--vocab", len(bpe.get_vocab()))
    bpe.save_model(str(tmp_path / "model"))
    tokenizer = GPT2Tokenizer.from_pretrained(tmp_path / "model")
    prompt = "def write_text(path):\n    return it's 12 numbers"
    tokens = tokenizer.encode(prompt)
    assert len(tokens) < len(prompt) / 1.5
    expected = greedy(tmp_path / "model", tokens, 20)
    end = json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"]
    if end in expected:  # the trainer stops there
        expected = expected[:expected.index(end)]
    got = sampled(train_fp32, "--model", "model", "--steps", 0, "--prompt", prompt, "--sample", "tokens=20",
                  cwd=tmp_path)
    assert got.decode(errors="replace") == prompt + tokenizer.decode(expected, clean_up_tokenization_spaces=False)


@pytest.fixture
def characters(folder, tmp_path):
    """A model with a tokenizer.json of SentencePiece's kind: tokens of characters and of bytes, <s> before a
    text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    alphabet = ["</s>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz_()"]
    pairs = [("▁", letter) for letter in "abcdefghijklmnopqrstuvwxyz"] + [("i", "n"), ("e", "r")]
    whole = json.loads(tokenizer.to_str())
    whole["model"]["vocab"] = {token: i for i, token in enumerate(alphabet + ["".join(pair) for pair in pairs])}
    whole["model"]["merges"] = pairs
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.add_special_tokens(["</s>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    make(tmp_path / "model", *SMALL, "--vocab", tokenizer.get_vocab_size())
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    # Without a class, transformers reads it as GPT-2's, like the model.
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return tokenizer


def spelt(tokenizer, tokens):
    """The bytes of tokens in the middle of a text, up to </s>."""
    spellings = [tokenizer.id_to_token(token) for token in (tokens[:tokens.index(0)] if 0 in tokens else tokens)]
    return b"".join(bytes.fromhex(spelling[3:5]) if spelling.startswith("<0x") else spelling.replace("▁", " ").encode()
                    for spelling in spellings)


def test_greedy_with_characters(train_fp32, characters, tmp_path):
    prompt = "def write_text(path) 日"
    tokens = characters.encode(prompt).ids
    assert tokens[0] == 1
    got = sampled(train_fp32, "--model", "model", "--steps", 0, "--prompt", prompt, "--sample", "tokens=30",
                  cwd=tmp_path)
    assert got == prompt.encode() + spelt(characters, greedy(tmp_path / "model", tokens, 30))


def test_a_sample_without_a_prompt_begins_a_text(train_fp32, characters, tmp_path):
    """It begins after <s>. The space that is put before a text is removed; the weights make tokens " x"
    likely."""
    write_shard(tmp_path / "data.bin", np.tile(np.arange(289, 315), 20))
    data = ("--data", "data.bin", "--batch", 1, "--seq-len", 24)
    train_fp32("--model", "model", *data, "--steps", 20, "--lr", 0.02, "--sample", "tokens=0", "--out", "out",
               cwd=tmp_path)
    got = sampled(train_fp32, "--model", "out", *data, "--steps", 1, "--lr", 0, "--sample", "tokens=20", cwd=tmp_path)
    expected = spelt(characters, greedy(tmp_path / "out", [1], 20))
    assert expected.startswith(b" ") and got == expected[1:]


def test_saves_take_the_tokenizer_beside_the_shards(train_fp32, folder, tmp_path):
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(folder / "text")], vocab_size=300, show_progress=False)
    bpe.save_model(str(tmp_path))
    write_shard(tmp_path / "shard.bin", random_tokens(300, 100))
    train_fp32("--model", "d1", "--data", "shard.bin", "--batch", 1, "--seq-len", 16, "--steps", 1, "--sample", "tokens=0",
               "--out", "out", cwd=tmp_path)
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "out" / "latest" / name).read_bytes() == (tmp_path / name).read_bytes()
    text = sampled(train_fp32, "--model", "out", "--steps", 0, "--prompt", "def", "--sample", "tokens=2", cwd=tmp_path)
    assert text.startswith(b"def")


# ---- the same numbers


def trained(train, folder, name, *options):
    """The figures and the saved files of six steps, in a folder of this name."""
    train(*DATA, "--steps", 6, "--eval-every", 2, "--out", name, "--log", f"{name}.log", *options, cwd=folder)
    return figures(read_log(folder / f"{name}.log")), saved_bytes(folder / name)


def test_equal_runs_are_equal(train, work):
    assert trained(train, work, "a") == trained(train, work, "b")
    assert trained(train, work, "a")[0] != trained(train, work, "c", "--seed", 1)[0]


def test_recompute_changes_nothing(train, work):
    runs = [trained(train, work, level, "--recompute", level, "--grad-accum", 2)
            for level in ("none", "gelu", "norm")]
    assert runs[0] == runs[1] == runs[2]


def test_threads_change_nothing(train, work):
    assert trained(train, work, "one", "--threads", 1) == trained(train, work, "two", "--threads", 2)


def test_searched_algorithms_give_the_same_bits(train, work):
    """The first run measures and writes the file; the others do not change it."""
    if train.device == "cpu":
        pytest.skip("oneDNN chooses for itself")
    options = ("--advanced", "algorithms=found.json", "--grad-accum", 2)
    first = trained(train, work, "a", *options)
    found = (work / "found.json").read_bytes()
    products = [set(of_gpu) for of_gpu in json.loads(found)["machines"].values()]
    assert len(products) == 1 and any(" bias_gradient" in name for name in products[0])
    assert first == trained(train, work, "b", *options) == trained(train, work, "c", *options, "--recompute", "none")
    assert (work / "found.json").read_bytes() == found


# ---- saves


@pytest.mark.quick
@pytest.mark.parametrize("through", ["out", "out/step-00000005"])
def test_resume_is_the_unbroken_run(train, work, through):
    """With no option but --resume, and after the folder that the run started from was removed."""
    train(*DATA, "--steps", 12, "--grad-accum", 2, "--eval-every", 4, "--save-every", 5, "--keep", 0, "--out", "out",
          "--log", "log", cwd=work)
    whole, files = figures(read_log(work / "log")), saved_bytes(work / "out" / "step-00000012")
    for step in (10, 12):
        shutil.rmtree(work / "out" / f"step-{step:08}")
    (work / "out" / "latest").unlink()
    (work / "out" / "latest").symlink_to("step-00000005")
    (work / "log").unlink()
    (work / "model").unlink()
    text = train("--resume", through, cwd=work).stdout.decode()
    assert f"resuming {through} at step 5\n" in text
    assert figures(read_log(work / "log")) == whole[-len(read_log(work / "log")):]
    assert list(by_key(read_log(work / "log"), "loss")) == list(range(6, 13))
    assert saved_bytes(work / "out" / "step-00000012") == saved_bytes(work / "out") == files
    state = json.loads((work / "out" / "trainer_state.json").read_text())
    assert (state["step"], state["sequences"], state["precision"]) == (12, 12 * 2 * 2, train.precision)


@pytest.mark.usually("fp32")
def test_options_given_to_a_resume_hold(train, work):
    train(*DATA, "--steps", 4, "--schedule", "constant", "--lr", 1e-3, "--warmup", 10, "--out", "out", cwd=work)
    train("--resume", "out", "--steps", 6, "--lr", 2e-3, "--log", "log", cwd=work)
    # Still in the saved warm-up.
    assert by_key(read_log(work / "log"), "lr") == {5: 2e-3 * 5 / 10, 6: 2e-3 * 6 / 10}


def test_a_cpu_resumes_what_had_a_gpus_products(train, work):
    if train.device != "cpu":
        pytest.skip("a GPU takes them")
    train(*DATA, "--steps", 2, "--out", "out", cwd=work)
    state = json.loads((work / "out" / "trainer_state.json").read_text())
    state["options"] |= {"--advanced.algorithms": ["found.json"], "--advanced.tf32": ["on"]}
    (work / "out" / "trainer_state.json").write_text(json.dumps(state))
    train("--resume", "out", "--steps", 3, "--log", "log", cwd=work)
    assert len(read_log(work / "log")) == 2 and not (work / "found.json").exists()


@pytest.mark.usually("bf16")
def test_a_moved_run_goes_on_where_it_is(train, work):
    train(*DATA, "--steps", 2, "--schedule", "constant", "--out", "out", cwd=work)
    before = saved_bytes(work / "out")
    shutil.copytree(work / "out", work / "else" / "moved", symlinks=True)
    for save, steps in (("else/moved", 3), ("else/moved/step-00000003", 4)):
        train("--resume", save, "--steps", steps, cwd=work)
    assert os.readlink(work / "else" / "moved" / "latest") == "step-00000004"
    assert saved_bytes(work / "out") == before


def test_a_save_generates_whatever_its_run_saved(train, work):
    train(*DATA, "--steps", 2, "--save-every", 1, "--out", "out", cwd=work)
    text = train("--resume", "out", "--steps", 0, "--prompt", "a", "--sample", "tokens=4", cwd=work).stdout
    assert text.startswith(b"a") and len(text) == 1 + 4 + 1


@pytest.mark.usually("bf16")
def test_a_log_beside_the_saves(train, work):
    train(*DATA, "--steps", 1, "--out", "runs/first", "--log", "runs/log", cwd=work)
    train(*DATA, "--steps", 1, "--out", "second", "--log", "second/log", cwd=work)
    assert len(read_log(work / "runs" / "log")) == len(read_log(work / "second" / "log")) == 2


@pytest.mark.usually("fp32")
def test_saves_keep_what_begins_and_ends_a_text(train, work):
    config = json.loads((work / "model" / "config.json").read_text())
    (work / "model" / "config.json").write_text(json.dumps(config | {"bos_token_id": 7, "eos_token_id": 9}))
    train(*DATA, "--steps", 1, "--out", "out", cwd=work)
    for name in ("config.json", "generation_config.json"):
        saved = json.loads((work / "out" / name).read_text())
        assert (saved["bos_token_id"], saved["eos_token_id"]) == (7, 9)


@pytest.mark.usually("bf16")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt(train, work, sent):
    """A run that is told to stop drops the step, saves and says so. Resumed, it equals the uninterrupted
    run."""
    options = (*DATA, "--schedule", "constant", "--grad-accum", 8, "--eval-every", 1, "--eval-batches", 1)
    with running(train, *options, "--steps", 100000, "--out", "out", "--log", "log", cwd=work) as process:
        wait_for_line(process, rb"^step +3/")
        process.send_signal(sent)
        text = process.stdout.read().decode()
        assert process.wait(timeout=60) == 128 + sent
    last = int(re.search(r"^interrupted after step (\d+)$", text, re.MULTILINE)[1])
    assert f"saved step {last} in out\n" in text and last >= 3
    assert f"step {last:>5}/100000 " in text or last == 3  # the last line may already have been read above
    assert list(by_key(read_log(work / "log"), "loss")) == list(range(1, last + 1))
    train("--resume", "out", "--steps", last + 3, cwd=work)
    train(*options, "--steps", last + 3, "--out", "whole", "--log", "whole.log", cwd=work)
    resumed, whole = figures(read_log(work / "log")), figures(read_log(work / "whole.log"))
    assert [line for line in resumed if "loss" in line] == [line for line in whole if "loss" in line]
    logs = read_log(work / "log"), read_log(work / "whole.log")
    assert by_key(logs[0], "val_loss") == by_key(logs[1], "val_loss")
    assert saved_bytes(work / "out") == saved_bytes(work / "whole")


@pytest.mark.usually("fp32")
def test_interrupted_sample(train, work):
    with running(train, "--model", "model", "--steps", 0, "--prompt", "a", "--sample", f"tokens={10**8}", cwd=work) as process:
        assert process.stdout.read(2)[:1] == b"a"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143


@pytest.mark.usually("bf16")
def test_another_runs_saves_stay(train, work):
    """Whatever --keep says, if a run starts in their folder or continues there from another one."""
    options = (*DATA, "--schedule", "constant", "--save-every", 1)
    train(*options, "--steps", 9, "--keep", 2, "--out", "out", cwd=work)
    options += ("--keep", 1)
    train(*options, "--steps", 2, "--out", "elsewhere", cwd=work)
    theirs = {name: saved_bytes(work / "out" / name) for name in ("step-00000008", "step-00000009")}

    def saves():
        return sorted(name for name in os.listdir(work / "out") if name.startswith("step-"))

    for arguments in (options, ("--resume", "elsewhere")):
        result = train(*arguments, "--steps", 4, "--out", "out", cwd=work)
        assert b"out holds saves of another run, up to step 9: they stay" in result.stderr
        assert {name: saved_bytes(work / "out" / name) for name in theirs} == theirs
        assert os.readlink(work / "out" / "latest") == "step-00000004"
        assert saves() == ["step-00000004", *theirs]
    train("--resume", "out", "--steps", 5, cwd=work)
    assert saves() == ["step-00000005", *theirs]


def test_a_new_run_in_a_used_folder_says_what_becomes_of_its_best_save(train_fp32, work):
    options = (*DATA, "--schedule", "constant", "--steps", 2, "--out", "out")
    train_fp32(*options, "--keep-best", "--eval-every", 1, cwd=work)
    assert (work / "out/best").is_symlink()
    assert b"and so will `best`\n" in train_fp32(*options, "--keep-best", "--eval-every", 1, cwd=work).stderr
    assert b", and the link `best` will be removed\n" in train_fp32(*options, "--steps", 3, cwd=work).stderr
    assert not (work / "out/best").is_symlink()


def test_a_killed_check_leaves_nothing_for_ever(train_fp32, work):
    """What a run leaves that is killed while it checks --out, the next one removes, and nothing else."""
    probe = work / "out/.train-probe"
    probe.parent.mkdir()
    for make in (lambda: probe.symlink_to("nowhere"), lambda: None):
        make()
        train_fp32(*DATA, "--steps", 1, "--out", "out", cwd=work)
        assert not probe.is_symlink() and not list(work.glob("out/.probe*"))
    probe.write_text("mine")
    train_fp32(*DATA, "--steps", 1, "--out", "out", cwd=work)
    assert probe.read_text() == "mine"


@pytest.mark.usually("bf16")
def test_kill_leaves_a_usable_save(train, work):
    """Killed at random moments of a run that saves all the time, and resumed from what is there."""
    options = (*DATA, "--schedule", "constant", "--save-every", 1, "--steps", 100000, "--out", "out")
    moments = random.Random(train.precision)
    step, arguments = 0, options
    for _ in range(6):
        with running(train, *arguments, cwd=work) as process:
            wait_for_line(process, rb"^saved step")
            time.sleep(moments.uniform(0, 0.1))
        state = json.loads((work / "out" / "trainer_state.json").read_text())
        assert state["step"] > step
        step, arguments = state["step"], ("--resume", "out")
        for name in ("model.safetensors", "trainer_state.safetensors"):
            assert all(tensor.isfinite().all() for tensor in load_file(work / "out" / name).values())
    train(*DATA, "--schedule", "constant", "--steps", step, "--out", "whole", cwd=work)
    assert saved_bytes(work / "out") == saved_bytes(work / "whole")
    train("--resume", "out", "--steps", step + 1, cwd=work)
    assert not [name for name in os.listdir(work / "out") if name.endswith((".tmp", ".old"))]


@pytest.mark.usually("bf16")
def test_what_is_not_finite_is_not_saved(train, work):
    """The run ends at the step where it becomes visible; the saves before are finite, and the folder shows the last good
    one, which is named."""
    train(*DATA, "--steps", 3, "--optimizer", "sgd", "--lr", 1e-3, "--warmup", 0, "--clip", 0, "--save-every", 1, "--keep", 0, "--out", "out",
          "--log", "log", cwd=work)
    error = train("--resume", "out", "--steps", 50, "--lr", 1000, cwd=work, code=2).stderr.decode()
    step, good = re.search(r"^train: step (\d+): the loss is .*; the last good save: out/(step-\d{8})$", error, re.M).groups()
    step = int(step) - 1
    assert good == "step-00000003"
    assert list(by_key(read_log(work / "log"), "loss")) == list(range(1, step + 1))
    saves = sorted((work / "out").glob("step-*"))
    assert saves[-1].name == f"step-{step:08}" and os.readlink(work / "out" / "latest") == good
    assert json.loads((saves[-1] / "trainer_state.json").read_text())["step"] == step
    for save in saves:
        assert all(tensor.isfinite().all() for tensor in load_file(save / "model.safetensors").values())


@pytest.mark.parametrize("options", [("--grad-accum", 3, "--eval-batches", 2),
                                     ("--update-in-backward",)], ids=str)
def test_graphs_change_nothing(train, work, options):
    """If there are graphs, six steps record and replay the micro-batches, the update and the validation."""
    assert trained(train, work, "on", *options) == trained(train, work, "off", *options, "--advanced", "graph=off")


@pytest.mark.usually("bf16")
@pytest.mark.parametrize("keep, steps", [(0, [2, 4, 6, 7]), (1, [7]), (2, [6, 7]), (None, [6, 7])])
def test_keep(train, work, keep, steps):
    train(*DATA, "--steps", 7, "--save-every", 2, "--out", "out", *(() if keep is None else ("--keep", keep)),
          cwd=work)
    assert sorted(path.name for path in (work / "out").glob("step-*")) == [f"step-{step:08}" for step in steps]
    assert os.readlink(work / "out" / "latest") == "step-00000007"


@pytest.mark.usually("bf16")
def test_begin_and_save_without_a_step(train, tmp_path):
    """--steps 0 --out writes a model with GPT-2's initial values, from which another run can start."""
    train("--model", "d2", "--steps", 0, "--sample", "tokens=0", "--out", tmp_path / "out")
    tensors = {name.removeprefix("transformer."): t.float()
               for name, t in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert tensors["wte.weight"].shape == (50257, 128) and tensors["wpe.weight"].shape == (1024, 128)
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            assert (tensor == 0).all(), name
        elif tensor.ndim == 1:
            assert (tensor == 1).all(), name
        else:
            deviation = 0.02 / math.sqrt(2 * 2) if name.endswith("c_proj.weight") else 0.02
            assert tensor.std() == pytest.approx(deviation, rel=0.02), name
            assert abs(tensor.mean()) < 5 * deviation / math.sqrt(tensor.numel()), name
    assert not (tmp_path / "out" / "trainer_state.json").exists()
    train("--model", tmp_path / "out", "--steps", 0, "--sample", "tokens=3")


# ---- the loop


@pytest.mark.usually("fp32")
def test_validation_and_samples_when_asked(train, work):
    text = train(*RUN, "--steps", 10, "--eval-every", 3, "--sample", "every=4,tokens=5", "--save-every", 6,
                 "--out", "out", "--log", "log", cwd=work).stdout
    events = re.findall(rb"^(?:step +(\d+) (validation)|--- (sample) after (\d+)|(saved) step (\d+))", text,
                        re.MULTILINE)
    assert [b" ".join(filter(None, event)) for event in events] == [
        b"3 validation", b"sample 4", b"6 validation", b"saved 6", b"sample 8", b"9 validation", b"saved 10",
        b"10 validation", b"sample 10"]
    log = read_log(work / "log")
    assert list(by_key(log, "val_loss")) == [3, 6, 9, 10] and list(by_key(log, "loss")) == list(range(1, 11))


@pytest.mark.usually("fp32")
def test_log(train, work):
    train(*DATA, "--steps", 3, "--log", "log", cwd=work)
    log = read_log(work / "log")
    assert [list(line) for line in log] == 3 * [["step", "loss", "grad_norm", "lr", "ms", "tokens_per_second"]] + \
        [["step", "val_loss"]]
    for line in log[:3]:
        assert line["tokens_per_second"] == pytest.approx(2 * 24 / (line["ms"] / 1000), rel=1e-9)


def test_prompt_is_continued(train, folder):
    before = listing(folder)
    text = train("--model", "model", "--steps", 0, "--prompt", "Once", "--sample", "tokens=9", cwd=folder).stdout
    assert text.startswith(b"Once") and len(text) == 4 + 9 + 1
    again = train("--model", "model", "--steps", 0, "--prompt", "Once", "--sample", "tokens=9", cwd=folder).stdout
    other = train("--model", "model", "--steps", 0, "--prompt", "Once", "--sample", "tokens=9", "--seed", 1, cwd=folder)
    assert text == again and text != other.stdout
    assert listing(folder) == before


@pytest.mark.usually("fp32")
def test_own_text_is_the_default(train):
    """In the project's folder a run needs no options; those here only make it short and keep it from
    saving."""
    text = train("--steps", 1, "--batch", 1, "--seq-len", 32, "--sample", "tokens=0", cwd=ROOT).stdout.decode()
    loss = float(re.search(r"loss ([\d.]+)", text)[1])
    # The loss of bytes before anything is learned. It is lower if spaces often follow each other, as equal
    # tokens have equal logits.
    assert 0.85 * math.log(256) < loss < 1.05 * math.log(256)
    assert "recompute gelu" in text and "batch 1, seq_len 32" in text
