"""JSON lines: chat formats as in transformers, which tokens have a loss, packed examples, invalid lines."""

import copy
import functools
import gzip
import json
import random
import re
import resource
import shutil

import gguf_files
import limited_runs
import numpy as np
import peft
import pytest
import reference
import torch
import transformers
from adapter_files import make_adapter
from chat_formats import (CHATML, GEMMA, LLAMA2, LLAMA3, MISTRAL_1, MISTRAL_3, PLAIN_CHATML, ZEPHYR, gemma, llama3_with_headers,
                          save_tokenizer)
from example_files import VOCAB, WORDS, lines_of, says, tokenizer, words, write_examples
from known_tokenizers import encode_all, facts, llama2, llama2_first, mistral3, probe, smollm2
from reference_runs import LOSS_BOUND, run_reference
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_runs import by_key, cpu_seconds, error_line, figures, listing, make, peak, read_log, saved_bytes

USUALLY = "fp32"  # see conftest.py

FORMATS = {
    "chatml": (smollm2, CHATML, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "chatml-plain": (smollm2, PLAIN_CHATML, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "llama3": (llama3_with_headers, LLAMA3, "<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"),
    "mistral-1": (llama2_first, MISTRAL_1, "<s>", "</s>", "</s>"),
    "mistral-3": (mistral3, MISTRAL_3, "<s>", "</s>", "</s>"),
    "llama2": (llama2, LLAMA2, "<s>", "</s>", " </s>"),
    "llama2-first": (llama2_first, LLAMA2, "<s>", "</s>", " </s>"),
    "zephyr": (llama2, ZEPHYR, "<s>", "</s>", "</s>"),
    "gemma": (gemma, GEMMA, "<s>", "</s>", "<end_of_turn>"),
}


@pytest.fixture(scope="module", params=FORMATS)
def chat(request, tmp_path_factory):
    make_tokenizer, template, begin, end, closes = FORMATS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return save_tokenizer(folder, make_tokenizer(), template, begin, end), request.param, closes


@functools.cache
def reader(folder, loss_on="completions"):
    """The reference's examples of a folder; both kinds of loss share its tokenizer."""
    if loss_on == "all":
        examples = copy.copy(reader(folder))
        examples.loss_on = loss_on
        return examples
    return reference.Examples(str(folder), loss_on)


CONVERSATIONS = [
    [says("user", "Who wrote Hamlet?"), says("assistant", "Shakespeare did.")],
    [says("system", "Answer in one word."), says("user", "1 + 1?"), says("assistant", "2"),
     says("user", "And 2 + 2?\n\nPlease."), says("assistant", "Four.\n\n* 4\n* vier")],
    [says("system", "Be kind."), says("user", "def f(x):\n    return x\n"), says("assistant", "日本語 🙂 ünï"),
     says("user", "ok")],
    [says("user", "a"), says("assistant", "wrong") | {"weight": 0}, says("user", "No."),
     says("assistant", "right") | {"weight": 1, "train": None}, says("user", "b") | {"train": False},
     says("assistant", "also wrong") | {"train": False}, says("user", "c"), says("assistant", "good") | {"train": True}],
    [says("user", "a"), says("assistant", "") | {"weight": 0}, says("user", "b"), says("assistant", "c")],
]


def learnt_answers(messages):
    return [m["content"] for m in messages if m["role"] == "assistant" and m.get("weight", 1) and m.get("train") is not False]


def test_conversations_are_those_of_transformers(chat):
    """The tokens are the same, and the same of them have a loss."""
    folder, name, closes = chat
    examples, with_prompts = (reader(folder, loss_on) for loss_on in ("completions", "all"))
    lines = lines_of({"messages": messages} for messages in CONVERSATIONS)
    kept = encode_all(folder, lines, "auto", command="examples")
    for line, got, messages in zip(lines, kept, CONVERSATIONS, strict=True):
        tokens, learnt = examples.read(line)
        got = np.array(got, dtype=np.int32)
        assert (got & 0x7fffffff).tolist() == tokens.tolist(), name
        assert (got >= 0).tolist() == learnt.tolist(), name
        said = examples.tokenizer.decode(got[got >= 0], skip_special_tokens=False)
        assert re.sub(r"\s", "", said) == re.sub(r"\s", "", "".join(a + closes for a in learnt_answers(messages)))
    for line, got in zip(lines, encode_all(folder, lines, "auto", command="learn-all"), strict=True):
        tokens, learnt = with_prompts.read(line)
        assert (np.array(got, dtype=np.int32) & 0x7fffffff).tolist() == tokens.tolist(), name
        assert [token >= 0 for token in got] == learnt.tolist(), name
        assert learnt.all() == ("weight" not in line)
    assert encode_all(folder, lines, name.split("-")[0], command="examples") == kept


PLACEHOLDERS = "{eos}{bos} {eos}\n{bos}{eos}"
MARKS = "<|im_end|>\n<|im_start|>system\n</s><s> [/INST] <|eot_id|><|endoftext|> <<SYS>> </s>"


WRITTEN_OUT = [PLACEHOLDERS, "{eos}", "{bos}", " {eos} ", MARKS, "</s>", "<|im_end|>"]


def test_what_a_message_writes_out(chat):
    """The formats' own placeholders are plain text in a message. Special tokens that are spelled out in one
    are tokens, as in `transformers`: its templates do not escape them, and its tokenizers find them."""
    folder, name, _ = chat
    examples = reader(folder)
    special = set(examples.tokenizer.all_special_ids)
    cases = []
    for role in ("system", "user", "assistant"):
        for text in ("x", *WRITTEN_OUT):
            messages = [says("system", "Go."), says("user", "a"), says("assistant", "b")]
            cases.append((role, text, [says(m["role"], text if m["role"] == role else m["content"]) for m in messages]))
    lines = lines_of({"messages": messages} for _, _, messages in cases)
    kept = encode_all(folder, lines, "auto", command="examples")
    assert encode_all(folder, lines, name.split("-")[0], command="examples") == kept
    for line, got, (role, text, _) in zip(lines, kept, cases, strict=True):
        tokens = (np.array(got, dtype=np.int32) & 0x7fffffff).tolist()
        assert tokens == examples.read(line)[0].tolist(), (name, role, text)
        marks = sum(token in special for token in tokens)
        if text == "x":
            usual = marks
        assert marks == usual or text in (MARKS, "</s>", "<|im_end|>"), (name, role, text)


def test_placeholders_and_special_tokens_elsewhere(chat):
    """In texts, in prompts with completions, and in --prompt: everything as in `transformers`."""
    folder, _, _ = chat
    examples = reader(folder)
    lines = lines_of({"prompt": text, "completion": text} for text in (PLACEHOLDERS, MARKS))
    lines += lines_of({"text": text} for text in (PLACEHOLDERS, MARKS))
    for line, got in zip(lines, encode_all(folder, lines, "auto", command="examples"), strict=True):
        assert (np.array(got, dtype=np.int32) & 0x7fffffff).tolist() == examples.read(line)[0].tolist()
    texts = [*WRITTEN_OUT, "<|im_start|>user\nHi<|im_end|>\n"]
    assert encode_all(folder, texts, command="specials") == [examples.tokenizer(text)["input_ids"] for text in texts]


def test_texts_and_completions(chat):
    folder, _, _ = chat
    examples = reader(folder)
    for example in ({"text": "To be, or not to be."}, {"prompt": "Question: 2+2?\nAnswer:", "completion": " 4\n"},
                    {"prompt": "", "completion": "abc"}, {"prompt": "foo", "completion": "bar"}):
        [line] = lines_of([example])
        [got] = encode_all(folder, [line], "auto", command="examples")
        tokens, learnt = examples.read(line)
        got = np.array(got, dtype=np.int32)
        assert (got & 0x7fffffff).tolist() == tokens.tolist()
        assert (got[1:] >= 0).tolist() == learnt[1:].tolist()
        assert got[-1] == facts(folder)["end_of_text"]


STRINGS = {
    "plain": "To be, or not to be. " * 30,
    "escapes": "\"quoted\" \\ / \b\f\n\r\t\x01\x1f\x7f {\"a\": [1]} " * 20,
    "scripts": "ünï 日本語 🙂 \u2028 \ufffd \U0010ffff " * 20,
    "NUL first": "\0" + "0 " * 200, "short, NUL first": "\0" + "0", "NUL inside": "a\0b" * 100,
    "256": "x" * 256, "257": "x" * 256 + "é", "words": "word " * 70_000,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tokenizer):
    return save_tokenizer(tmp_path_factory.mktemp("long"), tokenizer, PLAIN_CHATML, "<|endoftext|>", "<|im_end|>")


@pytest.mark.parametrize("name", STRINGS)
def test_long_strings(plain, name):
    """Long strings are decoded inside their line, and the rest is parsed without them."""
    folder, examples, text = plain, reader(plain), STRINGS[name]
    lines = []
    for example in ({"text": text}, {"a": [text, {text[:300]: text}], "text": text}, {"text": "short", "other": text},
                    {"prompt": text, "completion": "b"}, {"completion": text, "prompt": text[::-1]},
                    {"messages": [says("user", text), says("assistant", text)], "text": text}):
        lines += [json.dumps(example), json.dumps(example, ensure_ascii=False, indent=0).replace("\n", " ")]
    for line, got in zip(lines, encode_all(folder, lines, "auto", command="examples"), strict=True):
        tokens, learnt = examples.read(line)
        got = np.array(got, dtype=np.int32)
        assert (got & 0x7fffffff).tolist() == tokens.tolist(), line[:80]
        assert (got[1:] >= 0).tolist() == learnt[1:].tolist(), line[:80]


def test_broken_lines_with_long_strings(tmp_path, tokenizer):
    """One line names the column, whatever was taken out before it."""
    save_tokenizer(tmp_path, tokenizer, PLAIN_CHATML, "<|endoftext|>", "<|im_end|>")

    def refused(line):
        return probe(tmp_path, "examples", "auto", inputs=[line.encode()], code=2)

    long, short = "a" * 1000, "a" * 10
    for line in ('{"text": "short" "b": 1}', f'{{"text": "{long}" "b": 1}}', f'{{"a": "{long}", "text": "{long}" "b": 1}}'):
        column = line.index(' "b"') + 4
        assert refused(line).startswith(f"a line: broken JSON: parse error at column {column}: "), line[:30]
    for broken, why in (("\x1f", "a control character in a string"), ("\\x", "an escape that JSON does not have"),
                        ("\\ud800", "half a surrogate pair"), ("\\udc00", "half a surrogate pair"),
                        ("\\ud800\\u0041", "half a surrogate pair"),
                        ("\\u00g0", "an escape \\u without four hexadecimal digits")):
        line = f'{{"text": "{long}{broken}{short}"}}'
        assert refused(line) == f"a line: broken JSON: at column {line.index(broken) + 1}: {why}\n"
    assert refused('{"text": "' + long) == "a line: broken JSON: at column 10: the string that begins here does not end\n"
    assert refused('{"' + "k" * 70_000 + '": 1}') == "a line: broken JSON: at column 2: a key of more than 64 KiB begins here\n"
    assert refused(f'{{"text": "{long}", "text": "{long}"}}') == 'a line: broken JSON: key "text" appears twice\n'


ASKED = [says("user", "Who wrote Hamlet?"), says("assistant", "Shakespeare did.")]
ABOUT = [says("user", "Translate.\ncat"), says("assistant", "Katze")]
SYSTEM = [says("system", "Be brief.")]
OTHER_FORMATS = {
    "ShareGPT": ({"conversations": [{"from": "human", "value": "Who wrote Hamlet?"}, {"from": "gpt", "value": "Shakespeare did."}]}, ASKED),
    "ShareGPT with a system text": ({"id": "1", "system": "Be brief.", "conversations": [
        {"from": "user", "value": "Who wrote Hamlet?"}, {"from": "chatgpt", "value": "Shakespeare did.", "weight": 1}]}, SYSTEM + ASKED),
    "ShareGPT with roles": ({"conversations": SYSTEM + ASKED}, SYSTEM + ASKED),
    "ShareGPT's messages": ({"messages": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "a"},
                                          {"from": "gpt", "value": "wrong", "weight": 0}, {"from": "human", "value": "b"},
                                          {"from": "model", "value": "c"}]},
                            SYSTEM + [says("user", "a"), says("assistant", "wrong") | {"weight": 0}, says("user", "b"), says("assistant", "c")]),
    "Alpaca": ({"instruction": "Who wrote Hamlet?", "input": "", "output": "Shakespeare did.", "text": "### all of it"}, ASKED),
    "Alpaca with an input": ({"instruction": "Translate.", "input": "cat", "output": "Katze"}, ABOUT),
    "Alpaca with more": ({"instruction": "Translate.", "input": "cat", "output": "Katze", "system": "Be brief.",
                          "history": [["Who wrote Hamlet?", "Shakespeare did."]]}, SYSTEM + ASKED + ABOUT),
    "Dolly": ({"instruction": "Translate.", "context": "cat", "response": "Katze", "category": "closed_qa"}, ABOUT),
    "prompt and response": ({"prompt": "Who wrote Hamlet?", "response": "Shakespeare did."}, ASKED),
    "question and answer": ({"question": "Who wrote Hamlet?", "answer": "Shakespeare did."}, ASKED),
    "query and response": ({"query": "Who wrote Hamlet?", "response": "Shakespeare did.", "type": "x"}, ASKED),
    "a system text beside messages": ({"system": "Be brief.", "messages": ASKED}, SYSTEM + ASKED),
    "a system text beside lists": ({"system": "Be brief.", "prompt": ASKED[:1], "completion": ASKED[1:]}, SYSTEM + ASKED),
    "lists of ShareGPT's messages": ({"prompt": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}],
                                      "completion": [{"from": "gpt", "value": "d"}]},
                                     [says("user", "a"), says("assistant", "b") | {"train": False}, says("user", "c"), says("assistant", "d")]),
    "other names of train": ({"messages": [ASKED[0], ASKED[1] | {"loss": False}, *ABOUT, ABOUT[0], ABOUT[1] | {"training": False}]},
                             [ASKED[0], ASKED[1] | {"train": False}, *ABOUT, ABOUT[0], ABOUT[1] | {"train": False}]),
    "a good answer": ({"messages": ASKED, "label": True, "score": 0}, ASKED),
    "prompt and completion of messages": ({"prompt": [*ABOUT, ASKED[0]], "completion": [ASKED[1]]},
                                          [ABOUT[0], ABOUT[1] | {"train": False}] + ASKED),
    "long": ({"question": "Who? " * 20_000, "answer": "He " * 20_000}, [says("user", "Who? " * 20_000), says("assistant", "He " * 20_000)]),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_other_tools_formats(tmp_path, name):
    """They become the tokens, and the losses, of the same conversation in "messages"."""
    example, messages = OTHER_FORMATS[name]
    folder = save_tokenizer(tmp_path / "model", smollm2(), PLAIN_CHATML, "<|im_start|>", "<|im_end|>")
    lines = [json.dumps(example), json.dumps({"messages": messages})]
    for command in ("examples", "learn-all"):
        [got, expected] = encode_all(folder, lines, "auto", command=command)
        assert got == expected and len(got) > 10


