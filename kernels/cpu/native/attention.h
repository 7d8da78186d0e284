// Attention over the panels of a KV pool (kv_pool.h).
//
// The queries of some tokens and of all heads that share a kv head are the rows of a product. The softmax is online (Milakov and
// Gimelshein, 2018) over segments of SEGMENT positions: for each row, m_i is the greatest score so far, l_i the sum of its
// exponentials, acc the sum of its weighted values. In each segment some rows at a time, whose scores and weights stay in the
// first-level cache, are multiplied with all keys, weighted, and multiplied with all values.
//
// Every SPLIT positions the softmax begins anew, and its results are merged in order (Dao et al., Flash-Decoding, 2023), so that
// threads can share the keys of one token. Segments and splits begin at multiples of SEGMENT and SPLIT of the absolute position, and
// where the panels of the sink tokens end (a query sees those from outside of its window too). So a token's result depends neither
// on the chunk in which it is computed nor on the threads.
#pragma once
#include "kv_pool.h"

namespace everbatch {

constexpr int SPLIT = 4 * SEGMENT;  // positions
// Rows of one pass over the keys, if so many tokens are there, and rows that stay in the first-level cache.
constexpr int ROWS_TOGETHER = 4 * TILE_ROWS < 32 ? 32 : 4 * TILE_ROWS < 64 ? 4 * TILE_ROWS : 64;
constexpr int ROWS_HELD = TILE_ROWS < 12 ? 12 : TILE_ROWS;

// 2^t for t <= 0, and 0 for -infinity. The relative error is 4e-6 for weights that are rounded to bfloat16 and 2e-7 for float32, and at
// most half a unit of t in the last place besides; 2^0 is 1. The polynomials have the least relative error over their interval.
template <class T>
ALWAYS_INLINE Vec exp2_negative(Vec t) {
    auto polynomial = [](Vec f, std::initializer_list<float> coefficients) {
        Vec p = splat(*coefficients.begin());
        for (const float* c = coefficients.begin() + 1; c < coefficients.end(); c++) p = fma(p, f, splat(*c));
        return p;
    };
#if defined(__AVX512DQ__)
    t = vmax(splat(-150.0f), t);  // 2^-150 is 0; a NaN stays one
    const Vec f = (Vec)_mm512_reduce_ps((__m512)t, 1);  // t minus the integer below
    const Vec p = sizeof(T) == 4 ? polynomial(f, {1.866975695e-3f, 9.017356954e-3f, 5.579967992e-2f, 2.401645139e-1f, 6.931513066e-1f, 1.0f})
                                 : polynomial(f, {1.342558930e-2f, 5.224423218e-2f, 2.412793831e-1f, 6.930449485e-1f, 1.0f});
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)t);  // times 2 to the power of the integer below t
#else
    const Vec least = splat(-126.0f), magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec bounded = vmax(least, t), shifted = bounded + magic, f = bounded - (shifted - magic);
    const Vec p = sizeof(T) == 4 ? polynomial(f, {1.326472877e-3f, 9.671513183e-3f, 5.550733744e-2f, 2.402224208e-1f, 6.931469776e-1f, 1.0f})
                                 : polynomial(f, {9.582855315e-3f, 5.590643044e-2f, 2.402409861e-1f, 6.931241927e-1f, 1.0f});
    return t < least ? Vec{} : floats(bits(p) + (bits(shifted) << 23));
#endif
}

