"""Plans of several devices: what is chosen for them and by all of them, what they send each other, and how long that takes. Most of
it needs no ranks."""

import json
import re

import pytest
from limited_runs import cgroup, run
from rate_files import THREADS, rates_of, spent, write
from trainer_runs import error_line, make, random_tokens, read_log, write_shard

USUALLY = "fp32"
D6 = ("--model", "d6", "--batch", 4, "--seq-len", 256, "--devices", 4)
MIB = 1 << 20


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("plans")
    sizes = ("--layers", 3, "--heads", 4, "--channels", 64, "--vocab", 256, "--positions", 4096)
    make(work / "model", "--family", "llama", *sizes)
    make(work / "tied", "--family", "gpt2", "--tied", *sizes[:-1], 512)
    write_shard(work / "data.bin", random_tokens(256, 6000))
    return work


pytestmark = pytest.mark.on_a_cpu("test_devices_gpu.py trains on several GPUs")


# ---- what is chosen

def text_of(choice):
    """The options that a choice stands for."""
    mlp = f",mlp={choice['mlp_rows']}" if choice["mlp_rows"] else ""
    return ["--recompute", choice["recompute"], "--chunk-rows", f"head={choice['head_rows']}{mlp}", "--batch", choice["batch"],
            "--grad-accum", choice["grad_accum"], *choice["formats"].split(), *choice["placements"].split()]


@pytest.mark.parametrize("more", [(), ("--model", "tied"), ("--model", "model"), ("--model", "model", "--train", "lora")], ids=" ".join)
def test_memory_is_chosen_for_each_device(train, work, more):
    """The choice fits, is what its options take when they are given, and keeps the step's sequences. Smaller budgets are slower."""
    def plan(*options):
        return json.loads(train(*D6, *more, *options, "--plan", "json", cwd=work).stdout)

    seconds, zeros = 0, set()
    most = plan("--memory", "1000GB")["totals"]["total"]
    for share in (1.01, 0.9, 0.75, 0.6):
        try:
            chosen = plan("--memory", f"{int(share * most)}B")
        except AssertionError:  # nothing is small enough
            assert share < 0.8
            continue
        assert chosen["totals"]["total"] <= share * most
        assert chosen["batch"] * chosen["grad_accum"] == 16 and chosen["grad_accum"] % 4 == 0
        assert chosen["estimated_seconds"] >= 0.99 * seconds
        seconds = chosen["estimated_seconds"]
        given = plan(*text_of(chosen["choice"][0]))
        for key in ("totals", "ranks", "estimated_seconds", "buffers"):
            assert given[key] == chosen[key]
        zeros.add(chosen["ranks"]["zero"])
    assert zeros and zeros <= {"1", "2", "3"}


def test_slices_of_gradients_come_before_files(train):
    """--memory takes --zero 2 or 3 where that is enough, without streaming. A --zero that is given stays."""
    one, two = (train.plan(*D6, "--recompute", "block", "--batch", 1, "--grad-accum", 16, "--zero", zero, *more)["totals"]["total"]
                for zero, more in (("1", ()), ("2", ("--by-block",))))
    budget = (one + two) // 2
    assert two < budget < one
    chosen = train.plan(*D6, "--memory", f"{budget}B")
    assert chosen["ranks"]["zero"] in "23" and "--offload" not in chosen["choice"][0]["placements"]
    assert "--offload" in train.plan(*D6, "--zero", "1", "--memory", f"{budget}B")["choice"][0]["placements"]
    whole = train.plan(*D6, "--zero", "0", "--memory", "1000GB")
    assert whole["ranks"]["zero"] == "0" and "--zero" not in whole["choice"][0]["placements"]


def test_auto_leaves_room_for_the_largest(train, work):
    """--batch auto and --seq-len auto take --zero 2 if more fits with it."""
    for options, key in ((("--model", "d6", "--seq-len", 256, "--batch", "auto"), "batch"),
                         (("--model", "model", "--batch", 1, "--seq-len", "auto"), "seq_len")):
        def plan(*more):
            return json.loads(train(*options, "--devices", 2, *more, "--plan", "json", cwd=work).stdout)
        least = plan("--batch", 1, "--seq-len", 64)["totals"]["total"]
        budget = ("--memory", f"{least + 20 * MIB}B") if key == "batch" else ("--memory", f"{least + 2 * MIB}B")
        chosen, fixed = plan(*budget), plan(*budget, "--zero", "1")
        assert chosen["totals"]["total"] <= int(budget[1][:-1]) and chosen[key] >= fixed[key] >= 1
        assert chosen["ranks"]["zero"] == "2" or chosen[key] == fixed[key]


