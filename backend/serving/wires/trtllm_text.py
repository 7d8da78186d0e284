"""Parses requests of the models ensemble and tensorrt_llm_bls, which take text or chat messages and answer with text.

This module tokenises, the engine works on tokens, and the row's sender detokenises. The stub looks for stop strings in the text,
so the engine streams a row with stop strings even if its client wants one response. Beams are ranked by their ends, so the
engine ends them at the tokens of a stop string; where a beam spells it with other tokens, only its text ends.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from backend.api import InvalidRequest, Request, SessionConfig
from backend.api.images import ImageInput
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext, check_mode
from backend.serving.wires.front import TextFront, TextTools
from backend.serving.wires.image_files import check_encoded, place_inputs
from backend.serving.wires.limits import MAX_TOKEN_BYTES, prompt_ids
from backend.serving.wires.trtllm_fields import (
    echoes_prompt,
    read_output_config,
    read_sampling,
    read_session,
    read_settings,
    read_stop_session,
)
from backend.serving.wires.trtllm_inputs import check_guides, read_embeddings, read_guide, read_lora
from backend.serving.wires.trtllm_outputs import RowSettings, text_output
from backend.serving.wires.trtllm_tensors import BLS as BLS_TENSORS
from backend.serving.wires.trtllm_tensors import ENSEMBLE as ENSEMBLE_TENSORS
from backend.serving.wires.trtllm_tensors import ENSEMBLE_UINT32 as ENSEMBLE_UINT32_TENSORS
from backend.serving.work import Work
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from backend.text.words import words_token_ids

UINT32_MINUS_1 = (1 << 32) - 1  # the end_id -1 as a client with the older types sends it


class _Prompt(NamedTuple):
    text: str
    ids: list[int]
    is_chat: bool
    images: tuple[ImageInput, ...] = ()


def parse_text_requests(batch: Batch, context: ServingContext, parameters: Parameters, tools: TextTools) -> list[Work]:
    """Make one Work for each row. Raises InvalidRequest, Unsupported or SessionError, and then no row runs.

    Tokenising text and rendering chats may take up to triton.text_timeout_s, so this runs on a text thread, after
    `check_text_requests` has passed on the main thread.
    """
    check_text_requests(batch, context)
    return [_parse_row(batch, row, context, parameters, tools) for row in range(batch.num_rows)]


def check_text_requests(batch: Batch, context: ServingContext) -> None:
    """Raise InvalidRequest or Unsupported for errors that show without decoding text, such as a text over its limit."""
    batch.refuse_what_is_not_built()
    check_mode(batch, "stream", context.decoupled)
    limits = context.config.limits
    prompt_bytes = MAX_TOKEN_BYTES * context.model.max_seq_len
    check_guides(batch, context.config.guided.max_bytes)
    check_encoded(batch, "image_url_input", context)
    for row in range(batch.num_rows):
        batch.check_texts("text_input", row, 1, prompt_bytes, "64 for each token of model.max_seq_len")
        batch.check_texts("messages", row, 1, prompt_bytes, "64 for each token of model.max_seq_len")
        for name in ("stop_words", "bad_words"):
            batch.check_texts(name, row, limits.max_words, limits.max_word_bytes, "limits.max_word_bytes")
        batch.check_texts(
            "embedding_bias_words", row, limits.max_logit_bias, limits.max_bias_bytes, "limits.max_bias_bytes"
        )


def _parse_row(batch: Batch, row: int, context: ServingContext, parameters: Parameters, tools: TextTools) -> Work:
    stop_session = read_stop_session(batch, row, parameters.namespace)
    if stop_session is not None:
        batch_index = row if batch.num_rows > 1 else None
        return Work(
            stop_session, text_output(RowSettings(batch_index=batch_index), lambda: TextStream(tools.tokenizer))
        )
    triton = context.config.triton
    session = read_session(batch, row)
    max_tokens = _read_max_tokens(batch, row, session)
    prompt = _read_prompt(batch, row, context, tools, session)
    stops = _read_words(batch, "stop_words", row)
    streaming = bool(batch.scalar("stream", row))
    sampling = read_sampling(batch, row, read_bias(batch, row, tools.tokenizer))
    has_beams = sampling.beam_width > 1
    request = Request(
        input_token_ids=prompt.ids,
        max_tokens=max_tokens,
        streaming=streaming or (bool(stops) and not has_beams),
        sampling_config=sampling,
        output_config=read_output_config(batch, row),
        end_ids=_read_end_ids(batch, row, context, tools.tokenizer),
        stop_words=words_token_ids(tools.tokenizer, stops) if has_beams else [],
        bad_words=words_token_ids(tools.tokenizer, _read_words(batch, "bad_words", row)),
        session=session,
        timeout_s=parameters.timeout_s,
        cache_salt=parameters.namespace,
        guide=read_guide(batch, row),
        images=prompt.images,
        prompt_embeddings=read_embeddings(batch, row, context.config.limits.max_extra_bytes),
        lora=read_lora(batch, row, context),
        max_draft_tokens=batch.scalar("num_draft_tokens", row) or None,
    )
    # The template wrote the prompt of a chat, so it is echoed only on request.
    echo = not streaming and echoes_prompt(batch, row, default_exclude=triton.exclude_input_in_output or prompt.is_chat)
    output = text_output(
        read_settings(batch, row, context, request, streaming),
        lambda: TextStream(tools.tokenizer, prompt.ids, stops, include_stop=True),
        prefix=prompt.text if echo else "",
        accumulate=triton.accumulate_tokens,
        every_token=triton.one_response_per_token,
    )
    return Work(request, output)


def _read_max_tokens(batch: Batch, row: int, session: SessionConfig | None) -> int:
    """The row's max_tokens, which is at least 1. Raises InvalidRequest.

    A session's turn may ask for 0 tokens, to have its history computed or only to end the session.
    """
    max_tokens: int | None = batch.scalar("max_tokens", row)
    if max_tokens is None:
        raise InvalidRequest("A value is required for max_tokens")
    if max_tokens < (1 if session is None else 0):
        raise InvalidRequest(f"max_tokens must be a single value > 0, got {max_tokens}")
    return max_tokens


def _read_prompt(
    batch: Batch, row: int, context: ServingContext, tools: TextTools, session: SessionConfig | None
) -> _Prompt:
    text = batch.scalar("text_input", row)
    if batch.has("messages"):
        if text:
            raise InvalidRequest(
                "text_input and messages are both given; send messages with an empty text_input, or text_input alone"
            )
        text = tools.template_for(context.model).render(_read_messages(batch, row))
        ids = prompt_ids(
            tools.tokenizer, text, context, add_special_tokens=False, room=0
        )  # the template writes its own
        prompt = _Prompt(text, ids, is_chat=True)
    else:
        if not text:
            raise InvalidRequest("text_input is empty; give at least one character, or messages")
        starts = session is None or session.start or session.full_history  # a later turn continues the text
        prompt = _Prompt(text, prompt_ids(tools.tokenizer, text, context, starts, room=0), is_chat=False)
    if not prompt.ids:
        raise InvalidRequest("the prompt holds no token; give more text")
    placed = place_inputs(batch, row, prompt.ids, context, tools, urls="image_url_input", pixels="image_bytes_input")
    return prompt._replace(ids=placed.ids, images=placed.images)


def _read_messages(batch: Batch, row: int) -> list[dict[str, Any]]:
    try:
        messages = json.loads(batch.scalar("messages", row))
    except (json.JSONDecodeError, RecursionError):
        raise InvalidRequest(
            "messages is not JSON; send a JSON list of objects, each with a role and a content"
        ) from None
    except ValueError:
        raise InvalidRequest("messages holds an integer of more than 4300 digits; send it as a string") from None
    if not isinstance(messages, list):
        raise InvalidRequest("messages is no JSON list; send a list of objects, each with a role and a content")
    return messages


def _read_words(batch: Batch, name: str, row: int) -> list[str]:
    return [word for word in batch.texts(name, row) if word]  # empty texts pad a batch


def _read_end_ids(batch: Batch, row: int, context: ServingContext, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The request's end_id (-1: none). Without it all end ids of the model."""
    end_id = batch.scalar("end_id", row)
    if end_id is not None:
        return () if end_id in (-1, UINT32_MINUS_1) else (end_id,)
    return tuple(dict.fromkeys([*context.model.eos_ids, *tokenizer.eos_ids]))


def read_bias(
    batch: Batch,
    row: int,
    tokenizer: Tokenizer,
    words_name: str = "embedding_bias_words",
    weights_name: str = "embedding_bias_weights",
) -> dict[int, float]:
    """The bias of each token id. A word's weight is added to all its token ids, special tokens included, as in TensorRT-LLM.

    Raises InvalidRequest when the numbers of weights and words differ.
    """
    words = batch.texts(words_name, row)
    weights = batch.vector(weights_name, row)
    num_weights = 0 if weights is None else weights.size
    if len(words) != num_weights:
        raise InvalidRequest(f"{words_name} has {len(words)} entries and {weights_name} {num_weights}; send as many")
    bias: dict[int, float] = {}
    for word, weight in zip(words, [] if weights is None else weights.tolist()):
        for token_id in tokenizer.encode(word) if word else ():
            bias[token_id] = bias.get(token_id, 0.0) + weight
    return bias


ENSEMBLE = TextFront(ENSEMBLE_TENSORS, check_text_requests, parse_text_requests)
ENSEMBLE_UINT32 = TextFront(ENSEMBLE_UINT32_TENSORS, check_text_requests, parse_text_requests)
BLS = TextFront(BLS_TENSORS, check_text_requests, parse_text_requests)
