// Rounds weights to four bits of given values; kernels/common/four_bits.py is the reference.
#include "buffer.h"
#include "rotation.h"
#include "simd.h"
#include "team.h"

using namespace everbatch;

namespace {

constexpr int GROUP = 32;                // numbers that share a scale
constexpr int FEWEST = 20, MOST = 28;  // 25ths of the least or greatest value, which the largest number is mapped to

struct Values {
    float of[16], middle[15], step[15];  // values, rising; half-way between a value and the next; the next less this one

    template <class Number>
    explicit Values(const Number* values) {
        for (int i = 0; i < 16; i++) of[i] = float(values[i]);
        for (int i = 0; i < 15; i++) middle[i] = (of[i] + of[i + 1]) / 2, step[i] = of[i + 1] - of[i];
    }
    Vec nearest(Vec x) const {
        Vec found = splat(of[0]);
#pragma GCC unroll 15
        for (int i = 0; i < 15; i++) found += floats((x > splat(middle[i])) & bits(splat(step[i])));
        return found;
    }
};

// The best scale of x[0 .. GROUP), whose errors count as often as `counts` says.
float best_scale(const float* x, const float* counts, const Values& values) {
    float largest = 0, best = 0, scale = 0;
    for (int i = 0; i < GROUP; i++)
        if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
    for (int outermost : {0, 15})
        for (int part = FEWEST; part <= MOST && largest != 0; part++) {
            const Vec inverse = splat(values.of[outermost] * float(part) / 25.0f / largest);
            Vec by_x{}, by_itself{};  // the rounded numbers, multiplied
            for (int i = 0; i < GROUP; i += LANES) {
                const Vec v = load<Vec>(x + i), rounded = values.nearest(v * inverse), counted = rounded * load<Vec>(counts + i);
                by_x = fma(counted, v, by_x), by_itself = fma(counted, rounded, by_itself);
            }
            // With the scale of least squares, with_x / with_itself, the error is the sum of x^2 less `explained`.
            const float with_x = reduce_add(by_x), with_itself = reduce_add(by_itself);
            const float explained = with_x * with_x / with_itself;
            if (explained > best) best = explained, scale = with_x / with_itself;
        }
    return scale;
}

}  // namespace

extern "C" {

// w [rows][k] float32, k a multiple of GROUP, counts [k] -> scales [rows][k / GROUP] for values[16], rising.
void everbatch_best_scales(const float* w, int64_t rows, int64_t k, const int8_t* values, const float* counts, float* scales, int32_t threads) {
    const Values made(values);
    run_team(threads, [&](Team& team) {
        team.for_each(rows, [&](int64_t r) {
            for (int64_t i = 0; i < k; i += GROUP) scales[(r * k + i) / GROUP] = best_scale(w + r * k + i, counts + i, made);
        });
    });
}

// w and scales as above -> q [rows][k], which holds some of `values`.
void everbatch_round(const float* w, int64_t rows, int64_t k, const int8_t* values, const float* scales, int8_t* q, int32_t threads) {
    const Values made(values);
    run_team(threads, [&](Team& team) {
        team.for_each(rows, [&](int64_t r) {
            for (int64_t i = r * k; i < (r + 1) * k; i += LANES) {
                const float scale = scales[i / GROUP];
                const Vec rounded = made.nearest(load<Vec>(w + i) / splat(scale != 0 ? scale : 1.0f));
                store(q + i, __builtin_convertvector(__builtin_convertvector(rounded, IVec), Quarter));
            }
        });
    });
}

// x [rows][k] -> out [rows][k], rotated; k a multiple of 64.
void everbatch_rotate(const float* x, int64_t rows, int64_t k, float* out, int32_t threads) {
    run_team(threads, [&](Team& team) { team.for_each(rows, [&](int64_t r) { rotate(x + r * k, k, out + r * k); }); });
}

}  // extern "C"
