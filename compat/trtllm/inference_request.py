"""InferenceRequest: GptManager's request, a set of named tensors, and its conversion to a Request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from backend.api import InvalidRequest
from compat.trtllm import tensor_names as names
from compat.trtllm.kinds import BOOL, CALLABLE, STR, TENSOR, UINT64, optional
from compat.trtllm.record import Record, constant, field
from compat.trtllm.request import Request
from compat.trtllm.request_configs import (
    ExternalDraftTokensConfig,
    LoraConfig,
    OutputConfig,
    PromptTuningConfig,
    SamplingConfig,
)


class NamedTensor(Record):
    """A tensor and its name."""

    name: str = constant(STR)
    tensor: Any = constant(optional(TENSOR))


def _no_tensor() -> Any:
    return field(optional(TENSOR), default=None, kw_only=True)


class InferenceRequest(Record):
    """A request for GptManager: a 64-bit id that the caller chooses, and tensors under the names of `tensor_names`.

    `input_ids` and `request_output_len` (also as `max_new_tokens`) must be set, all others may. The defaults are one beam, no end
    id and no streaming. `logits_post_processor(id, logits, tokens of each beam, stream)` changes the logits of this request.
    """

    request_id: int = constant(UINT64)
    logits_post_processor: Callable[..., Any] | None = field(optional(CALLABLE), default=None)
    is_streaming: bool = field(BOOL, default=False, kw_only=True)
    input_ids: Any = _no_tensor()
    draft_input_ids: Any = _no_tensor()
    draft_logits: Any = _no_tensor()
    request_output_len: Any = _no_tensor()
    beam_width: Any = _no_tensor()
    num_return_sequences: Any = _no_tensor()
    bad_words_list: Any = _no_tensor()
    stop_words_list: Any = _no_tensor()
    embedding_bias: Any = _no_tensor()
    end_id: Any = _no_tensor()
    pad_id: Any = _no_tensor()
    temperature: Any = _no_tensor()
    runtime_top_k: Any = _no_tensor()
    runtime_top_p: Any = _no_tensor()
    len_penalty: Any = _no_tensor()
    early_stopping: Any = _no_tensor()
    repetition_penalty: Any = _no_tensor()
    min_length: Any = _no_tensor()
    beam_search_diversity_rate: Any = _no_tensor()
    presence_penalty: Any = _no_tensor()
    frequency_penalty: Any = _no_tensor()
    no_repeat_ngram_size: Any = _no_tensor()
    random_seed: Any = _no_tensor()
    return_log_probs: Any = _no_tensor()
    return_context_logits: Any = _no_tensor()
    return_generation_logits: Any = _no_tensor()
    prompt_embedding_table: Any = _no_tensor()
    prompt_vocab_size: Any = _no_tensor()
    lora_task_id: Any = _no_tensor()
    lora_weights: Any = _no_tensor()
    lora_config: Any = _no_tensor()

    NAMES: ClassVar[tuple[str, ...]] = names.INPUTS

    @property
    def max_new_tokens(self) -> Any:
        """`request_output_len` under the name of the bindings."""
        return self.request_output_len

    @max_new_tokens.setter
    def max_new_tokens(self, tensor: Any) -> None:
        self.request_output_len = tensor

    def tensors(self) -> dict[str, Any]:
        """The tensors that are set, by name."""
        given = {name: getattr(self, name) for name in self.NAMES}
        return {name: tensor for name, tensor in given.items() if tensor is not None}


# tensor of one value -> field of SamplingConfig
_SAMPLING = {
    names.BEAM_WIDTH: "beam_width",
    names.NUM_RETURN_SEQUENCES: "num_return_sequences",
    names.TEMPERATURE: "temperature",
    names.RUNTIME_TOP_K: "top_k",
    names.RUNTIME_TOP_P: "top_p",
    names.LENGTH_PENALTY: "length_penalty",
    names.EARLY_STOPPING: "early_stopping",
    names.REPETITION_PENALTY: "repetition_penalty",
    names.MIN_LENGTH: "min_tokens",
    names.BEAM_SEARCH_DIVERSITY_RATE: "beam_search_diversity_rate",
    names.PRESENCE_PENALTY: "presence_penalty",
    names.FREQUENCY_PENALTY: "frequency_penalty",
    names.NO_REPEAT_NGRAM_SIZE: "no_repeat_ngram_size",
    names.RANDOM_SEED: "seed",
}


def to_request(given: InferenceRequest) -> Request:
    """The Request with the same meaning. Raises InvalidRequest for a missing or unreadable tensor."""
    for name in (names.INPUT_IDS, names.MAX_NEW_TOKENS):
        if getattr(given, name) is None:
            raise InvalidRequest(f"A value is required for {name}")
    try:
        return _request(given)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # torch and the records raise these, with the value of the tensor in the text
        raise InvalidRequest(f"request {given.request_id} cannot be read: {str(error).splitlines()[0]}") from None


def _request(given: InferenceRequest) -> Request:
    sampling = {field_: _number(given, name) for name, field_ in _SAMPLING.items() if getattr(given, name) is not None}
    draft, table, task = given.draft_input_ids, given.prompt_embedding_table, given.lora_task_id
    return Request(
        given.input_ids.reshape(-1).tolist(),
        _number(given, names.MAX_NEW_TOKENS),
        streaming=given.is_streaming,
        sampling_config=SamplingConfig(**sampling),
        output_config=OutputConfig(
            return_log_probs=_flag(given, names.RETURN_LOG_PROBS),
            return_context_logits=_flag(given, names.RETURN_CONTEXT_LOGITS),
            return_generation_logits=_flag(given, names.RETURN_GENERATION_LOGITS),
        ),
        end_id=None if given.end_id is None else _number(given, names.END_ID),
        pad_id=None if given.pad_id is None else _number(given, names.PAD_ID),
        bad_words=None if given.bad_words_list is None else _words(given, names.BAD_WORDS_LIST),
        stop_words=None if given.stop_words_list is None else _words(given, names.STOP_WORDS_LIST),
        embedding_bias=given.embedding_bias,
        external_draft_tokens_config=(
            None if draft is None else ExternalDraftTokensConfig(draft.reshape(-1).tolist(), given.draft_logits)
        ),
        prompt_tuning_config=None if table is None else PromptTuningConfig(table),
        lora_config=(
            None
            if task is None
            else LoraConfig(_number(given, names.LORA_TASK_ID), given.lora_weights, given.lora_config)
        ),
        logits_post_processor=given.logits_post_processor,
    )


def _number(given: InferenceRequest, name: str) -> Any:
    tensor = getattr(given, name)
    if tensor.numel() != 1:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, one value is needed")
    return tensor.item()


def _flag(given: InferenceRequest, name: str) -> bool:
    return getattr(given, name) is not None and bool(_number(given, name))


def _words(given: InferenceRequest, name: str) -> list[list[int]]:
    """Words from a tensor [2, n] or [1, 2, n]: a row of all tokens, and a row of the ends of words, padded with -1."""
    tensor = getattr(given, name)
    if tensor.ndim not in (2, 3) or tensor.shape[-2] != 2:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, [1, 2, length] is needed")
    tokens, ends = tensor.reshape(2, -1).tolist()
    bounds = [0, *(end for end in ends if end >= 0)]
    if bounds != sorted(bounds) or bounds[-1] > len(tokens):
        raise ValueError(f"{name} holds the ends {bounds[1:]} of words among {len(tokens)} tokens")
    return [tokens[start:end] for start, end in zip(bounds, bounds[1:])]
