"""Checks everything that a request asks for against limits, before anything is allocated for it.

The engine checks the rest, which depends on its state (session history, size of the KV pool).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from backend.api.beam_limits import check_beams
from backend.api.config.ranges import MAX_SECONDS
from backend.api.config.schema import LimitsConfig
from backend.api.draft_limits import check_drafts
from backend.api.errors import InvalidRequest, SessionError, SessionStatus, Unsupported
from backend.api.guide import NOT_SET_UP, check_guide, check_thinking
from backend.api.image_limits import NO_IMAGES, ImageLimits, check_images
from backend.api.lora import check_lora
from backend.api.output_limits import (
    check_needs_no_head,
    check_outputs,
    check_post_processor,
    check_prompt_log_probs,
    check_prompt_outputs,
)
from backend.api.prompt_limits import check_prompt_inputs, num_virtual_ids
from backend.api.request import Request, RetentionConfig, SessionConfig
from backend.api.sampling import SAMPLING_FIELDS, SamplingConfig

UINT64 = 1 << 64
MAX_END_IDS = 256  # each sampled token is compared with them
MAX_RETENTION_RANGES = 256  # each block of the prompt is looked up in them
SPELLINGS = 4  # a bad word given as text becomes up to four token lists (backend.text.words)


class RequestLimits(Struct, frozen=True):
    """The caps of one engine: those of its model, and the configured ones."""

    vocab_size: int
    max_seq_len: int
    caps: LimitsConfig = LimitsConfig()
    takes_extra_inputs: bool = False
    max_beam_width: int = 1
    context_logits: bool = False
    generation_logits: bool = False
    additional_outputs: tuple[str, ...] = ()
    post_processors: tuple[str, ...] = ()
    is_static: bool = False
    prompt_embedding_width: int = 0  # 0: no prompt_embeddings and no position_ids are taken
    guide_refusal: str = NOT_SET_UP  # why requests with a guide are refused; '' = they are not
    max_guide_bytes: int = 65_536
    takes_adapters: bool = False
    takes_drafts: bool = False
    guesses: bool = False
    has_head: bool = True  # False if the model makes hidden states only
    marked_outputs: tuple[str, ...] = ()  # the tensors that the model can give besides tokens
    reads_whole_texts: bool = False  # True if each token attends to all of its text; then there is no head
    images: ImageLimits = NO_IMAGES


def check_request(request: Request, limits: RequestLimits) -> None:
    """Raise InvalidRequest (or Unsupported, SessionError) for the first field that is out of its limits."""
    prompt = request.input_token_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty; give at least 1 token")
    if len(prompt) >= limits.max_seq_len + (request.max_tokens == 0):
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, the limit is {limits.max_seq_len - (request.max_tokens > 0)} "
            f"(the model's own, or model.max_seq_len); shorten it"
        )
    check_prompt_inputs(request, limits.prompt_embedding_width, limits.max_seq_len, limits.caps.max_extra_bytes)
    check_images(request, limits.images)
    check_ids("input token", prompt, limits.vocab_size + num_virtual_ids(request))
    _check_range("max_tokens", request.max_tokens, 0, (1 << 31) - 1)
    if len(request.end_ids) > MAX_END_IDS:
        raise InvalidRequest(
            f"the request has {len(request.end_ids)} end ids, the limit is {MAX_END_IDS}; leave some out"
        )
    check_ids("end id", request.end_ids, limits.vocab_size)
    check_ids("draft token", request.draft_tokens, limits.vocab_size)
    check_drafts(request, limits.takes_drafts, limits.max_seq_len, limits.guesses)
    _check_words("stop word", request.stop_words, limits.caps.max_words, limits)
    _check_words("bad word", request.bad_words, SPELLINGS * limits.caps.max_words, limits)
    _check_sampling(request.sampling_config, limits)
    check_beams(request, limits.max_beam_width)
    check_outputs(
        request.output_config, limits.context_logits, limits.generation_logits, list(limits.additional_outputs)
    )
    _check_form(request, limits)
    check_post_processor(request, limits.post_processors, limits.is_static)
    _check_range("top_log_probs", request.output_config.top_log_probs, 0, limits.caps.max_top_log_probs)
    check_prompt_log_probs(request, limits.caps.max_top_log_probs)
    check_prompt_outputs(request.output_config, limits.vocab_size, limits.marked_outputs)
    if not limits.has_head:
        check_needs_no_head(request, limits.reads_whole_texts)
    if request.client_id is not None:
        _check_range("client_id", request.client_id, 0, UINT64 - 1)
    if request.timeout_s is not None and not 0 < request.timeout_s <= limits.caps.max_timeout_s:
        raise InvalidRequest(
            f"timeout is {request.timeout_s} s, allowed is more than 0 to {limits.caps.max_timeout_s:g} s"
        )
    if len(request.cache_salt) > 256:
        raise InvalidRequest(f"cache_salt has {len(request.cache_salt)} characters, the limit is 256")
    _check_range("priority", request.priority, 0, 1)
    if request.retention is not None:
        _check_retention(request.retention)
    if request.lora is not None:
        check_lora(request.lora, limits.takes_adapters)
    if request.extra_inputs:
        if request.session is not None:
            raise Unsupported("a session takes tokens only in this version; send extra inputs without a session")
        _check_extra_inputs(request.extra_inputs, limits)
    if request.session is not None:
        _check_session(request.session)
        _check_returns_one(request.sampling_config)


def _check_form(request: Request, limits: RequestLimits) -> None:
    if request.guide is not None:
        min_tokens = request.sampling_config.min_tokens
        check_guide(request.guide, limits.guide_refusal, limits.max_guide_bytes, min_tokens)
    if request.thinking is not None:
        check_thinking(request.thinking, limits.vocab_size)


def _check_range(name: str, value: float, least: float, greatest: float, excludes_least: bool = False) -> None:
    if not least <= value <= greatest or (excludes_least and value == least):  # true for NaN too
        above = "more than " if excludes_least else ""
        raise InvalidRequest(f"{name} is {value}, allowed is {above}{least} to {greatest}")


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest for the first token id that the vocabulary does not have."""
    if ids and not (0 <= min(ids) and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"{name} {wrong} is outside the vocabulary; allowed is 0 to {vocab_size - 1}")


