"""dev/bench: peers take turns with a fake trainer that only prints its time, real PyTorch, and a fake llm.c;
the attention benchmark; and dev/gpu_check.sh with every command faked."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from trainer_runs import ENVIRONMENT, ROOT, binaries, executable, make, random_tokens, write_shard

BENCH = ROOT / "dev" / "bench"
TRAINER = '''#!{python}
import json, sys
def of(name): return sys.argv[sys.argv.index(name) + 1]
turns = {folder!r} + "/turns"
open(turns, "a").write("x")
turn = len(open(turns).read())
if turn == {fails}: sys.exit("train: nothing left")
assert "--bench" in sys.argv and "json" in sys.argv and "--data" not in sys.argv
step = dict(mean=11.0, std=1.0, median=10.0 * turn, min=9.0)
print(json.dumps(dict(model=of("--model"), device="cpu", precision="fp32", batch=int(of("--batch")), step_ms=step,
                      warmup=int(of("--warmup")), steps=int(of("--steps")), taken_bytes=1 << 20)))
'''
# Prints more than is asked for and never ends by itself.
LLM_C = '''#!/bin/sh
echo "threads $OMP_NUM_THREADS"
i=0
while [ $i -lt 500 ]; do echo "step $i: train loss 5.0 (took $((100 + i)).5 ms)"; i=$((i + 1)); sleep 0.02; done
'''


def load(name):
    """Loads a script of dev/bench, under a name that no script in dev has."""
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return module


def fake_trainer(folder, fails=0):
    return executable(folder / "train", TRAINER.format(python=sys.executable, folder=str(folder), fails=fails))


def script(name, *arguments, code=0, **environment):
    ran = subprocess.run([sys.executable, BENCH / name, *map(str, arguments)], capture_output=True, text=True,
                         env={**ENVIRONMENT, **environment}, timeout=300)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran


def compare(folder, *arguments, code=0, **environment):
    """Runs compare_speed.py on the CPU; returns the rows of its table by peer, all numbers, and the text."""
    out = folder / "results" / "table.md"
    script("compare_speed.py", "--device", "cpu", "--precision", "fp32", "--out", out, *arguments, code=code, **environment)
    text = out.read_text()
    rows = {cells[1]: cells[2:] for line in text.splitlines() if line.startswith("| ")
            for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}
    (comparison,) = json.loads(out.with_suffix(".json").read_text())["comparisons"]
    return rows, comparison, text


def test_torch_beside_the_trainer(tmp_path):
    rows, raw, text = compare(tmp_path, "--train", fake_trainer(tmp_path), "--model", "d1", "--batch", 2,
                              "--seq-len", 8, "--peers", "train,torch", "--rounds", 2, "--steps", 3, "--warmup", 1,
                              "--threads", 1)
    assert [(t["peer"], t["round"]) for t in raw["turns"]] == [("train", 1), ("torch", 1), ("train", 2), ("torch", 2)]
    assert rows["train"][:4] == ["15.00", "10.00 to 20.00", f"{1000 * 16 / 15:.0f}", "1.00"]
    eager = [t for t in raw["turns"] if t["peer"] == "torch"]
    for turn in eager:
        assert len(turn["raw"]["steps_ms"]) == 3 and turn["raw"]["threads"] == 1
        assert turn["step_ms"]["median"] == sorted(turn["raw"]["steps_ms"])[1] > 0
        assert turn["peak_bytes"] > 16 * turn["raw"]["parameters"]
    first, second = (turn["step_ms"]["median"] for turn in eager)
    assert rows["torch"][0] == f"{(first + second) / 2:.2f}"
    assert rows["torch"][3] == f"{(first / 10 + second / 20) / 2:.2f}"
    assert raw["machine"]["PyTorch"] == torch.__version__ and f"- PyTorch: {torch.__version__}" in text
    assert raw["settings"]["model"] == "d1" and raw["left_out"] == {} and raw["failed"] == {}
    for said in (f"| {raw['machine']['date']} | {raw['machine']['commit']} |", "- CPU: ", "- compiler: ", "- oneDNN: ",
                 "- threads: 1", "autocast",
                 "--bench json --warmup 1 --steps 3 --model d1 --batch 2 --seq-len 8 --threads 1"):
        assert said in text, said
    assert str(ROOT) not in text


def test_comparisons_share_a_page(tmp_path):
    """One with the same settings is replaced, others are kept; so is what else the page says. The tables can be
    made again without measuring."""
    trainer, out = fake_trainer(tmp_path), tmp_path / "page.md"
    for batch in (1, 2, 1):
        script("compare_speed.py", "--device", "cpu", "--precision", "fp32", "--out", out, "--train", trainer, "--model", "d1", "--batch",
               batch, "--seq-len", 8, "--peers", "train", "--rounds", 1)
        if "## Another section" not in out.read_text():
            out.write_text(out.read_text() + "\n## Another section\n")
    text = out.read_text()
    assert re.findall(r"^\| d1, (\d) x 8, fp32 \| train \| ([\d.]+) ", text, re.M) == [("1", "30.00"), ("2", "20.00")]
    assert text.endswith("\n\n## Another section\n") and text.count("## Training steps") == 1
    out.unlink()
    script("compare_speed.py", "--device", "cpu", "--out", out, "--rewrite")
    assert out.read_text() == text.removesuffix("\n## Another section\n")
    assert "has no comparisons" in script("compare_speed.py", "--out", tmp_path / "none.md", "--rewrite", code=2).stderr


def test_the_page_has_what_its_json_file_has(tmp_path):
    """dev/results/speed-cpu.md is not edited by hand in the section that compare_speed.py writes."""
    page = ROOT / "dev" / "results" / "speed-cpu.md"
    shutil.copy(page.with_suffix(".json"), tmp_path / "speed-cpu.json")
    script("compare_speed.py", "--device", "cpu", "--out", tmp_path / "speed-cpu.md", "--rewrite")
    _, _, section = (tmp_path / "speed-cpu.md").read_text().partition("\n\n")
    assert section.startswith("## ") and section.strip() in page.read_text()


def test_a_section_of_a_page(tmp_path):
    results, page = load("results"), tmp_path / "new" / "page.md"
    results.write_section(page, "Title", "A", ["one"])
    assert page.read_text() == "# Title\n\n## A\n\none\n"
    results.write_section(page, "Title", "B", ["two"])
    results.write_section(page, "Title", "A", ["three", "", "### a part", "", "four"])
    assert page.read_text() == "# Title\n\n## A\n\nthree\n\n### a part\n\nfour\n\n## B\n\ntwo\n"
    results.write_section(page, "Title", "A", ["five"])
    assert page.read_text() == "# Title\n\n## A\n\nfive\n\n## B\n\ntwo\n"


def test_llm_c_is_ended_once_it_has_said_enough(tmp_path):
    executable(tmp_path / "llm.c" / "train_gpt2", LLM_C)
    rows, raw, text = compare(tmp_path, "--train", fake_trainer(tmp_path), "--peers", "train,llm.c", "--rounds", 1,
                              "--warmup", 2, "--steps", 3, "--threads", 1, LLMC=str(tmp_path / "llm.c"))
    assert rows["llm.c"][0] == "103.50" and rows["llm.c"][3] == "10.35"  # of steps 2, 3 and 4
    said = raw["turns"][1]["raw"]["steps_ms"]
    assert said[:5] == [100.5, 101.5, 102.5, 103.5, 104.5] and len(said) < 400
    assert "$LLMC/train_gpt2" in text and str(tmp_path / "llm.c") not in text and "- llm.c: unknown" in text


def test_llm_c_on_a_gpu_is_read():
    line = ("step    3/20 | loss 9.512345 (-1.20z)| norm 3.0000 (+0.10z)| lr 3.00e-04 | 98.76 ms | 40.1% bf16 MFU | "
            "165000 tok/s")
    assert re.findall(load("compare_speed").LlmC.STEP_TIME["cuda"], line) == ["98.76"]


def test_llm_c_on_a_gpu_gets_tokens_and_options(tmp_path, monkeypatch):
    """Its trainer needs pairs of a flag (one or two letters) and a value, and more tokens than a batch."""
    module = load("compare_speed")
    executable(tmp_path / "llm.c" / "train_gpt2cu", "#!/bin/sh\n")
    monkeypatch.setenv("LLMC", str(tmp_path / "llm.c"))
    monkeypatch.setattr(module.results, "ROOT", tmp_path)
    options = module.parse_options(["--device", "cuda", "--batch", "2", "--seq-len", "64", "--warmup", "1", "--steps", "4",
                                    "--llmc-options", "-r 0 -ge 2"])
    _, *words = map(str, module.LlmC(options).command())
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert all(re.fullmatch("-[a-z]{1,2}", flag) for flag in given)
    assert given["-e"] == "d12" and given["-x"] == "5" and given["-r"] == "0" and given["-i"] == given["-j"]
    header = np.fromfile(given["-i"], dtype=np.int32, count=256)
    tokens = np.fromfile(given["-i"], dtype=np.uint16, offset=1024)
    assert header[:3].tolist() == [20240520, 1, tokens.size] and tokens.size > 2 * 64 and 40000 < tokens.max() < 50257
    assert "--seq-len up to 1024" in module.LlmC.unfit(module.parse_options(["--device", "cuda", "--seq-len", "2048"]))


def test_llm_c_is_left_out_where_it_cannot_do_the_same(tmp_path):
    executable(tmp_path / "llm.c" / "train_gpt2", LLM_C)
    module = load("compare_speed")
    options = module.parse_options(["--device", "cpu", "--precision", "fp32", "--model", "d1", "--train",
                                    str(fake_trainer(tmp_path))])
    os.environ["LLMC"] = str(tmp_path / "llm.c")
    try:
        peers, left_out = module.choose_peers(options)
    finally:
        del os.environ["LLMC"]
    assert list(peers) == ["train", "torch", "torch.compile"] and "d12" in left_out["llm.c"]


def test_llm_c_on_a_cpu_is_what_its_source_says(tmp_path):
    assert load("compare_speed").LlmC.shape_on_a_cpu(tmp_path) == (4, 64)
    (tmp_path / "train_gpt2.c").write_text("int main() {\n    int B = 2; // batch\n    int T = 1024; // length\n}\n")
    assert load("compare_speed").LlmC.shape_on_a_cpu(tmp_path) == (2, 1024)


def test_a_peer_that_fails_is_written_down(tmp_path):
    executable(tmp_path / "llm.c" / "train_gpt2", "#!/bin/sh\necho 'no data' >&2; exit 1\n")
    rows, raw, text = compare(tmp_path, "--train", fake_trainer(tmp_path), "--peers", "llm.c,train", "--rounds", 2,
                              code=1, LLMC=str(tmp_path / "llm.c"))
    assert rows["llm.c"][0] == "failed" and rows["train"][0] == "15.00" and "no data" in raw["failed"]["llm.c"]
    assert [t["peer"] for t in raw["turns"]] == ["train", "train"] and "`llm.c` failed: " in text


@pytest.mark.parametrize("arguments, named", [
    (["--peers", "train,jax"], "--peers jax: known are train, torch"), (["--peers", "llm.c"], "LLMC"),
    (["--train", "nowhere/train"], "nowhere/train"), (["--out", "table.txt"], "table.txt must end in .md"),
    (["--batch", "0"], "--batch"), (["--rounds", "x"], "--rounds"),
    (["--peers", "train", "--precision", "bf16", "--train", "{train}"], "it is a cpu fp32 build, wanted is cpu bf16"),
    (["--peers", "train", "--train", "{failing}"], "nothing left")])
def test_mistakes_are_answered_in_one_line(tmp_path, arguments, named):
    paths = {"train": fake_trainer(tmp_path / "good"), "failing": fake_trainer(tmp_path / "bad", fails=1)}
    arguments = [argument.format(**paths) for argument in arguments]
    ran = script("compare_speed.py", "--device", "cpu", "--precision", "fp32", "--out", tmp_path / "t.md", *arguments, code=2,
                 LLMC="")
    lines = [line for line in ran.stderr.splitlines() if not line.startswith("round ")]
    assert len(lines) == 1 and lines[0].startswith("compare_speed.py: ") and named in lines[0], ran.stderr


@pytest.mark.parametrize("rows", [0, 5], ids=["whole", "chunks"])
def test_products_alone(train, rows):
    """Times each product of a profile with oneDNN alone, and their sum. A file that is no profile is refused
    in one line."""
    binary = ROOT / "build/bench/cpu/products"
    if train.device != "cpu" or not binary.exists():
        pytest.skip("make DEVICE=cpu build/bench/cpu/products")
    profile = train("--model", "d1", "--batch", 2, "--seq-len", 64, "--bench", "ops", "--warmup", "1", "--steps", "3",
                    "--chunk-rows", f"head={rows}", "--bench", "json").stdout
    names = [o["name"] for o in json.loads(profile)["operations"] if o["name"].startswith("matmul")]
    ran = subprocess.run([binary], input=profile, capture_output=True, env=ENVIRONMENT)
    if train.precision == "bf16" and "avx512" not in pathlib.Path("/proc/cpuinfo").read_text():
        assert ran.returncode == 2 and b"oneDNN has no such product for this CPU" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    head, *rows, total, times = ran.stdout.decode().splitlines()
    assert [row[:48].strip() for row in rows] == names and total.startswith("all ") and times.startswith("ms a step ")
    assert all(float(number) > 0 for row in [*rows, total, times] for number in row[48:].split())
    ran = subprocess.run([binary], input=b"{}", capture_output=True)
    assert ran.returncode == 2 and ran.stderr.count(b"\n") == 1


def test_the_trainer_itself(train, tmp_path):
    if b"--bench" not in train("--help").stdout:
        pytest.skip("this trainer has no --bench yet")
    out = tmp_path / "t.md"
    script("compare_speed.py", "--device", train.device, "--precision", train.precision, "--train", train.path, "--out", out,
           "--model", "d1", "--batch", 2, "--seq-len", 8, "--peers", "train", "--rounds", 1, "--steps", 2)
    (comparison,) = json.loads(out.with_suffix(".json").read_text())["comparisons"]
    (turn,) = comparison["turns"]
    assert turn["step_ms"]["median"] > 0 and turn["peak_bytes"] > 0 and turn["raw"]["steps"] == 2


@pytest.mark.parametrize("model", ["d1", "d6", "d24", "d36", "d48"])
def test_pytorchs_model_is_as_large(train_fp32, tmp_path, model):
    module = load("torch_gpt2")
    layers, heads, channels = module.sizes(model)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in module.GPT2(layers, heads, channels, 1024).parameters())
    padding = (module.PADDED_VOCABULARY - module.VOCABULARY) * channels
    tokens = write_shard(tmp_path / "data.bin", random_tokens(300, 2000))
    assert parameters - padding == train_fp32.plan("--model", model, "--data", tokens)["parameters"]


@pytest.mark.more
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_beside_the_trainer(tmp_path, family):
    model = make(tmp_path / "tiny", "--family", family, "--vocab", 300)
    rows, raw, text = compare(tmp_path, "--train", fake_trainer(tmp_path), "--model", model, "--batch", 2, "--seq-len", 8,
                              "--peers", "train,transformers,transformers.eager", "--rounds", 1, "--steps", 3, "--threads", 1)
    assert "| tiny, 2 x 8, fp32 | train |" in text and raw["failed"] == {} and raw["machine"]["transformers"]
    for name, attention in (("transformers", "sdpa"), ("transformers.eager", "eager")):
        (turn,) = [t for t in raw["turns"] if t["peer"] == name]
        assert turn["raw"]["attention"] == attention and turn["raw"]["weights"] == "fp32" and not turn["raw"]["compile"]
        assert len(turn["raw"]["steps_ms"]) == 3 and turn["step_ms"]["median"] > 0
        assert rows[name][3] == f"{turn['step_ms']['median'] / 10:.2f}" and f"- `{name}`: " in text


def test_a_folders_peers(tmp_path):
    """They depend on the precision; each is another command of the same script."""
    module, model = load("compare_speed"), make(tmp_path / "tiny", "--family", "llama")
    for precision, weights in (("fp32", []), ("bf16", ["--weights", "bf16"])):
        options = module.parse_options(["--device", "cpu", "--precision", precision, "--model", str(model), "--train",
                                        str(fake_trainer(tmp_path))])
        peers, left_out = module.choose_peers(options)
        commands = [tuple(map(str, peer.command()[1:])) for peer in peers.values()]
        assert left_out == {} and len(set(commands)) == len(peers) == 1 + (3 if precision == "fp32" else 5)
        assert any(command[-1:] == ("--compile",) for command in commands)
        assert any(list(command[-2:]) == weights for command in commands) or not weights
    for name in ("transformers.bf16", "torch"):
        with pytest.raises(SystemExit):
            module.choose_peers(module.parse_options(["--device", "cpu", "--precision", "fp32", "--model", str(model),
                                                      "--peers", name]))


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_transformers_loss_is_its_own(tmp_path, family):
    """What is timed is the model's own loss, without dropout."""
    module = load("torch_folder")
    model = make(tmp_path / "tiny", "--family", family, "--vocab", 300)
    options = module.parse_options(["--model", str(model), "--attention", "eager"])
    loss, vocabulary = module.load(options)
    window = torch.randint(vocabulary, (3, 9), generator=torch.Generator().manual_seed(1))
    assert vocabulary == 300 and not loss.training
    wanted = loss.model(input_ids=window, labels=window).loss.item()
    assert loss(window[:, :-1], window[:, 1:]).item() == pytest.approx(wanted, rel=1e-5)


