// AMX: eight tiles of 16 rows x 64 bytes, and products of two of them. EVERBATCH_EMULATE_AMX replaces the instructions by loops with
// the same results, so that the code that uses them is tested on machines without AMX.
#pragma once
#include "simd.h"
#if defined(EVERBATCH_AMX)

namespace everbatch::amx {

struct alignas(64) Config {  // the layout that ldtilecfg reads
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#if defined(EVERBATCH_EMULATE_AMX)

struct Tiles {
    Config config;
    alignas(64) uint8_t data[8][16][64];
};
inline Tiles& tiles() {
    static thread_local Tiles t;
    return t;
}
inline void load_config(Config& c) {
    tiles().config = c;
    memset(tiles().data, 0, sizeof tiles().data);
}
template <int T>
void zero() {
    memset(tiles().data[T], 0, sizeof tiles().data[T]);
}
template <int T>
void load(const void* p, size_t stride) {
    Tiles& t = tiles();
    zero<T>();
    for (int r = 0; r < t.config.rows[T]; r++) memcpy(t.data[T][r], (const char*)p + r * stride, t.config.row_bytes[T]);
}
template <int T>
void store(void* p, size_t stride) {
    Tiles& t = tiles();
    for (int r = 0; r < t.config.rows[T]; r++) memcpy((char*)p + r * stride, t.data[T][r], t.config.row_bytes[T]);
}
inline void release() {}
// As Intel's manual defines TDPBF16PS: even and odd columns of a row are summed by themselves from zero, fused; denormals are zero.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
template <int C, int A, int B>
void dot_bf16() {
    Tiles& t = tiles();
    for (int r = 0; r < t.config.rows[C]; r++)
        for (int n = 0; n < t.config.row_bytes[C] / 4; n++) {
            float c, sums[2] = {};
            for (int k = 0; k < t.config.row_bytes[A] / 4; k++) {
                bf16 a[2], b[2];
                memcpy(a, &t.data[A][r][4 * k], 4);
                memcpy(b, &t.data[B][k][4 * n], 4);
                for (int i : {0, 1}) sums[i] = flushed(std::fma(flushed(to_float(a[i])), flushed(to_float(b[i])), sums[i]));
            }
            memcpy(&c, &t.data[C][r][4 * n], 4);
            c = flushed(flushed(c) + flushed(sums[0] + sums[1]));
            memcpy(&t.data[C][r][4 * n], &c, 4);
        }
}
template <int C, int A, int B>
void dot_int8() {
    Tiles& t = tiles();
    for (int r = 0; r < t.config.rows[C]; r++)
        for (int k = 0; k < t.config.row_bytes[A] / 4; k++)
            for (int n = 0; n < t.config.row_bytes[C] / 4; n++) {
                int32_t c;
                memcpy(&c, &t.data[C][r][4 * n], 4);
                for (int i = 0; i < 4; i++) c += int8_t(t.data[A][r][4 * k + i]) * int8_t(t.data[B][k][4 * n + i]);
                memcpy(&t.data[C][r][4 * n], &c, 4);
            }
}

#else

inline void load_config(Config& c) {
    asm volatile("" : "+m"(c) : : "memory");  // gcc 12's _tile_loadconfig declares 8 bytes of its operand as read
    _tile_loadconfig(&c);
}
inline void release() { _tile_release(); }
// gcc's tile intrinsics paste the number into the assembly, so it must be a literal.
template <int T>
ALWAYS_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
ALWAYS_INLINE void load(const void* p, size_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T>
ALWAYS_INLINE void store(void* p, size_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int C, int A, int B>
ALWAYS_INLINE void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
ALWAYS_INLINE void dot_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

// Tiles 0 1 / 2 3: sums of up to 2 x 16 rows by 2 x 16 columns. 4, 5: rows of activations. 6, 7: columns of weights.
// `depth` = bytes of a row of activations. Loading a configuration is slow and clears the tiles, so it is done on change only.
inline thread_local int configured = 0;

inline void configure(int rows, int depth) {
    if (configured == rows * 256 + depth) return;
    configured = rows * 256 + depth;
    Config c;
    const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
    for (int t : {0, 1, 4}) c.rows[t] = uint8_t(upper);
    for (int t : {2, 3, 5}) c.rows[t] = uint8_t(lower);
    for (int t : {6, 7}) c.rows[t] = uint8_t(depth / 4);
    for (int t = 0; t < 8; t++) c.row_bytes[t] = 64;
    for (int t : {4, 5}) c.row_bytes[t] = uint16_t(depth);
    load_config(c);
}

}  // namespace everbatch::amx
#endif

namespace everbatch {

// A thread holds this object while it calls products. Other code (torch's) may have used the tiles before, so they are configured anew; and
// they are released at the end, because the kernel saves tiles in use at every switch of threads.
struct TilesOfThread {
#if defined(EVERBATCH_AMX)
    TilesOfThread() { amx::configured = 0; }
    ~TilesOfThread() { amx::release(), amx::configured = 0; }
#else
    TilesOfThread() {}
#endif
};

}  // namespace everbatch
