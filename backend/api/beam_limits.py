"""Checks of requests with beams. Fields which sampling alone heeds are refused beside them (`with_beams` in sampling.py)."""

from __future__ import annotations

from backend.api.errors import InvalidRequest, Unsupported
from backend.api.request import Request
from backend.api.sampling import SAMPLING_FIELDS, SamplingConfig

MAX_ENDS = 64  # each end makes every row return `beam_width` more candidates
_NOT_OF_BEAMS = {"top_log_probs": 0, "prompt_log_probs": None, "prompt_hidden_states": None, "prompt_logits_of": ()}


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
    if config.beam_width > 1:
        _check_search(request, config)


def _check_search(request: Request, config: SamplingConfig) -> None:
    count = config.num_return_sequences
    if count is not None and count > config.beam_width:
        raise InvalidRequest(
            f"num_return_sequences is {count}, more than beam_width {config.beam_width}; ask for at most so many"
        )
    for field in SAMPLING_FIELDS:
        value = getattr(config, field.name)
        if field.with_beams and value is not None and value not in field.with_beams:
            raise Unsupported(
                f"{field.name} is {value}, and beams are not sampled but ranked by the model's own "
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
    for name, neutral_value in _NOT_OF_BEAMS.items():
        if getattr(output, name) != neutral_value:
            raise Unsupported(f"{name} cannot be had with beams in this version; leave it out, or set beam_width to 1")
