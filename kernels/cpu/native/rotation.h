// Rotation of the inputs of ROTATED layers: a value that is far from the others is spread over a block of columns, so that they can share a
// scale (QuaRot: Ashkboos et al., 2024). kernels/common/rotation.py is the reference, and rotates the weights.
#pragma once
#include <utility>

#include "simd.h"

namespace everbatch {

constexpr int64_t MOST_ROTATED = 256;
// Columns of a block of an input of k columns, which is a multiple of 64: the greatest power of two that divides it.
constexpr int64_t rotated_together(int64_t k) { return (k & -k) < MOST_ROTATED ? (k & -k) : MOST_ROTATED; }

// Lane i becomes v[i] + v[i + H] if H is not in i, else v[i - H] - v[i].
template <int H, int... I>
ALWAYS_INLINE Vec butterfly(Vec v, std::integer_sequence<int, I...>) {
    const Vec partners{v[I ^ H]...}, signs{(I & H ? -1.0f : 1.0f)...};
    return partners + v * signs;  // the product is exact
}

// The butterflies of 1, 2, ... LANES / 2 columns.
template <int H = 1>
ALWAYS_INLINE Vec rotate_lanes(Vec v) {
    if constexpr (H < LANES)
        return rotate_lanes<2 * H>(butterfly<H>(v, std::make_integer_sequence<int, LANES>()));
    else
        return v;
}

// out[0 .. k) = x times Sylvester's Hadamard matrix, block by block: sums of `rotated_together(k)` columns with the signs of its rows. Each
// step adds or subtracts two numbers, so that the result has the same bits on every instruction set.
inline void rotate(const float* x, int64_t k, float* out) {
    const int64_t block = rotated_together(k);
    for (int64_t i = 0; i < k; i += LANES) store(out + i, rotate_lanes(load<Vec>(x + i)));
    for (int64_t half = LANES; half < block; half *= 2)
        for (int64_t first = 0; first < k; first += 2 * half)
            for (float* at = out + first; at < out + first + half; at += LANES) {
                const Vec a = load<Vec>(at), b = load<Vec>(at + half);
                store(at, a + b), store(at + half, a - b);
            }
}

}  // namespace everbatch
