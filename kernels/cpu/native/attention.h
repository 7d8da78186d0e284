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
//
// Of int8 and int4 the whole numbers are multiplied. With keys n * f + o, of which f and o are a token's, a query's score is f times its
// product with n, plus o times the sum of the query. With values n * f + o, the weight is multiplied by f, and the sum of weights times o is
// added to all dimensions.
//
// With a soft cap (Gemma 2, arXiv:2408.00118) a score is replaced by its capped value as soon as it is there. A sink (gpt-oss) is a score
// that no key has: it enters the sum of exponentials at the very end, when all splits are merged.
#pragma once
#include "walk.h"

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

// c (+)= a[row][0 .. depth * count] times 32 columns of `count` panels of `depth` rows, one below the other, which begin at panels[i] +
// offset. E: the type of their cells. The rows prefetch LINES lines for every two rows of bfloat16, and less for narrower cells, from
// ahead[i] + ahead_offset on. `first`: c is overwritten instead of added to.
template <int LINES, int ROWS, class E>
__attribute__((noinline)) void product_of_panels(const bf16* a, size_t lda, const char* const* panels, size_t offset, int depth, int count,
                                                 float* c, size_t ldc, bool first, const char* const* ahead, size_t ahead_offset) {
    Sums<ROWS> sums(c, ldc, first);
    for (int p = 0; p < count; p++, a += depth) {
        const char* w = panels[p] + offset;
        const char* next = LINES ? ahead[p] + ahead_offset : nullptr;
        for (int i = 0; i < depth; i += 2, w += 2 * PANEL * BITS<E> / 8) {
            if (BITS<E> == 16) prefetch<LINES>(next);
            if (LINES && (BITS<E> == 8 || (BITS<E> == 4 && i % 4 == 0))) prefetch<1>(next);
            IVec wv[COLUMN_VECS];
#pragma GCC unroll 8
            for (int j = 0; j < COLUMN_VECS; j++) wv[j] = read_pairs<E>(w + 2 * j * LANES * BITS<E> / 8);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                for (int j = 0; j < COLUMN_VECS; j++) sums.v[r][j] = dot_pairs(sums.v[r][j], wv[j], a + r * lda + i);
        }
    }
    sums.put(c, ldc);
}

// The same for panels of T, where the registers do not hold all sums or sums are tiles. rows <= rows_at_once<T>().
template <int LINES, class T>
void product_by_panel(const T* a, size_t lda, const char* const* panels, size_t offset, int depth, int count, float* c, size_t ldc, bool first,
                      int rows, const char* const* ahead, size_t ahead_offset) {
    for (int p = 0; p < count; p++)
        product<LINES>(a + p * depth, lda, reinterpret_cast<const T*>(panels[p] + offset), depth, c, ldc, first && p == 0, rows,
                       LINES ? ahead[p] + ahead_offset : nullptr);
}

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

constexpr float LOG2_E = 1.44269504088896341f;

// What a layer makes of its scores.
struct Scoring {
    float scale;         // what the product of a query and a key is multiplied with
    float softcap;       // a score s becomes cap * tanh(s / cap); 0 = it stays
    const float* sinks;  // [heads]: one more score, which is not capped; null without
};

// Scratch of one thread.
template <class T>
struct AttentionScratch {
    SoftmaxState split, whole;
    Buffer<float> scores, query_sums;
    Buffer<T> weights, panels;
    alignas(64) float factors[2][SEGMENT], offsets[2][SEGMENT];  // by Side; of the keys, and the values, of a segment
    const char* fetched = nullptr;  // the panel that the last segment has begun to fetch
};

