#!/usr/bin/env python3
"""Which instructions of the CUDA build's PTX no test has executed: reads what GPU_COVERAGE collected (make gpu-coverage)."""

import argparse
import collections
import re
import subprocess
import sys


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
    return {name: re.sub(r"^void |\(.*", "", text) for name, text in zip(names, said.splitlines())}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("collected", help="the file that GPU_COVERAGE named")
    parser.add_argument("--most", type=float, default=2, help="per cent that may be left; more ends with exit code 1 "
                                                              "(default: %(default)s)")
    parser.add_argument("--list", type=int, default=20, help="kernels to list, those with most left first "
                                                             "(default: %(default)s)")
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
    failed = False
    for target, (count, missing) in sorted(totals.items()):
        share = 100 * missing / count
        failed |= share > options.most
        print(f"{target}: {count} instructions in {sum(key[0] == target for key in kernels)} kernels, {share:.1f}% never executed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
