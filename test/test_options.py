"""The command line: its help, hints about mistyped names, aliases, options with keys, config files, and what a
resumed run does with options of an earlier version."""

import json
import os
import re
import shutil

import pytest
from trainer_runs import ROOT, make, write_text

USUALLY = "fp32"
# The aim of the command line's design: it must not grow back.
MOST_OPTIONS, MOST_MEMORY_OPTIONS, MOST_COLUMNS = 76, 14, 100
GROUPS = "Model and data", "Training", "Adapters", "Memory", "Logging", "Sampling", "Saving", "Advanced", "Help"
SMALL = ("--model", "d1", "--batch", 1, "--seq-len", 8)


def shown(train, *about):
    return train("--help", *about).stdout.decode()


def options_in(text):
    return re.findall(r"^  (--[a-z0-9-]+)", text, re.M)


def refused(train, *arguments, cwd=None):
    """The one line about a mistake."""
    error = train(*arguments, cwd=cwd, code=2).stderr.decode()
    assert error.startswith("train: ") and error.count("\n") == 1 and error.endswith("\n"), error
    return error.removeprefix("train: ").rstrip("\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("given")
    make(path / "model", "--layers", 2, "--heads", 2, "--channels", 64, "--positions", 64)
    write_text(path / "text")
    return path


# ---- help


def test_counts(train):
    options, memory = options_in(shown(train, "all")), options_in(shown(train, "memory"))
    assert len(options) == len(set(options)) <= MOST_OPTIONS and {"--help", "--version", "--config"} <= set(options)
    assert len(memory) <= MOST_MEMORY_OPTIONS and {"--memory", "--plan", "--offload"} <= set(memory)
    usual = options_in(shown(train))
    assert 30 <= len(usual) <= 40 and set(usual) < set(options)
    assert shown(train).count("\n") <= 75


def test_the_usual_options_are_those_of_the_recipes(train):
    """Of the README's commands and of scripts/, without those that profile."""
    scripts = [path.read_text() for path in (ROOT / "scripts").iterdir() if "profile" not in path.name]
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    used = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]*)", re.sub("^#.*", "", "\n".join(scripts + blocks), flags=re.M)))
    known = set(options_in(shown(train, "all")))
    assert used & known <= set(options_in(shown(train)))


@pytest.mark.parametrize("about", [(), ("all",), ("memory",)], ids=str)
def test_lines_are_narrow(train, about):
    assert all(len(line) <= MOST_COLUMNS for line in shown(train, *about).splitlines())


