// Attention over a paged KV pool that is stored as packed panels (tiles.h), so that its two products are plain panel products.
//
//     a block of one layer     [kv heads] x { keys, values }           block_size tokens, a multiple of 32
//     keys                     [block_size / 32] panels of `dim` rows, 32 keys side by side
//     values                   [block_size / 32][dim / 32] panels of 32 rows (the tokens), 32 dimensions side by side
//     int8                     the same as bytes in the bfloat16 order, then float32 scales: keys [block_size], values [block_size]
//
// `dim` is the head dimension rounded up to 32. Cells beyond the head dimension, and cells of a panel not written yet, are zero.
// The queries of a few tokens and of all heads that share a kv head are the rows of a product. The softmax is online (Milakov and
// Gimelshein, 2018) over segments of SEGMENT positions: for each row, m_i is the greatest score so far, l_i the sum of its
// exponentials, acc the sum of its weighted values. Segments begin at multiples of SEGMENT of the absolute position, and where the
// panels of the sink tokens end (a query sees those from outside of its window too), so a token's result does not depend on the
// chunk in which it is computed.
#pragma once
#include "rows.h"

namespace everbatch {

constexpr int SEGMENT = 256;  // positions
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

// Scratch of one thread.
template <class T>
struct AttentionScratch {
    Buffer<float> scores, acc, m_i, l_i;  // m_i, l_i and acc of the online softmax, for each row
    Buffer<T> weights, panel;
    const char* fetched = nullptr;  // the panel that the last attend() has begun to fetch

    void shape(int rows, int dim) {
        scores.grow(size_t(rows) * SEGMENT), acc.grow(size_t(rows) * dim), m_i.grow(rows), l_i.grow(rows);
        weights.grow(size_t(rows) * (SEGMENT + 32)), panel.grow(size_t(PANEL) * dim);
    }
};

template <class F>
ALWAYS_INLINE void with_prefetch(bool wanted, F f) {
    if (wanted)
        f(std::integral_constant<int, 2>());
    else
        f(std::integral_constant<int, 0>());
}

// The order in which attend() reads one kv head of a sequence, for `tokens` positions from `position` on: segment by segment, first
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
    int64_t from(int64_t segment) const { return segment < sink_end_ ? segment : std::max(segment, first_key_ / PANEL * PANEL); }
    int64_t to(int64_t segment) const { return std::min(segment_end(segment), (end + PANEL - 1) / PANEL * PANEL); }

    KVHead head(int64_t key) const {
        return {l_, pool_ + table_[key / l_.block_size] * l_.block_bytes() + kv_head_ * l_.head_bytes()};
    }
    int unit(int64_t key) const { return int(key % l_.block_size / PANEL); }

