"""--timeline: what is alive after each operation, its sums and its peak; and dev/plot_memory.py, which draws
it."""

import json
import struct

import plot_memory
import pytest
import rate_files
from trainer_runs import refused_by_script, write_text

USUALLY = "bf16"  # see conftest.py

LEVELS = ["none", "gelu", "norm", "ffn", "attention", "block"]
STATE = ["weights", "gradients", "optimizer_m", "optimizer_v", "master", "input"]  # alive all the time
SETTINGS = ("--model", "d3", "--batch", 3, "--seq-len", 40)


def write(train, path, *arguments):
    """The timeline of these arguments, and their plan."""
    plan = json.loads(train(*arguments, "--plan", "json", "--timeline", path).stdout)
    return json.loads(path.read_text()), plan


def peak(timeline):
    return max(sum(operation["bytes"]) for operation in timeline["operations"])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("settings", [
    SETTINGS, ("--model", "d12", "--batch", 4, "--seq-len", 1024, "--chunk-rows", "head=0"),
    (*SETTINGS, "--update-in-backward")], ids=["d3", "d12", "d3, update in backward"])
def test_sums(train, tmp_path, settings, level):
    timeline, plan = write(train, tmp_path / "t.json", *settings, "--recompute", level)
    for key in ("model", "parameters", "device", "precision", "batch", "seq_len", "grad_accum", "head_rows", "recompute"):
        assert timeline[key] == plan[key], key
    totals = plan["totals"]
    state = [kind for kind in STATE if totals[kind]]
    kinds = timeline["kinds"]
    assert kinds[:len(state)] == state and kinds[-1] == "workspace"
    assert peak(timeline) == (plan["activations_lower_bound"] + totals["workspace"] + sum(totals[k] for k in state))
    # The first operation at the peak is the take that the plan names.
    first = next(o for o in timeline["operations"] if sum(o["bytes"]) == peak(timeline))
    assert f"{first['range']}, {first['name']}" == plan["peak_at"] and first["event"] == "take"
    for kind in (*state, "workspace"):
        assert {o["bytes"][kinds.index(kind)] for o in timeline["operations"]} == {totals[kind]}
    takes = ["activation", "gradient"] + ["parameter_gradient"] * ("--update-in-backward" in settings)
    assert kinds[len(state):-1] == takes
    for kind in takes:
        assert timeline["operations"][-1]["bytes"][kinds.index(kind)] == 0
        assert max(o["bytes"][kinds.index(kind)] for o in timeline["operations"]) > 0


@pytest.mark.parametrize("level", LEVELS)
def test_events_follow_the_plan(train, tmp_path, level):
    """Each take changes its kind by its own bytes, each release by as much, an operation by nothing."""
    timeline, plan = write(train, tmp_path / "t.json", *SETTINGS, "--recompute", level)
    kinds = timeline["kinds"]
    takes = [b for b in plan["buffers"] if b["offset"] is not None]
    moments = sorted([(b["born"], "take", b) for b in takes] + [(b["dies"], "release", b) for b in takes],
                     key=lambda moment: moment[0])
    operations = [o for o in timeline["operations"] if not o["range"].startswith("update")]
    assert [(o["event"], o["name"]) for o in operations if o["event"] != "operation"] == [
        (event, b["name"]) for _, event, b in moments]
    before = [plan["totals"].get(kind, 0) for kind in kinds]
    moments = iter(moments)
    for o in operations:
        if o["event"] != "operation":
            _, event, b = next(moments)
            size = (b["bytes"] + 255) // 256 * 256
            before[kinds.index(b["kind"])] += size if event == "take" else -size
        assert o["bytes"] == before, o


def test_operations_stand_where_they_happen(train, tmp_path):
    timeline, _ = write(train, tmp_path / "t.json", *SETTINGS)
    operations = timeline["operations"]
    phases = [o["range"].split(" ")[0] for o in operations if o["range"]]
    assert list(dict.fromkeys(phases)) == ["forward", "head", "backward", "update"]
    assert phases == sorted(phases, key=["forward", "head", "backward", "update"].index)
    forward = [(o["event"], o["name"]) for o in operations if o["range"] == "forward block 1"]
    at = forward.index(("take", "qkv"))
    assert forward[at + 1:at + 2] == [("operation", "matmul")]  # which writes it
    assert forward.index(("operation", "attention_forward")) > forward.index(("take", "attention")) > at
    head = [o["name"] for o in operations if o["range"] == "head" and o["event"] == "operation"]
    assert head.index("matmul") < head.index("cross_entropy_forward_backward") < head.index("add_losses")


