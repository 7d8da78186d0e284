"""The parts of a Request besides its tokens. All but SamplingConfig, OutputConfig and AdditionalModelOutput are read-only."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from compat.trtllm.enums import Enumeration, KvCacheTransferMode
from compat.trtllm.kinds import (
    BOOL,
    BYTES,
    FLOAT,
    INT32,
    STR,
    TENSOR,
    TIMEDELTA,
    TOKENS,
    UINT32,
    UINT64,
    list_of,
    of,
    optional,
)
from compat.trtllm.record import Record, constant, copy_of, field

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


class SamplingConfig(Record):
    """How tokens are chosen. None leaves a field to the runtime: no top-k, no top-p, temperature 1, no penalties, seed 0.

    As in TensorRT-LLM decoding is greedy unless `top_k` is more than 1 or `top_p` (or `min_p`) more than 0.
    `early_stopping`, `length_penalty` and `beam_search_diversity_rate` matter to beams only.
    """

    beam_width: int = field(INT32, default=1)
    top_k: int | None = field(optional(INT32), default=None, kw_only=True)
    top_p: float | None = field(optional(FLOAT), default=None, kw_only=True)
    top_p_min: float | None = field(optional(FLOAT), default=None, kw_only=True)
    top_p_reset_ids: int | None = field(optional(INT32), default=None, kw_only=True)
    top_p_decay: float | None = field(optional(FLOAT), default=None, kw_only=True)
    seed: int | None = field(optional(UINT64), default=None, kw_only=True)
    temperature: float | None = field(optional(FLOAT), default=None, kw_only=True)
    min_tokens: int | None = field(optional(INT32), default=None, kw_only=True)
    beam_search_diversity_rate: float | None = field(optional(FLOAT), default=None, kw_only=True)
    repetition_penalty: float | None = field(optional(FLOAT), default=None, kw_only=True)
    presence_penalty: float | None = field(optional(FLOAT), default=None, kw_only=True)
    frequency_penalty: float | None = field(optional(FLOAT), default=None, kw_only=True)
    length_penalty: float | None = field(optional(FLOAT), default=None, kw_only=True)
    early_stopping: int | None = field(optional(INT32), default=None, kw_only=True)
    no_repeat_ngram_size: int | None = field(optional(INT32), default=None, kw_only=True)
    num_return_sequences: int | None = field(optional(INT32), default=None, kw_only=True)
    min_p: float | None = field(optional(FLOAT), default=None, kw_only=True)
    beam_width_array: list[int] | None = field(optional(list_of(INT32)), default=None, kw_only=True)


class AdditionalModelOutput(Record):
    """A tensor that the model offers as an output. `gather_context`: also for the tokens of the prompt."""

    name: str = field(STR)
    gather_context: bool = field(BOOL, default=False)


class OutputConfig(Record):
    """The optional fields of a Result; those that are not asked for are None."""

    return_log_probs: bool = field(BOOL, default=False)
    return_context_logits: bool = field(BOOL, default=False)
    return_generation_logits: bool = field(BOOL, default=False)
    exclude_input_from_output: bool = field(BOOL, default=False)
    return_encoder_output: bool = field(BOOL, default=False)
    return_perf_metrics: bool = field(BOOL, default=False)
    additional_model_outputs: list[AdditionalModelOutput] | None = field(
        optional(list_of(of(AdditionalModelOutput))), default=None
    )


class ExternalDraftTokensConfig(Record):
    """Draft tokens of the client, to be verified. `logits`: from which they were drawn."""

    tokens: list[int] = constant(TOKENS)
    logits: Tensor | None = constant(optional(TENSOR), default=None)
    acceptance_threshold: float | None = constant(optional(FLOAT), default=None)
    fast_logits: bool | None = constant(optional(BOOL), default=None)


class PromptTuningConfig(Record):
    """`embedding_table` [rows, hidden size]: token id vocab_size + i stands for row i.

    The extra ids separate cached prefixes of different tables.
    """

    embedding_table: Tensor = constant(TENSOR)
    input_token_extra_ids: list[int] | None = constant(optional(list_of(UINT64)), default=None)


class LoraConfig(Record):
    """An adapter by its `task_id`. Weights and config go with its first use."""

    task_id: int = constant(UINT64)
    weights: Tensor | None = constant(optional(TENSOR), default=None)
    config: Tensor | None = constant(optional(TENSOR), default=None)


class MultimodalInput(Record):
    """Where in the prompt multimodal items lie, and their hashes."""

    multimodal_hashes: list[list[int]] = constant(list_of(list_of(INT32)))
    multimodal_positions: list[int] = constant(list_of(INT32))
    multimodal_lengths: list[int] = constant(list_of(INT32))


class MropeConfig(Record):
    """Rotary embedding over several axes."""

    mrope_rotary_cos_sin: Tensor = constant(TENSOR)
    mrope_position_deltas: int = constant(INT32)


class LookaheadDecodingConfig(Record):
    """Sizes of lookahead decoding."""

    max_window_size: int = constant(INT32, default=4)
    max_ngram_size: int = constant(INT32, default=3)
    max_verification_set_size: int = constant(INT32, default=4)

    def _made(self) -> None:
        if self.max_window_size < 1 or self.max_ngram_size < 1 or self.max_verification_set_size < 0:
            raise RuntimeError(
                f"{self} is no lookahead configuration: window and n-gram size must be 1 or more, the verification set 0 or more"
            )


class EagleConfig(Record):
    """Sizes and choices of EAGLE decoding."""

    eagle_choices: list[list[int]] | None = constant(optional(list_of(list_of(INT32))), default=None)
    greedy_sampling: bool = constant(BOOL, default=True)
    posterior_threshold: float | None = constant(optional(FLOAT), default=None)
    use_dynamic_tree: bool = constant(BOOL, default=False)
    dynamic_tree_max_topK: int | None = constant(optional(INT32), default=None)


class KvCacheRetentionConfig(Record):
    """Priorities of cached KV, by ranges of prompt tokens and for the output.

    A block has the priority of the range that holds its first token; the default is 35. Raises RuntimeError for ranges that
    overlap.
    """

    class TokenRangeRetentionConfig(Record):
        """Keep the blocks of prompt tokens [token_start, token_end) with a priority from 0 to 100. `token_end` None: to the end.

        `duration_ms`: how long the priority holds, a timedelta; None: without limit.
        """

        token_start: int = constant(INT32)
        token_end: int | None = constant(optional(INT32))
        priority: int = constant(UINT32)
        duration_ms: timedelta | None = constant(optional(TIMEDELTA), default=None)

        def _made(self) -> None:
            _check_priority("priority", self.priority)
            if self.token_start < 0 or (self.token_end is not None and self.token_end <= self.token_start):
                raise RuntimeError(
                    f"token range [{self.token_start}, {self.token_end}) is empty or negative; it must start at 0 or later "
                    f"and end after its start"
                )

    token_range_retention_configs: list[TokenRangeRetentionConfig] = constant(list_of(of(TokenRangeRetentionConfig)))
    decode_retention_priority: int = constant(UINT32, default=35)
    decode_duration_ms: timedelta | None = constant(optional(TIMEDELTA), default=None)
    transfer_mode: KvCacheTransferMode = constant(of(KvCacheTransferMode), default=KvCacheTransferMode.DRAM)
    directory: str | None = constant(optional(STR), default=None)

    def _made(self) -> None:
        _check_priority("decode_retention_priority", self.decode_retention_priority)
        ranges = sorted(self.token_range_retention_configs, key=lambda each: each.token_start)
        for one, next_one in zip(ranges, ranges[1:]):
            if one.token_end is None or one.token_end > next_one.token_start:
                raise RuntimeError(
                    f"token ranges [{one.token_start}, {one.token_end}) and [{next_one.token_start}, {next_one.token_end}) "
                    f"overlap; each token may be in one range only"
                )


class ContextPhaseParams(Record):
    """State that a context-only engine passes to a generation-only engine."""

    first_gen_tokens: list[int] = constant(TOKENS)
    req_id: int = constant(UINT64)
    opaque_state: bytes | None = constant(optional(BYTES), default=None)
    draft_tokens: list[int] | None = constant(optional(TOKENS), default=None)


class GuidedDecodingParams(Record):
    """A guide of the output. Raises RuntimeError for a type that needs a guide without one."""

    class GuideType(Enumeration):
        """The kind of a guide. All kinds but JSON need a text."""

        JSON = 0
        JSON_SCHEMA = 1
        REGEX = 2
        EBNF_GRAMMAR = 3
        STRUCTURAL_TAG = 4

    guide_type: GuideType = constant(of(GuideType))
    guide: str | None = constant(optional(STR), default=None)

    def _made(self) -> None:
        if self.guide is None and self.guide_type is not self.GuideType.JSON:
            raise RuntimeError(f"The guide string must be provided unless using GuideType.JSON, not {self.guide_type}")


SAMPLING, OUTPUT = copy_of(SamplingConfig), copy_of(OutputConfig)


def _check_priority(name: str, priority: int) -> None:
    if priority > 100:
        raise RuntimeError(f"{name} is {priority}, allowed is 0 to 100")
