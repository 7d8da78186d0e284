// The probability distribution of one row as integer weights, and the search for the tokens that top-k, top-p, min-p and the draw
// select. The formula is that of kernels/sampling.py.
//
// Weights are integers up to 2^40 that float32 holds exactly. Their sums stay below 2^53, so that sums in double are exact in any
// order. Weights are computed by single IEEE operations, and exponentials are added on sixteen lanes in a fixed order, so a row's
// bits are the same with any instruction set.
//
// Nothing is sorted. In falling order of weight, with the lower id first among equals, a place is given by a weight, the tokens
// heavier than it, and an index among the tokens of that weight. The weight is found by halving an interval of weights. A pass
// reads only the blocks of tokens whose heaviest lies in the interval or above, and the search ends once the interval holds few.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "simd.h"

namespace everbatch::sampling {

constexpr int BLOCK = 128;    // tokens that are read, or skipped, together
constexpr int FEW = 128;      // once an interval holds this many weights, they are sorted
constexpr int WIDTH = 16;     // lanes of a sum, independent of LANES
constexpr float NOTHING = -33.0f;  // 2^22 tokens with e^-33 add up to less than a float32 resolves beside e^0
constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float Narrow __attribute__((vector_size(LANES * 2), aligned(4)));
typedef double Wide __attribute__((vector_size(LANES * 4), aligned(8)));
typedef int64_t Count __attribute__((vector_size(LANES * 4), aligned(8)));
constexpr int WIDE_LANES = LANES / 2;

ALWAYS_INLINE Wide widen(const float* p) {
#if defined(__AVX512F__)
    return (Wide)_mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(p));
#elif defined(__AVX2__)
    return (Wide)_mm256_cvtps_pd(_mm_loadu_ps(p));
#else
    return __builtin_convertvector(load<Narrow>(p), Wide);
#endif
}

// A product that the compiler cannot fuse with a following addition.
template <class T>
ALWAYS_INLINE T product(T a, T b) {
    T p = a * b;
#if defined(__x86_64__)
    asm("" : "+v"(p));
#elif defined(__aarch64__)
    asm("" : "+w"(p));
#else
    asm("" : "+m"(p));
#endif
    return p;
}

// e^x for x <= 0, within one unit in the last place; 0 below -87. Cephes' expf without fused operations.
ALWAYS_INLINE Vec exponential(Vec x) {
    const Vec least = splat(-87.0f);
    const IVec is_zero = x < least;
    x = x > least ? x : least;  // a NaN becomes `least`
    const IVec n = __builtin_convertvector(product(x, splat(1.44269504088896341f)) - 0.5f, IVec);
    const Vec f = __builtin_convertvector(n, Vec);
    Vec r = x - product(f, splat(0.693359375f));  // exact: the constant has nine bits
    r = r - product(f, splat(-2.12194440e-4f));
    Vec p = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = product(p, r) + splat(c);
    p = product(product(p, r), r) + r + 1.0f;
    return is_zero ? Vec{} : p * floats((n + 127) << 23);
}

// One bit for each lane: whether the comparison is true there.
ALWAYS_INLINE uint32_t lane_mask(IVec held) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)held, (__m512i)held);
#elif defined(__AVX2__)
    return uint32_t(_mm256_movemask_ps((__m256)held));
#elif defined(__x86_64__)
    return uint32_t(_mm_movemask_ps((__m128)held));
#else
    uint32_t mask = 0;
    for (int i = 0; i < LANES; i++) mask |= uint32_t(held[i] & 1) << i;
    return mask;
#endif
}

template <class V>
ALWAYS_INLINE auto sum_of(V v) -> typename std::remove_reference<decltype(v[0])>::type {
    auto sum = v[0];
    for (size_t i = 1; i < sizeof(V) / sizeof sum; i++) sum += v[i];
    return sum;
}

inline uint32_t to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
inline float from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// ---------------------------------------------------------------------------------------------------------------- logits

// One row of logits, as if filled up with -infinity to whole blocks.
struct LogitRow {
    const float* x;
    int64_t vocab;

    int64_t blocks() const { return (vocab + BLOCK - 1) / BLOCK; }

