// precision.h - the type that weights and activations have in this build: bf16 with -DLLMC_BF16, else float.
#pragma once

#include "llmc/tensor.h"

#ifdef LLMC_BF16
using floatX = bf16;
#else
using floatX = float;
#endif
using TensorX = Tensor<floatX>;
using TensorF = Tensor<float>;