def test_without_zero_it_is_the_first_that_fits(train, tmp_path):
    """What is free decides, in plans and runs: a cgroup between what two of them take. The losses are the same."""
    base = ("--model", "d6", "--batch", 1, "--seq-len", 256, "--devices", 2, "--data", "dev/data/tinyshakespeare.txt")
    totals = {zero: train.plan(*base, "--threads", 2, "--zero", zero)["totals"]["total"] for zero in "123"}
    assert totals["1"] > totals["2"] > totals["3"]
    for larger, smaller in ("12", "23"):
        with cgroup(int((totals[larger] + totals[smaller]) / 0.95)) as folder:
            result = run(train, *base, "--plan", "json", inside=folder)
        assert json.loads(result.stdout)["ranks"]["zero"] == smaller
    with cgroup(int((totals["1"] + totals["3"]) / 0.95)) as folder:
        result = run(train, *base, "--steps", 2, "--log", tmp_path / "chosen", inside=folder)
    assert result.returncode == 0 and re.search(rb"each of 2 devices, --zero [23]$", result.stdout, re.M), result
    train(*base, "--steps", 2, "--zero", 1, "--log", tmp_path / "given")
    chosen, given = ([line["loss"] for line in read_log(tmp_path / name) if "loss" in line] for name in ("chosen", "given"))
    assert chosen == given and len(chosen) == 2


def test_too_little_memory_is_one_line(train):
    line = error_line(train, *D6, "--plan", "--memory", "20MiB")
    assert "the least that this takes is" in line and "--zero" in line


def test_the_least_that_the_given_options_take_is_exact(train):
    """Also if none of the ways to share fits and nothing else may be chosen; it was an estimate then, without settings."""
    placed = ("--offload", "weights=device,gradients=device,state=device,inputs=device", "--prefetch", 1)
    line = error_line(train, *D6, "--plan", *placed, "--sample", "tokens=0", "--memory", "20MiB")
    said = re.search(r"the least that this takes is ([\d.]+) MiB \(--recompute [a-z].* --zero [123]\)\. The largest part of that, [\d.]+ MiB, is for "
                     r"[a-z ]+\. Less is needed with .*more --devices or a smaller --model\.", line)
    assert said, line
    budget = float(said[1])
    chosen = train.plan(*D6, *placed, "--sample", "tokens=0", "--memory", f"{budget + 0.1:.1f}MiB")
    assert 0.98 * budget <= chosen["totals"]["total"] / MIB <= budget + 0.1
    assert "the least" in error_line(train, *D6, "--plan", *placed, "--sample", "tokens=0", "--memory", f"{0.95 * budget:.1f}MiB")


@pytest.mark.parametrize("options", [("--memory",), ("--batch", "auto"), ("--seq-len", "auto", "--batch", 1)],
                         ids=lambda options: options[0])
def test_all_ranks_make_the_choice_of_the_first(train, work, tmp_path, options):
    """The losses are those of the same options when they are given, and a save has these."""
    base = ("--model", work / "tied", "--data", work / "data.bin", "--devices", 2, "--seq-len", 32, "--steps", 2, "--sample", "tokens=0")
    if options[0] == "--memory":
        most = train.plan(*base, "--memory", "1000GB")["totals"]["total"]
        options = (options[0], f"{most - MIB}B")
    printed = train(*base, *options, "--log", tmp_path / "a", "--out", tmp_path / "out").stdout.decode()
    said = next(line for line in printed.splitlines() if line.startswith(options[0]))
    if options[0] == "--memory":
        given = said.split(": ")[1].split()
        assert "--zero" in given and float(re.search(r"([\d.]+)  in all", printed)[1]) <= most / MIB - 1
    else:
        number = re.search(r"auto: (\d+)", said)[1]
        given = (options[0], number, *options[2:])
    train(*base, *given, "--log", tmp_path / "b")
    a, b = ([line["loss"] for line in read_log(tmp_path / name) if "loss" in line] for name in "ab")
    assert a == b and len(a) == 2
    state = (tmp_path / "out" / "latest" / "trainer_state.json").read_text()
    assert "--memory" not in state and '"auto"' not in state and "--zero" not in state
    train("--resume", tmp_path / "out", "--steps", 3, "--devices", 2)


