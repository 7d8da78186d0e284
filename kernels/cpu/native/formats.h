// How the weights of a linear layer are held. kernels/cpu/structs.py has the same numbers.
#pragma once
#include <cstdint>

namespace everbatch {

// FLOAT16 is read by models that compute in float32, which holds its numbers exactly. From Q4_K to K_MIX: super_blocks.h. The inputs of
// ROTATED and TWO_LEVELS are rotated (rotation.h), as the weights have been; ROTATED is W8A8 otherwise, TWO_LEVELS is in two_levels.h.
enum Format : int32_t {
    FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, W8A8 = 4, W4A8 = 5, Q4_K = 6, Q5_K = 7, Q6_K = 8, K_MIX = 9, ROTATED = 10, TWO_LEVELS = 11
};
constexpr int NUM_FORMATS = 12;

}  // namespace everbatch