def test_formats_without_a_template(tmp_path):
    """These formats are recognized by the tokenizer's special tokens, or refused."""
    [line] = lines_of([{"messages": CONVERSATIONS[0]}])
    for make_tokenizer, begin, end, same in ((smollm2, "<|im_start|>", "<|im_end|>", "chatml"),
                                             (llama3_with_headers, "<|begin_of_text|>", "<|eot_id|>", "llama3"),
                                             (mistral3, "<s>", "</s>", "mistral"), (gemma, "<s>", "</s>", "gemma")):
        folder = save_tokenizer(tmp_path / same, make_tokenizer(), None, begin, end)
        assert (encode_all(folder, [line], "auto", command="examples") ==
                encode_all(folder, [line], same, command="examples"))
    folder = save_tokenizer(tmp_path / "none", llama2(), None, "<s>", "</s>")
    error = probe(folder, "examples", "auto", inputs=[line.encode()], code=2)
    assert error == f"{folder} has no chat template, and no marks of a chat format that is known: give --chat-format\n"
    error = probe(folder, "examples", "chatml", inputs=[line.encode()], code=2)
    assert error == f'--chat-format chatml: the tokenizer of {folder} has no token "<|im_start|>"\n'
    turns = json.dumps({"messages": [says("user", "a"), says("user", "b"), says("assistant", "c")]})
    assert "message 2: in the format llama2 users and assistants take turns" in probe(
        folder, "examples", "llama2", inputs=[turns.encode()], code=2)


