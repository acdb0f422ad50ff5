"""Training on several devices: ranks that MPI starts have the bits of one device, whatever each of them keeps; a run goes on
on another number of devices. test_devices_ends.py has what ends them."""

import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess

import compare_devices
import pytest
import transformers
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from trainer_runs import IS_MPICH, ROOT, cpu_seconds, error_line, make, random_tokens, write_shard, write_text

USUALLY = "fp32"
BASE = ("--model", "model", "--data", "data.bin", "--val-data", "val.bin", "--batch", 2, "--seq-len", 24, "--steps", 4,
        "--warmup", 1, "--lr", "1e-2", "--eval-every", 2, "--eval-batches", 2, "--sample", "tokens=5,temperature=0", "--save-every", 2,
        "--log", "log", "--out", "out")
# What is trained, and with which options. Rows that go in chunks are not among them: their gradients are added chunk by chunk,
# so several micro-batches on one device have another order.
CASES = {
    "llama": (),
    "qwen3": ("--recompute", "block"),
    "mistral": ("--recompute", "norm:1,block:1"),
    "by block": ("--by-block",),
    "update in backward": ("--by-block", "--update-in-backward"),
    "unclipped in backward": ("--by-block", "--update-in-backward", "--clip", 0),
    "8-bit moments": ("--state-formats", "m=8bit,v=8bit"),
    "clipped by block": ("--advanced", "clip=block"),
    "sgd": ("--optimizer", "sgd", "--clip", 0.3),
    "state on disk": ("--offload", "state=disk"),
    "all on disk": ("--offload", "weights=disk,gradients=disk,state=disk"),
    "lora": ("--train", "lora", "--lora-rank", 3, "--lora-dropout", 0.1),
    "nf4": ("--train", "lora", "--base", "nf4"),
    "nf4-double and a head": ("--train", "lora", "--base", "nf4-double,head=8bit"),
    "mixed": ("--train", "lora", "--base", "mlp=8bit,attention=nf4", "--recompute", "block"),
    "gguf": ("--model", "model.gguf", "--train", "lora"),
    "soft prompt": ("--train", "prompt", "--soft-prompt", 5),
    "examples": ("--data", "examples.jsonl", "--val-data", "examples.jsonl"),
    "dropout": ("--model", "gpt2", "--train", "lora", "--dropout", 0.1),
    "qwen2": ("--recompute", "ffn"),
    "packed examples": ("--data", "examples.jsonl", "--val-data", "examples.jsonl", "--train", "lora", "--recompute", "attention"),
    "gguf on disk": ("--model", "model.gguf", "--train", "lora", "--offload", "weights=disk"),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("devices")
    sizes = ("--layers", 2, "--heads", 4, "--channels", 64, "--positions", 64, "--vocab", 256)
    for name, family, options in (("model", "llama", ("--kv-heads", 2)), ("qwen3", "qwen3", ("--head-size", 32)),
                                  ("mistral", "mistral", ("--window", 10)), ("gpt2", "gpt2", ("--tied",)),
                                  ("qwen2", "qwen2", ()), ("bloom", "bloom", ("--tied",))):
        make(work / name, "--family", family, *sizes, *options)
    write_gguf(work / "model.gguf", transformers.AutoModelForCausalLM.from_pretrained(work / "model"), "llama")
    for name in ("data", "val"):
        write_shard(work / f"{name}.bin", random_tokens(256, 4000))
    text = pathlib.Path(__file__).read_text()
    examples = [{"prompt": text[40 * i:40 * i + 9 + i % 5], "completion": text[40 * i + 9:40 * i + 21 + i % 7]} for i in range(60)]
    (work / "examples.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    return work


pytestmark = pytest.mark.on_a_cpu("test_devices_gpu.py trains on several GPUs")


def figures(path):
    """What a log has, without times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("ms", "tokens_per_second", "waited_ms")} for line in lines]


def files_of(save):
    """What is in a save: digests of its files, and its settings without the folder that they name files from."""
    digests = {f.name: hashlib.sha1(f.read_bytes()).hexdigest() for f in sorted(save.resolve().iterdir())}
    state = json.loads((save / "trainer_state.json").read_text())
    state.pop("directory")
    state["options"].pop("--threads", None)
    return digests | {"trainer_state.json": state}


def in_folder(work, folder):
    """A folder with the models and data, for a run's outputs."""
    folder.mkdir(parents=True)
    for file in work.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def case_options(name):
    model = ("--model", name) if name in ("qwen2", "qwen3", "mistral") else ()
    return (*model, *CASES[name])


@pytest.fixture(scope="module")
def one_device(work, tmp_path_factory):
    """The results of a case on one device that accumulates `micro_batches`; each is computed once."""
    known = {}

    def results(train, options, micro_batches):
        if (options, micro_batches) not in known:
            folder = in_folder(work, tmp_path_factory.mktemp("one") / "run")
            printed = train(*BASE, *options, "--grad-accum", micro_batches, "--threads", 1, cwd=folder).stdout
            known[options, micro_batches] = figures(folder / "log"), files_of(folder / "out" / "latest"), sample_of(printed)
        return known[options, micro_batches]
    return results


def sample_of(printed):
    return printed.split(b"--- sample")[-1]


@pytest.mark.parametrize("zero", [pytest.param("0", marks=pytest.mark.more), "1", "2", "3"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_bits_of_one_device(train_fp32, work, one_device, tmp_path, name, zero):
    if (zero in "23" and name == "all on disk") or (zero == "3" and name == "gguf on disk"):
        pytest.skip("gradients are on the device or in slices, and so are divided weights")
    ranks = (2, 3, 4, 8)[(list(CASES).index(name) + int(zero)) % 4]
    folder = in_folder(work, tmp_path / "run")
    printed = train_fp32(*BASE, *case_options(name), "--devices", ranks, "--zero", zero, cwd=folder).stdout
    assert (figures(folder / "log"), files_of(folder / "out" / "latest"), sample_of(printed)) == \
        one_device(train_fp32, case_options(name), ranks)
    assert printed.count(b"--- sample") == 1 and len(re.findall(rb"^step +4/4", printed, re.M)) == 1


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_base_that_is_saved_in_nf4_is_divided(train_fp32, work, one_device, tmp_path, ranks):
    """Quantized as bitsandbytes does, by another run. Several micro-batches a rank are those of one device by and large."""
    folder = in_folder(work, tmp_path / "run")
    train_fp32(*BASE, "--train", "lora", "--base", "nf4", "--save-base", "base", "--steps", 1, cwd=folder)
    options = ("--model", "base", "--train", "lora", "--grad-accum", 12)
    train_fp32(*BASE, *options, "--threads", 1, "--out", "one", "--log", "one.log", cwd=folder)
    train_fp32(*BASE, *options, "--devices", ranks, "--zero", "3", "--out", "all", "--log", "all.log", cwd=folder)
    for mine, one in zip(figures(folder / "all.log"), figures(folder / "one.log"), strict=True):
        assert mine == pytest.approx(one, rel=1e-6)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Models whose matrices' bytes are no multiples of 16 in their files, in each format of files."""
    odd = tmp_path_factory.mktemp("odd")
    sizes = ("--layers", 2, "--heads", 3, "--positions", 64, "--vocab", 251)
    for family, dtype in (("llama", "fp32"), ("llama", "bf16"), ("gpt2", "fp16"), ("bloom", "bf16")):
        own = ("--head-size", 10, "--mlp-width", 49) if family == "llama" else ()
        make(odd / f"{family}-{dtype}", "--family", family, "--channels", 33, "--dtype", dtype, *sizes, *own)
    make(odd / "base", "--family", "llama", "--channels", 42, "--mlp-width", 49, *sizes)
    write_gguf(odd / "llama.gguf", transformers.AutoModelForCausalLM.from_pretrained(odd / "base"), "llama", types=("F16", "BF16", "F32"))
    write_shard(odd / "data.bin", random_tokens(251, 2000))
    return odd


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.more), pytest.param(4, marks=pytest.mark.more)])
@pytest.mark.parametrize("model, base", [("llama-fp32", ""), ("llama-bf16", ""), ("llama.gguf", "")] + [
    pytest.param(*of, marks=pytest.mark.more) for of in (
        ("gpt2-fp16", ""), ("bloom-bf16", ""), ("llama-fp32", "nf4"), ("llama-fp32", "nf4-double,head=nf4"), ("llama-bf16", "bf16"),
        ("llama-fp32", "fp32"), ("gpt2-fp16", "nf4"), ("bloom-bf16", "mlp=bf16,attention=nf4"))])
def test_matrices_of_odd_sizes_are_divided(train_fp32, odd, tmp_path, model, base, ranks):
    """A slice may end in the bytes that fill a matrix up in memory, and that its file does not have."""
    folder = in_folder(odd, tmp_path / "run")
    step = ("--model", model, "--data", "data.bin", "--train", "lora", "--batch", 1, "--seq-len", 20, "--steps", 2, "--warmup", 1,
            "--lr", "1e-2", "--sample", "tokens=0", *(("--base", base) if base else ()))
    for run, devices in (("one", ("--grad-accum", ranks, "--threads", 1)), ("all", ("--devices", ranks, "--zero", "3"))):
        train_fp32(*step, *devices, "--log", f"{run}.log", "--merge", run, cwd=folder)
    assert figures(folder / "one.log") == figures(folder / "all.log")
    assert (folder / "one/model.safetensors").read_bytes() == (folder / "all/model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["lora", "nf4", "gguf"])
def test_a_divided_base_is_merged_and_exported(train_fp32, work, tmp_path, name):
    """The first rank writes, and needs the others' slices."""
    folder = in_folder(work, tmp_path / "run")
    for run, ranks in (("one", ("--grad-accum", 3, "--threads", 1)), ("all", ("--devices", 3, "--zero", "3"))):
        train_fp32(*BASE, *CASES[name], *ranks, "--out", f"{run}/run", "--merge", f"{run}/merged", "--export", f"{run}/model.gguf", cwd=folder)
    merged = [{file.name: file.read_bytes() for file in (folder / run / "merged").iterdir()} for run in ("one", "all")]
    assert merged[0] == merged[1] and "model.safetensors" in merged[0]
    assert (folder / "one/model.gguf").read_bytes() == (folder / "all/model.gguf").read_bytes()


def test_ranks_with_unequal_chunks_of_state(train_fp32, work, tmp_path):
    """The first rank's slices have more chunks than the last one's. All plan for its buffers, which are the most."""
    write_text(tmp_path / "text", 6000)
    train_fp32("--model", "d6", "--data", "text", "--batch", 1, "--seq-len", 16, "--steps", 1, "--sample", "tokens=0", "--offload",
               "state=disk", "--devices", 2, cwd=tmp_path)


@pytest.mark.parametrize("options", [(), ("--train", "lora", "--lora-rank", 1)], ids=str)
def test_micro_batches_of_many_rows(train_fp32, work, tmp_path, options):
    """Products with many summands are added to a gradient once, and not in parts."""
    folder = in_folder(work, tmp_path / "run")
    step = ("--model", "model", "--data", "data.bin", "--batch", 20, "--seq-len", 50, "--steps", 2, "--warmup", 1, "--lr", "1e-2", "--sample",
            "tokens=0", "--chunk-rows", "head=all", *options)
    for run, ranks in (("one", ("--grad-accum", 3, "--threads", 1)), ("all", ("--devices", 3))):
        train_fp32(*step, *ranks, "--log", f"{run}.log", "--out", run, cwd=folder)
    assert figures(folder / "one.log") == figures(folder / "all.log")
    name = "adapter_model.safetensors" if options else "model.safetensors"
    assert (folder / "one/latest" / name).read_bytes() == (folder / "all/latest" / name).read_bytes()


@pytest.mark.quick
def test_two_ranks_and_one(train_fp32, work, one_device, tmp_path):
    folder = in_folder(work, tmp_path / "run")
    train_fp32(*BASE, "--devices", 2, cwd=folder)
    assert figures(folder / "log") == one_device(train_fp32, (), 2)[0]


@pytest.mark.parametrize("options", [("gpt2",), ("gpt2", "--dropout", 0.1, "--recompute", "none"), ("bloom",)], ids=str)
def test_a_tied_head_adds_in_another_order(train_fp32, work, one_device, tmp_path, options):
    """One device adds the head's and the embedding's gradients by turns; ranks add sums of both."""
    folder = in_folder(work, tmp_path / "run")
    train_fp32(*BASE, "--model", *options, "--devices", 3, cwd=folder)
    for mine, one in zip(figures(folder / "log"), one_device(train_fp32, ("--model", *options), 3)[0], strict=True):
        assert mine == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("options", [("--zero", "0"), ("--zero", "1"), ("--zero", "2", "--by-block"), ("--offload", "gradients=disk"), ("--by-block",),
                                     ("--advanced", "clip=block"), ("--zero", "3", "--by-block", "--recompute", "block", "--chunk-rows",
                                                                    "head=16,mlp=24")], ids=" ".join)
def test_several_micro_batches_a_rank(train_fp32, work, one_device, tmp_path, options):
    """Only the last one exchanges gradients, although the others share its plan."""
    folder = in_folder(work, tmp_path / "run")
    train_fp32(*BASE, "--devices", 2, "--grad-accum", 6, *options, cwd=folder)
    plain = options[2:] if options[0] == "--zero" else options
    for mine, one in zip(figures(folder / "log"), one_device(train_fp32, plain, 6)[0], strict=True):
        assert mine == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("options", [(), ("--state-formats", "master=split,m=bf16"), ("--state-formats", "master=none,m=8bit,v=8bit"),
                                     ("--by-block", "--update-in-backward"), ("--train", "lora", "--lora-dropout", "0.1"),
                                     ("--train", "lora", "--base", "nf4", "--recompute", "block")], ids=" ".join)
def test_bf16_is_the_same_every_time(train_bf16, work, one_device, tmp_path, options):
    """A rank's gradients are rounded to bf16 before they are added, so one device differs, but little."""
    results = []
    for run, threads, zero in (("a", 1, "0"), ("b", 2, "1"), ("c", 1, "2"), ("d", 2, "3")):
        folder = in_folder(work, tmp_path / run)
        train_bf16(*BASE, *options, "--devices", 3, "--zero", zero, "--threads", threads, cwd=folder)
        results.append((figures(folder / "log"), files_of(folder / "out" / "latest")))
    assert results[0] == results[1] == results[2] == results[3]
    for mine, one in zip(results[0][0], one_device(train_bf16, options, 3)[0], strict=True):
        assert mine["step"] == one["step"] and mine.get("loss", 0) == pytest.approx(one.get("loss", 0), rel=5e-3)


@pytest.mark.parametrize("first, then, zeros", [(4, 1, "3"), (1, 4, "3"), (4, 2, "31"), (2, 4, "13"), (4, 8, "20"), (4, 3, "02")])
def test_a_run_goes_on_on_other_devices(train_fp32, work, one_device, tmp_path, first, then, zeros):
    """With another --zero too."""
    folder = in_folder(work, tmp_path / "run")
    formats = ("--state-formats", "m=8bit")
    micro_batches = 24 if 3 in (first, then) else 8 if 8 in (first, then) else 4
    def on(devices):
        zero = zeros[-1] if devices == then else zeros[0]
        return ("--devices", devices, "--zero", zero, *(["--by-block"] if zero == "2" else [])) if devices > 1 else ()
    train_fp32(*BASE, *formats, "--grad-accum", micro_batches, "--steps", 2, *on(first), cwd=folder)
    train_fp32("--resume", "out", "--steps", 4, *on(then), cwd=folder)
    whole = one_device(train_fp32, formats, micro_batches)
    if {first, then} == {1, 4}:  # the sums are those of one device
        weights = files_of(folder / "out" / "latest")
        assert all(weights[f] == whole[1][f] for f in ("model.safetensors", "trainer_state.safetensors"))
    losses = {line["step"]: line["loss"] for line in figures(folder / "log") if "loss" in line}
    assert losses == pytest.approx({line["step"]: line["loss"] for line in whole[0] if "loss" in line}, rel=1e-3)


def test_a_finished_run_that_is_resumed(train_fp32, work, tmp_path):
    """As a loop that restarts a run does. Nothing is left to train or to save."""
    folder = in_folder(work, tmp_path / "run")
    for _ in range(2):
        train_fp32(*BASE, "--resume", "auto", "--devices", 2, cwd=folder)


def test_it_is_one_program_to_a_shell(train_fp32, work, tmp_path):
    """Its output goes where the shell sent it, and before what the next command writes; its input is left to others."""
    folder = in_folder(work, tmp_path / "run")
    line = " ".join(map(str, train_fp32.command(*BASE, "--devices", 2)))
    script = f"(echo first; {line}; echo last; read rest; echo $rest) > all; {line} --steps 1000000 --out cut | head -20 > /dev/null"
    subprocess.run(script, shell=True, input=b"input\n", cwd=folder, env=train_fp32.environment, timeout=60, check=True)
    lines = (folder / "all").read_bytes().split(b"\n")
    assert lines[0] == b"first" and lines[-3:] == [b"last", b"input", b""] and any(b"step     4/4" in x for x in lines)
    assert (folder / "cut" / "latest").exists()  # a reader that is gone stops the run, which saves


def test_its_output_may_be_sockets(train_fp32, work, tmp_path):
    """As those of a service are. Files of /proc cannot open these again."""
    folder = in_folder(work, tmp_path / "run")
    for options, code, printed in ((BASE, 0, (b"step     4/4", b"")), ((*BASE, "--log", "nowhere/log"), 2, (b"", b"train: --log nowhere/log"))):
        pairs = [socket.socketpair() for _ in printed]
        line = list(map(str, train_fp32.command(*options, "--devices", 2)))
        run = subprocess.run(line, stdout=pairs[0][1], stderr=pairs[1][1], cwd=folder, env=train_fp32.environment, timeout=60)
        for (ours, theirs), expected in zip(pairs, printed, strict=True):
            theirs.close()
            assert expected in b"".join(iter(lambda ours=ours: ours.recv(1 << 16), b""))
            ours.close()
        assert run.returncode == code


def plan(train, work, *options):
    return json.loads(train(*BASE, *options, "--plan", "json", cwd=work).stdout)


def test_the_plan_of_a_rank(train, work):
    """The first rank's slices are the largest. A plan needs no ranks."""
    one, four = plan(train, work), plan(train, work, "--devices", 4)
    assert four["ranks"]["devices"] == 4 and four["ranks"]["zero"] == "1" and "ranks" not in one
    for kind in ("optimizer_m", "optimizer_v"):
        assert one["totals"][kind] / 4 <= four["totals"][kind] < one["totals"][kind] / 2
    assert four["totals"]["weights"] == one["totals"]["weights"]
    sliced = plan(train, work, "--devices", 4, "--zero", "2")
    assert one["totals"]["gradients"] / 4 <= sliced["totals"]["gradients"] < one["totals"]["gradients"] / 2
    assert sliced["ranks"]["sent_bytes"] == four["ranks"]["sent_bytes"]
    whole = plan(train, work, "--devices", 4, "--zero", "0")
    assert whole["totals"]["optimizer_m"] == one["totals"]["optimizer_m"]
    # Gradients, and then weights: three quarters of each leave a rank. The rest are sums for norm and loss.
    moved = 2 * 3 / 4 * one["totals"]["gradients"]
    assert 0.9 * moved < four["ranks"]["sent_bytes"] < 1.2 * moved


def test_the_plan_of_gathered_blocks(train, work):
    """With --zero 3 a rank has its slices of the blocks' weights, and buffers for blocks. The two blocks are gathered once a
    step if both stay in buffers, which moves as much as gathering what was updated, and else one of them twice."""
    two = plan(train, work, "--devices", 2, "--zero", "2")
    one_buffer, two_buffers = (plan(train, work, "--devices", 2, "--zero", "3", "--prefetch", ahead) for ahead in (0, 1))
    for three, count in ((one_buffer, 1), (two_buffers, 2)):
        buffers = [b["bytes"] for b in three["buffers"] if b["name"] == "streamed_block"]
        assert len(buffers) == count and two["totals"]["weights"] < 2 * three["totals"]["weights"]
        assert three["totals"]["weights"] < two["totals"]["weights"]
    assert two_buffers["ranks"]["sent_bytes"] == two["ranks"]["sent_bytes"]
    block = buffers[0] / 2
    more = one_buffer["ranks"]["sent_bytes"] - two["ranks"]["sent_bytes"]
    assert 0.8 * block < more < 1.2 * block


@pytest.mark.parametrize("options", [("--train", "lora"), ("--train", "lora", "--base", "nf4"), ("--train", "prompt", "--soft-prompt", "5")],
                         ids=" ".join)
def test_the_plan_of_a_divided_base(train, work, options):
    """A rank has its slice of the frozen matrices, and two buffers; all else is what it is with --zero 1."""
    def totals(*zero):
        planned = plan(train, work, *options, *zero)
        kinds = {kind: sum(b["bytes"] for b in planned["buffers"] if b["name"] == kind) for kind in ("quantized_weights", "streamed_block")}
        return planned, kinds["quantized_weights"], kinds["streamed_block"]

    three, four = (totals("--devices", n, "--zero", "3") for n in (3, 4))
    whole = 2 * three[2] / 2  # both buffers are of a block, and there are two blocks
    for (planned, own, buffers), ranks in ((three, 3), (four, 4)):
        assert whole / ranks <= own <= whole / ranks + 2 * 4096 and buffers == whole
        assert planned["ranks"]["zero"] == "3"
    per_rank = plan(train, work, *options, "--devices", 4, "--zero", "1")
    more = four[0]["ranks"]["sent_bytes"] - per_rank["ranks"]["sent_bytes"]
    assert 0 <= more - 3 / 4 * whole <= 3 * 2 * 4096
    twice = plan(train, work, *options, "--devices", 4, "--zero", "3", "--grad-accum", 8)["ranks"]["sent_bytes"]
    assert twice - four[0]["ranks"]["sent_bytes"] == more


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("name", ["llama", "lora"])
def test_blocks_are_gathered_ahead(train_fp32, work, one_device, tmp_path, ahead, name):
    folder = in_folder(work, tmp_path / "run")
    train_fp32(*BASE, *CASES[name], "--devices", 2, "--zero", "3", "--prefetch", ahead, cwd=folder)
    saved, (log, one, _) = files_of(folder / "out" / "latest"), one_device(train_fp32, CASES[name], 2)
    assert figures(folder / "log") == log
    assert all(saved[f] == one[f] for f in saved if f.endswith(".safetensors"))


@pytest.mark.parametrize("more", [("--zero", "1"), ("--zero", "3"), ("--zero", "3", "--train", "lora", "--grad-accum", "6"),
                                  ("--zero", "3", "--train", "lora", "--base", "nf4")], ids=" ".join)
def test_bytes_between_ranks_are_those_of_the_plan(train, work, more):
    options = ("--model", "model", "--devices", 2, "--batch", 2, "--seq-len", 24, *more)
    planned = json.loads(train(*options, "--plan", "json", cwd=work).stdout)["ranks"]["sent_bytes"]
    link = json.loads(train(*options, "--bench", "json", "--steps", 3, cwd=work).stdout)["links"]["to_ranks"]
    assert link["bytes"] == planned


def mpirun(train, *commands, cwd, programs=None, folders=None):
    """Runs the trainer as a user's own mpirun starts it: one rank for each of the commands, each in a folder of its own if they are
    given."""
    words = [["-n", "1", *(["-wdir", str(folder)] if folder else []), program, *map(str, command)]
             for command, program, folder in zip(commands, programs or [train.path] * len(commands), folders or [None] * len(commands))]
    launcher = os.environ.get("MPIRUN", "mpirun")
    options = ["--oversubscribe", "--bind-to", "none"] if launcher == "mpirun" else []
    line = [launcher, *options, *sum((w + [":"] for w in words), [])[:-1]]
    environment = train.environment | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, timeout=120)


def test_ranks_that_the_user_starts(train_fp32, work, one_device, tmp_path):
    folder = in_folder(work, tmp_path / "run")
    command = (*BASE, "--devices", 2)
    assert mpirun(train_fp32, command, command, cwd=folder).returncode == 0
    assert (figures(folder / "log"), files_of(folder / "out" / "latest")) == one_device(train_fp32, (), 2)[:2]


@pytest.mark.parametrize("change, said", [
    (("--lr", "3e-4"), "--lr is 3e-4, and on rank 0 1e-2"),
    (("--data", "other.bin"), "rank 0"),
    (("--devices", 3), "--devices 3: 2 ranks were started"),
], ids=["option", "data", "number"])
def test_ranks_that_differ(train_fp32, work, tmp_path, change, said):
    folder = in_folder(work, tmp_path / "run")
    write_shard(folder / "other.bin", random_tokens(256, 4000)[::-1])
    run = mpirun(train_fp32, BASE, (*BASE, *change), cwd=folder)
    assert run.returncode == 2
    line = re.search(rb"^train: rank 1 \(host .*\): .*$", run.stderr, re.M)
    assert line and said in line[0].decode()


@pytest.mark.parametrize("missing, said", [("data.bin", "--data: no file matches \"data.bin\""), ("model", "model")])
def test_a_rank_without_its_files(train_fp32, work, tmp_path, missing, said):
    """On a machine of its own. The other rank does not wait for it."""
    folders = [in_folder(work, tmp_path / name) for name in ("a", "b")]
    (folders[1] / missing).rename(folders[1] / "elsewhere")
    run = mpirun(train_fp32, BASE, BASE, cwd=tmp_path, folders=folders)
    lines = re.findall(rb"^train: .*$", run.stderr, re.M)
    assert run.returncode == 2 and len(lines) == 1 and said.encode() in lines[0] and b"rank 1" in lines[0], run.stderr
    # mpirun has ended the first rank, whose lock is free then, though its file may stay.
    assert {path.name for path in (folders[0] / "out").glob("*")} <= {".lock"}


@pytest.mark.parametrize("what", ["data.bin", "model"])
def test_ranks_whose_files_have_other_contents(train_fp32, work, tmp_path, what):
    """Files of the same names and sizes, on a machine of their own."""
    folders = [in_folder(work, tmp_path / name) for name in ("a", "b")]
    (folders[1] / what).unlink()
    if what == "model":
        shutil.copytree(work / "model", folders[1] / "model")
        tensors = load_file(work / "model" / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
        save_file(tensors, folders[1] / "model" / "model.safetensors", metadata={"format": "pt"})
    else:
        write_shard(folders[1] / what, random_tokens(256, 4000)[::-1])
    run = mpirun(train_fp32, BASE, BASE, cwd=tmp_path, folders=folders)
    lines = re.findall(rb"^train: .*$", run.stderr, re.M)
    assert run.returncode == 2 and len(lines) == 1, run.stderr
    hashed = rb"4000 tokens, hash \w{16}"
    said = {"data.bin": rb"what is in the files of --data is %s, and on rank 0 %s" % (hashed, hashed),
            "model": rb"a digest of the weights is \d+, and on rank 0 \d+"}[what]
    assert re.fullmatch(rb"train: rank 1 \(host \S+\): " + said, lines[0]), lines[0]


def test_too_many_ranks_are_refused_before_they_start(train_fp32, work, tmp_path):
    """Their processes alone do not fit: MPI's launcher would take minutes to find that. Missing files are found as soon."""
    folder = in_folder(work, tmp_path / "run")
    ranks = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 25
    for options, said in ((("--devices", ranks), "MiB without a model, and each may have "),
                          (("--devices", 40, "--model", "none"), "--model none is not a folder with config.json"),
                          (("--devices", 40, "--data", "none"), '--data: no file matches "none"')):
        if options[1] > 4096:
            continue  # they would fit
        errors = []
        assert cpu_seconds(lambda: errors.append(error_line(train_fp32, *BASE, *options, cwd=folder))) < 1
        assert said in errors[0]


def test_more_ranks_than_threads_are_named(train_fp32, work, tmp_path):
    folder = in_folder(work, tmp_path / "run")
    one = min(os.sched_getaffinity(0))
    with train_fp32.start(*BASE, "--steps", 1, "--devices", 2, cwd=folder, preexec_fn=lambda: os.sched_setaffinity(0, {one})) as run:
        first = run.stdout.readline()
        run.stdout.read()
    assert first == b"--devices 2: they share 1 thread of this machine's CPU\n" and run.returncode == 0
    assert b"they share" not in train_fp32(*BASE, "--steps", 1, "--devices", 2, "--out", "b", "--log", "b.log", cwd=folder).stdout or os.cpu_count() == 1


def test_ranks_of_two_precisions(train_fp32, work, tmp_path):
    other = train_fp32.path.replace("fp32", "bf16")
    if IS_MPICH or not os.path.exists(other):
        pytest.skip("there is no such build")
    run = mpirun(train_fp32, BASE, BASE, cwd=in_folder(work, tmp_path / "run"), programs=[train_fp32.path, other])
    lines = re.findall(rb"^train: .*$", run.stderr, re.M)
    assert run.returncode == 2 and len(lines) == 1, run.stderr
    assert re.search(rb"the program is .*bf16.*, and on rank 0 .*fp32", lines[0]), lines


@pytest.mark.parametrize("options, said", [
    (("--devices", 2, "--grad-accum", 3), "give 2 or 4"),
    (("--devices", 3, "--grad-accum", 2), "give 3"),
    (("--zero", "1"), "add --devices N"),
    (("--zero", "2", "--devices", 2, "--grad-accum", 4), "add --by-block"),
    (("--zero", "2", "--devices", 2, "--offload", "gradients=disk"), "--zero 1"),
    (("--zero", "3", "--devices", 2, "--offload", "weights=disk"), "--zero 1"),
    (("--zero", "3", "--devices", 2, "--train", "lora", "--offload", "weights=disk"), "--zero 1"),
    (("--zero", "3", "--devices", 2, "--train", "lora", "--base", "nf4", "--save-base", "base"), "--save-base base"),
    (("--advanced", "patience=5"), "add --devices N"),
    (("--devices", 2, "--steps", 0), "--steps is 0"),
    (("--resume", "saved", "--devices", 2), "give 2"),
    (("--devices", 0), "0 is not"),
    (("--devices", 2, "--data", "none.bin"), "none.bin"),
    (("--devices", 2, "--model", "none"), "none"),
], ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "")
def test_mistakes_are_one_line(train, work, tmp_path, options, said):
    folder = in_folder(work, tmp_path / "run")
    if "--resume" in options:
        train(*BASE, "--steps", 2, "--out", "saved", cwd=folder)
    error = train(*(BASE if "--resume" not in options else ()), *options, cwd=folder, code=2).stderr.decode()
    assert said in error and error.count("\n") == 1, error


@pytest.mark.parametrize("kibibytes", [64, 2000])
def test_files_that_mpi_may_not_write(train_fp32, work, tmp_path, kibibytes):
    """With a lower ulimit -f than MPI's files need, its ranks would wait for each other, or end without saying why."""
    line = shlex.join(map(str, train_fp32.command(*BASE, "--devices", 2)))
    run = subprocess.run(["bash", "-c", f"ulimit -f {kibibytes}; {line}"], cwd=in_folder(work, tmp_path / "run"), env=train_fp32.environment,
                         capture_output=True, timeout=60)
    assert run.returncode == 2 and run.stderr.count(b"\n") == 1, run.stderr
    assert re.search(rf"MPI's files take up to 16\S* MiB, and ulimit -f allows {1024 * kibibytes} bytes".encode(), run.stderr), run.stderr


def test_without_mpi(train_fp32, work, tmp_path):
    """A machine without MPI's launcher says what to install."""
    folder = in_folder(work, tmp_path / "run")
    run = subprocess.run([train_fp32.path, *map(str, BASE), "--devices", "2"], cwd=folder, capture_output=True, timeout=60,
                         env=train_fp32.environment | {"PATH": str(folder)})
    assert run.returncode == 2 and b"make deps installs it" in run.stderr and run.stderr.count(b"\n") == 1


NO_MEMORY = r"MPI does not start: .*; /dev/shm has \S+ (bytes|KiB) free, which may be too little"  # MPICH's ranks need it; OpenMPI's need a network


@pytest.mark.parametrize("network, mount, said", [
    (True, "size=64k tmpfs /dev/shm", NO_MEMORY if IS_MPICH else ""),
    (False, "size=64k tmpfs /dev/shm", NO_MEMORY if IS_MPICH else "not enough space for /dev/shm|unable to reach each other"),
    (False, "size=64m tmpfs /dev/shm", "" if IS_MPICH else "no usable network|network interfaces"),
    (True, "size=1m tmpfs small", r"--offload state=disk: 8\S* MiB cannot be had in small" if IS_MPICH else
     r"MPI's launcher needs 16\S* MiB in small, and \S+ MiB are free"),
    (True, "size=20m tmpfs small", r"--offload state=disk: 8\S* MiB cannot be had in small"),
], ids=["little shared memory", "nor a network", "no network", "no room for MPI", "no room for all ranks"])
def test_what_a_machine_may_lack(train_fp32, work, tmp_path, network, mount, said):
    """Without shared memory, OpenMPI's ranks on one machine use its network, and without any network it does not start. The
    files of each rank take 8 MiB."""
    flags = "-m" if network else "-mn"
    if subprocess.run(["unshare", flags, "true"], capture_output=True).returncode:
        pytest.skip("not allowed to unshare namespaces")
    folder = in_folder(work, tmp_path / "run")
    (folder / "small").mkdir()
    line = shlex.join(map(str, train_fp32.command(*BASE, "--devices", 3, "--offload", "state=disk")))
    loopback = "ip link set lo up; " if "shm" in said else ""
    temporary = {"TMPDIR": "small"} if "small" in mount else {}
    run = subprocess.run(["unshare", flags, "sh", "-c", f"{loopback}mount -t tmpfs -o {mount} && {line}"], cwd=folder,
                         env=train_fp32.environment | temporary, capture_output=True, timeout=60)
    error = run.stderr.decode()
    assert run.returncode == (2 if said else 0) and error.count("\n") == (1 if said else 0) and re.search(said, error), error


def test_a_name_in_no_encoding(train_fp32, work, tmp_path):
    """Ranks send each other settings, names of files among them, and open what they were given."""
    folder = in_folder(work, tmp_path / "run")
    (folder / "data.bin").rename(folder / "d\udcff.bin")  # the byte ff
    train_fp32("--model", "model", "--data", "d\udcff.bin", "--batch", 1, "--seq-len", 24, "--steps", 1, "--sample", "tokens=0",
               "--devices", 2, cwd=folder)


def test_a_build_without_mpi(train_fp32, work, tmp_path):
    """As where its headers are missing: one device trains, and several are refused in one line."""
    build = pathlib.Path(train_fp32.path).parent
    if not (build / "train.o").exists():
        pytest.skip("the trainer's object is not there")
    shared = [build.parent / name for name in ("commit.o", "common.a")]
    alone = tmp_path / "train"
    subprocess.run(["g++", "-std=c++20", "-fopenmp", "-I.", "llmc/ranks_mpi.cpp", build / "train.o", *shared, "-o", alone, "-ldnnl", "-lpcre2-8",
                    "-lutf8proc", "-lsentencepiece", "-lz", "-luring"], cwd=ROOT, check=True, timeout=120)
    def run(*options, folder):
        return subprocess.run([alone, *map(str, (*BASE, *options))], cwd=in_folder(work, tmp_path / folder), capture_output=True, timeout=60,
                              env=train_fp32.environment)
    assert run(folder="one").returncode == 0
    refused = run("--devices", 2, folder="two")
    assert refused.returncode == 2 and refused.stderr.count(b"\n") == 1 and b"make deps" in refused.stderr, refused.stderr


def test_memory_is_shared_by_the_ranks_of_a_machine(train_fp32, work, tmp_path):
    """Three ranks may take a third each."""
    run = train_fp32(*BASE, "--devices", 3, cwd=in_folder(work, tmp_path / "run"))
    free = int(re.search(rb"in all; (\d+) are free", run.stdout)[1])
    alone = train_fp32(*BASE, cwd=in_folder(work, tmp_path / "alone"))
    assert free < 0.5 * int(re.search(rb"in all; (\d+) are free", alone.stdout)[1])


# --- dev/compare_devices.py


def test_the_script_that_compares_with_one_device(train_fp32, work, capsys):
    options = [train_fp32.path, "--devices", "2", "--steps", "6", "--zero", "1,2", "--model", str(work / "model"), "--data",
               str(work / "data.bin"), "--batch", "2", "--seq-len", "24"]
    assert compare_devices.main(options) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["one device", "2 devices, --zero 1", "2 devices, --zero 2"]
    assert all(float(row[4]) == 0 and float(row[1].replace(",", "")) > 0 for row in rows)
    assert compare_devices.main([*options, "--tolerance", "-1"]) == 1


def test_the_script_with_ranks_that_share_a_gpu(train_fp32, work, capsys):
    """As far as a CPU can test it: each rank has a host name of its own. Validation losses are not those of steps."""
    if IS_MPICH:
        pytest.skip("it starts OpenMPI's mpirun")
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("not allowed to unshare a namespace")
    options = [train_fp32.path, "--one-gpu", "--devices", "3", "--steps", "6", "--zero", "0,3", "--model", str(work / "model"), "--data",
               str(work / "data.bin"), "--val-data", str(work / "data.bin"), "--batch", "2", "--seq-len", "24"]
    assert compare_devices.main(options) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["one device", "3 devices, --zero 0", "3 devices, --zero 3"]
    assert all(float(row[1]) < 1e-6 for row in rows)
