// The matrix product that all others are made of: a few rows of activations times one panel of 32 columns.
//
//     c[row][column] (+)= sum over k of a[row][k] * panel[k][column]            c float32
//
// Linear layers use it with panels of weights, and attention with panels of keys and of values, for the KV pool is stored as
// panels. A packed panel of k rows lies in memory as
//
//     float32     [k][32 columns]                  float16 too
//     bfloat16    [k / 2][32 columns][2]      two or four of k are a dword of the dot product instructions, and a product reads
//     int8        [k / 4][32 columns][4]      the panel from beginning to end
//
// and, with AMX, as tiles of 16 such rows and 16 columns:
//
//     bfloat16    [k / 32][half of the columns][16][16 columns][2]
//     int8        [k / 64][half of the columns][16][16 columns][4]
//
// Each row is summed in the order of k, independent of the rows beside it, so a row's result does not depend on the batch.
#pragma once
#include "amx.h"
#include "simd.h"

namespace everbatch {

constexpr int PANEL = 32;                // columns
constexpr int COLUMN_VECS = PANEL / LANES;  // vectors of one row of sums

// Index of element (row, column) of a packed panel. TOGETHER is the number of rows in a dword: 1 float32, 2 bfloat16, 4 int8.
template <int TOGETHER>
constexpr size_t packed_at(int64_t row, int64_t column) {
#if defined(EVERBATCH_AMX)
    if (TOGETHER > 1) {
        constexpr int ROWS = 16 * TOGETHER;
        return size_t(row / ROWS * ROWS * PANEL + column / 16 * 16 * ROWS + row % ROWS / TOGETHER * 16 * TOGETHER +
                      column % 16 * TOGETHER + row % TOGETHER);
    }
#endif
    return size_t(row / TOGETHER * TOGETHER * PANEL + column * TOGETHER + row % TOGETHER);
}

// Prefetch LINES cache lines of 64 bytes, from `at` on, for every 128 bytes of a panel that are used. For one or two rows the hardware
// prefetcher does as well; for more rows it does not run far enough ahead. Lines go to the second-level cache; on machines with AMX, those
// of a panel that is used once (LINES = 2) go to the first level, which was measured to be fastest there (and slower on Zen 4).
//
// Tiles fetch `lines` of them for every 2 KB of a panel, so that many tiles of rows can share the work.
constexpr int ALL_LINES = 32;
inline void fetch(const char*& at, int lines, bool is_near) {
    for (int i = 0; i < lines; i++, at += 64) is_near ? __builtin_prefetch(at, 0, 3) : __builtin_prefetch(at, 0, 2);
}
template <int LINES>
ALWAYS_INLINE void prefetch(const char*& at) {
#if defined(EVERBATCH_AMX)
    constexpr int KEEP = LINES == 2 ? 3 : 2;
#else
    constexpr int KEEP = 2;
#endif
    for (int i = 0; i < LINES; i++, at += 64) __builtin_prefetch(at, 0, KEEP);
}

// Rows whose sums fit into the registers beside one row of a panel; they take rows * COLUMN_VECS registers.
#if defined(EVERBATCH_AMX)
constexpr int TILE_ROWS = 32;
#elif defined(__AVX512F__)
constexpr int TILE_ROWS = 12;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 2;
#else
constexpr int TILE_ROWS = 1;
#endif
#if defined(__AVX512F__)
constexpr int VECTOR_ROWS = 12, W8A8_ROWS = 6;
#elif defined(__AVX2__)
constexpr int VECTOR_ROWS = 2, W8A8_ROWS = 1;
#else
constexpr int VECTOR_ROWS = 1, W8A8_ROWS = 1;
#endif

template <int ROWS>
struct Sums {
    Vec v[ROWS][COLUMN_VECS];

    ALWAYS_INLINE Sums(const float* c, size_t ldc, bool first) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int j = 0; j < COLUMN_VECS; j++) v[r][j] = first ? Vec{} : load<Vec>(c + r * ldc + j * LANES);
    }
    ALWAYS_INLINE void put(float* c, size_t ldc) const {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int j = 0; j < COLUMN_VECS; j++) store(c + r * ldc + j * LANES, v[r][j]);
    }
};

ALWAYS_INLINE Vec load_floats(const float* p) { return load<Vec>(p); }
ALWAYS_INLINE Vec load_floats(const fp16* p) { return load_half(p); }

