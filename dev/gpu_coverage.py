#!/usr/bin/env python3
"""Reports what no test has executed in the CUDA build (make gpu-coverage): PTX instructions, as collected by
GPU_COVERAGE, and lines of host code that are in no CPU build, as counted by gcov."""

import argparse
import collections
import functools
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Reasons why tests leave something out. The keys are patterns. For kernels they match "sm_80 kernel<...>: the
# kernel's line | lines of functions inlined there"; the lines are empty if the compiler gives none. For the
# host they match lines of code.
KERNEL_REASONS = {
    r"^sm_80 hopper_": "only compute capability 9.0 runs it: here its body is a trap",
    r" copy_kernel<": "it measures bandwidth, tested on an A100 in fp32 and whole vectors; in bf16 a calibration does, which takes too long here",
    r"^sm_90a hopper_attention_forward_kernel<128>: .*(of_lane <= -rest|int of_lane =)":
        "a window begins in the first tile: 128 keys are no fewer than a block's queries",
    r" (add_bias|scale_columns|matmul_tiled|embedding_forward)_kernel<[^:]*: (for_each_vector<.*)?$":
        "a division of numbers of more than 32 bits",
    r"^sm_90a embedding_forward_kernel<.*tokens \? tokens": "embeddings that live elsewhere are tested on an A100",
    r" matmul_tiled_kernel<.*: for \(int64_t k = 0; k < a\.columns| add_chunks_kernel<| position_embedding_backward_kernel<":
        "the way past a loop that always runs",
    r" attention_backward_keys_kernel<.*threadIdx\.x < 2 \* kPassing": "for threads of a block beyond its 128",
    r" head_norm_backward_kernel<.*(: $|partial\[|kBlockWarps|c \+= blockDim|return \{lanes)":
        "sums of heads at a time, of which there are a multiple of eight: what is left over of a loop in fours, and no heads",
    r"\blogf\(": "the logarithm's own way for a NaN and an infinity",
    r" product_kernel<": "a test's own: what is left over of its loops, which are whole",
}
LINE_REASONS = {
    r"^bug\(": "a mistake of the program's own",
    r"cudaGetDeviceProperties": "the name of a GPU in a file of rates: a calibration takes too long here",
    r"cuBLASLt refuses the algorithm of": "a file of algorithms names the library's version and the GPU: only a damaged one",
}


def merged(path):
    """For each architecture and kernel, which instructions any program executed. Kernels of two programs
    count as the same one if the compiler made the same number of instructions of them."""
    kernels = {}
    with open(path) as file:
        for line in file:
            target, name, executed = line.split()
            key = target, name, len(executed)
            bits = int(executed, 2)
            kernels[key] = kernels.get(key, 0) | bits
    return kernels


def readable(names):
    """C++ names in readable form, without parameters. Without c++filt they stay as they are."""
    try:
        said = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return dict(zip(names, names))
    said = said.replace("(anonymous namespace)::", "")
    return {name: re.sub(r"^void |\(.*", "", text) for name, text in zip(names, said.splitlines())}


def reason(reasons, text):
    return next((why for pattern, why in reasons.items() if re.search(pattern, text)), "?")


# The parts of a kernel's text in PTX. A statement is everything that is none of the others.
PTX_TOKEN = re.compile(r"(?P<nothing>\s+|//[^\n]*|\.(reg|shared|pragma)\b[^;]*;|[\w$]+:(?!:))|(?P<brace>[{}])|"
                       r"\.loc\s+(?P<at>\d+ \d+ \d+)(.*inlined_at (?P<caller>\d+ \d+ \d+))?[^\n]*|(?P<statement>[^;]*;)")
MOST_NAMES = 12  # of kernels or lines with the same reason
# Lines in these files are used by every kernel, so they do not tell where in a kernel an instruction is.
PRIMITIVES = r"llmc/(simt|mma|state_formats)\b|llmc/simt_"


