// Weights of four bits: a weight is (q - zero) * scale, with q of 0 .. 15 and a zero point of 0 .. 16 (8 without zero points).
//
// A packed panel is [k / 8][32 columns][4] bytes, in the same order with and without AMX: the low bits of a byte hold q of one of the
// eight rows' first four, the high bits that of the row four below it. So one load yields two dwords of a dot product for each column.
//
// Few rows multiply what is unpacked in registers. For more, a piece of a panel is unpacked once to the int8 that it stands for, and
// multiplied as int8 weights are. Either way the sum of a group is the same integer, and so the result is the same, bit for bit.
#pragma once
#include "tiles.h"

namespace everbatch {

constexpr int ZERO_OF_FOUR_BITS = 8;  // the zero point of panels without zero points

// Weights of a panel of four bits, read from row 0 on: read() yields two dwords of q - zero + BIAS for each column.
template <int BIAS>
struct Int4Panel {
    static constexpr int QUADS = 2;
    const uint8_t* at;
    Bytes offsets[COLUMN_VECS] = {};  // BIAS - zero, in each byte of a column's dword

    ALWAYS_INLINE explicit Int4Panel(const void* data) : at(static_cast<const uint8_t*>(data)) {}

    ALWAYS_INLINE void begin_group(const Scales& scales, int row) {
        constexpr int32_t IN_EACH_BYTE = 0x01010101;
        const uint8_t* zeros = scales.zeros ? scales.zeros + scales.index(row) : nullptr;
#pragma GCC unroll 8
        for (int j = 0; j < COLUMN_VECS; j++) {
            const IVec zero = zeros ? __builtin_convertvector(load<Quarter>(zeros + j * LANES), IVec) : splat(ZERO_OF_FOUR_BITS);
            offsets[j] = uint8_t(BIAS) - (Bytes)(zero * IN_EACH_BYTE);
        }
    }
    ALWAYS_INLINE void read(IVec (&w)[QUADS][COLUMN_VECS]) {
#pragma GCC unroll 8
        for (int j = 0; j < COLUMN_VECS; j++) {
            const UVec v = load<UVec>(at + 4 * j * LANES), low = v & 0x0f0f0f0fu, high = (v >> 4) & 0x0f0f0f0fu;
            w[0][j] = (IVec)((Bytes)low + offsets[j]), w[1][j] = (IVec)((Bytes)high + offsets[j]);
        }
        at += 4 * PANEL;
    }
};

// Rows 0 .. count of four bits -> a packed panel of int8. `group` divides scales.group and count, and is a multiple of 8.
inline void unpack_int4(const void* data, const Scales& scales, int group, int count, int8_t* out) {
    Int4Panel<WEIGHT_BIAS> panel(data);
    for (int row = 0; row < count; row += group) {
        panel.begin_group(scales, row);
        for (int i = row; i < row + group; i += 8) {
            IVec w[panel.QUADS][COLUMN_VECS];
            panel.read(w);
            for (int q = 0; q < panel.QUADS; q++)
                for (int j = 0; j < COLUMN_VECS; j++) store(out + packed_at<4>(i + 4 * q, j * LANES), w[q][j]);
        }
    }
}

// Index of the byte of (row, column) in a packed panel of four bits, and where in it.
constexpr size_t int4_packed_at(int64_t row, int64_t column) { return size_t(row / 8 * 4 * PANEL + column * 4 + row % 4); }
constexpr int int4_shift(int64_t row) { return row / 4 % 2 * 4; }

}  // namespace everbatch
