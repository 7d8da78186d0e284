"""Response and Result: the engine's answers. Frozen; they cross process boundaries as msgpack."""

from __future__ import annotations

import enum

from msgspec import Struct

from backend.api.errors import ErrorCode
from backend.api.live_view import LiveView
from backend.api.request import RequestId
from backend.api.tensor import TensorData


class FinishReason(enum.IntEnum):
    """Why a sequence ended. Names and order follow TensorRT-LLM's executor."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5

    @property
    def openai_name(self) -> str | None:
        """`stop`, `length`, `timeout` or `cancelled`; None while the sequence runs."""
        return {0: None, 1: "stop", 2: "stop", 3: "length", 4: "timeout", 5: "cancelled"}[self.value]


class TopLogProb(Struct, frozen=True, array_like=True):
    """One alternative of one position."""

    token_id: int
    log_prob: float


class PromptLogProb(Struct, frozen=True, array_like=True):
    """One token of the prompt, given those ahead of it. `rank` 1 is the most likely token of the vocabulary."""

    log_prob: float
    rank: int
    top: list[TopLogProb] = []  # the most likely tokens at this position, as many as were asked for


class Interruption(Struct, frozen=True, omit_defaults=True):
    """A request was paused, or has lost KV, or both. Times in nanoseconds of the engine's monotonic clock (0 = not happened)."""

    paused_ns: int = 0  # 0: it was not paused, its KV was evicted between two turns of its session
    returned_ns: int = 0  # it was admitted to the batch again
    num_lost_tokens: int = 0  # tokens that had lost their KV by then
    recomputed_ns: int = 0  # the latest step landed that computed KV again


class PerfMetrics(Struct, frozen=True, omit_defaults=True):
    """Times in nanoseconds of the engine's monotonic clock (0 = has not happened); blocks and tokens are counts."""

    arrival_ns: int = 0
    prepared_ns: int = 0  # its guide was compiled and its adapter read; 0: it did not wait for them
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_cached_tokens: int = 0  # history and prompt tokens whose KV was found, so that this turn did not compute them
    num_context_tokens: int = 0  # tokens run through the context phase, recomputation included
    num_recomputed_tokens: int = 0  # context tokens that were computed again because their KV was evicted
    num_evictions: int = 0  # how often this turn found KV of its sequence gone
    num_pauses: int = 0
    num_new_blocks: int = 0
    num_copied_blocks: int = 0  # new blocks that began as a copy of a block with a matching head
    num_reused_blocks: int = 0
    num_output_tokens: int = 0  # sampled so far
    num_draft_tokens: int = 0  # draft tokens that steps verified: the request's own and the engine's
    num_accepted_draft_tokens: int = 0  # draft tokens that verification accepted
    first_iteration: int = 0  # the engine's step, from 0 on, that sampled the first token
    interruptions: tuple[Interruption, ...] = ()  # the first of them; num_pauses and num_evictions count all
    guide_notes: tuple[str, ...] = ()  # keywords of its guide that are not held, with their places

    @property
    def queued_ns(self) -> int:
        """When it came into the queue of the batch."""
        return self.prepared_ns or self.arrival_ns

    @property
    def acceptance_rate(self) -> float:
        """0 without drafts."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class Result(Struct, frozen=True, omit_defaults=True):
    """Tokens of one sequence of a request. Streaming: only the new ones of this response. `output_token_ids`: a list per beam.

    A request with `num_return_sequences` n > 1 gets responses of n sequences, in any order between sequences; exactly one of
    them is final: the last one of the sequence that ends last. Tensors are float32, and each row comes once: streaming, context
    rows with the first response, others with their tokens, whatever `return_all_generated_tokens` says. Fields whose names
    begin with `prompt` come once for a request, like context rows: with the first response of the sequence with index 0.
    """

    output_token_ids: list[list[int]]
    is_final: bool = False
    is_sequence_final: bool = False
    sequence_index: int = 0
    finish_reasons: tuple[FinishReason, ...] = (FinishReason.NOT_FINISHED,)  # per beam
    cum_log_probs: list[float] | None = None  # per beam: sum over all output tokens so far
    log_probs: list[list[float]] | None = None  # per beam, aligned with the generated part of output_token_ids
    top_log_probs: list[list[TopLogProb]] | None = None  # per generated token
    prompt_log_probs: list[PromptLogProb] | None = None  # for this turn's prompt, from its second token on
    prompt_hidden_states: TensorData | None = None  # [1 or tokens of this turn's prompt, hidden]
    prompt_logits: TensorData | None = None  # [1, as many as OutputConfig.prompt_logits_of has ids]
    decoding_iter: int = 0
    num_prompt_tokens: int = 0  # history + prompt of this turn
    perf_metrics: PerfMetrics | None = None
    context_logits: TensorData | None = None  # [rows, vocab]: the prompt's last rows, without those whose KV was reused
    generation_logits: TensorData | None = None  # [1, new tokens, vocab]
    additional_outputs: dict[str, TensorData] | None = None  # name -> [1, new tokens, width]
    additional_context_outputs: dict[str, TensorData] | None = None  # name -> [rows, width], like context_logits
    history_token_ids: list[int] | None = None  # tokens of the session before this turn; once, if asked for
    kv_state: bytes | None = (
        None  # with the last result of a context_only request: opaque, for Request.kv_state elsewhere
    )
    live_view: LiveView | None = None  # the answer to a question of somebody who watches the engine


class Response(Struct, frozen=True, omit_defaults=True):
    """Either a Result or an error. Ask `has_error()` first: reading the wrong one raises ValueError."""

    request_id: RequestId
    client_id: int | None = None
    result_or_none: Result | None = None
    error_or_none: str | None = None
    error_code: ErrorCode = ErrorCode.INTERNAL
    account: PerfMetrics | None = None  # set in each response that ends a sequence or an accepted request

    def has_error(self) -> bool:
        return self.error_or_none is not None

    @property
    def is_final(self) -> bool:
        """An error always ends the request."""
        return self.has_error() or self.result.is_final

    @property
    def result(self) -> Result:
        if self.result_or_none is None:
            raise ValueError(f"response of request {self.request_id} is an error: {self.error_or_none}; read error_msg")
        return self.result_or_none

    @property
    def error_msg(self) -> str:
        if self.error_or_none is None:
            raise ValueError(f"response of request {self.request_id} is no error; read result")
        return self.error_or_none