@pytest.mark.parametrize("kind", ["chatml", "llama3", "mistral", "llama2", "zephyr", "gemma"])
def test_our_formats_refuse_what_they_do_not_write(tmp_path, kind):
    """Fields that a model's own template may write."""
    make_tokenizer, _, begin, end, _ = FORMATS["mistral-1" if kind == "mistral" else kind]
    folder = save_tokenizer(tmp_path / "model", make_tokenizer(), None, begin, end)
    answer = says("assistant", "b")
    fields = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}], "reasoning_content": "c", "thinking": "c"}
    chats = {name: {"messages": [says("user", "a"), answer | {name: value}]} for name, value in fields.items()}
    chats |= {"tools": {"messages": [says("user", "a"), answer], "tools": [{"name": "f"}]}}
    for name, example in chats.items():
        error = probe(folder, "examples", kind, inputs=lines_of([example])[0].encode().splitlines(), code=2)
        where = "" if name == "tools" else "message 2: "
        assert f'{where}"{name}" is not written by the chat format {kind}: leave the field out' in error and error.count("\n") == 1


def test_empty_fields_say_nothing(chat):
    folder, _, _ = chat
    plain = {"messages": [says("user", "a"), says("assistant", "b")]}
    empty = {"messages": [says("user", "a") | {"weight": None}, says("assistant", "b") | {
        "tool_calls": None, "reasoning_content": "", "weight": 1.0, "train": None, "name": "c"}], "tools": [], "id": 7}
    first, second = encode_all(folder, lines_of([plain, empty]), "auto", command="examples")
    assert first == second


# ---- kinds of files


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("plain"), smollm2(), PLAIN_CHATML, "<|im_start|>", "<|im_end|>")


KINDS = [{"text": "a ], [ {\n\"b\""}, {"prompt": "x\\", "completion": "é\U0001f642"}, {"text": "}\u2028,"},
         {"messages": [says("user", "[1, {2}]"), says("assistant", "\"]\\")]}]


def test_examples_are_known_by_name_or_first_bytes(plain_folder, tmp_path):
    lines = "\n".join(lines_of(KINDS))
    readable = "\n".join(json.dumps(example, ensure_ascii=False) for example in KINDS)
    files = {"a.jsonl": lines, "a.JSONL": readable, "a.ndjson": lines + "\n\n", "a.json": lines, "data": lines,
             "a.b.dat": " \r\n" + lines, "bom.jsonl": "\ufeff" + lines, "bom.json": "\ufeff" + json.dumps(KINDS),
             "list.json": json.dumps(KINDS), "list.JSON": json.dumps(KINDS, indent=4, ensure_ascii=False) + "\n",
             "list": "\n[" + ",\n".join(lines_of(KINDS)) + "\n]\n", "list.jsonl": json.dumps(KINDS, indent="\t")}
    for name, text in files.items():
        (tmp_path / name).write_text(text, newline="")
    expected, *others = encode_all(plain_folder, [str(tmp_path / name) for name in files], command="data")
    assert len(expected) > 20 and min(expected) < 0
    for got, name in zip(others, list(files)[1:], strict=True):
        assert got == expected, name


def test_gzip(plain_folder, tmp_path):
    """Compressed files are read as what they contain, which may be in several parts."""
    lines = "\n".join(lines_of(KINDS))
    half = len(lines) // 2
    contents = {"a.jsonl": lines, "a.json": json.dumps(KINDS), "data": lines, "a.txt": lines, "text": "Who? " * 60_000}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text[:half].encode()) + gzip.compress(text[half:].encode()))
        (tmp_path / f"{name}.plain.gz").write_text(text)  # programs unpack files without renaming them
    for suffix in (".gz", ".plain.gz"):
        names = [str(tmp_path / name) for name in contents if suffix == ".gz" or name in ("data", "text")]
        plain = encode_all(plain_folder, names, command="data")
        assert encode_all(plain_folder, [name + suffix for name in names], command="data") == plain


