#!/bin/sh
# Profiles kernels under ncu: those that run inside one NVTX range, in two steps of training and nothing else.
# Arguments go to ./train; the defaults are GPT-2 124M. Writes profile.ncu-rep and prints its summary. Clocks stay as a
# training has them.
set -eu
cd "$(dirname "$0")/.."
command -v ncu >/dev/null || { echo "profile_ncu.sh: ncu is not on the PATH (NVIDIA Nsight Compute)" >&2; exit 2; }
[ $# -gt 0 ] || set -- --model d12 --batch 4 --seq-len 1024
range="block 0/" # or "step/", "forward/", "head/", "backward/", "update/"; with the slash, as they are pushed and popped
ncu --clock-control none --nvtx --nvtx-include "$range" --set full --force-overwrite --export profile \
    ./train --graph off --bench --bench-warmup 0 --bench-steps 1 "$@"
ncu --import profile.ncu-rep --print-summary per-kernel
