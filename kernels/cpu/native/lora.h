// LoRA (Hu et al. 2021): y += B (scale A x) for the rows of a batch that have an adapter, each its own.
//
// A is stored as the checkpoint has it, [rank][k]. B is stored in the panels of the layer that it adds to: [panel][rank][PANEL], the
// first panel being the one that holds the projection's first column; columns of other projections are zeros. Both are of the
// model's type T, and all sums are float32.
//
// shrink: an item of work is a few ranks of one projection for all rows of one adapter, so that A is read once. expand: put() of the
// layer's own product adds B's part to the 32 sums that it is given, while they are in the cache.
// The sums of a row do not depend on the other rows: each (row, rank) has an accumulator of its own, and ranks are added in order.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "simd.h"
#include "team.h"
#include "tiles.h"

namespace everbatch {

struct LoraPart {      // of one projection in one layer
    const void *a, *b;
    int64_t first, n;  // its columns of the (fused) layer
    int32_t rank;      // 0: the adapter does not touch it
    float scale;
};

constexpr int LORA_PARTS = 3;  // projections of a fused layer
struct LoraLinear {
    LoraPart parts[LORA_PARTS];
};
struct LoraLayer {
    LoraLinear qkv, out, gate_up, down;
};

constexpr int64_t LORA_K_UNIT = 64;  // rows of A and of x are padded with zeros to a multiple of this

ALWAYS_INLINE Vec load_lora(const float* p) { return load<Vec>(p); }
ALWAYS_INLINE Vec load_lora(const bf16* p) { return load_bf16(p); }

inline int64_t lora_padded(int64_t k) { return (k + LORA_K_UNIT - 1) / LORA_K_UNIT * LORA_K_UNIT; }

// sums[i * RANKS + j] = x_i . a_j over k, for ROWS rows of x and RANKS rows of a.
template <int ROWS, int RANKS, class T>
ALWAYS_INLINE void lora_dots(const T* const* x, const T* a, int64_t ld_a, int64_t k, float* sums) {
    Vec acc[ROWS][RANKS] = {};
    for (int64_t at = 0; at < k; at += LANES) {
        Vec of_a[RANKS];
        for (int j = 0; j < RANKS; j++) of_a[j] = load_lora(a + j * ld_a + at);
        for (int i = 0; i < ROWS; i++) {
            const Vec of_x = load_lora(x[i] + at);
            for (int j = 0; j < RANKS; j++) acc[i][j] = fma(of_x, of_a[j], acc[i][j]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < RANKS; j++) sums[i * RANKS + j] = reduce_add(acc[i][j]);
}

// Which rows of a product have which adapter.
class LoraRows {
public:
    LoraRows() = default;

    // adapters[row]: -1 for a row without one.
    explicit LoraRows(std::vector<int32_t> adapters) : of_(std::move(adapters)) {
        for (size_t r = 0; r < of_.size(); r++) {
            if (of_[r] < 0) continue;
            const size_t at = size_t(std::find(active_.begin(), active_.end(), of_[r]) - active_.begin());
            if (at == active_.size()) active_.push_back(of_[r]), rows_.emplace_back();
            rows_[at].push_back(int64_t(r));
        }
    }

    int32_t adapter_of(int64_t r) const { return of_[size_t(r)]; }
    int64_t size() const { return int64_t(of_.size()); }
    int64_t num_active() const { return int64_t(active_.size()); }  // adapters that some row has
    int32_t adapter(int64_t i) const { return active_[size_t(i)]; }  // the i-th of them
    const std::vector<int64_t>& rows(int64_t i) const { return rows_[size_t(i)]; }

private:
    std::vector<int32_t> of_, active_;
    std::vector<std::vector<int64_t>> rows_;
};

// Inputs and shrunk inputs of one product. `T` is the model's type.
template <class T>
class Lora {
public:
    static constexpr int RANKS = 4;  // of an item of work

    // layers[adapter] is the table of its layers. `widest`: inputs of any layer. `rows`: of the largest product.
    void begin(const LoraLayer* const* layers, int64_t widest, int64_t max_rank, int64_t rows) {
        layers_ = layers, ld_ = lora_padded(widest) + 32, max_rank_ = (max_rank + RANKS - 1) / RANKS * RANKS;
        x_.grow(size_t(rows * ld_)), h_.grow(size_t(rows * LORA_PARTS * max_rank_));
    }

    // Keep row r's input [k] of the next product.
    void put(const LoraRows& rows, int64_t r, const float* x, int64_t k) {
        if (rows.adapter_of(r) < 0) return;
        T* to = x_.data() + r * ld_;
        for (int64_t i = 0; i < k; i++) to[i] = narrow(x[i]);
        std::fill(to + k, to + lora_padded(k), T(0));
    }

    // h = scale A x of all rows, for a layer of `width` inputs. A phase of the team.
    void shrink(Team& team, const LoraRows& rows, int64_t layer, LoraLinear LoraLayer::*linear, int64_t width) {
        const int64_t ranks = max_rank_ / RANKS, k = lora_padded(width);
        team.for_each(rows.num_active() * LORA_PARTS * ranks, [&](int64_t item) {
            const int64_t i = item / ranks / LORA_PARTS, which = item / ranks % LORA_PARTS;
            const int first = int(item % ranks) * RANKS;
            const LoraPart& part = (layers_[rows.adapter(i)][layer].*linear).parts[which];
            if (first < part.rank) shrink_ranks(part, rows.rows(i), which, first, k);
        });
    }

    // sums[0 .. PANEL) += B h for row r, at the panel of the layer that begins with `column`.
    void expand(const LoraRows& rows, int64_t layer, LoraLinear LoraLayer::*linear, int64_t r, int64_t column, float* sums) const {
        const int32_t adapter = rows.adapter_of(r);
        if (adapter < 0) return;
        for (int which = 0; which < LORA_PARTS; which++) {
            const LoraPart& part = (layers_[adapter][layer].*linear).parts[which];
            if (!part.rank || column + PANEL <= part.first || column >= part.first + part.n) continue;
            const T* b = static_cast<const T*>(part.b) + (column - part.first / PANEL * PANEL) * part.rank;
            const float* h = h_.data() + (r * LORA_PARTS + which) * max_rank_;
            Vec total[PANEL / LANES] = {};
            for (int j = 0; j < part.rank; j++, b += PANEL)
                for (int i = 0; i < PANEL / LANES; i++) total[i] = fma(splat(h[j]), load_lora(b + i * LANES), total[i]);
            for (int i = 0; i < PANEL / LANES; i++) store(sums + i * LANES, load<Vec>(sums + i * LANES) + total[i]);
        }
    }

private:
    static T narrow(float x) {
        if constexpr (sizeof(T) == 4)
            return x;
        else
            return to_bf16(x);
    }

    void shrink_ranks(const LoraPart& part, const std::vector<int64_t>& rows, int64_t which, int first, int64_t k) {
        const T* a = static_cast<const T*>(part.a) + first * k;
        const int ranks = std::min(RANKS, part.rank - first);
        auto of_rows = [&](size_t at, auto count) {
            constexpr int COUNT = decltype(count)::value;
            const T* x[COUNT];
            float sums[COUNT * RANKS];
            for (int i = 0; i < COUNT; i++) x[i] = x_.data() + rows[at + size_t(i)] * ld_;
            if (ranks == RANKS)
                lora_dots<COUNT, RANKS>(x, a, k, k, sums);
            else
                for (int j = 0; j < ranks; j++) {
                    float of_one[COUNT];
                    lora_dots<COUNT, 1>(x, a + j * k, k, k, of_one);
                    for (int i = 0; i < COUNT; i++) sums[i * RANKS + j] = of_one[i];
                }
            for (int i = 0; i < COUNT; i++)
                for (int j = 0; j < ranks; j++)
                    h_.data()[(rows[at + size_t(i)] * LORA_PARTS + which) * max_rank_ + first + j] = part.scale * sums[i * RANKS + j];
        };
        size_t at = 0;
        for (; at + 4 <= rows.size(); at += 4) of_rows(at, std::integral_constant<int, 4>());
        for (; at < rows.size(); at++) of_rows(at, std::integral_constant<int, 1>());
    }

    const LoraLayer* const* layers_ = nullptr;
    int64_t ld_ = 0, max_rank_ = 0;
    Buffer<T> x_;      // [rows][ld]
    Buffer<float> h_;  // [rows][LORA_PARTS][max_rank]
};

}  // namespace everbatch
