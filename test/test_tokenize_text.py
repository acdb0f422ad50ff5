"""dev/data/tokenize_text.py: the shards contain the text that was tokenized."""

import io
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
import reference
import tokenize_text
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers

END = "<|endoftext|>"
TEXTS = ["To be, or not to be: that is the question.\n", "Ça coûte 3 €, 日本語 🙂\r\n\ttabs  and  spaces ",
         f"the text's own {END} is text"]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    """A folder with vocab.json and merges.txt, and one with the same as tokenizer.json."""
    folder = tmp_path_factory.mktemp("vocab")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS * 3, vocab_size=300, special_tokens=[END], show_progress=False)
    for name in ("files", "json"):
        (folder / name).mkdir()
    tokenizer.save_model(str(folder / "files"))
    tokenizer.save(str(folder / "json" / "tokenizer.json"))
    return folder


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{i}.txt" for i in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS):
        path.write_bytes(text.encode())
    return list(map(str, paths))


def read_documents(folder, pattern, vocab):
    """The texts in the shards, read by the reference and decoded by a tokenizer that knows no special
    tokens."""
    tokens = np.concatenate(reference.read_streams(reference.expand("--data", [str(folder / pattern)]))).tolist()
    tokenizer = ByteLevelBPETokenizer(str(vocab / "files" / "vocab.json"), str(vocab / "files" / "merges.txt"))
    end = tokenizer.token_to_id(END)
    assert tokens[0] == end
    documents = [list(group) for is_end, group in itertools.groupby(tokens, lambda t: t == end) if not is_end]
    return [tokenizer.decode(document, skip_special_tokens=False) for document in documents]


@pytest.mark.parametrize("kind", ["files", "json"])
def test_round_trip(tmp_path, vocab, files, kind):
    out = tmp_path / "out"
    tokenize_text.main([*files, "--vocab", str(vocab / kind), "--out", str(out / "x")])
    assert read_documents(out, "x_train_*.bin", vocab) == TEXTS
    own = sorted(os.listdir(vocab / kind))
    assert sorted(os.listdir(out)) == [*own, "x_train_000000.bin"]
    assert [(out / name).read_bytes() for name in own] == [(vocab / kind / name).read_bytes() for name in own]


def test_tokenizer_json_counts_first(tmp_path, vocab, files):
    """The other two files do not say how a text is split."""
    both = tmp_path / "both"
    shutil.copytree(vocab / "json", both)
    (both / "vocab.json").write_text("{}")
    (both / "merges.txt").write_text("")
    for folder in (both, vocab / "json"):
        tokenize_text.main([*files, "--vocab", str(folder), "--out", str(tmp_path / folder.name / "x")])
    assert (both / "x_train_000000.bin").read_bytes() == (tmp_path / "json" / "x_train_000000.bin").read_bytes()


def test_one_tokenizer_beside_the_shards(tmp_path, vocab, files):
    """Another tokenizer's files are removed; other files in the folder stay."""
    for kind in ("files", "json", "files"):
        tokenize_text.main([*files, "--vocab", str(vocab / kind), "--out", str(tmp_path / "out" / "x")])
        assert sorted(os.listdir(tmp_path / "out")) == [*sorted(os.listdir(vocab / kind)), "x_train_000000.bin"]
    shutil.copy(vocab / "json" / "tokenizer.json", tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    tokenize_text.main([*files, "--vocab", str(tmp_path / "out"), "--out", str(tmp_path / "out" / "x")])
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_files_are_replaced(tmp_path, vocab, files):
    """A file that is being read stays as it was, under another name."""
    out, kept = tmp_path / "out", tmp_path / "kept"
    kept.mkdir()
    tokenize_text.main([*files, "--vocab", str(vocab / "files"), "--out", str(out / "x")])
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for name in before:
        os.link(out / name, kept / name)
    tokenize_text.main([files[0], "--vocab", str(vocab / "files"), "--out", str(out / "x")])
    assert (out / "x_train_000000.bin").read_bytes() != before["x_train_000000.bin"]
    for name in before:
        assert (kept / name).read_bytes() == before[name] and not os.path.samefile(kept / name, out / name)


def test_more_than_65536_tokens(tmp_path):
    """Llama 3's format: 32 bits per token, and another token begins a document."""
    start = "<|begin_of_text|>"
    words = [start, "?", *(f"word{i}" for i in range(70000))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("word1 word65534 word65535 word69999 nothing")
    tokenize_text.main([str(tmp_path / "text"), "--vocab", str(tmp_path), "--out", str(tmp_path / "x")])
    shard = (tmp_path / "x_train_000000.bin").read_bytes()
    assert np.frombuffer(shard[:12], "<i4").tolist() == [20240801, 7, 6] and len(shard) == 1024 + 6 * 4
    [stream] = reference.read_streams([str(tmp_path / "x_train_000000.bin")])
    assert stream.tolist() == [0, 3, 65536, 65537, 70001, 1]


def test_separator_across_chunks():
    text = "one<|sep|>two<|sep|>three"
    for chunk in range(1, len(text) + 1):
        class Slow(io.StringIO):
            def read(self, size=-1, chunk=chunk):
                return super().read(chunk)
        assert list(tokenize_text.split_stream(Slow(text), "<|sep|>")) == ["one", "two", "three"]


def test_documents_of_json_lines_and_separators(tmp_path, vocab):
    lines, parts = tmp_path / "lines.jsonl", tmp_path / "parts.txt"
    lines.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS))
    parts.write_text("\n====\n".join(["first", "second", "", "third\n"]))
    for path, option, expected in ((lines, ["--json-field", "text"], TEXTS),
                                   (parts, ["--separator", "===="], ["first", "second", "third"])):
        tokenize_text.main([str(path), *option, "--vocab", str(vocab / "files"), "--out", str(tmp_path / path.stem)])
        assert read_documents(tmp_path, f"{path.stem}_train_*.bin", vocab) == expected


