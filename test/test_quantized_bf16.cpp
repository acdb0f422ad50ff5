// test_quantized_bf16.cpp - test_quantized.cpp with weights of type bf16.
#define LLMC_BF16
#include "test/test_quantized.cpp"
