// A paged KV pool that is stored as packed panels (tiles.h), so that the two products of attention are plain panel products.
//
//     a block of one layer     [kv heads] x { keys, values }           block_size tokens, a multiple of 32
//     keys                     [block_size / 32] panels of `dim` rows, 32 keys side by side
//     values                   [block_size / 32][dim / 32] panels of 32 rows (the tokens), 32 dimensions side by side
//     int8                     the same as bytes in the bfloat16 order, then float32 scales: keys [block_size], values [block_size];
//                              symmetric, unlike int8 on other tiers (kernels/common/kv_format.py)
//     int4                     the same as half bytes, then float16 scale and least in place of a scale (kernels/common/kv_format.py)
//
// Keys that are quantised are rotated before (HeadRotation, rotation.h), and so are the queries that meet them.
// Keys and values may differ in their number of bits; the pairs that there are stand in KV_FORMATS of kernels/common/kv_format.py.
//
// `dim` is the head dimension rounded up to 32. Cells beyond the head dimension, and cells of a panel not written yet, are zero.
// Products read int8 and int4 as whole numbers; what a token's scale, and an offset, make of its numbers is applied to its scores and its
// weights (attention.h).
#pragma once
#include <type_traits>

#include "rows.h"

namespace everbatch {

constexpr int MAX_HEAD_DIM = 1024;

// The types of cells: float, bf16, int8_t, and
struct Int4 {};  // 0 .. 15, two of which make a byte: the upper half is the panel's next row
template <class E>
constexpr int BITS = std::is_same_v<E, Int4> ? 4 : 8 * int(sizeof(E));

enum Side { KEYS, VALUES };

struct KVLayout {
    int32_t block_size, kv_heads, head_dim;
    int32_t key_bits;       // 8 or 4; PLAIN: cells are of the type that is computed in, values too
    int32_t element_bytes;  // 2 for computing in bfloat16, 4 for float32
    int32_t value_bits;     // like key_bits

    static constexpr int PLAIN = 16;

    bool is_quantized() const { return key_bits != PLAIN; }
    int dim() const { return (head_dim + PANEL - 1) / PANEL * PANEL; }
    size_t unit() const { return size_t(PANEL) * dim(); }  // elements of the keys, or values, of 32 tokens
    size_t unit_bytes(Side side) const {
        return is_quantized() ? unit() * (side == KEYS ? key_bits : value_bits) / 8 : unit() * element_bytes;
    }
    size_t bytes(Side side) const { return size_t(block_size / PANEL) * unit_bytes(side); }
    size_t data_bytes() const { return bytes(KEYS) + bytes(VALUES); }
    size_t head_bytes() const { return data_bytes() + (is_quantized() ? size_t(block_size) * 2 * PARAMETER_BYTES : 0); }
    size_t block_bytes() const { return head_bytes() * kv_heads; }

    static constexpr int PARAMETER_BYTES = 4;  // those of a token's key, or value
};

// What int4 cells hold of one row: q * scale + least.
struct ScaleAndLeast {
    _Float16 scale, least;
};

// One kv head of one block.
struct KVHead {
    const KVLayout& layout;
    char* at;

