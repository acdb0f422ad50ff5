"""--loss-by-position: a validation's losses by the length of their context, compared with transformers; and
the plot."""

import json

import numpy as np
import plot_loss_by_position
import pytest
import torch
from reference_runs import open_with_transformers
from trainer_runs import figures, make, random_tokens, read_log, saved_bytes, write_shard

VOCAB, LENGTH, SEQUENCES = 151, 45, 9
MODELS = {"gpt2": ("--heads", 3, "--channels", 48), "qwen2": ("--heads", 4, "--kv-heads", 2, "--channels", 48)}
# At most 45 tokens: one by one, then four buckets per doubling.
BUCKETS = [(n, n) for n in range(1, 9)] + [(9, 10), (11, 12), (13, 14), (15, 16), (17, 20), (21, 24), (25, 28), (29, 32),
                                           (33, 40), (41, 45)]


@pytest.fixture(params=MODELS)
def work(request, tmp_path):
    make(tmp_path / "model", "--family", request.param, "--vocab", VOCAB, "--positions", 64, *MODELS[request.param])
    write_shard(tmp_path / "data.bin", random_tokens(VOCAB, (SEQUENCES + 1) * LENGTH))
    return tmp_path


RUN = ("--val-data", "data.bin", "--seq-len", LENGTH, "--batch", 4, "--eval-batches", 3)


def expected_losses(folder, sequences):
    """Losses, (sequences, positions)."""
    with torch.no_grad():
        logits = open_with_transformers(folder).float()(sequences[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), sequences[:, 1:], reduction="none").numpy()


def check_line(line, losses, counts):
    """Compares a line with each position's losses, summed, and their counts."""
    assert list(line) == ["step", "val_loss", "seq_len", "contexts"] and line["seq_len"] == LENGTH
    contexts = line["contexts"]
    wanted = [(first, last) for first, last in BUCKETS if counts[first - 1:last].sum() > 0]
    assert [(c["first"], c["last"]) for c in contexts] == wanted
    for c in contexts:
        part = slice(c["first"] - 1, c["last"])
        assert c["tokens"] == counts[part].sum()
        assert c["loss"] == pytest.approx(losses[part].sum() / counts[part].sum(), rel=0, abs=1e-4)
    tokens = sum(c["tokens"] for c in contexts)
    mean = sum(c["tokens"] * c["loss"] for c in contexts) / tokens
    assert line["val_loss"] == pytest.approx(mean, rel=0, abs=2e-6 * mean)


@pytest.mark.parametrize("head_rows", [0, 64])
def test_against_transformers(train_fp32, work, head_rows):
    """With a last batch that is not full, and with the head in chunks."""
    train_fp32("--model", "model", "--steps", 0, *RUN, "--chunk-rows", f"head={head_rows}", "--loss-by-position", "losses",
               cwd=work)
    tokens = torch.from_numpy(random_tokens(VOCAB, (SEQUENCES + 1) * LENGTH))
    losses = expected_losses(work / "model", torch.stack([tokens[i * LENGTH:(i + 1) * LENGTH + 1]
                                                          for i in range(SEQUENCES)]))
    [line] = read_log(work / "losses")
    check_line(line, losses.sum(axis=0), np.full(LENGTH, SEQUENCES))


def test_of_examples(train_fp32, tmp_path):
    """Positions start at 0 with each example of a sequence, and tokens without a loss do not count."""
    make(tmp_path / "model", "--vocab", 256, "--positions", 64, *MODELS["gpt2"])
    lengths = [(3, 5), (7, 30), (1, 2), (10, 4), (2, 39), (20, 20), (6, 6)]
    pairs = [("p" * a, "".join(chr(97 + (i * i + a) % 26) for i in range(b))) for a, b in lengths]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    train_fp32("--model", "model", "--steps", 0, "--val-data", "data.jsonl", "--seq-len", LENGTH, "--batch", 2,
               "--loss-by-position", "losses", cwd=tmp_path)
    sums, counts = np.zeros(LENGTH), np.zeros(LENGTH, dtype=int)
    for prompt, completion in pairs:
        ids = torch.tensor([[*prompt.encode(), *completion.encode()]])
        losses = expected_losses(tmp_path / "model", ids)[0]
        learnt = slice(len(prompt) - 1, len(losses))
        sums[learnt] += losses[learnt]
        counts[learnt] += 1
    [line] = read_log(tmp_path / "losses")
    check_line(line, sums, counts)


