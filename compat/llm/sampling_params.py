"""SamplingParams: the parameters of one generation, with the names, defaults and errors of TensorRT-LLM's LLM API."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any

from compat.llm.errors import ParameterError

N_GREEDY = "TLLM_ALLOW_N_GREEDY_DECODING"


@dataclass(kw_only=True)
class GuidedDecodingParams:
    """The form of the output. At most one field may be given."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None
    choice: list[str] | None = None  # the output is one of these texts

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name)]
        if len(given) > 1:
            raise ParameterError(f"Only one guide can be used for a request, but got {len(given)}: {', '.join(given)}")


@dataclass(frozen=True)
class AdditionalModelOutput:
    """A tensor that the model offers as an output, by name. `gather_context`: also for the tokens of the prompt."""

    name: str
    gather_context: bool = False


@dataclass(kw_only=True)
class SamplingParams:
    """Keyword arguments only; TypeError for an unknown one. None means the default of the model or of the engine.

    Decoding is greedy unless beam search, `temperature`, `top_k`, `top_p` or `min_p` asks for something else. `best_of`
    sequences are sampled, and the `n` of them with the greatest log-probability are returned; with beam search it is the
    number of beams. With `max_tokens` None the context of the model is the limit.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None  # one number for each token of the vocabulary: a list, a numpy array or a torch tensor
    logits_processor: Any = None  # a LogitsProcessor, another callable of its form, or a list of them
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[AdditionalModelOutput] | None = None
    lookahead_config: Any = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __new__(cls, **given: Any) -> SamplingParams:
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise TypeError(f"SamplingParams() got an unexpected keyword argument {name!r}; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raises ParameterError, which is a ValueError, for values that contradict each other."""
        for name in ("n", "best_of", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            _check_whole(name, getattr(self, name), may_be_none=name != "n")
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.best_of is None:
            self.best_of = self.n
        # True is a common way to ask for the log-probability of one alternative.
        self.logprobs = None if self.logprobs is None or self.logprobs is False else int(self.logprobs)
        self.prompt_logprobs = (
            None if self.prompt_logprobs is None or self.prompt_logprobs is False else int(self.prompt_logprobs)
        )
        self._check()

    @property
    def num_sequences(self) -> int:
        """How many sequences the engine makes of a prompt, beams included."""
        assert self.best_of is not None, "set when it was made"
        return self.best_of

    @property
    def is_greedy(self) -> bool:
        asked = (self.temperature, self.top_k, self.top_p, self.min_p)
        implied = all(value is None for value in asked) or self.top_k == 1 or self.top_p == 0 or self.temperature == 0
        return implied and not self.use_beam_search

    def stops(self) -> list[str]:
        return _texts("stop", self.stop)

    def bads(self) -> list[str]:
        return _texts("bad", self.bad)

    def _check(self) -> None:
        if self.n < 1:
            raise ParameterError(f"n is {self.n}, at least 1 is needed")
        if self.num_sequences < self.n:
            raise ParameterError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.num_sequences > 1 and self.is_greedy and os.environ.get(N_GREEDY, "") in ("", "0"):
            raise ParameterError(
                f"Greedy decoding in the LLM API does not allow multiple returns. Please set to best_of=1, got "
                f"best_of={self.best_of}. Please set to best_of=1 or set an environment variable {N_GREEDY}=1 to allow "
                f"best_of > 1 under the greedy decoding."
            )
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ParameterError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
        for name in ("max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ParameterError(f"{name} is {value}, at least 0 is needed")
        self.stops()
        self.bads()
        outputs = self.additional_model_outputs
        if not isinstance(outputs, (list, tuple, NoneType)) or not all(
            isinstance(each, AdditionalModelOutput) for each in outputs or ()
        ):
            raise ParameterError(
                "additional_model_outputs holds something else than AdditionalModelOutput; give a list of them"
            )


def _check_whole(name: str, value: object, may_be_none: bool) -> None:
    """Raise ParameterError unless the value is a whole number that fits 64 bits."""
    if value is None and may_be_none:
        return
    if not isinstance(value, int):
        raise ParameterError(f"{name} is {str(value)[:100]!r}, a whole number is needed")
    if value.bit_length() > 63:
        raise ParameterError(f"{name} has {value.bit_length()} bits, the limit is 63; give a smaller number")


def _texts(name: str, value: str | Sequence[str] | None) -> list[str]:
    """A word or a list of words as a list. Raises ParameterError for anything else, and for an empty word."""
    if value is None:
        return []
    if not isinstance(value, (str, list, tuple)):
        raise ParameterError(f"{name} is a {type(value).__name__}, a text or a list of texts is needed")
    words = [value] if isinstance(value, str) else list(value)
    for word in words:
        if not isinstance(word, str):
            raise ParameterError(
                f"{name} holds a {type(word).__name__}, text is needed; token ids go to {name}_token_ids"
            )
        if not word:
            raise ParameterError(f"{name} holds an empty text, at least one character is needed; leave it out")
    return words