// Attention of a walk's tokens, with `group` query heads each, over one kv head. K, V: the types of the pool's keys and values.
// q [tokens * group][dim] of T, zero beyond head_dim. The sinks of `scoring` are those of these heads.
template <class T, class K, class V>
class Attention {
public:
    Attention(const KVLayout& l, const Walk& walk, int group, const T* q, const Scoring& scoring, AttentionScratch<T>& s)
        : l_(l), walk_(walk), group_(group), q_(q), scoring_(scoring), scale_(scoring.softcap ? LOG2_E : scoring.scale * LOG2_E), s_(s) {
        s.scores.grow(size_t(ROWS_HELD) * SCORES_LD), s.weights.grow(size_t(ROWS_HELD) * WEIGHTS_LD);
        if (!IS_QUANTIZED) return;
        s.panels.grow(size_t(2 * SEGMENT) * dim_), s.query_sums.grow(rows_);
        for (int r = 0; HAS_OFFSETS<K> && r < rows_; r++) {
            Vec sum{};
            for (int d = 0; d < dim_; d += LANES) sum += load_floats(q + size_t(r) * dim_ + d);
            s.query_sums.data()[r] = reduce_add(sum);
        }
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
            segment(base, following < walk_.end ? walk_.first_panels(following) : after);
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
            put(r / group_, r % group_, s_.whole.acc.data() + size_t(r) * dim_,
                scoring_.sinks ? inverse_with_sink(r) : 1.0f / s_.whole.l_i.data()[r]);
    }

    // What the sum of row r's values is to be multiplied with, where its softmax has a sink. One copy for all callers.
    __attribute__((noinline)) float inverse_with_sink(int r) const {
        const float sink = scoring_.sinks[r % group_] * LOG2_E, greatest = s_.whole.m_i.data()[r] * scale_, m = std::max(sink, greatest);
        const Vec own = exp2_negative<float>(splat(greatest - m)), of_sink = exp2_negative<float>(splat(sink - m));
        return own[0] / fma(splat(s_.whole.l_i.data()[r]), own, of_sink)[0];
    }

    static constexpr bool IS_QUANTIZED = BITS<K> <= 8;  // values then are too
    template <class E>
    static constexpr bool HAS_OFFSETS = BITS<E> == 4;
    static constexpr int PANELS = SEGMENT / PANEL;
#if defined(EVERBATCH_AMX)
    static constexpr bool BY_REGISTERS = false;
#else
    static constexpr bool BY_REGISTERS = sizeof(T) == 2;
#endif
    static constexpr size_t SCORES_LD = SEGMENT + 16, WEIGHTS_LD = SEGMENT + 32;

    // `next`: the panels that are read after this segment. One copy for all callers, so that sums are rounded alike.
    __attribute__((noinline)) void segment(int64_t base, const Ahead& next) {
        const int64_t from = walk_.from(base), to = walk_.to(base);
        const int count = int(to - from) / PANEL;
        // The panels in the order in which they are read. While one is used, the one AHEAD places later is fetched.
        const char* order[2 * PANELS + AHEAD];
        for (int i = 0; i < count; i++) {
            const KVHead head = walk_.head(from + i * PANEL);
            const int unit = walk_.unit(from + i * PANEL);
            order[i] = head.keys(unit), order[count + i] = head.values(unit);
        }
        std::copy_n(next.at, AHEAD, order + 2 * count);
        if (order[0] != s_.fetched)
            for (int i = 0; i < AHEAD; i++)
                for (size_t at = 0; at < l_.unit_bytes(KEYS); at += 64) __builtin_prefetch(order[i] + at, 0, 2);
        s_.fetched = next.at[0];
        const char* parameters[2][PANELS];  // of keys and of values; needed only after the first product
        for (int i = 0; IS_QUANTIZED && i < count; i++) {
            const KVHead head = walk_.head(from + i * PANEL);
            const int offset = walk_.unit(from + i * PANEL) * PANEL;
            parameters[KEYS][i] = head.of_key(offset), parameters[VALUES][i] = head.of_value(offset);
            for (auto& of : parameters)
                for (int at = 0; at < PANEL * KVLayout::PARAMETER_BYTES; at += 64) __builtin_prefetch(of[i] + at);
        }
        const char* panels[2 * PANELS];  // those of keys, then those of values, as products read them
        for (int i = 0; i < 2 * count; i++)
            panels[i] = !IS_QUANTIZED || reads_cells_ ? order[i]
                        : i < count                   ? unpacked<K>(order[i], i, order[i + AHEAD])
                                                      : unpacked<V>(order[i], i, order[i + AHEAD]);
        for (int r = 0; r < rows_; r += ROWS_HELD) {
            const int rows = std::min(ROWS_HELD, rows_ - r);
            const int64_t last = walk_.end_of((r + rows - 1) / group_) - 1;  // the last key that one of these rows sees
            const int seen = int(std::min<int64_t>(count, last < from ? 0 : (last - from) / PANEL + 1));  // panels
            multiply_keys(r, rows, panels, seen, order);
            for (int i = 0; IS_QUANTIZED && r == 0 && i < count; i++) {
                read_parameters<K>(parameters[KEYS][i], PANEL, s_.factors[KEYS] + i * PANEL, s_.offsets[KEYS] + i * PANEL);
                read_parameters<V>(parameters[VALUES][i], PANEL, s_.factors[VALUES] + i * PANEL, s_.offsets[VALUES] + i * PANEL);
            }
            if (!seen) continue;
            weigh(r, rows, int(from - base), int(from - base) + seen * PANEL, base);
            multiply_values(r, rows, panels + count, seen, order + count);
        }
    }

