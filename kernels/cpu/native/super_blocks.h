// Weights in blocks of rows of a column of a panel: llama.cpp's types (ggml-quants.c), in as many bits as in its files. Nothing is rounded.
//
//     flat     blocks of 32 rows        w = d * v, or d * v - e
//     super    super-blocks of 256      w = d * s * v, or d * s * v - e * m, with s (int8) and m (0 .. 127) of a group of 16 or 32 rows
//
// v is q - centre or values[q], with q of 2 to 8 bits; d and e are float16, bfloat16 in MXFP4, and float32 in the kinds MIX, which hold layers whose
// rows are of several types. kernels/common/super_blocks.py has the table of the kinds.
//
// A block of a panel is one run of bytes: d [32 columns]; e [32] if there are minima; of super-blocks with values these, 16 bytes, a float that d is
// multiplied by, and zeros up to 64 bytes; of super-blocks s [groups][32] and m [groups][32]; then for each 32 rows the low bits, four or two of each
// q, and the bits above them: planes of [.. quads of rows][32 columns][4] bytes, where a byte has as many quads of rows as fit.
//
// The minimum of a group is multiplied by the sum of its activations. With tiles, blocks are unpacked to int8 once for all rows: the sums of a group
// are the same integers, and so the result is the same, bit for bit.
#pragma once
#include "formats.h"
#include "four_bits.h"

namespace everbatch {

constexpr int CHUNK_ROWS = 32;

enum Tables { HALVES, BFLOATS, FLOATS };
enum Values { NO_VALUES, OF_NL, OF_FP4, IN_BLOCK };  // what q stands for

template <int ROWS_, int BITS, int GROUP_, bool MINIMA_, int CENTRE_, Values VALUES_ = NO_VALUES, Tables TABLES_ = HALVES>
struct SuperBlocks {
    static constexpr int ROWS = ROWS_, GROUP = GROUP_, GROUPS_OF_CHUNK = CHUNK_ROWS / GROUP, GROUPS = ROWS / GROUP, QUADS = GROUP / 4;
    static constexpr int CHUNKS = ROWS / CHUNK_ROWS, CENTRE = CENTRE_;
    static constexpr bool MINIMA = MINIMA_, IS_SUPER = ROWS > CHUNK_ROWS, VALUES = VALUES_ != NO_VALUES, HAS_HEADER = VALUES_ == IN_BLOCK;
    // Weights that bytes hold with a sign are multiplied as those of int8; others as numbers from 0 on, less their centre.
    static constexpr bool IS_SIGNED = VALUES || BITS == 8;
    static constexpr int LOW_BITS = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH_BITS = BITS - LOW_BITS;
    static constexpr int OF_TABLE = (TABLES_ == FLOATS ? 4 : 2) * PANEL * (IS_SUPER ? 1 : GROUPS), TABLES = OF_TABLE * (1 + MINIMA);
    static constexpr int SCALES = TABLES + (HAS_HEADER ? 64 : 0), HEAD = SCALES + (IS_SUPER ? GROUPS * PANEL * (1 + MINIMA) : 0);
    static constexpr int LOW = 4 * PANEL * LOW_BITS, CHUNK = 4 * PANEL * BITS, BYTES = HEAD + CHUNKS * CHUNK;

    // What a group's integer sum begins with, if `sum` is minus that of the activations.
    static constexpr int OFFSET = IS_SIGNED ? DOT_BIAS : CENTRE;
    ALWAYS_INLINE static IVec start(int32_t sum) {
        return OFFSET ? splat(OFFSET * sum) : IVec{};
    }
    ALWAYS_INLINE static IVec dot(IVec acc, IVec w, const int8_t* x) { return IS_SIGNED ? dot_quads(acc, w, x) : dot_nibbles(acc, w, x); }

