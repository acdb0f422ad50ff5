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
    assert len(names) == len(set(names)) and set(names) <= there
    assert all(name.endswith(".cpp") and name[:-3] + "h" in there for name in there - set(names))  # goes with its header


def test_every_line_says_what_a_file_is_for():
    for name, text in LISTED:
        assert re.fullmatch(r"[^|]{20,160}", text) and text.endswith("."), name


def test_every_item_is_a_file():
    assert len(re.findall(r"^\s*[-*] ", README, re.M)) == len(LISTED)


def level_of_files():
    """The subject of each file by its number on the page. A NAME.cpp without an entry of its own has that of its NAME.h."""
    subjects = re.split(r"^## ", README, flags=re.M)[1:]
    level = {name: number for number, text in enumerate(subjects) for name in re.findall(r"^- `([\w.]+)`", text, re.M)}
    return level | {name[:-1] + "cpp": number for name, number in level.items() if name.endswith(".h")}


def test_includes_go_down():
    """A file includes none of a subject further down the page."""
    level, upward = level_of_files(), {}
    for path in (ROOT / "llmc").glob("*"):
        for included in re.findall(r'^#include "llmc/([\w.]+)"', path.read_text(), re.M):
            if level[included] > level[path.name]:
                upward.setdefault(path.name, []).append(included)
    assert not upward


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
