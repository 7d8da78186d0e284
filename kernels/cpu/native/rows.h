// Work on single rows between the products: norms, and the conversion to operands of linear layers.
#pragma once
#include "linear.h"
#include "rotation.h"

namespace everbatch {

enum NormKind : int32_t { RMS, LAYER };

struct Norm {
    const float *weight, *bias;  // [size]; no weight: there is no norm; no bias: nothing is added
};

// add(... add(add(0, x[0]), x[1]) ...), for an `add` that sums some function of x. Elements after the last whole vector are added one by one.
template <class Add>
ALWAYS_INLINE float sum_over(const float* x, int64_t n, Add add) {
    constexpr int CHAINS = 4;  // independent sums, which do not wait for each other
    Vec sums[CHAINS] = {};
    int64_t i = 0;
    for (; i + CHAINS * LANES <= n; i += CHAINS * LANES)
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; c++) sums[c] = add(sums[c], load<Vec>(x + i + c * LANES));
    for (; i + LANES <= n; i += LANES) sums[0] = add(sums[0], load<Vec>(x + i));
    float total = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) total = add(total, x[i]);
    return total;
}

// sum + x^2
ALWAYS_INLINE Vec add_square(Vec sum, Vec x) { return fma(x, x, sum); }
ALWAYS_INLINE float add_square(float sum, float x) { return sum + x * x; }

// out = x / sqrt(mean(x^2) + eps) * weight. `out` may be x.
inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    const float squares = sum_over(x, n, [](auto sum, auto v) { return add_square(sum, v); });
    const float scale = 1.0f / std::sqrt(squares / float(n) + eps);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, load<Vec>(x + i) * scale * load<Vec>(weight + i));
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

// out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight. `out` may be x.
inline void layer_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    const float mean = sum_over(x, n, [](auto sum, auto v) { return sum + v; }) / float(n);
    const float squares = sum_over(x, n, [mean](auto sum, auto v) { return add_square(sum, v - mean); });
    const float scale = 1.0f / std::sqrt(squares / float(n) + eps);
    for (int64_t i = 0; i < n; i++) out[i] = (x[i] - mean) * scale * weight[i];
}

// out = the norm of x, which there must be. `out` may be x.
inline void normalise(NormKind kind, const Norm& norm, const float* x, int64_t n, float eps, float* out) {
    if (kind == RMS)
        rms_norm(x, norm.weight, n, eps, out);
    else
        layer_norm(x, norm.weight, n, eps, out);
    if (norm.bias)
        for (int64_t i = 0; i < n; i++) out[i] += norm.bias[i];
}

// int8 with one scale for each group: scale = max|x| / 127, q = round(x / scale), and minus the sum of q. n is a multiple of LANES.
inline void quantize_group(const float* x, int64_t n, int8_t* q, float* scale, int32_t* sum) {
    Vec maxima{};
    for (int64_t i = 0; i < n; i += LANES) maxima = vmax(maxima, vabs(load<Vec>(x + i)));
    const float largest = reduce_max(maxima);
    *scale = largest / 127.0f;
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
    IVec total{};
    for (int64_t i = 0; i < n; i += LANES) {
        IVec v = bits(load<Vec>(x + i) * inverse + magic) - bits(magic);
        total += v;
        store(q + i, __builtin_convertvector(v, Quarter));
    }
    *sum = -reduce_add(total);
}

// The memory of an operand (linear.h), reused by all layers of the same format.
class OperandBuffer {
public:
    // Makes room for `rows` rows in the form that layers like `l` read.
    void shape(const Linear& l, int64_t rows, size_t element_bytes) {
        const int64_t depth = l.depth();
        k_ = l.k, depth_ = depth, group_ = l.input_group(), sum_factor_ = l.multiplies_int8() ? DOT_BIAS : 1;
        rotates_ = l.is_rotated();
        bytes_ = group_ ? 1 : element_bytes;
        const size_t ld = size_t(depth) + 64 / bytes_;  // so that rows start in different cache sets
        data_.grow(size_t(rows) * ld * bytes_);
        view_ = {data_.data(), ld, nullptr, nullptr, 0};
        if (group_) {
            const size_t groups = size_t(depth / group_);
            scales_.grow(size_t(rows) * groups), sums_.grow(size_t(rows) * groups);
            view_ = {data_.data(), ld, scales_.data(), sums_.data(), groups};
        }
    }

    // Row r = x[0 .. k). x must have room up to the padded depth: it is filled with zeros there.
    void put(int64_t r, float* x) {
        for (int64_t i = k_; i < depth_; i++) x[i] = 0;
        char* to = data_.data() + size_t(r) * view_.ld * bytes_;
        if (bytes_ == 4) {
            memcpy(to, x, size_t(depth_) * 4);
        } else if (bytes_ == 2) {
            for (int64_t i = 0; i < depth_; i += LANES) store_bf16(reinterpret_cast<bf16*>(to) + i, load<Vec>(x + i));
        } else {
            if (rotates_) x = rotated(x);
            for (size_t g = 0; g < view_.groups; g++)
                quantize(x + g * group_, group_, reinterpret_cast<int8_t*>(to) + g * group_, size_t(r) * view_.groups + g);
        }
    }

    // Whether put_panel may be used: a panel must not cut a group or a block that is rotated.
    bool takes_panels() const { return k_ % PANEL == 0 && (!group_ || PANEL % group_ == 0) && !rotates_; }

    // Stores columns column .. column + PANEL of row r.
    void put_panel(int64_t r, int64_t column, const float* x) {
        char* to = data_.data() + (size_t(r) * view_.ld + size_t(column)) * bytes_;
        if (bytes_ == 4) {
            memcpy(to, x, PANEL * 4);
        } else if (bytes_ == 2) {
            for (int i = 0; i < PANEL; i += LANES) store_bf16(reinterpret_cast<bf16*>(to) + i, load<Vec>(x + i));
        } else {
            const size_t at = size_t(r) * view_.groups + size_t(column / group_);
            for (int64_t i = 0; i < PANEL; i += group_) quantize(x + i, group_, reinterpret_cast<int8_t*>(to) + i, at + size_t(i / group_));
        }
        if (column + PANEL != k_) return;
        memset(to + PANEL * bytes_, 0, size_t(depth_ - k_) * bytes_);
        if (group_)
            for (size_t g = size_t(k_ / group_); g < view_.groups; g++) scales_.data()[r * view_.groups + g] = 0, sums_.data()[r * view_.groups + g] = 0;
    }

    const Operand& view() const { return view_; }

private:
    // A copy, because others may read x afterwards. A rotated layer has no padding: its groups divide k.
    float* rotated(const float* x) const {
        static thread_local Buffer<float> out;
        out.grow(size_t(k_));
        rotate(x, k_, out.data());
        return out.data();
    }
    // `at`: the index of the group in the tables of all groups.
    void quantize(const float* x, int64_t n, int8_t* q, size_t at) {
        quantize_group(x, n, q, scales_.data() + at, sums_.data() + at);
        sums_.data()[at] *= sum_factor_;
    }

    Buffer<char> data_;
    Buffer<float> scales_;
    Buffer<int32_t> sums_;
    Operand view_;
    int64_t k_ = 0, depth_ = 0, group_ = 0;
    int32_t sum_factor_ = 1;
    bool rotates_ = false;
    size_t bytes_ = 0;
};

}  // namespace everbatch
