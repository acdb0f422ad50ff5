// update_on_host.cpp - the optimizer's kernel for the cores of a GPU's host (offload_optimizer.h). nvcc
// compiles the rest of such a build, and for nvcc a kernel runs on the GPU alone. So the host's compiler
// compiles this one file from the same source, and other files see nothing of it but its function (Makefile).
#include <omp.h>

#include "llmc/optimizer.cuh"

#ifdef LLMC_BF16
using Weights = bf16;
#else
using Weights = float;
#endif

extern "C" void update_on_host(const void* arrays, const void* factors, float norm) {
    const auto& a = *static_cast<const UpdateArrays<Weights>*>(arrays);
    const Tensor<float> norm_of_it(&norm, {1});
    optimizer_update(static_cast<const UpdateFactors*>(factors), a, norm_of_it, nullptr);
}
