"""Text that a model's tokenizer reads, validation without training, and generating with a tokenizer."""

import json
import math
import re
import subprocess

import numpy as np
import pytest
import tokenize_text
import torch
from reference_runs import open_with_transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trainer_runs import (cached_bytes, drop_from_cache, ENVIRONMENT, figures, listing, make, nameless_files, plan_of, random_tokens, read_log,
                          ROOT, running, saved_bytes, small_disk, wait_for_line, write_shard)

USUALLY = "fp32"  # see conftest.py

VOCAB = 400
WIDE = 66000  # more than fits 16 bits
SMALL = ("--family", "llama", "--layers", 2, "--heads", 3, "--channels", 48, "--positions", 64)
RUN = ("--model", "model", "--batch", 2, "--seq-len", 24, "--sample", "tokens=0")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Two models with a tokenizer, one with narrow and one with wide tokens, and texts."""
    path = tmp_path_factory.mktemp("given")
    text = (ROOT / "dev" / "data" / "tinyshakespeare.txt").read_text()[:16000].replace("\n", "\n    ")  # spaces that merge
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    for name, added in (("model", 0), ("wide", WIDE)):
        tokenizer.add_tokens([f"<{i}>" for i in range(added)])
        make(path / name, *SMALL, "--vocab", VOCAB + added)
        tokenizer.save(str(path / name / "tokenizer.json"))
    (path / "a").write_text(text[:6000] + "<|endoftext|> is text. <65999><7>\n" * 20)
    (path / "b").write_text("Ünïcödé 日本語 🙂\r\n\t  \n" * 60)
    return path


@pytest.fixture
def work(given, tmp_path):
    for path in given.iterdir():
        if path.is_dir():
            (tmp_path / path.name).symlink_to(path)
        else:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def shard_of(work, *texts, model="model"):
    """The texts' tokens, made by the script."""
    tokenize_text.main([*(str(work / text) for text in texts), "--vocab", str(work / model), "--out",
                        str(work / "shards" / "_".join(texts))])
    data = (work / "shards" / f"{'_'.join(texts)}_train_000000.bin").read_bytes()
    return np.frombuffer(data[1024:], np.uint32 if data[:4] == (20240801).to_bytes(4, "little") else np.uint16)


def figures_of(train, work, *options):
    train(*RUN, *options, "--log", "log", cwd=work)
    return figures(read_log(work / "log"))


def data_line(run):
    return re.search(r"^data: .*$", run.stdout.decode(), re.MULTILINE)[0]


# ---- text becomes tokens


@pytest.mark.parametrize("model", ["model", pytest.param("wide", marks=pytest.mark.more)])
def test_text_is_the_shard_of_the_script(train, work, model):
    """The figures of every step and validation are the same, over a whole epoch."""
    options = ("--model", model, "--steps", 50, "--eval-every", 20)
    for texts in (("a", "b"), ("b",)):
        shard_of(work, *texts, model=model)
    shards = figures_of(train, work, *options, "--data", "shards/a_b_train_*", "--val-data", "shards/b_train_*")
    assert (work / "shards/b_train_000000.bin").read_bytes()[:4] == (
        20240520 if model == "model" else 20240801).to_bytes(4, "little")
    assert figures_of(train, work, *options, "--data", "a", "b", "--val-data", "b") == shards
    assert figures_of(train, work, *options, "--data", "shards/a_b_train_*", "--val-data", "b") == shards
    assert len({line["val_loss"] for line in shards if "val_loss" in line}) == 3


