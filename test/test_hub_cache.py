"""--model ORG/NAME: models in the cache of Hugging Face's tools, and adapters of such models."""
import json
import os
import pathlib
import shutil
import subprocess

import pytest
from trainer_runs import make, write_text

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached(cache, name, files, commit=COMMIT, main=True):
    """Puts a model into a cache as huggingface_hub does: a snapshot of links to blobs. Returns the snapshot."""
    folder = cache / ("models--" + name.replace("/", "--"))
    snapshot = folder / "snapshots" / commit
    for path in (snapshot, folder / "blobs", folder / "refs"):
        path.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        blob = folder / "blobs" / f"{commit[:8]}{number}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if main:
        (folder / "refs" / "main").write_text(commit)
    return snapshot


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub")
    make(path / "model", "--family", "llama", "--layers", 1, "--heads", 2, "--channels", 32, "--positions", 32)
    write_text(path / "text", 2000)
    cached(path / "home/hub", "Some-Org/small_model-1.5B", sorted((path / "model").iterdir()))
    return path


def run(train, work, *options, **environment):
    """Runs in `work`, with these variables and none that names another cache."""
    kept = {name: value for name, value in train.environment.items() if not name.startswith(("HF_", "HUGGING", "XDG_"))}
    return subprocess.run(train.command(*options), cwd=work, env=kept | environment, capture_output=True, check=False, timeout=60)


