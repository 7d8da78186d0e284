// Weights of four bits (W4A8), q of 0 .. 15, of one of two kinds. A weight is its scale times
//
//     EVEN      q - 8
//     ZEROS     q - zero, where each group of a column has its zero point of 0 .. 16
//
// A packed panel is [k / 8][32 columns][4] bytes, in the same order with and without AMX: the low bits of a byte hold q of one of the
// eight rows' first four, the high bits that of the row four below it. So one load yields two dwords of a dot product for each column.
//
// Vector instructions multiply what is unpacked in registers. For tiles, a piece of a panel is unpacked once to the int8 that it stands
// for. Either way the sum of a group is the same integer, and so the result is the same, bit for bit.
#pragma once
#include "tiles.h"

namespace everbatch {

enum FourBits { EVEN, ZEROS };
constexpr int EVEN_ZERO = 8;

// Weights of a panel of four bits, read from row 0 on, in the way of Int8Panel: q where they are EVEN, else what q stands for, plus BIAS.
template <FourBits KIND, int BIAS = DOT_BIAS>
struct Int4Panel {
    static constexpr int QUADS = 2;
    const uint8_t* at;
    Bytes offsets[COLUMN_VECS];  // ZEROS: BIAS - zero, in each byte of a column's dword

    ALWAYS_INLINE explicit Int4Panel(const void* data) : at(static_cast<const uint8_t*>(data)) {}
    ALWAYS_INLINE void begin_group(const Scales& scales, int row) {
        constexpr int32_t IN_EACH_BYTE = 0x01010101;
        if constexpr (KIND == ZEROS) {
            const uint8_t* zeros = scales.zeros + scales.index(row);
#pragma GCC unroll 8
            for (int j = 0; j < COLUMN_VECS; j++) offsets[j] = uint8_t(BIAS) - (Bytes)(load_bytes(zeros + j * LANES) * IN_EACH_BYTE);
        }
    }
    ALWAYS_INLINE IVec start(int32_t sum) const { return splat(sum * (KIND == EVEN ? EVEN_ZERO : DOT_BIAS)); }
    ALWAYS_INLINE static IVec dot(IVec acc, IVec w, const int8_t* x) { return KIND == EVEN ? dot_nibbles(acc, w, x) : dot_quads(acc, w, x); }
    ALWAYS_INLINE IVec read(int q, int j) const {
        const UVec bytes = load<UVec>(at + 4 * j * LANES) >> 4 * q, nibbles = bytes & 0x0f0f0f0fu;
        if constexpr (KIND == ZEROS) return (IVec)((Bytes)nibbles + offsets[j]);
        return (IVec)nibbles;
    }
    ALWAYS_INLINE void advance() { at += 4 * PANEL; }
};

// Rows 0 .. count of four bits, a multiple of 32 -> a packed panel of int8.
template <FourBits KIND>
void unpack_int4(const void* data, const Scales& scales, int count, int8_t* out) {
    Int4Panel<KIND, WEIGHT_BIAS> panel(data);
    const Bytes offset = Bytes{} + uint8_t(KIND == EVEN ? WEIGHT_BIAS - EVEN_ZERO : 0);
    for (int i = 0; i < count; i += 8, panel.advance()) {
        if (i % PANEL == 0) panel.begin_group(scales, i);
        for (int q = 0; q < panel.QUADS; q++)
            for (int j = 0; j < COLUMN_VECS; j++) store(out + packed_at<4>(i + 4 * q, j * LANES), (Bytes)panel.read(q, j) + offset);
    }
}

// Index of the byte of (row, column) in a packed panel of four bits, and where in it.
constexpr size_t int4_packed_at(int64_t row, int64_t column) { return size_t(row / 8 * 4 * PANEL + column * 4 + row % 4); }
constexpr int int4_shift(int64_t row) { return row / 4 % 2 * 4; }

}  // namespace everbatch