    // What q stands for plus DOT_BIAS, where values are looked up.
    ALWAYS_INLINE static Bytes values(const uint8_t* block) {
        static constexpr int8_t NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // ggml's kvalues_iq4nl
        static constexpr int8_t FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice those of e2m1
        return repeated(HAS_HEADER ? reinterpret_cast<const int8_t*>(block) + TABLES : VALUES_ == OF_NL ? NL : FP4) + uint8_t(DOT_BIAS);
    }
    // Bits of a plane of a chunk, at the place `to` of each byte.
    template <int WIDTH, int TO>
    ALWAYS_INLINE static UVec plane(const uint8_t* at, int quad, int j) {
        constexpr int QUADS_OF_BYTE = 8 / WIDTH;
        constexpr uint32_t MASK = ((1u << WIDTH) - 1u) << TO;
        const UVec bits = load<UVec>(at + quad / QUADS_OF_BYTE * 4 * PANEL + 4 * j * LANES);
        const int from = quad % QUADS_OF_BYTE * WIDTH;
        return (from < TO ? bits << (TO - from) : bits >> (from - TO)) & (MASK * 0x01010101u);
    }
    // The weights of the quad-th four of a chunk's rows, for columns j * LANES .. + LANES: q, or with IS_SIGNED what it stands for plus DOT_BIAS.
    ALWAYS_INLINE static IVec read(const uint8_t* chunk, int quad, int j, [[maybe_unused]] Bytes values) {
        if constexpr (BITS == 8) return load<IVec>(chunk + quad * 4 * PANEL + 4 * j * LANES) ^ (DOT_BIAS ? 0 : int32_t(0x80808080));
        UVec q = plane<LOW_BITS == 8 ? 4 : LOW_BITS, 0>(chunk, quad, j);
        if constexpr (HIGH_BITS > 0) q |= plane<HIGH_BITS, LOW_BITS>(chunk + LOW, quad, j);
        if constexpr (VALUES) return (IVec)look_up(values, (Bytes)q);
        return (IVec)q;
    }
    // The scale and minimum of a group of a block; d and e are of_block(block, 0 and 1, group, j).
    ALWAYS_INLINE static Vec scale(Vec d, const uint8_t* block, int group, int j) {
        if constexpr (!IS_SUPER) return d;
        return d * __builtin_convertvector(load_bytes(block + SCALES + group * PANEL + j * LANES), Vec);
    }
    ALWAYS_INLINE static Vec minimum(Vec e, const uint8_t* block, int group, int j) { return scale(e, block, GROUPS + group, j); }
    ALWAYS_INLINE static Vec of_block(const uint8_t* block, int table, int group, int j) {
        const int at = (IS_SUPER ? 0 : group * PANEL) + j * LANES;
        if constexpr (TABLES_ == FLOATS) return load<Vec>(reinterpret_cast<const float*>(block + table * OF_TABLE) + at);
        if constexpr (TABLES_ == BFLOATS) return load_bf16(reinterpret_cast<const bf16*>(block + table * OF_TABLE) + at);
        const Vec of_table = load_half(reinterpret_cast<const uint16_t*>(block + table * OF_TABLE) + at);
        if constexpr (!HAS_HEADER) return of_table;
        float unit;
        memcpy(&unit, block + TABLES + 16, 4);
        return of_table * splat(unit);
    }
};

// Calls F(format, template arguments of its SuperBlocks) for each format.
#define EVERBATCH_SUPER_BLOCKS(F)                              \
    F(Q4_0, 32, 4, 32, false, 8)                               \
    F(Q4_1, 32, 4, 32, true, 0)                                \
    F(Q5_0, 32, 5, 32, false, 16)                              \
    F(Q5_1, 32, 5, 32, true, 0)                                \
    F(Q8_0, 32, 8, 32, false, 128)                             \
    F(IQ4_NL, 32, 4, 32, false, 0, OF_NL)                      \
    F(MXFP4, 32, 4, 32, false, 0, OF_FP4, BFLOATS)             \
    F(Q2_K, 256, 2, 16, true, 0)                               \
    F(Q3_K, 256, 3, 16, false, 4)                              \
    F(Q4_K, 256, 4, 32, true, 0)                               \
    F(Q5_K, 256, 5, 32, true, 0)                               \
    F(Q6_K, 256, 6, 16, false, 32)                             \
    F(TERNARY, 256, 2, 32, false, 1)                           \
    F(VALUES_32, 256, 4, 32, false, 0, IN_BLOCK)               \
    F(VALUES_16, 256, 4, 16, false, 0, IN_BLOCK)               \
    F(K_MIX, 256, 6, 16, true, 32)                             \
    F(MIX_32, 32, 8, 32, true, 128, NO_VALUES, FLOATS)         \
    F(MIX_16, 32, 8, 16, true, 128, NO_VALUES, FLOATS)

// Calls f with the SuperBlocks of a format.
template <class F>
ALWAYS_INLINE void with_super_blocks(int32_t format, F f) {
#define EVERBATCH_CASE(name, ...) case name: return f(SuperBlocks<__VA_ARGS__>());
    switch (format) { EVERBATCH_SUPER_BLOCKS(EVERBATCH_CASE) }
#undef EVERBATCH_CASE
}

// c (+)= activations times `count` super-blocks of a panel. Of every 128 bytes that are read, `lines` cache lines ahead are fetched. Compiled once, in
// super_blocks.cpp: they are most of what the compiler has to do.
template <class S>
void product_super(Int8Rows a, const uint8_t* w, int count, float* c, size_t ldc, bool first, int rows, const char* ahead, int lines);

// `count` super-blocks of a panel -> a packed panel of int8.
template <class S>
void unpack_super(const uint8_t* w, int count, int8_t* out) {
    const Bytes offset = Bytes{} + uint8_t(WEIGHT_BIAS - S::OFFSET);
    for (int b = 0, row = 0; b < count; b++, w += S::BYTES) {
        const uint8_t* bits = w + S::HEAD;
        const Bytes values = S::VALUES ? S::values(w) : Bytes{};
        for (int chunk = 0; chunk < S::CHUNKS; chunk++, bits += S::CHUNK)
#pragma GCC unroll 8
            for (int quad = 0; quad < CHUNK_ROWS / 4; quad++, row += 4)
                for (int j = 0; j < COLUMN_VECS; j++)
                    store(out + packed_at<4>(row, j * LANES), (Bytes)S::read(bits, quad, j, values) + offset);
    }
}

// put(row, weight) for the first `k` rows of a column of a panel.
template <class S, class Put>
void unpack_column(const uint8_t* panel, int column, int64_t k, Put put) {
    const auto bits_at = [&](const uint8_t* plane, int width, int row) {
        const int quads_of_byte = 8 / width, quad = row / 4;
        return plane[quad / quads_of_byte * 4 * PANEL + column * 4 + row % 4] >> quad % quads_of_byte * width & ((1 << width) - 1);
    };
    const int j = column / LANES;
    for (int64_t first = 0; first < k; first += S::ROWS, panel += S::BYTES) {
        alignas(64) int8_t values[sizeof(Bytes)];
        if (S::VALUES) store(values, S::values(panel) - uint8_t(DOT_BIAS));
        for (int g = 0; g < S::GROUPS; g++) {
            float scale[LANES], minimum[LANES] = {};
            store(scale, S::scale(S::of_block(panel, 0, g, j), panel, g, j));
            if (S::MINIMA) store(minimum, S::minimum(S::of_block(panel, 1, g, j), panel, g, j));
            for (int row = g * S::GROUP; row < (g + 1) * S::GROUP && first + row < k; row++) {
                const uint8_t* chunk = panel + S::HEAD + row / CHUNK_ROWS * S::CHUNK;
                int q = bits_at(chunk, S::LOW_BITS, row % CHUNK_ROWS);
                if constexpr (S::HIGH_BITS > 0) q |= bits_at(chunk + S::LOW, S::HIGH_BITS, row % CHUNK_ROWS) << S::LOW_BITS;
                const float product = float(S::VALUES ? values[q] : q - S::CENTRE) * scale[column % LANES];
                put(first + row, product - minimum[column % LANES]);
            }
        }
    }
}

// The scales and minima of group g of the packed super-blocks at `data`.
template <class S>
struct SuperScaling {
    static constexpr bool MINIMA = S::MINIMA;
    const uint8_t* data;

