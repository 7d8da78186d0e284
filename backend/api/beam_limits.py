"""What a request with beams may ask for; and what asks for beams without there being any."""

from __future__ import annotations

from backend.api.errors import InvalidRequest, Unsupported
from backend.api.request import Request
from backend.api.sampling import SamplingConfig

MAX_ENDS = 64  # each of them makes every row tell `beam_width` candidates more

# field -> the values that leave the model's own distribution, which beams are ranked by, as it is
_NEUTRAL: dict[str, tuple[float | None, ...]] = {
    "temperature": (None, 1.0),
    "top_k": (None, 0, 1),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
}


def check_beams(request: Request, max_beam_width: int) -> None:
    """Raise InvalidRequest or Unsupported for the first field that beams forbid, or that is out of its limits."""
    config = request.sampling_config
    if not 1 <= config.beam_width <= max_beam_width:
        raise InvalidRequest(
            f"beam_width is {config.beam_width}, allowed is 1 to {max_beam_width} (scheduler.max_beam_width, at most "
            f"scheduler.max_batch_size)"
        )
    if config.beam_width_array is not None:
        raise Unsupported("beam_width_array cannot be had in this version; leave it out, and give one beam_width")
    for name, most in (("length_penalty", 50), ("beam_search_diversity_rate", 100)):
        value = getattr(config, name)
        if value is not None and not abs(value) <= most:  # true for NaN too
            raise InvalidRequest(f"{name} is {value}, allowed is -{most} to {most}")
    if config.beam_width > 1:
        _check_search(request, config)


def _check_search(request: Request, config: SamplingConfig) -> None:
    count = config.num_return_sequences
    if count is not None and count > config.beam_width:
        raise InvalidRequest(
            f"num_return_sequences is {count}, more than beam_width {config.beam_width}; ask for at most so many"
        )
    for name, neutral in _NEUTRAL.items():
        if getattr(config, name) not in neutral:
            raise Unsupported(
                f"{name} is {getattr(config, name)}, and beams are not sampled but ranked by the model's own "
                f"probabilities; leave it out, or set beam_width to 1"
            )
    ends = len(set(request.end_ids)) + len(request.stop_words)
    if ends > MAX_ENDS:
        raise InvalidRequest(
            f"the request has {ends} end ids and stop words, the limit with beams is {MAX_ENDS}; leave some out"
        )
    if config.logit_bias:
        raise Unsupported("logit_bias cannot be had with beams in this version; leave it out, or set beam_width to 1")
    output = request.output_config
    if output.return_context_logits or output.return_generation_logits or output.additional_outputs:
        raise Unsupported(
            "logits and additional outputs cannot be had with beams in this version; leave them out, or set beam_width to 1"
        )
    if request.logits_post_processor:
        raise Unsupported(
            "logits_post_processor cannot be had with beams in this version; leave it out, or set beam_width to 1"
        )
    for name, neutral_value in (("top_log_probs", 0), ("prompt_log_probs", None)):
        if getattr(output, name) != neutral_value:
            raise Unsupported(f"{name} cannot be had with beams in this version; leave it out, or set beam_width to 1")
