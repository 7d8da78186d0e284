"""Names of the tensors that an InferenceRequest takes and a response of GptManager holds."""

from __future__ import annotations

INPUT_IDS = "input_ids"
DRAFT_INPUT_IDS = "draft_input_ids"
DRAFT_LOGITS = "draft_logits"
MAX_NEW_TOKENS = "request_output_len"
BEAM_WIDTH = "beam_width"
NUM_RETURN_SEQUENCES = "num_return_sequences"
BAD_WORDS_LIST = "bad_words_list"
STOP_WORDS_LIST = "stop_words_list"
EMBEDDING_BIAS = "embedding_bias"
END_ID = "end_id"
PAD_ID = "pad_id"
TEMPERATURE = "temperature"
RUNTIME_TOP_K = "runtime_top_k"
RUNTIME_TOP_P = "runtime_top_p"
LENGTH_PENALTY = "len_penalty"
EARLY_STOPPING = "early_stopping"
REPETITION_PENALTY = "repetition_penalty"
MIN_LENGTH = "min_length"
BEAM_SEARCH_DIVERSITY_RATE = "beam_search_diversity_rate"
PRESENCE_PENALTY = "presence_penalty"
FREQUENCY_PENALTY = "frequency_penalty"
NO_REPEAT_NGRAM_SIZE = "no_repeat_ngram_size"
RANDOM_SEED = "random_seed"
RETURN_LOG_PROBS = "return_log_probs"
RETURN_CONTEXT_LOGITS = "return_context_logits"
RETURN_GENERATION_LOGITS = "return_generation_logits"
PROMPT_EMBEDDING_TABLE = "prompt_embedding_table"
PROMPT_VOCAB_SIZE = "prompt_vocab_size"
LORA_TASK_ID = "lora_task_id"
LORA_WEIGHTS = "lora_weights"
LORA_CONFIG = "lora_config"

OUTPUT_IDS = "output_ids"
SEQUENCE_LENGTH = "sequence_length"
SEQUENCE_INDEX = "sequence_index"
OUTPUT_LOG_PROBS = "output_log_probs"
CUM_LOG_PROBS = "cum_log_probs"
CONTEXT_LOGITS = "context_logits"
GENERATION_LOGITS = "generation_logits"

INPUTS = (
    INPUT_IDS,
    DRAFT_INPUT_IDS,
    DRAFT_LOGITS,
    MAX_NEW_TOKENS,
    BEAM_WIDTH,
    NUM_RETURN_SEQUENCES,
    BAD_WORDS_LIST,
    STOP_WORDS_LIST,
    EMBEDDING_BIAS,
    END_ID,
    PAD_ID,
    TEMPERATURE,
    RUNTIME_TOP_K,
    RUNTIME_TOP_P,
    LENGTH_PENALTY,
    EARLY_STOPPING,
    REPETITION_PENALTY,
    MIN_LENGTH,
    BEAM_SEARCH_DIVERSITY_RATE,
    PRESENCE_PENALTY,
    FREQUENCY_PENALTY,
    NO_REPEAT_NGRAM_SIZE,
    RANDOM_SEED,
    RETURN_LOG_PROBS,
    RETURN_CONTEXT_LOGITS,
    RETURN_GENERATION_LOGITS,
    PROMPT_EMBEDDING_TABLE,
    PROMPT_VOCAB_SIZE,
    LORA_TASK_ID,
    LORA_WEIGHTS,
    LORA_CONFIG,
)