    // Unpacks the cells of panel i of a segment's keys and values. E: their type.
    template <class E>
    const char* unpacked(const char* cells, int i, const char* ahead) {
        T* out = s_.panels.data() + size_t(i) * l_.unit();
        if constexpr (IS_QUANTIZED) unpack_panel<T, E>(cells, dim_, out, ahead);
        return reinterpret_cast<const char*>(out);
    }

    // c (+)= the products of rows of a (row r of the walk is the first), with `count` panels. ahead: what is read AHEAD panels later.
    // E: the type of the pool's cells.
    template <class E>
    void multiply(int r, int rows, const T* a, size_t lda, const char* const* panels, size_t offset, int depth, int count, float* c, size_t ldc,
                  bool first, const char* const* ahead) {
        for (int i = 0; i < rows; i += rows_at_once<T>()) {
            const int n = std::min(rows_at_once<T>(), rows - i);
            const T* of = a + i * lda;
            float* to = c + i * ldc;
            auto run = [&](auto lines) {
                if constexpr (BY_REGISTERS) {
                    with_rows<rows_at_once<T>()>(n, [&](auto exactly) {
                        if (reads_cells_)
                            product_of_panels<lines(), exactly(), E>(of, lda, panels, offset * BITS<E> / 8, depth, count, to, ldc, first, ahead,
                                                                     offset * BITS<E> / 8);
                        else
                            product_of_panels<lines(), exactly(), T>(of, lda, panels, offset * sizeof(T), depth, count, to, ldc, first, ahead,
                                                                     offset * sizeof(T));
                    });
                } else {
                    product_by_panel<lines()>(of, lda, panels, offset * sizeof(T), depth, count, to, ldc, first, n, ahead, offset * sizeof(T));
                }
            };
            if (r + i == 0 && reads_cells_)
                run(std::integral_constant<int, 2>());
            else
                run(std::integral_constant<int, 0>());
        }
    }

    // scores = the product of rows r .. r + rows with `count` panels of keys.
    void multiply_keys(int r, int rows, const char* const* panels, int count, const char* const* order) {
        for (int i = 0; i < count; i++)
            multiply<K>(r, rows, q_ + size_t(r) * dim_, dim_, panels + i, 0, dim_, 1, s_.scores.data() + i * PANEL, SCORES_LD, true,
                        order + AHEAD + i);
    }

    void multiply_values(int r, int rows, const char* const* panels, int count, const char* const* order) {
        for (int d = 0; d < dim_; d += PANEL)
            multiply<V>(r, rows, s_.weights.data(), WEIGHTS_LD, panels, size_t(d) * PANEL, PANEL, count,
                        s_.split.acc.data() + size_t(r) * dim_ + d, dim_, false, order + AHEAD);
    }