    const float* block(int64_t b, float* padded) const {
        const int64_t left = vocab - b * BLOCK;
        if (left >= BLOCK) return x + b * BLOCK;
        std::copy(x + b * BLOCK, x + vocab, padded);
        std::fill(padded + left, padded + BLOCK, -INFINITE);
        return padded;
    }

    // The greatest logit of each block, and of the row. A NaN is never the greatest.
    float maxima(std::vector<float>& block_max) const {
        block_max.resize(size_t(blocks()));
        float greatest = -INFINITE, padded[BLOCK];
        for (int64_t b = 0; b < blocks(); b++) {
            const float* at = block(b, padded);
            Vec m = splat(-INFINITE);
            for (int i = 0; i < BLOCK; i += LANES) m = vmax(load<Vec>(at + i), m);
            block_max[size_t(b)] = reduce_max(m);
            greatest = std::max(greatest, block_max[size_t(b)]);
        }
        return greatest;
    }

    // The lowest id among the tokens with the greatest logit.
    int64_t first_of(float greatest, const std::vector<float>& block_max) const {
        const int64_t b = std::find(block_max.begin(), block_max.end(), greatest) - block_max.begin();
        const float *begin = x + std::min(b * BLOCK, vocab), *end = x + std::min((b + 1) * BLOCK, vocab);
        const float* found = std::find(begin, end, greatest);
        return found == end ? 0 : found - x;
    }
};

// out (if wanted) = e^((x - greatest) / temperature) for every token; returns their sum. `block_max` comes from `maxima`.
template <bool STORE>
double exponentials(const LogitRow& row, float greatest, float temperature, const std::vector<float>& block_max, float* out) {
    float padded[BLOCK];
    Wide sums[WIDTH / WIDE_LANES] = {};
    for (int64_t b = 0; b < row.blocks(); b++) {
        if ((block_max[size_t(b)] - greatest) / temperature < NOTHING) {
            if (STORE) std::fill(out + b * BLOCK, out + (b + 1) * BLOCK, 0.0f);
            continue;
        }
        const float* at = row.block(b, padded);
        float lanes[WIDTH];
        for (int j = 0; j < WIDTH; j += LANES) {
            Vec part{};
            for (int i = j; i < BLOCK; i += WIDTH) {
                const Vec e = exponential((load<Vec>(at + i) - greatest) / temperature);
                if (STORE) store(out + b * BLOCK + i, e);
                part += e;
            }
            store(lanes + j, part);
        }
        for (int j = 0; j < WIDTH / WIDE_LANES; j++) sums[j] += widen(lanes + j * WIDE_LANES);
    }
    double total = 0;
    for (const Wide& lanes : sums)
        for (int i = 0; i < WIDE_LANES; i++) total += lanes[i];
    return total;
}

// --------------------------------------------------------------------------------------------------------------- weights

// The integer weights of one row. Vectors are reused for the next row, to avoid allocations.
class Weights {
public:
    std::vector<float> values;   // [blocks * BLOCK]
    std::vector<float> block_max;     // [blocks] the heaviest of each block
    std::vector<double> totals;  // [blocks]
    double total = 0;
    float heaviest = 0;

    // False, and a total of 0, when no logit is finite. `logit_maxima` are those of the row, `greatest` the greatest of them.
    bool fill(const LogitRow& row, float greatest, float temperature, const std::vector<float>& logit_maxima) {
        total = 0;
        if (!(greatest > -INFINITE && greatest < INFINITE)) return false;
        const size_t blocks = size_t(row.blocks());
        values.resize(blocks * BLOCK);
        block_max.resize(blocks);
        totals.resize(blocks);
        const double sum = exponentials<true>(row, greatest, temperature, logit_maxima, values.data());
        const Vec scale = splat(float(std::ldexp(1.0, 40) / sum)), whole = splat(16777216.0f);  // from 2^24 on all are whole
        heaviest = 0;
        for (size_t b = 0; b < blocks; b++) {
            float* at = values.data() + b * BLOCK;
            Vec m{};
            Wide s{};
            for (int i = 0; i < BLOCK; i += LANES) {
                const Vec w = load<Vec>(at + i) * scale;
                const Vec floored = __builtin_convertvector(__builtin_convertvector(vmin(w, whole), IVec), Vec);
                const Vec value = w < whole ? floored : w;
                store(at + i, value);
                m = vmax(value, m);
                s += widen(at + i) + widen(at + i + WIDE_LANES);
            }
            block_max[b] = reduce_max(m);
            totals[b] = sum_of(s);
            total += totals[b];
            heaviest = std::max(heaviest, block_max[b]);
        }
        return true;
    }