// Not inlined, so that the sums can use all registers. W: float, or fp16, of which a prefetched line serves twice as many rows of the panel.
template <int LINES, int ROWS, class W>
__attribute__((noinline)) void product_rows(const float* a, size_t lda, const W* w, int k, float* c, size_t ldc, bool first, const char* ahead) {
    Sums<ROWS> sums(c, ldc, first);
    for (int i = 0; i < k; i++, w += PANEL) {
        if (sizeof(W) == 4 || i % 2 == 0) prefetch<LINES>(ahead);
        Vec wv[COLUMN_VECS];
#pragma GCC unroll 8
        for (int j = 0; j < COLUMN_VECS; j++) wv[j] = load_floats(w + j * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            Vec x = splat(a[r * lda + i]);
#pragma GCC unroll 8
            for (int j = 0; j < COLUMN_VECS; j++) sums.v[r][j] = fma(wv[j], x, sums.v[r][j]);
        }
    }
    sums.put(c, ldc);
}

template <int LINES, int ROWS>
__attribute__((noinline)) void product_rows(const bf16* a, size_t lda, const bf16* w, int k, float* c, size_t ldc, bool first, const char* ahead) {
    Sums<ROWS> sums(c, ldc, first);
    for (int i = 0; i < k; i += 2, w += 2 * PANEL) {
        prefetch<LINES>(ahead);
        IVec wv[COLUMN_VECS];
#pragma GCC unroll 8
        for (int j = 0; j < COLUMN_VECS; j++) wv[j] = load<IVec>(w + 2 * j * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int j = 0; j < COLUMN_VECS; j++) sums.v[r][j] = dot_pairs(sums.v[r][j], wv[j], a + r * lda + i);
    }
    sums.put(c, ldc);
}

// Calls f<rows>() for 1 <= rows <= UP_TO.
template <int UP_TO, class F>
ALWAYS_INLINE void with_rows(int rows, F f) {
    if constexpr (UP_TO == 1) {
        f(std::integral_constant<int, 1>());
    } else {
        if (rows == UP_TO)
            f(std::integral_constant<int, UP_TO>());
        else
            with_rows<UP_TO - 1>(rows, f);
    }
}

#if defined(EVERBATCH_AMX)
inline void product_amx(const bf16* a, size_t lda, const bf16* w, int k, float* c, size_t ldc, bool first, int rows, const char* ahead, int lines) {
    amx::configure(rows, 64);
    const bool two = rows > 16;
    if (first) {
        amx::zero<0>(), amx::zero<1>();
        if (two) amx::zero<2>(), amx::zero<3>();
    } else {
        amx::load<0>(c, ldc * 4), amx::load<1>(c + 16, ldc * 4);
        if (two) amx::load<2>(c + 16 * ldc, ldc * 4), amx::load<3>(c + 16 * ldc + 16, ldc * 4);
    }
    for (int i = 0; i < k; i += 32, w += 1024) {
        fetch(ahead, lines, lines == ALL_LINES);
        amx::load<4>(a + i, lda * 2);
        amx::load<6>(w, 64), amx::load<7>(w + 512, 64);
        amx::dot_bf16<0, 4, 6>(), amx::dot_bf16<1, 4, 7>();
        if (two) {
            amx::load<5>(a + 16 * lda + i, lda * 2);
            amx::dot_bf16<2, 5, 6>(), amx::dot_bf16<3, 5, 7>();
        }
    }
    amx::store<0>(c, ldc * 4), amx::store<1>(c + 16, ldc * 4);
    if (two) amx::store<2>(c + 16 * ldc, ldc * 4), amx::store<3>(c + 16 * ldc + 16, ldc * 4);
}
#endif

// rows <= rows_at_once<T>(); k a multiple of 32; `first`: c is overwritten instead of added to.
template <int LINES = 0>
void product(const bf16* a, size_t lda, const bf16* w, int k, float* c, size_t ldc, bool first, int rows, const char* ahead = nullptr) {
#if defined(EVERBATCH_AMX)
    product_amx(a, lda, w, k, c, ldc, first, rows, ahead, LINES * ALL_LINES / 2);
#else
    with_rows<TILE_ROWS>(rows, [&](auto n) { product_rows<LINES, n()>(a, lda, w, k, c, ldc, first, ahead); });
#endif
}
template <int LINES = 0, class W>
void product(const float* a, size_t lda, const W* w, int k, float* c, size_t ldc, bool first, int rows, const char* ahead = nullptr) {
    with_rows<VECTOR_ROWS>(rows, [&](auto n) { product_rows<LINES, n()>(a, lda, w, k, c, ldc, first, ahead); });
}
template <class T>
constexpr int rows_at_once() {
    return sizeof(T) == 4 ? VECTOR_ROWS : TILE_ROWS;
}

