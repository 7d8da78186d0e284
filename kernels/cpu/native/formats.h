// How the weights of a linear layer are held. kernels/cpu/structs.py has the same numbers.
#pragma once
#include <cstdint>

namespace everbatch {

// FLOAT16 is read by models that compute in float32, which holds its numbers exactly. The inputs of ROTATED are rotated (rotation.h), as the weights
// have been; it is W8A8 otherwise. From Q4_0 on: super_blocks.h.
enum Format : int32_t {
    FLOAT32, BFLOAT16, FLOAT16, INT8, W8A8, W4A8, ROTATED,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, TERNARY, VALUES_32, VALUES_16, K_MIX, MIX_32, MIX_16
};
constexpr int NUM_FORMATS = MIX_16 + 1;

}  // namespace everbatch
