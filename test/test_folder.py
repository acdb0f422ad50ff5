"""llmc/README.md lists every file of the folder, once, with a line that says what it is for. Scripts can be run by their names."""

import os
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


def test_scripts_are_executable():
    """Those that begin with #!, and no others: pages and help texts call them by their names."""
    scripts = [path for folder in ("dev", "dev/bench", "dev/data", "scripts", "test") for path in (ROOT / folder).iterdir()
               if path.suffix in (".py", ".sh")]
    assert len(scripts) > 100
    for path in scripts:
        assert path.read_bytes().startswith(b"#!") == os.access(path, os.X_OK), path
