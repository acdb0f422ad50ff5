"""The number of threads changes no bit of a training: losses, norms, the saved model and its state."""

import pytest
from trainer_runs import figures, make, random_tokens, read_log, saved_bytes, write_shard

THREADS = (1, 2, 3, 4, 8)
SHAPES = {"gpt2": ("--heads", 4, "--channels", 64), "llama": ("--heads", 4, "--kv-heads", 2, "--channels", 128),
          "mistral": ("--heads", 2, "--kv-heads", 1, "--channels", 144, "--window", 50),
          "qwen2": ("--heads", 2, "--channels", 80, "--tied"), "qwen3": ("--heads", 4, "--head-size", 32, "--channels", 96),
          "bloom": ("--heads", 8, "--channels", 128)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One layer of each family, and tokens for them."""
    path = tmp_path_factory.mktemp("models")
    for family, shape in SHAPES.items():
        make(path / family, "--family", family, "--layers", 1, "--positions", 256, *shape)
    write_shard(path / "tokens.bin", random_tokens(256, 40_000))
    return path


def same_bits(train, folders, tmp_path, family, rows, *options, threads=THREADS):
    """Trains for two steps of `rows` rows with each number of threads, and compares the results."""
    if train.device != "cpu":
        pytest.skip("a GPU computes")
    length = min(rows, 250)
    first = None
    for count in threads:
        out, log = tmp_path / f"out{count}", tmp_path / f"log{count}"
        train("--model", folders / family, "--data", folders / "tokens.bin", "--batch", rows // length, "--seq-len", length,
              "--steps", 2, "--warmup", 1, "--lr", 1e-2, "--sample", "tokens=0", "--threads", count, "--out", out, "--log", log, *options)
        result = figures(read_log(log)), saved_bytes(out)
        first = first or result
        assert result == first, f"{count} threads"


def lora(rank):
    return "--train", "lora", "--lora-rank", rank


@pytest.mark.parametrize("family, rows, options", [
    ("gpt2", 4000, ()), ("llama", 390, lora(4)), ("mistral", 4000, lora(16)), ("qwen2", 4096, ()), ("qwen3", 260, lora(1)),
    ("bloom", 4000, ())], ids=str)
def test_threads_change_no_bit(train, folders, tmp_path, family, rows, options):
    same_bits(train, folders, tmp_path, family, rows, *options, threads=(1, 2, 8))


@pytest.mark.more
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("rows", [64, 260, 1000, 4096, 8000])
def test_threads_change_no_bit_of_full_training(train, folders, tmp_path, family, rows):
    same_bits(train, folders, tmp_path, family, rows)


@pytest.mark.more
@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("rank, rows", [(1, 260), (2, 8000), (4, 390), (16, 4000), (64, 1000)])
def test_threads_change_no_bit_of_lora(train, folders, tmp_path, family, rank, rows):
    same_bits(train, folders, tmp_path, family, rows, *lora(rank))