def ran(train, work, *options, **environment):
    result = run(train, work, *options, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.decode(errors="replace")


VALIDATE = ("--steps", 0, "--val-data", "text", "--seq-len", 16)


@pytest.mark.parametrize("variable, folder", [("HF_HOME", "home"), ("HF_HUB_CACHE", "home/hub"), ("HUGGINGFACE_HUB_CACHE", "home/hub")])
def test_a_model_is_found_by_its_name(train_fp32, work, variable, folder):
    found = ran(train_fp32, work, "--model", "Some-Org/small_model-1.5B", *VALIDATE, **{variable: str(work / folder)})
    assert found.splitlines()[-1] == ran(train_fp32, work, "--model", "model", *VALIDATE).splitlines()[-1]


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_the_usual_places(train_fp32, work, tmp_path, variable):
    cache = tmp_path / (".cache" if variable == "HOME" else "") / "huggingface/hub"
    cached(cache, "a/b", sorted((work / "model").iterdir()), main=False)
    assert "validation loss" in ran(train_fp32, work, "--model", "a/b", *VALIDATE, **{variable: str(tmp_path)})


def test_a_tilde_is_the_home_folder(train_fp32, work, tmp_path):
    """As in huggingface_hub; and in options and configuration files, which no shell has expanded."""
    home = {"HOME": str(work)}
    for variable, folder in (("HF_HOME", "~/home"), ("HF_HUB_CACHE", "~/home/hub")):
        assert "validation loss" in ran(train_fp32, work, "--model", "Some-Org/small_model-1.5B", *VALIDATE, **home, **{variable: folder})
    (tmp_path / "run.toml").write_text('model = "~/model"\nval-data = ["~/text"]\nsteps = 0\nseq-len = 16\n')
    wanted = ran(train_fp32, work, "--model", "model", *VALIDATE).splitlines()[-1]
    assert ran(train_fp32, work, "--config", tmp_path / "run.toml", **home).splitlines()[-1] == wanted
    assert ran(train_fp32, work, "--model=~/model", *VALIDATE, **home).splitlines()[-1] == wanted


def test_main_is_taken_of_several_snapshots(train_fp32, work, tmp_path):
    cached(tmp_path, "a/b", [work / "text"], commit="f" * 40, main=False)
    cached(tmp_path, "a/b", sorted((work / "model").iterdir()))
    assert "validation loss" in ran(train_fp32, work, "--model", "a/b", *VALIDATE, HF_HUB_CACHE=str(tmp_path))


def test_a_folder_of_that_name_comes_first(train_fp32, work, tmp_path):
    shutil.copytree(work / "model", tmp_path / "Some-Org/small_model-1.5B")
    assert "validation loss" in ran(train_fp32, tmp_path, "--model", "Some-Org/small_model-1.5B", "--steps", 0, "--seq-len", 16,
                                    "--val-data", work / "text", HF_HOME="/nowhere")


def test_an_adapter_names_the_model_as_the_hub_does(train_fp32, work, tmp_path):
    home = {"HF_HOME": str(work / "home")}
    ran(train_fp32, work, "--model", "Some-Org/small_model-1.5B", "--train", "lora", "--data", "text", "--seq-len", 16, "--steps", 2,
        "--batch", 2, "--out", tmp_path / "lora", **home)
    assert json.loads((tmp_path / "lora/adapter_config.json").read_text())["base_model_name_or_path"] == "Some-Org/small_model-1.5B"
    loss = ran(train_fp32, work, "--model", tmp_path / "lora", *VALIDATE, **home).splitlines()[-1]
    assert loss == ran(train_fp32, work, "--model", "model", "--adapter", tmp_path / "lora", *VALIDATE).splitlines()[-1]
    assert "resuming" in ran(train_fp32, work, "--resume", tmp_path / "lora", "--steps", 3, **home)
    cached(tmp_path / "hub", "me/my-lora", [path for path in (tmp_path / "lora/latest").iterdir() if path.is_file()])
    assert ran(train_fp32, work, "--model", "model", "--adapter", "me/my-lora", *VALIDATE, HF_HUB_CACHE=str(tmp_path / "hub")) \
        .splitlines()[-1] == ran(train_fp32, work, "--model", "model", "--adapter", tmp_path / "lora", *VALIDATE).splitlines()[-1]
    error = run(train_fp32, work, "--model", tmp_path / "lora", *VALIDATE, HF_HOME=str(tmp_path))
    assert error.returncode == 2 and b"'Some-Org/small_model-1.5B', is no folder here, and not in " in error.stderr


def test_a_single_gguf_is_the_model(train_fp32, work, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"no GGUF")
    (tmp_path / "b.gguf").write_bytes(b"no GGUF")
    cached(tmp_path / "hub", "x/one", [tmp_path / "a.gguf"])
    cached(tmp_path / "hub", "x/two", [tmp_path / "a.gguf", tmp_path / "b.gguf"])
    cached(tmp_path / "hub", "x/none", [work / "text"])
    for name, said in (("x/one", "a.gguf: "), ("x/two", "has 2 GGUF files: give the path of one, such as "), ("x/none", "has no config.json")):
        error = run(train_fp32, work, "--model", name, *VALIDATE, HF_HUB_CACHE=str(tmp_path / "hub"))
        assert error.returncode == 2 and said in error.stderr.decode() and error.stderr.count(b"\n") == 1, error.stderr


@pytest.mark.parametrize("name", ["Some-Org/other", "out/run1"])
def test_what_was_not_downloaded_is_named(train_fp32, work, name):
    error = run(train_fp32, work, "--model", name, *VALIDATE, HF_HOME=str(work / "home"))
    assert error.returncode == 2
    assert error.stderr.decode() == (f"train: --model {name}: there is no such folder, and no such model in {work}/home/hub: "
                                     f"`hf download {name}` gets it if Hugging Face has it\n")


@pytest.mark.parametrize("name", ["../model2", "a/b/c", "/a/b", "~/x", "a//b", "a b/c", "a/.."])
def test_other_names_are_paths(train_fp32, work, name):
    error = run(train_fp32, work, "--model", name, *VALIDATE, HF_HOME=str(work / "home"))
    assert error.returncode == 2 and b"hf download" not in error.stderr


def test_huggingface_hub_finds_the_same(work, monkeypatch):
    """The layout of these tests is that of the library."""
    hub = pytest.importorskip("huggingface_hub")
    found = hub.snapshot_download("Some-Org/small_model-1.5B", cache_dir=work / "home/hub", local_files_only=True)
    assert pathlib.Path(found) == work / "home/hub/models--Some-Org--small_model-1.5B/snapshots" / COMMIT


def test_an_adapter_of_another_revision(train_fp32, work, tmp_path):
    """It says of which, and is of that again; peft passes it on to transformers."""
    make(tmp_path / "newer", "--family", "llama", "--layers", 1, "--heads", 2, "--channels", 32, "--positions", 32, "--seed", 5)
    cached(tmp_path / "hub", "a/b", sorted((tmp_path / "newer").iterdir()))
    old = cached(tmp_path / "hub", "a/b", sorted((work / "model").iterdir()), commit="f" * 40, main=False)
    home = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    ran(train_fp32, work, "--model", old, "--train", "lora", "--data", "text", "--seq-len", 16, "--steps", 2, "--sample", "tokens=0",
        "--out", tmp_path / "out", **home)
    path = tmp_path / "out/latest/adapter_config.json"
    config = json.loads(path.read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("a/b", "f" * 40)
    wanted = ran(train_fp32, work, "--model", old, "--adapter", tmp_path / "out", *VALIDATE, **home)
    assert ran(train_fp32, work, "--model", tmp_path / "out", *VALIDATE, **home).splitlines()[-1] == wanted.splitlines()[-1]
    (tmp_path / "hub/models--a--b/refs/v1").write_text("f" * 40)
    path.write_text(json.dumps(config | {"revision": "v1"}))
    assert ran(train_fp32, work, "--model", tmp_path / "out", *VALIDATE, **home).splitlines()[-1] == wanted.splitlines()[-1]
    path.write_text(json.dumps(config | {"revision": "gone"}))
    error = run(train_fp32, work, "--model", tmp_path / "out", *VALIDATE, **home).stderr.decode()
    assert "'a/b' of revision 'gone', is no folder here, and not in" in error
    path.write_text(json.dumps(config | {"revision": None}))
    assert ran(train_fp32, work, "--model", tmp_path / "out", *VALIDATE, **home).splitlines()[-1] != wanted.splitlines()[-1]
