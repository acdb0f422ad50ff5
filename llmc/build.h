// build.h - what this build is: for device or CPU, in which precision. Code that all builds share, NAME.cpp
// beside NAME.h, is compiled once and asks it here; code with kernels or floatX knows it from simt.h and
// tensor.h, as constants.
#pragma once

struct Build {
    bool host_is_device;  // device memory is host memory: a CPU build, but not the planner
    bool is_fast_cpu;     // kernels run on the CPU, with one thread to a block
    bool is_bf16;         // weights and activations are bf16; else they are float
};
// Keys and values that are offloaded are stored in pieces, whose rows are a multiple of this. Attention's
// kernels have the same number as kKeyPiece.
constexpr int key_piece(bool is_fast_cpu) { return is_fast_cpu ? 256 : 128; }

extern const Build kBuild;  // defined in tensor.h