def test_damaged_gzip(plain_folder, tmp_path):
    packed = gzip.compress(json.dumps({"text": "Who wrote Hamlet? " * 9000}).encode())
    path = tmp_path / "a.jsonl.gz"
    for damaged in (packed[:-1], packed[:len(packed) // 2], packed[:-8] + b"1234" + packed[-4:], packed[:30] + b"\xff" * 9 + packed[39:]):
        path.write_bytes(damaged)
        assert re.fullmatch(f"{path} is a damaged gzip file: [a-z -]+\n", probe(plain_folder, "data", inputs=[str(path).encode()], code=2))


def test_text_stays_text(plain_folder, tmp_path):
    """A file is text because of its name, or because it does not begin like examples."""
    texts = {"a.txt": '{"text": "a"}\n', "A.TXT": "[{", "b.txt": "a,b\n1,2\n", "tex": "{\\bf Hello}", "c": "{ int i; }",
             "list": "[1] A reference", "mark": '{\n  "a": 1\n}', "py": "[{}]", "x": "{}", "y": "[", "z": "BZh", "md": "[a](b)"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    got = encode_all(plain_folder, [str(tmp_path / name) for name in texts], command="data")
    plain = encode_all(plain_folder, texts.values())
    for name, tokens, expected in zip(texts, got, plain, strict=True):
        assert tokens[1:] == expected, name


TABLES = {
    "a.csv": (b"text\na\n", "is a CSV table, which is not read: write its rows as JSON lines, "),
    "a.TSV": (b"text\tb\n", "is a TSV table"), "a.parquet": (b"x", "is a Parquet table"), "b": (b"PAR1\x15", "is a Parquet table"),
    "c": (b"ARROW1\0\0", "is an Arrow table"), "d": (b"\xff\xff\xff\xff\x10\0", "is an Arrow table"),
    "a.jsonl.gz": (gzip.compress(b'{"text": "a"}')[:12], "is a damaged gzip file: "), "e": (b"\x28\xb5\x2f\xfd", "is packed (zstd)"),
    "twice.gz": (gzip.compress(gzip.compress(b"a")), "is packed (twice, by gzip): unpack it first"),
    "a.tar.gz": (gzip.compress(b"a"), "is packed (tar)"), "corpus.gz": (gzip.compress(b"a".ljust(257, b"\0") + b"ustar\0"), "is packed (tar)"),
    "b.csv.gz": (gzip.compress(b"a,b"), "is a CSV table"), "b.csv.GZ": (gzip.compress(b"a,b"), "is a CSV table"),
    "train.bin.gz": (gzip.compress(bytes(3000)), "is a compressed token shard: unpack it first"),
    "f.json": (b'{\n "data": []\n}', "is neither a JSON list of examples nor an example a line; a file that ends in .txt"),
    "g.json": (b'"text"', "is neither a JSON list"),
    "h.json": (b'{"data": [{"text": "a"}]}', 'line 1 has "data", where one of these is read: "messages"; '),
    "i.json": (b'[{"text": "a"}', "its JSON list has no end"), "j.json": (b"[]", "--data: PATH has no example"),
    "k.json": (b'[\n{"text": "a"},\n\n {"txt": "b"}]', 'example 2 (line 4) has "txt", where one of these is read: '),
    "l.json": (b'[{"text": "a"} {"text": "b"}]', "example 1 (line 1): broken JSON: "),
    "m.json": (b'[{"text": "a"},]', 'line 1: "]" where an example is expected in a JSON list'),
    "n.json": (b'[{"text": "a"}]\n{}', 'line 2: "{" where nothing more is expected in a JSON list'),
    "pointer.json": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
                     "is a Git LFS pointer and not the file itself: run `git lfs pull`"),
    "o": (b'{"a": 1} is text', "line 1: broken JSON: "),
    "p": (b'[{"a": 1}]', "(the file begins as JSON; to train on it as text, let its name end in .txt)"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_and_other_json_are_refused(plain_folder, tmp_path, name):
    content, message = TABLES[name]
    path = tmp_path / name
    path.write_bytes(content)
    error = probe(plain_folder, "data", inputs=[str(path).encode()], code=2)
    assert message.replace("PATH", str(path)) in error and str(path) in error and error.count("\n") == 1


# ---- training

FAMILIES = {
    "llama": ("--heads", 4, "--kv-heads", 2, "--channels", 48),
    "mistral": ("--heads", 4, "--kv-heads", 2, "--channels", 48, "--window", 9),
    "gpt2": ("--heads", 3, "--channels", 48),
    "bloom": ("--heads", 6, "--channels", 48),
}
LENGTH = 48
RUN = ("--model", "model", "--data", "data.jsonl", "--batch", 3, "--seq-len", LENGTH, "--sample", "tokens=0")


def given(path, family, tokenizer):
    make(path / "model", "--family", family, "--layers", 2, "--vocab", VOCAB, "--positions", 64, *FAMILIES[family])
    save_tokenizer(path / "model", tokenizer, PLAIN_CHATML, "<|endoftext|>", "<|im_end|>")
    write_examples(path / "data.jsonl", 90)
    return path


@pytest.fixture(params=FAMILIES)
def any_work(request, tmp_path, tokenizer):
    return given(tmp_path, request.param, tokenizer)


@pytest.fixture
def work(tmp_path, tokenizer):
    return given(tmp_path, "llama", tokenizer)


def log_of(train, work, *options):
    result = train(*RUN, *options, "--log", "log", cwd=work)
    return read_log(work / "log"), result.stdout.decode()


@pytest.mark.parametrize("loss_on", ["completions", "all"])
def test_twenty_steps(train, any_work, loss_on):
    """./train packs the examples; the reference runs them one by one."""
    options = ("--grad-accum", 2, "--steps", 20, "--lr", 3e-3, "--warmup", 4, "--eval-every", 8, "--eval-batches", 2,
               "--loss-on", loss_on)
    expected = run_reference("--model", any_work / "model", "--data", any_work / "data.jsonl", *RUN[4:8], *options)
    log, _ = log_of(train, any_work, *options)
    bound = LOSS_BOUND[train.precision]
    assert by_key(log, "loss") == pytest.approx(by_key(expected, "loss"), rel=0, abs=bound)
    assert by_key(log, "val_loss") == pytest.approx(by_key(expected, "val_loss"), rel=0, abs=bound)
    assert len(by_key(log, "val_loss")) == 3
    if train.precision == "fp32":
        assert by_key(log, "grad_norm") == pytest.approx(by_key(expected, "grad_norm"), rel=1e-3)


def test_training_on_compressed_data(train_fp32, work, monkeypatch):
    """Losses, held out examples and the plan are those of the same data uncompressed; what is unpacked needs room in TMPDIR."""
    (work / "data.jsonl.gz").write_bytes(gzip.compress((work / "data.jsonl").read_bytes()))
    (work / "text.gz").write_bytes(gzip.compress(b"Hi! " * 1_500_000 + (work / "data.jsonl").read_bytes()))
    (work / "text").write_bytes(gzip.decompress((work / "text.gz").read_bytes()))
    for name in ("data.jsonl", "text"):
        options = ("--data", name, "--steps", 3, "--eval-every", 2, *(("--model", "d1", "--batch", 4) if name == "text" else ()))
        plain, packed = (log_of(train_fp32, work, *options, "--data", file)[0] for file in (name, name + ".gz"))
        assert [by_key(packed, key) for key in ("loss", "val_loss")] == [by_key(plain, key) for key in ("loss", "val_loss")]
    shown = [train_fp32(*RUN[:2], "--data", name, "--show-example", 3, cwd=work).stdout.replace(b".gz", b"")
             for name in ("data.jsonl", "data.jsonl.gz")]
    assert shown[0] == shown[1]
    for number in range(90):
        (work / f"part-{number:02}.txt.gz").write_bytes(gzip.compress(b"%d, " % number * 100))
    with train_fp32.start("--model", "d1", "--data", "part-*.txt.gz", "--steps", 1, "--sample", "tokens=0", cwd=work, stderr=-1,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))) as run:  # files open at a time
        out, errors = run.communicate(timeout=100)
    assert run.returncode == 0 and b"data: 31500 tokens" in out, (out, errors)
    monkeypatch.setitem(train_fp32.environment, "TMPDIR", "/nowhere")
    assert error_line(train_fp32, "--model", "d1", "--data", "text.gz", "--steps", 1, cwd=work) == (
        "train: /nowhere: cannot keep what text.gz contains there: No such file or directory; TMPDIR can name another folder\n")


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_twenty_steps_of_an_adapter(train_fp32, any_work, kind):
    """LoRA with packed examples. With a soft prompt, each example has a sequence of its own. In bf16, twenty
    steps of a soft prompt differ by a percent because of rounding; that its arithmetic is right is shown by
    fp32."""
    make_adapter(any_work, peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM") if kind == "prompt" else
                 peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    options = ("--adapter", any_work / "adapter", "--steps", 20, "--lr", 3e-3, "--eval-batches", 2)
    expected = run_reference("--model", any_work / "model", "--data", any_work / "data.jsonl", *RUN[4:8], *options)
    log, out = log_of(train_fp32, any_work, *options)
    examples, sequences = re.search(r"data: (\d+) examples, .* in (\d+) sequences of", out).groups()
    assert (examples == sequences) == (kind == "prompt")
    for key in ("loss", "val_loss"):
        assert by_key(log, key) == pytest.approx(by_key(expected, key), rel=0, abs=LOSS_BOUND["fp32"])


def test_packed_is_unpacked(train, any_work):
    """An epoch in one step, in sequences of several examples and in sequences of one."""
    examples = reference.Examples(str(any_work / "model"), "completions")
    choose, lines = random.Random(1), []
    while len(lines) < 24:
        line = json.dumps({"prompt": words(choose, 3), "completion": " " + words(choose, choose.randint(1, 5))})
        if 11 <= len(examples.read(line)[0]) - 1 <= 20:
            lines.append(line)
    (any_work / "data.jsonl").write_text("\n".join(lines))
    (any_work / "val.jsonl").write_text("\n".join(lines[::3]))
    packed = len(reference.packed([examples.read(line) for line in lines], 60))
    assert packed < 12
    losses = []
    for batch, length in ((24, 20), (packed, 60)):
        log, _ = log_of(train, any_work, "--batch", batch, "--seq-len", length, "--steps", 20, "--lr", 3e-3,
                        "--val-data", "val.jsonl")
        losses.append([*by_key(log, "loss").values(), *by_key(log, "val_loss").values()])
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-5 if train.precision == "fp32" else 1e-2)
    assert len(losses[0]) == 21 and losses[0][0] - losses[0][-2] > 0.5


def test_what_the_data_are(train, work):
    """One line describes the data; one line each reports texts that continue and examples that were cut."""
    examples = reference.Examples(str(work / "model"), "completions")
    lines = (work / "data.jsonl").read_text().splitlines()
    [file] = examples.read_files([work / "data.jsonl"], LENGTH)
    count = len(file) - len(file) // 10
    sequences = reference.packed(file[:count], LENGTH)
    tokens, rows = (sum(len(tokens) - one for tokens, _ in file[:count]) for one in (0, 1))
    _, out = log_of(train, work, "--steps", 2)
    padding = 100 * (1 - rows / LENGTH / len(sequences))
    assert (f"data: {count} examples, {tokens} tokens, {reference.tokens_to_learn(sequences)} of them with loss, in "
            f"{len(sequences)} sequences of {LENGTH}, {padding:.1f}% padding; 2 steps read 6 sequences") in out
    long = [len(examples.read(line)[0]) > LENGTH + 1 for line in lines]
    texts = sum(is_long and "text" in json.loads(line) for line, is_long in zip(lines, long))
    assert texts > 0 and sum(long) > texts and padding < 15
    assert f"data.jsonl: {texts} texts are longer than a sequence and go on in others\n" in out
    longest = max(len(examples.read(line)[0]) for line in lines if "text" not in json.loads(line))
    assert longest > 65, "the model has 64 positions"
    assert (f"data.jsonl: {sum(long) - texts} examples are longer than --seq-len {LENGTH}: their ends are cut off and "
            f"not learnt; --seq-len 64, all that the model has, cuts fewer\n") in out
    make(work / "wide", "--family", "llama", "--layers", 1, "--vocab", VOCAB, "--positions", longest, *FAMILIES["llama"])
    shutil.copy(work / "model" / "tokenizer.json", work / "wide")
    out = train("--model", work / "wide", "--data", work / "data.jsonl", "--seq-len", LENGTH, "--steps", 1, "--sample", "tokens=0").stdout
    assert f"not learnt; --seq-len {longest - 1} cuts none\n" in out.decode()


@pytest.mark.parametrize("more", [0, 1, 2, LENGTH, 3 * LENGTH + 1])
def test_a_text_goes_on(train_fp32, work, more):
    """Each token of a long text has a loss once. The loss is that of its windows, by transformers."""
    choose = random.Random(more)
    make(work / "bytes", "--family", "llama", "--layers", 2, "--vocab", 256, "--positions", 64, *FAMILIES["llama"])
    text = "".join(choose.choice("abcdef ") for _ in range(LENGTH + more + 1))
    (work / "text.jsonl").write_text(json.dumps({"text": text}))
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "bytes")
    losses = []
    for at in range(0, len(tokens) - 1, LENGTH):
        part = torch.from_numpy(tokens[at:at + LENGTH + 1])[None]
        losses += torch.nn.functional.cross_entropy(model(part[:, :-1]).logits[0], part[0, 1:], reduction="none").tolist()
    assert len(losses) == len(tokens) - 1
    out = train_fp32("--model", "bytes", "--val-data", "text.jsonl", "--steps", 0, "--batch", 1, "--seq-len", LENGTH,
                     "--eval-batches", 99, "--log", "log", cwd=work)
    [loss] = by_key(read_log(work / "log"), "val_loss").values()
    assert loss == pytest.approx(np.mean(losses), abs=1e-5), out


READ = {
    "a text": lambda: [{"text": " ".join(WORDS) * 6000}],
    "a prompt": lambda: [{"prompt": " ".join(WORDS) * 1500, "completion": "b"}, *[{"text": "some words"}] * 50],
    "a field": lambda: [{"text": "some words", "numbers": [1] * 10**6}, *[{"text": "some words"}] * 50],
    "lists": lambda: [MANY_LISTS, *[{"text": "some words"}] * 50],
    "objects": lambda: [{"messages": ASKED, "tools": [{"name": f"f{i}", "of": {"a": "b"}} for i in range(60_000)]}, *[{"text": "some words"}] * 50],
    "fields": lambda: [{"messages": [ASKED[0] | {f"field {i}": [] for i in range(60_000)}, ASKED[1]]}, *[{"text": "some words"}] * 50],
    "short": lambda: [{"text": f"{i} and {i}"} for i in range(50_000)],
}
MANY_LISTS = {"messages": [ASKED[0] | {"tool_calls": [[0]] * 300_000}, ASKED[1]]}


@pytest.mark.on_a_cpu("a GPU's plan counts the memory of the GPU, and this measures that of the process")
@pytest.mark.parametrize("name", [*list(READ)[:-1], pytest.param("short", marks=pytest.mark.more)])
def test_reading_examples_stays_in_the_plan(train_fp32, work, name):
    """However long a line is, and however many there are. If a line takes more than everything that comes
    later, the plan says so."""
    (work / "data.jsonl").write_text("\n".join(lines_of(READ[name]())) + "\n")
    options = ("--model", work / "model", "--data", work / "data.jsonl", "--batch", 1, "--seq-len", LENGTH,
               "--sample", "tokens=0", "--threads", 2)
    totals = train_fp32.plan(*options)["totals"]
    taken = peak(train_fp32, *options, "--steps", 10**6, line=rb"^taken from")
    assert taken < totals["total"]
    assert ("reading" in totals) == (name != "short")
    if name == "a text":  # in its line, and in parts
        assert (work / "data.jsonl").stat().st_size < totals["reading"] < (work / "data.jsonl").stat().st_size + 2**20


def test_a_line_of_many_values_is_refused_without_memory(train_fp32, work):
    """Values of a few bytes each take many times the memory of their line."""
    (work / "data.jsonl").write_text(json.dumps(MANY_LISTS) + "\n" + FINE)
    options = ("--model", work / "model", "--data", work / "data.jsonl", "--batch", 1, "--seq-len", LENGTH, "--steps", 1)
    with limited_runs.cgroup(80 << 20) as folder:
        result = limited_runs.run(train_fp32, *options, "--memory", "80MiB", inside=folder)
    error = result.stderr.decode()
    assert result.returncode == 2 and error.count("\n") == 1, error
    assert re.search(r"data\.jsonl: line 1: reading it takes [\d.]+ MiB, and [\d.]+ are free \(.*\); divide it into shorter lines$", error), error


LARGE = {
    "keys of a field": lambda: {"text": "some words", "field": {f"key {i}": i for i in range(80_000)}},
    "keys of a message": lambda: {"messages": [ASKED[0] | {f"key {i}": i for i in range(80_000)}, ASKED[1]]},
    "keys of another tool's message": lambda: {"conversations": [{"from": "human", "value": "a"} | {f"key {i}": i for i in range(80_000)},
                                                                 {"from": "gpt", "value": "b"}]},
    "tools": lambda: {"messages": ASKED, "tools": [{"name": f"f{i}"} for i in range(80_000)]},
    "messages": lambda: {"messages": ASKED * 2000},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_examples_take_little_time(train_fp32, work, name):
    """The time grows with the size of a line. Of a long conversation, no answers are looked for beyond the
    tokens that are kept."""
    (work / "data.jsonl").write_text("\n".join([json.dumps(LARGE[name]()), *[FINE] * 50]) + "\n")
    assert cpu_seconds(lambda: train_fp32(*RUN, "--plan", cwd=work)) < 4


def test_long_conversations_are_learnt_as_far_as_they_are_kept(train_fp32, work):
    """The answers of a conversation that is cut have the losses that they have in one that ends there."""
    choose = random.Random(3)
    messages = [says(role, words(choose, 1)) for _ in range(60) for role in ("user", "assistant")]
    messages[3]["weight"] = messages[41]["weight"] = 0
    logs = []
    for count in (26, 120):
        lines = [{"messages": messages[:count]}] * 8
        (work / "data.jsonl").write_text("\n".join(lines_of(lines)) + "\n")
        logs.append([log_of(train_fp32, work, "--steps", 2, "--loss-on", kind)[0] for kind in ("completions", "all")])
    for short, long in zip(*logs):
        assert figures(short) == figures(long)


def test_a_template_that_takes_too_long_to_show_its_answers(tmp_path):
    """It is run for each answer, and the steps are counted together."""
    template = ("{%- for i in range(600) %}{% if 'b' in messages[0].content %}{% endif %}{% endfor %}"
                "{%- for m in messages[1:] %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{%- endfor %}")
    folder = save_tokenizer(tmp_path, smollm2(), template, "<|im_start|>", "<|im_end|>")
    line = json.dumps({"messages": [says("system", "a" * 400_000), *ASKED * 60]})
    assert re.fullmatch(r"a line: the chat template takes more than 110\d million steps to show where the answers of 121 messages are: "
                        r"divide the conversation, or put {% generation %} around answers in the template\n",
                        probe(folder, "examples", "auto", inputs=[line.encode()], code=2))


def test_short_examples_take_little_time(train_fp32, tmp_path):
    """A large vocabulary is not searched for each of them."""
    letters = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    vocabulary = letters | {f"<{i}>": i for i in range(len(letters), 60_000)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    make(tmp_path / "model", "--layers", 1, "--heads", 1, "--channels", 8, "--vocab", len(vocabulary))
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "data.jsonl").write_text("\n".join(lines_of({"text": str(i)} for i in range(10, 20_000))) + "\n")
    plan = ("--model", tmp_path / "model", "--data", tmp_path / "data.jsonl", "--batch", 1, "--seq-len", 32)
    assert cpu_seconds(lambda: train_fp32.plan(*plan)) < 2


def test_options_change_no_bit(train, work):
    first = log_of(train, work, "--steps", 4, "--grad-accum", 2, "--recompute", "none")[0]
    for options in (("--recompute", "block"), ("--recompute", "ffn"), ("--threads", 1)):
        log, _ = log_of(train, work, "--steps", 4, "--grad-accum", 2, *options)
        assert figures(log) == figures(first), options


def test_a_resume_is_the_unbroken_run(train, work):
    options = ("--schedule", "constant", "--save-every", 3, "--keep", 0, "--out", "out")
    whole = figures(log_of(train, work, "--steps", 7, *options)[0])
    after = saved_bytes(work / "out" / "step-00000007")
    shutil.rmtree(work / "out" / "step-00000007")
    shutil.rmtree(work / "out" / "step-00000006")
    train("--resume", "out/step-00000003", cwd=work)
    assert saved_bytes(work / "out" / "step-00000007") == after
    assert figures(read_log(work / "log")) == whole  # what came after step 3 was cut off, and made again
    text = (work / "data.jsonl").read_text()
    (work / "data.jsonl").write_text(text + json.dumps({"text": "More."}))
    assert b"has changed since" in train("--resume", "out", "--steps", 8, cwd=work, code=2).stderr
    generated = train("--resume", "out", "--steps", 0, "--prompt", "A", "--sample", "tokens=3", cwd=work)
    assert generated.stdout


def test_validation_alone(train, work):
    data = work / "data.jsonl"
    expected = run_reference("--model", work / "model", "--data", data, "--val-data", data, *RUN[4:8], "--steps", 1,
                             "--lr", 0)
    out = train("--model", "model", "--val-data", "data.jsonl", *RUN[4:], "--steps", 0, cwd=work).stdout.decode()
    [loss] = by_key(expected, "val_loss").values()
    assert float(re.search(r"validation loss ([\d.]+)", out)[1]) == pytest.approx(loss, abs=LOSS_BOUND[train.precision])


def test_nothing_to_learn_in_a_step(train, work):
    """Such a step counts as one without a loss, and the run continues."""
    choose = random.Random(2)
    (work / "data.jsonl").write_text("\n".join(lines_of(
        [{"prompt": words(choose, 90), "completion": "cut off"}] * 3 +
        [{"prompt": "a", "completion": words(choose, 60)}] * 3)))
    log, out = log_of(train, work, "--batch", 1, "--steps", 12, "--val-data", "data.jsonl")
    losses = by_key(log, "loss")
    said = [int(step) for step in re.findall(r"step +(\d+): no token has a loss, so the gradient is zero\n", out)]
    assert len(said) == 6 and [step for step, loss in losses.items() if loss == 0] == said
    assert all(0 <= loss < 20 for loss in losses.values()) and all(line.get("grad_norm", 0) < 1e3 for line in log)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
                   "merges.txt", "tokenizer.model", "chat_template.jinja", "additional_chat_templates/tools.jinja")
GENERATION = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 5, "temperature": 0.7, "top_p": 0.9, "do_sample": True}