    // E: the type of the pool's cells.
    template <class E>
    Ahead first_panels(int64_t segment) const {
        Ahead ahead;
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

// Computes attention of the walk's tokens, with `group` query heads each, over one kv head. E: the type of the pool's cells.
// q [tokens * group][dim] of T, zero beyond head_dim. after: the first panels of the next call. put(token, head in group, acc [dim],
// 1 / l_i) takes the results.
template <class T, class E, class Put>
void attend(const KVLayout& l, const Walk& walk, int group, const T* q, float scale, const Ahead& after, AttentionScratch<T>& s, Put put) {
    constexpr size_t WEIGHTS_LD = SEGMENT + 32;
    constexpr bool IS_INT8 = sizeof(E) == 1;
    const int dim = l.dim(), rows = walk.tokens * group, max_rows = rows_at_once<T>();
    s.shape(rows, dim);
    std::fill_n(s.acc.data(), rows * dim, 0.0f);
    std::fill_n(s.m_i.data(), rows, -INFINITY);
    std::fill_n(s.l_i.data(), rows, 0.0f);
    float *m_i = s.m_i.data(), *l_i = s.l_i.data();
    for (int64_t base = walk.first_segment(), following; base < walk.end; base = following) {
        const int64_t from = walk.from(base), to = walk.to(base);
        following = walk.next_segment(base);
        // The panels in the order in which they are read. While one is used, the one AHEAD places later is fetched.
        const char* order[2 * SEGMENT / PANEL + AHEAD];
        const int count = int(to - from) / PANEL;
        for (int i = 0; i < count; i++) {
            const int64_t key = from + i * PANEL;
            const KVHead head = walk.head(key);
            order[i] = (const char*)head.keys<E>(walk.unit(key)), order[count + i] = (const char*)head.values<E>(walk.unit(key));
        }
        const Ahead next = following < walk.end ? walk.first_panels<E>(following) : after;
        std::copy_n(next.at, AHEAD, order + 2 * count);
        if (order[0] != s.fetched)
            for (int i = 0; i < AHEAD; i++)
                for (size_t at = 0; at < l.unit() * sizeof(E); at += 64) __builtin_prefetch(order[i] + at, 0, 2);
        s.fetched = next.at[0];
        for (int64_t key = from; key < to; key += PANEL) {
            const KVHead head = walk.head(key);
            const int unit = walk.unit(key);
            const T* panel = head.keys<T>(unit);
            const char* ahead = order[(key - from) / PANEL + AHEAD];
            if constexpr (IS_INT8) {
                dequantize_panel<T, true>(head.keys<E>(unit), dim, head.key_scales() + unit * PANEL, s.panel.data(), ahead);
                panel = s.panel.data();
            }
            for (int r = 0; r < rows; r += max_rows)
                with_prefetch(r == 0 && !IS_INT8, [&](auto lines) {
                    product<lines()>(q + size_t(r) * dim, dim, panel, dim, s.scores.data() + size_t(r) * SEGMENT + (key - base), SEGMENT,
                                     true, std::min(max_rows, rows - r), ahead);
                });
        }
        const int lo = int(from - base), hi = int(to - base);
        for (int r = 0; r < rows; r++) {
            const int64_t at = walk.position + r / group;  // sees keys (at - window, at], and those before sink_tokens
            const int seen_to = int(std::min<int64_t>(hi, at + 1 - base));
            const int seen_from = walk.window ? int(std::max<int64_t>(lo, at - walk.window + 1 - base)) : lo;
            float* x = s.scores.data() + size_t(r) * SEGMENT;
            for (int i = std::max<int64_t>(lo, walk.sink_tokens - base); i < std::min(seen_from, hi); i++) x[i] = -INFINITY;
            for (int i = std::max(seen_to, lo); i < hi; i++) x[i] = -INFINITY;
            Vec greatest = splat(-INFINITY);
            for (int i = lo; i < hi; i += LANES) greatest = vmax(greatest, load<Vec>(x + i));
            const float m_prev = m_i[r], m_new = std::max(m_prev, reduce_max(greatest));
            const float shift = m_new == -INFINITY ? 0.0f : m_new;
            T* p = s.weights.data() + size_t(r) * WEIGHTS_LD;
            Vec sum{};
            for (int i = lo; i < hi; i += LANES) {
                Vec e = exp_negative((load<Vec>(x + i) - shift) * scale);
                sum += e;
                if constexpr (sizeof(T) == 4)
                    store(p + i, e);
                else
                    store_bf16(p + i, e);
            }
            const float alpha = m_prev == -INFINITY ? 0.0f : exp_negative(splat((m_prev - shift) * scale))[0];
            l_i[r] = l_i[r] * alpha + reduce_add(sum);
            m_i[r] = m_new;
            if (alpha != 1.0f) {
                float* acc = s.acc.data() + size_t(r) * dim;
                for (int d = 0; d < dim; d += LANES) store(acc + d, load<Vec>(acc + d) * alpha);
            }
        }
        for (int64_t key = from; key < to; key += PANEL) {
            const KVHead head = walk.head(key);
            const int unit = walk.unit(key);
            for (int d = 0; d < dim; d += PANEL) {
                const T* panel = head.values<T>(unit) + size_t(d) * PANEL;
                const char* ahead = order[count + (key - from) / PANEL + AHEAD] + size_t(d) * PANEL * sizeof(E);
                if constexpr (IS_INT8) {
                    dequantize_panel<T, false>(head.values<E>(unit) + size_t(d) * PANEL, PANEL, head.value_scales() + unit * PANEL,
                                               s.panel.data(), ahead);
                    panel = s.panel.data();
                }
                for (int r = 0; r < rows; r += max_rows)
                    with_prefetch(r == 0 && !IS_INT8, [&](auto lines) {
                        product<lines()>(s.weights.data() + size_t(r) * WEIGHTS_LD + (key - base), WEIGHTS_LD, panel, PANEL,
                                         s.acc.data() + size_t(r) * dim + d, dim, false, std::min(max_rows, rows - r), ahead);
                    });
            }
        }
    }
    for (int r = 0; r < rows; r++) put(r / group, r % group, s.acc.data() + size_t(r) * dim, 1.0f / l_i[r]);
}

}  // namespace everbatch
