"""Converts a GenerationRequest to the engine's Request and to the settings that make text of its output.

Fields that the engine does not support are refused under the name that the caller has used. A sampling field with the same name
in `SamplingConfig` is passed on unchanged, so a new field of that kind needs no code here.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from backend.api import AdditionalOutput, EverbatchError, OutputConfig, Request, SamplingConfig
from backend.api.guide import Guide, GuideType, choice_guide
from backend.api.lora import LoraConfig
from backend.api.request import RetentionConfig, TokenRangeRetention
from backend.api.sampling import on_wire
from backend.api.tensor import TensorData
from backend.core.step import ModelInfo
from backend.executor.own_processors import OF_REQUEST
from backend.executor.prompt_adapters import PromptAdapters, with_table
from backend.text.tokenizer import Tokenizer
from backend.text.words import words_token_ids
from compat.llm.errors import NotHere, ParameterError, refuse
from compat.llm.requests import DisaggregatedParams, GenerationRequest, LoRARequest, PromptAdapterRequest
from compat.llm.sampling_params import GuidedDecodingParams, SamplingParams
from compat.llm.speculative import lookahead_drafts
from compat.llm.updates import TextParams

# Sampling fields of one name and meaning on both sides. A greedy request does not send those that ask for sampling.
_SAME_NAME = [field for field, name in on_wire("llm") if name == field.name]
DEFAULT_PRIORITY = 0.5
PROMPT_ADAPTERS = PromptAdapters()  # all executors of a program share it
NOT_HERE = {
    "return_encoder_output": "the models have no encoder",
}
REQUEST_NOT_HERE = {
    "postproc_params": "the output is made into text and nothing else",
    "scheduling_params": "there is one scheduler for all requests",
}


def check_supported(request: GenerationRequest) -> None:
    """Raise NotHere for the first field that asks for something that is not supported."""
    params = request.sampling_params
    for name, why in NOT_HERE.items():
        refuse(name, getattr(params, name), why)
    if not params.spaces_between_special_tokens:
        raise NotHere("spaces_between_special_tokens is False, the tokenizer decides that here; leave it out")
    for name, why in REQUEST_NOT_HERE.items():
        refuse(name, getattr(request, name), why)


def core_request(
    request: GenerationRequest,
    tokenizer: Tokenizer | None,
    model: ModelInfo,
    caps: int,
    adapters: PromptAdapters = PROMPT_ADAPTERS,
) -> Request:
    """The engine's Request. `caps`: how many alternatives a request may ask for at each position.

    Raises NotHere and ParameterError.
    """
    check_supported(request)
    params = request.sampling_params
    prompt = request.all_token_ids
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None and asked > caps:
            raise ParameterError(f"{name} is {asked}, the limit is {caps} (limits.max_top_log_probs)")
    table = prompt_table(request.prompt_adapter_request, adapters)
    num_prompt, max_tokens = len(prompt) + (0 if table is None else table.shape[0]), params.max_tokens
    made = Request(
        input_token_ids=prompt,
        max_tokens=max(1, model.max_seq_len - num_prompt) if max_tokens is None else max_tokens,
        streaming=request.streaming or _has_to_be_watched(params, tokenizer),
        return_all_generated_tokens=params.use_beam_search,
        sampling_config=sampling_config(params, request.disaggregated_params is not None),
        output_config=output_config(params),
        end_ids=end_ids(params, tokenizer, model),
        stop_words=[ids for _, ids in stop_words(params, tokenizer)],
        bad_words=bad_words(params, tokenizer),
        client_id=request.id,
        cache_salt=request.cache_salt or "",
        extra_inputs=dict(request.multimodal_params or {}) if model.takes_extra_inputs else {},
        images=request.images,
        priority=_priority(request),
        retention=retention(request.kv_cache_retention_config),
        logits_post_processor=post_processor(params, model.post_processors),
        guide=guide(params.guided_decoding),
        lora=lora_config(request.lora_request),
        max_draft_tokens=None if params.lookahead_config is None else lookahead_drafts(params.lookahead_config),
        **_phase(request.disaggregated_params),
    )
    return made if table is None else with_table(made, table, model.vocab_size)


def _phase(params: DisaggregatedParams | None) -> dict[str, Any]:
    """The fields of a request whose phases run on two engines. Without a state the second one computes the prompt again.

    The first tokens are sampled again, from the same logits and the same random stream, so they are not sent.
    """
    if params is None:
        return {}
    if not isinstance(params, DisaggregatedParams):
        raise TypeError(f"disaggregated_params is a {type(params).__name__}, DisaggregatedParams are needed")
    if params.draft_tokens:
        raise NotHere("draft_tokens of disaggregated_params are not served here; leave them out")
    if params.opaque_state is not None and not isinstance(params.opaque_state, bytes):
        raise TypeError(f"opaque_state is a {type(params.opaque_state).__name__}, bytes are needed")
    if params.request_type == "context_only":
        return {"context_only": True}
    return {"kv_state": params.opaque_state or b""} if params.request_type == "generation_only" else {}


def sampling_config(params: SamplingParams, is_phase: bool = False) -> SamplingConfig:
    """Beams only with `use_beam_search`; otherwise `best_of` sequences are sampled. A request that samples without a seed gets a
    random one, unless it `is_phase`: the second engine samples the first tokens again.
    """
    sent = [field.name for field in _SAME_NAME if not (params.is_greedy and field.asks_for_sampling)]
    fields: dict[str, Any] = {name: value for name in sent if (value := getattr(params, name)) is not None}
    if params.use_beam_search:
        fields |= {"beam_width": params.num_sequences, "num_return_sequences": params.n}
    elif params.num_sequences > 1:
        fields["num_return_sequences"] = params.num_sequences
    if params.seed is None and not (params.is_greedy or params.use_beam_search or is_phase):
        fields["seed"] = secrets.randbits(63)
    return SamplingConfig(**fields, logit_bias=_logit_bias(params.embedding_bias))


def output_config(params: SamplingParams) -> OutputConfig:
    """With `best_of` the engine sends log-probabilities even if the caller wants none, because they decide which are best.

    The alternatives of the first output token are part of the log-probabilities that the prompt asks for.
    """
    chooses = params.num_sequences > params.n and not params.use_beam_search
    return OutputConfig(
        return_log_probs=params.logprobs is not None or params.prompt_logprobs is not None or chooses,
        top_log_probs=max(params.logprobs or 0, params.prompt_logprobs or 0),
        prompt_log_probs=params.prompt_logprobs,
        return_context_logits=params.return_context_logits,
        return_generation_logits=params.return_generation_logits,
        additional_outputs=tuple(
            AdditionalOutput(each.name, each.gather_context) for each in params.additional_model_outputs or ()
        ),
        exclude_input_from_output=True,  # The detokeniser puts the prompt in front where the caller wants it.
        return_perf_metrics=params.return_perf_metrics,
    )


def post_processor(params: SamplingParams, known: tuple[str, ...]) -> str:
    """The name of the post-processor that changes the logits of this request; empty without one."""
    if params.logits_processor is None and not params.apply_batched_logits_processor:
        return ""
    if params.logits_processor is not None and params.apply_batched_logits_processor:
        raise ParameterError("logits_processor and apply_batched_logits_processor are both set; leave one of them out")
    if params.apply_batched_logits_processor:
        if Request.BATCHED_POST_PROCESSOR_NAME not in known:
            raise ParameterError(
                "apply_batched_logits_processor is set, and there is no batched_logits_processor; give LLM one"
            )
        return Request.BATCHED_POST_PROCESSOR_NAME
    if OF_REQUEST not in known:
        raise NotHere(
            "logits_processor is set, and the engine is not in this process; leave out orchestrator_type and world_size, "
            "or give LLM a batched_logits_processor that stands at the top of a module"
        )
    return OF_REQUEST


def guide(params: GuidedDecodingParams | None) -> Guide | None:
    """The guide of the output. A schema may be a dictionary, or a pydantic class that has one."""
    if params is None:
        return None
    if not isinstance(params, GuidedDecodingParams):
        raise TypeError(f"guided_decoding is a {type(params).__name__}, a GuidedDecodingParams is needed")
    if params.json is not None and params.json != "":
        schema: Any = params.json
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        return Guide(GuideType.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))
    texts = {"regex": GuideType.REGEX, "grammar": GuideType.EBNF_GRAMMAR, "structural_tag": GuideType.STRUCTURAL_TAG}
    for name, kind in texts.items():
        if getattr(params, name):
            return Guide(kind, getattr(params, name))
    if params.choice is not None:
        return choice_guide("guided_decoding.choice", params.choice)
    return Guide(GuideType.JSON) if params.json_object else None


def lora_config(given: LoRARequest | None) -> LoraConfig | None:
    """The adapter of a LoRARequest. The engine reads its directory again only if it has changed."""
    if given is None:
        return None
    if not isinstance(given, LoRARequest):
        raise TypeError(f"lora_request is a {type(given).__name__}, a LoRARequest is needed")
    return LoraConfig(given.adapter_id, path=given.path, name=given.name)


def prompt_table(given: PromptAdapterRequest | None, adapters: PromptAdapters) -> TensorData | None:
    """The rows of a PromptAdapterRequest's adapter, whose directory is read again only if it has changed."""
    if given is None:
        return None
    if not isinstance(given, PromptAdapterRequest):
        raise TypeError(f"prompt_adapter_request is a {type(given).__name__}, a PromptAdapterRequest is needed")
    try:
        return adapters.table(given.local_path)
    except EverbatchError as error:
        raise ParameterError(f"prompt adapter {given.name[:80]!r}: {error.message}") from None


