#!/bin/sh
# Profiles a few steps on random tokens with nsys: the timeline has NVTX ranges for the step, forward, each block, backward
# and update. Arguments go to ./train; the default is GPT-2 124M. Writes profile.nsys-rep and prints the time by range.
# Steps are not replayed as CUDA graphs, because these have no ranges.
set -eu
cd "$(dirname "$0")/.."
command -v nsys >/dev/null || { echo "profile_nsys.sh: nsys is not on the PATH (NVIDIA Nsight Systems)" >&2; exit 2; }
[ $# -gt 0 ] || set -- --model d12 --batch 4 --seq-len 1024
nsys profile --trace=cuda,nvtx --force-overwrite=true --output=profile ./train --advanced graph=off \
    --bench --warmup 2 --steps 3 "$@"
nsys stats --report nvtx_sum,cuda_gpu_kern_sum profile.nsys-rep
