// Vectors of LANES float32 or int32 lanes, as wide as the instruction set that this file is compiled for.
//
// The code uses the compiler's vector types, so that one source serves AVX512, AVX2 and plain x86-64. Only special instructions
// (bfloat16 and int8 dot products, fused multiply-add) are called by name.
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
typedef uint8_t Bytes __attribute__((vector_size(LANES * 4)));

typedef uint16_t bf16;  // the upper half of a float32
typedef _Float16 fp16;

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
// A store to an aligned place that leaves the caches to others. Stores before a fence are seen before those behind it.
ALWAYS_INLINE void store_to_memory(float* p, Vec v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(p, (__m256)v);
#elif defined(__x86_64__)
    _mm_stream_ps(p, (__m128)v);
#else
    store(p, v);
#endif
}
ALWAYS_INLINE void fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
ALWAYS_INLINE Vec splat(float x) { return x - Vec{}; }  // x + 0 would be an addition: -0 + 0 is 0
ALWAYS_INLINE IVec splat(int32_t x) { return x - IVec{}; }
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

// Reduces all lanes of E with f: the two halves of the vector, then the halves of the result, and so on.
template <class E, class V, class F>
ALWAYS_INLINE E reduce(V v, F f) {
    if constexpr (sizeof(V) == 2 * sizeof(E)) {
        return f(v[0], v[1]);
    } else {
        typedef E Half __attribute__((vector_size(sizeof(V) / 2)));
        Half lo, hi;
        memcpy(&lo, &v, sizeof lo), memcpy(&hi, reinterpret_cast<const char*>(&v) + sizeof lo, sizeof hi);
        return reduce<E>(f(lo, hi), f);
    }
}
ALWAYS_INLINE float reduce_add(Vec v) {
    return reduce<float>(v, [](auto a, auto b) { return a + b; });
}
ALWAYS_INLINE int32_t reduce_add(IVec v) {
    return reduce<int32_t>(v, [](auto a, auto b) { return a + b; });
}
ALWAYS_INLINE float reduce_max(Vec v) {
    return reduce<float>(v, [](auto a, auto b) { return a > b ? a : b; });
}

// ------------------------------------------------------------------------------------------------------------ bfloat16

ALWAYS_INLINE float to_float(bf16 x) {
    uint32_t u = uint32_t(x) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
ALWAYS_INLINE float to_float(float x) { return x; }
ALWAYS_INLINE float to_float(fp16 x) { return float(x); }
// Round to nearest even; a NaN stays one.
ALWAYS_INLINE bf16 to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return bf16(u >> 16 | 0x40);
    return bf16((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
ALWAYS_INLINE Vec load_bf16(const bf16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16);  // gcc 12 would split the generic conversion into halves
#else
    return (Vec)(__builtin_convertvector(load<Half>(p), UVec) << 16);
#endif
}
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

// Stores 2 * LANES of them.
ALWAYS_INLINE void store_bf16(bf16* p, Vec a, Vec b) {
#if defined(__AVX512BF16__)
    store(p, _mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
    store_bf16(p, a), store_bf16(p + LANES, b);
#endif
}

// float16, subnormal ones too. Infinity and NaN do not come out right.
template <class P>
ALWAYS_INLINE Vec load_half(const P* p) {
    static_assert(sizeof(P) == 2);
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(load<__m128i>(p));
#else
    const UVec u = __builtin_convertvector(load<Half>(p), UVec);
    const Vec magnitude = (Vec)((u & 0x7fff) << 13) * 0x1p112f;  // both types' exponents then mean the same
    return floats(bits(magnitude) | (IVec)((u & 0x8000) << 16));
#endif
}

// LANES bytes of -128 .. 127 as integers.
ALWAYS_INLINE IVec load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (IVec)_mm512_cvtepi8_epi32(load<__m128i>(p));
#else
    return __builtin_convertvector(load<Quarter>(p), IVec);
#endif
}

// Stores lane i of `lo` to p[2 * i], and lane i of `hi` to p[2 * i + 1].
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

// The number that dot_quads expects to have been added to weights, because the VNNI instruction multiplies unsigned by signed bytes.
#if defined(__AVX512VNNI__)
constexpr int DOT_BIAS = 128;
#else
constexpr int DOT_BIAS = 0;
#endif
// The number that packing adds to int8 weights. Tiles multiply signed bytes.
#if defined(EVERBATCH_AMX)
constexpr int WEIGHT_BIAS = 0;
#else
constexpr int WEIGHT_BIAS = DOT_BIAS;
#endif

// acc + the four products of bytes: every lane of `w` holds four weights, each plus DOT_BIAS; `x` points to four int8, none of them -128,
// for all lanes. Without VNNI two products are added in 16 bits, which hold |w| <= 128 times |x| <= 127 twice.
ALWAYS_INLINE IVec dot_quads(IVec acc, IVec w, const int8_t* x) {
    int32_t quad;
    memcpy(&quad, x, 4);
#if defined(__AVX512VNNI__)
    return (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#elif defined(__AVX512BW__)
    const __m512i xs = _mm512_set1_epi32(quad), ws = (__m512i)w;
    const __m512i signed_x = _mm512_mask_sub_epi8(xs, _mm512_movepi8_mask(ws), _mm512_setzero_si512(), xs);
    return acc + (IVec)_mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(ws), signed_x), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(quad), (__m256i)w);
    return acc + (IVec)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), signed_x), _mm256_set1_epi16(1));
#else
    for (int i = 0; i < 4; i++) acc += ((w << (24 - 8 * i)) >> 24) * splat(int32_t(x[i]));
    return acc;
