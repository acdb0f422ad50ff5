"""The binary for a GPU on a machine without one: it plans, and says in one line that nothing answers."""

import json
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARIES = sorted(ROOT.glob("build/cuda-*/train"))


def has_gpu():
    return shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout


@pytest.mark.skipif(not BINARIES, reason="no CUDA build")
@pytest.mark.parametrize("binary", BINARIES, ids=lambda path: path.parent.name)
class TestWithoutDevice:
    def test_plan_needs_no_device(self, binary):
        ran = subprocess.run([binary, "--plan", "--json", "--model", "d12", "--batch", "4", "--seq-len", "1024"],
                             capture_output=True, text=True, timeout=60)
        plan = json.loads(ran.stdout)
        assert ran.returncode == 0 and plan["device"] == "cuda" and plan["parameters"] == 124439808
        assert plan["totals"]["workspace"] >= 32 << 20  # cuBLASLt's is in the plan

    @pytest.mark.skipif(bool(has_gpu()), reason="a GPU answers")
    def test_training_says_how_to_build_for_the_cpu(self, binary):
        ran = subprocess.run([binary, "--steps", "1"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 2 and ran.stderr.count("\n") == 1
        assert ran.stderr.startswith("train: ") and "make DEVICE=cpu" in ran.stderr
