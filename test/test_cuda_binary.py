"""The binary for a GPU on a machine without one: it plans, reports in one line that no GPU answers, and its
kernels consist of the instructions that they were written for."""

import collections
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from trainer_runs import ROOT

BINARIES = sorted(ROOT.glob("build/cuda-*/train"))


def has_gpu():
    return shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout


@pytest.mark.skipif(not BINARIES, reason="no CUDA build")
@pytest.mark.parametrize("binary", BINARIES, ids=lambda path: path.parent.name)
class TestWithoutDevice:
    def test_plan_needs_no_device(self, binary):
        ran = subprocess.run([binary, "--plan", "json", "--model", "d12", "--batch", "4", "--seq-len", "1024"],
                             capture_output=True, text=True, timeout=60)
        plan = json.loads(ran.stdout)
        assert ran.returncode == 0 and plan["device"] == "cuda" and plan["parameters"] == 124439808
        assert plan["totals"]["workspace"] >= 32 << 20  # cuBLASLt's workspace is in the plan
        context = plan["totals"]["process"] - (25 << 20)  # without a GPU, that of an A100 is assumed
        assert context > 0 if has_gpu() else context == 3 * 108 << 20

    def test_the_libraries_are_found(self, binary):
        """Also where the loader does not look by itself."""
        said = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True).stdout
        [folder] = re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", said)
        assert list(pathlib.Path(folder).glob("libcublasLt.so.*"))

    @pytest.mark.skipif(bool(has_gpu()), reason="a GPU answers")
    def test_training_says_how_to_build_for_the_cpu(self, binary):
        ran = subprocess.run([binary, "--steps", "1"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 2 and ran.stderr.count("\n") == 1
        assert ran.stderr.startswith("train: ") and "make DEVICE=cpu" in ran.stderr


NVCC = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
# A toolkit of CUDA 12.4, as far as the driver's functions are concerned: those are requested without a
# version.
CUDA_12_4 = """
#include <cuda_runtime.h>
#undef CUDART_VERSION
#define CUDART_VERSION 12040
#define cudaGetDriverEntryPointByVersion not_before_12_5
#include "llmc/hopper.cuh"
"""


def test_lists_that_cuda_12_4_can_deduce():
    """Its front end cannot deduce the type of a loop's list if only the first element names one."""
    sources = [ROOT / "train_gpt.cu", *ROOT.glob("llmc/*.*h"), *ROOT.glob("test/*.cpp")]
    second = [(path.name, name) for path in sources
              for name in re.findall(r"for \([^;{}()]*:\s*\{std::(?:pair|tuple)[{(][^{}]*[})],\s*([\w:]*)", path.read_text())]
    assert second and all(name.startswith("std::") for _, name in second), second


@pytest.mark.skipif(not NVCC, reason="no nvcc")
def test_functions_of_the_driver_are_found_before_cuda_12_5(tmp_path):
    (tmp_path / "old.cu").write_text(CUDA_12_4)
    ran = subprocess.run([NVCC, "-std=c++20", f"-I{ROOT}", "-arch=sm_80", "-Wno-deprecated-declarations", "-cuda",
                          "old.cu"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


BF16 = ROOT / "build/cuda-bf16/train"
# The minimum number of 128-bit loads and stores of a kernel: one for each array that it reads or writes in
# vectors, and two if 8 elements are fp32. `8E` in a name is the instantiation for rows of whole vectors. The
# wide sum's terms move in 128 bits, its sums in 64, so that a warp's terms are contiguous: test_emulated.py
# counts the sectors.
MEMORY_BOUND = {
    r"layernorm_forward_kernel\w+Li8ELb0E": (3, 1), r"layernorm_forward_kernel\w+Li8ELb1E": (4, 2),
    r"layernorm_normalize_kernel\w+Li8E": (3, 1), r"layernorm_backward_input_kernel\w+Li8E": (3, 1),
    r"gelu_forward_kernel": (1, 1), r"gelu_backward_kernel": (2, 1), r"residual_forward_kernel": (2, 1),
    r"optimizer_kernel": (6, 5), r"squares_kernel": (1, 0), r"wide_sum_kernel": (2, 0),
    r"cross_entropy_kernel\w+Lb0E": (1, 0), r"cross_entropy_kernel\w+Lb1E": (2, 1),
    r"embedding_forward_kernel\w+Li8ELb0E": (1, 1), r"embedding_forward_kernel\w+Li8ELb1E": (2, 1),
    r"token_embedding_backward_kernel\w+Li8E": (2, 1), r"position_embedding_backward_kernel\w+Li8E": (2, 1),
    r"attention_delta_kernel\w+Li8E": (2, 0),
    r"rmsnorm_forward_kernel\w+Li8ELb0E": (2, 1), r"rmsnorm_forward_kernel\w+Li8ELb1E": (3, 2),
    r"rmsnorm_normalize_kernel\w+Li8E": (2, 1), r"rmsnorm_backward_input_kernel\w+Li8E": (3, 1),
    r"rope_kernel\w+Li8E": (2, 2), r"swiglu_forward_kernel\w+Li8E": (2, 1), r"swiglu_backward_kernel\w+Li8E": (3, 2),
    r"head_norm_forward_kernel\w+Li8E": (3, 2), r"head_norm_backward_kernel\w+Li8E": (6, 1)}
# Registers per thread at the start of the kernels for compute capability 9.0: 65536 divided by the block's
# threads.
HOPPER = {r"hopper_attention_forward_kernelILi64E": 128, r"hopper_attention_forward_kernelILi128E": 168,
          r"hopper_attention_backward_keys_kernel": 168, r"hopper_attention_backward_queries_kernel": 168}
TENSOR_CORES = (r"attention_forward_kernel", r"attention_backward_keys_kernel", r"attention_backward_queries_kernel")


def find_cuobjdump():
    """The toolkit's, or the one in PyTorch's triton."""
    places = [os.path.dirname(os.path.realpath(found)) for name in ("nvcc", "/usr/local/cuda/bin/nvcc")
              if (found := shutil.which(name))]
    triton = importlib.util.find_spec("triton")
    if triton:
        places += [f"{folder}/backends/nvidia/bin" for folder in triton.submodule_search_locations]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ.get("PATH", ""), *places]))


CUOBJDUMP = find_cuobjdump()


def cuobjdump(*arguments):
    ran = subprocess.run([CUOBJDUMP, *arguments, BF16], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def runs(arch, name):
    """False if the kernel is empty: Hopper's own kernels have a body only for sm_90a."""
    return "hopper" not in name or arch == "sm_90a"


def instructions(sass):
    """{(architecture, kernel): its instructions, in order}."""
    found, arch, names = {}, "", []
    for line in sass.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            arch = match.group(1)
        elif match := re.search(r"Function : (\w+)", line):
            names = found[arch, match.group(1)] = []
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", line):
            names.append(match.group(1))
    return found


@pytest.fixture(scope="module")
def sequences():
    found = instructions(cuobjdump("-sass"))
    assert all(len(names) > 10 for names in found.values())  # the smallest kernel sets one number
    return found


@pytest.fixture(scope="module")
def kernels(sequences):
    """{(architecture, kernel): how often it has each instruction}."""
    return {key: collections.Counter(names) for key, names in sequences.items()}


@pytest.mark.skipif(not BF16.exists(), reason="no CUDA build")
@pytest.mark.skipif(not CUOBJDUMP, reason="no cuobjdump")
class TestInstructions:
    @staticmethod
    def count(counts, pattern):
        return sum(times for name, times in counts.items() if re.match(pattern, name))

    def those(self, kernels, name):
        """The kernels of this name, which every architecture must have."""
        found = {key: counts for key, counts in kernels.items() if re.match(rf"_Z\d+{name}", key[1])}
        assert {arch for arch, _ in found} == {arch for arch, _ in kernels}, f"no kernel is named {name}"
        return found

    @pytest.mark.parametrize("name", [*TENSOR_CORES, *(f"wide_{name}" for name in TENSOR_CORES)])
    def test_attention_multiplies_on_tensor_cores(self, kernels, name):
        found = self.those(kernels, name)
        # Forms for each size of heads; backward over queries has one for dropout. Two more for GPUs with little
        # shared memory, of heads of 64 and of 128.
        forms = 3 if name == "attention_backward_queries_kernel" else 2
        # Heads of more than 128 have one form, for up to 256 and for up to 512.
        of_an_arch = 2 if name.startswith("wide_") else forms * 4 + 2
        assert len(found) == of_an_arch * len({arch for arch, _ in kernels})
        for key, counts in found.items():
            for instruction in ("HMMA", "LDSM", r"LDGSTS\..*128"):  # products, fragments, asynchronous copies
                assert self.count(counts, instruction), (key, instruction)

    @pytest.mark.parametrize("name", MEMORY_BOUND)
    def test_memory_is_read_and_written_in_128_bits(self, kernels, name):
        loads, stores = MEMORY_BOUND[name]
        for key, counts in self.those(kernels, name).items():
            assert self.count(counts, r"LDG\..*128") >= loads, key
            assert self.count(counts, r"STG\..*128") >= stores, key
            if "Li8E" in name:  # these have no tails: all bf16 moves in vectors
                assert not self.count(counts, r"(LDG|STG)\..*16"), key

    @pytest.mark.parametrize("name", HOPPER)
    def test_hopper_attention_is_made_of_what_hopper_has(self, kernels, name):
        for (arch, kernel), counts in self.those(kernels, name).items():
            if not runs(arch, kernel):
                assert self.count(counts, "BPT") and not self.count(counts, r"(ST|LD)[GS]|[HQ]G?MMA"), (arch, kernel)
                continue
            # Products by warpgroups, TMA, barriers, registers moved from the producer to the consumers.
            for instruction in ("HGMMA", r"UTMALDG\.3D", r"SYNCS\.PHASECHK", r"SYNCS\.ARRIVE", r"USETMAXREG\.DEALLOC",
                                r"USETMAXREG\.TRY_ALLOC"):
                assert self.count(counts, instruction), (kernel, instruction)
            assert not self.count(counts, "HMMA|ATOM|RED"), kernel
            # Backward loads the rows that stay into registers, once, where heads of 64 leave room for them: 4 parts of 2 tiles.
            assert self.count(counts, "LDSM") == (8 if "backward" in kernel and "ILi64E" in kernel else 0), kernel
            # All bf16 is written in 128 bits. The other stores are floats: sums of chunks' gradients, and
            # what pieces of keys carry, as a lane's two neighbours; in the forward pass lse of its two rows
            # and, with pieces, the largest score and the sum of exponentials.
            stores, wide, pairs = (self.count(counts, name) for name in ("STG", r"STG\..*128", r"STG\..*64"))
            assert wide >= 4 and pairs >= 16 and stores - wide - pairs == (6 if "forward" in kernel else 0), kernel
            usage = cuobjdump("--dump-resource-usage", "-arch", "sm_90a")
            assert re.search(rf"Function {kernel}:\s+REG:{HOPPER[name]} ", usage), kernel

    @pytest.mark.parametrize("name", HOPPER)
    def test_exponentials_are_taken_while_a_product_is_under_way(self, sequences, name):
        """In this order: the wait for the scores, exponentials, the wait for the product that was started
        after them."""
        for (arch, kernel), names in self.those(sequences, name).items():
            events = "".join("W" if "WARPGROUP.DEPBAR" in name else "E" if name == "MUFU.EX2" else "P" if "HGMMA" in name
                             else "" for name in names)
            assert not runs(arch, kernel) or re.search("PWE{32,}W", events), (kernel, events)

    def test_nothing_lies_in_local_memory(self, kernels):
        for key, counts in kernels.items():
            assert not self.count(counts, "LDL|STL"), key
        usage = cuobjdump("--dump-resource-usage")
        stacks = re.findall(r"STACK:(\d+).*LOCAL:(\d+)", usage)
        assert len(stacks) == len(kernels) == usage.count("Function ")
        assert set(stacks) == {("0", "0")}
