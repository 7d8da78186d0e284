// Attention over a paged KV pool that is kept as packed panels (tiles.h), so that both of its products are plain panel products.
//
//     a block of one layer     [kv heads] x { keys, values }           block_size tokens, a multiple of 32
//     keys                     [block_size / 32] panels of `dim` rows, 32 keys side by side
//     values                   [block_size / 32][dim / 32] panels of 32 rows (the tokens), 32 dimensions side by side
//     int8                     the same as bytes in the bfloat16 order, then float32 scales: keys [block_size], values [block_size]
//
// `dim` is the head dimension rounded up to 32; what is beyond it is zero, and so is what has not been written of a panel.
// The queries of a few tokens and of all heads that share a kv head are the rows of a product. Softmax runs over segments of
// SEGMENT positions with a running maximum (Milakov and Gimelshein, 2018); segments begin at multiples of SEGMENT of the absolute
// position, so a token's result does not depend on the chunk in which it is computed.
#pragma once
#include "rows.h"

namespace everbatch {

constexpr int SEGMENT = 256;

struct KVLayout {
    int32_t block_size, kv_heads, head_dim, is_int8;
    int32_t element_bytes;  // of the type that is computed in: 2 or 4

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

// Where element (row, column) lies in packed panels of `rows` rows: bfloat16's order (int8 cells use it too), or float32's.
template <bool IS_FLOAT>
inline size_t packed_at(int64_t rows, int64_t row, int64_t column) {
    const size_t panel = size_t(column / PANEL) * rows * PANEL, c = column % PANEL;
    if (IS_FLOAT) return panel + row * PANEL + c;
    return panel + row / 32 * 1024 + c / 16 * 512 + row % 32 / 2 * 32 + c % 16 * 2 + row % 2;
}

template <class E>
void write_cell(const KVHead& head, int offset, const float* key, const float* value) {
    const KVLayout& l = head.layout;
    const int unit = offset / PANEL, token = offset % PANEL;
    E *k = head.keys<E>(unit), *v = head.values<E>(unit);
    float key_scale = 1, value_scale = 1;
    if (token == 0) {  // the first of its panel: what nobody has written yet must not hold what could spread (NaN)
        memset((void*)k, 0, l.unit() * sizeof(E)), memset((void*)v, 0, l.unit() * sizeof(E));
        if (l.is_int8)
            for (int i = 0; i < PANEL; i++) head.key_scales()[offset + i] = head.value_scales()[offset + i] = 0;
    }
    if constexpr (sizeof(E) == 1) {
        float most_k = 0, most_v = 0;
        for (int d = 0; d < l.head_dim; d++) most_k = std::max(most_k, std::fabs(key[d])), most_v = std::max(most_v, std::fabs(value[d]));
        head.key_scales()[offset] = most_k / 127, head.value_scales()[offset] = most_v / 127;
        key_scale = most_k > 0 ? 127 / most_k : 0, value_scale = most_v > 0 ? 127 / most_v : 0;
    }
    for (int d = 0; d < l.head_dim; d++) {
        const size_t ki = packed_at<sizeof(E) == 4>(l.dim(), d, token), vi = packed_at<sizeof(E) == 4>(PANEL, token, d);
        if constexpr (sizeof(E) == 4)
            k[ki] = key[d], v[vi] = value[d];
        else if constexpr (sizeof(E) == 2)
            k[ki] = to_bf16(key[d]), v[vi] = to_bf16(value[d]);
        else
            k[ki] = E(std::nearbyint(key[d] * key_scale)), v[vi] = E(std::nearbyint(value[d] * value_scale));
    }
}

// int8 cells -> a packed panel of T with `rows` rows. Scales belong to the columns (keys) or to the rows (values).
template <class T>
void dequantize_panel(const int8_t* q, int rows, const float* column_scales, const float* row_scales, T* out) {
    for (int row = 0; row < rows; row++)
        for (int c = 0; c < PANEL; c++) {
            const float x = q[packed_at<false>(rows, row, c)] * (column_scales ? column_scales[c] : row_scales[row]);
            if constexpr (sizeof(T) == 4)
                out[packed_at<true>(rows, row, c)] = x;
            else
                out[packed_at<false>(rows, row, c)] = to_bf16(x);
        }
}

// One sequence as its queries see it: the newest `count` positions of `length`.
struct Keys {
    const int32_t* table;  // block ids
    int64_t length;
    int64_t window;  // tokens that a query sees, itself included; 0 = all
};

// Scratch of one thread.
template <class T>
struct AttentionScratch {
    std::vector<float> scores, sums, most, total;
    std::vector<T> weights, panel;