def own_path(path):
    return str(path).removeprefix(f"{ROOT}/").removeprefix("./")


def statements(text, begin, files):
    """The source lines of each statement of the kernel whose body is at `begin`: the kernel's own line, then
    those of the functions inlined there, outermost first. Only files of the repository are listed."""
    callers, lines, places, depth = {}, (), [], 0
    for token in iter(PTX_TOKEN.scanner(text, text.index("{", begin)).match, None):
        if token["brace"]:
            depth += 1 if token["brace"] == "{" else -1
            if not depth:
                return places
        elif at := token["at"]:
            callers[at] = token["caller"]
            chain = []
            while at and at not in chain:
                chain.insert(0, at)
                at = callers.get(at)
            parts = [at.split() for at in chain]
            lines = tuple((files[file], int(line)) for file, line, _ in parts if re.match(r"llmc/|train_gpt|test/", files[file]))
        elif token["statement"]:
            places.append(lines)
    return places


def places_of(folder, wanted):
    """For the wanted kernels, {key of merged(): what statements() returns}, from the PTX in a folder's
    programs."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("*")):
        if path.suffix or not path.is_file():
            continue
        for module in re.finditer(rb"\.version [^\0]*?\.target sm_[^\0]*", path.read_bytes()):
            text = module[0].decode()
            target = re.search(r"^\.target (\w+)", text, re.M)[1]
            files = {number: own_path(name) for number, name in re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"', text, re.M)}
            for entry in re.finditer(r"\.entry ([\w$]+)\(", text):
                if (target, entry[1]) not in wanted:
                    continue
                places = statements(text, entry.end(), files)
                found.setdefault((target, entry[1], len(places)), places)
    return found


def sources(preprocessed):
    """{file: the numbers of its lines} in a preprocessor's output."""
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
    """The source lines in the fast CPU build and in the faithful one."""
    lines = collections.defaultdict(set)
    for lanes in ([], ["-DSIMT_LANES=32"]):
        command = ["g++", "-E", "-x", "c++", "-std=c++20", "-fopenmp", "-I.", *lanes, "train_gpt.cu"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for file, numbers in sources(text).items():
            lines[file] |= numbers
    return lines


def counted_lines(folder, kernels):
    """{(file, line): how often all programs together executed it} for the trainer's sources. Kernels are left
    out, because their bodies on the host are stubs."""
    counts = collections.Counter()
    data = sorted(str(path.resolve()) for path in pathlib.Path(folder).glob("*.gcda"))
    text = subprocess.run(["gcov", "--json-format", "--stdout", *data], capture_output=True, text=True, check=True).stdout
    for program in text.splitlines():
        for file in json.loads(program)["files"]:
            name = file["file"].removeprefix(f"{ROOT}/").removeprefix("./")
            if re.fullmatch(r"llmc/[\w.]+|train_gpt\.cu", name):
                stubs = [range(f["start_line"], f["end_line"] + 1) for f in file["functions"]
                         # L marks internal linkage; PTX leaves it out.
                         if re.sub(r"L(?=\d)", "", f["name"]) in kernels]
                for line in file["lines"]:
                    if any(line["line_number"] in stub for stub in stubs):
                        continue
                    counts[name, line["line_number"]] += line["count"]
    return counts


def left_of_host(folder, kernels):
    """The lines that are only in the GPU build and that nobody executed, as rows of main(), and the number of
    lines there."""
    cpu = lines_of_cpu_builds()
    counts = {at: count for at, count in counted_lines(folder, kernels).items() if at[1] not in cpu[at[0]]}
    rows = []
    for file, number in sorted(at for at, count in counts.items() if not count):
        text = source_line(file, number)
        rows.append((1, f"{file}:{number}", text, reason(LINE_REASONS, text)))
    return rows, len(counts)


@functools.cache
def lines_of(file):
    return (ROOT / file).read_text().splitlines()


def source_line(file, number):
    lines = lines_of(file)
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""


def left_of_kernels(kernels, names, folder):
    """The instructions that nobody executed, as rows of main(). Instantiations of a kernel are counted
    together. Rows are grouped by the line of the kernel and that of the inlined function."""
    partly = {key: bits for key, bits in kernels.items() if bits.bit_count() < key[2]}
    places = places_of(folder, {key[:2] for key in partly})
    counts = collections.Counter()
    for (target, name, count), bits in partly.items():
        for i, lines in enumerate(places.get((target, name, count), [()] * count)):
            if bits >> (count - 1 - i) & 1:
                continue
            chain = list(dict.fromkeys(line for n, line in enumerate(lines) if n == 0 or not re.match(PRIMITIVES, line[0])))
            text = " | ".join(source_line(*line) for line in chain)
            why = reason(KERNEL_REASONS, f"{target} {names[name]}: {text}")
            ends = chain[:1] + chain[-1:] if len(chain) > 1 else chain
            counts[re.sub("<.*", "", names[name]), tuple(ends), why] += 1
    return [(count, f"{name} " + " ".join(f"{file}:{line}" for file, line in ends),
             " | ".join(source_line(*line) for line in ends), why) for (name, ends, why), count in counts.most_common()]


def summary(title, rows, everything):
    """Lines of Markdown: how much of everything is left, by reason, and in which kernels or lines."""
    counts, places = collections.Counter(), collections.defaultdict(dict)
    for count, where, _, why in rows:
        counts[why] += count
        places[why][where.split()[0]] = None
    lines = [f"## {title}: {100 * counts.total() / max(1, everything):.2f}% of {everything:,} never executed", ""]
    for why, count in counts.most_common():
        names = list(places[why])
        some = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
        lines.append(f"- {count} ({some}): {why if why != '?' else 'no reason is known'}")
    return [*lines, ""]


def commit():
    said = subprocess.run(["git", "log", "-1", "--format=%h of %cs"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip() or "no commit"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("collected", help="the file that GPU_COVERAGE named")
    parser.add_argument("--most", type=float, default=2, help="per cent that may be left; more ends with exit code 1 "
                                                              "(default: %(default)s)")
    parser.add_argument("--list", type=int, default=20, help="kernels and lines to list, those with most left first "
                                                             "(default: %(default)s)")
    parser.add_argument("--host", help="the folder of programs that were built with COVERAGE=1, and of what gcov counted")
    parser.add_argument("--out", help="a file for the figures and the reasons, in Markdown")
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
            print(f"{missing:7d} of {count:6d}  {target:7s} {names[name]}")
    failed, document = False, []
    if options.host:
        rows = left_of_kernels(kernels, names, options.host)
        for count, where, text, why in rows[:options.list]:
            print(f"{count:7d}  {where}: {text[:150]}  {why}")
        document += summary("Instructions of PTX", rows, sum(count for count, _ in totals.values()))
        rows, lines = left_of_host(options.host, set(names))
        for _, where, text, why in rows:
            print(f"{where}: {text[:70]:70s}  {why}")
        document += summary("Lines of host code that no CPU build has", rows, lines)
        share = 100 * len(rows) / max(1, lines)
        failed |= share > options.most
        print(f"host: {lines} lines of the GPU's alone, {share:.1f}% never executed")
    for target, (count, missing) in sorted(totals.items()):
        share = 100 * missing / count
        failed |= share > options.most
        print(f"{target}: {count} instructions in {sum(key[0] == target for key in kernels)} kernels, {share:.1f}% never executed")
    if options.out:
        said = ("Counted by `make gpu-coverage` on an emulated GPU: PTX instruction by instruction, and host lines by gcov, at "
                f"{commit()}.")
        by_target = "; ".join(f"{target} {100 * missing / count:.2f}% of {count:,}" for target, (count, missing) in sorted(totals.items()))
        pathlib.Path(options.out).write_text("\n".join(
            ["# What of the CUDA build no test executes", "", said, f"By architecture: {by_target}.", "", *document]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
