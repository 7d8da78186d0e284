// Weights in super-blocks of 256 rows of a column of a panel: llama.cpp's (ggml-quants.c), in as many bits as in its files.
//
//     Q4_K     4 bits, groups of 32    w = (d * s) * q - (e * m)
//     Q5_K     5 bits, groups of 32    the same
//     Q6_K     6 bits, groups of 16    w = (d * s) * (q - 32)
//     K_MIX    6 bits, groups of 16    w = (d * s) * (q - 32) - (e * m), for a layer whose rows are of several of the types above
//
// d and e, one for a super-block, are float16; s (int8) and m (0 .. 127) are a group's. Nothing is rounded.
//
// A super-block of a panel is one run of bytes: d [32]; e [32] if there are minima m; s [groups][32]; m [groups][32]; then eight times, for
// 32 rows each, the low four bits in the order of four_bits.h [4][32 columns][4], and the bits above them: [32][4] bytes with a bit for each four
// rows, or [2][32][4] bytes with two bits for each four.
//
// The minimum of a group is multiplied by the sum of its activations. With tiles, super-blocks are unpacked to int8 once for all rows: the
// sums of a group are the same integers, and so the result is the same, bit for bit.
#pragma once
#include "formats.h"
#include "four_bits.h"

namespace everbatch {

constexpr int SUPER_ROWS = 256, CHUNK_ROWS = 32;

constexpr int CHUNKS = SUPER_ROWS / CHUNK_ROWS;

template <int BITS, int GROUP_, bool MINIMA_>
struct SuperBlocks {
    static constexpr int GROUP = GROUP_, GROUPS_OF_CHUNK = CHUNK_ROWS / GROUP, GROUPS = SUPER_ROWS / GROUP, QUADS = GROUP / 4;
    static constexpr bool MINIMA = MINIMA_;
    static constexpr int CENTRE = BITS == 6 ? 32 : 0, HIGH_BITS = BITS - 4;
    static constexpr int TABLES = 2 * PANEL * (1 + MINIMA), HEAD = TABLES + GROUPS * PANEL * (1 + MINIMA);
    static constexpr int LOW = 4 * 4 * PANEL, CHUNK = LOW + 4 * PANEL * HIGH_BITS, BYTES = HEAD + CHUNKS * CHUNK;

    // What a group's integer sum begins with, if `sum` is minus that of the activations.
    ALWAYS_INLINE static IVec start(int32_t sum) { return CENTRE ? splat(CENTRE * sum) : IVec{}; }

    // q of the quad-th four of a chunk's rows, for columns j * LANES .. + LANES.
    ALWAYS_INLINE static IVec read(const uint8_t* chunk, int quad, int j) {
        UVec q = load<UVec>(chunk + quad / 2 * 4 * PANEL + 4 * j * LANES) >> (quad % 2 * 4);
        q &= 0x0f0f0f0fu;
        if constexpr (HIGH_BITS > 0) {
            constexpr int QUADS_OF_BYTE = 8 / HIGH_BITS;
            constexpr uint32_t MASK = HIGH_BITS == 1 ? 0x10101010u : 0x30303030u;
            const UVec high = load<UVec>(chunk + LOW + quad / QUADS_OF_BYTE * 4 * PANEL + 4 * j * LANES);
            const int from = quad % QUADS_OF_BYTE * HIGH_BITS;  // the place of the bits in their byte
            q |= (from < 4 ? high << (4 - from) : high >> (from - 4)) & MASK;
        }
        return (IVec)q;
    }
    // The scale and minimum of a group of a super-block; d and e are of_block(block, 0 and 1, j).
    ALWAYS_INLINE static Vec scale(Vec d, const uint8_t* block, int group, int j) {
        return d * __builtin_convertvector(load_bytes(block + TABLES + group * PANEL + j * LANES), Vec);
    }
    ALWAYS_INLINE static Vec minimum(Vec e, const uint8_t* block, int group, int j) { return scale(e, block, GROUPS + group, j); }
    ALWAYS_INLINE static Vec of_block(const uint8_t* block, int table, int j) {
        return load_half(reinterpret_cast<const uint16_t*>(block) + table * PANEL + j * LANES);
    }
};

// Calls f with the SuperBlocks of a format.
template <class F>
ALWAYS_INLINE void with_super_blocks(int32_t format, F f) {
    switch (format) {
        case Q4_K: return f(SuperBlocks<4, 32, true>());
        case Q5_K: return f(SuperBlocks<5, 32, true>());
        case Q6_K: return f(SuperBlocks<6, 16, false>());
        case K_MIX: return f(SuperBlocks<6, 16, true>());
    }
}

// c (+)= activations times `count` super-blocks of a panel. Of every 128 bytes that are read, `lines` cache lines ahead are fetched.
template <class S, int ROWS>
__attribute__((noinline)) void product_super_rows(Int8Rows a, const uint8_t* w, int count, float* c, size_t ldc, bool first, const char* ahead,
                                                  int lines) {
    Sums<ROWS> sums(c, ldc, first);
    const int64_t fetched = S::BYTES / CHUNKS * lines / 2;
    for (int g = 0; count > 0; count--, w += S::BYTES) {
        Vec d[COLUMN_VECS], e[COLUMN_VECS];
#pragma GCC unroll 8
        for (int j = 0; j < COLUMN_VECS; j++) {
            d[j] = S::of_block(w, 0, j);
            if (S::MINIMA) e[j] = S::of_block(w, 1, j);
        }
        const uint8_t* bits = w + S::HEAD;
        for (int chunk = 0; chunk < CHUNKS; chunk++, bits += S::CHUNK, ahead += fetched) {
            for (int64_t i = 0; i < fetched; i += 64) __builtin_prefetch(ahead + i, 0, 2);
#pragma GCC unroll 2
            for (int of_chunk = 0; of_chunk < S::GROUPS_OF_CHUNK; of_chunk++, g++, a.data += S::GROUP) {
                IVec whole[ROWS][COLUMN_VECS];
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                    for (int j = 0; j < COLUMN_VECS; j++) whole[r][j] = S::start(a.sums[r * a.groups + g]);
#pragma GCC unroll 8
                for (int quad = 0; quad < S::QUADS; quad++) {
                    IVec wv[COLUMN_VECS];
#pragma GCC unroll 8
                    for (int j = 0; j < COLUMN_VECS; j++) wv[j] = S::read(bits, of_chunk * S::QUADS + quad, j);
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                        for (int j = 0; j < COLUMN_VECS; j++) whole[r][j] = dot_nibbles(whole[r][j], wv[j], a.data + r * a.ld + 4 * quad);
                }
                Vec ws[COLUMN_VECS], wm[COLUMN_VECS];
#pragma GCC unroll 8
                for (int j = 0; j < COLUMN_VECS; j++) {
                    ws[j] = S::scale(d[j], w, chunk * S::GROUPS_OF_CHUNK + of_chunk, j);
                    if (S::MINIMA) wm[j] = S::minimum(e[j], w, chunk * S::GROUPS_OF_CHUNK + of_chunk, j);
                }
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const float scale = a.scales[r * a.groups + g];
                    const Vec rs = splat(scale), minus_sum = splat(scale * float(a.sums[r * a.groups + g]));
#pragma GCC unroll 8
                    for (int j = 0; j < COLUMN_VECS; j++) {
                        sums.v[r][j] = fma(__builtin_convertvector(whole[r][j], Vec), ws[j] * rs, sums.v[r][j]);
                        if (S::MINIMA) sums.v[r][j] = fma(wm[j], minus_sum, sums.v[r][j]);
                    }
                }
            }
        }
    }
    sums.put(c, ldc);
}