def check_saved_beside(folder, model):
    """What a save, an adapter or a merged model says of how to generate, and its tokenizer."""
    ends = {"eos_token_id": [0, 2]}  # with the token that ends an answer
    assert json.loads((folder / "generation_config.json").read_text()) == GENERATION | ends
    for name in TOKENIZER_FILES:
        assert (folder / name).read_bytes() == (model / name).read_bytes(), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert set(tokenizer.chat_template) == {"default", "tools"}
    assert transformers.GenerationConfig.from_pretrained(str(folder)).eos_token_id == [0, 2]


def test_what_is_saved_beside_the_weights(train_fp32, work):
    """For conversations that end differently from the model's texts, on every way from one folder to the
    next."""
    model = work / "model"
    (model / "additional_chat_templates").mkdir()
    for name in TOKENIZER_FILES:
        if not (model / name).exists():
            (model / name).write_text("{}" if name.endswith("json") else f"{PLAIN_CHATML}{{# {name} #}}")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 5}))
    (model / "generation_config.json").write_text(json.dumps(GENERATION | {"_from_model_config": True}))
    train_fp32(*RUN, "--steps", 1, "--out", "full", cwd=work)
    check_saved_beside(work / "full", model)
    saved = json.loads((work / "full" / "config.json").read_text())
    assert (saved["eos_token_id"], saved["pad_token_id"]) == (0, 5)
    train_fp32("--resume", "full", "--steps", 2, "--keep", 1, cwd=work)
    check_saved_beside(work / "full", model)
    train_fp32(*RUN, "--train", "lora", "--lora-rank", 2, "--steps", 1, "--out", "lora", cwd=work)
    check_saved_beside(work / "lora", model)
    train_fp32("--resume", "lora", "--steps", 2, "--keep", 1, cwd=work)
    check_saved_beside(work / "lora", model)
    train_fp32("--model", "model", "--adapter", "lora", "--steps", 0, "--merge", "merged", cwd=work)
    check_saved_beside(work / "merged", model)
    (work / "plain.jsonl").write_text("\n".join(lines_of([{"text": "It is a text."}] * 40)))
    train_fp32("--model", "merged", "--data", "plain.jsonl", "--batch", 1, "--seq-len", 8, "--steps", 1, "--out", "more", cwd=work)
    check_saved_beside(work / "more", model)