def test_ranks_share_what_a_machine_has(train, work, tmp_path):
    """A budget for each of two ranks, half of what there is: less than that is left when they have started."""
    base = ("--model", work / "model", "--data", work / "data.bin", "--devices", 2, "--seq-len", 256, "--batch", 16, "--steps", 2)
    each = int(0.9 * train.plan(*base, "--threads", 2, "--memory", "1000GB")["totals"]["total"])
    with cgroup(2 * each) as folder:
        result = run(train, *base, "--memory", f"{each}B", inside=folder)
    assert result.returncode == 0, result.stderr
    assert re.search(rb"of which \d+ MiB are left \((.*shared by 2 ranks|what rank 1 has)\)", result.stdout)
    assert b"step     2/2" in result.stdout


# ---- what is sent, and how long that takes

@pytest.mark.parametrize("options", [("--zero", "0"), ("--zero", "1"), ("--zero", "2"), ("--zero", "1", "--grad-accum", "8"),
                                     ("--zero", "0", "--grad-accum", "6"), ("--zero", "2", "--grad-accum", "6", "--by-block"),
                                     ("--zero", "1", "--offload", "gradients=disk", "--grad-accum", "6"),
                                     ("--by-block", "--update-in-backward"), ("--advanced", "clip=block"), ("--train", "lora")],
                         ids=" ".join)
def test_the_estimate_counts_what_is_sent(train, work, options):
    """All bytes of a step, once, at the link's rate; and these are the bytes that ranks send."""
    options = ("--model", "model", "--devices", 2, "--batch", 2, "--seq-len", 24, *options)
    plan = json.loads(train(*options, "--plan", "json", cwd=work).stdout)
    ranks = plan["ranks"]
    assert list(ranks["sent"]) == ["gradients", "weights", "sums"] and sum(ranks["sent"].values()) == ranks["sent_bytes"]
    assert (ranks["sent"]["weights"] == 0) == (ranks["zero"] == "0")
    assert ranks["exchange_seconds"] == pytest.approx(ranks["sent_bytes"] / ranks["link"]["bytes_per_second"])
    assert ranks["waited_seconds"] == pytest.approx(spent(plan, "exchange")) and ranks["waited_seconds"] <= ranks["exchange_seconds"]
    bench = json.loads(train(*options, "--bench", "json", "--steps", 1, "--warmup", 0, cwd=work).stdout)
    assert bench["links"]["to_ranks"]["bytes"] == ranks["sent_bytes"]


def test_more_micro_batches_hide_no_less(train):
    """The time of a step grows by computing alone."""
    few, many = (train.plan(*D6, "--grad-accum", n) for n in (8, 24))
    assert few["ranks"] == many["ranks"]
    micro_batch = (few["estimated_seconds"] - train.plan(*D6)["estimated_seconds"])
    assert many["estimated_seconds"] - few["estimated_seconds"] == pytest.approx(4 * micro_batch, rel=0.02)


