// simt_planner.h - simt.h in the planner: the GPU build's plans without CUDA and without a GPU.
//
// The planner (-DLLMC_PLANNER) has the lanes, vectors and tiles of the GPU build. A dry run of a step takes
// the same tensors there, counts the same work and launches nothing, so the plan is the same. Kernels need
// only compile. ./train for a CPU runs the planner, a program of its own, for `--plan --gpu NAME`: in one
// program its code would count in the memory of every run.
#pragma once

#include "llmc/error.h"

// Does nothing: a planner only makes dry runs.
template <auto kernel, class... A>
void launch(dim3, dim3, size_t, Stream, A&&...) {
    if (!simt::launches_off) bug("a planner has no kernels to launch");
}