def test_what_is_saved_of_a_gguf(train_fp32, work, tokenizer):
    """Adapters and merged models have the GGUF's tokenizer; it makes the same tokens from texts and
    conversations."""
    vocabulary, spelt = tokenizer.get_vocab(), json.loads(tokenizer.to_str())
    tokens = sorted(vocabulary, key=vocabulary.get)
    merges = [" ".join(merge) for merge in spelt["model"]["merges"]]

    def add_keys(writer):
        gguf_files.add_vocabulary(writer, "gpt2", tokens, [3] * 3 + [1] * (len(tokens) - 3), merges, pre="gpt-2",
                                 bos_token_id=0, eos_token_id=0, padding_token_id=1)
        writer.add_chat_template(PLAIN_CHATML)

    config = transformers.LlamaConfig(**gguf_files.LLAMA | {"vocab_size": VOCAB}, tie_word_embeddings=True)
    gguf_files.write_gguf(work / "model.gguf", transformers.AutoModelForCausalLM.from_config(config), "llama", add_keys)
    data = ("--data", "data.jsonl", *RUN[4:], "--train", "lora", "--lora-rank", 2)
    train_fp32("--model", "model.gguf", *data, "--steps", 1, "--out", "lora", "--merge", "merged", cwd=work)
    [line] = lines_of([{"messages": CONVERSATIONS[0]}])
    for folder in (work / "lora", work / "merged"):
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation == {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 1}
        assert (encode_all(folder, [line], "auto", command="examples") ==
                encode_all(work / "model", [line], "auto", command="examples"))
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        assert theirs("A <|im_end|> B")["input_ids"] == tokenizer.encode("A <|im_end|> B").ids
        assert (theirs.chat_template, theirs.eos_token_id, theirs.pad_token_id) == (PLAIN_CHATML, 0, 1)
    train_fp32("--model", "merged", *data[:2], *RUN[4:], "--steps", 1, cwd=work)


