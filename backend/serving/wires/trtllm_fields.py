"""Reads the inputs that the models of the TensorRT-LLM wire share: sessions, sampling and flags."""

from __future__ import annotations

from backend.api import (
    InvalidRequest,
    OutputConfig,
    Request,
    SamplingConfig,
    SessionConfig,
    SessionError,
    SessionId,
    SessionStatus,
)
from backend.api.limits import check_num_sequences
from backend.api.sampling import tensorrt_llm_sampling, without_unset
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import ServingContext
from backend.serving.wires.trtllm_outputs import RowSettings
from backend.serving.work import StopSession


def read_stop_session(batch: Batch, row: int, namespace: str) -> StopSession | None:
    """The row's STOP request, or None for another request. Raises SessionError for STOP with START or without CORRID."""
    if not batch.scalar("STOP", row):
        return None
    session_id = batch.scalar("CORRID", row)
    if session_id is None:
        raise SessionError(SessionStatus.INVALID, "STOP needs the session's CORRID")
    if batch.scalar("START", row):
        raise SessionError(SessionStatus.INVALID, "START and STOP exclude each other; send one of them")
    return StopSession(SessionId(session_id), end=bool(batch.scalar("END", row)), namespace=namespace)


def read_session(batch: Batch, row: int) -> SessionConfig | None:
    """The row's session, or None without CORRID. START and END default to 1, as in TurboMind.

    Raises SessionError when other inputs of a session come without CORRID.
    """
    fields = batch.fields("session", row)
    if "id" not in fields:
        if fields:
            raise SessionError(SessionStatus.INVALID, f"{', '.join(sorted(fields))} of a session needs its CORRID")
        return None
    fields["start"] = bool(fields.get("start", 1))
    fields["end"] = bool(fields.get("end", 1))
    if fields.get("session_len") == 0:  # TurboMind's clients send 0 for no limit.
        del fields["session_len"]
    return SessionConfig(**fields)


def read_sampling(batch: Batch, row: int, logit_bias: dict[int, float]) -> SamplingConfig:
    """The row's sampling configuration with this bias, which maps token ids to what is added to their logits."""
    fields = without_unset(batch.fields("sampling", row))
    if "early_stopping" in fields:
        fields["early_stopping"] = int(fields["early_stopping"])
    return tensorrt_llm_sampling(**fields, logit_bias=logit_bias or None)


def read_output_config(batch: Batch, row: int) -> OutputConfig:
    """The row's output configuration. The engine does not echo the prompt, because the front does."""
    return OutputConfig(**batch.fields("output", row), exclude_input_from_output=True)


def read_settings(batch: Batch, row: int, context: ServingContext, request: Request, streaming: bool) -> RowSettings:
    """The settings of the row's answer. Raises InvalidRequest for too many sequences, or several without decoupling."""
    config = request.sampling_config
    num_sequences = 1 if config.num_return_sequences is None else config.num_return_sequences
    check_num_sequences(num_sequences, context.config.limits.max_queue_size)
    if num_sequences > 1 and config.beam_width <= 1 and not context.decoupled:
        raise InvalidRequest(
            f"num_return_sequences is {num_sequences}, and each sequence has a response of its own, which only a decoupled "
            f"model can send; send 1, or serve with --set triton.decoupled=true"
        )
    return RowSettings(
        streaming=streaming,
        num_input_tokens=len(request.input_token_ids),
        num_sequences=num_sequences,
        has_beams=config.beam_width > 1,
        max_repeated_bytes=context.config.limits.max_tensor_bytes // batch.num_rows,
        batch_index=row if batch.num_rows > 1 else None,
        return_num_input_tokens=bool(batch.scalar("return_num_input_tokens", row)),
        return_num_output_tokens=bool(batch.scalar("return_num_output_tokens", row)),
    )


def echoes_prompt(batch: Batch, row: int, default_exclude: bool) -> bool:
    """True if the prompt comes first in the answer. `default_exclude` applies to requests that do not say."""
    exclude = batch.scalar("exclude_input_in_output", row)
    return not (default_exclude if exclude is None else exclude)
