// recompute.h - what a block's forward keeps for its backward; what it does not keep, backward makes again.
#pragma once

// The tensors that a block keeps, beside its input. Any set works; each name of the ladder keeps less than
// the one before.
struct Keep {
    bool backward = true;   // anything at all; not in evaluation
    bool gelu = true;       // the MLP's activation
    bool norm = true;       // the layernorms' outputs
    bool up = true;         // GELU's input, made again by one product
    bool qkv = true;        // made again by one product
    bool attention = true;  // attention's output and lse
    bool middle = true;     // the stream between attention and MLP: without it nothing but the input is kept
};
constexpr Keep kKeepNothing = {.backward = false};

struct RecomputeLevel {
    const char* name;
    Keep keep;
};
constexpr RecomputeLevel kRecomputeLevels[] = {
    {"none", {}},
    {"gelu", {.gelu = false}},
    {"norm", {.gelu = false, .norm = false}},
    {"ffn", {.gelu = false, .norm = false, .up = false}},
    {"attention", {.gelu = false, .norm = false, .up = false, .qkv = false, .attention = false}},
    {"block", {.gelu = false, .norm = false, .up = false, .qkv = false, .attention = false, .middle = false}},
};
