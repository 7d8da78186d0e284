"""Converts a Request to a backend.api.Request. An argument that the engine does not serve raises Unsupported with its name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from backend.api import AdditionalOutput, InvalidRequest, OutputConfig, Request, SamplingConfig, Unsupported
from backend.api.draft_limits import drafts_of_lookahead
from backend.api.guide import Guide, GuideType
from backend.api.lora import LoraConfig
from backend.api.request import RetentionConfig, TokenRangeRetention
from backend.api.sampling import on_wire, tensorrt_llm_sampling
from backend.executor.own_processors import OF_REQUEST
from compat.tensorrt_llm import as_data
from compat.trtllm import request as theirs
from compat.trtllm import request_configs as configs
from compat.trtllm.enums import KvCacheTransferMode, RequestType
from compat.trtllm.request_configs import GuidedDecodingParams, KvCacheRetentionConfig

# Attributes with the same name and meaning on both sides.
_REQUEST = ("max_tokens", "streaming", "client_id", "return_all_generated_tokens", "priority", "position_ids")
_SAMPLING = [name for field, name in on_wire("bindings") if field.dtype]
_OUTPUT = (
    "return_log_probs",
    "exclude_input_from_output",
    "return_perf_metrics",
    "return_context_logits",
    "return_generation_logits",
)

# attribute -> the values that ask for nothing; any other is refused. `pad_id` has no effect: outputs are not padded.
_REFUSED_OF_REQUEST: dict[str, tuple[Any, ...]] = {
    "multimodal_input": (None,),
    "multimodal_embedding": (None,),
    "mrope_config": (None,),
    "encoder_input_token_ids": (None,),
    "encoder_input_features": (None,),
    "encoder_output_length": (None,),
    "cross_attention_mask": (None,),
    "skip_cross_attn_blocks": (None,),
    "eagle_config": (None,),
    "language_adapter_uid": (None,),
}
_REFUSED_OF_DRAFTS: dict[str, tuple[Any, ...]] = {
    "logits": (None,),
    "acceptance_threshold": (None,),
    "fast_logits": (None, False),
}
# Attributes that have an effect on beams only; with one beam any value is accepted.
_REFUSED_OF_BEAMS: dict[str, tuple[Any, ...]] = {
    "beam_width_array": (None,),
}
_REFUSED_OF_OUTPUT: dict[str, tuple[Any, ...]] = {
    "return_encoder_output": (False,),
}


def to_core(request: theirs.Request, vocab_size: int, max_beam_width: int) -> Request:
    """The engine's request. Raises InvalidRequest or Unsupported for an argument that cannot be served."""
    _check(request, _REFUSED_OF_REQUEST, "Request")
    _check(request.output_config, _REFUSED_OF_OUTPUT, "OutputConfig")
    if request.sampling_config.beam_width > 1:
        _check(request.sampling_config, _REFUSED_OF_BEAMS, "SamplingConfig")
    drafts = request.external_draft_tokens_config
    if drafts is not None:
        _check(drafts, _REFUSED_OF_DRAFTS, "ExternalDraftTokensConfig")
    if request.sampling_config.beam_width > max_beam_width:
        raise InvalidRequest(
            f"beam_width is {request.sampling_config.beam_width}, the limit is max_beam_width {max_beam_width} "
            f"of ExecutorConfig; raise that, or ask for fewer beams"
        )
    return Request(
        input_token_ids=request.input_token_ids,
        sampling_config=_sampling(request, vocab_size),
        output_config=_output(request.output_config),
        logits_post_processor=_processor(request),
        guide=None if request.guided_decoding_params is None else _guide(request.guided_decoding_params),
        end_ids=() if request.end_id is None or request.end_id < 0 else (request.end_id,),
        stop_words=request.stop_words or [],
        bad_words=request.bad_words or [],
        timeout_s=_seconds(request.allotted_time_ms),
        retention=None if request.kv_cache_retention_config is None else _retention(request.kv_cache_retention_config),
        draft_tokens=[] if drafts is None else drafts.tokens,
        ends_after_drafts=drafts is not None,
        max_draft_tokens=None if request.lookahead_config is None else _drafts(request.lookahead_config),
        **_prompt_tuning(request.prompt_tuning_config),
        lora=None if request.lora_config is None else _lora(request.lora_config),
        **_phase(request),
        cache_salt="" if request.cache_salt_id is None else str(request.cache_salt_id),
        **{name: getattr(request, name) for name in _REQUEST},
    )


def _check(record: Any, refused: dict[str, tuple[Any, ...]], owner: str) -> None:
    for name, neutral in refused.items():
        value = getattr(record, name)
        if not any(value is each or (type(value) is type(each) and value == each) for each in neutral):
            raise Unsupported(f"{owner}.{name} is not served by this version; leave it out")