// c (+)= a[row][0 .. 32 * panels] times 32 columns of some panels of 32 rows, one below the other, which begin at panels[i] + offset.
// Where LINES, the first of the rows prefetch LINES lines for every 128 bytes, from ahead[i] + ahead_offset on.
template <int LINES, int ROWS, class T>
__attribute__((noinline)) void product_of_panels(const T* a, size_t lda, const T* const* panels, size_t offset, int count, float* c,
                                                 size_t ldc, const char* const* ahead, size_t ahead_offset) {
    Sums<ROWS> sums(c, ldc, false);
    for (int p = 0; p < count; p++, a += PANEL) {
        const T* w = panels[p] + offset;
        const char* next = LINES ? ahead[p] + ahead_offset : nullptr;
        for (int i = 0; i < PANEL; i += 4 / int(sizeof(T)), w += 4 / sizeof(T) * PANEL) {
            prefetch<LINES>(next);
            if constexpr (sizeof(T) == 4) {
                Vec wv[COLUMN_VECS];
#pragma GCC unroll 8
                for (int j = 0; j < COLUMN_VECS; j++) wv[j] = load<Vec>(w + j * LANES);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                    for (int j = 0; j < COLUMN_VECS; j++) sums.v[r][j] = fma(wv[j], splat(a[r * lda + i]), sums.v[r][j]);
            } else {
                IVec wv[COLUMN_VECS];
#pragma GCC unroll 8
                for (int j = 0; j < COLUMN_VECS; j++) wv[j] = load<IVec>(w + 2 * j * LANES);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                    for (int j = 0; j < COLUMN_VECS; j++) sums.v[r][j] = dot_pairs(sums.v[r][j], wv[j], a + r * lda + i);
            }
        }
    }
    sums.put(c, ldc);
}

#if defined(EVERBATCH_AMX)
template <int LINES>
void product_of_panels_amx(const bf16* a, size_t lda, const bf16* const* panels, size_t offset, int count, float* c, size_t ldc, int rows,
                           const char* const* ahead, size_t ahead_offset) {
    for (int p = 0; p < count; p++)
        product<LINES>(a + p * PANEL, lda, panels[p] + offset, PANEL, c, ldc, false, rows, LINES ? ahead[p] + ahead_offset : nullptr);
}
#endif

// The state of the online softmax for some rows.
struct SoftmaxState {
    Buffer<float> acc, m_i, l_i;  // [rows][dim], [rows], [rows]

    void clear(int rows, int dim) {
        acc.grow(size_t(rows) * dim), m_i.grow(rows + LANES), l_i.grow(rows);
        std::fill_n(acc.data(), rows * dim, 0.0f);
        std::fill_n(m_i.data(), rows, -INFINITY);
        std::fill_n(l_i.data(), rows, 0.0f);
    }

    // Adds what was found in the next split. scale: of scores, times log2(e).
    void merge(const float* next_acc, const float* next_m, const float* next_l, int rows, int dim, float scale) {
        for (int r = 0; r < rows; r++) {
            const float m = std::max(m_i.data()[r], next_m[r]);
            const Vec own = splat(weight(m_i.data()[r], m, scale)), other = splat(weight(next_m[r], m, scale));
            m_i.data()[r] = m;
            l_i.data()[r] = fma(splat(l_i.data()[r]), own, splat(next_l[r]) * other)[0];
            float* to = acc.data() + size_t(r) * dim;
            for (int d = 0; d < dim; d += LANES) store(to + d, fma(load<Vec>(to + d), own, load<Vec>(next_acc + size_t(r) * dim + d) * other));
        }
    }
    void merge(const SoftmaxState& next, int rows, int dim, float scale) {
        merge(next.acc.data(), next.m_i.data(), next.l_i.data(), rows, dim, scale);
    }

    // What a sum whose greatest score was m_i has to be multiplied with when the greatest score becomes m.
    static float weight(float m_i, float m, float scale) { return m_i == -INFINITY ? 0.0f : exp2_negative<float>(splat((m_i - m) * scale))[0]; }
};

// Scratch of one thread.
template <class T>
struct AttentionScratch {
    SoftmaxState split, whole;
    Buffer<float> scores;
    Buffer<T> weights, panels;
    const char* fetched = nullptr;  // the panel that the last attend() has begun to fetch
};