FINE = json.dumps({"prompt": "a", "completion": "b"})


def chat_of(*roles, said="a"):
    return json.dumps({"messages": [says(role, said) for role in roles]})


BAD_LINES = {
    "broken": ('{"text": "a', "line 3: broken JSON: parse error at column 12: "),
    "list": ("[1]", "line 3 is not a JSON object"),
    "other": ('{"txt": "a", "id": 3}', 'line 3 has "txt", "id", where one of these is read: "messages"; "conversations"; '),
    "nothing": ("{}", "line 3 has no fields, where one of these is read: "),
    "ShareGPT's speaker": (json.dumps({"conversations": [{"from": "robot", "value": "a"}]}),
                           'line 3: message 1: "from" is "robot", where "system", "human", "gpt" and "tool" are known'),
    "ShareGPT's value": (json.dumps({"conversations": [{"from": "human"}]}), 'line 3: message 1 has no "content"'),
    "no conversations": ('{"conversations": "a"}', 'line 3: "conversations" is not a list of messages'),
    "Alpaca's output": (json.dumps({"instruction": "a", "input": "", "output": ""}), 'line 3: "output" is empty'),
    "Alpaca's input": (json.dumps({"instruction": "a", "input": ["b"], "output": "c"}), 'line 3: "input" is not a text'),
    "Alpaca's history": (json.dumps({"instruction": "a", "output": "c", "history": [["q"]]}),
                         'line 3: "history" is not a list of questions with their answers'),
    "answer": ('{"question": "a", "answer": 4}', 'line 3: "answer" is not a text'),
    "preferences": (json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}),
                    'line 3 is preference data ("chosen" and "rejected"), which is not trained on; to train on the chosen answers alone, '),
    "a bad answer": (json.dumps({"prompt": "a", "completion": "b", "label": False}),
                     'line 3: "label" is false: in KTO\'s data that marks a bad answer, and these are not trained on; leave such examples out'),
    "a bad chat": (json.dumps({"messages": CONVERSATIONS[0], "kto_tag": False}), 'line 3: "kto_tag" is false: in KTO'),
    "a wrong answer": (json.dumps({"question": "a", "answer": "b", "label": 0}), 'line 3: "label" is 0: in KTO'),
    "two system texts": (json.dumps({"messages": CONVERSATIONS[1], "system": "a"}), 'line 3 has "system" and a message of the system\'s'),
    "continued": (json.dumps({"messages": CONVERSATIONS[0], "chat_template_kwargs": {"continue_final_message": True}}),
                  'line 3: "chat_template_kwargs" cannot set "continue_final_message"'),
    "half": ('{"prompt": "a"}', 'line 3 has "prompt", where one of these is read: '),
    "other half": ('{"completion": "a"}', 'line 3 has no "prompt"'),
    "number": ('{"text": 3}', 'line 3: "text" is not a text'),
    "null": ('{"prompt": "a", "completion": null}', 'line 3: "completion" is not a text'),
    "empty completion": ('{"prompt": "a", "completion": ""}', 'line 3: "completion" is empty'),
    "empty text": ('{"text": ""}', 'line 3: "text" is empty'),
    "no messages": ('{"messages": []}', 'line 3: "messages" is not a list of messages'),
    "no role": ('{"messages": [{"content": "a"}]}', 'line 3: message 1 has no "role"'),
    "no content": ('{"messages": [{"role": "user"}]}', 'line 3: message 1 has no "content"'),
    "role": (chat_of("robot"), 'line 3: message 1: "role" is "robot"'),
    "silent": (chat_of("user", "assistant", said=""), "line 3: message 2: the assistant says nothing"),
    "no answer": (chat_of("user"), "line 3: none of the messages is the assistant's"),
    "not UTF-8": (b'{"text": "\xff"}', "line 3 is not UTF-8 text: no character has the byte 0xff in column 11"),
    "no words": (json.dumps({"text": "a" * 300_000}), "line 3: near byte 0 a piece of more than 256 KiB begins that"),
    "twice": ('{"text": "a", "text": "b"}', 'line 3: broken JSON: key "text" appears twice'),
    "deep": ('{"text": "a", "x": ' + "[" * 300 + "]" * 300 + "}", "line 3 nests more than 200 deep"),
    "many kwargs": (json.dumps({"messages": CONVERSATIONS[0], "chat_template_kwargs": {f"a{i}": 1 for i in range(1001)}}),
                    'line 3: "chat_template_kwargs" has 1001 fields, and may have 1000'),
    "functions": (json.dumps({"messages": CONVERSATIONS[0], "functions": [{}]}), 'line 3: "functions" is not supported'),
    "tools": (json.dumps({"messages": CONVERSATIONS[0], "tools": ["a"]}), 'line 3: "tools" is not a list of JSON objects'),
    "kwargs": (json.dumps({"messages": CONVERSATIONS[0], "chat_template_kwargs": {"messages": []}}),
               'line 3: "chat_template_kwargs" cannot set "messages"'),
    "function call": (json.dumps({"messages": [says("user", "a"), says("assistant", "b") | {"function_call": {"name": "f"}}]}),
                      'line 3: message 2: "function_call" is not supported'),
    "tool calls": (json.dumps({"messages": [says("user", "a"), {"role": "assistant", "tool_calls": [{}]}]}),
                   "line 3: the chat template (line 1): 'dict object' has no attribute 'content'"),
    "image": (json.dumps({"messages": [says("user", [{"type": "image", "url": "x"}]), says("assistant", "b")]}),
              'line 3: message 1: "content" has a part of the type \\x22image\\x22, where "text" is supported'),
    "content": (json.dumps({"messages": [says("user", {"text": "a"}), says("assistant", "b")]}), 'line 3: message 1: "content" is not a text'),
    "long number": (json.dumps({"messages": CONVERSATIONS[0], "tools": [{"a": 10**30}]}), "line 3 has a number of 19 or more digits"),
    "weight": (json.dumps({"messages": [says("user", "a"), says("assistant", "b") | {"weight": 0.5}]}),
               'line 3: message 2: "weight" is 0.5, where 0 and 1 are supported'),
    "train": (json.dumps({"messages": [says("user", "a") | {"train": "no"}]}),
              'line 3: message 1: "train" is "no", where true and false are supported'),
}


