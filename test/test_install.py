"""make install: what it puts where, that it runs from any folder, and that the manual and the completions know all options."""
import os
import re
import shutil
import subprocess

import pytest
from trainer_runs import ROOT


@pytest.fixture(scope="module")
def prefix(train_fp32, tmp_path_factory):
    """An installation of the trainer that is tested."""
    if train_fp32.device != "cpu" or not (ROOT / "build/cpu-fp32/train").exists():
        pytest.skip("another trainer would be built")
    path = tmp_path_factory.mktemp("prefix")
    subprocess.run(["make", "-s", "install", "DEVICE=cpu", "PRECISION=fp32", f"PREFIX={path}"], cwd=ROOT, check=True, capture_output=True)
    return path


def options_of_help(train):
    return set(re.findall(r"^  (--[a-z0-9-]+)", train("--help", "all").stdout.decode(), re.M))


def test_it_runs_from_any_folder(prefix, tmp_path):
    ran = subprocess.run([prefix / "bin/train", "--steps", "2", "--sample", "tokens=0"], cwd=tmp_path, capture_output=True, check=True)
    assert b"step     2/2" in ran.stdout and not list(tmp_path.iterdir())
    ran = subprocess.run([prefix / "bin/train", "--plan", "--gpu", "RTX 4090", "--model", "gpt2-xl"], cwd=tmp_path, capture_output=True)
    assert ran.stdout.startswith(b"fits the RTX 4090: "), ran.stderr
    script = prefix / "share/train-gpt/scripts/tinyshakespeare.sh"
    ran = subprocess.run([script, "--steps", "2", "--sample", "tokens=0", "--model", "d1", "--out", "here"], cwd=tmp_path,
                         capture_output=True, check=True)
    assert (tmp_path / "here/model.safetensors").exists()
    for path in prefix.rglob("*"):
        assert path.exists(), f"{path} leads nowhere"


def test_the_manual_has_all_options(train_fp32, prefix):
    page = (prefix / "share/man/man1/train.1").read_text()
    names = {name.replace("\\-", "-") for name in re.findall(r"^\\fB((?:\\-)+(?:[a-z0-9]|\\-)+)\\fR", page, re.M)}
    assert options_of_help(train_fp32) <= names
    if shutil.which("groff"):
        shown = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=page, text=True, capture_output=True, check=True)
        assert not shown.stderr and "--recompute" in re.sub("\x1b\\[[0-9;]*m|.\b", "", shown.stdout)


def completed(prefix, *words):
    code = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { :; }; _train; printf "%s\\n" "${COMPREPLY[@]}"'
    script = prefix / "share/bash-completion/completions/train"
    return subprocess.run(["bash", "-c", code, script, *words], text=True, capture_output=True, check=True).stdout.split()


def test_bash_completes(train_fp32, prefix):
    assert set(completed(prefix, "train", "--")) >= options_of_help(train_fp32)
    assert completed(prefix, "train", "--lora-al") == ["--lora-alpha"]
    assert completed(prefix, "train", "--zero", "") == ["auto", "0", "1", "2", "3"]
    assert {"weights=", "state=", "keys="} <= set(completed(prefix, "train", "--offload", ""))
    assert completed(prefix, "train", "--offload", "we") == ["weights="]
    assert not completed(prefix, "train", "--out", "")  # of files, the shell's own


def test_zsh_completes(train_fp32, prefix):
    text = (prefix / "share/zsh/site-functions/_train").read_text()
    assert text.startswith("#compdef train\n")
    lines = re.findall(r"^  '(--[a-z0-9-]+)\[(?:[^\]\\]|\\.)*\](:.*)?' \\$", text, re.M)
    assert {name for name, _ in lines} >= options_of_help(train_fp32)
    assert dict(lines)["--zero"].endswith(":(auto 0 1 2 3)") and dict(lines)["--out"].endswith(":_files")
    assert text.count("\n") == len(lines) + 3  # every line is one of these
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", prefix / "share/zsh/site-functions/_train"], check=True)


def test_uninstall_removes_it(prefix, tmp_path):
    shutil.copytree(prefix, tmp_path / "copy", symlinks=True)
    subprocess.run(["make", "-s", "uninstall", f"PREFIX={tmp_path / 'copy'}"], cwd=ROOT, check=True, capture_output=True)
    assert not [path for path in (tmp_path / "copy").rglob("*") if not path.is_dir()]


def make(target, *variables, code=0, **environment):
    """Runs make for a target; an environment variable that is None is unset."""
    outside = {name: value for name, value in (os.environ | environment).items()
               if value is not None and name not in ("PREFIX", "DESTDIR", "MAKEFLAGS")}
    ran = subprocess.run(["make", "-s", target, "DEVICE=cpu", "PRECISION=fp32", *variables], cwd=ROOT, env=outside,
                         text=True, capture_output=True)
    assert ran.returncode == code, ran.stderr
    return ran.stdout + ran.stderr


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def test_any_name_of_a_folder_will_do(prefix, tmp_path):
    stage, place = tmp_path / "a stage's \"$HOME\"", "/o'pt/my \"tools\" $(x) $y#z"
    where = [f"PREFIX={place}", f"DESTDIR={stage}"]
    neighbours = [tmp_path / "a", stage / "o'pt/my", stage / "o'pt/my \"tools\" "]
    for path in neighbours:
        path.mkdir(parents=True)
        (path / "mine").touch()
    assert f"installed {stage}{place}/bin/train\n" in make("install", *where)
    assert files_in(stage / place[1:]) == files_in(prefix)
    make("uninstall", *where)
    assert files_in(tmp_path) == sorted(str((path / "mine").relative_to(tmp_path)) for path in neighbours)


def test_a_prefix_is_an_absolute_path():
    for prefix in ("", "tools", "~/tools"):
        for target in ("install", "uninstall"):
            assert f"PREFIX={prefix} is no absolute path" in make(target, f"PREFIX={prefix}", code=2)
    assert "PREFIX= is no absolute path" in make("uninstall", HOME=None, code=2)


def test_uninstall_removes_nothing_outside_of_the_prefix(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "outside/train-gpt"
    outside.mkdir(parents=True)
    (outside / "mine").touch()
    (inside / "share").mkdir(parents=True)
    (inside / "share/train-gpt").symlink_to(outside)  # the link itself was installed
    (inside / "libexec").symlink_to(outside.parent)
    assert f"{inside}/libexec/train-gpt stays: it is outside of PREFIX" in make("uninstall", f"PREFIX={inside}")
    assert files_in(tmp_path) == ["in/libexec", "outside/train-gpt/mine"]
