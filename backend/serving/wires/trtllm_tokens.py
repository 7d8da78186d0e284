"""Parses requests of the model tensorrt_llm, which takes token ids and answers with token ids."""

from __future__ import annotations

import numpy as np

from backend.api import InvalidRequest, Request
from backend.serving.intake.batch import Batch
from backend.serving.intake.phases import read_phase
from backend.serving.intake.requests import Parameters, ServingContext, check_mode, required
from backend.serving.intake.submit import check_resumed
from backend.serving.wires.front import Front
from backend.serving.wires.limits import read_prompt
from backend.serving.wires.trtllm_fields import (
    echoes_prompt,
    read_output_config,
    read_sampling,
    read_session,
    read_settings,
    read_stop_session,
)
from backend.serving.wires.trtllm_inputs import (
    read_delivered,
    read_embeddings,
    read_guide,
    read_lookahead,
    read_lora,
    read_retention,
)
from backend.serving.wires.trtllm_outputs import RowSettings, token_output
from backend.serving.wires.trtllm_tensors import TOKEN_MODEL
from backend.serving.wires.word_lists import decode_word_list
from backend.serving.work import Work


def parse_token_requests(batch: Batch, context: ServingContext, parameters: Parameters) -> list[Work]:
    """Make one Work for each row. Raises InvalidRequest, Unsupported or SessionError, and then no row runs."""
    batch.refuse_what_is_not_built()
    check_mode(batch, "streaming", context.decoupled)
    return [_parse_row(batch, row, context, parameters) for row in range(batch.num_rows)]


def _parse_row(batch: Batch, row: int, context: ServingContext, parameters: Parameters) -> Work:
    stop_session = read_stop_session(batch, row, parameters.namespace)
    if stop_session is not None:
        batch_index = row if batch.num_rows > 1 else None
        return Work(stop_session, token_output(RowSettings(batch_index=batch_index), []))
    limits = context.config.limits
    embeddings = read_embeddings(batch, row, limits.max_extra_bytes)
    num_virtual = 0 if embeddings is None else embeddings.shape[0]
    prompt = read_prompt(batch, row, context, num_virtual)
    streaming = bool(batch.scalar("streaming", row))
    end_id, drafts = batch.scalar("end_id", row), batch.vector("draft_input_ids", row)
    request = Request(
        input_token_ids=prompt,
        max_tokens=required(batch, "request_output_len", row),
        streaming=streaming,
        sampling_config=read_sampling(
            batch, row, _read_bias(batch, row, context.model.vocab_size, limits.max_logit_bias)
        ),
        output_config=read_output_config(batch, row),
        end_ids=() if end_id in (None, -1) else (end_id,),
        stop_words=decode_word_list("stop_words_list", batch.matrix("stop_words_list", row), limits),
        bad_words=decode_word_list("bad_words_list", batch.matrix("bad_words_list", row), limits),
        session=read_session(batch, row),
        timeout_s=parameters.timeout_s,
        cache_salt=parameters.namespace,
        retention=read_retention(batch, row),
        prompt_embeddings=embeddings,
        guide=read_guide(batch, row),
        lora=read_lora(batch, row, context),
        draft_tokens=[] if drafts is None else drafts.tolist(),
        ends_after_drafts=drafts is not None and drafts.size > 0,
        max_draft_tokens=read_lookahead(batch, row),
        **read_phase(batch, row, parameters.request_type),
    )
    echo = not streaming and echoes_prompt(batch, row, context.config.triton.exclude_input_in_output)
    settings = read_settings(batch, row, context, request, streaming)
    come = read_delivered(batch, row, request.output_config.return_log_probs)
    check_resumed(request, come.delivered, context.model, has_seed=True, streaming=streaming)  # without one it is 0
    settings = settings._replace(delivered=come.delivered, delivered_log_probs=come.log_probs)
    return Work(request, token_output(settings, prompt if echo else []), come.delivered)


def _read_bias(batch: Batch, row: int, vocab_size: int, max_entries: int) -> dict[int, float]:
    """The entries of the row's dense bias that are not zero, by token id. Raises InvalidRequest for too many entries."""
    bias = batch.vector("embedding_bias", row)
    if bias is None or bias.size == 0:
        return {}
    if bias.size != vocab_size:
        raise InvalidRequest(
            f"embedding bias shape is not as expected: {bias.size} values, the vocabulary has {vocab_size}"
        )
    where = np.flatnonzero(bias)
    if where.size > max_entries:
        raise InvalidRequest(
            f"embedding_bias has {where.size} entries that are not zero, the limit is {max_entries}; send fewer"
        )
    return dict(zip(where.tolist(), bias[where].tolist()))


TENSORRT_LLM = Front(TOKEN_MODEL, parse_token_requests)