template <class S>
void product_super(Int8Rows a, const uint8_t* w, int count, float* c, size_t ldc, bool first, int rows, const char* ahead, int lines) {
    with_rows<W8A8_ROWS>(rows, [&](auto n) { product_super_rows<S, n()>(a, w, count, c, ldc, first, ahead, lines); });
}

// `count` super-blocks of a panel -> a packed panel of int8.
template <class S>
void unpack_super(const uint8_t* w, int count, int8_t* out) {
    const Bytes offset = Bytes{} + uint8_t(WEIGHT_BIAS - S::CENTRE);
    for (int b = 0, row = 0; b < count; b++, w += S::BYTES) {
        const uint8_t* bits = w + S::HEAD;
        for (int chunk = 0; chunk < CHUNKS; chunk++, bits += S::CHUNK)
#pragma GCC unroll 8
            for (int quad = 0; quad < CHUNK_ROWS / 4; quad++, row += 4)
                for (int j = 0; j < COLUMN_VECS; j++)
                    store(out + packed_at<4>(row, j * LANES), (Bytes)S::read(bits, quad, j) + offset);
    }
}

// The scales and minima of group g of the packed super-blocks at `data`.
template <class S>
struct SuperScaling {
    static constexpr bool MINIMA = S::MINIMA;
    const uint8_t* data;

    const uint8_t* block(int g) const { return data + int64_t(g / S::GROUPS) * S::BYTES; }
    Vec scale(int g, int j) const { return S::scale(S::of_block(block(g), 0, j), block(g), g % S::GROUPS, j); }
    Vec minimum(int g, int j) const { return S::minimum(S::of_block(block(g), 1, j), block(g), g % S::GROUPS, j); }
};

// The numbers of a column's super-blocks, as everbatch_pack_super takes them: [k] of q, [groups] of s and m, [k / 256] of d and e.
struct SuperColumn {
    const uint8_t* q;
    const int8_t* s;
    const uint8_t* m;  // null without minima
    const uint16_t *d, *e;
};

// Writes `column` of a panel, whose memory is all zero before its first column.
template <class S>
void pack_super(const SuperColumn& from, int64_t k, int column, uint8_t* panel) {
    for (int64_t b = 0; b < k / SUPER_ROWS; b++, panel += S::BYTES) {
        memcpy(panel + 2 * column, from.d + b, 2);
        if (S::MINIMA) memcpy(panel + 2 * (PANEL + column), from.e + b, 2);
        for (int g = 0; g < S::GROUPS; g++) {
            panel[S::TABLES + g * PANEL + column] = uint8_t(from.s[b * S::GROUPS + g]);
            if (S::MINIMA) panel[S::TABLES + (S::GROUPS + g) * PANEL + column] = from.m[b * S::GROUPS + g];
        }
        uint8_t* chunk = panel + S::HEAD;
        for (int64_t first = b * SUPER_ROWS; first < (b + 1) * SUPER_ROWS; first += CHUNK_ROWS, chunk += S::CHUNK) {
            for (int row = 0; row < CHUNK_ROWS; row++) {
                const uint8_t q = from.q[first + row];
                chunk[int4_packed_at(row, column)] |= uint8_t((q & 15) << int4_shift(row));
                if constexpr (S::HIGH_BITS > 0) {
                    constexpr int QUADS_OF_BYTE = 8 / S::HIGH_BITS;
                    const int quad = row / 4, shift = quad % QUADS_OF_BYTE * S::HIGH_BITS;
                    chunk[S::LOW + quad / QUADS_OF_BYTE * 4 * PANEL + column * 4 + row % 4] |= uint8_t((q >> 4) << shift);
                }
            }
        }
    }
}

}  // namespace everbatch