    // A step of the softmax: the scores of rows r .. r + rows become weights. Positions lo .. hi of the segment at `base` are there; the
    // scores and weights of lo are the first ones.
    void weigh(int r, int rows, int lo, int hi, int64_t base) {
        constexpr int PADDED = (ROWS_HELD + LANES - 1) / LANES * LANES;
        alignas(64) float greatest[PADDED] = {}, alpha[PADDED], shift[PADDED];
        for (int i = 0; i < rows; i++) greatest[i] = mask(r + i, s_.scores.data() + i * SCORES_LD - lo, lo, hi, base);
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
            Vec sums[2] = {}, of_offsets{};
            for (int j = lo; j < hi; j += 2 * LANES) {
                const Vec e0 = exp2_negative<T>(fma(load<Vec>(x + j), factor, minus));
                const Vec e1 = exp2_negative<T>(fma(load<Vec>(x + j + LANES), factor, minus));
                sums[0] += e0, sums[1] += e1;
                if constexpr (IS_QUANTIZED) {
                    const float *f = s_.factors[VALUES] + j - lo, *o = s_.offsets[VALUES] + j - lo;
                    if (HAS_OFFSETS<V>) of_offsets = fma(e1, load<Vec>(o + LANES), fma(e0, load<Vec>(o), of_offsets));
                    store_both(p + j, e0 * load<Vec>(f), e1 * load<Vec>(f + LANES));
                } else {
                    store_both(p + j, e0, e1);
                }
            }
            l_i[i] = l_i[i] * alpha[i] + reduce_add(sums[0] + sums[1]);
            if (alpha[i] == 1.0f && !HAS_OFFSETS<V>) continue;
            float* acc = s_.split.acc.data() + size_t(r + i) * dim_;
            const Vec added = splat(HAS_OFFSETS<V> ? reduce_add(of_offsets) : 0.0f);
            for (int d = 0; d < dim_; d += LANES) store(acc + d, fma(load<Vec>(acc + d), splat(alpha[i]), added));
        }
    }

    // The products x[0 .. n) of queries and keys become capped scores.
    __attribute__((noinline)) void cap(float* x, int n) const {
        const Vec scale = splat(scoring_.scale / scoring_.softcap);
        for (int j = 0; j < n; j += LANES) store(x + j, tanh(load<Vec>(x + j) * scale) * scoring_.softcap);
    }

    // Sets the scores x[lo .. hi) of a row to minus infinity where it does not see the key. Returns the greatest.
    float mask(int row, float* x, int lo, int hi, int64_t base) const {
        if constexpr (IS_QUANTIZED) {
            const Vec sum = splat(HAS_OFFSETS<K> ? s_.query_sums.data()[row] : 0.0f);
            const float *f = s_.factors[KEYS] - lo, *o = s_.offsets[KEYS] - lo;
            for (int j = lo; j < hi; j += LANES) {
                const Vec scaled = load<Vec>(x + j) * load<Vec>(f + j);
                store(x + j, HAS_OFFSETS<K> ? fma(sum, load<Vec>(o + j), scaled) : scaled);
            }
        }
        if (scoring_.softcap) cap(x + lo, hi - lo);
        const int64_t at = walk_.position + row / group_;  // sees keys (at - window, end), and those before sink_tokens
        if (walk_.window) {
            const int seen_from = int(std::min<int64_t>(hi, at - walk_.window + 1 - base));
            for (int j = int(std::max<int64_t>(lo, walk_.sink_tokens - base)); j < seen_from; j++) x[j] = -INFINITY;
        }
        for (int j = int(std::max<int64_t>(lo, walk_.end_of(row / group_) - base)); j < hi; j++) x[j] = -INFINITY;
        Vec greatest[2] = {load<Vec>(x + lo), load<Vec>(x + lo + LANES)};
        for (int j = lo + 2 * LANES; j < hi; j += 2 * LANES)
            greatest[0] = vmax(greatest[0], load<Vec>(x + j)), greatest[1] = vmax(greatest[1], load<Vec>(x + j + LANES));
        return reduce_max(vmax(greatest[0], greatest[1]));
    }

    static Vec load_floats(const float* x) { return load<Vec>(x); }
    static Vec load_floats(const bf16* x) { return load_bf16(x); }
    static void store_both(float* p, Vec a, Vec b) { store(p, a), store(p + LANES, b); }
    static void store_both(bf16* p, Vec a, Vec b) { store_bf16(p, a, b); }

    const KVLayout& l_;
    const Walk& walk_;
    const int group_;
    const T* const q_;
    const Scoring scoring_;
    const float scale_;  // of scores as `mask` leaves them, times log2(e)
    AttentionScratch<T>& s_;
    const int dim_ = l_.dim(), rows_ = walk_.tokens * group_;
    // Products read the pool's cells. Of int8 and int4 they do so for a few rows only; for more, cells are unpacked once.
    const bool reads_cells_ = !IS_QUANTIZED || (BY_REGISTERS && rows_ <= rows_at_once<T>());
};

}  // namespace everbatch
