"""Model `turbomind`: the wire of LMDeploy's Triton backend of that name (v0.0.2 to v0.5). Token ids in; out come, with every
step, all tokens of the session so far.

A request is a turn of session CORRID. What a request leaves out has TurboMind's defaults: START 1, END 1, STOP 0, CORRID 0. A
request that begins and ends its session (START and END are 1) and names none has one of its own, so that such requests do not
get into each other's way.
"""

from __future__ import annotations

import secrets
from typing import Any

from backend.api import (
    ErrorCode,
    OutputConfig,
    Request,
    SamplingConfig,
    SessionConfig,
    SessionError,
    SessionId,
    SessionStatus,
    session_status,
)
from backend.api.sampling import tensorrt_llm_sampling
from backend.serving.dialect import Dialect, named
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext, required
from backend.serving.tensors import ANY, ONE, Input, ModelTensors, Output, refused, sampling_inputs
from backend.serving.wires.front import Front
from backend.serving.wires.limits import read_prompt
from backend.serving.wires.turbomind_outputs import TurbomindOutput
from backend.serving.wires.word_lists import decode_word_list
from backend.serving.work import StopSession, Work

UINT32_MINUS_ONE = (1 << 32) - 1
OWN_SESSIONS = 1 << 63  # sessions of requests that name none have random numbers from here on

TENSORS = ModelTensors(
    "turbomind",
    inputs=(
        Input("input_ids", "UINT32", ANY, "request", optional=False),
        Input("input_lengths", "UINT32", ONE, "request", optional=False),
        Input("request_output_len", "UINT32", ANY, "request", optional=False),
        Input("step", "INT32", ONE, "session.step"),
        Input("session_len", "UINT32", ONE, "session.session_len"),
        *sampling_inputs("turbomind", integers="UINT32"),
        Input("is_return_log_probs", "BOOL", ONE, "output.return_log_probs"),
        Input("end_id", "UINT32", ONE, "request"),
        Input("bad_words_list", "INT32", (2, -1), "request"),
        Input("stop_words_list", "INT32", (2, -1), "request"),
        Input("START", "INT32", ONE, "session.start"),
        Input("END", "INT32", ONE, "session.end"),
        Input("STOP", "INT32", ONE, "request"),
        Input("CORRID", "UINT64", ONE, "session.id"),
        Input("start_id", "UINT32", ONE, "ignored"),  # only an empty prompt would begin with it, and that is refused
        *refused("beam search", ("beam_width", "UINT32", ONE), neutral=(1,)),
        *refused("beam search", ("beam_search_diversity_rate", "FP32", ONE), neutral=(0.0,)),
        *refused("beam search", ("len_penalty", "FP32", ONE), neutral=(1.0, 0.0)),
        *refused("prompt tuning", ("prompt_learning_task_name_ids", "UINT32", ONE), neutral=(0,)),
        *refused(
            "embeddings as input", ("input_embeddings", "INT8", ANY), ("input_embedding_ranges", "UINT32", (-1, 2))
        ),
    ),
    outputs=(
        Output("output_ids", "UINT32", (-1, -1), "always: history, prompt and output"),
        Output("sequence_length", "UINT32", ANY, "always: how many these are"),
        Output("cum_log_probs", "FP32", ANY, "is_return_log_probs"),
        Output("output_log_probs", "FP32", (-1, -1), "is_return_log_probs"),
    ),
    max_batch_size=1,
    always="decoupled",
    # by this name LMDeploy's client knows the chat template that it writes prompts with: the default model's (ChatML)
    parameters=(("model_name", "qwen-7b"),),
)


