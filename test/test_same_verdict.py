"""A plan and a run agree: the run accepts what --plan accepts, in the same memory, and refuses the rest with
the same line; MAY_DIFFER says where they may not.

Sets of options are drawn at random, with good ones and mistakes, over small models of all kinds; each is planned and run in
a folder of its own.
"""

import concurrent.futures
import json
import os
import random
import re
import shutil

import pytest
import transformers
from gguf_files import write_gguf
from trainer_runs import make, random_tokens, write_shard, write_text

USUALLY = "fp32"
SETS = 1500 if os.environ.get("MORE_TESTS") else 250

# A run refuses with a line like the first; its plan then says the second on stderr, or refuses for another reason.
MAY_DIFFER = [
    # A plan tells what data that are still to be gathered will need.
    (r"--data is missing", r"a run needs --data, and this plan does not"),
    # config.json is enough for a plan: of a model that is still to be downloaded.
    (r"has neither model\.safetensors nor", r"a run needs the weights of config, and this plan does not"),
]
MODELS = ["gpt2", "deep", "llama", "qwen3", "bloom", "mistral", "odd", "llama.gguf", "nf4", "lora/latest", "prompt/latest",
          "saved/latest", "config", "d1", "llama:d1"]
DATA = ["text"] * 8 + ["data.bin", "chats.jsonl", "pairs.jsonl", "pairs.jsonl --chat-format chatml", "short", "*.bin", ""]
OPTIONS = [
    "--train lora", "--train lora --lora-rank 4", "--train prompt", "--train prompt --soft-prompt 3", "--base nf4", "--base nf4-double",
    "--base all=8bit", "--base mlp=nf4,attention=bf16", "--base head=nf4", "--offload weights=disk", "--offload weights=host",
    "--offload embeddings=disk", "--offload gradients=disk", "--offload state=disk", "--offload updates=host", "--offload state=disk:block", "--prefetch 0", "--prefetch 3",
    "--offload inputs=auto", "--offload inputs=auto:1", "--offload keys=auto", "--chunk-rows attention=128", "--chunk-rows mlp=8", "--chunk-rows mlp=auto", "--by-block", "--grad-accum 2",
    "--update-in-backward", "--clip 0", "--advanced clip=block", "--recompute block", "--recompute norm:1,block:1", "--chunk-rows head=8",
    "--optimizer sgd", "--state-formats m=8bit", "--state-formats master=split", "--memory 40MiB", "--memory 60MiB", "--memory 1GiB",
    "--memory 1MiB", "--state-formats auto",
    "--batch auto", "--dropout 0.1", "--lora-dropout 0.1", "--loss-on all", "--seq-len 65", "--seq-len 7", "--positions 90",
    "--rope-scaling yarn:4", "--seq-len auto", "--sample tokens=100", "--prompt To", "--prompt " + 90 * "x", "--val-data text",
    "--val-data none", "--eval-every 1", "--loss-by-position losses", "--log log", "--log text", "--log no/log", "--log out", "--out out",
    "--out text", "--out old", "--save-every 1 --out out", "--merge merged", "--merge llama", "--save-base base", "--save-base llama",
    "--adapter llama", "--model d2", "--model llama:d1", "--model d13", "--model none", "--data none", "--advanced attention=hopper", "--advanced tf32=on",
    "--min-lr 2", "--sample temperature=0", "--steps 0",
    "--adapter lora/latest", "--adapter prompt/latest", "--export x.gguf", "--export x.gguf,type=q8_0", "--export x.gguf,type=q4_k_m",
    "--export x.gguf,part=adapter", "--export no/x.gguf", "--export llama.gguf", "--resume lora", "--resume saved", "--resume prompt",
    "--resume auto --out out", "--resume auto --out saved", "--chat", "--prompts prompts.jsonl", "--prompts none", "--raw-prompt",
    "--chat-format llama2", "--loss-on last", "--chat-date 2024-01-01", "--keep-best --out out --eval-every 1", "--early-stopping 2 --eval-every 1",
    "--keep 1", "--eval-batches 1000", "--schedule wsd", "--rates none", "--rates text", "--show-example 1", "--show-example 99999",
    "--threads 2", "--timeline time", "--timeline no/time", "--seq-len 1", "--batch 64", "--batch 100000", "--grad-accum 3 --batch 1",
    "--lora-targets attention", "--lora-targets none", "--lora-targets mlp,q_proj", "--zero 2", "--machines 2", "--print-every 1",
    "--positions 30", "--rope-scaling dynamic:2", "--lr 1", "--lr nan", "--sample every=1", "--sample stop=x", "--sample top-k=9999",
    "--soft-prompt 70 --train prompt", "--calibrate rates", "--val-data pairs.jsonl", "--data text pairs.jsonl", "--data empty"]