def test_one_operation_a_line(train, tmp_path):
    timeline, _ = write(train, tmp_path / "t.json", *SETTINGS)
    lines = (tmp_path / "t.json").read_text().splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines[2:-1]] == timeline["operations"]


def test_a_run_writes_the_same(train, tmp_path):
    write_text(tmp_path / "text")
    run = ("--model", "d1", "--data", "text", "--batch", 2, "--seq-len", 24, "--sample", "tokens=0", "--out", "out")
    train(*run, "--steps", 1, "--timeline", "run.json", cwd=tmp_path)
    train(*run, "--plan", "--timeline", "plan.json", cwd=tmp_path)
    assert (tmp_path / "run.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    (tmp_path / "run.json").unlink()
    train("--resume", "out", "--steps", 2, cwd=tmp_path)
    train("--resume", "out", "--steps", 0, "--prompt", "x", "--sample", "tokens=2", cwd=tmp_path)
    assert not (tmp_path / "run.json").exists()  # a resumed run does not take over the option


@pytest.mark.parametrize("arguments, named", [
    (("--timeline", "nowhere/t.json"), ["nowhere/t.json", "No such file"]),
    (("--timeline", "."), ["--timeline .", "directory"]),
    (("--timeline", "/dev/full"), ["/dev/full", "No space"]),
    (("--timeline", "t.json", "--steps", 0), ["t.json", "--steps 0"]),
])
@pytest.mark.parametrize("plan", [True, False])
def test_refused(train, tmp_path, arguments, named, plan):
    write_text(tmp_path / "text")
    result = train("--model", "d1", "--data", "text", *arguments, *(["--plan"] if plan else []), cwd=tmp_path, code=2)
    error = result.stderr.decode()
    assert error.startswith("train: --timeline ") and error.count("\n") == 1
    assert all(name in error for name in named), error
    assert b"step" not in result.stdout and [path.name for path in tmp_path.iterdir()] == ["text"]


# ---- transfers

ELSEWHERE = ("--model", "d4", "--batch", 2, "--seq-len", 32, "--threads", 2, "--chunk-rows", "head=0", "--offload", "weights=disk,state=disk,inputs=auto")


def elsewhere(train, tmp_path, *options):
    """The transfers of a step with all of these outside the device."""
    if train.device != "cpu":
        pytest.skip("what lives on the disk is a CPU's")
    return write(train, tmp_path / "t.json", *ELSEWHERE, *options)


@pytest.mark.parametrize("options", [(), ("--update-in-backward",)], ids=["", "update in backward"])
def test_transfers_in_the_order_of_the_program(train, tmp_path, options):
    """Without measured rates: from the operation at which each starts to the one at which it is waited
    for."""
    timeline, plan = elsewhere(train, tmp_path, *options)
    transfers, end = timeline["transfers"], len(timeline["operations"])
    assert all(list(t) == ["range", "of", "way", "bytes", "begins", "ends"] for t in transfers)
    assert all(0 <= t["begins"] <= t["ends"] <= end for t in transfers)
    moved = {(of, way): sum(t["bytes"] for t in transfers if (t["of"], t["way"]) == (of, way))
             for of in ("weights", "inputs", "state") for way in ("disk_read", "disk_write")}
    assert moved["inputs", "disk_read"] == moved["inputs", "disk_write"] == plan["outside_device"]["offloaded"] > 0
    state = moved["state", "disk_read"]
    assert state == moved["state", "disk_write"] > 0
    room = next(b["bytes"] for b in plan["buffers"] if b["name"] == "streamed_block")
    blocks = {way: moved["weights", way] / room for way in ("disk_read", "disk_write")}
    # Two blocks are left from forward.
    assert blocks == {"disk_read": 4 + 2 + (0 if options else 4), "disk_write": 4}
    # The second block is transferred while the first one is computed, and is there for its first operation.
    first, second = [t for t in transfers if t["of"] == "weights"][:2]
    ranges = [o["range"] for o in timeline["operations"]]
    assert ranges[int(first["ends"])] == "forward block 0" == ranges[int(second["begins"])]
    operations = [i for i, o in enumerate(timeline["operations"]) if o["event"] == "operation"]
    assert second["ends"] == next(i for i in operations if ranges[i] == "forward block 1")
    lines = (tmp_path / "t.json").read_text().splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines[-1 - len(transfers):-1]] == transfers