def check_outputs_so_far(outputs: Sequence[Sequence[int]], request: Request, vocab_size: int, max_seq_len: int) -> None:
    """Raise InvalidRequest for output token ids, one list for each sequence, that cannot have come of a checked request."""
    count = request.sampling_config.num_return_sequences or 1
    if len(outputs) != count:
        raise InvalidRequest(f"resume has {len(outputs)} entries, expected is one for each of the {count} sequences")
    most = min(request.max_tokens, max_seq_len - len(request.input_token_ids))
    for ids in outputs:
        if len(ids) > most:
            raise InvalidRequest(
                f"resume has {len(ids)} output tokens of a sequence, and the request allows {most}; send the request as it was, "
                f"with the tokens that came of it"
            )
        check_ids("resume: output token", ids, vocab_size)


def _check_words(name: str, words: list[list[int]], max_words: int, limits: RequestLimits) -> None:
    if len(words) > max_words:
        raise InvalidRequest(f"the request has {len(words)} {name}s, the limit is {max_words} (limits.max_words)")
    for word in words:
        if not 0 < len(word) <= limits.caps.max_word_tokens:
            raise InvalidRequest(f"a {name} has {len(word)} tokens, allowed is 1 to {limits.caps.max_word_tokens}")
        check_ids(f"{name} token", word, limits.vocab_size)


def _check_sampling(config: SamplingConfig, limits: RequestLimits) -> None:
    if config.num_return_sequences is not None:
        check_num_sequences(config.num_return_sequences, limits.caps.max_queue_size)
    for field in SAMPLING_FIELDS:
        value = getattr(config, field.name)
        if field.least is not None and value is not None:
            greatest = limits.vocab_size - 1 if field.greatest is None else field.greatest
            _check_range(field.name, value, field.least, greatest, field.excludes_zero)
    if config.logit_bias:
        if len(config.logit_bias) > limits.caps.max_logit_bias:
            raise InvalidRequest(
                f"logit_bias has {len(config.logit_bias)} entries, the limit is {limits.caps.max_logit_bias}"
            )
        check_ids("logit_bias token", tuple(config.logit_bias), limits.vocab_size)
        if not all(math.isfinite(value) for value in config.logit_bias.values()):
            raise InvalidRequest("logit_bias holds a value that is not finite; use -100 to 100")


def _check_returns_one(config: SamplingConfig) -> None:
    for name, value in (("num_return_sequences", config.num_return_sequences), ("beam_width", config.beam_width)):
        if value not in (None, 1):
            raise Unsupported(f"{name} is {value}, a session's turn has 1; send the request without a session")


def check_num_sequences(count: int, most: int) -> None:
    """Raise InvalidRequest for a `num_return_sequences` out of its limits."""
    if not 1 <= count <= most:
        raise InvalidRequest(
            f"num_return_sequences is {count}, allowed is 1 to {most} (limits.max_queue_size); send several requests"
        )


def _check_session(session: SessionConfig) -> None:
    if not 0 <= session.id < UINT64:
        raise SessionError(SessionStatus.INVALID, f"session id {session.id} is no unsigned 64-bit number")
    if session.step is not None and session.step < 0:
        raise SessionError(SessionStatus.INVALID, f"step is {session.step}, it counts tokens from 0")
    if session.session_len is not None and session.session_len < 1:
        raise SessionError(SessionStatus.INVALID, f"session_len is {session.session_len}, at least 1 is needed")


def _check_retention(retention: RetentionConfig) -> None:
    if len(retention.token_ranges) > MAX_RETENTION_RANGES:
        raise InvalidRequest(
            f"the request has {len(retention.token_ranges)} retention ranges, the limit is {MAX_RETENTION_RANGES}; join some"
        )
    end: int | None = 0
    for span in retention.token_ranges:
        if end is None or span.token_start < end or (span.token_end is not None and span.token_end <= span.token_start):
            raise InvalidRequest(
                f"retention range {span.token_start} to {span.token_end} is empty, or begins before the end of the one "
                f"ahead of it ({end}); give ranges in order, the last one may be open"
            )
        end = span.token_end
        _check_range("retention priority", span.priority, 0, 100)
        _check_duration(span.duration_s)
    _check_range("retention decode_priority", retention.decode_priority, 0, 100)
    _check_duration(retention.decode_duration_s)


def _check_duration(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequest(f"retention duration is {seconds} s, allowed is more than 0 to {MAX_SECONDS:g} s")


def _check_extra_inputs(inputs: dict[str, bytes], limits: RequestLimits) -> None:
    if not limits.takes_extra_inputs:
        raise Unsupported(
            f"the model takes tokens only, the request holds {', '.join(sorted(inputs)[:4])}; leave it out"
        )
    num_bytes = sum(map(len, inputs.values()))
    if num_bytes > limits.caps.max_extra_bytes:
        raise InvalidRequest(
            f"the extra inputs have {num_bytes} bytes, the limit is {limits.caps.max_extra_bytes} (limits.max_extra_bytes)"
        )
