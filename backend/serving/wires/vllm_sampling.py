"""The sampling parameters of model `vllm`: vLLM's SamplingParams, as a JSON object whose values may be strings."""

from __future__ import annotations

from typing import Any

import msgspec

from backend.api import InvalidRequest, Unsupported
from backend.api.config.schema import LimitsConfig
from backend.api.guide import Guide
from backend.serving.intake.requests import Parameters
from backend.serving.wires.limits import check_stops
from backend.serving.wires.named_sampling import NamedSampling, check_choices, from_json, read_json
from backend.serving.wires.vllm_guides import read_guide

GUIDES = ("structured_outputs", "guided_decoding")
TENSOR = "sampling_parameters"
RANDOM_SEED = -1
MAX_CHARS = 256  # characters of a name or value in an error

# field -> the values that do not ask for a feature, and the feature, which this version lacks
_MISSING: dict[str, tuple[tuple[Any, ...], str]] = {
    "prompt_logprobs": ((None,), "log-probabilities of the prompt"),
    "detokenize": ((True,), "output without text (use the model tensorrt_llm)"),
    "allowed_token_ids": ((None, []), "a list of allowed tokens"),
}


class VllmSampling(NamedSampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's names and defaults. The tokenizers served here put no spaces between special tokens in any case."""

    max_tokens: int | None = 16
    prompt_logprobs: int | None = None
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None  # only that many last tokens of the prompt are used
    allowed_token_ids: list[int] | None = None
    guided_decoding: Any = None
    structured_outputs: Any = None
    lora_name: str | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def guide(self) -> Guide | None:
        """The form of the output: `structured_outputs`, or `guided_decoding`, its older name. Raises InvalidRequest."""
        given = {name: value for name in GUIDES if (value := getattr(self, name)) not in (None, "", {})}
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} mean the same; send one of them")
        return next((read_guide(name, value) for name, value in given.items()), None)


def read_sampling(tensor: str | None, parameters: Parameters, limits: LimitsConfig, streaming: bool) -> VllmSampling:
    """The sampling parameters: from the tensor `sampling_parameters`, or without it from the parameters of the request.

    Numbers and bools may be strings. Raises InvalidRequest for a wrong value, Unsupported for what this version lacks.
    """
    source = TENSOR if tensor else "the request's parameters"
    given: dict[str, Any] = read_json(TENSOR, tensor, dict) if tensor else dict(parameters.others)
    for name in ("logprobs", "prompt_logprobs"):
        if isinstance(given.get(name), bool):  # OpenAI's name, which Triton's OpenAI frontend passes on
            given[name] = 1 if given[name] else None
    asked: VllmSampling = from_json(source, given, VllmSampling, strict=False)
    _refuse_what_is_missing(asked)
    _check(asked, limits)
    asked.guide()
    check_choices(asked, streaming)
    return msgspec.structs.replace(asked, seed=None) if asked.seed == RANDOM_SEED else asked


def _refuse_what_is_missing(asked: VllmSampling) -> None:
    for name, (neutral, feature) in _MISSING.items():
        value = getattr(asked, name)
        if value not in neutral:
            shown = str(value)[:MAX_CHARS]
            raise Unsupported(
                f"{name} is {shown}, which asks for {feature}; this version does not have it, leave it out"
            )


def _check(asked: VllmSampling, limits: LimitsConfig) -> None:
    """Raise InvalidRequest for errors that backend.api.limits does not find, or reports under another name."""
    check_stops("stop", asked.stops, limits)
    check_stops("bad_words", asked.bad_words or [], limits)
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {asked.max_tokens}, at least 1 is needed; send null for as many as fit")
    if asked.max_tokens is not None and asked.min_tokens > asked.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {asked.min_tokens}, the limit is max_tokens, which is {asked.max_tokens}; raise max_tokens"
        )
    if asked.truncate_prompt_tokens is not None and asked.truncate_prompt_tokens < 1:
        raise InvalidRequest(f"truncate_prompt_tokens is {asked.truncate_prompt_tokens}, at least 1 is needed")
    most = limits.max_top_log_probs
    if asked.logprobs is not None and not 0 <= asked.logprobs <= most:
        raise InvalidRequest(f"logprobs is {asked.logprobs}, allowed is 0 to {most} (limits.max_top_log_probs)")