def test_transfers_by_rates(train, tmp_path):
    """Each transfer takes its bytes' time, one after the other; the waits are the plan's; twice the rate
    takes half the time."""
    parts = []
    for rate in (2e8, 4e8):
        rates = rate_files.write(tmp_path / "rates.json", rate_files.rates_of(train, transfers=rate))
        timeline, plan = elsewhere(train, tmp_path, "--rates", rates)
        transfers = timeline["transfers"]
        assert [t["seconds"] for t in transfers] == pytest.approx([t["bytes"] / rate for t in transfers])
        waited = sum(p["disk"] for p in plan["phases"])
        assert waited > 0 and sum(t["waited"] for t in transfers) == pytest.approx(waited)
        for one, next_one in zip(transfers, transfers[1:]):
            assert one["begins"] <= one["ends"] <= next_one["begins"]
        parts.append(sum(t["ends"] - t["begins"] for t in transfers if t["range"].startswith("backward")))
    # A transfer that computing waits for ends where computing continues, at the start of an operation.
    assert all(t["ends"] == int(t["ends"]) for t in transfers if t["waited"] > 0)
    fast = rate_files.write(tmp_path / "rates.json", rate_files.rates_of(train, transfers=1e15))
    timeline, _ = elsewhere(train, tmp_path, "--rates", fast)
    assert all(t["ends"] - t["begins"] < 1e-2 for t in timeline["transfers"] if t["waited"] == 0)


def test_nothing_moves_beside_what_is_all_there(train, tmp_path):
    assert "transfers" not in write(train, tmp_path / "t.json", *SETTINGS)[0]


# ---- dev/plot_memory.py


def image_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 15000  # an empty plot has 9 kB
    return struct.unpack(">II", data[16:24])


