"""dev/gpu_compare.py: a bench's figures next to what was predicted for its operations."""

import json

import gpu_compare
import gpu_predicted
import pytest

H100 = "NVIDIA H100 80GB HBM3"
UNIT = {"instructions": 0.001, "tensor_flops": 0, "distinct_sectors": 0.02, "launches": 2, "under_way": 3.0, "hopper": False}
UNITS = {"GPT-2 124M": {"H100": {"gelu_forward": UNIT}}}
BENCH = {"model": "d12", "precision": "bf16", "batch": 64, "seq_len": 1024, "step_ms": {"median": 130.25}, "operations": [
    {"name": "matmul 65536 x 768 x 768 NN bias", "calls": 12, "ms": 4.0, "flops": 12 * 2 * 65536 * 768 * 768, "bytes": 3e9},
    {"name": "matmul 65536 x 768 x 768 TN", "calls": 12, "ms": 2.0, "flops": 12 * 2 * 65536 * 768 * 768, "bytes": 3e9},
    {"name": "gelu_forward", "calls": 12, "ms": 6.0, "flops": 0, "bytes": 9e9},
    {"name": "something_new", "calls": 1, "ms": 0.5, "flops": 0, "bytes": 1e6}]}


def run(folder, *arguments, bench=BENCH, units=UNITS, gpu=H100):
    (folder / "bench.json").write_text(json.dumps(bench))
    (folder / "units.json").write_text(json.dumps(units))
    out = folder / "out.md"
    gpu_compare.main(["--gpu", gpu, "--units", str(folder / "units.json"), "--recorded", str(folder / "bench.json"),
                      "--out", str(out), *arguments])
    return out.read_text()


def rows(text):
    return {cells[0]: cells[1:] for line in text.splitlines() if line.startswith("| ")
            for cells in [[cell.strip() for cell in line.split("|")[1:-1]]]}


def test_measured_beside_predicted(tmp_path, capsys):
    text = run(tmp_path)
    assert capsys.readouterr().out == text and "130.25 ms (median)" in text and H100 in text
    found = rows(text)
    assert list(found) == ["operation", "products", "gelu_forward", "something_new", "all of these"]
    # Two launches per call, and sectors of 32 bytes that are fewer than the bytes of the operation.
    gelu = 1e3 * (9e9 / (3.35e12 * 0.85) + 24 * gpu_predicted.LAUNCH)
    assert found["gelu_forward"] == ["12", "6.000", f"{gelu:.3f}", f"{6 / gelu:.2f}", "memory"]
    assert found["products"][:2] == ["24", "6.000"] and found["products"][-1] == "tensor"
    assert found["something_new"] == ["1", "0.500", "", "", ""]
    assert found["all of these"][1] == "12.500"


def test_an_h200_is_an_h100_with_more_bandwidth(tmp_path):
    slow, fast = (float(rows(run(tmp_path, gpu=gpu))["gelu_forward"][2]) for gpu in (H100, "NVIDIA H200"))
    launches = 1e3 * 24 * gpu_predicted.LAUNCH
    assert (fast - launches) / (slow - launches) == pytest.approx(3.35 / 4.8, rel=2e-3)


def test_a_gpu_of_which_nothing_is_known_is_no_failure(tmp_path, capsys):
    for gpu in ("NVIDIA RTX A1000", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090 D"):
        with pytest.raises(SystemExit) as ended:
            run(tmp_path, gpu=gpu)
        assert ended.value.code == 0 and gpu in capsys.readouterr().out and not (tmp_path / "out.md").exists()
    assert gpu_compare.known_gpu("NVIDIA GeForce RTX 4090")[0] == "4090"
    assert gpu_compare.known_gpu("NVIDIA A100-SXM4-80GB")[0] == "A100"


@pytest.mark.parametrize("change, named", [({"precision": "fp32"}, "fp32"), ({"operations": None}, "--bench ops")])
def test_other_benches_are_refused(tmp_path, capsys, change, named):
    bench = {key: value for key, value in (BENCH | change).items() if value is not None}
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, bench=bench)
    assert ended.value.code == 2 and named in capsys.readouterr().err


def test_a_bench_of_the_trainer(train_bf16, tmp_path, capsys):
    """There are counts for all operations of a GPT-2, except those that only another device has."""
    gpu_compare.main(["--gpu", H100, train_bf16.path, "--bench", "ops,json", "--warmup", "0",
                      "--steps", "1", "--model", "d1", "--batch", "2", "--seq-len", "64", "--chunk-rows", "head=64"])
    found = rows(capsys.readouterr().out)
    assert {"products", "attention_forward", "layernorm_backward", "optimizer_update"} < set(found)
    assert all(float(row[2]) > 0 for name, row in found.items() if name not in ("operation", "gelu_backward"))
