// Rounds weights to four bits: of given values (kernels/common/four_bits.py), and with two levels of scales (kernels/common/two_levels.py). The
// `round_weight` of either is the reference.
#include "buffer.h"
#include "rotation.h"
#include "simd.h"
#include "team.h"
#include "two_levels.h"

using namespace everbatch;

namespace {

constexpr int64_t MOST_CHUNKS = 16;  // of a group of two levels
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

// The levels of each multiple as values, rising.
struct LevelValues {
    std::vector<Values> of;

    LevelValues() {
        for (int m = -MOST_MULTIPLE; m <= MOST_MULTIPLE; m++) {
            int levels[16];
            for (int q = 0; q < 16; q++) levels[m < 0 ? 15 - q : q] = LEVELS.at(int8_t(m))[q] - LEVEL_ZERO;
            of.emplace_back(levels);
        }
    }
    const Values& at(int m) const { return of[size_t(m + MOST_MULTIPLE)]; }
};

// The multiple for a chunk that leaves the least squared error, which is stored. `nearest` is the one to begin with; it and its neighbours are tried.
int best_multiple(const float* x, const LevelValues& levels, float scale, float nearest, float* error) {
    const Vec inverse = splat(1.0f / scale), unit = splat(scale);
    int best = 0;
    *error = INFINITY;
    for (int step = -1; step <= 1; step++) {
        const int multiple = int(std::max(-float(MOST_MULTIPLE), std::min(float(MOST_MULTIPLE), std::nearbyint(nearest) + float(step))));
        Vec squares{};
        for (int i = 0; i < CHUNK; i += LANES) {
            const Vec v = load<Vec>(x + i), lost = levels.at(multiple).nearest(v * inverse) * unit - v;
            squares = fma(lost, lost, squares);
        }
        if (const float sum = reduce_add(squares); sum < *error) *error = sum, best = multiple;
    }
    return best;
}

// Rounds a group x[0 .. n) of a row to levels q times the scale that is returned, a bfloat16.
float round_to_levels(const float* x, int64_t n, const Values& values, const LevelValues& levels, int8_t* q) {
    float ideal[MOST_CHUNKS], largest = 0, least = INFINITY, scale = 0;
    int multiples[MOST_CHUNKS] = {};
    const int64_t chunks = n / CHUNK;
    for (int64_t c = 0; c < chunks; c++) {
        ideal[c] = best_scale(x + c * CHUNK, CHUNK, values);
        largest = std::max(largest, std::fabs(ideal[c]));
    }
    for (float part : {1.0f, 0.95f}) {
        const float tried = to_float(to_bf16(largest * (128.0f / float(MOST_MULTIPLE)) * part));
        if (!(tried > 0)) break;
        int found[MOST_CHUNKS];
        float error = 0;
        for (int64_t c = 0; c < chunks; c++) {
            float of_chunk;
            found[c] = best_multiple(x + c * CHUNK, levels, tried, ideal[c] * 128.0f / tried, &of_chunk);
            error += of_chunk;
        }
        if (error < least) least = error, scale = tried, std::copy(found, found + chunks, multiples);
    }
    for (int64_t c = 0; c < chunks; c++) round_group(x + c * CHUNK, CHUNK, levels.at(scale != 0 ? multiples[c] : 0), q + c * CHUNK, scale);
    return scale;
}

}  // namespace

extern "C" {

// w [rows][k] float32 -> q, which holds some of values[16], rising, and scales [rows][ceil(k / group)], each a bfloat16.
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
            for_each_group([&](int64_t g, int64_t first, int64_t count) { round_group(x.data(), count, made, q + r * k + first, of_row[g]); });
        });
    });
}

// w [rows][k] float32, rotated -> q int8 of two levels (two_levels.h) and scales [rows][k / group], each a bfloat16. k is a multiple of `group`, which is
// one of CHUNK and at most CHUNK * MOST_CHUNKS.
void everbatch_round_levels(const float* w, int64_t rows, int64_t k, int64_t group, int8_t* q, float* scales, int32_t threads) {
    const Values values(LevelTables::VALUES);
    const LevelValues levels;
    run_team(threads, [&](Team& team) {
        team.for_each(rows, [&](int64_t r) {
            for (int64_t first = 0; first < k; first += group)
                scales[(r * k + first) / group] = round_to_levels(w + r * k + first, group, values, levels, q + r * k + first);
        });
    });
}

// x [rows][k] -> out [rows][k], rotated; k a multiple of 64.
void everbatch_rotate(const float* x, int64_t rows, int64_t k, float* out, int32_t threads) {
    run_team(threads, [&](Team& team) { team.for_each(rows, [&](int64_t r) { rotate(x + r * k, k, out + r * k); }); });
}

}  // extern "C"