def parse(batch: Batch, context: ServingContext, parameters: Parameters) -> list[Work]:
    """One Work. Raises InvalidRequest, Unsupported or SessionError."""
    batch.refuse_what_is_not_built()
    if batch.scalar("STOP", 0):
        return [Work(_stop_session(batch, parameters.namespace), TurbomindOutput([]))]
    limits, max_tokens = context.config.limits, required(batch, "request_output_len", 0)
    _check_length(batch, max_tokens, context.model.max_seq_len)
    prompt = read_prompt(batch, 0, context)
    session = _read_session(batch, max_tokens)
    bad_words = decode_word_list("bad_words_list", batch.matrix("bad_words_list", 0), limits)
    request = Request(
        input_token_ids=prompt,
        max_tokens=max_tokens,
        streaming=True,
        sampling_config=_read_sampling(batch),
        output_config=OutputConfig(**batch.fields("output", 0), return_history=True),
        end_ids=_end_ids(batch, context.model.eos_ids, bad_words),
        stop_words=decode_word_list("stop_words_list", batch.matrix("stop_words_list", 0), limits),
        bad_words=bad_words,
        session=session,
        timeout_s=parameters.timeout_s,
        cache_salt=parameters.namespace,
    )
    return [Work(request, TurbomindOutput(prompt, session))]


def error_text(code: ErrorCode, message: str) -> str:
    """TurboMind's words with the number of its Request::Status: that of a session error, else invalid or fail."""
    wrong = code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)
    status = session_status(message) or (SessionStatus.INVALID if wrong else SessionStatus.FAIL)
    return named(code, f"TurboMind execute failure: {int(status)}: {message}")


def _stop_session(batch: Batch, namespace: str) -> StopSession:
    """Raises SessionError for STOP with START; START that is left out is 0 here."""
    if batch.scalar("START", 0):
        raise SessionError(SessionStatus.INVALID, "START and STOP exclude each other; send one of them")
    end = batch.scalar("END", 0)
    return StopSession(SessionId(batch.scalar("CORRID", 0) or 0), end=end is None or bool(end), namespace=namespace)


def _check_length(batch: Batch, max_tokens: int, max_seq_len: int) -> None:
    """Raise SessionError for a prompt that is too long for the model, whatever its session holds."""
    length = batch.scalar("input_lengths", 0)
    if length is not None and length + min(1, max_tokens) > max_seq_len:
        raise SessionError(
            SessionStatus.TOO_LONG, f"the prompt has {length} tokens, the limit is {max_seq_len - 1}; shorten it"
        )


def _end_ids(batch: Batch, eos_ids: tuple[int, ...], bad_words: list[list[int]]) -> tuple[int, ...]:
    """The request's end_id, which is none if all its bits are set; else the model's end ids. A request that bans one of these, as
    clients do for an output of full length, has no end ids.
    """
    end_id = batch.scalar("end_id", 0)
    if end_id is None:
        return () if any([eos_id] in bad_words for eos_id in eos_ids) else eos_ids
    return () if end_id == UINT32_MINUS_ONE else (end_id,)


def _read_session(batch: Batch, max_tokens: int) -> SessionConfig:
    """Output is cut at `session_len` - 1 tokens, as in TurboMind, so that the turn which ends a full session (one token, no
    output) still has room. 0: no limit.
    """
    fields: dict[str, Any] = batch.fields("session", 0)
    fields["start"] = bool(fields.get("start", 1))
    fields["end"] = bool(fields.get("end", 1))
    if "id" not in fields:
        is_own = fields["start"] and fields["end"]
        fields["id"] = OWN_SESSIONS | secrets.randbits(63) if is_own else 0
    session_len = fields.pop("session_len", 0)
    most = max(1, session_len - min(1, max_tokens))
    return SessionConfig(**fields, session_len=most if session_len else None)


_DECAY = ("top_p_decay", "top_p_min", "top_p_reset_ids")


def _read_sampling(batch: Batch) -> SamplingConfig:
    """With TensorRT-LLM's rule, which TurboMind shares."""
    fields = batch.fields("sampling", 0)
    if fields.get("top_p", 1.0) <= 0.0:
        del fields["top_p"]
    if fields.get("top_p_min") == 0.0:
        del fields["top_p_min"]
    if fields.get("top_p_reset_ids") == UINT32_MINUS_ONE:
        del fields["top_p_reset_ids"]
    if fields.get("top_p_decay", 1.0) in (0.0, 1.0):  # Without a decay the other two mean nothing.
        fields = {name: value for name, value in fields.items() if name not in _DECAY}
    return tensorrt_llm_sampling(**fields)


TURBOMIND = Front(TENSORS, parse, Dialect(error_text))