def test_groups(train):
    whole = shown(train, "all")
    assert re.findall(r"^([A-Z][\w ]*):\n  -", whole, re.M) == list(GROUPS)
    found = [options_in(shown(train, group.lower() if " " not in group else group.split()[0])) for group in GROUPS]
    assert sum(found, []) == options_in(whole)
    assert all(name in whole for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGUSR1"))
    assert shown(train).count("\n  ./train ") == 3 and "Exit codes:" in whole
    assert "Memory" in refused(train, "--help", "nonsense")
    # A word of a group's name, an option, or the begin of one.
    for word, group in (("data", "model"), ("lora", "adapters"), ("lr", "training"), ("offload", "memory"), ("ADAPTER", "adapters")):
        assert shown(train, word) == shown(train, group), word


def test_every_help_is_a_sentence_with_a_default(train):
    """Each description ends with a full stop, or with its default in parentheses."""
    entries = re.split(r"\n(?= {2,4}(?:--)?[a-z0-9-]+[ =]| {2}--)", shown(train, "all").split("\nNames of other tools")[0])
    for entry in entries:
        if re.match(r" {2,4}(?:--)?[a-z0-9-]+", entry):
            text = entry.split("\n\n")[0].rstrip()
            assert text.endswith((".", ")")), text
    assert "(default 1500; with --bench 10)" in shown(train) and "alpha / rank" in shown(train)


def test_version(train):
    said = train("--version").stdout.decode()
    pattern = rf"train [\d.]+, commit ([0-9a-f]{{12}}|unknown), device {train.device}, precision {train.precision}, (oneDNN|cuBLASLt) \d+\.\d+\.\d+\n"
    assert re.fullmatch(pattern, said), said


# ---- names


@pytest.mark.parametrize("wrong, hint", [
    ("--learning-rte", "did you mean --learning-rate?"), ("--stps", "did you mean --steps?"),
    ("--ofload", "did you mean --offload?"), ("--lora_rnk", "did you mean --lora-rank?"),
    ("--beta2", "did you mean --optimizer beta2=...?"), ("--tf32", "did you mean --advanced tf32=...?"),
    ("--load_in_4bit", "write --base nf4-double"), ("--lora", "write --train lora"),
    ("--gpus", "write --devices N"), ("--dpo", "no training by preferences"), ("--flash_attn", "always computed in tiles"),
    ("--ctx", "write --seq-len N"), ("--quantize", "--base nf4-double"), ("--quantize", "--export FILE,type=q4_k_m"),
    ("--fsdp", "--zero 3"), ("--outtype", "--export FILE"), ("--enable_activation_offloading", "--offload inputs=auto"),
    ("--optimizer_in_bwd", "--update-in-backward"), ("--pad_to_sequence_len", "always packed"), ("--n_layer", "--model dN"),
    ("--total_batch_size", "--grad-accum"), ("--saves-per-epoch", "--save-every"), ("--hf-repo", "nothing is downloaded"),
    ("--topp", "did you mean --top-p?"), ("--qemu", "there is no such option"),
    ("--something-else", "there is no such option; --help all lists them"), ("--offload.weights", "did you mean")], ids=str)
def test_hints(train, wrong, hint):
    line = refused(train, wrong, 1)
    assert line.startswith(f"{wrong}: ") and hint in line


def test_aliases_and_underscores(train):
    names = {"--batch": ("--batch-size", "--per_device_train_batch_size"), "--steps": ("--max-steps", "--max_steps"),
             "--seq-len": ("--seq-length", "--max_seq_length", "--seq_len"), "--grad-accum": ("--gradient-accumulation-steps",)}
    names["--seq-len"] += ("--sequence_len", "--cutoff-len", "--model-max-length")
    values = {"--batch": 3, "--steps": 7, "--seq-len": 24, "--grad-accum": 2}
    given = [word for name, value in values.items() for word in (name, value)]
    wanted = train("--model", "d1", *given, "--plan", "json").stdout
    for name, others in names.items():
        for other in others:
            words = [other if word == name else word for word in given]
            assert train("--model", "d1", *words, "--plan", "json").stdout == wanted, other
    assert "--lr: x is not" in refused(train, "--learning_rate", "x")
    listed = shown(train, "all").split("Names of other tools")[1]
    for alias in ("--learning-rate", "--batch-size", "--max-steps", "--output-dir", "--gradient-accumulation-steps",
                  "--lora-r", "--seq-length", "--temperature"):
        assert alias in listed


def test_values_of_other_tools(train, folder):
    """Values are understood where they mean one of this program's, and else a message says what to write."""
    def plan(*arguments):
        return train("--model", folder / "model", "--data", folder / "text", "--batch", 1, "--seq-len", 8, "--plan", "json", *arguments).stdout

    for option, theirs, ours in (("--optim", "adamw_torch", "adamw"), ("--optimizer", "adamw_hf", "adamw"),
                                 ("--lr-scheduler-type", "constant_with_warmup", "constant"), ("--schedule", "warmup_stable_decay", "wsd")):
        assert plan(option, theirs) == plan(option, ours)
    targets = [plan("--train", "lora", "--lora-target-modules", name) for name in ("all-linear", "all", "attention")]
    assert targets[0] == targets[1] != targets[2]
    for option, value, named in (("--optim", "adamw_8bit", "write --optimizer adamw --state-formats m=8bit,v=8bit"),
                                 ("--optimizer", "paged_adamw_8bit", "--state-formats m=8bit,v=8bit"),
                                 ("--lr_scheduler_type", "cosine_with_min_lr", "--min-lr")):
        assert named in refused(train, *SMALL, option, value)


@pytest.mark.parametrize("arguments, named", [
    (("--offload", "wieghts=disk"), "--offload wieghts: did you mean weights=?"),
    (("--offload", "speed=disk"), "weights, embeddings, gradients, state, updates, inputs, keys"),
    (("--offload", "disk"), "needs a key and a value"), (("--offload", "weights=nowhere"), "--offload weights: 'nowhere' is none of device, host, disk"),
    (("--offload", "state=disk:0"), "--offload state"), (("--offload", "inputs=auto:many"), "--offload inputs"),
    (("--base", "head=4bit"), "--base"), (("--base", "none,head=nf4"), "--base"), (("--plan", "xml"), "--plan: 'xml' is none of table, json"),
    (("--bench", "fast"), "--bench"), (("--by-block=maybe",), "--by-block"), (("--seq-len",), "--seq-len: its value is missing"),
    (("--by-block", "words"), "words is no option"), (("--lr", 1, 2), "2 is no option"), (("--state-formats", "auto"), "--memory"),
    (("--update-in-backward", "--advanced", "clip=model"), "--advanced clip=model"),
    (("--chunk-rows", "auto", "--chunk-rows", "mlp=some"), "--chunk-rows mlp"),
    (("--grad-accum", 2e10), "is not a number from 1 to 1073741824"), (("--lora-dropout", 1), "is not a number from 0 to 0.99"),
    (("--optimizer", "beta2=1"), "is not a number from 0 to 0.9999999")], ids=str)
def test_mistakes(train, arguments, named):
    assert named in refused(train, *SMALL, "--plan", *arguments)


def test_a_place_that_the_build_has_not(train):
    wrong, right = ("host", "disk") if train.device == "cpu" else ("disk", "host")
    for key in ("inputs", "keys"):
        line = refused(train, *SMALL, "--offload", f"{key}={wrong}", "--plan")
        assert line.startswith(f"--offload {key}: '{wrong}': ") and right in line
    plans = [train.plan("--model", "d4", "--batch", 1, "--seq-len", 32, "--offload", f"inputs={home}")
             for home in ("auto", right, f"{right}:4", "auto:4")]
    assert [plan["memory_setting"].pop("offloaded_inputs") for plan in plans] == [-1, -1, 4, 4]  # -1: of all layers
    assert plans[:1] * 4 == plans


# ---- options with keys


def test_keys_accumulate(train):
    options = ("--model", "d4", "--batch", 2, "--seq-len", 32, "--plan", "json")
    whole = train(*options, "--offload", "weights=disk,gradients=disk,state=disk:8", "--chunk-rows", "head=16,mlp=8").stdout
    parts = train(*options, "--chunk-rows", "head=16", "--offload", "weights=disk", "--offload", "gradients=device,state=disk:8",
                  "--chunk-rows", "mlp=8", "--offload", "gradients=disk").stdout
    assert whole == parts and any(json.loads(whole)["outside_device"].values())
    automatic = train.plan(*options[:-2], "--chunk-rows", "auto")
    assert automatic == train.plan(*options[:-2], "--chunk-rows", "head=auto,mlp=auto,attention=auto")


def test_clipping_is_by_block_with_update_in_backward(train, folder, tmp_path):
    options = ("--model", folder / "model", "--data", folder / "text", "--batch", 1, "--seq-len", 16, "--steps", 2, "--update-in-backward",
               "--sample", "tokens=0")
    assert b"clipped by its own norm" in train(*options, cwd=tmp_path).stdout
    assert b"clipped by its own norm" not in train(*options, "--clip", 0, cwd=tmp_path).stdout


def test_a_soft_prompt_is_a_number_a_text_or_both(train, folder, tmp_path):
    sizes = []
    for prompt in ("9", "To be", "9:To be", "Note: this"):
        out = tmp_path / str(len(sizes))
        train("--model", folder / "model", "--data", folder / "text", "--train", "prompt", "--soft-prompt", prompt, "--batch", 1, "--seq-len", 16,
              "--steps", 1, "--sample", "tokens=0", "--out", out)
        config = json.loads((out / "adapter_config.json").read_text())
        sizes.append((config["num_virtual_tokens"], config.get("prompt_tuning_init_text")))
    assert sizes == [(9, None), (5, "To be"), (9, "To be"), (10, "Note: this")]


# ---- config files


CONFIG = """\
# A run.
model = "d2"
batch_size = 2
seq-len = 24
by-block = true
data = ["{text}"]
memory.host = "1GiB"

[offload]
weights = "disk"
state = "disk:block"
"""


def test_config(train, folder, tmp_path):
    text = CONFIG.format(text=folder / "text").replace('memory.host = "1GiB"\n', "")
    (tmp_path / "run.toml").write_text(text)
    wanted = train("--model", "d2", "--batch", 2, "--seq-len", 24, "--by-block", "--data", folder / "text", "--offload",
                   "weights=disk,state=disk:block", "--plan", "json", "--sample", "tokens=3").stdout
    assert train("--config", tmp_path / "run.toml", "--plan", "json", "--sample", "tokens=3").stdout == wanted
    other = train.plan("--config", tmp_path / "run.toml", "--batch", 3, "--offload", "weights=device")
    assert other["batch"] == 3 and other["seq_len"] == 24
    assert other == train.plan("--batch", 3, "--config", tmp_path / "run.toml", "--offload", "weights=device")
    train("--config", tmp_path / "run.toml", "--steps", 1, "--sample", "tokens=0", "--out", tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["options"]
    assert saved["--batch"] == ["2"] and saved["--offload.weights"] == ["disk"] and "--config" not in saved
    train("--resume", tmp_path / "out", "--steps", 2)


def test_a_config_is_toml(train, folder, tmp_path):
    (tmp_path / "run.toml").write_text(f'''
seed = 1_0  # ten
lr = 1e-4
data = [  # both
    "{folder}/text",
    '{folder}/text2',
]
sample.stop = ["x, y\\n", 'c:\\d', "# not a note"]
[sample]  # again
tokens = 0
'''.replace("[sample]  # again\n", "sample."))
    shutil.copy(folder / "text", folder / "text2")
    run = ("--model", folder / "model", "--config", tmp_path / "run.toml", "--batch", 1, "--seq-len", 8)
    train(*run, "--steps", 1, "--out", tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["options"]
    assert saved["--seed"] == ["10"] and float(saved["--lr"][0]) == 1e-4 and saved["--sample.tokens"] == ["0"]
    assert saved["--sample.stop"] == ["x, y\n", "c:\\d", "# not a note"]
    assert [path.rsplit("/", 1)[1] for path in saved["--data"]] == ["text", "text2"]
    (tmp_path / "run.toml").write_text("steps = 3\nsample.tokens = 0\n")
    said = train(*run, "--data", folder / "text", "--epochs", 0.01, cwd=tmp_path).stdout.decode()
    assert re.search(r"; 5 steps read", said), said


@pytest.mark.parametrize("line, named", [
    ("learning-rte = 1", "did you mean --learning-rate?"), ("lr = \"fast\"", "--lr: fast is not a number"), ("steps = -1", "--steps: -1"),
    ("lr = [1, 2]", "takes one value"), ("offload.wieghts = \"disk\"", "did you mean weights=?"), ("lr.x = 1", "has no keys"),
    ("config = \"other\"", "is no setting"), ("help = true", "is no setting"), ("memory.host = \"1GiB\"", "--memory host=1GiB")], ids=str)
def test_mistakes_in_a_config(train, tmp_path, line, named):
    """They are named with their line. Whether options go together shows only when all are known."""
    (tmp_path / "run.toml").write_text(f"# A run.\n\nseed = 3\n{line}\nwarmup = 0\n")
    error = refused(train, *SMALL, "--config", "run.toml", "--plan", cwd=tmp_path)
    assert named in error and (error.startswith("run.toml:4: ") or "host" in named)


@pytest.mark.parametrize("text, said", [
    ("[\u00e9]\n", "run.toml:1: no TOML: outside of quotes, names have only ASCII letters"),
    ("seed = 1\n# \u00e9\n[offload]\n[\u65e5\u672c]\n", "run.toml:4: no TOML: outside of quotes"),
    ("a" + ".a" * 9000 + " = 1\n", "run.toml:1: a.a.a is neither a text"), ("a = " + "[" * 5000, "run.toml:1: "),
    ("a" + ".a" * 200000 + " = 1\n", "--config run.toml is larger than a configuration")], ids=lambda value: value[:12])
def test_no_configuration_reaches_an_assertion(train, tmp_path, text, said):
    (tmp_path / "run.toml").write_text(text)
    assert refused(train, "--config", "run.toml", cwd=tmp_path).startswith(said)


def test_lines_of_mistakes_in_a_config(train, tmp_path):
    """Sections, arrays of several lines and settings that are given again count as the lines that they are."""
    for text, said in (("seed = 2\nlr = \"x\"\n", "run.toml:2: --lr: x "), ("lr = 1\nseed = 2\nlr = \"x\"\n", "run.toml:3: "),
                       ("lr = 2026-01-01", "run.toml:1: lr is neither a text, a number"), ("lr = [[1]]", "run.toml:1: lr is neither"),
                       ("[offload]\n# where\nwieghts = \"disk\"", "run.toml:3: --offload wieghts: did you mean weights=?"),
                       ("data = [\"a\",\n\"b\"\n]\n\n[lr]\nx = 1\n", "run.toml:6: --lr has no keys"),
                       ("-", "run.toml:1: "), ("", "--data is missing"),
                       ("stps = 3", "run.toml:1: --stps: did you mean")):
        (tmp_path / "run.toml").write_text(text)
        assert said in refused(train, "--model", "d12", "--config", "run.toml", cwd=tmp_path), text


def test_a_config_in_another_language(train, tmp_path):
    for name, text in (("run.yaml", "model: d12\nsteps: 3\n"), ("run.yml", "a: 1"), ("run.json", '{"model": "d12"}')):
        (tmp_path / name).write_text(text)
        error = refused(train, "--config", name, cwd=tmp_path)
        assert error.startswith(f"{name}:1: ") and "--config reads TOML" in error


def test_no_config(train, tmp_path):
    assert "No such file" in refused(train, "--config", tmp_path / "none.toml")
    assert f"--config {tmp_path} is a directory" in refused(train, "--config", tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert "fifo is not a regular file" in refused(train, "--config", tmp_path / "fifo")


# ---- saves


def test_a_save_of_an_earlier_version_is_refused(train, folder, tmp_path):
    options = ("--model", folder / "model", "--data", folder / "text", "--batch", 1, "--seq-len", 16, "--steps", 1, "--sample", "tokens=0")
    train(*options, "--out", tmp_path / "out")
    file = tmp_path / "out" / "trainer_state.json"
    file = file.resolve()
    state = json.loads(file.read_text())
    state["formats"] = "--optimizer adamw --master fp32 --adam-m fp32 --adam-v fp32"
    state["options"]["--weights"] = ["disk"]
    file.write_text(json.dumps(state))
    error = refused(train, "--resume", tmp_path / "out", "--steps", 2)
    assert "--resume" in error and "earlier version" in error and "--model" in error
    train("--model", tmp_path / "out", "--data", folder / "text", "--batch", 1, "--seq-len", 16, "--steps", 1, "--sample", "tokens=0")


def test_a_resumed_adapter_keeps_what_it_was_made_with(train, folder, tmp_path):
    """Other values on the command line are refused; the same ones, and those that only a run has, are not."""
    run = ("--data", folder / "text", "--batch", 1, "--seq-len", 8, "--sample", "tokens=0")
    train("--model", folder / "model", "--train", "lora", "--lora-rank", 4, *run, "--steps", 1, "--out", "out", cwd=tmp_path)
    for option, value, saved in (("--lora-rank", 8, "4"), ("--lora-alpha", 64, "32"), ("--lora-targets", "attention", "all"),
                                 ("--train", "all", "lora")):
        said = f"{option} {value}: --resume out goes on with {option} {saved}: leave {option} out"
        assert refused(train, "--resume", "out", "--steps", 2, option, value, cwd=tmp_path) == said
    train("--resume", "out", "--steps", 2, "--lora-rank", 4, "--lora-alpha", "32.0", "--lora-dropout", 0.1, cwd=tmp_path)


def test_a_resumed_soft_prompt_keeps_its_length(train, folder, tmp_path):
    train("--model", folder / "model", "--train", "prompt", "--soft-prompt", 4, "--data", folder / "text", "--batch", 1, "--seq-len", 8,
          "--sample", "tokens=0", "--steps", 1, "--out", "out", cwd=tmp_path)
    said = "--soft-prompt 9: --resume out goes on with --soft-prompt 4: leave --soft-prompt out"
    assert refused(train, "--resume", "out", "--steps", 2, "--soft-prompt", 9, cwd=tmp_path) == said
    train("--resume", "out", "--steps", 2, "--soft-prompt", 4, cwd=tmp_path)


def test_a_save_with_an_option_of_another_version_is_refused(train, folder, tmp_path):
    options = ("--model", folder / "model", "--data", folder / "text", "--batch", 1, "--seq-len", 16, "--steps", 1, "--sample", "tokens=0")
    train(*options, "--out", tmp_path / "out")
    file = (tmp_path / "out" / "trainer_state.json").resolve()
    state = json.loads(file.read_text())
    state["options"]["--speed"] = ["3"]
    file.write_text(json.dumps(state))
    assert "--speed" in refused(train, "--resume", tmp_path / "out", "--steps", 2)