#endif
}
// acc + the four products of bytes of w, 0 .. 127, and of x, int8 that are not -128.
ALWAYS_INLINE IVec dot_bytes(IVec acc, Bytes w, Bytes x) {
#if defined(__AVX512VNNI__)
    return (IVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    return acc + (IVec)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)w, (__m512i)x), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    return acc + (IVec)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x), _mm256_set1_epi16(1));
#else
    for (int i = 0; i < 4; i++) acc += (((IVec)w << (24 - 8 * i)) >> 24) * (((IVec)x << (24 - 8 * i)) >> 24);
    return acc;
#endif
}
// The same for four int8 that all lanes share.
ALWAYS_INLINE IVec dot_nibbles(IVec acc, IVec w, const int8_t* x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    return dot_bytes(acc, (Bytes)w, (Bytes)splat(quad));
}
// 16 bytes, again and again.
ALWAYS_INLINE Bytes repeated(const int8_t* p) {
#if defined(__AVX512F__)
    return (Bytes)_mm512_broadcast_i32x4(load<__m128i>(p));
#elif defined(__AVX2__)
    return (Bytes)_mm256_broadcastsi128_si256(load<__m128i>(p));
#else
    return load<Bytes>(p);
#endif
}

// The 16 bytes at part(0), those at part(1), ... in one vector. They are inserted into a register. A compiler makes of copies to a variable four stores
// and one wider load, which cannot be forwarded: with that, products of four bits were 3 to 6 times as slow on an Intel Xeon.
template <typename Part>
ALWAYS_INLINE Bytes joined(Part part) {
#if defined(__AVX512F__)
    const __m512i first = _mm512_inserti32x4(_mm512_castsi128_si512(load<__m128i>(part(0))), load<__m128i>(part(1)), 1);
    return (Bytes)_mm512_inserti32x4(_mm512_inserti32x4(first, load<__m128i>(part(2)), 2), load<__m128i>(part(3)), 3);
#elif defined(__AVX2__)
    return (Bytes)_mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(part(0))), load<__m128i>(part(1)), 1);
#else
    constexpr size_t LANE = 16;
    Bytes all;
    for (size_t i = 0; i < sizeof all / LANE; i++) memcpy(reinterpret_cast<char*>(&all) + i * LANE, part(int(i)), LANE);
    return all;
#endif
}

// The table of its own 16 bytes at index[i] % 16, for each byte of index: tables of different 16 bytes may differ.
ALWAYS_INLINE Bytes look_up_each(Bytes table, Bytes index) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)(index & uint8_t(15)));
#elif defined(__AVX2__)
    return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)(index & uint8_t(15)));
#else
    index &= uint8_t(15);
    constexpr size_t LANE = 16;
    uint8_t values[sizeof table], at[sizeof index];  // in memory, for an element of a vector cannot be read at an index that varies
    memcpy(values, &table, sizeof table), memcpy(at, &index, sizeof index);
    for (size_t i = 0; i < sizeof index; i++) at[i] = values[i / LANE * LANE + at[i]];
    memcpy(&index, at, sizeof index);
    return index;
#endif
}

// The same where every 16 bytes of `table` are the same, so that an instruction which takes 6 bits of an index needs no mask.
ALWAYS_INLINE Bytes look_up(Bytes table, Bytes index) {
#if defined(__AVX512VBMI__)
    return (Bytes)_mm512_permutexvar_epi8((__m512i)index, (__m512i)table);
#else
    return look_up_each(table, index);
#endif
}

// --------------------------------------------------------------------------------------------------------- exponential

// e^x for x <= 0 (0 below -87), to a relative error of 2e-7 + 6e-8 |x|: e^x = 2^t = 2^n * 2^f with the nearest integer n of t; 2^f by the
// polynomial of degree 5 that has the least relative error on -0.5 .. 0.5 and is exact at 0.
ALWAYS_INLINE Vec exp_negative(Vec x) {
    const Vec least = splat(-87.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec t = vmax(x, least) * 1.44269504088896341f, shifted = t + magic, f = t - (shifted - magic);
    Vec p = splat(1.326472728e-3f);
    for (float c : {9.671512802e-3f, 5.550733745e-2f, 2.402224208e-1f, 6.931469776e-1f, 1.0f}) p = fma(p, f, splat(c));
    return x < least ? Vec{} : floats(bits(p) + (bits(shifted) << 23));
}

// 1 / x to one unit in the last place, if x and 1 / x are normal.
ALWAYS_INLINE Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
    const Vec r = (Vec)_mm512_rcp14_ps((__m512)x);
    return fma(r, fma(-x, r, splat(1.0f)), r);  // a step of Newton's method doubles the 14 bits
#else
    return 1.0f / x;
#endif
}

// tanh x to a relative error of 3e-7; a NaN stays one. Beyond the bound on x it is 1 in float32. The quotient of polynomials is Eigen's
// (unsupported/Eigen/src/SpecialFunctions, and Eigen/src/Core/MathFunctionsImpl.h), fitted to the function on that interval.
ALWAYS_INLINE Vec tanh(Vec x) {
    const Vec bound = splat(7.90531110763549805f), bounded = vmax(-bound, vmin(bound, x)), square = bounded * bounded;
    Vec above = splat(-2.76076847742355e-16f), below = splat(1.19825839466702e-06f);
    for (float c : {2.00018790482477e-13f, -8.60467152213735e-11f, 5.12229709037114e-08f, 1.48572235717979e-05f, 6.37261928875436e-04f,
                    4.89352455891786e-03f})
        above = fma(above, square, splat(c));
    for (float c : {1.18534705686654e-04f, 2.26843463243900e-03f, 4.89352518554385e-03f}) below = fma(below, square, splat(c));
    return bounded * above / below;
}

}  // namespace everbatch
