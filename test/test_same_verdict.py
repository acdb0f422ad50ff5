"""A plan and a run agree: the run accepts what --plan accepts, in the same memory, and refuses the rest with
the same line.

Sets of options are drawn at random, with good ones and mistakes; each is planned and run in a folder of its
own.
"""

import os
import random
import re

import pytest
from trainer_runs import make, write_text

USUALLY = "fp32"
SETS = 500 if os.environ.get("MORE_TESTS") else 20

OPTIONS = [
    "--train lora", "--train lora --lora-rank 4", "--train prompt", "--train prompt --soft-prompt 3", "--base nf4", "--base nf4-double",
    "--base all=8bit", "--base mlp=nf4,attention=bf16", "--base head=nf4", "--offload weights=disk", "--offload weights=host",
    "--offload embeddings=disk", "--offload gradients=disk", "--offload state=disk", "--offload updates=host", "--offload state=disk:block", "--prefetch 0", "--prefetch 3",
    "--offload inputs=auto", "--offload inputs=auto:1", "--offload keys=auto", "--chunk-rows attention=128", "--chunk-rows mlp=8", "--chunk-rows mlp=auto", "--by-block", "--grad-accum 2",
    "--update-in-backward", "--clip 0", "--advanced clip=block", "--recompute block", "--recompute norm:1,block:1", "--chunk-rows head=8",
    "--optimizer sgd", "--state-formats m=8bit", "--state-formats master=split", "--memory 40MiB", "--memory 1GiB", "--memory 1MiB", "--state-formats auto",
    "--batch auto", "--dropout 0.1", "--lora-dropout 0.1", "--loss-on all", "--seq-len 65", "--seq-len 7", "--positions 90",
    "--rope-scaling yarn:4", "--seq-len auto", "--sample tokens=100", "--prompt To", "--prompt " + 90 * "x", "--val-data text",
    "--val-data none", "--eval-every 1", "--loss-by-position losses", "--log log", "--log text", "--log no/log", "--log out", "--out out",
    "--out text", "--out old", "--save-every 1 --out out", "--merge merged", "--merge model", "--save-base base", "--save-base model",
    "--adapter model", "--model d2", "--model llama:d1", "--model d13", "--model none", "--data none", "--advanced attention=hopper", "--advanced tf32=on",
    "--min-lr 2", "--sample temperature=0", "--steps 0"]


def by_name(options):
    """The words after each option's name."""
    found = {}
    for word in options.split():
        if word.startswith("--"):
            name = word
            found.setdefault(name, [])
        elif "=" in word:  # keys of an option each have their own value
            found.pop(name, None)
            found[f"{name} {word.partition('=')[0]}"] = [word]
        else:
            found[name].append(word)
    return found


def drawn(number):
    """The options of set `number`; if a name occurs twice, the last one counts."""
    draw = random.Random(number)
    options = by_name("--model model --data text --batch 2 --seq-len 32 --steps 1")
    for option in draw.sample(OPTIONS, draw.choice((0, 1, 1, 2, 2, 3, 4))):
        options |= by_name(option)
    if options["--seq-len"] == ["auto"]:
        del options["--batch"]
    elif draw.random() < 0.1:
        del options["--batch"]
    return [part for name, rest in options.items() for part in (name.partition(" ")[0], *rest)]


def summary(said):
    """The lines about what a run takes, and about what was chosen for it."""
    lines = said.decode(errors="replace").splitlines()
    begin = next((i for i, line in enumerate(lines) if " parameters" in line and "recompute" in line), None)
    if begin is None:
        return None
    end = next(i for i, line in enumerate(lines) if re.search("[0-9]  in all", line))
    chosen = [line for line in lines[:begin] if not line.startswith("---")]
    return chosen + [re.sub("^takes|^allocating", "", line).partition("; ")[0] for line in lines[begin:end + 1]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("given")
    return make(path / "model", "--layers", 2, "--heads", 2, "--channels", 64, "--positions", 64)


def test_a_plan_and_its_run_agree(train, model, tmp_path):
    accepted = refused = 0
    for number in range(SETS):
        options = drawn(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model").symlink_to(model)
        write_text(folder / "text")
        (folder / "old").mkdir()
        (folder / "old" / "model.safetensors").write_bytes(b"mine")
        results = {}
        for plan in (("--plan",), ()):
            with train.start(*options, *plan, cwd=folder, stderr=-1) as process:
                out, error = process.communicate(timeout=100)
            results[bool(plan)] = process.returncode, out, error
            assert process.returncode in (0, 2), (options, plan, error)
        (plan_code, plan_out, plan_error), (code, out, error) = results[True], results[False]
        what = (number, options, plan_error, error)
        assert plan_code == code, what
        if code == 2:
            assert plan_error.splitlines()[-1] == error.splitlines()[-1], what
            refused += 1
        else:
            ran = summary(out)  # generating prints none
            assert ran is None or ran == summary(plan_out), what
            accepted += 1
    assert min(accepted, refused) > SETS / 5
