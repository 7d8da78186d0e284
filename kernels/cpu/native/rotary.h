// Rotary position embedding of one head: pairs of its first dimensions are turned by an angle each.
#pragma once
#include <cstdint>

namespace everbatch {

// Of `half` pairs: dimensions i and i + half.
inline void rotate_halves(const float* x, const float* cos, const float* sin, int64_t half, float* __restrict out) {
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
}
// The same of neighbours.
inline void rotate_neighbours(const float* x, const float* cos, const float* sin, int64_t half, float* __restrict out) {
    for (int64_t i = 0; i < half; i++) {
        out[2 * i] = x[2 * i] * cos[i] - x[2 * i + 1] * sin[i];
        out[2 * i + 1] = x[2 * i + 1] * cos[i] + x[2 * i] * sin[i];
    }
}

}  // namespace everbatch
