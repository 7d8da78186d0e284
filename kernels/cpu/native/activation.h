// The activation functions of an MLP.
#pragma once
#include "simd.h"

namespace everbatch {

enum Activation : int32_t { SILU, GELU, GELU_TANH, SWIGLU_OAI, RELU2 };

// x / (1 + e^-x)
ALWAYS_INLINE Vec silu(Vec x) {
    const Vec e = exp_negative(-vabs(x));  // the exponent is not positive, so that nothing overflows
    return (x < 0.0f ? x * e : x) * reciprocal(1.0f + e);
}

// 1 / (1 + e^-x)
ALWAYS_INLINE Vec sigmoid(Vec x) {
    const Vec e = exp_negative(-vabs(x));
    return (x < 0.0f ? e : splat(1.0f)) * reciprocal(1.0f + e);
}

// x * (1 + erf(x / sqrt(2))) / 2, to 3e-7 of 1 + |x|. One half of erfc(|x| / sqrt(2)) is what x is multiplied with below zero, and what is
// missing above. It is e^(-x^2 / 2) times a polynomial of t = 1 / (1 + 0.3 |x|), as Abramowitz and Stegun have it in 7.1.26, here with more
// terms: the polynomial has the least relative error up to |x| = 14, from where on the exponential is 0.
ALWAYS_INLINE Vec gelu(Vec x) {
    const Vec magnitude = vabs(x), t = 1.0f / fma(magnitude, splat(0.3f), splat(1.0f));
    Vec p = splat(3.5674892e-2f);
    for (float c : {-1.5720356e-1f, 2.0635428e-1f, -5.3684309e-2f, 1.2856196e-1f, 9.9913403e-2f, 1.2075397e-1f, 1.1962930e-1f})
        p = fma(p, t, splat(c));
    const Vec part = p * t * exp_negative(magnitude * magnitude * -0.5f);
    return x < 0.0f ? x * part : fma(-x, part, x);
}

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + e^-2u).
ALWAYS_INLINE Vec gelu_tanh(Vec x) {
    const Vec magnitude = vabs(x), square = x * x;
    const Vec e = exp_negative(magnitude * fma(square, splat(-2 * 0.79788456080286536f * 0.044715f), splat(-2 * 0.79788456080286536f)));
    return (x < 0.0f ? x * e : x) * reciprocal(1.0f + e);
}

// The functions for whole vectors, and for the elements after the last one.
struct Silu {
    Vec operator()(Vec x) const { return silu(x); }
    float operator()(float x) const { return x / (1.0f + std::exp(-x)); }
};
struct Sigmoid {
    Vec operator()(Vec x) const { return sigmoid(x); }
    float operator()(float x) const { return 1.0f / (1.0f + std::exp(-x)); }
};
struct Gelu {
    Vec operator()(Vec x) const { return gelu(x); }
    float operator()(float x) const { return gelu(splat(x))[0]; }
};
struct GeluTanh {
    Vec operator()(Vec x) const { return gelu_tanh(x); }
    float operator()(float x) const { return gelu_tanh(splat(x))[0]; }
};

struct SquaredRelu {
    Vec operator()(Vec x) const { return (x < 0.0f ? Vec{} : x) * x; }  // a NaN stays one
    float operator()(float x) const { return (x < 0.0f ? 0.0f : x) * x; }
};

// out = f(gate) * up, or f(gate) where `up` is null. `out` may be `gate`.
template <class F>
void activate_with(F f, const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    if (up) {
        for (; i + LANES <= n; i += LANES) store(out + i, f(load<Vec>(gate + i)) * load<Vec>(up + i));
        for (; i < n; i++) out[i] = f(gate[i]) * up[i];
    } else {
        for (; i + LANES <= n; i += LANES) store(out + i, f(load<Vec>(gate + i)));
        for (; i < n; i++) out[i] = f(gate[i]);
    }
}

// out = min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (1 + up), up between -7 and 7, as gpt-oss has it.
inline void activate_clamped(const float* gate, const float* up, int64_t n, float* out) {
    const auto one = [](Vec g, Vec u) {
        const Vec cap = splat(7.0f), low = vmin(g, cap);
        return silu(low * 1.702f) * (1 / 1.702f) * (1.0f + vmax(vmin(u, cap), -cap));
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, one(load<Vec>(gate + i), load<Vec>(up + i)));
    for (; i < n; i++) out[i] = one(splat(gate[i]), splat(up[i]))[0];
}

inline void activate(Activation kind, const float* gate, const float* up, int64_t n, float* out) {
    if (kind == SWIGLU_OAI && up)  // it always has a gate
        activate_clamped(gate, up, n, out);
    else if (kind == SILU)
        activate_with(Silu(), gate, up, n, out);
    else if (kind == GELU)
        activate_with(Gelu(), gate, up, n, out);
    else if (kind == RELU2)
        activate_with(SquaredRelu(), gate, up, n, out);
    else
        activate_with(GeluTanh(), gate, up, n, out);
}

}  // namespace everbatch
