// How the weights of a linear layer are held. kernels/cpu/structs.py has the same numbers.
#pragma once
#include <cstdint>

namespace everbatch {

// From Q4_K on: super_blocks.h.
enum Format : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, W8A8 = 3, W4A8 = 4, Q4_K = 5, Q5_K = 6, Q6_K = 7, K_MIX = 8, V4_K = 9 };
constexpr int NUM_FORMATS = 10;

}  // namespace everbatch
