"""llmc/README.md lists every file of the folder, once, with a line that says what it is for."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "llmc" / "README.md").read_text()
LISTED = re.findall(r"^- `([\w.]+)`: (.*)$", README, re.M)


def test_every_file_is_listed_once():
    there = {path.name for path in (ROOT / "llmc").iterdir() if path.is_file()} - {"README.md"}
    names = [name for name, _ in LISTED]
    assert sorted(names) == sorted(there)


def test_every_line_says_what_a_file_is_for():
    for name, text in LISTED:
        assert re.fullmatch(r"[^|]{20,160}", text) and text.endswith("."), name


def test_every_item_is_a_file():
    assert len(re.findall(r"^\s*[-*] ", README, re.M)) == len(LISTED)


def test_other_files_that_are_named_exist():
    for name in re.findall(r"`(\w+\.(?:h|cuh|cpp|cu|md))`", README):
        assert any((ROOT / folder / name).exists() for folder in ("llmc", ".", "dev/guide")), name