// Attention of a walk's tokens, with `group` query heads each, over one kv head. E: the type of the pool's cells.
// q [tokens * group][dim] of T, zero beyond head_dim.
template <class T, class E>
class Attention {
public:
    Attention(const KVLayout& l, const Walk& walk, int group, const T* q, float scale, AttentionScratch<T>& s)
        : l_(l), walk_(walk), group_(group), q_(q), scale_(scale * 1.44269504088896341f), s_(s) {
        s.scores.grow(size_t(ROWS_HELD) * SCORES_LD), s.weights.grow(size_t(ROWS_HELD) * WEIGHTS_LD);
        if (IS_INT8) s.panels.grow(size_t(2 * SEGMENT) * dim_);
    }

    // All keys. after: the first panels of the next call. put(token, head in group, acc [dim], 1 / l_i) takes the results.
    template <class Put>
    void whole(const Ahead& after, Put put) {
        s_.whole.clear(rows_, dim_);
        for (int64_t base = walk_.first_segment(); base < walk_.end; base = walk_.segment_from(base / SPLIT * SPLIT + SPLIT)) {
            split(base / SPLIT, after);
            s_.whole.merge(s_.split, rows_, dim_, scale_);
        }
        finish(put);
    }

    // The keys of one split, of which there may be none; leaves the result in the scratch's `split`.
    void split(int64_t index, const Ahead& after) {
        s_.split.clear(rows_, dim_);
        const int64_t end = std::min(walk_.end, index * SPLIT + SPLIT);
        for (int64_t base = walk_.segment_from(index * SPLIT), following; base < end; base = following) {
            following = walk_.next_segment(base);
            segment(base, following < walk_.end ? walk_.template first_panels<E>(following) : after);
        }
    }

    // Copies the result of a split to, and merges it from, memory that threads share.
    void store_split(float* to) const {
        const SoftmaxState& s = s_.split;
        memcpy(to, s.acc.data(), size_t(rows_) * dim_ * sizeof(float)), to += size_t(rows_) * dim_;
        memcpy(to, s.m_i.data(), rows_ * sizeof(float)), memcpy(to + rows_, s.l_i.data(), rows_ * sizeof(float));
    }
    // The results of `count` splits, in order, `distance` floats apart.
    template <class Put>
    void merged(const float* first, int count, size_t distance, Put put) {
        s_.whole.clear(rows_, dim_);
        for (int i = 0; i < count; i++, first += distance) {
            const float* m = first + size_t(rows_) * dim_;
            s_.whole.merge(first, m, m + rows_, rows_, dim_, scale_);
        }
        finish(put);
    }

private:
    // Puts the results of `whole` of the scratch.
    template <class Put>
    void finish(Put put) {
        for (int r = 0; r < rows_; r++)
            put(r / group_, r % group_, s_.whole.acc.data() + size_t(r) * dim_, 1.0f / s_.whole.l_i.data()[r]);
    }

    static constexpr bool IS_INT8 = sizeof(E) == 1;
    static constexpr int PANELS = SEGMENT / PANEL;
    static constexpr size_t SCORES_LD = SEGMENT + 16, WEIGHTS_LD = SEGMENT + 32;