def test_the_last_tenth_is_held_out(train, work):
    """Of each text's tokens, rounded down."""
    parts = [(tokens[:len(tokens) - len(tokens) // 10], tokens[len(tokens) - len(tokens) // 10:])
             for tokens in (shard_of(work, "a"), shard_of(work, "b"))]
    for name, part in zip(("train", "val"), zip(*parts)):
        write_shard(work / f"{name}.bin", np.concatenate(part))
    options = ("--steps", 12, "--eval-every", 5)
    expected = figures_of(train, work, *options, "--data", "train.bin", "--val-data", "val.bin")
    assert figures_of(train, work, *options, "--data", "a", "b") == expected
    assert any("val_loss" in line for line in expected)


def test_a_resume_knows_its_text(train, work):
    (work / "cut").write_text("To be")
    train(*RUN, "--data", "a", "--steps", 6, "--out", "whole", cwd=work)
    train(*RUN, "--data", "a", "--steps", 3, "--schedule", "constant", "--out", "out", cwd=work)
    train(*RUN, "--data", "a", "--steps", 6, "--schedule", "constant", "--out", "whole", cwd=work)
    train("--resume", "out", "--steps", 6, cwd=work)
    assert saved_bytes(work / "out") == saved_bytes(work / "whole")
    text = (work / "a").read_bytes()
    (work / "a").write_bytes(text + b"More.")
    error = train("--resume", "out", "--steps", 7, cwd=work, code=2).stderr.decode()
    assert error.startswith("train: --data a has changed since out was saved: ") and error.count("\n") == 1
    (work / "a").write_bytes(text)
    train("--resume", "out", "--steps", 7, cwd=work)


def in_folder_for_files(train, work, folder, *options):
    return subprocess.run(train.command(*RUN, *options), cwd=work, capture_output=True, text=True, timeout=120,
                          env=ENVIRONMENT | {"TMPDIR": str(folder)})


def test_tokens_lie_in_no_named_file(train, work):
    (work / "tmp").mkdir()
    before = listing(work)
    ran = in_folder_for_files(train, work, work / "tmp", "--data", "a", "--steps", 1)
    assert ran.returncode == 0 and not ran.stderr and listing(work) == before
    ran = in_folder_for_files(train, work, work / "absent", "--data", "a", "--steps", 1)
    assert ran.returncode == 2 and ran.stderr == (
        f"train: {work}/absent: cannot keep the tokens of a there: No such file or directory; "
        "TMPDIR can name another folder\n")


def test_a_plan_does_not_wait_for_a_long_text(train, work):
    """The plan equals that of the training, whose text is tokenized."""
    (work / "long").write_bytes((work / "a").read_bytes() * 8)
    shard_of(work, "long")
    options = ("--plan", "json", "--eval-every", 3)
    ran = in_folder_for_files(train, work, "/absent", *options, "--data", "long")
    assert ran.returncode == 0 and not ran.stderr
    shards = ("--data", "shards/long_train_*", "--val-data", "shards/long_train_*")
    assert plan_of(ran.stdout) == plan_of(in_folder_for_files(train, work, "/absent", *options, *shards).stdout)
    for options in (("--data", "a"), ("--data", "long", "--batch", "auto")):  # here the plan needs the tokens
        assert "/absent: cannot keep" in in_folder_for_files(train, work, "/absent", "--plan", *options).stderr


def test_long_texts_say_how_far_they_are(train, work):
    text = (work / "a").read_bytes() * 1700
    for size in (len(text), 9_999_999):
        (work / "long").write_bytes(text[:size])
        run = train(*RUN, "--data", "long", "--steps", 1, cwd=work)
        tokens = int(re.search(r"data: (\d+) tokens", run.stdout.decode())[1])
        lines = run.stderr.decode().splitlines()
        assert len(text) > 10_000_000 and bool(lines) == (size == len(text))
        if lines:
            assert re.fullmatch(r"tokenizing long: [\d.]+ of [\d.]+ MB", lines[0])
            [(megabytes, count)] = re.findall(r"^tokenized long: ([\d.]+) MB, (\d+) tokens, [\d.]+ s$", lines[-1])
            assert float(megabytes) == round(size / 1e6, 1) and int(count) - int(count) // 10 == tokens


def test_no_room_for_the_tokens(train, work):
    with small_disk(work / "disk", "1m") as disk:
        (work / "long").write_bytes((work / "a").read_bytes() * 300)
        ran = in_folder_for_files(train, work, disk, "--data", "long", "--steps", 1, "--out", "out")
        assert ran.returncode == 2 and not (work / "out").exists() and ran.stderr == (
            f"train: {disk}: cannot write the tokens of long there: No space left on device; "
            "TMPDIR can name another folder\n")


@pytest.mark.parametrize("options, line", [
    (("--data", "latin"), "latin is not UTF-8 text: no character has the byte 0xe9 at position 3"),
    (("--data", "a", "--val-data", "latin"), "latin is not UTF-8 text"),
    (("--data", "a", "shards/b_train_000000.bin"), "--data: a is a text and shards/b_train_000000.bin a 16-bit token"),
    (("--data", "tiny"), "--data: tiny has "),
    (("--data", "a", "--val-data", "long"), "long: near byte 6 a piece of more than 256 KiB begins that the tokenizer"),
    (("--model", "bare", "--data", "a"), "a: the model's folder has no tokenizer (tokenizer.json, vocab.json with merges.txt, or tokenizer.model); without one, "),
    (("--model", "d1", "--data", "a", "--val-data", "shards/b_train_000000.bin"), "not below the vocabulary size 256"),
    (("--val-data", "a"), "--val-data needs --data, or --steps 0"),
    (("--val-data", "a", "--steps", 0, "--batch", "auto"), "--batch auto is for training"),
    (("--data", "a", "--seq-len", 64, "--batch", 2000), "--batch 2000: the data fill only "),
])
def test_texts_that_will_not_do(train, work, options, line):
    (work / "latin").write_bytes("Voilé".encode("latin-1")[:3] + b"\xe9" * 3000)
    (work / "tiny").write_text("To be")
    (work / "long").write_text("hello\n" + "a" * 300_000)
    shard_of(work, "b")
    (work / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (work / "bare" / name).symlink_to(work / "model" / name)
    error = train(*RUN, "--steps", 1, *options, cwd=work, code=2).stderr.decode()
    assert error.startswith("train: ") and line in error and error.count("\n") == 1


# ---- the vocabulary of a new model


def new_config(train, work, *options):
    train("--steps", 0, "--out", "new", *options, cwd=work)
    return json.loads((work / "new" / "config.json").read_text())


def test_the_vocabulary_of_a_new_model(train, work):
    """That of the tokenizer beside the shards, or the family's default, or as many tokens as the shards
    have."""
    shard_of(work, "a")
    config = new_config(train, work, "--model", "llama:d1", "--data", "shards/a_train_*")
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (VOCAB, None, 0)
    write_shard(work / "alone.bin", random_tokens(300, 1500))
    for model, vocabulary, mark in (("d1", 50257, 50256), ("qwen3:d1", 151936, None), ("llama:d1", 32000, 2)):
        config = new_config(train, work, "--model", model, "--data", "alone.bin")
        assert (config["vocab_size"], config["eos_token_id"]) == (vocabulary, mark)
    write_shard(work / "alone.bin", [*random_tokens(300, 1500), 65000])
    assert new_config(train, work, "--model", "llama:d1", "--data", "alone.bin")["vocab_size"] == 65001
    assert new_config(train, work, "--model", "llama:d1", "--data", "b")["vocab_size"] == 256


# ---- a validation without training


def validated(run):
    """The loss; checks that the perplexity is its own."""
    line = re.search(r"^validation loss ([\d.]+), perplexity ([\d.]+): (\d+) sequences of (\d+) tokens$",
                     run.stdout.decode(), re.MULTILINE)
    assert math.log(float(line[2])) == pytest.approx(float(line[1]), abs=1e-5)
    return float(line[1]), int(line[3]), int(line[4])


def expected_loss(folder, tokens, count, length):
    """Computed by transformers from the first windows in order."""
    tokens = torch.tensor(np.asarray(tokens, np.int64))
    windows = torch.stack([tokens[i * length:(i + 1) * length + 1] for i in range(count)])
    with torch.no_grad():
        logits = open_with_transformers(folder).float()(windows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


ALONE = ("--steps", 0, "--batch", 3, "--grad-accum", 2, "--seq-len", 24)


def test_validation_alone(train, work):
    """Over the sequences of --eval-batches steps, or all that there are."""
    tokens = shard_of(work, "a")
    bound = 1e-4 if train.precision == "fp32" else 2e-2
    for data in ("a", "shards/a_train_*"):
        for batches, count in ((2, 12), (1000, (len(tokens) - 1) // 24)):
            run = train("--model", "model", *ALONE, "--val-data", data, "--eval-batches", batches, "--log", "log",
                        cwd=work)
            loss, *amount = validated(run)
            assert amount == [count, 24] and run.stdout.count(b"\n") == 1 and not run.stderr
            assert loss == pytest.approx(expected_loss(work / "model", tokens, count, 24), abs=bound)
            assert [(line["step"], round(line["val_loss"], 6)) for line in read_log(work / "log")] == [(0, loss)]


def test_validation_of_bytes_and_of_a_save(train, work):
    make(work / "bytes", "--layers", 1, "--heads", 2, "--channels", 32, "--positions", 64)
    bound = 1e-4 if train.precision == "fp32" else 2e-2
    tokens = list((work / "a").read_bytes())
    loss, count, length = validated(train("--model", "bytes", *ALONE, "--val-data", "a", cwd=work))
    assert (count, length) == (48, 24)
    assert loss == pytest.approx(expected_loss(work / "bytes", tokens, 48, 24), abs=bound)
    train("--model", "bytes", "--data", "b", "--steps", 3, "--batch", 2, "--seq-len", 16, "--sample", "tokens=0",
          "--out", "out", "--log", "log", "--eval-batches", 3, cwd=work)
    before = listing(work / "out")
    loss, count, length = validated(train("--resume", "out", "--steps", 0, "--val-data", "a", cwd=work))
    assert (count, length) == (6, 16) and loss == pytest.approx(expected_loss(work / "out", tokens, 6, 16), abs=bound)
    # A training validates the same; this run does not change its log.
    again = ("--data", "b", "--val-data", "a", "--lr", 0)
    train("--model", "out", *again, "--steps", 1, "--batch", 2, "--seq-len", 16, "--sample", "tokens=0", "--log", "again",
          "--eval-batches", 3, cwd=work)
    assert read_log(work / "again")[-1]["val_loss"] == pytest.approx(loss, abs=1e-6)
    assert listing(work / "out") == before and len(read_log(work / "log")) == 4
    assert 5 < validated(train("--model", "d1", *ALONE, "--val-data", "a", cwd=work))[0] < 6


def test_validation_and_a_prompt(train, work):
    """The figure comes first, then only the text."""
    options = ("--model", "model", *ALONE, "--prompt", "Hello", "--sample", "tokens=9")
    text = train(*options, cwd=work).stdout
    run = train(*options, "--val-data", "a", cwd=work)
    line, _, rest = run.stdout.partition(b"\n")
    assert line.startswith(b"validation loss ") and rest == text and not run.stderr
    plan = json.loads(train(*options, "--val-data", "a", "--plan", "json", cwd=work).stdout)
    assert {buffer["kind"] for buffer in plan["buffers"]} == {"weights", "input", "workspace"}


# ---- generating


def spelling():
    """Characters of byte-level tokens, as bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(rest)}


def continued(folder, prompt, count):
    """The tokens that transformers adds, according to the folder's files."""
    model = open_with_transformers(folder).float()
    tokens = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                            do_sample=False, max_new_tokens=count, pad_token_id=0)
    return tokens[0, len(prompt):].tolist()


@pytest.mark.parametrize("config, generation", [
    (None, {}), (5, None), ([20, 9], None), ([20], {"eos_token_id": 12}), (4, {"eos_token_id": [15, 7]}),
    (4, {"eos_token_id": [25, -3, 10**6]})], ids=str)
def test_generating_stops_where_the_model_says(train_fp32, work, config, generation):
    """At the tokens in generation_config.json, or else in config.json. Numbers stand for what follows after
    so many tokens."""
    tokenizer = Tokenizer.from_file(str(work / "model" / "tokenizer.json"))
    folder = work / "stops"
    make(folder, *SMALL, "--vocab", VOCAB)
    tokenizer.save(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("Hello", add_special_tokens=False).ids
    path = folder / "config.json"

    def write(eos, generation):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))
        (folder / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))

    write(None, None)
    free = continued(folder, prompt, 40)

    def stop(at):
        if isinstance(at, list):
            return [stop(i) for i in at]
        return at if at is None or not 0 <= at < 40 else free[at]

    write(stop(config), generation and {"eos_token_id": stop(generation["eos_token_id"])})
    ended = continued(folder, prompt, 40)
    stops = generation["eos_token_id"] if generation else config
    assert (len(ended) < 40) == (stops is not None)
    byte = spelling()
    text = b"".join(bytes(byte[c] for c in tokenizer.id_to_token(token)) for token in (ended[:-1] if stops else ended))
    options = ("--model", folder, "--steps", 0, "--sample", "temperature=0", "--prompt", "Hello", "--sample", "tokens=40")
    assert train_fp32(*options, cwd=work).stdout == b"Hello" + text + b"\n"
    # A save of it says the same.
    train_fp32("--model", folder, "--steps", 0, "--out", "out", cwd=work)
    assert train_fp32("--model", "out", *options[2:], cwd=work).stdout == b"Hello" + text + b"\n"
    assert continued(work / "out", prompt, 40) == ended


def test_a_prompt_takes_no_more_than_its_positions(train, work):
    """However many positions the model has."""
    make(work / "far", *SMALL[:-1], 1 << 20, "--vocab", VOCAB)
    (work / "far" / "tokenizer.json").write_bytes((work / "model" / "tokenizer.json").read_bytes())
    options = ("--steps", 0, "--prompt", "Hello", "--sample", "tokens=40", "--plan")

    def megabytes(model, *more):
        text = train("--model", model, *options, *more, cwd=work).stdout.decode()
        return re.findall(r"^(.*) uses ([\d.]+) MiB", text, re.MULTILINE)

    assert megabytes("far") == megabytes("model") and [name for name, _ in megabytes("far")] == ["sampling"]
    assert float(megabytes("far")[0][1]) < 1
    assert [name for name, _ in megabytes("model", "--sample", "tokens=70")] == ["sampling", "a sample's continuation"]
    [(_, more)] = megabytes("far", "--sample", "tokens=100000")
    cache = 100000 * 2 * 2 * 48 * (4 if train.precision == "fp32" else 2) / 2**20
    assert cache < float(more) < 1.5 * cache


@pytest.mark.parametrize("name", ["data.bin", "a.txt", "lines.jsonl"])
def test_data_leave_the_page_cache(train_fp32, work, name):
    """Also the tokens of a text, which are in a file without a name."""
    paragraph = (work / "a").read_text()
    if name == "data.bin":
        write_shard(work / name, random_tokens(VOCAB, 6_000_000))
    else:
        (work / name).write_text(2000 * (paragraph if name == "a.txt" else json.dumps({"text": paragraph}) + "\n"))
    assert (work / name).stat().st_size > 10 << 20
    drop_from_cache(work / name)
    with running(train_fp32, *RUN, "--data", name, "--steps", 10**6, "--print-every", 1, cwd=work, text=True) as process:
        wait_for_line(process, r"^step +50/")
        unnamed = nameless_files(process)
        assert bool(unnamed) == (name != "data.bin")  # tokens, and the list of examples
        assert cached_bytes(work / name, *unnamed) <= 1 << 20