def test_changes_no_bit(train, work):
    """Of a training with validations, each of which writes a line. The lines are the same at any recompute
    level and number of threads."""
    options = ("--model", "model", "--data", "data.bin", *RUN, "--steps", 4, "--eval-every", 2, "--sample", "tokens=0")
    train(*options, "--out", "a", "--log", "a.log", cwd=work)
    train(*options, "--out", "b", "--log", "b.log", "--loss-by-position", "b.losses", cwd=work)
    train(*options, "--out", "c", "--loss-by-position", "c.losses", "--threads", 1, "--recompute", "block", cwd=work)
    assert figures(read_log(work / "a.log")) == figures(read_log(work / "b.log"))
    assert saved_bytes(work / "a") == saved_bytes(work / "b")
    lines = read_log(work / "b.losses")
    assert [line["step"] for line in lines] == [2, 4] and lines == read_log(work / "c.losses")
    validations = [line["val_loss"] for line in read_log(work / "b.log") if "val_loss" in line]
    assert [line["val_loss"] for line in lines] == validations


def test_is_in_the_plan(train, work):
    """Four bytes per position; without the option nothing is taken."""
    plans = [train.plan("--model", work / "model", "--steps", 0, "--val-data", work / "data.bin", *RUN[2:], *more) for more in ((), ("--loss-by-position", "x"))]
    without, given = ({b["name"]: b["bytes"] for b in plan["buffers"]} for plan in plans)
    assert given.pop("position_losses") == 4 * LENGTH and without == given
    assert not (work / "x").exists()


def test_a_resume_goes_on(train_fp32, work):
    options = ("--model", "model", "--data", "data.bin", *RUN, "--sample", "tokens=0", "--loss-by-position", "losses")
    train_fp32(*options, "--steps", 4, "--save-every", 2, "--eval-every", 2, "--keep", 0, "--out", "out", cwd=work)
    first = read_log(work / "losses")
    train_fp32("--resume", "out/step-00000002", "--out", "again", cwd=work)
    assert read_log(work / "losses") == first


@pytest.mark.parametrize("options, named", [
    (("--steps", 0, "--loss-by-position", "x"), "--loss-by-position x: there is nothing to validate on"),
    (("--steps", 0, *RUN, "--loss-by-position", ""), "--loss-by-position"),
    (("--steps", 0, *RUN, "--loss-by-position", "data.bin"), "is a file of the data"),
    (("--steps", 0, *RUN, "--loss-by-position", "no/such/folder"), "--loss-by-position no/such/folder"),
    (("--bench", "--loss-by-position", "x"), "a bench only measures"),
], ids=str)
def test_mistakes(train_fp32, work, options, named):
    error = train_fp32("--model", "model", *options, cwd=work, code=2).stderr.decode()
    assert named in error and error.count("\n") == 1 and not (work / "x").exists()


# ---- the plot


def lines_of(*losses):
    return "".join(json.dumps({"step": step, "val_loss": loss, "seq_len": 16, "contexts": [
        {"first": 1, "last": 1, "tokens": 3, "loss": loss + 1}, {"first": 2, "last": 8, "tokens": 9, "loss": loss}]}) + "\n"
        for step, loss in enumerate(losses))


def plotted(tmp_path, capsys, *arguments):
    out = tmp_path / "plot.png"
    plot_loss_by_position.main([*map(str, arguments), "--out", str(out)])
    return out.read_bytes(), capsys.readouterr().out


def test_plot(tmp_path, capsys, monkeypatch):
    (tmp_path / "a").write_text(lines_of(4, 3))
    (tmp_path / "b").write_text(lines_of(2.5))
    picture, said = plotted(tmp_path, capsys, tmp_path / "a", tmp_path / "b")
    assert picture.startswith(b"\x89PNG") and said.count("\n") == 2
    assert "a: loss 3.0000, 4.0000 with the shortest context, 3.0000 with 2 to 8 tokens" in said
    every, said = plotted(tmp_path, capsys, "--all", tmp_path / "a")
    assert every != picture and "a, step 0: loss 4.0000" in said and "a, step 1: loss 3.0000" in said
    from matplotlib.axes import Axes
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, **style: drawn.append((list(x), list(y), style["label"])))
    monkeypatch.setattr(Axes, "legend", lambda axes: None)
    plotted(tmp_path, capsys, tmp_path / "a", tmp_path / "b")
    assert drawn == [([1, 4], [4, 3], "a"), ([1, 4], [3.5, 2.5], "b")]


@pytest.mark.parametrize("text", ["", "[1]\n", "{}\n", '{"step": 1, "val_loss": 2, "contexts": []}\n', "x\n",
                                  '{"step": 1, "val_loss": 2, "contexts": [{"first": "a"}]}\n'])
def test_broken_files(tmp_path, capsys, text):
    (tmp_path / "a").write_text(text)
    for path in (tmp_path / "a", tmp_path / "none"):
        with pytest.raises(SystemExit) as ended:
            plot_loss_by_position.main([str(path), "--out", str(tmp_path / "plot.png")])
        error = capsys.readouterr().err
        assert ended.value.code == 2 and str(path) in error and error.count("\n") == 1
    assert not (tmp_path / "plot.png").exists()
