// The C interface. kernels/cpu/structs.py mirrors every structure field by field.
#pragma once
#include "activation.h"
#include "attention.h"
#include "lora.h"
#include "ranks.h"
#include "screen.h"

extern "C" {

struct everbatch_mlp {
    everbatch::Linear gate_up, down;  // gate_up: of an MLP without a gate only up
};

// How a router chooses: an everbatch::Scores of its logits, and of these the greatest.
struct everbatch_routing {
    int32_t scores;
    int32_t is_normalised;         // a token's weights are divided by their sum
    int64_t groups, kept_groups;   // experts of the best groups alone are chosen
    int32_t adds_two_best;         // a group is as good as its two best experts together; else as its best one
    float scale;                   // of all weights
    const float* choice_bias;      // [experts]: is added to scores for the choice, and not to weights; null without
};

// MLPs of the same sizes and formats, some of which are computed for each token.
struct everbatch_mixture {
    const everbatch_mlp* experts;
    int64_t num_experts;
    int64_t places;      // experts of a token
    int32_t activation;  // an everbatch::Activation
    int32_t is_gated;
    const everbatch_mlp* shared;  // what every token is multiplied with besides; null without
    // A step of the decoder reads these too (step.cpp); single modules get each token's experts from their caller:
    everbatch::Linear router;  // [experts, and one more row where is_shared_gated, hidden]
    everbatch_routing routing;
    int32_t is_shared_gated;   // the shared one's result is multiplied with the sigmoid of the router's last output
    int64_t first_expert;      // the number of experts[0] among those of the router; the others are other ranks'
};

// A recurrent mixer (recurrence.h), which keeps a state for each sequence instead of its keys and values.
struct everbatch_recurrence {
    int32_t kind;            // an everbatch::RecurrenceKind
    int64_t channels, taps;  // of the convolution
    int64_t key_heads, value_heads, key_dim, value_dim;  // 0 of a CONVOLUTION
    int64_t query_at, key_at, value_at;                  // the first channels of these heads
    float query_scale;
    const float* weights;      // [taps][channels], the oldest tap first
    const float* bias;         // [channels]; null without
    everbatch::Linear inputs;  // [channels, and value_heads * value_dim of the gate, hidden]; of a CONVOLUTION [B, C and X, hidden]
    everbatch::Linear gates;   // [value_heads, of DELTA twice, hidden]; floats; empty of a CONVOLUTION
    const float *rate, *dt_bias;  // [value_heads]
    const float* skip;            // [value_heads], of SUM; null without
    float dt_min, dt_max;
    everbatch::Norm norm;  // RMS, of groups of `norm_size` numbers: [norm_size] for all groups, of SUM [value_heads * value_dim]; or none
    int64_t norm_size;
    int32_t gates_first;  // the gate comes before the norm
};

// Attention whose keys and values follow from a latent (latent.h). The layer's `qkv` yields queries, or what `queries` reads, and
// rank + rotated numbers; the model has one KV head of rotated + rank dimensions.
struct everbatch_latent {
    int64_t rank, rotated, plain, value_dim;
    everbatch::Linear queries;      // [heads * (plain + rotated), its inputs]; empty: qkv yields queries
    everbatch::Linear keys, values; // [heads * rank, plain], [heads * value_dim, rank]: rank and value_dim are multiples of 32
    everbatch::Norm query_norm, norm;  // RMS, of what `queries` reads, and of the latent
    float eps;
};

// A layer may be a mixer alone, without gate_up and mixture, or an MLP alone, without qkv and recurrence.
struct everbatch_layer {
    everbatch::Linear qkv, out, gate_up, down;  // gate_up: of an MLP without a gate only up
    everbatch::Norm attention_norm, mlp_norm;   // of what they read, [hidden]; without one that is x
    everbatch::Norm attention_out_norm, mlp_out_norm;  // of what they yield, before it is added to x
    everbatch::Norm q_norm, k_norm;                    // [head_dim], or of all heads of a token
    const float *cos, *sin;  // [max_seq_len][rotary_dim / 2]; null: queries and keys are not rotated
    int64_t rotary_dim;      // the first dimensions of a head, which are rotated
    const float* sinks;      // [heads]; null without
    const float* key_shift;  // [kv heads][head_dim]: what a key that is quantised is written without; null: nothing
    int64_t window;          // tokens; 0 = all
    const everbatch_mixture* mixture;  // in the place of gate_up and down; null without
    const everbatch_recurrence* recurrence;  // in the place of attention and qkv; null without
    const everbatch_latent* latent;          // null: the heads have keys and values of their own

    bool attends() const { return qkv.n; }
    bool mixes() const { return recurrence || attends(); }
    bool has_mlp() const { return mixture || gate_up.n; }
};

// Settings that all layers of a model share.
struct everbatch_form {
    int32_t norm;        // an everbatch::NormKind, of all norms
    int32_t activation;  // an everbatch::Activation
    int32_t is_gated;
    int32_t is_parallel;  // attention and MLP read the same x; else the MLP reads what attention has added to
    int32_t norms_rows;   // q_norm and k_norm are of all heads of a token together
    int32_t is_interleaved;  // dimensions 2i and 2i + 1 are rotated together; else i and i + rotary_dim / 2
    float eps;               // of norms
    float attention_scale, attention_softcap;  // everbatch::Scoring
    float embedding_scale, residual_scale;     // of a token's embedding; of what is added to x
    float logit_scale, logit_softcap;          // 0: no cap
    const float* query_scales;                 // [max_seq_len]: what rotated queries are multiplied with; null without
    int32_t gates_attention;                   // qkv has a gate behind q, k and v, whose sigmoid a head's result is multiplied with
};

struct everbatch_model {
    int64_t hidden, intermediate, num_layers, heads, vocab, max_seq_len;
    int64_t sink_tokens;     // the first tokens of a sequence, which layers with a window see too
    int64_t widest_window;   // of all layers, those of other stages included; 0 = some layer sees all tokens
    everbatch::KVLayout kv;  // element_bytes says what type is computed in: 4 float32, 2 bfloat16
    everbatch_form form;
    const void* embedding;  // [vocab][hidden] in that type; null where no step embeds tokens, or `held_embedding` has them
    everbatch::Linear held_embedding;  // [vocab][hidden] in super-blocks; else its data is null
    everbatch::Norm norm;   // [hidden]
    everbatch::Linear lm_head;  // without rows where no step has logits
    everbatch::Screen screen;  // the screen of lm_head
    const everbatch_layer* layers;
    const everbatch::Ranks* ranks;  // null: this process runs the whole model. Else heads, intermediate and layers are of its part
};

// Attention alone: one layer of a model whose other parts are run by other code.
struct everbatch_attention {
    int64_t heads;
    everbatch::KVLayout kv;  // element_bytes says of what type queries, keys, values and results are
    everbatch::Scoring scoring;
    int64_t window, sink_tokens;
};

// The attention of such a model together with its linear layers.
struct everbatch_attention_module {
    everbatch_attention attention;
    everbatch::Linear qkv, out;
    everbatch::Norm q_norm, k_norm;  // RMS norms of each head, [head_dim]; without weight there is none
    int64_t rotary_dim;              // the first dimensions of a head, which are rotated; 0: none
    int32_t is_interleaved;          // as in everbatch_form
    float eps;
};

struct everbatch_row {
    int32_t slot, num_computed, num_tokens;
    int32_t num_logits;  // how many of its last tokens yield logits
};

struct everbatch_batch {
    const everbatch_row* rows;
    int64_t num_rows;
    const int64_t* token_ids;     // [slots][max_seq_len]
    const int32_t* block_tables;  // [slots][max_blocks]
    int64_t max_blocks, num_blocks;
    char* const* pools;  // one for each layer, of num_blocks blocks; null for one without attention
    float* logits;       // [sum of num_logits][vocab]; null: not wanted
    float* hidden;       // [sum of num_logits][hidden]: what the last norm makes of these tokens; null: not wanted
    int64_t* greedy;     // [sum of num_logits]: arg-max, the lowest id among equals
    const everbatch::LoraLayer* const* adapters;  // the layers of each adapter
    const int32_t* adapter_of;                    // [num_rows]: index into them, -1 = none; null when no row has one
    int64_t max_rank;                             // of any adapter
    const float* const* embedded;  // [tokens of all rows]: a token's embedding [hidden] where it is given; null: that of its id
    const int64_t* positions;      // [tokens of all rows]: by which queries and keys are rotated, and queries are scaled
                                   // Either array is null where no row has any.
    const float* entering;  // [tokens of all rows][hidden]: hidden states that other layers have yielded; null: tokens are embedded
    float* leaving;         // [tokens of all rows][hidden]: where those behind the last layer go; null: norm and lm_head follow
    int32_t threads;
    // Of models with recurrent layers. A state that is written must not be read or written for another row, nor be both a save's and the `from`
    // of its row.
    float* const* states;       // one for each layer, [num_states][window and heads] (recurrence.h); null for others
    int64_t num_states;
    const int32_t* state_rows;  // [num_rows][from, to, count]: the state behind the tokens before the row, -1 = zeros; where the one
                                // behind its first `count` tokens goes, -1 = nowhere. They may be the same one.
    const int32_t* saves;       // [num_saves][row, count, state]: where else the state behind so many tokens goes; sorted
    int64_t num_saves;
    const float* const* added;  // [added_layers][tokens of all rows]: what is added to a token's result [hidden] of each of the first layers;
    int64_t added_layers;       // null: nothing
    const float *cos, *sin;     // [tokens of all rows][rotary_dim / 2], in the place of the layers' own; then `positions` are not read
    const int32_t* ends;        // [tokens of all rows]: one past the last key that a token sees, not beyond its row's tokens, and never fewer
                                // for a later token; null: one past its own
};

}  // extern "C"