    // `next`: the panels that are read after this segment.
    void segment(int64_t base, const Ahead& next) {
        const int64_t from = walk_.from(base), to = walk_.to(base);
        const int count = int(to - from) / PANEL;
        // The panels in the order in which they are read. While one is used, the one AHEAD places later is fetched.
        const char* order[2 * PANELS + AHEAD];
        for (int i = 0; i < count; i++) {
            const KVHead head = walk_.head(from + i * PANEL);
            const int unit = walk_.unit(from + i * PANEL);
            order[i] = (const char*)head.keys<E>(unit), order[count + i] = (const char*)head.values<E>(unit);
        }
        std::copy_n(next.at, AHEAD, order + 2 * count);
        if (order[0] != s_.fetched)
            for (int i = 0; i < AHEAD; i++)
                for (size_t at = 0; at < l_.unit() * sizeof(E); at += 64) __builtin_prefetch(order[i] + at, 0, 2);
        s_.fetched = next.at[0];
        const T* panels[2 * PANELS];  // those of keys, then those of values, as products read them
        for (int i = 0; i < 2 * count; i++) panels[i] = IS_INT8 ? unpacked(from, count, i, order[i + AHEAD]) : (const T*)order[i];

        for (int r = 0; r < rows_; r += ROWS_HELD) {
            const int rows = std::min(ROWS_HELD, rows_ - r);
            const int64_t last = walk_.position + (r + rows - 1) / group_;  // the last token of these rows
            const int seen = int(std::min<int64_t>(count, (last - from) / PANEL + 1));  // panels
            if (last < from) continue;
            multiply_keys(r, rows, panels, seen, order);
            weigh(r, rows, int(from - base), int(from - base) + seen * PANEL, base);
            multiply_values(r, rows, panels + count, seen, order + count);
        }
    }

    // Unpacks panel i of a segment's keys and values.
    const T* unpacked(int64_t from, int count, int i, const char* ahead) {
        const int64_t key = from + i % count * PANEL;
        const KVHead head = walk_.head(key);
        const int unit = walk_.unit(key);
        T* out = s_.panels.data() + size_t(i) * l_.unit();
        if constexpr (IS_INT8) {
            if (i < count)
                dequantize_panel<T, true>(head.keys<E>(unit), dim_, head.key_scales() + unit * PANEL, out, ahead);
            else
                for (int d = 0; d < dim_; d += PANEL)
                    dequantize_panel<T, false>(head.values<E>(unit) + size_t(d) * PANEL, PANEL, head.value_scales() + unit * PANEL,
                                               out + size_t(d) * PANEL, ahead + size_t(d) * PANEL);
        }
        return out;
    }

    // Calls f(first row, rows, whether these rows prefetch) for the rows that a product takes at once.
    template <class F>
    ALWAYS_INLINE void by_tiles(int r, int rows, F f) {
        constexpr int MAX = rows_at_once<T>();
        for (int i = 0; i < rows; i += MAX) {
            if (r + i == 0 && !IS_INT8)
                f(0, std::min(MAX, rows), std::integral_constant<int, 2>());
            else
                f(i, std::min(MAX, rows - i), std::integral_constant<int, 0>());
        }
    }

    // scores = the product of rows r .. r + rows with `count` panels of keys. ahead: what is read AHEAD panels later.
    void multiply_keys(int r, int rows, const T* const* panels, int count, const char* const* order) {
        for (int i = 0; i < count; i++)
            by_tiles(r, rows, [&](int first, int n, auto lines) {
                product<lines()>(q_ + size_t(r + first) * dim_, dim_, panels[i], dim_, s_.scores.data() + first * SCORES_LD + i * PANEL,
                                 SCORES_LD, true, n, order[i + AHEAD]);
            });
    }

    void multiply_values(int r, int rows, const T* const* panels, int count, const char* const* order) {
        for (int d = 0; d < dim_; d += PANEL)
            by_tiles(r, rows, [&](int first, int n, auto lines) {
                const T* p = s_.weights.data() + first * WEIGHTS_LD;
                float* acc = s_.split.acc.data() + size_t(r + first) * dim_ + d;
                const size_t offset = size_t(d) * PANEL;
#if defined(EVERBATCH_AMX)
                if constexpr (sizeof(T) == 2)
                    return product_of_panels_amx<lines()>(p, WEIGHTS_LD, panels, offset, count, acc, dim_, n, order + AHEAD, offset * sizeof(E));
#endif
                with_rows<rows_at_once<T>()>(n, [&](auto exactly) {
                    product_of_panels<lines(), exactly()>(p, WEIGHTS_LD, panels, offset, count, acc, dim_, order + AHEAD, offset * sizeof(E));
                });
            });
    }

