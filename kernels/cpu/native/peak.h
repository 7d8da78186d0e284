// The most that a core can multiply: bare loops of the instructions that products are made of (simd.h, amx.h), for benchmarks.
#pragma once
#include "tiles.h"

namespace everbatch {

constexpr int CHAINS = 12;  // independent sums: as many as hide the latency of an instruction, and fit beside the operands

// The compiler must take `v` for changed here, so that it can neither leave out what made it nor what is made of it.
template <class V>
ALWAYS_INLINE void touch(V& v) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(v));
#else
    asm volatile("" : "+m"(v));
#endif
}

// `rounds` times CHAINS sums, each `dot` of itself and one vector of weights that stays.
template <class Sum, class Weights, class Dot>
ALWAYS_INLINE void multiply_vectors(int64_t rounds, Weights w, Dot dot) {
    Sum sums[CHAINS] = {};
    for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 16
        for (int n = 0; n < CHAINS; n++) touch(w), sums[n] = dot(sums[n], w), touch(sums[n]);
}

// As if they were tiles of activations and weights of a product (tiles.h): four sums of 16 x 16, each of `depth` products of a row and a column.
template <class Dot>
int64_t multiply_tiles(int64_t rounds, int64_t depth, Dot dot) {
    for (int64_t i = 0; i < rounds; i++) dot();
    return rounds * 4 * 16 * 16 * depth * 2;
}

// Each returns multiply-adds x 2 of one thread.
inline int64_t multiply_floats(int64_t rounds) {
    const Vec x = splat(0.5f);
    multiply_vectors<Vec>(rounds, x, [x](Vec sum, Vec w) { return fma(w, x, sum); });
    return rounds * CHAINS * LANES * 2;
}

inline int64_t multiply_bf16(int64_t rounds) {
#if defined(EVERBATCH_AMX)
    const TilesOfThread tiles;
    amx::configure(32, 64);
    return multiply_tiles(rounds, 32, [] { amx::dot_bf16<0, 4, 6>(), amx::dot_bf16<1, 4, 7>(), amx::dot_bf16<2, 5, 6>(), amx::dot_bf16<3, 5, 7>(); });
#elif defined(__AVX512BF16__)
    const bf16 x[2] = {to_bf16(0.5f), to_bf16(0.5f)};
    multiply_vectors<Vec>(rounds, IVec{}, [&x](Vec sum, IVec w) { return dot_pairs(sum, w, x); });
    return rounds * CHAINS * LANES * 2 * 2;
#else
    return multiply_floats(rounds);  // which is how bfloat16 is multiplied without an instruction of its own
#endif
}

inline int64_t multiply_int8(int64_t rounds) {
#if defined(EVERBATCH_AMX)
    const TilesOfThread tiles;
    amx::configure(32, 64);
    return multiply_tiles(rounds, 64, [] { amx::dot_int8<0, 4, 6>(), amx::dot_int8<1, 4, 7>(), amx::dot_int8<2, 5, 6>(), amx::dot_int8<3, 5, 7>(); });
#else
    const int8_t x[4] = {1, 2, 3, 4};
    multiply_vectors<IVec>(rounds, splat(0x01010101), [&x](IVec sum, IVec w) { return dot_nibbles(sum, w, x); });
    return rounds * CHAINS * LANES * 4 * 2;
#endif
}

}  // namespace everbatch