def generation(*arguments, code=0):
    ran = script("generation.py", *arguments, "--rounds", 2, "--threads", 1, code=code)
    return {cells[0]: cells[1:] for line in ran.stdout.splitlines() if line.startswith("| ")
            for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}, ran.stdout, ran.stderr


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.more), "llama"])
def test_generation_beside_transformers(train_fp32, tmp_path, family):
    """The tokens are the same and are timed one by one; the weights that a token reads are counted."""
    model = make(tmp_path / "tiny", "--family", family, "--vocab", 300, "--channels", 64, "--positions", 32)
    rows, said, _ = generation("--model", model, "--train", train_fp32.path, "--tokens", 20)
    assert "The first 20 of 20 tokens are the same." in said and rows["train"][3] == "1.00"
    sizes = {p: torch.nn.Parameter.numel(p) for p in load("torch_folder").transformers.AutoModelForCausalLM
             .from_pretrained(model).parameters()}
    unread = 32 * 64 if family == "gpt2" else 300 * 64  # positions; an embedding that is not the head
    assert f"{4 * (sum(sizes.values()) - unread) / 1e6:.0f} MB of weights" in said
    for name in ("train", "transformers"):
        assert float(rows[name][0]) > 0 and rows[name][2].endswith("%")


def test_generation_says_what_failed(tmp_path):
    model = make(tmp_path / "tiny", "--vocab", 300)
    silent = executable(tmp_path / "silent", "#!/bin/sh\necho '{\"copy_peak\": 1e9}'\n")
    for train, named in ((silent, "made 0 tokens, not 8"), (executable(tmp_path / "failing", "#!/bin/sh\nexit 3\n"), "exit code 3"),
                         (tmp_path / "none", "no such file")):
        _, _, error = generation("--model", model, "--train", train, "--tokens", 8, code=2)
        assert error.count("\n") == 1 and error.startswith("generation.py: ") and named in error