    // The first token whose running sum in token order exceeds `target` < total.
    int64_t at_running_sum(double target) const {
        double before = 0;
        size_t b = 0;
        while (before + totals[b] <= target) before += totals[b++];
        size_t i = b * BLOCK;
        while ((before += double(values[i])) <= target) i++;
        return int64_t(i);
    }

    struct Prefix {
        double mass = 0;
        int64_t count = 0;
    };

    // The tokens of at least this weight, which is above 0.
    Prefix at_least(float weight) const {
        Wide mass[4] = {};
        Count count[4] = {};
        const Wide least = Wide{} + double(weight);
        for (size_t b = 0; b < block_max.size(); b++) {
            if (block_max[b] < weight) continue;
            const float* at = values.data() + b * BLOCK;
            for (int i = 0; i < BLOCK; i += 4 * WIDE_LANES)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    const Wide w = widen(at + i + j * WIDE_LANES);
                    const Count in = w >= least;
                    mass[j] += (Wide)((Count)w & in);
                    count[j] -= in;
                }
        }
        const Wide all = (mass[0] + mass[1]) + (mass[2] + mass[3]);
        return {sum_of(all), int64_t(sum_of((count[0] + count[1]) + (count[2] + count[3])))};
    }

    // A weight, and the tokens that are heavier.
    struct Place {
        float weight;
        Prefix above;
    };

    // The greatest weight for which `enough(at_least(weight))` is true; 0 if it is false even for all tokens with a weight.
    // If `enough` is true for a prefix of the falling order, it must be true for all longer prefixes.
    template <class Enough>
    Place find(Enough enough) {
        uint32_t high = to_bits(heaviest) + 1, low = high;
        Prefix above, inside;
        for (float weight = heaviest; low == high;) {
            if (weight == 1.0f) return {0.0f, above};
            weight = std::max(weight / 16.0f, 1.0f);
            const Prefix prefix = at_least(weight);
            if (enough(prefix)) {
                low = to_bits(weight), inside = prefix;
            } else {
                low = high = to_bits(weight), above = prefix;
            }
        }
        while (high - low > 1 && inside.count - above.count > FEW) {
            const uint32_t middle = low + (high - low) / 2;
            const Prefix prefix = at_least(from_bits(middle));
            if (enough(prefix)) {
                low = middle, inside = prefix;
            } else {
                high = middle, above = prefix;
            }
        }
        if (high - low == 1) return {from_bits(low), above};
        collect(from_bits(low), from_bits(high));
        for (size_t i = 0; i < few_.size(); i++) {
            Prefix next = above;
            const float weight = few_[i];
            for (; i < few_.size() && few_[i] == weight; i++) next.mass += double(weight), next.count++;
            i--;
            if (enough(next)) return {weight, above};
            above = next;
        }
        return {0.0f, above};
    }

    // Among the tokens with this weight, the one with number `index` in token order, from 0.
    int64_t nth_equal(float weight, int64_t index) const {
        for (size_t b = 0; b < block_max.size(); b++) {
            if (block_max[b] < weight) continue;
            for (size_t i = b * BLOCK; i < (b + 1) * BLOCK; i += LANES)
                for (uint32_t mask = lane_mask(load<Vec>(&values[i]) == splat(weight)); mask; mask &= mask - 1)
                    if (index-- == 0) return int64_t(i) + __builtin_ctz(mask);
        }
        return 0;
    }

private:
    std::vector<float> few_;

    // The weights in [low, high), in falling order.
    void collect(float low, float high) {
        few_.clear();
        for (size_t b = 0; b < block_max.size(); b++) {
            if (block_max[b] < low) continue;
            for (size_t i = b * BLOCK; i < (b + 1) * BLOCK; i += LANES) {
                const Vec w = load<Vec>(&values[i]);
                for (uint32_t mask = lane_mask((w >= low) & (w < high)); mask; mask &= mask - 1)
                    few_.push_back(values[i + size_t(__builtin_ctz(mask))]);
            }
        }
        std::sort(few_.begin(), few_.end(), [](float a, float b) { return a > b; });
    }
};

}  // namespace everbatch::sampling
