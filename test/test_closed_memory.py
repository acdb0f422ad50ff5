"""Memory during training: nothing is accessed outside live tensors, and nothing is allocated after step 0."""

import os

import pytest
from memory_table import levels_of
from trainer_runs import ROOT, Train, make, random_tokens, saved_bytes, write_shard, write_text

# CPU builds with AddressSanitizer; the arena tells it what is alive (llmc/arena.h). make names those
# that it builds; with a GPU there may be none.
ASAN_TRAINERS = (os.environ["ASAN_TRAINERS"].split() if "ASAN_TRAINERS" in os.environ else
                 [path for path in ("build/test/asan/train-fp32", "build/test/asan/train-bf16") if (ROOT / path).exists()])


@pytest.mark.parametrize("path", ASAN_TRAINERS)
def test_touches_only_what_lives(tmp_path, path):
    """At every level. If AddressSanitizer finds anything, the program ends with an exit code other than 0."""
    watched = Train(path)
    write_text(tmp_path / "text", 9000)
    make(tmp_path / "model", "--layers", 3, "--heads", 3, "--channels", 24, "--vocab", 300, "--positions", 40)
    write_shard(tmp_path / "data.bin", random_tokens(300, 2000))
    for level in levels_of(watched.path):
        own = ("--recompute", level, "--sample", "tokens=30", "--steps", 3)
        watched("--model", "d2", "--data", "text", "--batch", 3, "--seq-len", 41, *own, "--eval-every", 1,
                "--sample", "every=1", "--out", level, "--save-every", 1, cwd=tmp_path)
        watched("--resume", level, "--steps", 4, cwd=tmp_path)
        watched("--model", "model", "--data", "data.bin", "--val-data", "data.bin", "--batch", 2, "--seq-len", 37,
                "--grad-accum", 2, "--chunk-rows", "head=0", *own, cwd=tmp_path)
        watched("--model", "model", "--data", "data.bin", "--batch", 2, "--seq-len", 37, "--chunk-rows", "head=7",
                "--update-in-backward", *own, cwd=tmp_path)


@pytest.mark.parametrize("path", ASAN_TRAINERS)
def test_chunks_touch_only_what_lives(tmp_path, path):
    """Blocks in chunks of rows, the last with fewer, with inputs kept and offloaded, and with keys
    offloaded."""
    watched = Train(path)
    make(tmp_path / "model", "--family", "qwen3", "--layers", 3, "--heads", 4, "--kv-heads", 2, "--channels", 40, "--vocab", 300,
         "--positions", 1100)
    write_shard(tmp_path / "data.bin", random_tokens(300, 9000))
    for options in (("--recompute", "block"), ("--recompute", "block:2,norm:1", "--offload", "inputs=auto", "--chunk-rows", "mlp=40"),
                    ("--recompute", "block", "--seq-len", 1100, "--chunk-rows", "attention=256", "--offload", "inputs=auto,keys=auto")):
        watched("--model", "model", "--data", "data.bin", "--val-data", "data.bin", "--batch", 2, "--steps", 2,
                *(() if "keys=" in str(options) else ("--seq-len", 300, "--chunk-rows", "attention=128")), "--sample", "tokens=20,every=1",
                *options, cwd=tmp_path)


def test_all_of_a_run_is_allocated_by_step_0(train, tmp_path):
    """Validation, samples and saves come later and allocate no device memory: it is forbidden then."""
    write_text(tmp_path / "text", 9000)
    train("--model", "d2", "--data", "text", "--batch", 3, "--seq-len", 40, "--steps", 4, "--eval-every", 2,
          "--sample", "every=2,tokens=60", "--save-every", 2, "--out", "out", cwd=tmp_path)
    assert saved_bytes(tmp_path / "out")


def seen_at(steps, measure, train, *options):
    """measure(pid) of a training process after it has printed each of two steps."""
    lines = tuple(b"step %5d/" % step for step in steps)
    seen = []
    with train.start(*options, "--steps", 100000, "--sample", "tokens=0", "--print-every", 1) as process:
        for line in process.stdout:
            if line.startswith(lines):
                seen.append(measure(process.pid))
            if len(seen) == 2:
                process.kill()
    return seen


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.usually("fp32")
@pytest.mark.not_played("what it remembers of memory is the host's too, and 200 steps take minutes")
@pytest.mark.parametrize("level", ["none", "norm"])
def test_the_resident_set_does_not_grow(train, tmp_path, level):
    """From step 2, when everything has been touched, to step 200."""
    write_text(tmp_path / "text", 60000)
    seen = seen_at((2, 200), resident_bytes, train, "--model", "d2", "--data", tmp_path / "text", "--batch", 2,
                   "--seq-len", 32, "--recompute", level)
    assert len(seen) == 2 and 0 < seen[1] <= seen[0] + (1 << 20), seen


def page_faults(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return int(file.read().rpartition(")")[2].split()[7])


@pytest.mark.usually("bf16")
@pytest.mark.not_played("the pages are those of what plays it")
def test_steps_take_no_new_pages(train, tmp_path):
    """Memory for a product's copies of operands is kept. If the system took back and gave its pages each
    time, the gradient of these logits would be a fifth slower."""
    write_shard(tmp_path / "data.bin", random_tokens(50257, 60000))
    seen = seen_at((3, 13), page_faults, train, "--model", "d2", "--data", tmp_path / "data.bin", "--batch", 2,
                   "--seq-len", 256)
    assert len(seen) == 2 and seen[1] - seen[0] < 10 * 40, seen
