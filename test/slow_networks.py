"""What a step takes over limited networks, between machines that are simulated on this one: as the plan says, and hidden behind
computing. `make test-networks` runs it, by itself, because it measures times."""

import json
import pathlib

import pytest
from machines import Networked, need_machines, need_networks

TEXT = pathlib.Path("dev/data/tinyshakespeare.txt").resolve()
STEP = ("--data", TEXT, "--seq-len", 128, "--threads", 1, "--sample", "tokens=0")


@pytest.fixture
def networked():
    need_machines()
    need_networks()
    return Networked


@pytest.mark.parametrize("machines, rates", [(2, ("200mbit", "600mbit", "2gbit")), (3, ("600mbit",)), (4, ("600mbit",))],
                         ids=["2", "3", "4"])
def test_predicted_steps_over_limited_links(train_fp32, tmp_path, networked, machines, rates):
    """Within 15% of what steps take. With more than two machines, their ranks share this one's cores, in the calibration as in the
    steps."""
    step = (*STEP, "--model", "d6", "--batch", 4)
    with networked(tmp_path, machines) as network:
        for rate in rates:
            network.limit(rate)
            network.run(train_fp32, "--threads", 1, "--calibrate", f"{rate}.json", cwd=tmp_path)
            for zero in (1, 2, 3):
                plan = train_fp32.plan(*step, "--devices", machines, "--machines", machines, "--zero", zero, "--rates", tmp_path / f"{rate}.json")
                bench = json.loads(network.run(train_fp32, *step, "--zero", zero, "--bench", "json", "--steps", 5, cwd=tmp_path))
                assert bench["step_ms"]["median"] == pytest.approx(1e3 * plan["estimated_seconds"], rel=0.15), (rate, zero)


@pytest.mark.parametrize("zero", [1, 2])
def test_a_network_that_takes_half_as_long_as_computing(train_fp32, tmp_path, networked, zero):
    """At most a tenth of a step of GPT-2 124M's shape waits for the exchange. The gradients of the first block and its weights cannot be
    hidden: with 12 blocks they are 4% of a step. With d6 they are 8%, and the test would measure how much two cores differ in speed."""
    step = (*STEP, "--model", "d12", "--batch", 8, "--zero", zero)
    with networked(tmp_path, 2) as network:
        network.limit("1gbit")
        bench = json.loads(network.run(train_fp32, *step, "--bench", "json", cwd=tmp_path))
        first = bench["ranks"][0]
        computing = first["computing_ms"]
        sent = bench["links"]["to_machines"]["bytes"]
        rate = 8e-6 * sent / (0.5 * computing / 1e3)  # Mbit/s
        network.limit(f"{rate:.0f}mbit")
        first = json.loads(network.run(train_fp32, *step, "--bench", "json", cwd=tmp_path))["ranks"][0]
        hidden, not_hidden = first["exchange_hidden_ms"], first["exchange_not_hidden_ms"]
        assert hidden + not_hidden > 0.4 * computing
        assert not_hidden < 0.1 * sum(first[part] for part in ("computing_ms", "exchange_not_hidden_ms", "waiting_ms"))
