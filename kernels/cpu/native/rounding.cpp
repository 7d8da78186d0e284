// Rounds weights to four bits of given values (kernels/common/four_bits.py, whose `round_weight` is the reference).
#include "team.h"
#include "simd.h"

using namespace everbatch;

namespace {

constexpr int FEWEST = 20, MOST = 28;  // 25ths of a value that the largest number may be mapped to

struct Values {
    const int8_t* of;     // [16], rising
    int8_t nearest[256];  // of an integer of -128 .. 127

    explicit Values(const int8_t* values) : of(values) {
        for (int i = 0; i < 256; i++) {
            int best = 0;
            for (int v = 1; v < 16; v++)
                if (std::abs(values[v] - (i - 128)) < std::abs(values[best] - (i - 128))) best = v;
            nearest[i] = values[best];
        }
    }
    int8_t round(float x) const { return nearest[int(std::nearbyint(std::fmax(-128.0f, std::fmin(127.0f, x)))) + 128]; }
};

// Rounds x[0 .. n) to values times one scale.
void round_group(const float* x, int64_t n, const Values& values, int8_t* q, float* scale) {
    float largest = 0, best = 0;
    for (int64_t i = 0; i < n; i++)
        if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
    *scale = 0;
    for (int end : {0, 15})
        for (int part = FEWEST; part <= MOST && largest != 0; part++) {
            const float inverse = float(values.of[end]) * float(part) / 25.0f / largest;
            float with_x = 0, with_itself = 0;  // sums of products of what x is rounded to
            for (int64_t i = 0; i < n; i++) {
                const float rounded = values.round(x[i] * inverse);
                with_x += rounded * x[i], with_itself += rounded * rounded;
            }
            // With the scale of least squares, with_x / with_itself, the error is the sum of x^2 less this.
            const float explained = with_x * with_x / with_itself;
            if (explained > best) best = explained, *scale = to_float(to_bf16(with_x / with_itself));
        }
    for (int64_t i = 0; i < n; i++) q[i] = values.round(*scale != 0 ? x[i] / *scale : 0.0f);
}

}  // namespace

extern "C" {

// w [rows][k] float32 -> q, which holds some of values[16], rising, and scales [rows][ceil(k / group)], each a bfloat16.
void everbatch_round(const float* w, int64_t rows, int64_t k, int64_t group, const int8_t* values, int8_t* q, float* scales, int32_t threads) {
    const Values made(values);
    const int64_t groups = (k + group - 1) / group;
    run_team(threads, [&](Team& team) {
        team.for_each(rows, [&](int64_t r) {
            for (int64_t g = 0; g < groups; g++)
                round_group(w + r * k + g * group, std::min(group, k - g * group), made, q + r * k + g * group, scales + r * groups + g);
        });
    });
}

}  // extern "C"
