// A paged KV pool that is stored as packed panels (tiles.h), so that the two products of attention are plain panel products.
//
//     a block of one layer     [kv heads] x { keys, values }           block_size tokens, a multiple of 32
//     keys                     [block_size / 32] panels of `dim` rows, 32 keys side by side
//     values                   [block_size / 32][dim / 32] panels of 32 rows (the tokens), 32 dimensions side by side
//     int8                     the same as bytes in the bfloat16 order, then float32 scales: keys [block_size], values [block_size]
//
// `dim` is the head dimension rounded up to 32. Cells beyond the head dimension, and cells of a panel not written yet, are zero.
#pragma once
#include "rows.h"

namespace everbatch {

constexpr int SEGMENT = 256;  // positions that share a step of the softmax (attention.h)
constexpr int AHEAD = 2;      // panels that are fetched in advance
constexpr int MAX_HEAD_DIM = 1024;

struct KVLayout {
    int32_t block_size, kv_heads, head_dim, is_int8;
    int32_t element_bytes;  // 2 for computing in bfloat16, 4 for float32

    int dim() const { return (head_dim + PANEL - 1) / PANEL * PANEL; }
    size_t unit() const { return size_t(PANEL) * dim(); }  // elements of the keys, or values, of 32 tokens
    size_t cell_bytes() const { return is_int8 ? 1 : element_bytes; }
    size_t half() const { return size_t(block_size) * dim() * cell_bytes(); }
    size_t head_bytes() const { return 2 * half() + (is_int8 ? size_t(block_size) * 8 : 0); }
    size_t block_bytes() const { return head_bytes() * kv_heads; }
};

// One kv head of one block.
struct KVHead {
    const KVLayout& layout;
    char* at;

    template <class E>
    E* keys(int unit) const {
        return reinterpret_cast<E*>(at) + size_t(unit) * layout.unit();
    }
    template <class E>
    E* values(int unit) const {
        return reinterpret_cast<E*>(at + layout.half()) + size_t(unit) * layout.unit();
    }
    float* key_scales() const { return reinterpret_cast<float*>(at + 2 * layout.half()); }
    float* value_scales() const { return key_scales() + layout.block_size; }
};

// Stores a key and a value, [dim] cells each, as token `token` of a unit.
template <class E>
void scatter_cell(E* k, E* v, int dim, int token, const E* key, const E* value) {
    constexpr int TOGETHER = sizeof(E) == 4 ? 1 : 2;  // int8 cells too
    for (int d = 0; d < dim; d += PANEL) {
        E *to_k = k + size_t(d) * PANEL + packed_at<TOGETHER>(0, token), *to_v = v + size_t(d) * PANEL + packed_at<TOGETHER>(token, 0);
        for (int i = 0; i < PANEL; i++) to_k[packed_at<TOGETHER>(i, 0)] = key[d + i], to_v[packed_at<TOGETHER>(0, i)] = value[d + i];
    }
}

// Prefetches the cache lines that write_cell writes: those of a key are many, one for each pair of dimensions.
template <class E>
void prefetch_cell(const KVHead& head, int offset) {
    const KVLayout& l = head.layout;
    const int unit = offset / PANEL, token = offset % PANEL;
    constexpr int TOGETHER = sizeof(E) == 4 ? 1 : 2;
    for (int d = 0; d < l.dim(); d += TOGETHER)
        __builtin_prefetch(head.keys<E>(unit) + d / PANEL * PANEL * PANEL + packed_at<TOGETHER>(d % PANEL, token), 1);
    for (int d = 0; d < l.dim(); d += 16)
        __builtin_prefetch(head.values<E>(unit) + d / PANEL * PANEL * PANEL + packed_at<TOGETHER>(token, d % PANEL), 1);
}

// Writes the KV of the token at `offset` of a block. key, value [dim] float32, zero beyond head_dim. E: the type of the cells.
template <class E>
void write_cell(const KVHead& head, int offset, const float* key, const float* value) {
    const KVLayout& l = head.layout;
    const int unit = offset / PANEL, token = offset % PANEL, dim = l.dim();
    E *k = head.keys<E>(unit), *v = head.values<E>(unit);
    if (token == 0) {  // the first of its panel: clear the cells not written yet, because a NaN there would spread
        memset((void*)k, 0, l.unit() * sizeof(E)), memset((void*)v, 0, l.unit() * sizeof(E));
        if (l.is_int8)
            for (int i = 0; i < PANEL; i++) head.key_scales()[offset + i] = head.value_scales()[offset + i] = 0;
    }
    if constexpr (sizeof(E) == 4) {
        scatter_cell(k, v, dim, token, key, value);
    } else {
        alignas(64) E keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
        if constexpr (sizeof(E) == 2) {
            for (int d = 0; d < dim; d += LANES) store_bf16(keys + d, load<Vec>(key + d)), store_bf16(values + d, load<Vec>(value + d));
        } else {
            int32_t sum;
            quantize_group(key, dim, keys, head.key_scales() + offset, &sum);
            quantize_group(value, dim, values, head.value_scales() + offset, &sum);
        }
        scatter_cell(k, v, dim, token, keys, values);
    }
}

// int8 cells -> a packed panel of T with `rows` rows. Scales belong to the columns (keys) or to the rows (values).
template <class T, bool OF_COLUMNS>
void dequantize_panel(const int8_t* q, int rows, const float* scales, T* out, const char* ahead) {
    for (int row = 0; row < rows; row += 2) {
        prefetch<1>(ahead);
        for (int c = 0; c < PANEL; c += LANES) {
            const Short pairs = load<Short>(q + packed_at<2>(row, c));
            const Vec lo_scale = OF_COLUMNS ? load<Vec>(scales + c) : splat(scales[row]);
            const Vec hi_scale = OF_COLUMNS ? lo_scale : splat(scales[row + 1]);
            const Vec lo = __builtin_convertvector(Short(pairs << 8) >> 8, Vec) * lo_scale;
            const Vec hi = __builtin_convertvector(pairs >> 8, Vec) * hi_scale;
            if constexpr (sizeof(T) == 4)
                store(out + packed_at<1>(row, c), lo), store(out + packed_at<1>(row + 1, c), hi);
            else
                store_bf16_pairs(out + packed_at<2>(row, c), lo, hi);
        }
    }
}

// The first panels of an attend(), which the one before it fetches.
struct Ahead {
    const char* at[AHEAD] = {};
};

// The order in which attention reads one kv head of a sequence, for `tokens` positions from `position` on: segment by segment, first
// the panels of keys and then those of values.
class Walk {
public:
    // table: the sequence's block ids. window: tokens that a query sees, itself included, besides the sink tokens; 0 = all.
    Walk(const KVLayout& l, const char* pool, int kv_head, const int32_t* table, int64_t position, int tokens, int64_t window,
         int64_t sink_tokens)
        : position(position), tokens(tokens), end(position + tokens), window(window), sink_tokens(window ? sink_tokens : 0),
          first_key_(window ? std::max<int64_t>(0, position - window + 1) : 0),
          sink_end_((this->sink_tokens + PANEL - 1) / PANEL * PANEL), l_(l), pool_(const_cast<char*>(pool)), kv_head_(kv_head),
          table_(table) {}

