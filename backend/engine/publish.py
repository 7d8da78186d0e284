"""Makes responses of sequences: only after their state is consistent, final ones after their blocks are released."""

from __future__ import annotations

import msgspec

from backend.api.errors import EverbatchError
from backend.api.request import Request, RequestId
from backend.api.response import FinishReason, PerfMetrics, Response, Result, TopLogProb
from backend.core.gathered import of_beams
from backend.core.sequence import Sequence
from backend.engine.beams import Hypothesis


class Interval:
    """When new tokens of streams are published: for all streams together, every `interval_ns`, so that tokens share responses.

    Together, because each publication wakes the stub, the server and the clients on the cores that compute the model.
    The first token of a turn is published at once, and so are the tokens of a stream that ends or is paused. Beams are published
    after every step.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns  # 0: after every step
        self._next_ns = 0

    def is_over(self, now_ns: int) -> bool:
        """True if streams publish now; then the next interval begins."""
        if now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + self._interval_ns
        return True


def holds_back(seq: Sequence) -> bool:
    """True if a stream has tokens that were not published."""
    return seq.request.streaming and seq.beam_width == 1 and seq.num_published_tokens < len(seq.token_ids)


def is_published_at_once(seq: Sequence) -> bool:
    """True if a stream has the first token of its turn."""
    return seq.num_published_tokens == seq.num_prompt_tokens


def result_response(seq: Sequence, iteration: int, kv_state: bytes | None = None) -> Response:
    """Make the next Response of a sequence: a stream's tokens since the last one, otherwise all. Marks them as published.

    It is the final response of the request if the sequence has ended and no other one of the request is live.
    """
    request, output = seq.request, seq.request.output_config
    first = seq.num_published_tokens
    if not request.streaming or request.return_all_generated_tokens:
        first = seq.num_prompt_tokens
    tokens = seq.token_ids[first:]
    if not (request.streaming or output.exclude_input_from_output):
        tokens = request.input_token_ids + tokens
    history = None
    if output.return_history and seq.num_published_tokens == seq.num_prompt_tokens:  # the first response of this turn
        history = seq.token_ids[: seq.num_history_tokens]
    seq.num_published_tokens = len(seq.token_ids)
    is_over = seq.finish_reason is not FinishReason.NOT_FINISHED
    tensors = {} if seq.gathered is None else seq.gathered.take(request)
    if not (is_over or tensors or output.return_log_probs or output.top_log_probs or output.return_perf_metrics):
        result = Result(
            [tokens],
            sequence_index=seq.sequence_index,
            decoding_iter=iteration,
            num_prompt_tokens=seq.num_prompt_tokens,
            history_token_ids=history,
        )
        return Response(seq.request_id, request.client_id, result)
    start = first - seq.num_prompt_tokens
    result = Result(
        output_token_ids=[tokens],
        is_final=is_over and not (seq.group and seq.group.members),
        is_sequence_final=is_over,
        sequence_index=seq.sequence_index,
        finish_reasons=(seq.finish_reason,),
        cum_log_probs=[seq.cum_log_prob] if output.return_log_probs else None,
        log_probs=[seq.log_probs[start:]] if output.return_log_probs else None,
        top_log_probs=_top_log_probs(seq, start),
        decoding_iter=iteration,
        num_prompt_tokens=seq.num_prompt_tokens,
        perf_metrics=perf_metrics(seq) if output.return_perf_metrics else None,
        history_token_ids=history,
        kv_state=kv_state,
        **tensors,
    )
    return Response(seq.request_id, request.client_id, result, account=perf_metrics(seq) if is_over else None)


def beams_response(seq: Sequence, hypotheses: list[Hypothesis], iteration: int, is_final: bool) -> Response:
    """All tokens of the beams of a request, best first; `seq` is one of its rows. Never only the new tokens, for a beam may fork
    from another one.
    """
    request, output = seq.request, seq.request.output_config
    shown = hypotheses or [Hypothesis([], 0.0, [], 0.0, seq.finish_reason)]
    tensors = [beam.gathered for beam in shown if beam.gathered is not None]
    prompt = [] if request.streaming or output.exclude_input_from_output else request.input_token_ids
    account = msgspec.structs.replace(perf_metrics(seq), num_output_tokens=sum(len(beam.token_ids) for beam in shown))
    result = Result(
        output_token_ids=[prompt + beam.token_ids for beam in shown],
        is_final=is_final,
        is_sequence_final=is_final,
        finish_reasons=tuple(beam.reason for beam in shown),
        cum_log_probs=[beam.cum_log_prob for beam in shown],
        log_probs=[beam.log_probs for beam in shown] if output.return_log_probs else None,
        decoding_iter=iteration,
        num_prompt_tokens=seq.num_prompt_tokens,
        perf_metrics=account if output.return_perf_metrics else None,
        **(of_beams(tensors, request) if is_final and tensors else {}),
    )
    return Response(seq.request_id, request.client_id, result, account=account if is_final else None)


def error_response(
    request_id: RequestId, client_id: int | None, error: EverbatchError, account: PerfMetrics | None = None
) -> Response:
    """`account`: the metrics of a request that had been accepted."""
    return Response(request_id, client_id, error_or_none=error.message, error_code=error.code, account=account)


def empty_response(request_id: RequestId) -> Response:
    """A final response without tokens: the answer to StopSession."""
    return Response(
        request_id, None, Result([[]], is_final=True, is_sequence_final=True, finish_reasons=(FinishReason.CANCELLED,))
    )


def unqueued_response(request_id: RequestId, request: Request, reason: FinishReason) -> Response:
    """The final response of a request that ended before it was queued: it holds at most the prompt."""
    prompt = [] if request.streaming or request.output_config.exclude_input_from_output else request.input_token_ids
    result = Result(
        [list(prompt)],
        is_final=True,
        is_sequence_final=True,
        finish_reasons=(reason,),
        num_prompt_tokens=len(request.input_token_ids),
    )
    return Response(request_id, request.client_id, result)


def _top_log_probs(seq: Sequence, start: int) -> list[list[TopLogProb]] | None:
    if not seq.request.output_config.top_log_probs:
        return None
    return [[TopLogProb(token_id, log_prob) for token_id, log_prob in entries] for entries in seq.top_log_probs[start:]]


def perf_metrics(seq: Sequence) -> PerfMetrics:
    """The engine's metrics of a request."""
    names = PerfMetrics.__struct_fields__
    return PerfMetrics(**{name: getattr(seq, name) for name in names})


class ResponseBuffer:
    """Responses that are ready, in order, and responses of a static batch held until the batch ends."""

    def __init__(self) -> None:
        self._ready: list[Response] = []
        self._held: list[Response] = []

    def holds(self, request_id: RequestId) -> bool:
        """True if a response of this request is held."""
        return any(response.request_id == request_id for response in self._held)

    def put(self, response: Response, held: bool = False) -> None:
        """Add a response. `held`: hold it until `let_go`."""
        (self._held if held else self._ready).append(response)

    def let_go(self) -> None:
        """Release the held responses: their batch has ended."""
        if self._held:
            self._ready += self._held
            self._held = []

    def take(self) -> list[Response]:
        """Return the responses that are ready."""
        ready, self._ready = self._ready, []
        return ready
