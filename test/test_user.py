"""What a user sees: help, ready-made scripts, what training prints, and generated text."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import tty
import unicodedata

import pytest
from trainer_runs import ROOT, listing, make, read_log, write_text

USUALLY = "fp32"  # see conftest.py


@pytest.mark.quick
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(train, option):
    text = train(option).stdout.decode()
    assert text.startswith("Trains a language model") and "--help" in text and "--model" in text


# ---- ready-made runs

PRINTS_ARGUMENTS = '#!/bin/sh\nprintf "%s\\n" "$@"\n'
PROFILER = '#!/bin/sh\ncase $* in *./train*) while [ "$1" != ./train ]; do shift; done; exec "$@" ;; esac\n'


@pytest.fixture
def scripts(tmp_path):
    """The scripts beside a ./train that prints its arguments, one per line; profilers only run the program to
    profile."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name, text in {
            "train": PRINTS_ARGUMENTS, "dev/venv.sh": "#!/bin/sh\n", ".venv/bin/python": "#!/bin/sh\n",
            "bin/ncu": PROFILER, "bin/nsys": PROFILER}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "given").mkdir()
    return tmp_path


def arguments_of(scripts, name, *given):
    """The arguments with which a script started ./train."""
    ran = subprocess.run([scripts / "scripts" / name, *given], cwd=scripts / "given", capture_output=True, text=True,
                         env={**os.environ, "PATH": f"{scripts / 'bin'}{os.pathsep}{os.environ['PATH']}"})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_scripts_pass_options_on(scripts, name):
    """After the script's own options, so that the user's count."""
    files = ["model", "a text"] if name in ("finetune.sh", "lora.sh", "qlora.sh", "soft_prompt.sh") else []
    given = ["--prompt", "two words", "--lr", "0.5"]
    alone, both = arguments_of(scripts, name, *files), arguments_of(scripts, name, *files, *given)
    assert both[-4:] == given
    assert both[:-4] == alone or name.startswith("profile") and both[:-4] + ["--model", "d12", "--batch", "4",
                                                                             "--seq-len", "1024"] == alone


def test_tinyshakespeare_takes_a_text(scripts):
    for given, text in (((), "data/tinyshakespeare.txt"), (("--steps", "3"), "data/tinyshakespeare.txt"),
                        (("book",), "book"), (("book", "--steps", "3"), "book")):
        arguments = arguments_of(scripts, "tinyshakespeare.sh", *given)
        assert arguments[0] == "--data" and arguments[1].endswith(text) and arguments[2] == "--model"
        assert (arguments[-2:] == ["--steps", "3"]) == ("3" in given)


# ---- generated text


def on_terminal(train, *arguments, cwd):
    """What a terminal gets of a run's stdout, as it is written."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    with train.start(*arguments, cwd=cwd, stdout=slave) as process:
        os.close(slave)
        text = b""
        with contextlib.suppress(OSError):  # a terminal's other end raises this at its end
            while piece := os.read(master, 4096):
                text += piece
    os.close(master)
    assert process.returncode == 0
    return text


def without_escapes(text):
    return re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), text)


def sendable(text):
    """True if a terminal would only display it."""
    return not any(unicodedata.category(c) == "Cc" for c in text.decode() if c not in "\n\t")


GENERATE = ("--model", "model", "--steps", 0, "--prompt", "Gr\u00fcn\x1b",
            "--sample", "tokens=50")


@pytest.fixture
def work(tmp_path):
    make(tmp_path / "model", "--layers", 2, "--heads", 3, "--channels", 48, "--positions", 64)
    write_text(tmp_path / "text")
    return tmp_path


def test_generation_prints_the_text_alone(train, work):
    """The text and a newline at its end; everything else goes to stderr."""
    result = train(*GENERATE, "--out", "out", cwd=work)
    assert result.stdout.startswith("Gr\u00fcn\x1b".encode()) and len(result.stdout) == 6 + 50 + 1
    assert result.stdout.endswith(b"\n") and result.stderr == b"saved step 0 in out\n"


def test_a_prompt_without_data_only_generates(train, work):
    for save in ("out", "more"):  # from a model's folder, and from a save
        model = "model" if save == "out" else "out"
        options = ("--model", model, "--prompt", "Hello", "--sample", "tokens=8")
        result = train(*options, "--out", save, cwd=work)
        assert result.stdout == train(*options, "--steps", 0, cwd=work).stdout and len(result.stdout) == 5 + 8 + 1
        assert result.stderr == f"saved step 0 in {save}\n".encode()


def test_a_model_without_data_is_a_mistake(train_fp32, work):
    """Only new models have a built-in text to be trained on."""
    before = listing(work)
    missing = "--data is missing: what --model {} is to be trained on; --prompt generates without, and --steps 0 validates"
    for options, message in ((("--model", "model"), missing.format("model")),
                             (("--model", "model", "--steps", 5, "--prompt", "Hello"), missing.format("model")),
                             (("--model", "model", "--train", "lora", "--merge", "merged"), missing.format("model")),
                             (("--model", "d12"), "--data is missing: only new models of less than 12 layers are trained on "),
                             (("--prompt", "Hi"), "--prompt: --model d2 is a new one, which knows nothing"),
                             (("--model", "nosuch"), "--model nosuch is not a folder with config.json")):
        error = train_fp32(*options, "--out", "out", cwd=work, code=2).stderr.decode()
        assert error.startswith("train: " + message) and error.count("\n") == 1, error
    assert listing(work) == before


@pytest.mark.parametrize("model, vocabulary", [("d12", "50257 (gpt2's own, as no --data says another)"), ("d4", "256")])
def test_a_plan_without_data_says_its_vocabulary(train_fp32, tmp_path, model, vocabulary):
    """A small model's is that of the built-in text, on which the same command without --plan trains."""
    said = train_fp32("--model", model, "--plan", cwd=tmp_path).stdout.decode()
    assert f"vocabulary {vocabulary}, batch" in said