def by_name(options):
    """The words after each option's name."""
    found = {}
    for word in options.split():
        if word.startswith("--"):
            name = word
            found.setdefault(name, [])
        elif "=" in word and name in ("--offload", "--sample", "--chunk-rows", "--advanced", "--state-formats"):
            found.pop(name, None)  # keys of an option each have their own value
            found[f"{name} {word.partition('=')[0]}"] = [word]
        else:
            found[name].append(word)
    return found


def drawn(number):
    """The options of set `number`; if a name occurs twice, the last one counts."""
    draw = random.Random(number)
    options = by_name("--batch 2 --seq-len 32 --steps 1 --sample tokens=3 --threads 1")
    options["--model"] = [draw.choice(MODELS)]
    data = draw.choice(DATA)
    options |= by_name(f"--data {data}" if data else "")
    if draw.random() < 0.4:
        options |= by_name("--train lora")
    for option in draw.sample(OPTIONS, draw.choice((0, 1, 1, 2, 2, 3, 4))):
        options |= by_name(option)
    if options["--seq-len"] == ["auto"] or draw.random() < 0.1:
        del options["--batch"]
    if draw.random() < 0.1:
        del options["--seq-len"]
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
def given(tmp_path_factory, train):
    """Models of each kind, and data; runs may write into none of them."""
    work = tmp_path_factory.mktemp("given")
    sizes = ("--heads", 2, "--channels", 64, "--positions", 64)
    make(work / "deep", "--layers", 2, *sizes)
    for name, *options in (("gpt2",), ("llama",), ("qwen3", "--tied", "--head-size", 32), ("bloom",), ("mistral", "--window", 9)):
        make(work / name, "--family", name, "--layers", 1, *sizes, *options)
    make(work / "odd", "--family", "llama", "--layers", 1, "--heads", 3, "--channels", 33, "--head-size", 10, "--positions", 64)
    write_gguf(work / "llama.gguf", transformers.AutoModelForCausalLM.from_pretrained(work / "llama"), "llama")
    write_text(work / "text")
    write_text(work / "short", 300)
    (work / "empty").touch()
    write_shard(work / "data.bin", random_tokens(256, 3000))
    chats = ({"messages": [{"role": "user", "content": f"Hi {i}"}, {"role": "assistant", "content": "Yes" * (i % 5 + 1)}]} for i in range(30))
    pairs = ({"prompt": f"Q{i}", "completion": "A" * (i % 7 + 1)} for i in range(30))
    for name, lines in (("chats", chats), ("pairs", pairs), ("prompts", [{"prompt": "To"}])):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = ("--data", "text", "--batch", 1, "--seq-len", 16, "--steps", 1, "--sample", "tokens=0")
    train("--model", "llama", "--train", "lora", "--base", "nf4", "--save-base", "nf4", *run, cwd=work)
    for name, *options in (("lora", "llama", "--train", "lora"), ("prompt", "gpt2", "--train", "prompt"), ("saved", "gpt2")):
        train("--model", *options, "--out", name, *run, cwd=work)
    (work / "config").mkdir()
    (work / "config" / "config.json").symlink_to(work / "llama" / "config.json")
    return work


def verdict(train, given, folder, options):
    """The exit code of these options in a new folder, stdout, and stderr."""
    folder.mkdir()
    for path in given.iterdir():
        if path.name == "saved":  # --resume auto --out saved goes on there
            shutil.copytree(path, folder / path.name, symlinks=True)
        else:
            (folder / path.name).symlink_to(path)
    (folder / "old").mkdir()
    (folder / "old" / "model.safetensors").write_bytes(b"mine")
    with train.start(*options, cwd=folder, stdin=-3, stderr=-1) as process:
        out, error = process.communicate(timeout=100)
    shutil.rmtree(folder)
    return process.returncode, out, error.decode(errors="replace")


def may_differ(error, plan_code, plan_error):
    return any(re.search(of_run, error) and (plan_code == 2 or re.search(of_plan, plan_error)) for of_run, of_plan in MAY_DIFFER)


def test_a_plan_and_its_run_agree(train, given, tmp_path):
    def both(number):
        options = drawn(number)
        return options, *(verdict(train, given, tmp_path / f"{number}{plan}", (*options, *plan)) for plan in ((), ("--plan",)))
    accepted = refused = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, (options, (code, out, error), (plan_code, plan_out, plan_error)) in enumerate(pool.map(both, range(SETS))):
            what = (number, " ".join(options), error, plan_error)
            assert {code, plan_code} <= {0, 2}, what
            if code == 2:
                same = plan_code == 2 and plan_error.splitlines()[-1] == error.splitlines()[-1]
                assert same or may_differ(error, plan_code, plan_error), what
                refused += 1
            else:
                assert plan_code == 0, what
                ran = summary(out)  # generating prints none
                assert ran is None or ran == summary(plan_out), what
                accepted += 1
    assert min(accepted, refused) > SETS / 5, (accepted, refused)