def test_fields_that_are_not_read_are_named(train_fp32, work):
    """Those that mean something in another format, or say how good an answer is; not those that are read, empty or unknown."""
    for examples, named in (([{"text": "a b", "label": 0, "system": "c"}, {"messages": ASKED, "history": [["a", "b"]], "score": 3}], "history, label, score, system"),
                            ([{"prompt": "a", "completion": "b", "tools": [{"name": "f"}], "input": ""}], "tools"),
                            ([{"instruction": "a", "output": "b", "input": "c", "history": [], "text": "d", "id": 3, "chosen": None}], None)):
        (work / "fields.jsonl").write_text("\n".join(lines_of(examples * 3)))
        said = train_fp32(*RUN, "--data", "fields.jsonl", "--show-example", 1, cwd=work).stderr.decode()
        assert said == (f"fields that are not read: {named}\n" if named else "")


def test_a_length_that_is_suggested_is_accepted(train_fp32, work):
    """Where no token is learnt, and where some are; of a model with few positions, its positions are suggested."""
    for words_before, suggested in ((50, None), (300, "64")):
        (work / "long.jsonl").write_text("\n".join(lines_of([{"prompt": "a " * words_before, "completion": "b"}] * 20)))
        error = error_line(train_fp32, *RUN, "--data", "long.jsonl", "--seq-len", 16, cwd=work)
        length = re.search(r"to be learnt in sequences of 16: what comes later is cut off; --seq-len (\d+)(?: cuts none|, all that the model has, cuts fewer)$", error)[1]
        assert suggested in (None, length)
        if suggested:
            error = error_line(train_fp32, *RUN, "--data", "long.jsonl", "--seq-len", length, cwd=work)
            assert error.endswith("in sequences of 64: what comes later is cut off; the model has no longer ones\n")
        else:
            train_fp32(*RUN, "--data", "long.jsonl", "--seq-len", length, "--steps", 1, cwd=work)


@pytest.mark.parametrize("wrong", BAD_LINES)
def test_bad_lines(train_fp32, work, wrong):
    line, message = BAD_LINES[wrong]
    line = line if isinstance(line, bytes) else line.encode()
    (work / "data.jsonl").write_bytes(FINE.encode() + b"\n\n" + line + b"\n" + FINE.encode() + b"\n")
    before = listing(work)
    result = train_fp32(*RUN, "--out", "out", "--log", "log", cwd=work, code=2)
    error = result.stderr.decode()
    assert error.startswith("train: data.jsonl: " + message) and error.count("\n") == 1, error
    assert listing(work) == before


def test_other_mistakes(train_fp32, work):
    first_chat = 1 + ["messages" in json.loads(line) for line in open(work / "data.jsonl")].index(True)
    (work / "text").write_text("plain " * 1000)
    (work / "none.jsonl").write_text("\n \n")
    long = {"prompt": "a " * 300, "completion": "b"}
    (work / "long.jsonl").write_text("\n".join([json.dumps(long)] * 20))
    before = listing(work)
    for options, message in (
            (("--data", "data.jsonl", "text"),
             "--data: data.jsonl is a file of examples in JSON and text a text; give files of one kind"),
            (("--data", "text", "--loss-on", "all"),
             "--loss-on all is for examples in JSON (.jsonl, .ndjson, .json), and the data have none"),
            (("--data", "text", "--chat-format", "chatml"), "--chat-format chatml is for examples in JSON"),
            (("--data", "none.jsonl"), "--data: none.jsonl has no example"),
            (("--data", "long.jsonl"),
             f"--data: long.jsonl: no token of 20 examples is to be learnt in sequences of {LENGTH}"),
            (("--chat-format", "llama3"),
             '--chat-format llama3: the tokenizer of model has no token "<|start_header_id|>"'),
            (("--model", "d1"), f"data.jsonl: line {first_chat} is a conversation, and a new model knows no chat format: give the folder of "
                                "a trained model, --model DIR"),
            (("--batch", 5000), "--batch 5000: the data fill only ")):
        error = train_fp32(*RUN, *options, "--out", "out", cwd=work, code=2).stderr.decode()
        assert error.startswith("train: " + message) and error.count("\n") == 1, error
    assert listing(work) == before


def test_bytes(train_fp32, work):
    """Without a tokenizer, tokens are bytes, and there is no chat format."""
    examples = [{"prompt": words(random.Random(i), 2), "completion": words(random.Random(-i), 2)} for i in range(1, 40)]
    (work / "bytes.jsonl").write_text("\n".join(lines_of(examples)))
    make(work / "small", "--layers", 2, "--heads", 3, "--channels", 48, "--positions", 64)
    options = ("--model", "small", "--data", "bytes.jsonl", "--steps", 5)
    log, _ = log_of(train_fp32, work, *options)
    expected = run_reference("--model", work / "small", "--data", work / "bytes.jsonl", *RUN[4:8], "--steps", 5,
                             "--lr", 5e-5)
    assert by_key(log, "loss") == pytest.approx(by_key(expected, "loss"), rel=0, abs=1e-4)
    train_fp32("--data", "bytes.jsonl", "--model", "llama:d1", "--batch", 2, "--seq-len", 64, "--steps", 1,
               "--sample", "tokens=0", cwd=work)
    (work / "bytes.jsonl").write_text(json.dumps({"messages": CONVERSATIONS[0]}))
    assert b"--chat-format" in train_fp32(*RUN, *options, cwd=work, code=2).stderr
