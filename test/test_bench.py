"""--bench and --bench ops: their figures, that they add up, and that they measure the planned step."""

import collections
import json
import re

import pytest
from rate_files import rates_of
from trainer_runs import listing, make, random_tokens, write_shard, write_text

USUALLY = "fp32"  # see conftest.py

SHAPE = ("--batch", 2, "--seq-len", 48, "--threads", 1)
SETTINGS = (*SHAPE, "--warmup", "1", "--steps", "3")
PHASES = ["forward", "head", "backward", "update"]
HEAD = ["model", "device", "precision", "batch", "seq_len", "grad_accum", "recompute", "threads", "warmup", "steps",
        "cold_ms"]
RATES = ["tokens_per_second", "flops_per_second", "matmul_peak", "matmul_share", "copy_peak", "bytes_per_second",
         "planned_bytes", "taken_bytes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model so small that nothing takes long; no test writes here."""
    path = tmp_path_factory.mktemp("given")
    make(path / "model", "--layers", 3, "--heads", 3, "--channels", 48, "--positions", 64, "--vocab", 300)
    write_text(path / "text")
    write_shard(path / "shard.bin", random_tokens(300, 3000))
    return path


def bench(train, *arguments, model="d2", cwd=None):
    result = train("--model", model, *SETTINGS, *arguments, "--bench", "json", cwd=cwd)
    assert result.stderr == b""
    return json.loads(result.stdout)


def gpt2_tokens(folder):
    """Data with which training has the same vocabulary as a bench without data."""
    return write_shard(folder / "tokens.bin", random_tokens(300, 1000))


def wholes(train, name="step"):
    """The names of the whole step. If training replays it as graphs, the phases belong to the one called
    "plain"."""
    return [f"plain_{name}", name] if train.device == "cuda" else [name]


def consistent(figures, phases, whole):
    """Checks that must hold for the figures of any bench."""
    for phase in phases:
        times = figures[f"{phase}_ms"]
        assert list(times) == ["mean", "std", "median", "min"]
        assert 0 < times["min"] <= times["median"] and times["min"] <= times["mean"] and times["std"] >= 0
    seconds = figures[f"{whole}_ms"]["median"] / 1e3
    tokens = figures["batch"] * figures["seq_len"] * figures["grad_accum"]
    assert figures["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert figures["matmul_share"] == pytest.approx(figures["flops_per_second"] / figures["matmul_peak"])
    assert 1e9 < figures["matmul_peak"] < 1e16 and 1e8 < figures["copy_peak"] < 1e14
    assert figures["cold_ms"] > 0 and figures["taken_bytes"] > 0
    return seconds


def flops(plan, layers, channels, positions):
    """FLOPs of a training step, from the plan's sizes."""
    multiplied = plan["parameters"] - positions * channels
    tokens = plan["batch"] * plan["seq_len"] * plan["grad_accum"]
    return 6 * tokens * (multiplied + layers * channels * plan["seq_len"])


def test_flops_of_a_frozen_model(train, folder):
    """A frozen parameter takes 2 FLOPs a token in forward and 2 in backward, which computes no gradient of it."""
    options = ("--train", "lora", "--lora-rank", 4)
    figures = bench(train, "--bench", *options, model=folder / "model")
    plan = train.plan("--model", folder / "model", *SHAPE, *options, "--sample", "tokens=0", "--data", folder / "shard.bin")
    tokens, attention = 2 * 48, 3 * 48 * 48
    multiplied, lora = plan["parameters"] - 64 * 48, plan["trained"]
    assert lora == 3 * 4 * ((48 + 144) + (48 + 48) + (48 + 192) + (192 + 48))
    seconds = figures[f"{wholes(train)[-1]}_ms"]["median"] / 1e3
    assert figures["flops_per_second"] * seconds == pytest.approx(tokens * (4 * multiplied + 6 * (lora + attention)))


def test_flops_of_packed_examples(train, folder, tmp_path):
    """Attention's cost follows the length of the examples: two of 24 rows in each sequence of 48."""
    with open(tmp_path / "examples.jsonl", "w") as file:
        for i in range(80):
            file.write(json.dumps({"prompt": f"{i:012d}", "completion": "0123456789abc"}) + "\n")
    shape = ("--data", tmp_path / "examples.jsonl")
    figures = bench(train, "--bench", *shape)
    plan = train.plan("--model", "d2", *SHAPE, *shape, "--sample", "tokens=0")
    multiplied = plan["parameters"] - 48 * 128  # positions
    seconds = figures[f"{wholes(train)[-1]}_ms"]["median"] / 1e3
    assert figures["flops_per_second"] * seconds == pytest.approx(6 * 2 * 48 * (multiplied + 2 * 128 * 24))


@pytest.mark.parametrize("options", [(), ("--grad-accum", 2)], ids=["", "grad-accum"])
def test_step(train, tmp_path, options):
    """Without any data, on random tokens. The phases are most of the step and no more."""
    figures = bench(train, "--bench", *options, cwd=tmp_path)
    assert list(figures) == HEAD + [f"{phase}_ms" for phase in (*PHASES, *wholes(train))] + RATES
    assert not listing(tmp_path)
    seconds = consistent(figures, [*PHASES, *wholes(train)], "step")
    inside = sum(figures[f"{phase}_ms"]["mean"] for phase in PHASES)
    mean = figures[f"{wholes(train)[0]}_ms"]["mean"]
    assert 0.6 * mean <= inside <= 1.001 * mean
    assert (figures["warmup"], figures["steps"], figures["threads"]) == (1, 3, 1)
    plan = train.plan("--model", "d2", *SHAPE, *options, "--sample", "tokens=0", "--data", gpt2_tokens(tmp_path))
    for key in ("model", "device", "precision", "batch", "seq_len", "grad_accum", "recompute"):
        assert figures[key] == plan[key]
    totals = plan["totals"]
    assert figures["planned_bytes"] == totals["total"]
    assert 0.8 * (totals["total"] - totals["process"]) < figures["taken_bytes"] < 1.5 * totals["total"]
    assert figures["flops_per_second"] * seconds == pytest.approx(flops(plan, 2, 128, 1024))


def test_update_in_backward(train):
    """The update has no time of its own."""
    figures = bench(train, "--update-in-backward", "--bench", "ops")
    phases = ["forward", "head", "backward", "step"]
    assert [key for key in figures if key.endswith("_ms") and key != "cold_ms"] == [f"{p}_ms" for p in phases]
    consistent(figures, phases, "step")
    assert calls(figures)["optimizer_update"] == 4  # one unit per block, and the two around them


def test_forward(train, tmp_path):
    """Forward alone: only the weights exist, and it has a third of the FLOPs."""
    figures = bench(train, "--bench", "forward", "--bench", "ops")
    assert list(figures) == [*HEAD, "forward_ms", *RATES, "operations"]
    seconds = consistent(figures, ["forward"], "forward")
    plan = train.plan("--model", "d2", *SHAPE, "--sample", "tokens=0", "--data", gpt2_tokens(tmp_path))
    assert 3 * figures["flops_per_second"] * seconds == pytest.approx(flops(plan, 2, 128, 1024))
    totals = plan["totals"]
    assert totals["weights"] < figures["planned_bytes"] < totals["total"] - totals["gradients"]
    assert not any("backward" in name or "update" in name for name in calls(figures))
    assert calls(figures)["attention_forward"] == 2 and calls(figures)["cross_entropy_forward"] == 1
    sums(figures, "forward")


def test_without_graphs(train):
    """If there are graphs, --advanced graph=off measures only the plain step."""
    figures = bench(train, "--bench", "--advanced", "graph=off")
    assert list(figures) == HEAD + [f"{phase}_ms" for phase in (*PHASES, "step")] + RATES
    consistent(figures, [*PHASES, "step"], "step")


@pytest.mark.parametrize("model, data", [("model", "shard.bin"), ("d1", "text"), ("model", None)])
def test_data(train, folder, model, data):
    before = listing(folder)
    options = [part for part in ("--data", data) if data]
    figures = bench(train, "--bench", *options, model=model, cwd=folder)
    assert figures["model"] == model
    consistent(figures, PHASES, "step")
    assert listing(folder) == before


# ---- outside the device

ELSEWHERE = ("--offload", "weights=disk,state=disk,inputs=auto,gradients=disk")
KINDS = ["weights", "vocabulary", "inputs", "state", "gradients", "keys", "ranks"]


def elsewhere(train, *options):
    """On a GPU: in pinned memory."""
    place = "disk" if train.device == "cpu" else "host"
    return tuple(option.replace("disk", place) for option in options)


def test_waits_and_links(train, tmp_path):
    """By block, and all together. Each link carries as much as the plan says, no more and no less."""
    where = elsewhere(train, *ELSEWHERE)
    figures = bench(train, "--bench", "--grad-accum", 2, *where, model="llama:d4")
    plan = train.plan("--model", "llama:d4", *SHAPE, "--grad-accum", 2, *where, "--sample", "tokens=0", "--data", gpt2_tokens(tmp_path))
    room = next(b["bytes"] for b in plan["buffers"] if b["name"] == "streamed_block")
    block, held = room - 4096, plan["outside_device"]
    in_all = held["working_file"] + held["pinned_host"] + held["offloaded"]
    parked = 2 * 2 * 48 * 256 * (2 if train.precision == "bf16" else 4)  # two of four inputs leave the device
    state = in_all - 2 * 4 * block - parked
    # In a micro-batch two blocks stay in their slots between forward and backward, and the update fetches
    # each block once. Their gradients are stored in each micro-batch, and are fetched in all but the first,
    # and in the update.
    expected = [(2 * (4 + 2) + 4) * block + 2 * parked + state + 8 * block, 4 * block + 2 * parked + state + 8 * block]
    ways = ["disk_read", "disk_write"] if train.device == "cpu" else ["from_host", "to_host"]
    assert list(figures["links"]) == ways
    seconds = figures["step_ms"]["median"] / 1e3
    for link, carried in zip(figures["links"].values(), expected, strict=True):
        assert link["bytes"] == carried
        assert link["bytes_per_second"] == pytest.approx(carried / seconds) and "limit" not in link
    *places, whole = figures["waits"]
    units = [f"update {unit}" for unit in range(6)]
    # In the order of their first waits. The last two blocks and their inputs are still where forward left
    # them; their gradients are fetched only in the second micro-batch.
    assert [w["place"] for w in places] == [f"forward block {b}" for b in range(4)] + [
        "backward block 1", "backward block 0", "backward", "backward block 3", "backward block 2"] + units + ["update"]
    for wait in (*places, whole):
        assert list(wait) == ["place", "ms", *(f"{kind}_ms" for kind in KINDS)]
        assert wait["ms"] == pytest.approx(sum(wait[f"{kind}_ms"] for kind in KINDS)) and wait["ms"] >= 0
    assert whole["place"] == "all" and whole["ms"] == pytest.approx(sum(w["ms"] for w in places))
    assert 0 < whole["ms"] < figures["step_ms"]["mean"] and all(whole[f"{kind}_ms"] > 0 for kind in KINDS if kind not in ("vocabulary", "keys", "ranks"))
    backward = 4 + 5
    assert all(w["state_ms"] == 0 for w in places[:backward]) and all(w["inputs_ms"] == 0 for w in places[backward:])
    assert places[0]["weights_ms"] > 0 and places[-2]["state_ms"] > 0


def test_links_beside_their_limits(train, tmp_path):
    """Limits from a file of rates. If a step is not bound by a link, the link carries less than it could."""
    rates = rates_of(train, transfers=1e12)
    (tmp_path / "rates.json").write_text(json.dumps(rates))
    options = ("--model", "d3", *SHAPE[:-1], rates["threads"], "--steps", "2", "--bench", "--offload", "weights=disk", "--rates", "rates.json")
    figures = json.loads(train(*options, "--bench", "json", cwd=tmp_path).stdout)
    assert [link["limit"] for link in figures["links"].values()] == [1e12, 1e12]
    lines = train(*options, cwd=tmp_path).stdout.decode().split("\n\n")
    waits, links = ([line.split() for line in table.splitlines()] for table in lines[-2:])
    assert waits[0] == ["waited,", "ms", *KINDS, "share"] and waits[1][:3] == ["forward", "block", "0"]
    assert waits[-1][0] == "all" and [row[-1][-1] for row in waits[1:]] == ["%"] * (len(waits) - 1)
    assert links[0] == "link MB a step GB/s limit".split() and [row[0] for row in links[1:]] == ["disk_read", "disk_write"]
    assert all(float(row[1]) > 0 and float(row[3]) == 1000 for row in links[1:])


def test_nothing_elsewhere_has_no_waits(train):
    assert not {"waits", "links"} & set(bench(train, "--bench"))


# ---- operations


def calls(figures):
    """By name, all products together."""
    count = collections.Counter()
    for operation in figures["operations"]:
        count[operation["name"].split()[0]] += operation["calls"]
    return count


def sums(figures, whole):
    """Times, FLOPs and bytes of the operations, compared with those of the step."""
    operations = figures["operations"]
    assert len({o["name"] for o in operations}) == len(operations)
    assert [o["ms"] for o in operations] == sorted((o["ms"] for o in operations), reverse=True)
    inside, mean = sum(o["ms"] for o in operations), figures[f"{whole}_ms"]["mean"]
    assert 0.6 * mean <= inside <= 1.001 * mean
    seconds = figures[f"{whole}_ms"]["median"] / 1e3
    assert sum(o["bytes"] for o in operations) == pytest.approx(figures["bytes_per_second"] * seconds)
    for o in operations:
        assert o["calls"] > 0 and o["ms"] > 0
        bounds = o["flops"] / figures["matmul_peak"], o["bytes"] / figures["copy_peak"]
        assert max(bounds) * 1e3 <= o["roofline_ms"] * (1 + 1e-9) <= sum(bounds) * 1e3 * (1 + 2e-9)
        if o["name"].startswith("matmul"):
            form = r"matmul (\d+) x (\d+) x (\d+) [NT][NT]( bias| accumulate| gelu| gelu_backward| bias_gradient)*"
            m, n, k = re.fullmatch(form, o["name"]).groups()[:3]
            assert o["flops"] == 2 * int(m) * int(n) * int(k) * o["calls"]


@pytest.mark.parametrize("recompute", ["gelu", "block"])
def test_operations_are_those_of_the_plan(train, tmp_path, recompute):
    """Each operation runs as often as in the rehearsal: the timeline lists them one by one."""
    options = ("--recompute", recompute, "--chunk-rows", "head=0")
    figures = bench(train, "--bench", "--bench", "ops", *options)
    sums(figures, "step")
    train("--model", "d2", *SHAPE, *options, "--plan", "--timeline", tmp_path / "t.json", "--data", gpt2_tokens(tmp_path))
    timeline = json.loads((tmp_path / "t.json").read_text())["operations"]
    assert calls(figures) == collections.Counter(o["name"] for o in timeline if o["event"] == "operation")
    products = {o["name"] for o in figures["operations"]}
    assert "matmul 96 x 384 x 128 NN bias" in products and "matmul 128 x 384 x 96 TN bias_gradient" in products
    assert "matmul 96 x 512 x 128 NT gelu_backward" in products and "matmul 96 x 50304 x 128 NT" in products


def test_loops_and_micro_batches_count(train):
    """96 rows in chunks of 40 are three heads, two of them iterations of a loop; six in two micro-batches."""
    figures = [bench(train, "--bench", "ops", "--chunk-rows", "head=40", "--grad-accum", n) for n in (1, 2)]
    one, two = map(calls, figures)
    assert one["cross_entropy_forward_backward"] == 3 and one["layernorm_backward"] == 2 * 2 + 3
    of_update = {"optimizer_update": 4, "global_norm": 4}  # of each unit
    assert two == {name: of_update.get(name, 2 * count) for name, count in one.items()}
    products = [{o["name"]: o["calls"] for o in f["operations"]} for f in figures]
    of_up = "matmul 128 x 512 x 96 TN"  # the first micro-batch writes this gradient, the second adds to it
    written, added = of_up + " bias_gradient", of_up + " accumulate"
    assert products[0][written] == products[1][written] == products[1][added] == 2
    assert added not in products[0]


# ---- the tables


def test_table(train):
    lines = train("--model", "d2", *SETTINGS, "--bench").stdout.decode().splitlines()
    assert lines[0].startswith(f"d2: {train.device}, {train.precision}, batch 2, seq_len 48, ")
    assert re.fullmatch(r"3 steps, after a cold one of \d+\.\d\d ms and 1 to warm up", lines[1])
    assert lines[3].split() == ["ms", "mean", "std", "median", "min"]
    end = 4 + len(PHASES) + len(wholes(train))
    table = [line.split() for line in lines[4:end]]
    assert [row[0] for row in table] == [*PHASES, *wholes(train)] and all(len(row) == 5 for row in table)
    assert sum(float(row[1]) for row in table[:4]) <= float(table[4][1]) + 0.01
    for line, pattern in zip(lines[end + 1:], (r"\d+ tokens/s", r"[\d.]+ GFLOP/s: [\d.]+% of the [\d.]+ of square products",
                                          r"[\d.]+ GB/s: [\d.]+% of the [\d.]+ of a large copy",
                                          r"[\d.]+ MiB planned, [\d.]+ MiB taken"), strict=True):
        assert re.fullmatch(pattern, line), line


def test_table_of_operations(train):
    text = train("--model", "d2", *SETTINGS, "--bench", "ops").stdout.decode()  # implies --bench
    _, table = text.split("\noperation ")
    lines = table.splitlines()
    assert lines[0].split() == "calls ms share GB/s GFLOP/s roofline ms ratio".split()
    shares = [float(re.search(r"([\d.]+)%", line)[1]) for line in lines[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.06 * len(shares))
    assert lines[-1].startswith("outside of operations ")
    assert sum(line.startswith("matmul ") for line in lines) > 10


# ---- mistakes


@pytest.mark.parametrize("arguments, named", [
    (["--bench", "nonsense"], ["--bench", "nonsense", "forward"]), (["--bench", ""], ["--bench"]),
    (["--bench", "--steps", "0"], ["--steps", "0"]), (["--bench", "--steps", "x"], ["--steps"]),
    (["--bench", "--warmup", "-1"], ["--warmup", "-1"]),
    (["--bench", "--out", "out"], ["--out out", "--bench"]), (["--bench", "--save-every", 3], ["--save-every 3"]),
    (["--bench", "--log", "log"], ["--log log", "--bench"]), (["--bench", "--plan"], ["--plan", "--bench"]),
    (["--bench", "ops", "--timeline", "t"], ["--timeline t", "--bench"]), (["--bench", "--prompt", "a"], ["--prompt a"]),
    (["--bench", "forward", "--memory", "1GiB"], ["--memory 1GiB", "--bench forward"]),
    (["--bench", "--model", "model", "--data", "text"], ["text", "300"]),
], ids=str)
def test_mistakes(train, folder, arguments, named):
    before = listing(folder)
    error = train(*arguments, cwd=folder, code=2).stderr.decode()
    assert error.startswith("train: ") and error.count("\n") == 1 and error.endswith("\n"), error
    for name in named:
        assert name in error, error
    assert listing(folder) == before


def test_only_what_is_run_is_listed_after_a_choice(train):
    """--memory also rehearses adding to gradients; the chosen run does not do that."""
    figures = bench(train, "--memory", "2GiB", "--bench", "ops")
    assert figures["grad_accum"] == 1 and all(operation["calls"] > 0 for operation in figures["operations"])
