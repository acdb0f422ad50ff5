"""dev/reference.py's order of the data, compared with its definition computed one sequence at a time."""

import itertools
import math

import numpy as np
import pytest
import reference

MASK = (1 << 64) - 1


def mix64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def random_bits(seed, a, b=0, c=0):
    return mix64(mix64(mix64(mix64(seed) ^ a) ^ b) ^ c)


def naive_permutation(i, count, seed, epoch, what):
    """The new place of number i."""
    lows = 1
    while lows * lows < count:
        lows *= 2
    highs = math.ceil(count / lows)
    while True:
        high, low = divmod(i, lows)
        for half in range(0, 24, 2):
            low = (low + random_bits(seed, epoch, what, (half << 56) + high)) % lows
            high = (high + random_bits(seed, epoch, what, (half + 1 << 56) + low)) % highs
        i = high * lows + low
        if i < count:
            return i


def naive_sequence(streams, T, seed, q):
    """Sequence q, computed from its number only."""
    counts = [max(1, (len(stream) - T) // T) for stream in streams]
    epoch, i = divmod(q, sum(counts))
    for turn in range(len(streams)):
        f = naive_permutation(turn, len(streams), seed, epoch, 0)
        if i < counts[f]:
            break
        i -= counts[f]
    window = naive_permutation(i, counts[f], seed, epoch, f + 1)
    offset = random_bits(seed, epoch, f + 1, 1 << 63) % T if len(streams[f]) >= 2 * T else 0
    start = offset + window * T
    return streams[f][start:start + T + 1].tolist()


def write_shard(path, tokens, magic=20240520, version=1, dtype=np.uint16):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype=dtype).tobytes())
    return str(path)


def test_mix64():
    # The first outputs of splitmix64 with the seeds 0 and 1234567, as published with it.
    assert int(reference.mix64(0)) == mix64(0) == 0xE220A8397B1DCDAF
    assert int(reference.mix64(1234567)) == mix64(1234567) == 6457827717110365317


@pytest.mark.parametrize("count", [*range(1, 40), 64, 65, 1000])
def test_permutation(count):
    order = reference.permutation(count, 42, 3, 7)
    assert order == [naive_permutation(i, count, 42, 3, 7) for i in range(count)]
    assert sorted(order) == list(range(count))


@pytest.mark.parametrize("seed", [0, 1337, MASK])
def test_training_order(seed):
    T = 8
    # One token more than a sequence, lengths around two sequences, and many windows; all tokens differ.
    lengths = [9, 15, 16, 17, 200, 333]
    ends = list(itertools.accumulate(lengths))
    streams = [np.arange(end - length, end) for end, length in zip(ends, lengths)]
    epoch = sum(reference.window_count(stream, T) for stream in streams)
    got = list(itertools.islice(reference.training_sequences(streams, T, seed), 3 * epoch))
    assert all(len(sequence) == T + 1 for sequence in got)
    assert [s.tolist() for s in got] == [naive_sequence(streams, T, seed, q) for q in range(3 * epoch)]
    # No token is a target twice in an epoch, and epochs differ.
    targets = np.concatenate([s[1:] for s in got[:epoch]])
    assert len(set(targets.tolist())) == len(targets)
    assert [s.tolist() for s in got[:epoch]] != [s.tolist() for s in got[epoch:2 * epoch]]


def test_validation_order():
    streams = [np.arange(9), np.arange(100, 135)]
    got = [s.tolist() for s in reference.validation_sequences(streams, 8)]
    assert got == [list(range(9)), *[list(range(at, at + 9)) for at in (100, 108, 116, 124)]]


def test_text_keeps_a_tenth_of_each_file(tmp_path):
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 125)))
    (tmp_path / "a.txt").write_bytes(bytes(range(19)))
    (train,), (held_out,) = reference.load_data([str(tmp_path / "*.txt")], None, 2)
    assert train.tolist() == [*range(18), *range(100, 123)] and held_out.tolist() == [18, 123, 124]
    # Three tokens are too few for a sequence of 3.
    (train,), held_out = reference.load_data([str(tmp_path / "*.txt")], None, 3)
    assert train.tolist() == [*range(19), *range(100, 125)] and held_out == []
    (train,), (held_out,) = reference.load_data([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")],
                                                [str(tmp_path / "a.txt")], 3)
    assert train.tolist() == [*range(100, 125), *range(19)] and held_out.tolist() == [*range(19)]


def test_shards_are_streams(tmp_path):
    write_shard(tmp_path / "x_1.bin", [3, 65535])
    write_shard(tmp_path / "x_0.bin", [1, 2, 50256])
    train, held_out = reference.load_data([str(tmp_path / "x_*.bin")], None, 3)
    assert [stream.tolist() for stream in train] == [[1, 2, 50256], [3, 65535]] and held_out == []
    write_shard(tmp_path / "wide.bin", [7, 128255, 65536], 20240801, 7, np.uint32)
    [stream] = reference.read_streams([str(tmp_path / "wide.bin")])
    assert stream.tolist() == [7, 128255, 65536]


@pytest.mark.parametrize("damage, message", [
    (lambda data: data[:1000], "shorter than a shard's header"),
    (lambda data: b"\0" * 4 + data[4:], "is not that of a token shard"),
    (lambda data: data[:-2], "the header promises 3 tokens"),
])
def test_damaged_shards(tmp_path, capsys, damage, message):
    path = tmp_path / "x.bin"
    write_shard(path, [1, 2, 3])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit) as ended:
        reference.load_data([str(path)], None, 3)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and str(path) in error
