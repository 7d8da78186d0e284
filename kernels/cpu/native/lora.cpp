// The adapters' part of one linear layer whose own product other code has computed.
#include "api.h"

using namespace everbatch;

namespace {

template <class T>
void add_lora(const LoraLayer* const* layers, const LoraRows& of_rows, int64_t max_rank, const float* x, int64_t k, int64_t n, float* y,
              int32_t threads) {
    Lora<T> lora;
    lora.begin(layers, k, max_rank, of_rows.size());
    run_team(threads, [&](Team& team) {
        team.for_each(of_rows.size(), [&](int64_t r) { lora.put(of_rows, r, x + r * k, k); });
        lora.shrink(team, of_rows, 0, &LoraLayer::qkv, k);
        team.for_each((n + PANEL - 1) / PANEL, [&](int64_t p) {
            const int64_t column = p * PANEL;
            const size_t bytes = size_t(std::min<int64_t>(PANEL, n - column)) * sizeof(float);
            alignas(64) float sums[PANEL] = {};
            for (int64_t r = 0; r < of_rows.size(); r++) {
                memcpy(sums, y + r * n + column, bytes);
                lora.expand(of_rows, 0, &LoraLayer::qkv, r, column, sums);
                memcpy(y + r * n + column, sums, bytes);
            }
        });
    });
}

}  // namespace

extern "C" {

// y [rows][n] += B (scale A x), x [rows][k]. linears[i]: what adapter i has for the layer; adapter_of [rows]: each row's, -1 for none.
// A and B are float32, or bfloat16 with element_bytes 2: x then holds numbers of bfloat16.
void everbatch_lora(const LoraLinear* linears, int64_t num_adapters, const int32_t* adapter_of, int64_t max_rank, const float* x, int64_t rows,
                    int64_t k, int64_t n, int32_t element_bytes, float* y, int32_t threads) {
    std::vector<LoraLayer> layers(static_cast<size_t>(num_adapters));  // of one linear layer each
    std::vector<const LoraLayer*> tables;
    for (LoraLayer& layer : layers) {
        layer.qkv = linears[tables.size()];
        tables.push_back(&layer);
    }
    const LoraRows of_rows(std::vector<int32_t>(adapter_of, adapter_of + rows));
    if (element_bytes == 4)
        add_lora<float>(tables.data(), of_rows, max_rank, x, k, n, y, threads);
    else
        add_lora<bf16>(tables.data(), of_rows, max_rank, x, k, n, y, threads);
}

}  // extern "C"