def end_ids(params: SamplingParams, tokenizer: Tokenizer | None, model: ModelInfo) -> tuple[int, ...]:
    """The end id of the request, else those of the tokenizer and the checkpoint. -1 means none, as in TensorRT-LLM."""
    if params.ignore_eos:
        return ()
    if params.end_id is not None:
        return () if params.end_id == -1 else (params.end_id,)
    return tuple(dict.fromkeys([*(tokenizer.eos_ids if tokenizer is not None else ()), *model.eos_ids]))


def stop_words(params: SamplingParams, tokenizer: Tokenizer | None) -> list[tuple[str | int, list[int]]]:
    """Stop words as token ids, for the engine: stop tokens, and stop strings that cannot be found in the text in time."""
    words: list[tuple[str | int, list[int]]] = [(token_id, [token_id]) for token_id in params.stop_token_ids or ()]
    for stop in params.stops():
        encoder = _needed(tokenizer, "stop")
        special = encoder.token_to_id(stop)
        if special is not None and special in encoder.special_ids:
            words.append((stop, [special]))
        elif not params.detokenize or params.num_sequences > 1:
            words += [(stop, ids) for ids in words_token_ids(encoder, [stop])]
    return words


def bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> list[list[int]]:
    bads = params.bads()
    spelled = words_token_ids(_needed(tokenizer, "bad"), bads) if bads else []
    return spelled + [[token_id] for token_id in params.bad_token_ids or ()]


