#!/usr/bin/env python3
"""What of the CUDA build no test has executed (make gpu-coverage): instructions of its PTX, which GPU_COVERAGE collected,
and lines of host code that no CPU build has, which gcov counted."""

import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Why tests leave something: patterns of kernels' names, and of lines.
KERNEL_REASONS = {
    r"^sm_80 hopper_": "only compute capability 9.0 runs it: here its body is a trap",
    r"copy_kernel": "it measures bandwidth: in whole vectors, and in a calibration, which takes too long here",
    r"quantized_matvec_kernel<.*Q\d_K": "a row is whole blocks of 256, so no half step is left",
    r"optimizer_kernel": "the fourth element of a group of four that is not whole",
    r"column_sums|add_chunks|token_embedding_backward|wide_sum|head_norm_backward":
        "for other numbers of warps or chunks than there are, which the compiler does not know",
    r"add_bias_kernel|scale_columns_kernel": "a division of numbers of more than 32 bits",
    r"hopper_attention_backward": "the way past a loop that always runs",
}
LINE_REASONS = {
    r"cudaGetDeviceProperties": "the name of a GPU in a file of rates: a calibration takes too long here",
    r"cuBLASLt refuses the algorithm of": "a file of algorithms names the library's version and the GPU: only a damaged one",
    r"^~Event|cudaDeviceSynchronize\(\);  // after|cudaFreeHost": "called at the end of a run; gcov loses it where it is inlined",
}


def merged(path):
    """By architecture and kernel, whether each instruction was executed by anybody. A kernel that two programs hold is
    one where the compiler made the same of it."""
    kernels = {}
    with open(path) as file:
        for line in file:
            target, name, executed = line.split()
            key = target, name, len(executed)
            bits = int(executed, 2)
            kernels[key] = kernels.get(key, 0) | bits
    return kernels


def readable(names):
    """C++ names as they are written, without parameters; as they are where there is no c++filt."""
    try:
        said = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return dict(zip(names, names))
    said = said.replace("(anonymous namespace)::", "")
    return {name: re.sub(r"^void |\(.*", "", text) for name, text in zip(names, said.splitlines())}


def reason(reasons, text):
    return next((why for pattern, why in reasons.items() if re.search(pattern, text)), "?")


def sources(preprocessed):
    """{file: the numbers of its lines that a preprocessor's output holds}, of the repository's files."""
    lines, file, number = collections.defaultdict(set), None, 0
    for line in preprocessed.splitlines():
        if marker := re.match(r'# (\d+) "([^"]*)"', line):
            number, file = int(marker[1]), marker[2].removeprefix("./")
            continue
        if line.strip():
            lines[file].add(number)
        number += 1
    return lines


def lines_of_cpu_builds():
    """Those of the fast build and of the faithful one."""
    lines = collections.defaultdict(set)
    for lanes in ([], ["-DSIMT_LANES=32"]):
        command = ["g++", "-E", "-x", "c++", "-std=c++20", "-fopenmp", "-I.", *lanes, "train_gpt.cu"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for file, numbers in sources(text).items():
            lines[file] |= numbers
    return lines


def counted_lines(folder, kernels):
    """{(file, line): how often all programs executed it}, of the trainer's sources; not of kernels, whose bodies on the
    host are stubs."""
    counts = collections.Counter()
    data = sorted(str(path.resolve()) for path in pathlib.Path(folder).glob("*.gcda"))
    text = subprocess.run(["gcov", "--json-format", "--stdout", *data], capture_output=True, text=True, check=True).stdout
    for program in text.splitlines():
        for file in json.loads(program)["files"]:
            name = file["file"].removeprefix(f"{ROOT}/").removeprefix("./")
            if re.fullmatch(r"llmc/[\w.]+|train_gpt\.cu", name):
                stubs = [range(f["start_line"], f["end_line"] + 1) for f in file["functions"]
                         if re.sub(r"L(?=\d)", "", f["name"]) in kernels]  # L: of one file, which PTX does not say
                for line in file["lines"]:
                    if any(line["line_number"] in stub for stub in stubs):
                        continue
                    counts[name, line["line_number"]] += line["count"]
    return counts


def report_lines(folder, kernels, most):
    """Says which lines of the GPU's alone nobody executed; whether these are too many."""
    cpu = lines_of_cpu_builds()
    counts = {at: count for at, count in counted_lines(folder, kernels).items() if at[1] not in cpu[at[0]]}
    left = sorted(at for at, count in counts.items() if not count)
    for file, number in left:
        text = (ROOT / file).read_text().splitlines()[number - 1].strip()
        print(f"{file}:{number}: {text[:70]:70s}  {reason(LINE_REASONS, text)}")
    share = 100 * len(left) / max(1, len(counts))
    print(f"host: {len(counts)} lines of the GPU's alone, {share:.1f}% never executed")
    return share > most


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("collected", help="the file that GPU_COVERAGE named")
    parser.add_argument("--most", type=float, default=2, help="per cent that may be left; more ends with exit code 1 "
                                                              "(default: %(default)s)")
    parser.add_argument("--list", type=int, default=20, help="kernels to list, those with most left first "
                                                             "(default: %(default)s)")
    parser.add_argument("--host", help="the folder of programs that were built with COVERAGE=1, and of what gcov counted")
    options = parser.parse_args(arguments)
    kernels = merged(options.collected)
    totals = collections.defaultdict(lambda: [0, 0])
    left = []
    for (target, name, count), bits in kernels.items():
        executed = bits.bit_count()
        totals[target][0] += count
        totals[target][1] += count - executed
        left.append((count - executed, count, target, name))
    names = readable(sorted({name for _, name, _ in kernels}))
    for missing, count, target, name in sorted(left, reverse=True)[:options.list]:
        if missing:
            why = reason(KERNEL_REASONS, f"{target} {names[name]}")
            print(f"{missing:7d} of {count:6d}  {target:7s} {names[name]}  {why}")
    failed = bool(options.host) and report_lines(options.host, set(names), options.most)
    for target, (count, missing) in sorted(totals.items()):
        share = 100 * missing / count
        failed |= share > options.most
        print(f"{target}: {count} instructions in {sum(key[0] == target for key in kernels)} kernels, {share:.1f}% never executed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
