"""dev/data/tokenize_text.py: what comes out of the shards is what went in."""

import io
import itertools
import json
import os

import numpy as np
import pytest
import reference
import tokenize_text
from tokenizers import ByteLevelBPETokenizer

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
    """The texts in the shards, read by the reference and decoded by a tokenizer that knows no special tokens."""
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
    for name in ("vocab.json", "merges.txt"):
        assert (out / name).exists()
    assert json.loads((out / "vocab.json").read_text()) == json.loads((vocab / "files/vocab.json").read_text())
    assert (out / "merges.txt").read_text() == (vocab / "files/merges.txt").read_text()
    assert sorted(os.listdir(out)) == ["merges.txt", "vocab.json", "x_train_000000.bin"]


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


def test_standard_input(tmp_path, vocab, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXTS[0]))
    tokenize_text.main(["--vocab", str(vocab / "files"), "--out", str(tmp_path / "x")])
    assert read_documents(tmp_path, "x_train_*.bin", vocab) == TEXTS[:1]


def test_shards_of_an_earlier_run_go(tmp_path):
    for total in (45, 25):
        tokens = np.arange(total, dtype=np.uint16)
        tokenize_text.write_shards([tokens], str(tmp_path / "x"), 5)
    streams = reference.read_streams(reference.expand("--data", [str(tmp_path / "x_*.bin")]))
    assert np.concatenate(streams).tolist() == tokens.tolist()


@pytest.mark.parametrize("total, sizes", [(7, [7]), (20, [20]), (21, [21]), (22, [20, 2]), (41, [20, 21]),
                                          (45, [20, 20, 5])])
def test_shard_sizes(tmp_path, total, sizes):
    """Shards of 20 tokens, where less than 2 at the end join the last."""
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
])
def test_mistakes_are_one_line(tmp_path, vocab, files, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        tokenize_text.main(["--vocab", str(vocab / "files"), "--out", str(tmp_path / "x"), *files, *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("x_*"))