def test_standard_input(tmp_path, vocab):
    command = [sys.executable, tokenize_text.__file__, "--vocab", vocab / "files", "--out", tmp_path / "x"]
    subprocess.run(command, input=TEXTS[1].encode(), check=True, env={**os.environ, "LC_ALL": "C"})
    assert read_documents(tmp_path, "x_train_*.bin", vocab) == TEXTS[1:2]


def test_shards_of_an_earlier_run_go(tmp_path):
    for total in (45, 25):
        tokens = np.arange(total, dtype=np.uint16)
        tokenize_text.write_shards([tokens], str(tmp_path / "x"), 5)
    streams = reference.read_streams(reference.expand("--data", [str(tmp_path / "x_*.bin")]))
    assert np.concatenate(streams).tolist() == tokens.tolist()


@pytest.mark.parametrize("total, sizes", [(7, [7]), (20, [20]), (21, [21]), (22, [20, 2]), (41, [20, 21]),
                                          (45, [20, 20, 5])])
def test_shard_sizes(tmp_path, total, sizes):
    """Shards of 20 tokens; fewer than 2 at the end are joined to the last one."""
    tokens = np.arange(total, dtype=np.uint16)
    assert tokenize_text.write_shards(np.array_split(tokens, 6), str(tmp_path / "x"), 20) == total
    streams = reference.read_streams(reference.expand("--data", [str(tmp_path / "x_*.bin")]))
    assert [len(stream) for stream in streams] == sizes
    assert np.concatenate(streams).tolist() == tokens.tolist()


def test_val_tokens_come_first(tmp_path, vocab, files):
    def tokens(name, split, *options):
        tokenize_text.main([*files, "--vocab", str(vocab / "files"), "--out", str(tmp_path / name), *options])
        paths = reference.expand("--data", [str(tmp_path / f"{name}_{split}_*.bin")])
        return np.concatenate(reference.read_streams(paths)).tolist()

    everything = tokens("all", "train")
    options = ("--val-tokens", "30", "--shard-tokens", "25")
    assert tokens("split", "val", *options) == everything[:30]
    assert tokens("split", "train", *options) == everything[30:]


@pytest.mark.parametrize("arguments, message", [
    (["--vocab", "nowhere"], "--vocab nowhere: no folder with vocab.json"),
    (["--val-tokens", "100000"], "--val-tokens 100000: the text has only"),
    (["--json-field", "text"], "0.txt: "),
    (["missing.txt"], "missing.txt"),
    (["--shard-tokens", "many"], "--shard-tokens"),
    (["--separator", ""], "--separator is empty"),
    (["--out", "0.txt/x"], "0.txt"),
    (["--out", "/proc/x/y"], "/proc/x"),
])
def test_mistakes_are_one_line(tmp_path, vocab, files, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        tokenize_text.main(["--vocab", str(vocab / "files"), "--out", str(tmp_path / "x"), *files, *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("x_*"))


@pytest.mark.parametrize("line", ['{"text": 3}', '{"text": null}', '{"text": ["a"]}', '{"text": "\\ud800"}', "3", "{",
                                  '{"other": "a"}', "[" * 100000])
def test_lines_without_a_text(tmp_path, vocab, capsys, line):
    (tmp_path / "lines").write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(SystemExit) as ended:
        tokenize_text.main([str(tmp_path / "lines"), "--json-field", "text", "--vocab", str(vocab / "files"),
                            "--out", str(tmp_path / "x")])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "lines: line 3 is no JSON object with a text" in error and error.count("\n") == 1


def test_what_cannot_be_written_is_one_line(tmp_path, vocab, files):
    """No incomplete file is left."""
    ended = subprocess.run([sys.executable, tokenize_text.__file__, *files, "--vocab", vocab / "files",
                            "--out", tmp_path / "out" / "x"], capture_output=True, text=True,
                           preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert f"{tmp_path}/out/x_train_000000.bin: File too large" in ended.stderr
    assert os.listdir(tmp_path / "out") == []