    // A step of the softmax: the scores of rows r .. r + rows become weights. Positions lo .. hi of the segment at `base` are there; the
    // scores and weights of lo are the first ones.
    void weigh(int r, int rows, int lo, int hi, int64_t base) {
        constexpr int PADDED = (ROWS_HELD + LANES - 1) / LANES * LANES;
        alignas(64) float greatest[PADDED] = {}, alpha[PADDED], shift[PADDED];
        for (int i = 0; i < rows; i++) greatest[i] = mask((r + i) / group_, s_.scores.data() + i * SCORES_LD - lo, lo, hi, base);
        float *m_i = s_.split.m_i.data() + r, *l_i = s_.split.l_i.data() + r;
        for (int i = 0; i < rows; i += LANES) {
            const Vec before = load<Vec>(m_i + i), m = vmax(before, load<Vec>(greatest + i));
            const Vec none = splat(-INFINITY), known = m == none ? Vec{} : m;
            store(alpha + i, exp2_negative<float>((before - known) * scale_)), store(shift + i, known * -scale_);
            memcpy(m_i + i, &m, sizeof(float) * size_t(std::min(LANES, rows - i)));
        }
        for (int i = 0; i < rows; i++) {
            const float* x = s_.scores.data() + i * SCORES_LD - lo;
            T* p = s_.weights.data() + i * WEIGHTS_LD - lo;
            const Vec factor = splat(scale_), minus = splat(shift[i]);
            Vec sums[2] = {};
            for (int j = lo; j < hi; j += 2 * LANES) {
                const Vec e0 = exp2_negative<T>(fma(load<Vec>(x + j), factor, minus));
                const Vec e1 = exp2_negative<T>(fma(load<Vec>(x + j + LANES), factor, minus));
                sums[0] += e0, sums[1] += e1;
                store_both(p + j, e0, e1);
            }
            l_i[i] = l_i[i] * alpha[i] + reduce_add(sums[0] + sums[1]);
            if (alpha[i] == 1.0f) continue;
            float* acc = s_.split.acc.data() + size_t(r + i) * dim_;
            for (int d = 0; d < dim_; d += LANES) store(acc + d, load<Vec>(acc + d) * alpha[i]);
        }
    }

    // Sets the scores x[lo .. hi) of keys that a token does not see to minus infinity. Returns the greatest.
    float mask(int token, float* x, int lo, int hi, int64_t base) const {
        const int64_t at = walk_.position + token;  // sees keys (at - window, at], and those before sink_tokens
        if (walk_.window) {
            const int seen_from = int(std::min<int64_t>(hi, at - walk_.window + 1 - base));
            for (int j = int(std::max<int64_t>(lo, walk_.sink_tokens - base)); j < seen_from; j++) x[j] = -INFINITY;
        }
        for (int j = int(std::max<int64_t>(lo, at + 1 - base)); j < hi; j++) x[j] = -INFINITY;
        Vec greatest[2] = {load<Vec>(x + lo), load<Vec>(x + lo + LANES)};
        for (int j = lo + 2 * LANES; j < hi; j += 2 * LANES)
            greatest[0] = vmax(greatest[0], load<Vec>(x + j)), greatest[1] = vmax(greatest[1], load<Vec>(x + j + LANES));
        return reduce_max(vmax(greatest[0], greatest[1]));
    }

    static void store_both(float* p, Vec a, Vec b) { store(p, a), store(p + LANES, b); }
    static void store_both(bf16* p, Vec a, Vec b) { store_bf16(p, a, b); }

    const KVLayout& l_;
    const Walk& walk_;
    const int group_;
    const T* const q_;
    const float scale_;  // of scores, times log2(e)
    AttentionScratch<T>& s_;
    const int dim_ = l_.dim(), rows_ = walk_.tokens * group_;
};

}  // namespace everbatch
