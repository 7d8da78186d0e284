// Memory of a step, kept for the next one. Its buffers only grow.
#pragma once
#include "batch_attention.h"

struct everbatch_workspace {
    everbatch::AttentionMemory attention;
    everbatch::Buffer<float> x, y, delta, attended;
    // Operands of (qkv and gate_up), of out, of down.
    everbatch::OperandBuffer normed[everbatch::NUM_FORMATS], heads[everbatch::NUM_FORMATS], activated[everbatch::NUM_FORMATS];
    everbatch::OperandBuffer last, screened;  // operands of lm_head and of its screen
    std::vector<everbatch::Buffer<float>> rows;  // one for each thread
    everbatch::Lora<float> lora_of_floats;
    everbatch::Lora<everbatch::bf16> lora_of_halves;

    everbatch::Lora<float>& lora(float) { return lora_of_floats; }
    everbatch::Lora<everbatch::bf16>& lora(everbatch::bf16) { return lora_of_halves; }
};
