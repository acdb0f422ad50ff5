"""The CUDA build's kernels without a GPU: the PTX of their tests runs on a GPU that test/gpu emulates, and the emulator finds
faults that are planted. test_emulated.py runs the trainer there."""

import re

import gpu_predicted
import pytest
from conftest import MORE
from emulated_runs import BUILD, FAULT, play

pytestmark = pytest.mark.skipif(not (BUILD / "faults").exists(), reason="no CUDA Toolkit")


# --- Kernels.

# Hopper's own code runs on the H100, everything else on the A100; each has its own PTX. Attention tests that
# take minutes, and larger shapes, are left to make test-emulated. Most forms in fp32 (Attention/0) are left to make test-more.
ATTENTION = {"A100": "-Attention/0.*Random*:Attention/0.*Documents:Attention/0.*Queries*:Attention/*Costs*:Attention/*KeysInPieces" +
                     ("" if MORE else ":Attention/0.*InEveryForm"),
             "H100": "HopperAttention.*"}


KERNEL_TESTS = ["attention", "matmul", "kernels", "family_kernels", "quantized", "quantized_bf16", "optimizer", "wide_sum", "stream"]


# make test runs small shapes, and on the H100 only what has code of its own for it.
@pytest.mark.parametrize("name, gpu, seed", [(name, "A100", 1) for name in KERNEL_TESTS] +
                         [(name, "H100", 2) for name in KERNEL_TESTS if MORE or name in ("attention", "matmul")])
def test_kernel_tests(name, gpu, seed):
    chosen = ATTENTION[gpu] if name == "attention" else "*"
    small = {} if MORE and name != "attention" else {"SMALL_SHAPES": "1"}
    ran = play(BUILD / f"test_{name}", "--gtest_brief=1", f"--gtest_filter={chosen}", gpu=gpu, seed=seed, **small)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "PASSED" in ran.stdout


def test_attention_fills_gpus_of_little_shared_memory(tmp_path):
    """A 5090's multiprocessor holds 8 warps of each plain kernel, for heads of 64 and 128."""
    counters = tmp_path / "counters.txt"
    ran = play(BUILD / "test_attention", "--gtest_brief=1", "--gtest_filter=Attention/1.MatchesTheDefinition",
               gpu="5090", SMALL_SHAPES="1", GPU_COUNTERS=str(counters))
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    plain = {name: k for name, k in gpu_predicted.read_counters(counters.read_text()).items()
             if re.search(r"attention_(forward|backward_\w+)_kernelI13__nv_bfloat16Li(64|128)ELb1E", name)}
    warps = {name: (100 << 10) // (k["shared_bytes"] + 1024) * k["threads"] // 32 for name, k in plain.items()}
    assert len(warps) == 6 and set(warps.values()) == {8}, warps


# --- The emulator: its message for each planted fault. Faults without a message show in the result.

FAULTS = {
    "syncwarp": "race in shared memory",
    "syncthreads": "(race in shared memory|nobody wrote)",
    "reused_buffer": "race in shared memory",
    "barrier_in_a_branch": "nobody can go on",
    "shuffle_of_some": "a lane that does not take part",
    "blocks_share": "race in global memory",
    "never_written": "nobody wrote",
    "past_the_end": "into an allocation of 128",
    "vector_load": "the result is wrong",
    "copy_not_waited_for": "before the copy to it was waited for",
    "shared_not_opted_in": "dynamic shared memory",
    "not_transposed": "the result is wrong",
    "fragments_swapped": "the result is wrong",
    "mbarrier_phase": "(before the copy to it was waited for|nobody wrote)",
    "wgmma_fence": "no wgmma.fence",
    "proxy_fence": "no fence.proxy.async",
    "barrier_fence": "no fence since mbarrier.init",
    "registers_not_given_back": "registers that nobody gives back",
    "registers_beyond_the_pool": "registers that nobody gives back",
    "registers_of_one_warp": "registers that nobody gives back",
    "wgmma_wait": "a wgmma that was not waited for",
    "capture_sync": "while a stream is captured",
    "capture_malloc": "while a stream is captured",
    "capture_default_stream": "on the default stream",
    "stale_parameter": "in no allocation",
    "pinned_source": "was changed while it was copied",
    "event_wait": "race between streams",
    "freed": "in no allocation",
    "host_pointer": "in no allocation",
    "bias_type": "refused",
    "leading_dimension": "refused",
    "workspace": "workspace",
    "other_product": "another product",
    "operand_alignment": "operand A",
}
ON_HOPPER = {"mbarrier_phase", "wgmma_fence", "proxy_fence", "barrier_fence", "wgmma_wait", "registers_not_given_back",
             "registers_beyond_the_pool", "registers_of_one_warp"}


def test_all_faults_are_here():
    assert set(play(BUILD / "faults").stdout.split()) == set(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(name):
    gpu = "H100" if name in ON_HOPPER else "A100"
    for seed in range(1, 6 if MORE else 3):
        right = play(BUILD / "faults", name, "right", gpu=gpu, seed=seed)
        assert right.returncode == 0, right.stderr
        wrong = play(BUILD / "faults", name, "wrong", gpu=gpu, seed=seed)
        assert wrong.returncode in (1, 3, FAULT) and wrong.returncode != 0
        assert re.search(FAULTS[name], wrong.stderr), wrong.stderr


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_instructions_are_those_of_the_ptx_isa(gpu):
    ran = play(BUILD / "instructions", gpu=gpu)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[0]) > (28000 if gpu == "H100" else 14000)
