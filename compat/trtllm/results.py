"""Response, Result and the parts of a Result. All attributes can be set, except those of Response."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from compat.trtllm.enums import FinishReason
from compat.trtllm.kinds import (
    BOOL,
    FLOAT,
    INT32,
    STR,
    TENSOR,
    TIMEDELTA,
    TOKENS,
    UINT64,
    list_of,
    of,
    optional,
)
from compat.trtllm.record import Record, field, shown
from compat.trtllm.request_configs import ContextPhaseParams

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


class AdditionalOutput(Record):
    """A tensor that the request asked for, by name."""

    name: str = field(STR)
    output: Tensor = field(TENSOR)


class SpeculativeDecodingFastLogitsInfo(Record):
    """The process that holds the draft model's logits."""

    draft_request_id: int = field(UINT64, default=0)
    draft_participant_id: int = field(INT32, default=0)


class TimingMetrics(Record):
    """Points of a steady clock, as timedeltas from its start; 0 until something has happened. `kv_cache_size` in bytes."""

    arrival_time: timedelta = field(TIMEDELTA, default=timedelta())
    first_scheduled_time: timedelta = field(TIMEDELTA, default=timedelta())
    first_token_time: timedelta = field(TIMEDELTA, default=timedelta())
    last_token_time: timedelta = field(TIMEDELTA, default=timedelta())
    kv_cache_transfer_start: timedelta = field(TIMEDELTA, default=timedelta())
    kv_cache_transfer_end: timedelta = field(TIMEDELTA, default=timedelta())
    kv_cache_size: int = field(UINT64, default=0)


class KvCacheMetrics(Record):
    """Blocks of one request. Hit rate = reused / (reused + missed)."""

    num_total_allocated_blocks: int = field(INT32, default=0)
    num_new_allocated_blocks: int = field(INT32, default=0)
    num_reused_blocks: int = field(INT32, default=0)
    num_missed_blocks: int = field(INT32, default=0)
    kv_cache_hit_rate: float = field(FLOAT, default=0.0)


class SpeculativeDecodingMetrics(Record):
    """Numbers of draft tokens, proposed and accepted."""

    acceptance_rate: float = field(FLOAT, default=0.0)
    total_accepted_draft_tokens: int = field(INT32, default=0)
    total_draft_tokens: int = field(INT32, default=0)


class RequestPerfMetrics(Record):
    """Times, KV blocks and drafts of a request. Iterations are counted by the engine."""

    timing_metrics: TimingMetrics = field(of(TimingMetrics), factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(of(KvCacheMetrics), factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(
        of(SpeculativeDecodingMetrics), factory=SpeculativeDecodingMetrics
    )
    first_iter: int | None = field(optional(UINT64), default=None)
    last_iter: int | None = field(optional(UINT64), default=None)
    iter: int | None = field(optional(UINT64), default=None)


class Result(Record):
    """Tokens of a request, and the values that its OutputConfig asked for.

    `output_token_ids`, `log_probs` and `finish_reasons` hold an entry for each beam. `context_logits` [prompt, vocabulary],
    `generation_logits` [beam, length, vocabulary]. `sequence_index` says which of several sequences this is;
    `is_sequence_final` is its last result, `is_final` the last one of the request.
    """

    is_final: bool = field(BOOL, default=False)
    output_token_ids: list[list[int]] = field(list_of(TOKENS), factory=list)
    cum_log_probs: list[float] | None = field(optional(list_of(FLOAT)), default=None)
    log_probs: list[list[float]] | None = field(optional(list_of(list_of(FLOAT))), default=None)
    context_logits: Tensor | None = field(optional(TENSOR), default=None)
    generation_logits: Tensor | None = field(optional(TENSOR), default=None)
    spec_dec_fast_logits_info: SpeculativeDecodingFastLogitsInfo | None = field(
        optional(of(SpeculativeDecodingFastLogitsInfo)), default=None
    )
    encoder_output: Tensor | None = field(optional(TENSOR), default=None)
    finish_reasons: list[FinishReason] = field(list_of(of(FinishReason)), factory=list)
    sequence_index: int = field(INT32, default=0)
    is_sequence_final: bool = field(BOOL, default=False)
    decoding_iter: int = field(INT32, default=0)
    avg_decoded_tokens_per_iter: float | None = field(optional(FLOAT), default=None)
    context_phase_params: ContextPhaseParams | None = field(optional(of(ContextPhaseParams)), default=None)
    request_perf_metrics: RequestPerfMetrics | None = field(optional(of(RequestPerfMetrics)), default=None)
    additional_outputs: list[AdditionalOutput] = field(list_of(of(AdditionalOutput)), factory=list)


class Response:
    """Either a Result or an error. Ask `has_error()` first: to read the wrong one raises RuntimeError."""

    def __init__(
        self,
        request_id: int,
        error_msg: str | Result | None = None,
        client_id: int | None = None,
        *,
        result: Result | None = None,
    ) -> None:
        """`Response(request_id, error_msg, client_id=None)` or `Response(request_id, result, client_id=None)`."""
        given = error_msg if result is None else result
        if not isinstance(given, str | Result) or (result is not None and error_msg is not None):
            raise TypeError(f"Response needs an error message or a Result, not {shown(given)}")
        self._request_id: int = UINT64.check(request_id)
        self._client_id: int | None = optional(UINT64).check(client_id)
        self._given = given

    @property
    def request_id(self) -> int:
        return self._request_id

    @property
    def client_id(self) -> int | None:
        return self._client_id

    def has_error(self) -> bool:
        """True if this is an error."""
        return isinstance(self._given, str)

    @property
    def error_msg(self) -> str:
        """The error. Raises RuntimeError when there is a result."""
        if not isinstance(self._given, str):
            raise RuntimeError(f"response of request {self._request_id} has no error; read its result")
        return self._given

    @property
    def result(self) -> Result:
        """The result. Raises RuntimeError when there is an error."""
        if isinstance(self._given, str):
            raise RuntimeError(f"response of request {self._request_id} is an error: {self._given}")
        return self._given

    def clear_context_logits(self) -> None:
        """Free the prompt's logits."""
        self.result.context_logits = None

    def clear_generation_logits(self) -> None:
        """Free the output's logits."""
        self.result.generation_logits = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Response) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Response(request_id={self._request_id}, {shown(self._given)}, client_id={self._client_id})"
