"""Handles unknown request parameters.

Over HTTP `generate` Triton turns each JSON key that is no input of the model into a request parameter, so a mistyped name or one
of another API arrives here. Names that are known to mean something are refused with the right input's name, because the
request would otherwise run without what it asks for. All others are warned about once, or refused with
`triton.strict_parameters`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from typing import Any

from backend.api import InvalidRequest
from backend.api.sampling import SAMPLING_FIELDS
from backend.serving.tensors import ModelTensors

log = logging.getLogger("everbatch.serving")
MAX_WARNINGS = 64  # names that are warned about by one model
MAX_SHOWN = 64  # characters of a name that are shown

# Names of one thing in the APIs of TensorRT-LLM, vLLM, TurboMind, OpenAI, Hugging Face and others.
_SAME = (
    *(f"{field.name} {field.other_names}" for field in SAMPLING_FIELDS if field.other_names is not None),
    "max_tokens request_output_len max_new_tokens max_completion_tokens max_output_tokens max_length n_predict",
    "stop_words stop_words_list stop stop_sequences stop_strings stop_str",
    "bad_words bad_words_list bad_words_ids",
    "truncate_prompt_tokens truncate_input_tokens",
    "stream streaming",
    "text_input prompt query inputs QUERY",
    "input_ids prompt_token_ids INPUT_ID",
    "messages",
    "end_id eos_token_id stop_token_ids ignore_eos",
    "pad_id pad_token_id",
    "return_log_probs logprobs",
    "top_log_probs top_logprobs",
    "exclude_input_in_output echo return_full_text",
    "guided_decoding_guide guide response_format json_schema guided_json guided_regex guided_choice guided_grammar "
    "structured_outputs",
    "skip_special_tokens",
    "lora_name lora lora_request adapter_id lora_task_id lora_id",
    "prompt_adapter_name prompt_adapter_request",
    "sampling_parameters",
)
_GROUP = {name: group.split() for group in _SAME for name in group.split()}
_CHANGES_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("n", "best_of", "num_beams", "num_return_sequences", "beam_width"), 1),
    **dict.fromkeys(("use_beam_search", "early_stopping"), False),
}
_JSON_INPUTS = ("sampling_parameters", "request")  # inputs that hold a JSON object with parameters
_PREFIX = "sampling_param_"  # prefix of input names in TensorRT-LLM's newer API
_NO_MEANING = ("id",)  # generate takes the request id from it, and passes it on


class FreeParameters:
    """The parameters of one model. Used by the main thread only."""

    def __init__(self, tensors: ModelTensors, strict: bool) -> None:
        self._inputs = {spec.name: spec.dtype for spec in tensors.inputs}
        self._strict = strict
        self._warned: set[str] = set()

    def check(self, others: Mapping[str, Any]) -> None:
        """Raise InvalidRequest for the first parameter that must not be passed over."""
        for name, value in others.items():
            if name in _NO_MEANING or _changes_nothing(name, value):
                continue
            if name in self._inputs or name in _GROUP:
                raise InvalidRequest(
                    f"{name} came as a request parameter, which this model does not read; {self._remedy(name)}"
                )
            if self._strict:
                raise InvalidRequest(
                    f"{_shown(name)} is no input of this model and no known request parameter (triton.strict_parameters)"
                    f"{did_you_mean(name, self._inputs)}; leave it out"
                )
            self._warn(name)

    def _remedy(self, name: str) -> str:
        if self._is_input(name):
            return f"send it as the input {name} ({self._inputs[name]})"
        candidates = [other for same in _GROUP.get(name, []) for other in (same, _PREFIX + same)]
        found = next((other for other in candidates if self._is_input(other)), None)
        if found is not None:
            return f"here the input is called {found} ({self._inputs[found]})"
        holder = next((other for other in _JSON_INPUTS if self._inputs.get(other) == "STRING"), None)
        if holder is not None:
            return f"put it into the JSON of the input {holder}"
        return "this model has nothing of the kind, leave it out"

    def _is_input(self, name: str) -> bool:
        """A BOOL called `stop` is not meant: it ends another request."""
        return name in self._inputs and not (name == "stop" and self._inputs[name] == "BOOL")

    def _warn(self, name: str) -> None:
        shown = _shown(name)
        if shown in self._warned or len(self._warned) > MAX_WARNINGS:
            return
        self._warned.add(shown)
        if len(self._warned) > MAX_WARNINGS:
            log.warning("more than %d unknown request parameters; further ones are not named", MAX_WARNINGS)
            return
        log.warning("request parameter %s is not known and has no effect%s", shown, did_you_mean(name, self._inputs))


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown name: the known name of the same thing, or the one spelled most alike; empty
    without either.
    """
    same = [other for other in _GROUP.get(name, []) if other in known]
    near = same or difflib.get_close_matches(name[:MAX_SHOWN], known, n=1)
    return f", did you mean {near[0]}" if near else ""


def _changes_nothing(name: str, value: Any) -> bool:
    return value is None or (name in _CHANGES_NOTHING and value == _CHANGES_NOTHING[name])


def _shown(name: str) -> str:
    return ascii(name[:MAX_SHOWN])
