// Packing, and single kernels for tests and benchmarks; step.cpp uses the same functions.
#include "api.h"
#include "peak.h"

#include <numeric>

using namespace everbatch;

extern "C" {

int64_t everbatch_lanes() { return LANES; }

// Before any product is computed, or while none is.
void everbatch_choose(const Choices* made) { choices = *made; }

// Bytes of the packed form of a weight [n][k], without scales.
int64_t everbatch_packed_bytes(int64_t n, int64_t k, int32_t format, int64_t group) {
    const Linear l{nullptr, nullptr, nullptr, nullptr, n, k, format, int32_t(group)};
    const int64_t cells = l.panels() * PANEL * l.depth();
    return format == FLOAT32 ? l.bytes_of<float>(cells) : l.bytes_of<bf16>(cells);
}

// Groups of a packed row of k columns, the padding's included; 0 without scales.
int64_t everbatch_groups(int64_t k, int64_t group) { return group ? Linear::padded_depth(k, group) / group : 0; }

// weight [n][k] float32, bfloat16, float16 or int8, or bytes of 0 .. 15 for W4A8 -> packed panels. What is beyond n and k becomes zero; of W4A8 it
// has a scale of zero (beyond n), or meets activations that are zero.
void everbatch_pack(const void* weight, int64_t n, int64_t k, int32_t format, int64_t group, void* packed, int32_t threads) {
    const int64_t depth = Linear::padded_depth(k, group);
    run_team(threads, [&](Team& team) {
        team.for_each((n + PANEL - 1) / PANEL, [&](int64_t p) {
            const int64_t columns = std::min<int64_t>(PANEL, n - p * PANEL);
            const auto pack_floats = [&](auto of_type) {
                using T = decltype(of_type);
                T* out = static_cast<T*>(packed) + p * depth * PANEL;
                memset(out, 0, size_t(depth) * PANEL * sizeof(T));
                for (int64_t c = 0; c < columns; c++) {
                    const T* w = static_cast<const T*>(weight) + (p * PANEL + c) * k;
                    for (int64_t i = 0; i < k; i++) out[packed_at<std::is_same_v<T, bf16> ? 2 : 1>(i, c)] = w[i];
                }
            };
            if (format == FLOAT32) {
                pack_floats(float());
            } else if (format == BFLOAT16) {
                pack_floats(bf16());
            } else if (format == FLOAT16) {
                pack_floats(fp16());
            } else if (format == W4A8) {
                uint8_t* out = static_cast<uint8_t*>(packed) + p * depth * PANEL / 2;
                memset(out, 0, size_t(depth) * PANEL / 2);
                for (int64_t c = 0; c < columns; c++) {
                    const uint8_t* w = static_cast<const uint8_t*>(weight) + (p * PANEL + c) * k;
                    for (int64_t i = 0; i < k; i++) out[int4_packed_at(i, c)] |= uint8_t(w[i] << int4_shift(i));
                }
            } else {
                int8_t* out = static_cast<int8_t*>(packed) + p * depth * PANEL;
                memset(out, WEIGHT_BIAS, size_t(depth) * PANEL);
                for (int64_t c = 0; c < columns; c++) {
                    const int8_t* w = static_cast<const int8_t*>(weight) + (p * PANEL + c) * k;
                    for (int64_t i = 0; i < k; i++) out[packed_at<4>(i, c)] = int8_t(uint8_t(w[i]) + WEIGHT_BIAS);
                }
            }
        });
    });
}

// Blocks of a weight [n][k], k a multiple of their rows -> packed panels: q [n][k], s and m [n][groups], d and e [n][blocks, or groups of blocks
// without s], `values` [16]. Tables that the format has not are null. Columns beyond n, and rows beyond k, have the scale 0.
void everbatch_pack_super(const uint8_t* q, const int8_t* s, const uint8_t* m, const uint8_t* d, const uint8_t* e, const int8_t* values, float unit,
                          int64_t n, int64_t k, int32_t format, void* packed, int32_t threads) {
    run_team(threads, [&](Team& team) {
        team.for_each((n + PANEL - 1) / PANEL, [&](int64_t p) {
            with_super_blocks(format, [&](auto of_format) {
                using S = decltype(of_format);
                const int64_t blocks = Linear::padded_depth(k, S::GROUP) / S::ROWS, groups = k / S::GROUP;
                const int64_t row_bytes = k / S::ROWS * (S::OF_TABLE / PANEL);  // of d
                uint8_t* panel = static_cast<uint8_t*>(packed) + p * blocks * S::BYTES;
                memset(panel, 0, size_t(blocks) * S::BYTES);
                for (int64_t i = p * PANEL; i < std::min<int64_t>(n, (p + 1) * PANEL); i++) {
                    const SuperColumn column{q + i * k,         s ? s + i * groups : nullptr,    m ? m + i * groups : nullptr,
                                             d + i * row_bytes, e ? e + i * row_bytes : nullptr, values, unit};
                    pack_super<S>(column, k, int(i % PANEL), panel);
                }
            });
        });
    });
}

// out [rows][n] = x [rows][k] times the layer; computes in float32 or, with element_bytes 2, in bfloat16.
void everbatch_linear(const Linear* l, const float* x, int64_t rows, int32_t element_bytes, float* out, int32_t threads) {
    OperandBuffer operand;
    operand.shape(*l, rows, size_t(element_bytes));
    run_team(threads_for(rows * l->n * l->k, threads), [&](Team& team) {
        const TilesOfThread tiles;
        std::vector<float> row(size_t(l->depth()));
        team.for_each(rows, [&](int64_t r) {
            memcpy(row.data(), x + r * l->k, size_t(l->k) * sizeof(float));
            operand.put(r, row.data());
        });
        auto put = [&](int64_t r, int64_t column, const float* sums) {
            memcpy(out + r * l->n + column, sums, size_t(std::min<int64_t>(PANEL, l->n - column)) * sizeof(float));
        };
        if (element_bytes == 4)
            linear<float>(team, *l, operand.view(), rows, put);
        else
            linear<bf16>(team, *l, operand.view(), rows, put);
    });
}

// Fills a screen, whose memory is all zero, from lm_head: panels of floats.
void everbatch_screen(const Linear* lm_head, const Screen* screen, int32_t threads) {
    run_team(threads, [&](Team& team) {
        if (lm_head->format == FLOAT32)
            make_screen<float>(team, *lm_head, *screen);
        else if (lm_head->format == FLOAT16)
            make_screen<fp16>(team, *lm_head, *screen);
        else
            make_screen<bf16>(team, *lm_head, *screen);
    });
}

// Reads `bytes` of memory `passes` times on all threads, to measure the largest bandwidth. The result depends on every byte read, so
// that the compiler cannot skip any.
int64_t everbatch_read(const void* memory, int64_t bytes, int32_t passes, int32_t threads) {
    int64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        const int64_t id = omp_get_thread_num(), size = omp_get_num_threads(), lines = bytes / 512;
        const char* p = static_cast<const char*>(memory);
        IVec sum[512 / sizeof(IVec)] = {};
        for (int pass = 0; pass < passes; pass++)
            for (int64_t i = lines * id / size * 512, end = lines * (id + 1) / size * 512; i < end; i += 512) {
                for (int j = 0; j < 512; j += 64) __builtin_prefetch(p + i + j + 4096);
#pragma GCC unroll 32
                for (size_t j = 0; j < 512 / sizeof(IVec); j++) sum[j] += load<IVec>(p + i + j * sizeof(IVec));
            }
        for (IVec& s : sum)
            for (int l = 0; l < LANES; l++) total += s[l];
    }
    return total;
}