def test_machines_and_their_network(train):
    """Each slice crosses the network once, from the machine that has summed it to the one that needs it. In bf16 the sums of a
    machine have 4 bytes, and what its ranks send each other 2."""
    one = train.plan(*D6)["ranks"]
    assert one["machines"] == 1 and "network" not in one and one["link"] == {"bytes_per_second": 2e9, "of": "nominal"}
    for rate, bytes_per_second in (("1Gbit/s", 125e6), ("0.5GB/s", 5e8), ("1GiB/s", 2**30), ("400Gbit/s", 50e9)):
        two = train.plan(*D6, "--machines", 2, "--network", rate)
        sent, network = two["ranks"]["sent"], two["ranks"]["network"]
        assert network["bytes_per_second"] == bytes_per_second and network["of"] == "--network"
        of_sums = 4 / 8 if train.precision == "bf16" else 1 / 3
        assert sent["gradients"] == pytest.approx(one["sent"]["gradients"] * (8 / 6 if train.precision == "bf16" else 1), rel=1e-3)
        assert sent["weights"] == pytest.approx(one["sent"]["weights"], rel=1e-3)
        far = sent["gradients"] * of_sums + (sent["weights"] + sent["sums"]) / 3
        # Its two ranks share the network. The last slices are a little shorter.
        assert network["sent_by_a_machine"] == pytest.approx(2 * far, rel=0.03)
        far = network["sent_by_a_machine"] / 2
        both = [(sum(sent.values()) - far) / 2e9, 2 * far / bytes_per_second]
        assert two["ranks"]["exchange_seconds"] == pytest.approx(sum(both), rel=1e-6)
        assert two["ranks"]["waited_seconds"] == pytest.approx(spent(two, "exchange"))
    alone = train.plan(*D6, "--machines", 4, "--network", "1Gbit/s")["ranks"]  # ranks that are alone send to each other directly
    assert alone["sent"] == one["sent"] and alone["network"]["sent_by_a_machine"] == alone["sent_bytes"]
    slow = train.plan(*D6, "--machines", 4, "--network", "10Mbit/s")
    assert {p["bound_by"] for p in slow["phases"] if p["name"] in ("backward", "update")} == {"exchange"}
    assert slow["ranks"]["waited_seconds"] > 0.9 * slow["ranks"]["exchange_seconds"]
    assert train.plan(*D6, "--machines", 2)["ranks"]["network"]["of"] == "nominal"
    table = train(*D6, "--machines", 2, "--network", "1Gbit/s", "--plan").stdout.decode()
    assert re.search(r"each device sends [\d.]+ MB in a step, and receives as much: gradients [\d.]+, weights [\d.]+, sums", table)
    assert re.search(r"(3|4)\d% of it leaves the machine, whose 2 devices share a network of 0.125 GB/s", table) and "of which a step waits" in table


@pytest.mark.parametrize("options, said", [
    (("--machines", 2), "add --devices N"),
    (("--network", "1GB/s"), "add --devices N"),
    (("--devices", 4, "--machines", 3), "a number that divides them"),
    (("--devices", 4, "--machines", 0), "0 is not"),
    (("--devices", 4, "--machines", 8), "a number that divides them"),
    *((("--devices", 4, "--machines", 2, "--network", rate), "50GB/s or 100Gbit/s")
      for rate in ("fast", "50", "50GB", "100Gb/s", "100gb/s", "0GB/s", "-1GB/s", "nanGB/s", "1e99GB/s", "GB/s", "50GB/s/s")),
], ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "")
def test_mistakes_are_one_line(train, options, said):
    assert said in error_line(train, "--model", "d2", "--plan", *options)


def test_machines_are_of_plans(train, tmp_path):
    assert "is for --plan" in error_line(train, "--model", "d2", "--devices", 4, "--machines", 2)


def test_measured_rates_between_ranks(train, tmp_path):
    """A file without them leaves the nominal rate, and the plan says so."""
    def ranks(rates, *more):
        return train.plan(*D6, "--threads", THREADS, "--rates", write(tmp_path / "rates.json", rates), *more)["ranks"]

    rates = rates_of(train)
    assert ranks(rates)["link"] == {"bytes_per_second": 2e9, "of": "nominal"}
    rates["transfers"]["to_ranks"] = 5e9
    measured = ranks(rates)
    assert measured["link"] == {"bytes_per_second": 5e9, "of": "measured"}
    assert measured["exchange_seconds"] == pytest.approx(measured["sent_bytes"] / 5e9)
    rates["network"] = 1e8
    assert "network" not in ranks(rates)
    assert ranks(rates, "--machines", 2)["network"]["bytes_per_second"] == 1e8
    assert ranks(rates, "--machines", 2, "--network", "1GB/s")["network"]["bytes_per_second"] == 1e9
    for key, value in (("network", 0), ("network", "fast"), ("transfers", rates["transfers"] | {"to_ranks": -1})):
        write(tmp_path / "rates.json", rates | {key: value})
        assert "--calibrate" in error_line(train, *D6, "--threads", THREADS, "--plan", "--rates", tmp_path / "rates.json")