def test_prompts_one_by_one_and_at_a_time(train_fp32, tmp_path):
    """All answers have the tokens that were asked for; the last column is the median of the rounds' ratios."""
    model = make(tmp_path / "tiny", "--family", "llama", "--vocab", 300, "--channels", 64, "--positions", 32)
    rows, said, _ = generation("--model", model, "--train", train_fp32.path, "--tokens", 12, "--prompts", 8)
    assert "8 prompts, 96 tokens in all, 1 threads, medians of 2 rounds in turn; the same answers" in said
    assert list(rows) == ["", "one by one", "8 at a time"] and rows["one by one"][2] == "1.00"
    for row in ("one by one", "8 at a time"):
        slowest, fastest = map(float, rows[row][1].split(" to "))
        assert 0 < slowest <= float(rows[row][0]) <= fastest


def test_turns_of_prompts_are_compared(tmp_path):
    """With a trainer whose rates are known: in turn, three rounds, and the medians of rates and ratios."""
    model = make(tmp_path / "tiny", "--vocab", 300)
    fake = executable(tmp_path / "train", f"""#!{sys.executable}
import sys
def of(name): return sys.argv[sys.argv.index(name) + 1]
turns = {str(tmp_path)!r} + "/turns"
open(turns, "a").write(of("--batch"))
turn = len(open(turns).read()) - 1
texts = open(of("--prompts")).read()
assert texts.count("prompt") == 4 and of("--sample") == "tokens=9,temperature=0", texts
if turn < 6: print("answers")
if turn < 8: print("4 prompts answered: 36 tokens, %.1f tokens/s" % [10, 40, 20, 50, 40, 160, 1, 1][turn], file=sys.stderr)
""")
    ran = script("generation.py", "--model", model, "--train", fake, "--tokens", 9, "--prompts", 4, "--rounds", 3, "--threads", 1)
    assert (tmp_path / "turns").read_text() == "141414"
    assert "| one by one | 20.0 | 10.0 to 40.0 | 1.00 |" in ran.stdout and "| 4 at a time | 50.0 | 40.0 to 160.0 | 4.00 |" in ran.stdout
    (tmp_path / "turns").write_text("14141")
    _, _, error = generation("--model", model, "--train", fake, "--tokens", 9, "--prompts", 4, code=2)
    assert error == "generation.py: 4 at a time: other answers than one by one\n"
    (tmp_path / "turns").write_text("14141414")
    _, _, error = generation("--model", model, "--train", fake, "--tokens", 9, "--prompts", 4, code=2)
    assert error == f"generation.py: {fake}: did not say how fast it was\n"
    assert "at least 2" in generation("--model", model, "--train", fake, "--prompts", 1, code=2)[2]
    assert "--prompts 301: the model has 300 tokens" in generation("--model", model, "--train", fake, "--prompts", 301, code=2)[2]