def test_generated_text_on_a_terminal(train, work):
    """An untrained model writes all kinds of bytes."""
    piped, shown = train(*GENERATE, cwd=work).stdout, on_terminal(train, *GENERATE, cwd=work)
    assert not sendable(piped.decode(errors="ignore").encode())
    with pytest.raises(UnicodeDecodeError):
        piped.decode()
    assert sendable(shown) and without_escapes(shown) == piped
    assert shown.startswith("Gr\u00fcn\\x1b".encode())


def test_samples_of_a_training_have_a_header(train, work):
    run = ("--model", "model", "--data", "text", "--batch", 1, "--seq-len", 16, "--steps", 1, "--lr", 0,
           "--prompt", "Once", "--sample", "tokens=30")
    match = re.search(rb"\n--- sample after 1 steps ---\n(Once.{30})\n---\n$", train(*run, cwd=work).stdout, re.DOTALL)
    shown = on_terminal(train, *run, cwd=work)
    assert match and sendable(shown) and match[1] in without_escapes(shown)


# ---- what is printed of a training

RUN = ("--model", "model", "--data", "text", "--batch", 1, "--seq-len", 16, "--sample", "tokens=0")


def printed_steps(text):
    return [int(number) for number in re.findall(rb"^step +(\d+)/", text, re.MULTILINE)]


@pytest.mark.not_played("400 steps take minutes")
def test_steps_that_are_printed(train, work):
    """The first three, the last, those before other output, and one per second; the log has all."""
    run = (*RUN, "--steps", 400, "--eval-every", 150, "--eval-batches", 1, "--save-every", 170, "--out", "out")
    text = train(*run, "--log", "log", cwd=work).stdout
    steps, seconds = printed_steps(text), sum(line.get("ms", 0) for line in read_log(work / "log")) / 1000
    assert steps[:3] == [1, 2, 3] and steps[-1] == 400 and {150, 170, 300, 340} <= set(steps)
    assert len(steps) <= 8 + seconds
    assert [line["step"] for line in read_log(work / "log") if "loss" in line] == list(range(1, 401))
    for before, after in ((b"step   150/400 ", b"\nstep   150 validation"), (b"step   400/400 100.0% ", b"\nsaved step 400"),
                          (b"saved step 400", b"\nstep   400 validation")):
        assert re.search(re.escape(before) + rb".*" + after, text), (before, after)


def test_print_every(train, work):
    assert printed_steps(train(*RUN, "--steps", 40, "--print-every", 15, cwd=work).stdout) == [1, 2, 3, 15, 30, 40]
    assert printed_steps(train(*RUN, "--steps", 40, "--print-every", 1, cwd=work).stdout) == list(range(1, 41))


def test_a_resumed_run_counts_on(train, work):
    run = (*RUN, "--print-every", 1000)
    train(*run, "--steps", 20, "--out", "out", cwd=work)
    assert printed_steps(train("--resume", "out", "--steps", 30, cwd=work).stdout) == [21, 22, 23, 30]


