// head_lanes.h - divides the lanes of a warp among the heads of a row: as many heads side by side as fit.
#pragma once

#include "llmc/simt.h"

// Each group of `lanes` neighbouring lanes, a power of two, has one head; the warp does `heads` heads at a
// time.
struct HeadLanes {
    int lanes, heads;
    int head, first;  // of this lane: which of those heads, and its first element in it
    template <int N>
    static SIMT_HOST_DEVICE int lanes_for(int head_size) {
        int lanes = 1;
        while (lanes < kLanes && lanes * N < head_size) lanes *= 2;
        return lanes;
    }
    template <int N>
    static SIMT_DEVICE HeadLanes of(int head_size) {
        const int lanes = lanes_for<N>(head_size);
        return {lanes, kLanes / lanes, lane() / lanes, lane() % lanes * N};
    }
    // The sum of v over the lanes that share a head; every lane of the warp must call it.
    SIMT_DEVICE float sum(float v) const {
        for (int m = lanes / 2; m > 0; m /= 2) v += __shfl_xor_sync(~0u, v, m);
        return v;
    }
};
