// The C interface. kernels/cpu/structs.py mirrors every structure field by field.
#pragma once
#include "attention.h"
#include "lora.h"
#include "screen.h"

extern "C" {

struct everbatch_layer {
    everbatch::Linear qkv, out, gate_up, down;
    const float *input_norm, *post_norm;  // [hidden]
    const float *q_norm, *k_norm;         // [head_dim]; null without
    int64_t window;                       // tokens; 0 = all
};

struct everbatch_model {
    int64_t hidden, intermediate, num_layers, heads, vocab, max_seq_len;
    int64_t sink_tokens;     // the first tokens of a sequence, which layers with a window see too
    everbatch::KVLayout kv;  // element_bytes says what type is computed in: 4 float32, 2 bfloat16
    float eps;
    const void* embedding;   // [vocab][hidden] in that type
    const float *cos, *sin;  // [max_seq_len][head_dim / 2]
    const float* norm;       // [hidden]
    everbatch::Linear lm_head;
    everbatch::Screen screen;  // the screen of lm_head
    const everbatch_layer* layers;
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
    char* const* pools;  // one for each layer, of num_blocks blocks
    float* logits;       // [sum of num_logits][vocab]; null: not wanted
    float* hidden;       // [sum of num_logits][hidden]: what the last norm makes of these tokens; null: not wanted
    int64_t* greedy;     // [sum of num_logits]: arg-max, the lowest id among equals
    const everbatch::LoraLayer* const* adapters;  // the layers of each adapter
    const int32_t* adapter_of;                    // [num_rows]: index into them, -1 = none; null when no row has one
    int64_t max_rank;                             // of any adapter
    const float* const* embedded;  // [tokens of all rows]: a token's embedding [hidden] where it is given; null: that of its id
    const int64_t* positions;      // [tokens of all rows]: by which queries and keys are rotated
                                   // Either array is null where no row has any.
    int32_t threads;
};

}  // extern "C"