MOVED = [{"range": "forward block 0", "of": "weights", "way": "disk_read", "bytes": 9, "begins": 1, "ends": 3.5,
          "seconds": 2, "waited": 1},
         {"range": "backward block 1", "of": "state", "way": "disk_write", "bytes": 9, "begins": 8, "ends": 8}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Made here, so that the plots need no binary: a step of two layers, and variants of it."""
    folder = tmp_path_factory.mktemp("timelines")
    for name, scale, settings in [("a", 1, {}), ("b", 2, {"precision": "fp32"}), ("c", 4, {"seq_len": 256}),
                                  ("d", 1, {"recompute": "norm"}), ("e", 1, {"transfers": MOVED})]:
        live = {"weights": 30 << 20, "activation": 0, "gradient": 0}
        operations = []

        def add(where, event, what, kind=None, size=0):
            if kind:
                live[kind] += scale * size << 20
            operations.append({"range": where, "event": event, "name": what, "bytes": list(live.values())})

        add("", "take", "inputs", "activation", 1)
        for layer in range(2):
            add(f"forward block {layer}", "take", "qkv", "activation", 20)
            add(f"forward block {layer}", "operation", "matmul")
        add("head", "take", "logits", "activation", 30)
        add("head", "release", "logits", "activation", -30)
        for layer in range(2):
            add(f"backward block {layer}", "take", "d_qkv", "gradient", 20)
            add(f"backward block {layer}", "release", "d_qkv", "gradient", -20)
            add(f"backward block {layer}", "release", "qkv", "activation", -20)
        if name == "d":
            add("update", "operation", "adamw")
        (folder / f"{name}.json").write_text(json.dumps({
            "model": "d2", "parameters": 1000, "device": "cpu", "precision": "bf16", "batch": 1, "seq_len": 128,
            "grad_accum": 1, "head_rows": 256, "recompute": "gelu",
            "kinds": list(live), "operations": operations} | settings))
    return folder


def plot(files, *arguments):
    """Arguments that are paths stand for files in the folder."""
    assert plot_memory.main([str(files / a) if ".json" in a or ".png" in a else a for a in arguments]) in (0, None)


@pytest.mark.parametrize("arguments", [
    ["a.json"], ["a.json:head"], ["a.json", "b.json"], ["a.json", "a.json:head"], ["a.json", "d.json", "b.json"],
    ["e.json"], ["e.json:head"], ["a.json", "e.json"],
    ["a.json", "b.json", "--labels", "one", "two"], ["a.json", "c.json", "--over", "seq_len"]], ids=str)
def test_plots(files, tmp_path, arguments):
    plot(files, *arguments, "--out", str(tmp_path / "m.png"))
    width, height = image_size(tmp_path / "m.png")
    assert width > 800 and height > 500


def test_each_plot_is_another(files, tmp_path):
    drawn = set()
    for arguments in (["a.json"], ["a.json:head"], ["a.json", "b.json"], ["a.json", "a.json:head"],
                      ["a.json", "c.json", "--over", "seq_len"], ["e.json"], ["e.json:head"]):
        plot(files, *arguments, "--out", str(tmp_path / "m.png"))
        drawn.add((tmp_path / "m.png").read_bytes())
    assert len(drawn) == 7


def test_bars_are_drawn_below(files, tmp_path, monkeypatch):
    """There is a row for each direction in the file. Transfers that are waited for are framed, and none is
    cut off."""
    drawn = []
    monkeypatch.setattr(plot_memory, "draw_transfers", lambda axes, t, draw=plot_memory.draw_transfers: drawn.append(
        (draw(axes, t), [(p.get_x(), p.get_y() + p.get_height() / 2, p.get_width(), p.get_linewidth() > 0) for p in axes.patches],
         [label.get_text() for label in axes.get_yticklabels()])[1:]))
    plot(files, "a.json", "--out", str(tmp_path / "m.png"))
    plot(files, "e.json", "--out", str(tmp_path / "m.png"))
    plot(files, "e.json:head", "--out", str(tmp_path / "m.png"))
    (both, ways), (one, way) = drawn
    assert ways == ["disk read", "disk write"] and way == ["disk read"]
    assert both == [pytest.approx((1, 0, 2.5, True)), pytest.approx((8, 1, 13 / 1000, False))] and one == both[:1]


def test_says_the_peak(files, capsys):
    """That of the whole step is in the head, that of the forward pass alone at its end, and smaller."""
    plot(files, "a.json", "a.json:head", "b.json", "--out", "m.png")
    whole, forward, wide = capsys.readouterr().out.splitlines()
    assert whole.endswith("a.json: 101 MiB at head, logits")
    assert forward.endswith("a.json:head: 71 MiB at forward block 1, qkv")
    assert wide.endswith("b.json: 172 MiB at head, logits")


def test_labels_say_what_differs(files):
    a, b, c, head = (plot_memory.Timeline(str(files / name)) for name in ("a.json", "b.json", "c.json", "a.json:head"))
    assert plot_memory.labels_of([a, b], None) == ["bf16", "fp32"]
    assert plot_memory.labels_of([a, c], None) == ["seq_len 128", "seq_len 256"]
    assert plot_memory.labels_of([a, a], None) == [a.name, a.name]
    assert plot_memory.labels_of([a, b], ["x", "y"]) == ["x", "y"]
    assert head.whole_length == len(a.bytes) and len(head.bytes) == 5


def test_phases(files):
    phases = plot_memory.Timeline(str(files / "d.json")).phases()
    assert phases == [["forward", 1, 5], ["head", 5, 7], ["backward", 7, 13], ["update", 13, 14]]


def test_of_a_real_step(train, tmp_path, capsys):
    timeline, plan = write(train, tmp_path / "t.json", *SETTINGS)
    plot_memory.main([str(tmp_path / "t.json"), "--out", str(tmp_path / "m.png")])
    assert capsys.readouterr().out.endswith(f"{peak(timeline) / (1 << 20):,.0f} MiB at {plan['peak_at']}\n")
    image_size(tmp_path / "m.png")
    whole, forward = (plot_memory.Timeline(str(tmp_path / name)) for name in ("t.json", "t.json:head"))
    assert forward.peak()[0] < whole.peak()[0] and len(forward.bytes) < len(whole.bytes)


@pytest.mark.parametrize("text", [
    None, "", "{", "[]", "{}", '{"kinds": [], "operations": []}', "\x00\xff",
    '{"model": "d1", "parameters": 1, "device": "cpu", "precision": "bf16", "batch": 1, "seq_len": 1, '
    '"grad_accum": 1, "head_rows": 256, "recompute": "gelu", "kinds": ["a"], "operations": [{"range": "", "name": "x", "bytes": [1, 2]}]}'], ids=repr)
def test_bad_file(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "bad").write_text(text, encoding="latin-1")
    refused_by_script(plot_memory, capsys, [str(tmp_path / "bad")], "No such file" if text is None else "not a file of ./train --timeline")


@pytest.mark.parametrize("arguments, named", [
    (["a.json:middle"], "forward, head, backward"), (["a.json", "b.json", "--over", "seq_len"], "seq_len 128"),
    (["a.json", "b.json", "--labels", "one"], "--labels"), (["a.json", "--out", "/nowhere/m.png"], "--out"),
    (["a.json", "--out", "m.xyz"], "--out")], ids=str)
def test_bad_request(files, capsys, monkeypatch, tmp_path, arguments, named):
    monkeypatch.chdir(tmp_path)
    refused_by_script(plot_memory, capsys, [str(files / a) if ".json" in a else a for a in arguments], named)
    assert not list(tmp_path.iterdir())
