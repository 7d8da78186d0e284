// Rounds weights to four bits of given values (kernels/common/four_bits.py, whose `round_weight` is the reference).
#include "buffer.h"
#include "simd.h"
#include "team.h"

using namespace everbatch;

namespace {

constexpr int SUPER_GROUP = 32, SUPER_GROUPS = 8;  // groups of this size share a scale where all columns are in super-blocks (super_blocks.h)
constexpr int FEWEST = 20, MOST = 28;  // 25ths of the least or greatest value, which the largest number is mapped to

struct Values {
    float of[16], middle[15], step[15];  // values, rising; half-way between a value and the next; the next less this one

    explicit Values(const int8_t* values) {
        for (int i = 0; i < 16; i++) of[i] = values[i];
        for (int i = 0; i < 15; i++) middle[i] = (of[i] + of[i + 1]) / 2, step[i] = of[i + 1] - of[i];
    }
    Vec nearest(Vec x) const {
        Vec found = splat(of[0]);
#pragma GCC unroll 15
        for (int i = 0; i < 15; i++) found += floats((x > splat(middle[i])) & bits(splat(step[i])));
        return found;
    }
};

// The best scale of x[0 .. n), a bfloat16. x has room for whole vectors behind its end, and zeros there.
float best_scale(const float* x, int64_t n, const Values& values) {
    const int64_t end = (n + LANES - 1) / LANES * LANES;
    const float of_zero = values.nearest(Vec{})[0], of_padding = float(end - n) * of_zero * of_zero;
    float largest = 0, best = 0, scale = 0;
    for (int64_t i = 0; i < n; i++)
        if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
    for (int outermost : {0, 15})
        for (int part = FEWEST; part <= MOST && largest != 0; part++) {
            const Vec inverse = splat(values.of[outermost] * float(part) / 25.0f / largest);
            Vec by_x{}, by_itself{};  // what x is rounded to, multiplied
            for (int64_t i = 0; i < end; i += LANES) {
                const Vec v = load<Vec>(x + i), rounded = values.nearest(v * inverse);
                by_x = fma(rounded, v, by_x), by_itself = fma(rounded, rounded, by_itself);
            }
            // With the scale of least squares, with_x / with_itself, the error is the sum of x^2 less `explained`.
            const float with_x = reduce_add(by_x), with_itself = reduce_add(by_itself) - of_padding;
            const float explained = with_x * with_x / with_itself;
            if (explained > best) best = explained, scale = to_float(to_bf16(with_x / with_itself));
        }
    return scale;
}

// The scales of the groups of a super-block become multiples, of -127 .. 127, of one bfloat16.
void share_scale(float* scales) {
    float largest = 0;
    for (int g = 0; g < SUPER_GROUPS; g++) largest = std::max(largest, std::fabs(scales[g]));
    const float shared = to_float(to_bf16(largest / 127.0f));
    for (int g = 0; g < SUPER_GROUPS; g++) scales[g] = shared != 0 ? std::nearbyint(scales[g] / shared) * shared : 0.0f;
}

// Rounds x[0 .. n) to values times the scale. x is as best_scale has it.
void round_group(const float* x, int64_t n, const Values& values, int8_t* q, float scale) {
    const int64_t end = (n + LANES - 1) / LANES * LANES;
    const Vec divisor = splat(scale != 0 ? scale : 1.0f);
    for (int64_t i = 0; i < end; i += LANES) {
        alignas(64) int8_t rounded[LANES];
        store(rounded, __builtin_convertvector(__builtin_convertvector(values.nearest(load<Vec>(x + i) / divisor), IVec), Quarter));
        memcpy(q + i, rounded, size_t(std::min<int64_t>(LANES, n - i)));
    }
}

}  // namespace

extern "C" {

// w [rows][k] float32 -> q, which holds some of values[16], rising, and scales [rows][ceil(k / group)], each a bfloat16, or in groups of 32 of
// whole super-blocks multiples of one.
void everbatch_round(const float* w, int64_t rows, int64_t k, int64_t group, const int8_t* values, int8_t* q, float* scales, int32_t threads) {
    const Values made(values);
    const int64_t groups = (k + group - 1) / group;
    run_team(threads, [&](Team& team) {
        Buffer<float> x;
        x.grow(size_t(group + LANES));
        team.for_each(rows, [&](int64_t r) {
            float* of_row = scales + r * groups;
            auto for_each_group = [&](auto f) {
                for (int64_t g = 0; g < groups; g++) {
                    const int64_t first = g * group, count = std::min(group, k - first);
                    memcpy(x.data(), w + r * k + first, size_t(count) * sizeof(float));
                    std::fill(x.data() + count, x.data() + group + LANES, 0.0f);
                    f(g, first, count);
                }
            };
            for_each_group([&](int64_t g, int64_t, int64_t count) { of_row[g] = best_scale(x.data(), count, made); });
            if (group == SUPER_GROUP && groups % SUPER_GROUPS == 0 && groups * group == k)
                for (int64_t g = 0; g < groups; g += SUPER_GROUPS) share_scale(of_row + g);
            for_each_group([&](int64_t g, int64_t first, int64_t count) { round_group(x.data(), count, made, q + r * k + first, of_row[g]); });
        });
    });
}

}  // extern "C"
