// simt_long_launches.h - splits launches that would take long: on a GPU that drives a display, and under
// WSL2, the driver ends a launch after some seconds. Read this to split another kernel's launches. Results
// keep their bits, because the same blocks do the same work.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "llmc/simt.h"

// Seconds that no launch is expected to exceed.
constexpr double kLongestLaunch = 0.5;

// The FLOPs that the device is expected to do in that time, in attention and in matrix products. No limit
// until a run with a GPU sets them (limit_launches()).
inline double longest_attention = std::numeric_limits<double>::infinity();
inline double longest_product = std::numeric_limits<double>::infinity();

// The part of a grid that one launch runs: its first block in x and in y, and how many blocks the whole grid
// has in y.
struct GridPart {
    int x = 0, y = 0, whole_y = 0;
};

// Calls launch_part(grid, part) for parts of a grid that has `work` in all, so that no part has more than
// `most`. All blocks along x have equal work. Blocks along y may have up to twice the mean, as with causal
// attention.
template <class F>
void for_each_part(dim3 grid, double work, double most, F launch_part) {
    const double parts = std::max(1., std::ceil(work / most));
    const auto step = [](unsigned blocks, double parts) {
        return std::max(1u, static_cast<unsigned>(blocks / std::min<double>(parts, blocks)));
    };
    const unsigned by_x = step(grid.x, parts);
    const unsigned by_y = parts > grid.x ? step(grid.y, std::ceil(2 * parts / grid.x)) : grid.y;
    for (unsigned y = 0; y < grid.y; y += by_y)
        for (unsigned x = 0; x < grid.x; x += by_x)
            launch_part(dim3(std::min(by_x, grid.x - x), std::min(by_y, grid.y - y)),
                        GridPart{static_cast<int>(x), static_cast<int>(y), static_cast<int>(grid.y)});
}