def test_utilization_names_what_it_is_relative_to(train, work):
    """Once, before the first step. Multiplied with a step's time, the rate gives what is printed; all three
    are rounded."""
    def bounds(figure):
        half_of_last_digit = 0.5 * 10.0 ** -len(figure.partition(".")[2])
        return float(figure) - half_of_last_digit, float(figure) + half_of_last_digit

    text = train(*RUN, "--steps", 5, "--print-every", 1, cwd=work).stdout.decode()
    [(peak, what)] = re.findall(r"^MFU is relative to (\d+) GFLOP/s, (.*)$", text, re.MULTILINE)
    assert what == "a square product measured now" or train.device == "cuda"
    # Without the positions, which are not part of a product.
    parameters = 256 * 48 + 2 * (12 * 48 * 48 + 13 * 48) + 2 * 48
    gigaflop = 16 * 6 * (parameters + 2 * 48 * 16) / 1e9
    least_peak, most_peak = bounds(peak)
    steps = re.findall(r"([\d.]+) ms \|.*MFU +([\d.]+)%", text)
    for milliseconds, percent in steps:
        (fastest, slowest), (least, most) = bounds(milliseconds), bounds(percent)
        assert least < 100 * gigaflop / fastest * 1000 / least_peak and 100 * gigaflop / slowest * 1000 / most_peak < most
    assert len(steps) == 5
    assert text.index("MFU is") < text.index("step     1/5")


# ---- fine-tuning


def test_the_rate_follows_the_model(train, work):
    """It is lower for a folder, whose weights are trained; and the help says so."""
    help_text = " ".join(train("--help").stdout.decode().split())
    assert "0.001 for a new model, 5e-05 for a trained one" in help_text
    for model, rate in (("model", 5e-5), ("d1", 1e-3)):
        train("--model", model, *RUN[2:], "--steps", 31, "--log", "log", cwd=work)
        assert max(line["lr"] for line in read_log(work / "log") if "lr" in line) == rate


@pytest.mark.not_played("350 steps of 256 tokens take minutes")
def test_fine_tuning_by_default_improves(train, tmp_path):
    """A model that has learned some Shakespeare is trained on more of it with small letters made large, and
    improves there."""
    text = (ROOT / "dev" / "data" / "tinyshakespeare.txt").read_text()
    (tmp_path / "first").write_text(text[:60000])
    (tmp_path / "second").write_text(text[60000:120000].swapcase())
    small = ("--batch", 4, "--seq-len", 64, "--sample", "tokens=0")
    train("--model", "d1", "--data", "first", *small, "--steps", 150, "--lr", 5e-3, "--out", "trained", cwd=tmp_path)
    losses = []
    for options in (("--lr", 0), ()):
        train("--model", "trained", "--data", "second", *small, "--steps", 100, *options, "--log", "log", cwd=tmp_path)
        losses += [line["val_loss"] for line in read_log(tmp_path / "log") if "val_loss" in line]
    assert losses[1] < losses[0] - 0.05, losses


# ---- make


@pytest.mark.quick
def test_make_help_lists_all_there_is():
    text = "".join((ROOT / name).read_text() for name in ("Makefile", "dev/cuda.mk", "test/Makefile", "dev/bench/Makefile"))
    ran = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and not ran.stderr
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", text, re.MULTILINE)) - {"all", "train"}  # make alone
    assert set(re.findall(r"^make ([a-z-]+)  ", ran.stdout, re.MULTILINE)) == targets and len(targets) > 15
    listed = set(re.findall(r"\b([A-Z_]+)=", re.sub(r"^ {4}\S.*", "", ran.stdout, flags=re.MULTILINE)))  # without examples
    assert set(re.findall(r"^(?: *|ifndef )([A-Z_]+)(?: \?=|$)", text, re.MULTILINE)) <= listed
    assert all(f"$({name})" in text or f"$(value {name})" in text for name in listed)
    for default, defined in (("FUZZ_SECONDS=10", "FUZZ_SECONDS ?= 10"), ('CUDA_ARCH="80 90a"', "$(or $(CUDA_ARCH),80 90a)"),
                             ('BENCH_OPTIONS="--model d12 --batch 4 --seq-len 64"',
                              "$(or $(BENCH_OPTIONS),--model d12 --batch 4 --seq-len 64)")):
        assert default in ran.stdout and defined in text, default
