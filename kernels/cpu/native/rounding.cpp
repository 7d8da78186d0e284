// Rounds weights to given values or to levels; kernels/common/rounding.py is the reference.
#include "buffer.h"
#include "rotation.h"
#include "simd.h"
#include "team.h"

using namespace everbatch;

namespace {

constexpr int GROUP = 32;                // numbers that share a scale
constexpr int FEWEST = 20, MOST = 28;  // 25ths of the least or greatest value, which the largest number is mapped to
constexpr int NEAREST = 45, FARTHEST = 53;  // 50ths of the distance from the middle, which the first and last level have

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

struct Range {
    float scale, minimum;
};

struct Levels {
    float most;

    Vec nearest(Vec x) const {
        const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
        return (vmin(vmax(x, Vec{}), splat(most)) + magic) - magic;
    }
};

// The best scale of x[0 .. GROUP), whose errors count as often as `counts` says.
Range best_range(const float* x, const float* counts, const Values& values) {
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
    return {scale, 0};
}

// The same for numbers of levels, of which a minimum is subtracted.
Range best_range(const float* x, const float* counts, const Levels& levels) {
    float least = x[0], greatest = x[0], total = 0, sum = 0;
    for (int i = 0; i < GROUP; i++) {
        least = std::fmin(least, x[i]), greatest = std::fmax(greatest, x[i]);
        total += counts[i], sum += counts[i] * x[i];
    }
    const float middle = (least + greatest) / 2, half = (greatest - least) / 2, mean = sum / total;
    float best = 0, scale = 0, level = 0;
    for (int below = NEAREST; below <= FARTHEST && half > 0; below += 2)
        for (int above = NEAREST; above <= FARTHEST; above += 2) {
            const Vec inverse = splat(50 * levels.most / (half * float(below + above))), first = splat(middle - half * float(below) / 50);
            Vec rounded[GROUP / LANES], of_levels{}, by_x{}, by_itself{};
            for (int i = 0; i < GROUP; i += LANES) {
                rounded[i / LANES] = levels.nearest((load<Vec>(x + i) - first) * inverse);
                of_levels = fma(rounded[i / LANES], load<Vec>(counts + i), of_levels);
            }
            const float mean_level = reduce_add(of_levels) / total;
            for (int i = 0; i < GROUP; i += LANES) {
                const Vec centred = rounded[i / LANES] - splat(mean_level), counted = centred * load<Vec>(counts + i);
                by_x = fma(counted, load<Vec>(x + i) - splat(mean), by_x), by_itself = fma(counted, centred, by_itself);
            }
            const float with_x = reduce_add(by_x), with_itself = reduce_add(by_itself);
            const float explained = with_x * with_x / with_itself;
            if (explained > best) best = explained, scale = with_x / with_itself, level = mean_level;
        }
    return {scale, scale * level - mean};
}

template <class Form>
void best_ranges(const float* w, int64_t rows, int64_t k, const Form& form, const float* counts, float* scales, float* minima, int32_t threads) {
    run_team(threads, [&](Team& team) {
        team.for_each(rows, [&](int64_t r) {
            for (int64_t i = 0; i < k; i += GROUP) {
                const Range found = best_range(w + r * k + i, counts + i, form);
                scales[(r * k + i) / GROUP] = found.scale;
                if (minima) minima[(r * k + i) / GROUP] = found.minimum;
            }
        });
    });
}

template <class Form>
void round_to(const float* w, int64_t rows, int64_t k, const Form& form, const float* scales, const float* minima, int8_t* q, int32_t threads) {
    run_team(threads, [&](Team& team) {
        team.for_each(rows, [&](int64_t r) {
            for (int64_t i = r * k; i < (r + 1) * k; i += LANES) {
                const float scale = scales[i / GROUP], minimum = minima ? minima[i / GROUP] : 0.0f;
                const Vec rounded = form.nearest((load<Vec>(w + i) + splat(minimum)) / splat(scale != 0 ? scale : 1.0f));
                store(q + i, __builtin_convertvector(__builtin_convertvector(rounded, IVec), Quarter));
            }
        });
    });
}

}  // namespace

extern "C" {

// w [rows][k] float32, k a multiple of GROUP, counts [k] -> scales, minima [rows][k / GROUP]: for values[16], rising, without minima;
// where `values` is null, for the levels 0 .. most.
void everbatch_best_ranges(const float* w, int64_t rows, int64_t k, const int8_t* values, int32_t most, const float* counts, float* scales, float* minima,
                           int32_t threads) {
    if (values) return best_ranges(w, rows, k, Values(values), counts, scales, nullptr, threads);
    best_ranges(w, rows, k, Levels{float(most)}, counts, scales, minima, threads);
}

// w, scales and minima as above -> q [rows][k], which holds some of `values` or levels.
void everbatch_round(const float* w, int64_t rows, int64_t k, const int8_t* values, int32_t most, const float* scales, const float* minima, int8_t* q,
                     int32_t threads) {
    if (values) return round_to(w, rows, k, Values(values), scales, nullptr, q, threads);
    round_to(w, rows, k, Levels{float(most)}, scales, minima, q, threads);
}

// x [rows][k] -> out [rows][k], rotated; k a multiple of 64.
void everbatch_rotate(const float* x, int64_t rows, int64_t k, float* out, int32_t threads) {
    run_team(threads, [&](Team& team) { team.for_each(rows, [&](int64_t r) { rotate(x + r * k, k, out + r * k); }); });
}

}  // extern "C"
