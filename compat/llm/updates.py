"""Messages to and from the thread or process that detokenises. Frozen values, sent as msgpack."""

from __future__ import annotations

from msgspec import Struct

from backend.api import ErrorCode, FinishReason, PerfMetrics, TensorData


class TextParams(Struct, frozen=True, omit_defaults=True):
    """How the output of one request becomes text."""

    prompt_ids: list[int] = []
    stops: list[str] = []  # strings that the detokeniser looks for in the text
    stop_words: list[
        tuple[str | int, list[int]]
    ] = []  # words that the engine looks for: the name of each, and its tokens
    include_stop: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    streaming: bool = False
    stream_interval: int = 1  # tokens of a sequence between two updates of it
    log_probs: int | None = None  # number of alternatives to return; None: no log-probabilities at all
    prompt_log_probs: int | None = None  # the same number for the tokens of the prompt
    num_sequences: int = 1
    beams: bool = False  # each result has all tokens of all beams so far
    shows_prompt: bool = False  # the prompt stands in front of the output


class TokenLogProbs(Struct, frozen=True, array_like=True):
    """Log-probabilities of one token and of the most likely ones, the best first. `rank`: of the token, if known."""

    token_id: int
    log_prob: float
    top: list[tuple[int, float]]
    rank: int | None = None


class NewTensors(Struct, frozen=True, omit_defaults=True):
    """New rows of tensors: context [rows, width], generation [1, rows, width]."""

    context_logits: TensorData | None = None
    generation_logits: TensorData | None = None
    context_outputs: dict[str, TensorData] = {}
    generation_outputs: dict[str, TensorData] = {}


class SequenceUpdate(Struct, frozen=True, omit_defaults=True):
    """Changes of one sequence: its first `ids_kept` tokens and `text_kept` characters stay, the rest is replaced."""

    index: int
    ids_kept: int
    ids: list[int]
    text_kept: int
    text: str
    log_probs: list[TokenLogProbs] = []  # for the tokens from index `log_probs_kept` on
    log_probs_kept: int = 0
    prompt_log_probs: list[TokenLogProbs] = []  # sent once: of the tokens that follow each token of the prompt
    tensors: list[NewTensors] = []
    num_generated: int = (
        0  # tokens of the output; rows of tensors beyond them belong to tokens that a stop string has cut off
    )
    cumulative_log_prob: float | None = None
    finish: FinishReason = FinishReason.NOT_FINISHED
    stop_reason: str | int | None = None
    perf: PerfMetrics | None = None
    kv_state: bytes | None = None  # for another engine, at the end of a context_only request


class RequestUpdate(Struct, frozen=True, omit_defaults=True):
    """Updates of one request, or the error that ended it. `wants_cancel`: all texts have ended, but the engine still runs."""

    client_id: int
    res: list[SequenceUpdate]
    is_final: bool
    error: str = ""
    error_code: ErrorCode = ErrorCode.INTERNAL
    wants_cancel: bool = False
