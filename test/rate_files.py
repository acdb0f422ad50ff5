"""Shared by tests: files with a device's rates, and what a plan predicts from them."""

import json
import re

import pytest

THREADS = 2
WAYS = ["disk_read", "disk_write", "from_host", "to_host", "host_update"]


def device_name():
    with open("/proc/cpuinfo") as file:
        found = re.search(r"model name\s*: (.*)", file.read())
    return found.group(1) if found else ""


def rates_of(train, products=1e11, attention=1e10, passes=1e10, transfers=1e9, beside=1):
    """A device that is equally fast at every size."""
    if train.device != "cpu":
        pytest.skip("the name of the device is the driver's")
    grid = dict.fromkeys("mnk", [16, 4096]) | {"flops_per_second": [products] * 8}
    return {"rates": 2, "device": "cpu", "name": device_name(), "precision": train.precision, "threads": THREADS,
            "products": {form: dict(grid) for form in ("NN", "NT", "TN")},
            "operations": {"copy": {"sizes": [1e3, 1e9], "per_second": [passes] * 2}} | {
                f"attention_{way} {size}": {"sizes": [64], "per_second": [attention]}
                for way in ("forward", "backward") for size in (64, 128)},
            "transfers": dict.fromkeys(WAYS, transfers), "computing_beside": dict.fromkeys(WAYS[:2], beside)}


def write(path, rates):
    path.write_text(rates if isinstance(rates, str) else json.dumps(rates))
    return path


def spent(plan, cost):
    return sum(phase[cost] for phase in plan["phases"])
