#!/bin/sh
# Profiles with ncu the kernels that run inside one NVTX range, in two training steps. Arguments go to ./train; the default
# is GPT-2 124M. Writes profile.ncu-rep and prints its summary. The GPU's clocks are not locked, as in a normal run.
set -eu
cd "$(dirname "$0")/.."
command -v ncu >/dev/null || { echo "profile_ncu.sh: ncu is not on the PATH (NVIDIA Nsight Compute)" >&2; exit 2; }
[ $# -gt 0 ] || set -- --model d12 --batch 4 --seq-len 1024
range="block 0/" # or "step/", "forward/", "head/", "backward/", "update/"; the slash is for ranges that are pushed and popped
ncu --clock-control none --nvtx --nvtx-include "$range" --set full --force-overwrite --export profile \
    ./train --advanced graph=off --bench --warmup 0 --steps 1 "$@"
ncu --import profile.ncu-rep --print-summary per-kernel