def test_pytorchs_model_refuses_other_depths():
    for model in ("d13", "d0", "12", "d"):
        with pytest.raises(load("torch_gpt2").argparse.ArgumentTypeError, match="known are"):
            load("torch_gpt2").sizes(model)


def attention(folder, *arguments):
    device = binaries()[0].device
    if binaries()[0].is_played:
        pytest.skip("not on a GPU that is played: it has no benchmark of its own")
    binary = ROOT / f"build/bench/{device}/attention"
    assert binary.exists(), f"make DEVICE={device} {binary.relative_to(ROOT)}"
    out = folder / "attention.md"
    raw = folder / "raw.json"
    script("attention.py", "--device", device, "--quick", "--threads", 1, "--out", out, "--raw", raw, *arguments)
    return out.read_text(), json.loads(raw.read_text())


@pytest.mark.more
def test_attention_beside_pytorchs(tmp_path):
    text, raw = attention(tmp_path, "--precision", "bf16", "--memory", 2000)
    wanted = {(kind, "bf16", length, size) for kind in ("train", "sdpa", "naive") for length in (64, 256)
              for size in (16, 64)}
    assert {(line["kind"], line["precision"], line["seq_len"], line["head_size"]) for line in raw["lines"]} == wanted
    assert len(raw["lines"]) == len(wanted) and raw["failed"] == {}
    for line in raw["lines"]:
        assert line["batch"] * line["seq_len"] == 256 and line["heads"] * line["head_size"] == 64
        assert line["forward_ms"] > 0 and line["backward_ms"] > 0
        if line["kind"] == "train":
            assert line["bytes"] == 4 * 256 * 64 * 2 + 4 * 256 * line["heads"]
            flops = 2 * 256 * 64 * line["seq_len"]  # two products, each half masked
            assert line["forward_flops_per_second"] == pytest.approx(flops / line["forward_ms"] * 1000, rel=1e-3)
    for row in ("| 64 x 16 | 4 x 4 |", "| 256 x 64 | 1 x 1 |"):
        assert text.count(row) == 1
    assert "## bf16" in text and "## fp32" not in text and f"- PyTorch: {torch.__version__}" in text


