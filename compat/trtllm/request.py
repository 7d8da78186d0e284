"""Request: a prompt, and how to generate from it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from compat.trtllm.enums import RequestType
from compat.trtllm.kinds import (
    BOOL,
    CALLABLE,
    FLOAT,
    INT32,
    POSITIVE,
    STR,
    TENSOR,
    TIMEDELTA,
    TOKENS,
    UINT64,
    list_of,
    of,
    optional,
)
from compat.trtllm.record import Record, field
from compat.trtllm.request_configs import (
    OUTPUT,
    SAMPLING,
    ContextPhaseParams,
    EagleConfig,
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LookaheadDecodingConfig,
    LoraConfig,
    MropeConfig,
    MultimodalInput,
    OutputConfig,
    PromptTuningConfig,
    SamplingConfig,
)

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

LogitsPostProcessor = Callable[..., Any]


def _maybe(cls: type) -> Any:
    """A keyword argument that takes an object of `cls`, or None."""
    return optional(of(cls))


class Request(Record, dynamic=True):
    """One generation request. `input_token_ids` and `max_tokens` are fixed, all other attributes can be set until it is enqueued.

    `streaming`: a response for each new token rather than one with all. `end_id`: ends the output and stays in it; -1 is none.
    `bad_words`, `stop_words`: token lists. `embedding_bias` [vocabulary]: added to the logits. `allotted_time_ms`: time
    limit from enqueueing on, after which it ends with FinishReason.TIMED_OUT. `cache_salt_id`: only requests with the same id
    share KV. Attributes of any other name may be set; they are kept and have no effect.

    An argument that this project does not serve (docs/executor.md) gives an error response that names it.
    """

    BATCHED_POST_PROCESSOR_NAME: ClassVar[str] = "batched"

    input_token_ids: list[int] = field(TOKENS, read_only=True)
    max_tokens: int = field(POSITIVE, read_only=True)
    streaming: bool = field(BOOL, default=False, kw_only=True)
    sampling_config: SamplingConfig = field(SAMPLING, factory=SamplingConfig, kw_only=True)
    output_config: OutputConfig = field(OUTPUT, factory=OutputConfig, kw_only=True)
    end_id: int | None = field(optional(INT32), default=None, kw_only=True)
    pad_id: int | None = field(optional(INT32), default=None, kw_only=True)
    position_ids: list[int] | None = field(optional(list_of(INT32)), default=None, kw_only=True)
    bad_words: list[list[int]] | None = field(optional(list_of(TOKENS)), default=None, kw_only=True)
    stop_words: list[list[int]] | None = field(optional(list_of(TOKENS)), default=None, kw_only=True)
    embedding_bias: Tensor | None = field(optional(TENSOR), default=None, kw_only=True)
    external_draft_tokens_config: ExternalDraftTokensConfig | None = field(
        _maybe(ExternalDraftTokensConfig), default=None, kw_only=True
    )
    prompt_tuning_config: PromptTuningConfig | None = field(_maybe(PromptTuningConfig), default=None, kw_only=True)
    multimodal_input: MultimodalInput | None = field(_maybe(MultimodalInput), default=None, kw_only=True)
    multimodal_embedding: Tensor | None = field(optional(TENSOR), default=None, kw_only=True)
    mrope_config: MropeConfig | None = field(_maybe(MropeConfig), default=None, kw_only=True)
    lora_config: LoraConfig | None = field(_maybe(LoraConfig), default=None, kw_only=True)
    lookahead_config: LookaheadDecodingConfig | None = field(
        _maybe(LookaheadDecodingConfig), default=None, kw_only=True
    )
    kv_cache_retention_config: KvCacheRetentionConfig | None = field(
        _maybe(KvCacheRetentionConfig), default=None, kw_only=True
    )
    logits_post_processor_name: str | None = field(optional(STR), default=None, kw_only=True)
    logits_post_processor: LogitsPostProcessor | None = field(optional(CALLABLE), default=None, kw_only=True)
    encoder_input_token_ids: list[int] | None = field(optional(TOKENS), default=None, kw_only=True)
    client_id: int | None = field(optional(UINT64), default=None, kw_only=True)
    return_all_generated_tokens: bool = field(BOOL, default=False, kw_only=True)
    priority: float = field(FLOAT, default=0.5, kw_only=True)
    request_type: RequestType = field(
        of(RequestType), default=RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION, kw_only=True, alias="type"
    )
    context_phase_params: ContextPhaseParams | None = field(_maybe(ContextPhaseParams), default=None, kw_only=True)
    encoder_input_features: Tensor | None = field(optional(TENSOR), default=None, kw_only=True)
    encoder_output_length: int | None = field(optional(INT32), default=None, kw_only=True)
    cross_attention_mask: Tensor | None = field(optional(TENSOR), default=None, kw_only=True)
    num_return_sequences: int = field(
        INT32, default=1, kw_only=True, doc="superseded by SamplingConfig.num_return_sequences"
    )
    eagle_config: EagleConfig | None = field(_maybe(EagleConfig), default=None, kw_only=True)
    skip_cross_attn_blocks: Tensor | None = field(optional(TENSOR), default=None, kw_only=True)
    guided_decoding_params: GuidedDecodingParams | None = field(
        _maybe(GuidedDecodingParams), default=None, kw_only=True
    )
    language_adapter_uid: int | None = field(optional(INT32), default=None, kw_only=True)
    allotted_time_ms: timedelta | None = field(optional(TIMEDELTA), default=None, kw_only=True)
    cache_salt_id: int | None = field(optional(UINT64), default=None, kw_only=True)

    def _made(self) -> None:
        if not self.input_token_ids:
            raise RuntimeError("input_token_ids is empty; give at least 1 token")