def text_params(request: GenerationRequest, tokenizer: Tokenizer | None, stream_interval: int) -> TextParams:
    """How the output of the request becomes text."""
    params = request.sampling_params
    return TextParams(
        prompt_ids=request.all_token_ids,
        stops=_stops_in_text(params, tokenizer),
        stop_words=stop_words(params, tokenizer),
        include_stop=params.include_stop_str_in_output,
        detokenize=params.detokenize and tokenizer is not None,
        skip_special_tokens=params.skip_special_tokens,
        streaming=request.streaming,
        stream_interval=stream_interval,
        log_probs=params.logprobs,
        prompt_log_probs=params.prompt_logprobs,
        num_sequences=params.num_sequences,
        beams=params.use_beam_search,
        shows_prompt=not (params.exclude_input_from_output or request.streaming),
    )


def _stops_in_text(params: SamplingParams, tokenizer: Tokenizer | None) -> list[str]:
    return params.stops() if params.detokenize and tokenizer is not None else []


def _has_to_be_watched(params: SamplingParams, tokenizer: Tokenizer | None) -> bool:
    """True if the engine must stream every token, because stop strings are found in text. Beams are cut at their ends."""
    return bool(_stops_in_text(params, tokenizer)) and not params.use_beam_search


def _needed(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    if tokenizer is None:
        raise ParameterError(f"{name} is text, and there is no tokenizer; give {name}_token_ids, or a tokenizer")
    return tokenizer


def _logit_bias(bias: Any) -> dict[int, float] | None:
    """The entries that are not zero, by token id."""
    if bias is None:
        return None
    values = bias.tolist() if hasattr(bias, "tolist") else bias
    if not isinstance(values, Iterable) or not all(isinstance(value, int | float) for value in values):
        raise ParameterError("embedding_bias is no list of numbers, one for each token of the vocabulary is needed")
    entries = {n: float(value) for n, value in enumerate(values) if value != 0}
    if not all(math.isfinite(value) for value in entries.values()):
        raise ParameterError("embedding_bias holds a value that is not finite; use -100 to 100")
    return entries or None


def _priority(request: GenerationRequest) -> float:
    if request.priority is None:
        return DEFAULT_PRIORITY
    if not 0 <= request.priority <= 1:
        raise ParameterError(f"priority is {request.priority}, allowed is 0 to 1")
    return request.priority


def retention(config: Any) -> RetentionConfig | None:
    """The priority and duration of the request's cached KV, from a RetentionConfig or an object with TensorRT-LLM's fields."""
    if config is None or isinstance(config, RetentionConfig):
        return config
    try:
        ranges = tuple(
            TokenRangeRetention(each.token_start, each.token_end, each.priority, _seconds(each.duration_ms))
            for each in config.token_range_retention_configs
        )
        return RetentionConfig(ranges, config.decode_retention_priority, _seconds(config.decode_duration_ms))
    except AttributeError:
        raise TypeError(
            f"kv_cache_retention_config is a {type(config).__name__}; a KvCacheRetentionConfig or our RetentionConfig is needed"
        ) from None


def _seconds(duration: timedelta | float | None) -> float | None:
    """Seconds of a timedelta, or of a number of milliseconds."""
    if duration is None:
        return None
    return duration.total_seconds() if isinstance(duration, timedelta) else duration / 1000
