// update_on_host.cpp - the optimizer's kernel for the cores of a GPU's host (host_updates.h). The rest of
// that build is nvcc's, to which a kernel is the GPU's alone: so this is the one file that the host's
// compiler makes of the same source, and nothing of it but its function is seen by others (Makefile).
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