// ------------------------------------------------------------------------------------------------------- int8 x int8

// Rows of int8 activations: a value is data * the scale of its group. `sums` holds minus the sum of each group's
// data, times what has been added to weights before they are multiplied: DOT_BIAS for W8A8.
struct Int8Rows {
    const int8_t* data;
    size_t ld;
    const float* scales;  // [rows][groups]
    const int32_t* sums;  // [rows][groups]
    size_t groups;        // groups of a row
};

// The scales, and zero points of four bits, of a panel's columns; `group` rows of the panel share them. `first`: the panel's row that
// is row 0 of a product.
struct Scales {
    const bf16* scales;    // [groups][PANEL]
    const uint8_t* zeros;  // the same, or null
    uint32_t group, first;

    size_t index(int row) const { return size_t((first + uint32_t(row)) / group) * PANEL; }
    const bf16* at(int row) const { return scales + index(row); }
};

// Weights of a panel of int8, read from row 0 on. four_bits.h has the same for four bits.
struct Int8Panel {
    static constexpr int QUADS = 1;  // rows in 4 * PANEL bytes, in fours
    const int8_t* at;
#if defined(EVERBATCH_AMX)
    uint32_t row = 0;
#endif

    ALWAYS_INLINE void begin_group(const Scales&, int) {}
    // What a group's integer sum begins with, if `sum` is that of the activations.
    ALWAYS_INLINE IVec start(int32_t sum) const { return DOT_BIAS ? splat(sum) : IVec{}; }
    ALWAYS_INLINE static IVec dot(IVec acc, IVec w, const int8_t* x) { return dot_quads(acc, w, x); }
    // The dwords of columns j * LANES .. + LANES, of the four rows q.
#if defined(EVERBATCH_AMX)
    ALWAYS_INLINE IVec read(int, int j) const { return load<IVec>(at + packed_at<4>(row, j * LANES)) ^ BIASED; }
    ALWAYS_INLINE void advance() { row += 4; }
    static constexpr int32_t BIASED = DOT_BIAS == WEIGHT_BIAS ? 0 : int32_t(0x80808080);  // adds DOT_BIAS to each byte
#else
    ALWAYS_INLINE IVec read(int, int j) const { return load<IVec>(at + 4 * j * LANES); }
    ALWAYS_INLINE void advance() { at += 4 * PANEL; }
#endif
};

// c (+)= sum over groups of `group` rows of (integer product of the group) * scale of the row's group * scale of the column.
template <int LINES, int ROWS, class Weights>
__attribute__((noinline)) void product_int8_rows(Int8Rows a, Weights w, Scales scales, int group, int num_groups, float* c, size_t ldc,
                                                 bool first, const char* ahead) {
    Sums<ROWS> sums(c, ldc, first);
    for (int g = 0, i = 0; g < num_groups; g++) {
        IVec whole[ROWS][COLUMN_VECS];
        w.begin_group(scales, i);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int j = 0; j < COLUMN_VECS; j++) whole[r][j] = w.start(a.sums[r * a.groups + g]);
        const bf16* of_columns = scales.at(i);
        for (const int end = i + group; i < end; i += 4 * Weights::QUADS) {
            prefetch<LINES>(ahead);
#pragma GCC unroll 2
            for (int q = 0; q < Weights::QUADS; q++) {
                IVec wv[COLUMN_VECS];
#pragma GCC unroll 8
                for (int j = 0; j < COLUMN_VECS; j++) wv[j] = w.read(q, j);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                    for (int j = 0; j < COLUMN_VECS; j++) whole[r][j] = w.dot(whole[r][j], wv[j], a.data + r * a.ld + i + 4 * q);
            }
            w.advance();
        }
        Vec ws[COLUMN_VECS];
#pragma GCC unroll 8
        for (int j = 0; j < COLUMN_VECS; j++) ws[j] = load_bf16(of_columns + j * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            Vec rs = splat(a.scales[r * a.groups + g]);
#pragma GCC unroll 8
            for (int j = 0; j < COLUMN_VECS; j++)
                sums.v[r][j] = fma(__builtin_convertvector(whole[r][j], Vec), ws[j] * rs, sums.v[r][j]);
        }
    }
    sums.put(c, ldc);
}

#if defined(EVERBATCH_AMX)
// The scales of group g of the activations: those of a table.
struct TableScaling {
    static constexpr bool MINIMA = false;
    Scales scales;
    int group;

    Vec scale(int g, int j) const { return load_bf16(scales.at(g * group) + j * LANES); }
    Vec minimum(int, int) const { return Vec{}; }
};