@pytest.mark.more
def test_naive_attention_runs_out_of_memory(tmp_path):
    text, raw = attention(tmp_path, "--precision", "fp32", "--lengths", 1024, "--tokens", 1024, "--head-sizes", 16,
                          "--memory", 24)
    lines = {line["kind"]: line for line in raw["lines"]}
    assert lines["naive"]["out_of_memory"] and lines["sdpa"]["forward_ms"] > 0
    assert "| out of memory |  |  | T x T: 16 |" in text  # 4 heads x 1024 x 1024 x 4 bytes


# Takes 2 ms per forward pass, 1 ms with the hopper kernels.
ATTENTION = '''#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
hopper = given.get("--attention") == "hopper"
for size in map(int, given["--head-sizes"].split(",")):
    assert not hopper or size in (64, 128) and given["--precision"] == "bf16"
    print(json.dumps(dict(head_size=size, seq_len=int(given["--lengths"]), precision=given["--precision"], bytes=1 << 20,
                          forward_ms=1 if hopper else 2, backward_ms=2 if hopper else 4)))
'''


@pytest.mark.parametrize("capability", ["9.0", "8.0"])
def test_hoppers_attention_beside_the_common_one(tmp_path, monkeypatch, capability):
    executable(tmp_path / "nvidia-smi", f"#!/bin/sh\necho {capability}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    module, out = load("attention"), tmp_path / "attention.md"
    # Without PyTorch there is no GPU for it.
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert module.main(["--device", "cuda", "--binary", str(executable(
        tmp_path / "binary", ATTENTION.format(python=sys.executable))), "--head-sizes", "32,64", "--lengths", "64",
        "--rounds", "1", "--memory", "1", "--out", str(out)]) == 0
    lines = [line for line in out.read_text().splitlines() if line.startswith("| 64 x")]
    hopper = ["|  |  |  |  |", "|  |  |  |  |", "|  |  |  |  |", "| 1 | 2 | 0.50 | 2.0 |"] if capability == "9.0" else [""] * 4
    assert [line.split(" | 2 | 4 | 2.0 ")[1] for line in lines] == [cells or "|" for cells in hopper]


def test_naive_attention_is_attention():
    module = load("torch_attention")
    q, k, v = torch.randn(3, 2, 2, 10, 8).unbind()
    future = torch.ones(10, 10, dtype=torch.bool).triu(1)
    torch.testing.assert_close(module.naive(q, k, v, future), module.sdpa(q, k, v))


NVIDIA_SMI = '''#!/bin/sh
case "$*" in
    *gpu=index*) echo 0 ;;
    *name,*) echo "NVIDIA Fake 100, 1000 MiB, 1.0, 9.0" ;;
    *compute_cap*) echo 9.0 ;;
    *query-gpu=name*) echo "NVIDIA Fake 100" ;;
    *) echo "| Driver Version: 1.0   CUDA Version: 13.0 |" ;;
esac
'''
# Builds programs that print their arguments. One test fails, and the trainer needs a small batch.
MAKE = '''#!/bin/sh
for target; do
    case $target in
        build/*) mkdir -p "$(dirname "$target")"
            printf '#!/bin/sh\\necho "$0 $*"\\n' > "$target"
            case $target in
                */test_b) echo "echo wrong; exit 1" >> "$target" ;;
                */train)
                    echo 'case "$*" in *"batch 16"*) ;; *) echo "out of device memory"; exit 2 ;; esac' >> "$target" ;;
            esac
            chmod +x "$target" ;;
        nvcc-version) echo V13.0 ;;
    esac
done
'''
# Has no modules; only runs the attention benchmark.
PYTHON = '''#!/bin/sh
[ "$1" = -c ] && exit 1
sleep 0.1
echo "python $*"
echo "figures of $1" > dev/results/nvidia-fake-100-attention.md
'''


@pytest.fixture
def gpu_machine(tmp_path):
    """A copy of gpu_check.sh whose commands are fakes; returns a function that runs it."""
    executable(tmp_path / "dev" / "gpu_check.sh", (ROOT / "dev" / "gpu_check.sh").read_text())
    executable(tmp_path / "dev" / "venv.sh", "#!/bin/sh\necho 'not online'; exit 1\n")
    for name, text in {"nvidia-smi": NVIDIA_SMI, "make": MAKE, "python3": PYTHON, "g++": "#!/bin/sh\n",
                       "mpirun": "#!/bin/sh\n", "unshare": "#!/bin/sh\n", "compute-sanitizer": '#!/bin/sh\necho "$SMALL_SHAPES $*"\n'}.items():
        executable(tmp_path / "bin" / name, text)

    def run(*arguments, code, without=(), **environment):
        for name in without:
            (tmp_path / "bin" / name).unlink()
        environment |= {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "KERNEL_TESTS": "test_a test_b"}
        ran = subprocess.run([tmp_path / "dev" / "gpu_check.sh", *arguments], capture_output=True, text=True,
                             timeout=60, env=environment)
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran

    return run


def gpu_rows(path):
    """{part: how it ended} from a file of results."""
    return {cells[1].strip(): cells[2].strip() for line in path.read_text().splitlines() if line.startswith("| ")
            for cells in [line.split("|")]}


def test_gpu_check_goes_on_after_a_failure(gpu_machine, tmp_path):
    said = gpu_machine(code=1).stdout
    results = tmp_path / "dev" / "results" / "nvidia-fake-100.md"
    text, rows = results.read_text(), gpu_rows(results)
    assert rows["build"] == rows["test_a"] == rows["test_a under racecheck"] == "passed"
    assert rows["test_b"] == "FAILED (exit code 1)" and rows["Python tests"].startswith("skipped: ")
    batches = [rows.get(f"train d12, bf16, batch {batch}, seq_len 1024") for batch in (64, 32, 16, 8)]
    assert batches == ["does not fit", "does not fit", "passed", None]
    ways = ("--recompute none --chunk-rows head=0", "--chunk-rows head=4096", "--chunk-rows head=4096 --advanced graph=off",
            "--chunk-rows head=4096 --advanced attention=common",
            "--chunk-rows head=4096 --advanced algorithms=build/matmul-nvidia-fake-100.json")
    for name in ("operations of d12, bf16, batch 16", "operations of d12, bf16, batch 16, searched algorithms",
                 "operations of d12, bf16, batch 16, beside what was predicted",
                 *(f"train d12, bf16, batch 16, seq_len 1024, {way}" for way in ways)):
        assert rows[name] == "passed", name
    assert rows["attention by length and head size"] == "passed"
    assert rows["compare with PyTorch"] == "skipped: no Python here has torch"
    assert "25 parts, 1 failed" in text and "25 parts, 1 failed" in said
    for line in ("- GPU, memory, driver, compute capability: NVIDIA Fake 100, 1000 MiB, 1.0, 9.0", "- nvcc: V13.0",
                 "- CUDA of the driver: CUDA Version: 13.0", "    wrong",
                 "    1 --tool memcheck --error-exitcode 9 build/test/cuda/test_a --gtest_brief=1",
                 "    figures of dev/bench/attention.py"):
        assert line in text.splitlines(), line


def test_gpu_check_takes_no_fault_for_lack_of_memory(gpu_machine, tmp_path):
    gpu_machine("build", code=0)
    for precision in ("bf16", "fp32"):
        executable(tmp_path / "build" / f"cuda-{precision}" / "train",
                   "#!/bin/sh\necho 'CUDA: an illegal memory access was encountered'; exit 2\n")
    gpu_machine("trainer", code=1)
    rows = gpu_rows(tmp_path / "dev" / "results" / "nvidia-fake-100-trainer.md")
    assert rows["train d12, bf16, batch 64, seq_len 1024"] == "FAILED (exit code 2)"


def test_levels(train_fp32, capsys):
    load("levels").main(["--train", train_fp32.path, "--model", "d1", "--batch", "1", "--seq-len", "16", "--levels",
                         "none,block", "--rounds", "1", "--steps", "1"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith(("| `n", "| `b"))]
    assert [row[0].strip() for row in rows] == ["`none`", "`block`"] and float(rows[0][5].strip(" x")) == 1
    assert int(rows[0][1]) >= int(rows[1][1]) > 0 and all(float(row[3]) > 0 and float(row[4]) > 0 for row in rows)


def test_levels_pass_on_what_the_trainer_says(train_fp32, capsys):
    with pytest.raises(SystemExit) as ended:
        load("levels").main(["--train", train_fp32.path, "--model", "d1", "--levels", "blok"])
    assert ended.value.code == 2 and "no level 'blok'" in capsys.readouterr().err


def test_gpu_check_does_groups_with_what_was_built(gpu_machine, tmp_path):
    gpu_machine("build", code=0, RESULTS="out")
    gpu_machine("sanitizers", "kernels", code=1, RESULTS="out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "nvidia-fake-100-build.md", "nvidia-fake-100-sanitizers-kernels.md"]
    assert list(gpu_rows(tmp_path / "out" / "nvidia-fake-100-build.md")) == ["part", "build"]
    rows = gpu_rows(tmp_path / "out" / "nvidia-fake-100-sanitizers-kernels.md")
    assert list(rows)[1:4] == ["test_a", "test_b", "test_a under memcheck"] and len(rows) == 7


def test_gpu_check_compares_several_gpus(gpu_machine, tmp_path):
    for exit_code, ended in ((0, "passed"), (1, None)):
        executable(tmp_path / "bin" / "unshare", f"#!/bin/sh\nexit {exit_code}\n")
        gpu_machine("devices", code=0)
        rows = gpu_rows(tmp_path / "dev" / "results" / "nvidia-fake-100-devices.md")
        assert rows.get("d4, 3 ranks on one GPU, bf16") == ended
    assert rows["several ranks on one GPU"].startswith("skipped: they need OpenMPI's mpirun and permission")
    gpu_machine("devices", code=0, CUDA_VISIBLE_DEVICES="0,1,2")
    text = (tmp_path / "dev" / "results" / "nvidia-fake-100-devices.md").read_text()
    for count in (2, 3):
        for precision in ("bf16", "fp32"):
            assert f"CUDA_VISIBLE_DEVICES=0,1,2 python3 dev/compare_devices.py build/cuda-{precision}/train --devices {count} " in text


def test_gpu_check_brings_googletest(gpu_machine, tmp_path):
    executable(tmp_path / "bin" / "g++", "#!/bin/sh\nexit 1\n")
    executable(tmp_path / "bin" / "make", MAKE.replace("nvcc-version)", "gpu-deps) echo brought ;; nvcc-version)"))
    gpu_machine("build", code=0)
    results = tmp_path / "dev" / "results" / "nvidia-fake-100-build.md"
    assert list(gpu_rows(results)) == ["part", "install GoogleTest", "build"]
    assert "    brought" in results.read_text().splitlines()


HAZARD = "========= {}: Race reported between {} access at {}+0x10\n=========     and {} access at {}+0x20 [8 hazards]\n"
HOPPER, OTHER = "void hopper_attention_forward_kernel<(int)64>(Maps)", "void layernorm_forward_kernel<float>(float *)"


@pytest.mark.parametrize("said, ended", [
    (HAZARD.format("Error", "Write", HOPPER, "Read", HOPPER), "passed, but for alarms about hopper_attention"),
    (HAZARD.format("Error", "Write", HOPPER, "Read", HOPPER) + HAZARD.format("Warning", "Read", OTHER, "Write", OTHER),
     "FAILED (exit code 9)"),
    (HAZARD.format("Error", "Write", HOPPER, "Read", OTHER), "FAILED (exit code 9)"),
    (HAZARD.format("Error", "Write", HOPPER, "Read", HOPPER) + "[  FAILED  ] Attention.Forward\n",
     "FAILED (exit code 9)"),
    ("========= Error: the application ended\n" + HAZARD.format("Error", "Write", HOPPER, "Read", HOPPER),
     "FAILED (exit code 9)"),
    ("", "FAILED (exit code 9)"),
], ids=["known", "another kernel too", "between two", "a failed test", "another error", "nothing said"])
def test_gpu_check_tells_false_alarms_apart(gpu_machine, tmp_path, said, ended):
    gpu_machine("build", code=0)
    executable(tmp_path / "bin" / "compute-sanitizer",
               f"#!/bin/sh\ncase $* in *test_a*) cat <<'EOF'\n{said}EOF\nexit 9 ;; esac\n")
    gpu_machine("sanitizers", code=1)
    rows = gpu_rows(tmp_path / "dev" / "results" / "nvidia-fake-100-sanitizers.md")
    assert rows["test_a under racecheck"].startswith(ended)
    assert rows["test_a under memcheck"] == "FAILED (exit code 9)"  # it has no known alarms
    assert rows["test_b under racecheck"] == "passed"


def test_gpu_check_ends_in_time(gpu_machine, tmp_path):
    gpu_machine("build", code=0)
    executable(tmp_path / "build" / "test" / "cuda" / "test_a", "#!/bin/sh\necho begun; exec sleep 30\n")
    results = tmp_path / "dev" / "results" / "nvidia-fake-100-kernels.md"
    gpu_machine("kernels", code=1, PART_SECONDS="1")
    assert gpu_rows(results)["test_a"] == gpu_rows(results)["test_b"].replace("exit code 1", "not done after 1 s")
    gpu_machine("kernels", code=1, TOTAL_SECONDS="2")
    assert gpu_rows(results)["test_a"].startswith("FAILED (not done after ") and "    begun" in results.read_text()
    assert gpu_rows(results)["test_b"] == "skipped: 2 s are over"


def test_gpu_check_skips_what_is_not_there(gpu_machine, tmp_path):
    if shutil.which("compute-sanitizer", path="/usr/bin:/bin:/usr/local/cuda/bin"):
        pytest.skip("compute-sanitizer is here")
    assert "compute-sanitizer: skipped, it is not on the PATH" in gpu_machine(
        code=1, without=["compute-sanitizer"]).stdout


def test_gpu_check_prints_its_plan(gpu_machine, tmp_path):
    said = gpu_machine("--dry-run", code=0).stdout
    for command in ("DEVICE=cuda build/cuda-bf16/train build/cuda-fp32/train build/test/cuda/test_a",
                    "compute-sanitizer --tool racecheck", "--model d48 --batch 16 --seq-len 1024",
                    "--bench ops --warmup 3 --steps 10 --model d12 --batch 64",
                    "--chunk-rows head=4096 --advanced algorithms=build/matmul-", "--recompute none --chunk-rows head=0",
                    "dev/gpu_compare.py --gpu NVIDIA Fake 100 --out dev/results/nvidia-fake-100-predicted.md build/cuda-bf16/train",
                    "dev/bench/attention.py", "dev/bench/compare_speed.py"):
        assert command in said, command
    assert not (tmp_path / "dev" / "results").exists() and not (tmp_path / "build").exists()


TWO_GPUS = '''#!/bin/sh
case "$*" in
    *compute_cap,memory.total,uuid*) printf '%s\\n' '7.5, 16384, GPU-0a' '8.9, 16376, GPU-1b' '12.0, 12227, GPU-2c' '12.0, 32607, GPU-3d' ;;
    *--id=GPU-3d*name,*) echo "NVIDIA Large 5090, 32607 MiB, 1.0, 12.0" ;;
    *--id=GPU-3d*name*) echo "NVIDIA Large 5090" ;;
    *--id=1*name*) echo "NVIDIA Middle 4080" ;;
    *--query-gpu=name*) echo "NVIDIA First 2080" ;;
esac
'''


def test_gpu_check_names_the_gpu_that_cuda_uses(gpu_machine, tmp_path):
    """The GPU is chosen for both, and is not the first that nvidia-smi lists."""
    executable(tmp_path / "bin" / "nvidia-smi", TWO_GPUS)
    gpu_machine("build", code=0)
    executable(tmp_path / "build" / "test" / "cuda" / "test_a", '#!/bin/sh\necho "$CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES"\n')
    gpu_machine("kernels", code=1)
    text = (tmp_path / "dev" / "results" / "nvidia-large-5090-kernels.md").read_text()
    assert "    PCI_BUS_ID GPU-3d" in text.splitlines() and "NVIDIA Large 5090, 32607 MiB, 1.0, 12.0" in text
    gpu_machine("kernels", code=1, CUDA_VISIBLE_DEVICES="1,0")
    text = (tmp_path / "dev" / "results" / "nvidia-middle-4080-kernels.md").read_text()
    assert "    PCI_BUS_ID 1" in text.splitlines()


@pytest.mark.parametrize("environment, name", [({}, "NVIDIA First 2080"), ({"CUDA_VISIBLE_DEVICES": "GPU-3d"}, "NVIDIA Large 5090"),
                                               ({"CUDA_VISIBLE_DEVICES": "1"}, "NVIDIA First 2080"),
                                               ({"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
                                                "NVIDIA Middle 4080")])
def test_benchmarks_ask_for_the_gpu_that_cuda_uses(tmp_path, monkeypatch, environment, name):
    executable(tmp_path / "nvidia-smi", TWO_GPUS)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert load("results").ask_gpu("name") == name


def test_gpu_check_gives_its_build_more_time(gpu_machine, tmp_path):
    executable(tmp_path / "bin" / "make", MAKE.replace("build/*)", "build/*) sleep 0.4;"))
    gpu_machine("build", code=0, PART_SECONDS="1")
    gpu_machine("build", code=1, BUILD_SECONDS="1")
    assert gpu_rows(tmp_path / "dev" / "results" / "nvidia-fake-100-build.md")["build"] == "FAILED (not done after 1 s)"


def test_gpu_check_needs_a_gpu(gpu_machine):
    ran = gpu_machine(code=2, without=["nvidia-smi"])
    assert ran.stderr == "gpu_check.sh: no GPU answers nvidia-smi; this checks the CUDA build on one\n"
    ran = gpu_machine("--dry-run", code=0)  # a dry run needs none
    assert "--model d48" in ran.stdout and "nvidia-smi" not in ran.stderr
    said = gpu_machine("--quick", code=2).stderr
    assert said.startswith("gpu_check.sh: --quick: neither --dry-run nor a group, which are build kernels")


PREDICTED = '''#!{python}
import json, sys
def of(name): return sys.argv[sys.argv.index(name) + 1]
if "--calibrate" in sys.argv:
    open(of("--calibrate"), "w").write("rates")
    sys.exit(print("measured a CPU in 1.0 s: " + of("--calibrate")))
if "--plan" in sys.argv:
    assert open(of("--rates")).read() == "rates"
    sys.exit(print(json.dumps(dict(estimated_seconds=0.1, phases=[dict(name="forward", seconds=0.1, bound_by="disk")]))))
turns = {folder!r} + "/" + str(abs(hash(tuple(sys.argv))))
open(turns, "a").write("x")
median = {medians!r}[len(open(turns).read()) - 1]
step = dict(mean=median, std=1.0, median=median, min=0.9 * median)
print(json.dumps(dict(step_ms=step, forward_ms=step)))
'''


@pytest.mark.parametrize("medians, off, within", [([105], "-4.8%", (20, 20)), ([130, 115], "-13.0%", (0, 20)),
                                                  ([130, 150], "-23.1%", (0, 0)), ([80, 95], "+25.0%", (0, 0))])
def test_predictions_beside_measurements(tmp_path, medians, off, within):
    """If a prediction is off, the bench is run once more and the faster run counts; the table counts those
    within bounds."""
    text = PREDICTED.format(python=sys.executable, folder=str(tmp_path), medians=medians)
    trains = [item for p in ("fp32", "bf16") for item in (f"--{p}", executable(tmp_path / f"train-{p}", text))]
    make(tmp_path / "model", "--layers", 1, "--heads", 1, "--channels", 8)
    out = tmp_path / "table.md"
    raw = tmp_path / "raw.json"
    script("predict.py", "--out", out, "--raw", raw, *trains, "--model", tmp_path / "model", PYTHONHASHSEED="1")
    said = out.read_text()
    assert f"Within 10%: {within[0]} of 20; within 20%: {within[1]} of 20." in said
    assert said.count(f"| {off} |") == 20 and said.count("forward: disk") == 20
    rows = json.loads(raw.read_text())["rows"]
    assert [len(row["runs"]) for row in rows] == [len(medians)] * 20
    assert "is not there" in script("predict.py", "--model", tmp_path / "none", *trains, code=2).stderr


# ---- one block, and the longest context


def test_the_kinds_of_a_block_are_one_function():
    torch_block = load("torch_block")
    results, weights = [], None
    for kind in ("dense", "flash", "blockwise"):
        torch.manual_seed(2)
        block = torch_block.Block(kind, 32, 4, 48, 16)
        x = torch.randn(2, 56, 32, requires_grad=True)
        block(x).backward(torch.randn(2, 56, 32))
        results.append([x.grad, *(p.grad for p in block.parameters())])
    for other in results[1:]:
        for got, wanted in zip(other, results[0]):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.more
def test_a_block_by_length(tmp_path):
    train = next(b for b in binaries() if b.precision == "fp32")
    out = tmp_path / "block.md"
    script("block.py", "--train", train.path, "--longest", 1024, "--out", out, "--raw", tmp_path / "raw.json")
    row = [cell.strip() for cell in out.read_text().splitlines()[-1].strip("|").split("|")]
    assert row[0] == "1,024" and len(row) == 6 and all(re.fullmatch(r"[\d.]+ s, \d+ MiB", cell) for cell in row[1:])
    measured = json.loads((tmp_path / "raw.json").read_text())["measured"]
    assert measured["train"]["1024"]["bytes"] < measured["dense"]["1024"]["bytes"]
    assert out.with_suffix(".png").stat().st_size > 10000
    assert "must end in .md" in script("block.py", "--out", "x", code=2).stderr


def test_the_longest_context_beside_pytorch(tmp_path, monkeypatch, capsys):
    """It is found by trying. Four times its length is run, and both peers are timed at PyTorch's longest."""
    longest, run = load("longest_context"), []

    def ours(self, *more):
        if "--plan" in more:
            return {"precision": "fp32", "seq_len": 9984, "estimated_seconds": 3.0}
        run.append(more[more.index("--seq-len") + 1])
        return {"step_ms": {"median": 2.0 * run[-1]}}

    monkeypatch.setattr(longest.Peers, "ours", ours)
    monkeypatch.setattr(longest.Peers, "torch", lambda self, tokens, steps=1: [4.0 * tokens] if tokens < 2000 else None)
    out = tmp_path / "longest.md"
    longest.main(["--memory", "2GiB", "--out", str(out), "--rounds", "2"])
    assert run == [4 * 1792, 1792, 1792]
    text = out.read_text()
    assert "| longest sequence, tokens | 1,792 | 9,984 by plan |" in text and "| a step of PyTorch's longest, s | 7.2 | 3.6 |" in text
    with pytest.raises(SystemExit):
        longest.main(["--memory", "much"])
    assert "--memory" in capsys.readouterr().err
    (tmp_path / "memory.max").write_text("max\n")
    with pytest.raises(SystemExit):
        longest.main(["--memory", "2GiB", "--cgroup", str(tmp_path)])
    assert "does not limit memory to --memory 2048MiB" in capsys.readouterr().err
    (tmp_path / "memory.max").write_text(f"{2 << 30}\n")
    longest.main(["--memory", "2GiB", "--cgroup", str(tmp_path), "--out", str(out), "--rounds", "1"])
    text = out.read_text()
    assert "\n## LoRA in 2048 MiB of a cgroup\n" in text and "\n## LoRA in 2048 MiB that a process may map\n" in text
