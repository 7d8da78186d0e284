// What the decoder (step.cpp) and single modules (modules.cpp) share of a layer: rotary position embedding, the first half of an MLP for
// many rows, and the memory of a step.
#pragma once
#include "activation.h"
#include "batch_attention.h"
#include "rows.h"

namespace everbatch {

// Rotary position embedding of one head: pairs of its first dimensions are turned by an angle each. Of `half` pairs: dimensions i and i + half.
inline void rotate_halves(const float* x, const float* cos, const float* sin, int64_t half, float* __restrict out) {
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
}
// Rotary position embedding whose pairs are neighbours: dimensions 2 i and 2 i + 1.
inline void rotate_neighbours(const float* x, const float* cos, const float* sin, int64_t half, float* __restrict out) {
    for (int64_t i = 0; i < half; i++) {
        out[2 * i] = x[2 * i] * cos[i] - x[2 * i + 1] * sin[i];
        out[2 * i + 1] = x[2 * i + 1] * cos[i] + x[2 * i] * sin[i];
    }
}

constexpr int64_t MANY_ROWS = 64;  // from here on arithmetic, not reading weights, limits a product

// Whether an MLP of so many rows may use activate_panels.
inline bool takes_many_rows(int64_t rows, const OperandBuffer& activated) { return rows >= MANY_ROWS && activated.takes_panels(); }

// activated = activation(gate) * up, or activation(up) without a gate, of the product of gate_up, which is not stored in between.
template <class T>
void activate_panels(Team& team, const Linear& gate_up, Activation kind, bool is_gated, const Operand& input, int64_t rows, OperandBuffer& activated) {
    const auto put = [&](int64_t r, int64_t column, float* gate, const float* up) {
        activate(kind, gate, up, PANEL, gate);
        activated.put_panel(r, column, gate);
    };
    if (is_gated)
        linear_of_halves<T>(team, gate_up, input, rows, put);
    else
        linear<T>(team, gate_up, input, rows, [&](int64_t r, int64_t column, float* up) { put(r, column, up, nullptr); });
}

// Memory of a mixture (mixture.h), which all layers share.
struct MixtureMemory {
    struct Run {  // rows of an operand that are multiplied with one expert
        const Linear* linear;
        const Operand* operand;
        int64_t base;  // the pair of the operand's first row
        int64_t row0;
        int rows;
        int64_t first_item;
        OperandBuffer* activated;  // where gate and up go at once, without being stored in between; else null
    };
    std::vector<int64_t> first, order, at;  // of each expert; the pair of a row; the row of a pair
    std::vector<int64_t> stored;            // rows whose gate and up are stored before they are activated
    int64_t routed = 0;                     // rows of experts; those of the shared one follow
    std::vector<Run> up, down;
    OperandBuffer input, activated, shared_input, shared_activated;
    Buffer<float> y, parts, normed, logits, weights;
    Buffer<int64_t> chosen;
};
struct MixtureCounts {
    int64_t pairs = 0, up_items = 0, stored = 0, down_items = 0;
};

// Memory of latent attention (latent.h), which all layers share.
struct LatentMemory {
    Buffer<float> inputs, queries;                // [tokens] rows of the projections of the same names
    OperandBuffer of_queries, plain, latents;     // of queries; of keys and of values, for each head and token
};

// Memory of a recurrence (recurrence.h), which all layers share.
struct RecurrenceMemory {
    Buffer<float> gates;         // [tokens][decays, strengths, products of query and key]
    Buffer<float> keys, values;  // [key heads][tokens][query, key], [value heads][tokens]
    Buffer<float> zeros;         // inputs before the first token
};

}  // namespace everbatch

// Memory of a step, kept for the next one. Its buffers only grow.
struct everbatch_workspace {
    everbatch::AttentionMemory attention;
    everbatch::Buffer<float> x, y, delta, attended;
    // Operands of (qkv and gate_up), of out, of out behind a recurrence, of down. All layers that share one have the same number of inputs.
    everbatch::OperandBuffer normed[everbatch::NUM_FORMATS], heads[everbatch::NUM_FORMATS], recurrent[everbatch::NUM_FORMATS];
    everbatch::OperandBuffer activated[everbatch::NUM_FORMATS];
    everbatch::OperandBuffer last, screened;  // operands of lm_head and of its screen
    std::vector<everbatch::Buffer<float>> rows;  // one for each thread
    everbatch::MixtureMemory mixture;
    std::vector<everbatch::MixtureCounts> mixture_counts;  // of each layer
    everbatch::RecurrenceMemory recurrence;
    everbatch::LatentMemory latent;
    everbatch::Lora<float> lora_of_floats;
    everbatch::Lora<everbatch::bf16> lora_of_halves;

    everbatch::Lora<float>& lora(float) { return lora_of_floats; }
    everbatch::Lora<everbatch::bf16>& lora(everbatch::bf16) { return lora_of_halves; }
};