def _drafts(lookahead: configs.LookaheadDecodingConfig) -> int:
    return drafts_of_lookahead(lookahead.max_window_size, lookahead.max_ngram_size, lookahead.max_verification_set_size)


def _sampling(request: theirs.Request, vocab_size: int) -> SamplingConfig:
    values = {name: getattr(request.sampling_config, name) for name in _SAMPLING}
    if values["top_p_reset_ids"] is not None and values["top_p_reset_ids"] < 0:
        values["top_p_reset_ids"] = None
    if values["num_return_sequences"] is None and request.num_return_sequences != 1:
        values["num_return_sequences"] = request.num_return_sequences
    bias = None if request.embedding_bias is None else _bias(request.embedding_bias, vocab_size)
    return tensorrt_llm_sampling(logit_bias=bias, **values)


def _output(given: configs.OutputConfig) -> OutputConfig:
    asked = given.additional_model_outputs or []
    return OutputConfig(
        additional_outputs=tuple(AdditionalOutput(each.name, each.gather_context) for each in asked),
        **{name: getattr(given, name) for name in _OUTPUT},
    )


def _phase(request: theirs.Request) -> dict[str, Any]:
    """The fields of a request whose phases run on two engines.

    The first tokens are sampled again, from the same logits and the same random stream, so they are not sent.
    """
    given, kind = request.context_phase_params, request.request_type
    if (given is None) == (kind is RequestType.REQUEST_TYPE_GENERATION_ONLY):
        raise InvalidRequest(
            f"the request type is {kind.name} and context_phase_params are {'not ' if given is None else ''}given; they go with "
            f"REQUEST_TYPE_GENERATION_ONLY alone"
        )
    if given is None:
        return {"context_only": kind is RequestType.REQUEST_TYPE_CONTEXT_ONLY}
    if given.draft_tokens:
        raise Unsupported("draft_tokens of context_phase_params are not served by this version; leave them out")
    return {"kv_state": given.opaque_state or b""}


def _prompt_tuning(given: configs.PromptTuningConfig | None) -> dict[str, Any]:
    """The fields of the engine's request for a table [rows, hidden] or [1, rows, hidden]."""
    if given is None:
        return {}
    table = given.embedding_table
    if table.dim() == 3 and len(table) == 1:
        table = table[0]
    return {"prompt_embeddings": as_data(table), "extra_ids": given.input_token_extra_ids or []}


def _guide(given: GuidedDecodingParams) -> Guide:
    """The guide of the output. The type JSON has no text."""
    kind = GuideType(given.guide_type.name.lower())
    return Guide(kind, "" if kind is GuideType.JSON else given.guide or "")


def _lora(given: configs.LoraConfig) -> LoraConfig:
    """The adapter. Weights [rows, width] and config [rows, 3 or 4] may each have a leading dimension of 1."""
    weights, config = (
        each[0] if each is not None and each.dim() == 3 and len(each) == 1 else each
        for each in (given.weights, given.config)
    )
    return LoraConfig(
        given.task_id,
        None if weights is None else as_data(weights),
        () if config is None else tuple(map(tuple, config.tolist())),
    )


def _processor(request: theirs.Request) -> str:
    """The name of the request's post-processor in the engine; empty without one."""
    if request.logits_post_processor is None:
        return request.logits_post_processor_name or ""
    if request.logits_post_processor_name is not None:
        raise InvalidRequest("logits_post_processor and logits_post_processor_name are both given; leave one out")
    return OF_REQUEST


def _retention(given: KvCacheRetentionConfig) -> RetentionConfig:
    """Ranges in the order of their tokens. KV is never moved, so only the transfer mode DRAM is served."""
    if given.transfer_mode is not KvCacheTransferMode.DRAM or given.directory is not None:
        raise Unsupported(
            "KvCacheRetentionConfig.transfer_mode other than DRAM is not served; leave it and directory out"
        )
    ranges = sorted(given.token_range_retention_configs, key=lambda each: each.token_start)
    return RetentionConfig(
        tuple(
            TokenRangeRetention(each.token_start, each.token_end, each.priority, _seconds(each.duration_ms))
            for each in ranges
        ),
        given.decode_retention_priority,
        _seconds(given.decode_duration_ms),
    )


def _seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()


def _bias(bias: Any, vocab_size: int) -> dict[int, float]:
    """The bias of each token id, from a tensor [vocabulary] or [1, vocabulary]."""
    shape = list(bias.shape)
    if shape not in ([vocab_size], [1, vocab_size]):
        raise InvalidRequest(
            f"embedding bias shape is not as expected: it is {shape}, [{vocab_size}] is needed (the vocabulary)"
        )
    flat = bias.reshape(-1)
    ids = flat.nonzero().reshape(-1)
    return dict(zip(ids.tolist(), flat[ids].tolist()))