    const uint8_t* block(int g) const { return data + int64_t(g / S::GROUPS) * S::BYTES; }
    Vec scale(int g, int j) const { return S::scale(S::of_block(block(g), 0, g % S::GROUPS, j), block(g), g % S::GROUPS, j); }
    Vec minimum(int g, int j) const { return S::minimum(S::of_block(block(g), 1, g % S::GROUPS, j), block(g), g % S::GROUPS, j); }
};

// The numbers of a column's blocks, as everbatch_pack_super takes them: [k] of q; of super-blocks [groups] of s and m; d and e of each block, or of
// each group in blocks without groups of their own; 16 values, and what d is multiplied by. A table that the kind has not is null.
struct SuperColumn {
    const uint8_t* q;
    const int8_t* s;
    const uint8_t* m;
    const uint8_t *d, *e;
    const int8_t* values;
    float unit;
};

// Writes `column` of a panel, whose memory is all zero before its first column.
template <class S>
void pack_super(const SuperColumn& from, int64_t k, int column, uint8_t* panel) {
    constexpr int TABLES = S::IS_SUPER ? 1 : S::GROUPS, SIZE = S::OF_TABLE / PANEL / TABLES;
    auto put = [&](int plane, int width, int row, int bits) {
        const int quads_of_byte = 8 / width, quad = row / 4;
        panel[plane + quad / quads_of_byte * 4 * PANEL + column * 4 + row % 4] |= uint8_t(bits << quad % quads_of_byte * width);
    };
    for (int64_t b = 0; b < k / S::ROWS; b++, panel += S::BYTES) {
        for (int i = 0; i < TABLES; i++) {
            memcpy(panel + (i * PANEL + column) * SIZE, from.d + (b * TABLES + i) * SIZE, SIZE);
            if (S::MINIMA) memcpy(panel + S::OF_TABLE + (i * PANEL + column) * SIZE, from.e + (b * TABLES + i) * SIZE, SIZE);
        }
        if (S::HAS_HEADER) {
            memcpy(panel + S::TABLES, from.values, 16);
            memcpy(panel + S::TABLES + 16, &from.unit, 4);
        }
        for (int g = 0; S::IS_SUPER && g < S::GROUPS; g++) {
            panel[S::SCALES + g * PANEL + column] = uint8_t(from.s[b * S::GROUPS + g]);
            if (S::MINIMA) panel[S::SCALES + (S::GROUPS + g) * PANEL + column] = from.m[b * S::GROUPS + g];
        }
        for (int row = 0; row < S::ROWS; row++) {
            const int q = from.q[b * S::ROWS + row], chunk = S::HEAD + row / CHUNK_ROWS * S::CHUNK;
            put(chunk, S::LOW_BITS, row % CHUNK_ROWS, q & ((1 << S::LOW_BITS) - 1));
            if constexpr (S::HIGH_BITS > 0) put(chunk + S::LOW, S::HIGH_BITS, row % CHUNK_ROWS, q >> S::LOW_BITS);
        }
    }
}

}  // namespace everbatch