@pytest.mark.more
def test_calibration_measures_the_link(train, tmp_path):
    path = tmp_path / "rates.json"
    train("--devices", 2, "--threads", 1, "--calibrate", path)
    rates = json.loads(path.read_text())
    assert 1e8 < rates["transfers"]["to_ranks"] < 1e12 and "network" not in rates
    assert train.plan(*D6, "--threads", 1, "--rates", path)["ranks"]["link"]["of"] == "measured"


# ---- what is measured

def test_bench_says_where_the_time_of_each_rank_goes(train, work):
    options = ("--model", "model", "--devices", 3, "--batch", 4, "--seq-len", 64, "--steps", 3)
    bench = json.loads(train(*options, "--bench", "json", cwd=work).stdout)
    assert [rank["rank"] for rank in bench["ranks"]] == [0, 1, 2]
    parts = ("computing_ms", "exchange_hidden_ms", "exchange_not_hidden_ms", "waiting_ms")
    for rank in bench["ranks"]:
        assert set(rank) == {"rank", *parts} and all(rank[part] >= 0 for part in parts)
        assert rank["exchange_hidden_ms"] + rank["exchange_not_hidden_ms"] > 0
    first = bench["ranks"][0]
    assert sum(first[part] for part in parts if part != "exchange_hidden_ms") == pytest.approx(bench["step_ms"]["mean"])
    waited = next(line for line in bench["waits"] if line["place"] == "all")["ranks_ms"]
    assert first["exchange_not_hidden_ms"] + first["waiting_ms"] == pytest.approx(waited, rel=0.05, abs=0.1)
    table = train(*options, "--bench", cwd=work).stdout.decode()
    assert len(re.findall(r"^rank \d( +[\d.]+){4}$", table, re.M)) == 3


def test_operations_of_several_devices_are_measured(train, work):
    """Those that the step waits for; sums of gradients go on beside them."""
    printed = train("--model", "model", "--devices", 2, "--batch", 2, "--seq-len", 32, "--steps", 2, "--bench", "ops", cwd=work).stdout
    assert b"matmul" in printed and b"sum_ranks" in printed


def test_a_step_says_how_long_it_waited(train, work):
    printed = train("--model", "model", "--data", "data.bin", "--devices", 2, "--seq-len", 32, "--steps", 2, "--sample", "tokens=0", cwd=work).stdout
    assert len(re.findall(rb"^step .* \| waited [\d.]+% \|", printed, re.M)) == 2


@pytest.mark.parametrize("more", [(), ("--grad-accum", "6"), ("--zero", "2")], ids=" ".join)
def test_the_timeline_has_the_exchange(train, work, tmp_path, more):
    """In that of a plan and of a run: gradients from one block's backward to the next, then weights."""
    options = ("--model", "model", "--data", "data.bin", "--devices", 2, "--seq-len", 32, "--steps", 1, "--sample", "tokens=0", *more)
    planned = json.loads(train(*options, "--plan", "json", "--timeline", tmp_path / "a", cwd=work).stdout)
    train(*options, "--timeline", tmp_path / "b", cwd=work)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    timeline = json.loads((tmp_path / "a").read_text())
    bars = [bar for bar in timeline["transfers"] if bar["way"] == "to_ranks"]
    for content, sent in planned["ranks"]["sent"].items():
        # Weights are gathered beside the first micro-batch of the next step; a timeline shows the last one.
        shown = 0 if content == "weights" and "--grad-accum" in more else sent
        assert sum(bar["bytes"] for bar in bars if bar["content"] == content) == shown
    places = [event["range"] for event in timeline["operations"]]
    beside = [bar for bar in bars if bar["range"].startswith("backward block")]
    assert len(beside) == 3
    for bar in beside[:-1]:
        layer = int(bar["range"].split()[2])
        assert int(bar["ends"]) > bar["begins"] and places[int(bar["ends"]) - 1].startswith(f"backward block {layer - 1}")