// Integer sums of two groups of the input, which the tiles store and vectors convert to float32.
struct alignas(64) WholeSums {
    int32_t of[2][32][PANEL];  // [group][row][column]
};

// c (+)= the scaled sums of groups g .. g + GROUPS - 1, for rows r0 .. r1.
template <int GROUPS, class Scaling>
void add_scaled(Int8Rows a, Scaling scaling, int g, const WholeSums& whole, float* c, size_t ldc, bool first, int r0, int r1) {
    Vec ws[GROUPS][COLUMN_VECS], wm[GROUPS][COLUMN_VECS];
    for (int n = 0; n < GROUPS; n++)
        for (int j = 0; j < COLUMN_VECS; j++) {
            ws[n][j] = scaling.scale(g + n, j);
            if constexpr (Scaling::MINIMA) wm[n][j] = scaling.minimum(g + n, j);
        }
    for (int r = r0; r < r1; r++)
        for (int j = 0; j < COLUMN_VECS; j++) {
            Vec sum = first && g == 0 ? Vec{} : load<Vec>(c + r * ldc + j * LANES);
            for (int n = 0; n < GROUPS; n++) {
                const Vec x = __builtin_convertvector(load<IVec>(whole.of[n][r] + j * LANES), Vec);
                const float scale = a.scales[r * a.groups + g + n];
                sum = fma(x, ws[n][j] * splat(scale), sum);
                if constexpr (Scaling::MINIMA) sum = fma(wm[n][j], splat(scale * float(a.sums[r * a.groups + g + n])), sum);
            }
            store(c + r * ldc + j * LANES, sum);
        }
}

// Tiles cannot multiply by scales, and their stores can be loaded only once they have reached the cache. So groups are taken in pairs:
// while the tiles multiply one group of a pair, vectors scale half of the rows of the pair before it.
template <class Scaling>
void product_int8_amx(Int8Rows a, const int8_t* w, Scaling scaling, int group, int num_groups, float* c, size_t ldc, bool first,
                      int rows, const char* ahead, int lines) {
    const bool two = rows > 16;
    const int depth = std::min(64, group & -group), middle = two ? 16 : (rows + 1) / 2;
    WholeSums whole[2];  // sums of the pair that the tiles multiply, and of the one before
    amx::configure(rows, depth);
    for (int g = 0; g < (num_groups + 1) / 2 * 2 + 2; g++) {
        const int before = g / 2 * 2 - 2;  // the first group of the pair before
        if (g < num_groups) {
            amx::zero<0>(), amx::zero<1>();
            if (two) amx::zero<2>(), amx::zero<3>();
            for (int i = g * group; i < (g + 1) * group; i += depth) {
                fetch(ahead, lines * depth / 64, lines == ALL_LINES);
                const int8_t* at = w + packed_at<4>(i, 0);
                amx::load<4>(a.data + i, a.ld);
                amx::load<6>(at, 64), amx::load<7>(at + 1024, 64);
                amx::dot_int8<0, 4, 6>(), amx::dot_int8<1, 4, 7>();
                if (two) {
                    amx::load<5>(a.data + 16 * a.ld + i, a.ld);
                    amx::dot_int8<2, 5, 6>(), amx::dot_int8<3, 5, 7>();
                }
            }
        }
        if (before >= 0) {
            const int r0 = g % 2 ? middle : 0, r1 = g % 2 ? rows : middle;
            const WholeSums& sums = whole[before / 2 % 2];
            if (before + 1 < num_groups)
                add_scaled<2>(a, scaling, before, sums, c, ldc, first, r0, r1);
            else
                add_scaled<1>(a, scaling, before, sums, c, ldc, first, r0, r1);
        }
        if (g < num_groups) {
            int32_t(*at)[PANEL] = whole[g / 2 % 2].of[g % 2];
            amx::store<0>(at[0], PANEL * 4), amx::store<1>(at[0] + 16, PANEL * 4);
            if (two) amx::store<2>(at[16], PANEL * 4), amx::store<3>(at[16] + 16, PANEL * 4);
        }
    }
}
#endif

// By vectors: rows <= W8A8_ROWS; group a multiple of 32. With AMX, product_int8_amx yields the same bits.
template <int LINES, class Weights>
void product_int8(Int8Rows a, Weights w, Scales scales, int group, int num_groups, float* c, size_t ldc, bool first, int rows, const char* ahead) {
    with_rows<W8A8_ROWS>(rows, [&](auto n) { product_int8_rows<LINES, n()>(a, w, scales, group, num_groups, c, ldc, first, ahead); });
}

}  // namespace everbatch
