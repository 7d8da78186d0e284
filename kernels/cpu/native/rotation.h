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

// The same for a head of d numbers whose keys are quantised: kernels/common/kv_rotation.py. What belongs together are b neighbours of one
// half of the head and as many of the other, for the greatest power of two b that divides a half. The two factors are powers of two, so
// that they lose nothing, and their product undoes what the rotations of a query and of a key add to their product.
struct HeadRotation {
    explicit HeadRotation(int64_t d) : half_(d % 2 ? 0 : d / 2), block_(half_ & -half_) {
        int rounds = half_ ? 1 : 0;
        for (int64_t h = 1; h < block_; h *= 2) rounds++;
        of_queries_ = 1.0f / float(1 << rounds / 2), of_keys_ = 1.0f / float(1 << (rounds - rounds / 2));
    }

    void query(float* x) const { rotate(x, of_queries_); }
    void key(float* x) const { rotate(x, of_keys_); }

private:
    void rotate(float* x, float factor) const {
        int64_t done = 1;
        if (block_ % LANES == 0 && half_) {
            for (int64_t i = 0; i < 2 * half_; i += LANES) store(x + i, rotate_lanes(load<Vec>(x + i)));
            done = LANES;
        }
        for (; done < block_; done *= 2)
            for (int64_t first = 0; first < 2 * half_; first += 2 * done) add_and_subtract(x + first, done, done, 1.0f);
        add_and_subtract(x, half_, half_, factor);
    }
    static void add_and_subtract(float* x, int64_t count, int64_t distance, float factor) {
        float* partner = x + distance;
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) {
            const Vec a = load<Vec>(x + i), b = load<Vec>(partner + i);
            store(x + i, (a + b) * factor), store(partner + i, (a - b) * factor);
        }
        for (; i < count; i++) {
            const float a = x[i], b = partner[i];
            x[i] = (a + b) * factor, partner[i] = (a - b) * factor;
        }
    }

    int64_t half_, block_;
    float of_queries_, of_keys_;
};

}  // namespace everbatch
