// race_probe.cpp - a kernel with a race on request: `race_probe missing` leaves a barrier out of a sum over
// shared memory, `race_probe none` does not. Built with -fsanitize=thread, the first must report a data race
// and exit with 66, the second must report nothing and exit with 0. So the sanitizer's silence on the real
// kernels means something. The correct kernel runs first: the race must be found with fibers that have run
// before.

#include <cstdio>
#include <cstring>

#include "llmc/simt.h"

namespace {

constexpr int kThreads = 64;

template <bool kMissing>
__global__ void sum_kernel(float* out) {
    DYNAMIC_SHARED(float, shared);
    shared[threadIdx.x] = static_cast<float>(threadIdx.x);
    if constexpr (!kMissing) __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.f;
        for (int i = 0; i < kThreads; i++) sum += shared[i];
        out[blockIdx.x] = sum;
    }
}

template <bool kMissing>
int run() {
    float out[2];
    launch<sum_kernel<kMissing>>(2, kThreads, kThreads * sizeof(float), Stream{}, out);
    const float want = kThreads * (kThreads - 1) / 2;
    return out[0] != want || out[1] != want;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2 || (strcmp(argv[1], "missing") && strcmp(argv[1], "none"))) {
        fprintf(stderr, "usage: race_probe missing|none\n");
        return 2;
    }
    for (int i = 0; i < 3; i++)
        if (run<false>()) return 1;
    if (!strcmp(argv[1], "missing")) run<true>();
    return 0;
}
