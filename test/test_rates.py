"""Rates: measured rates are read back as they were written, bad files are refused, and predictions follow the
file."""

import copy
import json
import re

import pytest
from model_files import VOCAB
from rate_files import THREADS, rates_of, spent, write
from trainer_runs import error_line, make, running, wait_for_line

USUALLY = "fp32"  # see conftest.py

MODEL = ("--model", "d4", "--batch", 4, "--seq-len", 64, "--chunk-rows", "head=0", "--threads", THREADS)
COSTS = ["products", "attention", "memory passes", "disk", "link", "host", "exchange"]


def phases_of(plan):
    return {phase["name"]: phase for phase in plan["phases"]}


def test_nominal_seconds_are_what_they_were(train):
    """They are the roofline of each operation, so choices by them are the same in every version."""
    plan = train.plan(*MODEL)
    if train.device != "cpu":
        pytest.skip("a GPU has other rates")
    flops, bandwidth = THREADS * (100e9 if train.precision == "fp32" else 180e9), THREADS * 12e9
    expected = sum(max(o["flops"] / flops, o["bytes"] / bandwidth) + 5e-6 * o["calls"] for o in plan["operations"])
    assert plan["rates"] == "nominal" and plan["estimated_seconds"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("options", [(), ("--grad-accum", 3), ("--update-in-backward", "--clip", 0), ("--offload", "inputs=auto"),
                                     ("--offload", "state=disk"), ("--offload", "weights=disk", "--update-in-backward", "--clip", 0)],
                         ids=lambda options: "_".join(map(str, options)) or "plain")
def test_phases_are_the_whole(train, tmp_path, options):
    for more in ((), ("--rates", write(tmp_path / "rates.json", rates_of(train)))):
        plan = train.plan(*MODEL, *options, *more)
        names = ["forward", "head", "backward"] + ["update"] * ("--update-in-backward" not in options)
        assert [phase["name"] for phase in plan["phases"]] == names
        for phase in plan["phases"]:
            assert list(phase) == ["name", "seconds", "bound_by", *COSTS]
            assert phase["seconds"] == pytest.approx(sum(phase[cost] for cost in COSTS))
        assert sum(phase["seconds"] for phase in plan["phases"]) == pytest.approx(plan["estimated_seconds"])
        tokens = plan["batch"] * plan["seq_len"] * plan["grad_accum"]
        assert plan["tokens_per_second"] == pytest.approx(tokens / plan["estimated_seconds"])


def test_seconds_follow_the_file(train, tmp_path):
    """What is twice as fast takes half the time, and the rest takes as long as before."""
    def plan(**rates):
        return train.plan(*MODEL, "--rates", write(tmp_path / "rates.json", rates_of(train, **rates)))

    before = plan()
    for cost, rates in (("products", {"products": 2e11}), ("attention", {"attention": 2e10}),
                        ("memory passes", {"passes": 2e10})):
        after = plan(**rates)
        for other in COSTS:
            expected = spent(before, other) / (2 if other == cost else 1)
            assert spent(after, other) == pytest.approx(expected, rel=1e-6), (cost, other)
    slow = {cost: phases_of(plan(**{key: 1e8}))["backward"]["bound_by"]
            for cost, key in (("products", "products"), ("attention", "attention"), ("memory passes", "passes"))}
    assert slow == {cost: cost for cost in slow}
    assert phases_of(plan(products=1e15))["update"]["bound_by"] == "memory passes"


def test_rates_between_sizes(train, tmp_path):
    """Halfway between the logarithms of two sizes the rate is their geometric mean; outside, it is the
    nearest one."""
    def attention(sizes, per_second):
        rates = rates_of(train)
        for name, curve in rates["operations"].items():
            if name.startswith("attention"):
                curve.update(sizes=sizes, per_second=per_second)
        return spent(train.plan(*MODEL, "--rates", write(tmp_path / "rates.json", rates)), "attention")

    once = attention([64], [1e10])
    assert attention([16, 256], [1e9, 1e11]) == pytest.approx(once)
    assert attention([8, 16, 32], [1e9, 1e8, 1e10]) == pytest.approx(once)
    assert attention([100, 200], [1e10, 1e9]) == pytest.approx(once)

    def products(sizes, per_second):
        rates = rates_of(train)
        for grid in rates["products"].values():
            grid.update(m=sizes, n=sizes, k=sizes, flops_per_second=per_second)
        return spent(train.plan(*MODEL, "--rates", write(tmp_path / "rates.json", rates)), "products")

    once = products([16], [1e11])
    assert products([16, 1e5], [1e11] * 8) == pytest.approx(once)
    assert products([16, 1e5], [1e10] + [1e11] * 7) > once > products([16, 1e5], [1e11] * 7 + [1e12])
    assert products([1e5], [1e11]) > 1000 * once  # a thinner one takes as long as the thinnest


def test_streaming_is_bound_by_the_disk(train, tmp_path):
    """A block takes the longer of computing and moving. A slow disk bounds all phases that read blocks."""
    make(tmp_path / "model", "--family", "llama", "--layers", 6, "--heads", 2, "--channels", 64, "--vocab", VOCAB,
         "--positions", 64, "--dtype", "bf16")
    options = ("--model", tmp_path / "model", "--train", "lora", "--offload", "weights=disk", "--batch", 2, "--seq-len", 32,
               "--threads", THREADS, "--rates")
    slow = train.plan(*options, write(tmp_path / "slow.json", rates_of(train, transfers=1e6)))
    block = slow["outside_device"]["on_disk"] / 6
    for name, blocks in (("forward", 6), ("backward", 5)):  # the last one is still there
        phase = phases_of(slow)[name]
        assert phase["bound_by"] == "disk" and phase["seconds"] == pytest.approx(blocks * block / 1e6, rel=0.3)
    fast = train.plan(*options, write(tmp_path / "fast.json", rates_of(train, transfers=1e12)))
    assert spent(fast, "disk") < 1e-3 * fast["estimated_seconds"] and phases_of(fast)["forward"]["bound_by"] != "disk"
    state = train.plan(*MODEL, "--offload", "state=disk", "--rates", tmp_path / "slow.json")
    # The first slots are filled, and the rest is read and written at the disk's rate.
    update = phases_of(state)["update"]
    assert update["bound_by"] == "disk"
    assert update["seconds"] == pytest.approx(2 * sum(state["outside_device"].values()) / 1e6, rel=0.2)
    text = train(*options, tmp_path / "slow.json", "--plan").stdout.decode()
    assert re.search(r"forward, bound by disk; .*lost to the disk", text), text


def test_a_disk_takes_time_from_computing(train, tmp_path):
    """If computing runs at half speed during a read, it takes longer by half of the read. In the plan and in
    the estimate, this time is the disk's."""
    make(tmp_path / "model", "--family", "llama", "--layers", 6, "--heads", 2, "--channels", 64, "--vocab", VOCAB,
         "--positions", 64)

    def planned(**rates):
        return train.plan("--model", tmp_path / "model", "--train", "lora", "--offload", "weights=disk", "--batch", 2, "--seq-len",
                          64, "--threads", THREADS, "--rates", write(tmp_path / "rates.json", rates_of(train, **rates)))

    alone, beside = planned(transfers=2e10), planned(transfers=2e10, beside=0.5)
    reads = (2 * 6 - 2) * alone["outside_device"]["on_disk"] / 6 / 2e10  # two are still there when backward begins
    hidden = reads - spent(alone, "disk")
    assert hidden > 0.7 * reads
    assert spent(beside, "disk") - spent(alone, "disk") == pytest.approx(hidden / 2, rel=0.02)
    assert beside["estimated_seconds"] - alone["estimated_seconds"] == pytest.approx(hidden / 2, rel=0.02)
    assert spent(beside, "products") == spent(alone, "products")


def test_columns_of_a_wider_matrix_have_its_rate(train, tmp_path):
    """Their rows are as far apart as the whole matrix's."""
    def products(**wide):
        rates = rates_of(train)
        rates["products"]["TN"] |= wide
        plan = train.plan("--model", tmp_path / "model", "--train", "lora", "--batch", 1, "--seq-len", 64, "--threads", THREADS,
                          "--rates", write(tmp_path / "rates.json", rates))
        return {o["name"]: o["seconds"] for o in plan["operations"] if " TN" in o["name"]}

    make(tmp_path / "model", "--family", "llama", "--layers", 2, "--heads", 2, "--channels", 128, "--vocab", 32000, "--positions", 64)
    as_fast = products()
    rows = max(int(name.partition(" TN rows of ")[2].split()[0]) for name in as_fast if " TN rows of " in name)
    slow = products(m=[rows - 1, rows], flops_per_second=[1e11] * 4 + [5e10] * 4)
    wide = {name for name in as_fast if f" TN rows of {rows}" in name}
    assert wide and all(int(name.split()[1]) < rows for name in wide)
    # No less time than this one.
    thinnest = {name: (rows - 1) / max(16, int(name.split()[1])) for name in as_fast}
    for name, seconds in as_fast.items():
        slower = 2 if name in wide or int(name.split()[1]) >= rows else 1
        assert slow[name] == pytest.approx(slower * max(1, thinnest[name]) * seconds), name


def test_moving_takes_time_by_nominal_rates_too(train):
    """One gigabyte per second for a disk, on a CPU."""
    if train.device != "cpu":
        pytest.skip("a GPU has other rates")
    plan = train.plan(*MODEL, "--offload", "state=disk")
    update = phases_of(plan)["update"]
    assert update["bound_by"] == "disk"
    assert update["seconds"] == pytest.approx(2 * plan["outside_device"]["working_file"] / 1e9, rel=0.2)


def test_choices_are_by_the_file(train, tmp_path):
    """--memory: if products are slow, recomputation costs more relative to a larger micro-batch's head."""
    rates_of(train)  # skips on a GPU, where budgets are others too

    def chosen(**rates):
        more = ("--rates", write(tmp_path / "rates.json", rates_of(train, **rates))) if rates else ()
        return train.plan("--model", "d4", "--batch", 8, "--seq-len", 128, "--threads", THREADS, *more, "--memory",
                          "500MiB" if train.precision == "fp32" else "560MiB")

    nominal, again = chosen(), chosen()
    assert nominal["choice"] == again["choice"]
    slow = chosen(passes=1e7)
    assert slow["choice"][0]["seconds"] == pytest.approx(slow["estimated_seconds"], rel=0.01)
    assert slow["estimated_seconds"] > 100 * nominal["estimated_seconds"]


def spoiled(rates, key, value):
    """A copy with another value at a path of keys; None removes it."""
    rates = copy.deepcopy(rates)
    *way, last = key.split("/")
    at = rates
    for name in way:
        at = at[name]
    if isinstance(at, list):
        last = int(last)
    if value is None:
        del at[last]
    else:
        at[last] = value
    return rates


BAD = [0, -1, "fast", [], {}, True, 1e300]


@pytest.mark.parametrize("key", ["products", "products/TN", "products/NN/m", "products/NN/flops_per_second/3",
                                 "operations", "operations/copy", "operations/copy/per_second/0", "operations/copy/sizes/0",
                                 "operations/copy/sizes", "transfers/disk_read", "transfers", "computing_beside/disk_read",
                                 "computing_beside"])
def test_nonsense_is_refused(train, tmp_path, key):
    good = rates_of(train)
    for value in (None, *BAD, *([1.5] if "beside" in key else [])):
        write(tmp_path / "rates.json", spoiled(good, key, value))
        line = error_line(train, *MODEL, "--plan", "--rates", tmp_path / "rates.json")
        assert "rates.json" in line and ("--rates" in line or "--calibrate" in line), (key, value, line)


def test_other_files_are_refused(train, tmp_path):
    good = rates_of(train)
    for key, value in (("device", "toaster"), ("name", "another CPU"), ("precision", "fp8"), ("threads", THREADS + 1),
                       ("threads", None), ("precision", None)):
        write(tmp_path / "rates.json", spoiled(good, key, value))
        line = error_line(train, *MODEL, "--plan", "--rates", tmp_path / "rates.json")
        assert f"measured with another {key}" in line, line
    for text in ("", "{", "[]", "3", '{"rates": 1}', '{"rates": 2}', '{"rates": NaN}', json.dumps(good)[:-40],
                 json.dumps(good).replace("1000000000.0", "NaN"), json.dumps(good).replace("1000000000.0", "1e999")):
        error_line(train, *MODEL, "--plan", "--rates", write(tmp_path / "rates.json", text))
    error_line(train, *MODEL, "--plan", "--rates", tmp_path / "none.json")
    error_line(train, *MODEL, "--plan", "--rates", "")


def test_a_resumed_run_may_be_on_another_machine(train, tmp_path):
    rates = write(tmp_path / "rates.json", rates_of(train))
    options = ("--data", "dev/data/tinyshakespeare.txt", "--sample", "tokens=0", "--out", tmp_path / "out")
    train(*MODEL, *options, "--steps", 1, "--rates", rates)
    rates.write_text("{}")
    train("--resume", tmp_path / "out", "--steps", 2)
    error_line(train, "--resume", tmp_path / "out", "--steps", 3, "--rates", rates)


def test_calibration_stands_alone(train, tmp_path):
    for more in (("--plan",), ("--bench",), ("--model", "d2"), ("--rates", tmp_path / "rates.json")):
        error_line(train, "--calibrate", tmp_path / "new.json", *more)
    error_line(train, "--calibrate", "")
    error_line(train, "--calibrate", tmp_path)
    error_line(train, "--calibrate", tmp_path / "none" / "rates.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.not_played("it times products and kernels until it knows their rates")
def test_calibration(train, tmp_path):
    """The file has a rate of every kind, within what a device can do. Plans use it. It is written completely
    or not at all."""
    path = tmp_path / "rates.json"
    path.write_text('{\n "rates": what was there')  # as such a file begins: other files are not replaced
    with running(train, "--calibrate", path, "--threads", THREADS) as process:
        wait_for_line(process, b"measured .* in .* s, in .* MiB of memory")
        assert process.wait() == 0
    assert [p.name for p in tmp_path.iterdir()] == ["rates.json"]
    rates = json.loads(path.read_text())
    assert rates["precision"] == train.precision and rates["device"] == train.device
    values = [v for p in rates["products"].values() for v in p["flops_per_second"]]
    assert all(1e6 < v < 1e16 for v in values)
    assert {"attention_forward 64", "attention_backward 128", "attention_backward 256", "gelu_forward", "rmsnorm_backward",
            "dequantize nf4", "optimizer_update adamw fp32 fp32 fp32", "rope_forward", "head_norm_backward"} <= set(rates["operations"])
    assert all(1e5 < v < 1e16 for c in rates["operations"].values() for v in c["per_second"])
    plan = train.plan(*MODEL, "--rates", path)
    assert plan["rates"] == str(path) and plan["estimated_seconds"] > 0
    assert train.plan(*MODEL, "--rates", path)["estimated_seconds"] == plan["estimated_seconds"]