    char* keys(int unit) const { return at + size_t(unit) * layout.unit_bytes(KEYS); }
    char* values(int unit) const { return at + layout.bytes(KEYS) + size_t(unit) * layout.unit_bytes(VALUES); }
    // The parameters of the key or value of the token at `offset`: a float32 scale, or scale and least.
    char* of_key(int offset) const { return at + layout.data_bytes() + offset * KVLayout::PARAMETER_BYTES; }
    char* of_value(int offset) const { return of_key(offset) + layout.block_size * KVLayout::PARAMETER_BYTES; }
};

// Stores a key, or a value, of [dim] cells as token `token` of the unit at `panels`.
template <Side SIDE, class E>
void scatter_cell(E* panels, int dim, int token, const E* cells) {
    constexpr int TOGETHER = sizeof(E) == 4 ? 1 : 2;  // int8 cells too
    for (int d = 0; d < dim; d += PANEL) {
        E* to = panels + size_t(d) * PANEL + (SIDE == KEYS ? packed_at<TOGETHER>(0, token) : packed_at<TOGETHER>(token, 0));
        for (int i = 0; i < PANEL; i++) to[SIDE == KEYS ? packed_at<TOGETHER>(i, 0) : packed_at<TOGETHER>(0, i)] = cells[d + i];
    }
}
// The same for int4; the tokens of a pair share the bytes of values.
template <Side SIDE>
void scatter_int4(uint8_t* panels, int dim, int token, const uint8_t* cells) {
    const int shift = token % 2 * 4;
    for (int d = 0; d < dim; d += PANEL) {
        uint8_t* to = panels + size_t(d) * PANEL / 2;
        if constexpr (SIDE == KEYS) {
            for (int i = 0; i < PANEL; i += 2) to[packed_at<2>(i, token) / 2] = uint8_t(cells[d + i] | cells[d + i + 1] << 4);
        } else {
            for (int i = 0; i < PANEL; i++) {
                uint8_t& pair = to[packed_at<2>(token - token % 2, i) / 2];
                pair = uint8_t((pair & 0xf0 >> shift) | cells[d + i] << shift);
            }
        }
    }
}

// Prefetches the cache lines that write_cell writes: those of a key are many, one for each pair of dimensions. K, V: the types of the cells.
template <class K, class V>
void prefetch_cell(const KVHead& head, int offset) {
    const KVLayout& l = head.layout;
    const int unit = offset / PANEL, token = offset % PANEL;
    constexpr int TOGETHER = BITS<K> == 32 ? 1 : 2;
    for (int d = 0; d < l.dim(); d += TOGETHER)
        __builtin_prefetch(head.keys(unit) + (d / PANEL * PANEL * PANEL + packed_at<TOGETHER>(d % PANEL, token)) * BITS<K> / 8, 1);
    for (int d = 0; d < l.dim(); d += 16)
        __builtin_prefetch(head.values(unit) + (d / PANEL * PANEL * PANEL + packed_at<TOGETHER>(token, d % PANEL)) * BITS<V> / 8, 1);
}

// int4 with scale and least for each row, as kernels/common/kv_format.py defines it. x [dim], of which `count` cells matter; the other
// cells of q become 0.
inline void quantize_int4(const float* x, int count, int dim, uint8_t* q, ScaleAndLeast* parameters) {
    static constexpr float MOST = 65504.0f;  // the largest float16
    alignas(64) float padded[MAX_HEAD_DIM];
    memcpy(padded, x, size_t(count) * sizeof(float));
    std::fill(padded + count, padded + dim, x[0]);
    Vec lowest = load<Vec>(padded), highest = lowest;
    for (int i = LANES; i < dim; i += LANES) lowest = vmin(lowest, load<Vec>(padded + i)), highest = vmax(highest, load<Vec>(padded + i));
    const auto bounded = [](float value, float least) { return std::max(least, std::min(MOST, value)); };
    parameters->least = _Float16(bounded(-reduce_max(-lowest), -MOST));
    const float least = float(parameters->least);
    parameters->scale = _Float16(bounded((reduce_max(highest) - least) / 15.0f, 0.0f));
    const float scale = float(parameters->scale), divisor = scale > 0 ? scale : INFINITY;
    for (int i = 0; i < dim; i += LANES) {
        const Vec steps = (load<Vec>(padded + i) - least) / divisor + 0.5f;
        const IVec whole = __builtin_convertvector(vmax(vmin(steps, splat(15.0f)), Vec{}), IVec);
        for (int j = 0; j < LANES; j++) q[i + j] = uint8_t(i + j < count ? whole[j] : 0);
    }
}

// Writes a key or value x, [dim] float32, zero beyond head_dim, as token `token` of the unit at `panels`. E: the type of the cells.
template <Side SIDE, class E>
void write_side(const KVLayout& l, char* panels, char* parameters, int token, const float* x) {
    const int dim = l.dim();
    if (token == 0) {  // the first of its panel: clear the cells not written yet, because a NaN there would spread
        memset(panels, 0, l.unit_bytes(SIDE));
        if (l.is_quantized()) memset(parameters, 0, PANEL * KVLayout::PARAMETER_BYTES);
    }
    if constexpr (std::is_same_v<E, Int4>) {
        uint8_t cells[MAX_HEAD_DIM];
        quantize_int4(x, l.head_dim, dim, cells, (ScaleAndLeast*)parameters);
        scatter_int4<SIDE>((uint8_t*)panels, dim, token, cells);
    } else if constexpr (sizeof(E) == 4) {
        scatter_cell<SIDE>((E*)panels, dim, token, x);
    } else {
        alignas(64) E cells[MAX_HEAD_DIM];
        if constexpr (sizeof(E) == 2) {
            for (int d = 0; d < dim; d += LANES) store_bf16(cells + d, load<Vec>(x + d));
        } else {
            int32_t sum;
            quantize_group(x, dim, cells, (float*)parameters, &sum);
        }
        scatter_cell<SIDE>((E*)panels, dim, token, cells);
    }
}

// Writes the KV of the token at `offset` of a block. K, V: the types of the cells.
template <class K, class V>
void write_cell(const KVHead& head, int offset, const float* key, const float* value) {
    const int unit = offset / PANEL, token = offset % PANEL;
    write_side<KEYS, K>(head.layout, head.keys(unit), head.of_key(offset), token, key);
    write_side<VALUES, V>(head.layout, head.values(unit), head.of_value(offset), token, value);
}

// int8, or int4 less INT4_MIDDLE, of LANES columns and the two rows of a pair, as floats, which hold them exactly.
constexpr int INT4_MIDDLE = 8;
template <class E>
ALWAYS_INLINE void read_floats(const char* at, Vec& upper, Vec& lower) {
    if constexpr (BITS<E> == 8) {
        const Short pairs = load<Short>(at);
        upper = __builtin_convertvector(Short(pairs << 8) >> 8, Vec), lower = __builtin_convertvector(pairs >> 8, Vec);
    } else {
        const IVec pairs = load_bytes((const uint8_t*)at);
        upper = __builtin_convertvector((pairs & 15) - INT4_MIDDLE, Vec), lower = __builtin_convertvector((pairs >> 4 & 15) - INT4_MIDDLE, Vec);
    }
}

// The same as pairs of bfloat16, which hold them exactly too.
template <class E>
ALWAYS_INLINE IVec read_pairs(const char* at) {
    if constexpr (BITS<E> == 16) return load<IVec>(at);
#if defined(__AVX512BW__)
    if constexpr (BITS<E> == 4) {  // the table repeats, so that a fifth bit of the index does not matter
        alignas(64) static constexpr uint16_t table[32] = {
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        const __m512i pairs = _mm512_cvtepu8_epi32(load<__m128i>(at));
        return (IVec)_mm512_permutexvar_epi16(_mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12)), _mm512_load_si512(table));
    }
#endif
    if constexpr (BITS<E> < 16) {
        Vec upper, lower;
        read_floats<E>(at, upper, lower);
        return IVec((UVec)upper >> 16 | ((UVec)lower & 0xffff0000u));  // the lower halves of these floats are zero
    }
}

