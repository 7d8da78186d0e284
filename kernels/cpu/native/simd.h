// Vectors of LANES float32 or int32 lanes, as wide as the instruction set that this file is compiled for.
//
// Everything is written with the compiler's vector types, so that one source serves AVX512, AVX2 and plain x86-64; only what
// has an instruction of its own (bfloat16 and int8 dot products, fused multiply-add) is asked for by name.
#pragma once
#include <cmath>
#include <initializer_list>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if (defined(__AMX_BF16__) && defined(__AMX_INT8__)) || defined(EVERBATCH_EMULATE_AMX)
#define EVERBATCH_AMX
#endif

namespace everbatch {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t UVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t Half __attribute__((vector_size(LANES * 2)));
typedef int16_t Short __attribute__((vector_size(LANES * 2)));
typedef int8_t Quarter __attribute__((vector_size(LANES)));

typedef uint16_t bf16;  // the upper half of a float32

#define ALWAYS_INLINE inline __attribute__((always_inline))

template <class V, class P>
ALWAYS_INLINE V load(const P* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class P>
ALWAYS_INLINE void store(P* p, V v) {
    memcpy(p, &v, sizeof v);
}
ALWAYS_INLINE Vec splat(float x) { return Vec{} + x; }
ALWAYS_INLINE IVec splat(int32_t x) { return IVec{} + x; }
ALWAYS_INLINE IVec bits(Vec v) { return (IVec)v; }
ALWAYS_INLINE Vec floats(IVec v) { return (Vec)v; }

ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
ALWAYS_INLINE Vec vmax(Vec a, Vec b) { return a > b ? a : b; }
ALWAYS_INLINE Vec vmin(Vec a, Vec b) { return a < b ? a : b; }
ALWAYS_INLINE Vec vabs(Vec a) { return floats(bits(a) & 0x7fffffff); }

ALWAYS_INLINE float reduce_add(Vec v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}
ALWAYS_INLINE float reduce_max(Vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// ------------------------------------------------------------------------------------------------------------ bfloat16

ALWAYS_INLINE float to_float(bf16 x) {
    uint32_t u = uint32_t(x) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
// Round to nearest even; a NaN stays one.
ALWAYS_INLINE bf16 to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return bf16(u >> 16 | 0x40);
    return bf16((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
ALWAYS_INLINE Vec load_bf16(const bf16* p) { return (Vec)(__builtin_convertvector(load<Half>(p), UVec) << 16); }
ALWAYS_INLINE void store_bf16(bf16* p, Vec v) {
#if defined(__AVX512BF16__)
    store(p, _mm512_cvtneps_pbh((__m512)v));
#else
    UVec u = (UVec)v;
    UVec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    UVec nan = (u >> 16) | 0x40;
    store(p, __builtin_convertvector((u & 0x7fffffff) > 0x7f800000 ? nan : rounded, Half));
#endif
}

// Lane i of `lo` to p[2 * i], of `hi` to p[2 * i + 1].
ALWAYS_INLINE void store_bf16_pairs(bf16* p, Vec lo, Vec hi) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    store(p, _mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)_mm512_cvtne2ps_pbh((__m512)hi, (__m512)lo)));
#else
    alignas(64) bf16 l[LANES], h[LANES];
    store_bf16(l, lo), store_bf16(h, hi);
    for (int i = 0; i < LANES; i++) p[2 * i] = l[i], p[2 * i + 1] = h[i];
#endif
}

// ------------------------------------------------------------------------------------------------------- dot products

// acc + w.lo * x.lo + w.hi * x.hi: every lane of `w` holds two bfloat16, `x` points to two that all lanes share.
ALWAYS_INLINE Vec dot_pairs(Vec acc, IVec w, const bf16* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(pair));
#else
    Vec lo = floats(w << 16), hi = floats(w & int32_t(0xffff0000));
    return fma(hi, splat(to_float(x[1])), fma(lo, splat(to_float(x[0])), acc));
#endif
}

// What is added to int8 weights when they are packed: the VNNI instruction multiplies unsigned by signed bytes.
#if defined(__AVX512VNNI__) && !defined(EVERBATCH_AMX)
constexpr int WEIGHT_BIAS = 128;
#else
constexpr int WEIGHT_BIAS = 0;
#endif

// acc + the four products of bytes: every lane of `w` holds four packed weights, `x` points to four int8 for all lanes.
ALWAYS_INLINE IVec dot_quads(IVec acc, IVec w, const int8_t* x) {
    int32_t quad;
    memcpy(&quad, x, 4);
#if defined(__AVX512VNNI__) && !defined(EVERBATCH_AMX)
    return (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#else
    for (int i = 0; i < 4; i++) acc += ((w << (24 - 8 * i)) >> 24) * splat(int32_t(x[i]));
    return acc;
#endif
}

// --------------------------------------------------------------------------------------------------------- exponential

// e^x in about one unit in the last place for x <= 0 (0 below -87): 2^n * p(r), Cephes' polynomial of degree 5.
ALWAYS_INLINE Vec exp_negative(Vec x) {
    Vec least = splat(-87.0f);
    IVec is_zero = x < least;
    x = vmax(x, least);
    Vec t = x * 1.44269504088896341f;
    IVec n = __builtin_convertvector(t - 0.5f, IVec);  // truncation towards zero of a negative number: round to nearest
    Vec f = __builtin_convertvector(n, Vec);
    Vec r = fma(f, splat(-0.693359375f), x);
    r = fma(f, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, splat(c));
    p = fma(p * r, r, r + 1.0f);
    return is_zero ? Vec{} : p * floats((n + 127) << 23);
}

// x / (1 + e^-x)
ALWAYS_INLINE Vec silu(Vec x) {
    Vec e = exp_negative(-vabs(x));  // of the smaller exponential, so that nothing overflows
    Vec s = 1.0f / (1.0f + e);
    return x * (x < 0.0f ? e * s : s);
}

}  // namespace everbatch