    void shape(int rows, int dim) {
        if (scores.size() < size_t(rows) * SEGMENT || sums.size() < size_t(rows) * dim) {
            scores.resize(size_t(rows) * SEGMENT), sums.resize(size_t(rows) * dim), most.resize(rows), total.resize(rows);
            weights.resize(size_t(rows) * (SEGMENT + 32)), panel.resize(size_t(PANEL) * dim);
        }
    }
};

template <class F>
ALWAYS_INLINE void with_prefetch(bool wanted, F f) {
    if (wanted)
        f(std::integral_constant<int, 2>());
    else
        f(std::integral_constant<int, 0>());
}

// Attends `tokens` consecutive positions from `position` on, `group` query heads each, to one kv head.
// q [tokens * group][dim] of T, zero beyond head_dim. put(token, head in group, sums [dim], 1 / total).
template <class T, class Put>
void attend(const KVLayout& l, const char* pool, int kv_head, const Keys& keys, int64_t position, int tokens, int group, const T* q,
            float scale, AttentionScratch<T>& s, Put put) {
    constexpr size_t WEIGHTS_LD = SEGMENT + 32;
    const int dim = l.dim(), rows = tokens * group, most_rows = rows_at_once<T>(), units = l.block_size / PANEL;
    s.shape(rows, dim);
    std::fill(s.sums.begin(), s.sums.begin() + rows * dim, 0.0f);
    std::fill(s.most.begin(), s.most.begin() + rows, -INFINITY);
    std::fill(s.total.begin(), s.total.begin() + rows, 0.0f);
    const int64_t first_key = keys.window ? std::max<int64_t>(0, position - keys.window + 1) : 0, end = position + tokens;
    auto head_of = [&](int64_t unit) {
        return KVHead{l, const_cast<char*>(pool) + keys.table[unit / units] * l.block_bytes() + kv_head * l.head_bytes()};
    };
    // What is read after the keys (values) at `key`: those of the next panel, else the values of the segment's first.
    auto next_of = [&](int64_t key, int64_t to, bool is_keys) -> const char* {
        const int64_t next = key + PANEL < to ? key + PANEL : key / SEGMENT * SEGMENT < first_key ? key : key / SEGMENT * SEGMENT;
        const KVHead head = head_of(next / PANEL);
        const int unit = int(next / PANEL % units);
        return is_keys && key + PANEL < to ? (const char*)head.keys<T>(unit) : (const char*)head.values<T>(unit);
    };
    for (int64_t base = first_key / SEGMENT * SEGMENT; base < end; base += SEGMENT) {
        const int64_t from = std::max(base, first_key / PANEL * PANEL), to = std::min(base + SEGMENT, (end + PANEL - 1) / PANEL * PANEL);
        for (int64_t key = from; key < to; key += PANEL) {
            const KVHead head = head_of(key / PANEL);
            const int unit = int(key / PANEL % units);
            const T* panel = head.keys<T>(unit);
            const char* ahead = next_of(key, to, true);
            if (l.is_int8) {
                dequantize_panel<T>(head.keys<int8_t>(unit), dim, head.key_scales() + unit * PANEL, nullptr, s.panel.data());
                panel = s.panel.data();
            }
            for (int r = 0; r < rows; r += most_rows)
                with_prefetch(r == 0 && !l.is_int8, [&](auto lines) {
                    product<lines()>(q + size_t(r) * dim, dim, panel, dim, s.scores.data() + size_t(r) * SEGMENT + (key - base), SEGMENT,
                                     true, std::min(most_rows, rows - r), ahead);
                });
        }
        const int lo = int(from - base), hi = int(to - base);
        for (int r = 0; r < rows; r++) {
            const int64_t at = position + r / group;  // sees keys (at - window, at]
            const int seen_to = int(std::min<int64_t>(hi, at + 1 - base));
            const int seen_from = keys.window ? int(std::max<int64_t>(lo, at - keys.window + 1 - base)) : lo;
            float* x = s.scores.data() + size_t(r) * SEGMENT;
            for (int i = lo; i < std::min(seen_from, hi); i++) x[i] = -INFINITY;
            for (int i = std::max(seen_to, lo); i < hi; i++) x[i] = -INFINITY;
            Vec most = splat(-INFINITY);
            for (int i = lo; i < hi; i += LANES) most = vmax(most, load<Vec>(x + i));
            const float before = s.most[r], now = std::max(before, reduce_max(most));
            const float shift = now == -INFINITY ? 0.0f : now;
            T* p = s.weights.data() + size_t(r) * WEIGHTS_LD;
            Vec total{};
            for (int i = lo; i < hi; i += LANES) {
                Vec e = exp_negative((load<Vec>(x + i) - shift) * scale);
                total += e;
                if constexpr (sizeof(T) == 4)
                    store(p + i, e);
                else
                    store_bf16(p + i, e);
            }
            const float keep = before == -INFINITY ? 0.0f : exp_negative(splat((before - shift) * scale))[0];
            s.total[r] = s.total[r] * keep + reduce_add(total);
            s.most[r] = now;
            if (keep != 1.0f) {
                float* sum = s.sums.data() + size_t(r) * dim;
                for (int d = 0; d < dim; d += LANES) store(sum + d, load<Vec>(sum + d) * keep);
            }
        }
        for (int64_t key = from; key < to; key += PANEL) {
            const KVHead head = head_of(key / PANEL);
            const int unit = int(key / PANEL % units);
            for (int d = 0; d < dim; d += PANEL) {
                const T* panel = head.values<T>(unit) + size_t(d) * PANEL;
                const char* ahead = next_of(key, to, false) + size_t(d) * PANEL * sizeof(T);
                if (l.is_int8) {
                    dequantize_panel<T>(head.values<int8_t>(unit) + size_t(d) * PANEL, PANEL, nullptr,
                                        head.value_scales() + unit * PANEL, s.panel.data());
                    panel = s.panel.data();
                }
                for (int r = 0; r < rows; r += most_rows)
                    with_prefetch(r == 0 && !l.is_int8, [&](auto lines) {
                        product<lines()>(s.weights.data() + size_t(r) * WEIGHTS_LD + (key - base), WEIGHTS_LD, panel, PANEL,
                                         s.sums.data() + size_t(r) * dim + d, dim, false, std::min(most_rows, rows - r), ahead);
                    });
            }
        }
    }
    for (int r = 0; r < rows; r++) put(r / group, r % group, s.sums.data() + size_t(r) * dim, 1.0f / s.total[r]);
}

}  // namespace everbatch
