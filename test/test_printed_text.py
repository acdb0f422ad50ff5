"""What the program prints and a model has not written: text of files cannot control a terminal, nor turn or hide a part of a
line; other text stays as it is."""
import json
import re

import pytest
from trainer_runs import ROOT, make, write_text

USUALLY = "fp32"  # see conftest.py
HOSTILE = "\x1b[31mX\x07\x9b2J\u202e\u2066\u200f\u200b\ufeff\u2028\U000e0041\r"
SHOWN = "".join(c if c == "X" or c in "[31m2J" else "".join(f"\\x{byte:02x}" for byte in c.encode()) for c in HOSTILE)
ORDINARY = "Grün 日本語 العربية עברית हिन्दी क्ष می\u200cخواهم 👩\u200d👧 ไทย"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    path = tmp_path_factory.mktemp("printed")
    make(path / "model", "--layers", 1, "--heads", 2, "--channels", 32, "--positions", 64, "--shard-size", "20KB")
    write_text(path / "text")
    return path


def bad_characters(text):
    """What a terminal obeys or hides, as Unicode's categories say, without what scripts are written with."""
    import unicodedata
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs") and c not in "\n\t\u200c\u200d"]


def printed(train, *arguments, code=0, cwd=None):
    result = train(*arguments, code=code, cwd=cwd)
    text = (result.stdout + result.stderr).decode()
    assert not bad_characters(text), ascii(text)
    return text


def in_toml(text):
    return '"' + "".join(f"\\U{ord(c):08x}" for c in text) + '"'


RUN = ("--data", "text", "--batch", 1, "--seq-len", 16, "--sample", "tokens=0", "--steps", 1)


def test_a_configuration_file(train, tmp_path):
    (tmp_path / "run.toml").write_text(f"batch = {in_toml(HOSTILE)}\n")
    assert f"run.toml:1: --batch: {SHOWN} is not a number" in printed(train, "--config", "run.toml", code=2, cwd=tmp_path)
    (tmp_path / "run.toml").write_text(f"batch = {in_toml(ORDINARY)}\n")
    assert ORDINARY in printed(train, "--config", "run.toml", code=2, cwd=tmp_path)


def test_options_of_a_save(train, work, tmp_path):
    train("--model", "model", *RUN, "--seed", 1, "--out", tmp_path / "out", cwd=work)
    state = tmp_path / "out/latest/trainer_state.json"
    good = state.read_text()
    for name in ("--data", "--seq-len", "--model", "--seed", "--train", "--schedule"):
        saved = json.loads(good)
        saved["options"][name] = [HOSTILE]
        state.write_text(json.dumps(saved))
        assert "\\x1b" in printed(train, "--resume", tmp_path / "out", "--steps", 2,
                                  code=0 if name == "--model" else 2, cwd=work), name
    saved = json.loads(good)
    saved["options"]["--seed"] = ["1" + HOSTILE]
    state.write_text(json.dumps(saved))
    text = printed(train, "--resume", tmp_path / "out", "--steps", 2, "--seed", 3, cwd=work)
    assert f"--seed 3 (was 1{SHOWN})" in text  # a note


def test_names_of_shards(train, work, tmp_path):
    index = work / "model/model.safetensors.index.json"
    good = index.read_text()
    names = json.loads(good)
    names["weight_map"] = {tensor: HOSTILE.replace("\r", "") for tensor in names["weight_map"]}
    index.write_text(json.dumps(names))
    assert "\\xe2\\x80\\xae" in printed(train, "--model", "model", *RUN, code=2, cwd=work)
    index.write_text(good)


def test_json_stays_json(train, work, tmp_path):
    """Names with such characters are escaped as JSON does."""
    name = tmp_path / HOSTILE.replace("\r", "")
    name.mkdir()
    for file in (work / "model").iterdir():
        (name / file.name).write_bytes(file.read_bytes())
    assert json.loads(printed(train, "--model", name, *RUN, "--plan", "json", cwd=work))["model"] == str(name)


def test_all_is_printed_by_one_function():
    """print() of llmc/error.h. What else writes to a stream has only texts of its own, or is a model's text or a log."""
    own = {"drawn_text.h": 1, "decoding.h": 1, "line_editor.cpp": 2, "chat.h": 1, "options_parse.h": 1, "error.cpp": 2,
           "simt_cpu.h": 1, "simt_fibers.h": 1, "train_gpt.cu": 1}
    calls = re.compile(r"\b(?:v?f?printf|fputs|puts|putchar|putc|fputc|fwrite|perror)\((?!\"|terminal_ \? \")|std::c(?:out|err)\b")
    for path in (*sorted((ROOT / "llmc").iterdir()), ROOT / "train_gpt.cu"):
        lines = [line for line in path.read_text().splitlines() if calls.search(line) and not line.strip().startswith("//")]
        assert len(lines) == own.get(path.name, 0), (path.name, lines)


def test_the_header_fits_a_terminal(train, work):
    lines = train("--model", "model", *RUN, cwd=work).stdout.decode().split("allocating")[0].splitlines()
    assert len(lines) == 2 and all(len(line) <= 80 for line in lines), lines