    const int64_t position;
    const int tokens;
    const int64_t end;  // one past the last key that is seen
    const int64_t window, sink_tokens;

    int64_t first_segment() const { return sink_end_ ? 0 : from_window(); }
    int64_t next_segment(int64_t segment) const {
        const int64_t next = segment_end(segment);
        return next < sink_end_ ? next : std::max(next, from_window());
    }
    // The first segment that begins at `key`, a multiple of SEGMENT, or after it.
    int64_t segment_from(int64_t key) const {
        return key == 0 ? first_segment() : key < sink_end_ ? key : std::max(key, from_window());
    }
    int64_t from(int64_t segment) const { return segment < sink_end_ ? segment : std::max(segment, first_key_ / PANEL * PANEL); }
    int64_t to(int64_t segment) const { return std::min(segment_end(segment), (end + PANEL - 1) / PANEL * PANEL); }

    KVHead head(int64_t key) const {
        return {l_, pool_ + table_[key / l_.block_size] * l_.block_bytes() + kv_head_ * l_.head_bytes()};
    }
    int unit(int64_t key) const { return int(key % l_.block_size / PANEL); }

    // E: the type of the pool's cells. None if the segment is beyond the keys.
    template <class E>
    Ahead first_panels(int64_t segment) const {
        Ahead ahead;
        if (segment >= end) return ahead;
        for (int i = 0; i < AHEAD; i++) {
            const int64_t key = std::min(from(segment) + i * PANEL, to(segment) - PANEL);
            ahead.at[i] = reinterpret_cast<const char*>(head(key).keys<E>(unit(key)));
        }
        return ahead;
    }

private:
    int64_t segment_end(int64_t segment) const {
        const int64_t next = segment / SEGMENT * SEGMENT + SEGMENT;
        return segment < sink_end_ ? std::min(next, sink_end_) : next;
    }
    // The segment in which the window begins.
    int64_t from_window() const { return std::max(sink_end_, first_key_ / SEGMENT * SEGMENT); }

    const int64_t first_key_;  // the first that is in the window of the first query
    const int64_t sink_end_;   // one past the panels of the sink tokens
    const KVLayout& l_;
    char* const pool_;
    const int kv_head_;
    const int32_t* const table_;
};

}  // namespace everbatch
