"""dev/reference.py's order of the data, against its definition computed one sequence at a time."""

import itertools

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


def naive_sequence(streams, T, seed, q):
    """Sequence q, from nothing but its number."""
    counts = [max(1, (len(stream) - T) // T) for stream in streams]
    epoch, i = divmod(q, sum(counts))
    order = sorted(range(len(streams)), key=lambda f: random_bits(seed, epoch, 0, f))  # sorted() is stable
    for f in order:
        if i < counts[f]:
            break
        i -= counts[f]
    window = sorted(range(counts[f]), key=lambda w: random_bits(seed, epoch, f + 1, w))[i]
    offset = random_bits(seed, epoch, f + 1, 1 << 63) % T if len(streams[f]) >= 2 * T else 0
    start = offset + window * T
    return streams[f][start:start + T + 1].tolist()


def write_shard(path, tokens):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype=np.uint16).tobytes())
    return str(path)


def test_mix64():
    # The first outputs of splitmix64 seeded with 0 and 1234567, as published with it.
    assert int(reference.mix64(0)) == mix64(0) == 0xE220A8397B1DCDAF
    assert int(reference.mix64(1234567)) == mix64(1234567) == 6457827717110365317


@pytest.mark.parametrize("seed", [0, 1337, MASK])
def test_training_order(seed):
    T = 8
    # One more than a sequence, around two sequences, and many windows; all tokens differ.
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
    assert got == [list(range(9)), list(range(100, 109)), list(range(108, 117)), list(range(116, 125))]


def test_text_keeps_a_tenth_of_each_file(tmp_path):
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 125)))
    (tmp_path / "a.txt").write_bytes(bytes(range(19)))
    (train,), (held_out,) = reference.load_data([str(tmp_path / "*.txt")], None)
    assert train.tolist() == [*range(18), *range(100, 123)] and held_out.tolist() == [18, 123, 124]
    (train,), (held_out,) = reference.load_data([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")],
                                                [str(tmp_path / "a.txt")])
    assert train.tolist() == [*range(100, 125), *range(19)] and held_out.tolist() == [*range(19)]


def test_shards_are_streams(tmp_path):
    write_shard(tmp_path / "x_1.bin", [3, 65535])
    write_shard(tmp_path / "x_0.bin", [1, 2, 50256])
    train, held_out = reference.load_data([str(tmp_path / "x_*.bin")], None)
    assert [stream.tolist() for stream in train] == [[1, 2, 50256], [3, 65535]] and held_out == []


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
        reference.load_data([str(path)], None)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and str(path) in error
