// simt_planner.h - simt.h in the planner: the GPU build's plans without CUDA and without a GPU.
//
// The planner (-DLLMC_PLANNER) has the lanes, vectors and tiles of the GPU build, and none of its kernels: a
// dry run of a step takes the same tensors and counts the same work there, and launches nothing. ./train for
// a CPU contains it, for
// `--plan --gpu NAME`.
#pragma once

#include "llmc/error.h"

inline void __syncthreads() {}
inline void __syncwarp() {}
template <class T>
T __shfl_xor_sync(unsigned, T v, int) {
    return v;
}
template <class T>
T __shfl_sync(unsigned, T v, int) {
    return v;
}

// Does nothing in a dry run. There is no other use of it.
template <auto kernel, class... A>
void launch(dim3, dim3, size_t, Stream, A&&...) {
    if (!simt::launches_off) bug("a planner has no kernels to launch");
}