// Multiplies `rounds` times in a bare loop on all threads, by the dot-product instruction that weights of a format are multiplied by: FLOAT32,
// BFLOAT16 or INT8. Returns multiply-adds x 2. Nothing is read from memory, so nothing that multiplies in this way is faster.
int64_t everbatch_multiply(int32_t format, int64_t rounds, int32_t threads) {
    int64_t operations = 0;
#pragma omp parallel num_threads(threads) reduction(+ : operations)
    operations += format == FLOAT32 ? multiply_floats(rounds) : format == BFLOAT16 ? multiply_bf16(rounds) : multiply_int8(rounds);
    return operations;
}

// x [rows][n]
void everbatch_norm(int32_t kind, const float* x, const Norm* norm, int64_t rows, int64_t n, float eps, float* out) {
    for (int64_t r = 0; r < rows; r++) normalise(NormKind(kind), *norm, x + r * n, n, eps, out + r * n);
}

// inputs [rows][2 * n], or [rows][n] without a gate -> out [rows][n]
void everbatch_activate(int32_t kind, int32_t is_gated, const float* inputs, int64_t rows, int64_t n, float* out) {
    for (int64_t r = 0; r < rows; r++) {
        const float* gate = inputs + r * (is_gated ? 2 : 1) * n;
        activate(Activation(kind), gate, is_gated ? gate + n : nullptr, n, out + r * n);
    }
}

// x [n] -> q int8 and one scale a group; n a multiple of group, group one of 16.
void everbatch_quantize(const float* x, int64_t n, int64_t group, int8_t* q, float* scales) {
    int32_t sum;
    for (int64_t i = 0; i < n; i += group) quantize_group(x + i, group, q + i, scales + i / group, &sum);
}

// x [rows][n] -> q 0 .. 15 and one scale and least a row, float16: a key or value as int4 KV holds it. n <= MAX_HEAD_DIM.
void everbatch_quantize_int4(const float* x, int64_t rows, int64_t n, uint8_t* q, ScaleAndLeast* parameters) {
    uint8_t padded[MAX_HEAD_DIM];
    for (int64_t r = 0; r < rows; r++) {
        quantize_int4(x + r * n, int(n), int((n + PANEL - 1) / PANEL * PANEL), padded, parameters + r);
        memcpy(q + r * n, padded, size_t(n));
    }
}

// x [rows][d]: queries, or keys, as they are where keys are quantised.
void everbatch_rotate_heads(float* x, int64_t rows, int64_t d, int32_t are_keys) {
    const HeadRotation rotation(d);
    for (int64_t r = 0; r < rows; r++) are_keys ? rotation.key(x + r * d) : rotation.query(x + r * d);
}

int64_t everbatch_kv_block_bytes(const KVLayout* layout) { return int64_t(layout->block_bytes()); }

}  // extern "C"