// Unpacks a panel of `rows` rows of int8 or int4.
template <class T, class E>
void unpack_panel(const char* cells, int rows, T* out, const char* ahead) {
    for (int row = 0; row < rows; row += 2) {
        if (BITS<E> == 8 || row % 4 == 0) prefetch<1>(ahead);
        for (int c = 0; c < PANEL; c += LANES) {
            const char* at = cells + packed_at<2>(row, c) * BITS<E> / 8;
            if constexpr (sizeof(T) == 2) {
                store(out + packed_at<2>(row, c), read_pairs<E>(at));
            } else {
                Vec upper, lower;
                read_floats<E>(at, upper, lower);
                store(out + packed_at<1>(row, c), upper), store(out + packed_at<1>(row + 1, c), lower);
            }
        }
    }
}

// What makes keys or values of the numbers of unpack_panel: number * factor + offset; offset only of int4.
template <class E>
void read_parameters(const char* parameters, int count, float* factors, float* offsets) {
    if constexpr (BITS<E> == 8) {
        memcpy(factors, parameters, size_t(count) * sizeof(float));
    } else {
        const ScaleAndLeast* of = reinterpret_cast<const ScaleAndLeast*>(parameters);
        for (int i = 0; i < count; i++)
            factors[i] = float(of[i].scale), offsets[i] = float(of[i].least) + INT4_MIDDLE * factors[i];
    }
}

}  // namespace everbatch
