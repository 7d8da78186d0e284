"""GenerationResult: the future of one request, which is also what it yields. Its outputs change only when it is asked.

The dispatching thread puts Outputs into its queue, and `result`, `aresult` and iteration apply them in the caller's thread,
so nothing changes under a reader's eyes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from backend.api import FinishReason, PerfMetrics
from compat.llm.errors import RequestError, ResultTimeout
from compat.llm.requests import DisaggregatedParams, GenerationRequest
from compat.llm.result_queue import ResultQueue
from compat.llm.updates import NewTensors, RequestUpdate, SequenceUpdate, TokenLogProbs
from compat.tensorrt_llm import as_tensor

Self = TypeVar("Self", bound="GenerationResult")


@dataclass(frozen=True)
class Logprob:
    """`rank`: 1 is the most likely token; None for an output token that is not among the alternatives asked for."""

    logprob: float
    rank: int | None = None


TokenLogprobs = list[dict[int, Logprob]]


@dataclass
class CompletionOutput:
    """One sequence of an answer. The `_diff` properties hold what the last step of iteration has added.

    `logprobs`: of each output token. `prompt_logprobs`: for each token of the prompt of the one that follows it, the last one
    of the first output token. Tensors are torch's: `generation_logits` [tokens, vocab], additional outputs [tokens, width].
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: TokenLogprobs = field(default_factory=list)
    prompt_logprobs: TokenLogprobs = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, timeout or cancelled; None until it has ended
    stop_reason: int | str | None = None  # the stop string or token that has ended it
    generation_logits: Any = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: PerfMetrics | None = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    _last_text_len: int = field(default=0, init=False, repr=False, compare=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False, compare=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False, compare=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> TokenLogprobs:
        return self.logprobs[self._last_logprobs_len :]

    def begin_step(self) -> None:
        """From now on the diffs hold what is new."""
        self._last_text_len = len(self.text)
        self._last_token_ids_len = len(self.token_ids)
        self._last_logprobs_len = len(self.logprobs)

    def apply(self, update: SequenceUpdate) -> None:
        self.token_ids[update.ids_kept :] = update.ids
        self.text = self.text[: update.text_kept] + update.text
        self.logprobs[update.log_probs_kept :] = [_alternatives(entry) for entry in update.log_probs]
        self.prompt_logprobs = [_alternatives(entry) for entry in update.prompt_log_probs] or self.prompt_logprobs
        for new in update.tensors:
            self._append(new)
        self._cut_rows(update.num_generated)
        self.cumulative_logprob = update.cumulative_log_prob
        self.finish_reason = FinishReason(update.finish).openai_name
        self.stop_reason = update.stop_reason
        self.request_perf_metrics = update.perf
        if update.kv_state is not None:
            first = self.token_ids[len(self.token_ids) - update.num_generated :]
            self.disaggregated_params = DisaggregatedParams(
                request_type="context_only", first_gen_tokens=first, opaque_state=update.kv_state
            )

    def _append(self, new: NewTensors) -> None:
        """Rows of the prompt come once, those of the output with their tokens."""
        if new.generation_logits is not None:
            self.generation_logits = _joined(self.generation_logits, as_tensor(new.generation_logits)[0])
        if new.context_outputs:
            self.additional_context_outputs = {name: as_tensor(rows) for name, rows in new.context_outputs.items()}
        if new.generation_outputs:
            known = self.additional_generation_outputs or {}
            self.additional_generation_outputs = {
                name: _joined(known.get(name), as_tensor(rows)[0]) for name, rows in new.generation_outputs.items()
            }

    def _cut_rows(self, count: int) -> None:
        """Let go of the rows of tokens that a stop string has cut off."""
        if self.generation_logits is not None:
            self.generation_logits = self.generation_logits[:count]
        if self.additional_generation_outputs is not None:
            self.additional_generation_outputs = {
                name: rows[:count] for name, rows in self.additional_generation_outputs.items()
            }


def _joined(known: Any, new: Any) -> Any:
    import torch

    return new if known is None else torch.cat([known, new])


def _alternatives(entry: TokenLogProbs) -> dict[int, Logprob]:
    found = {token_id: Logprob(log_prob, rank) for rank, (token_id, log_prob) in enumerate(entry.top, 1)}
    found.setdefault(entry.token_id, Logprob(entry.log_prob, entry.rank))
    return found


class Aborts(Protocol):
    def abort_request(self, request_id: int) -> None: ...


class GenerationResult:
    """Made by an executor's `submit`. Waiting raises RequestError when the request has failed, each time it is tried."""

    def __init__(self, request: GenerationRequest, executor: Aborts) -> None:
        assert request.id is not None, "a request gets its id before its result"
        self.request = request
        self.queue: ResultQueue[RequestUpdate | Exception] = ResultQueue()
        self.disaggregated_params = request.disaggregated_params
        self._executor = executor
        self._request_id = request.id
        self._outputs = [CompletionOutput(index) for index in range(request.sampling_params.num_sequences)]
        self._lock = threading.Lock()
        self._done = False
        self._aborted = False
        self._error: Exception | None = None
        self._context_logits: Any = None

    @property
    def request_id(self) -> int:
        return self._request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def streaming(self) -> bool:
        return self.request.streaming

    @property
    def done(self) -> bool:
        """True if the request has ended, also with an error, and its end was applied."""
        return self._done

    @property
    def finished(self) -> bool:
        return self._done

    @property
    def context_logits(self) -> Any:
        """[tokens, vocab], of the prompt's last tokens: rows of those whose KV was reused are absent."""
        return self._context_logits

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The `n` sequences. If more were sampled (`best_of`), those with the greatest log-probability, the best first."""
        params = self.request.sampling_params
        if params.use_beam_search or params.num_sequences == params.n:
            return self._outputs[: params.n]
        ranked = sorted(self._outputs, key=_likelihood, reverse=True)
        for index, output in enumerate(ranked):
            output.index = index
        return ranked[: params.n]

    @property
    def text(self) -> str:
        """`text` of the first output."""
        return self.outputs[0].text

    @property
    def text_diff(self) -> str:
        """`text_diff` of the first output."""
        return self.outputs[0].text_diff

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """`finish_reason` of the first output."""
        return self.outputs[0].finish_reason

    def abort(self) -> None:
        """Ask the engine to end the request. Its outputs are then finished with the reason `cancelled`."""
        self._aborted = True
        self._executor.abort_request(self._request_id)

    def aborted(self) -> bool:
        """True if `abort` has been called."""
        return self._aborted

    def result(self: Self, timeout: float | None = None) -> Self:
        """Block until the request is over, and return this object.

        Raises ResultTimeout (a TimeoutError and a queue.Empty) after `timeout` seconds, and RequestError.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                self._apply(self.queue.get(left))
            except ResultTimeout:
                raise ResultTimeout(
                    f"request {self._request_id} was not over within {timeout:g} s; it goes on, wait again or abort it"
                ) from None
        self._raise_error()
        return self

    async def aresult(self: Self, timeout: float | None = None) -> Self:
        """Wait for the result in a coroutine, whose event loop goes on meanwhile."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                self._apply(await self.queue.get_async(left))
            except ResultTimeout:
                raise ResultTimeout(
                    f"request {self._request_id} was not over within {timeout:g} s; it goes on, wait again or abort it"
                ) from None
        self._raise_error()
        return self

    def __await__(self: Self) -> Generator[Any, None, Self]:
        return self.aresult().__await__()

    def __iter__(self: Self) -> Self:
        self._check_streaming()
        return self

    def __next__(self: Self) -> Self:
        self._check_streaming()
        if self._done:
            raise StopIteration
        self._apply(self.queue.get())
        self._raise_error()
        return self

    def __aiter__(self: Self) -> Self:
        self._check_streaming()
        return self

    async def __anext__(self: Self) -> Self:
        self._check_streaming()
        if self._done:
            raise StopAsyncIteration
        self._apply(await self.queue.get_async())
        self._raise_error()
        return self

    def _check_streaming(self) -> None:
        if not self.request.streaming:
            raise AssertionError("only a result of streaming=True can be iterated; call result() or aresult()")

    def _apply(self, news: RequestUpdate | Exception) -> None:
        with self._lock:
            if not self._done:
                self._take_in(news)
            if self._done:
                self.queue.put(news)  # Others may wait for the same result: the end is for all of them.

    def _take_in(self, news: RequestUpdate | Exception) -> None:
        if isinstance(news, Exception) or news.error:
            self._error = news if isinstance(news, Exception) else RequestError(news.error, news.error_code)
            self._done = True
            return
        for output in self._outputs:
            output.begin_step()
        for update in news.res:
            output = self._outputs[update.index]
            output.apply(update)
            if output.disaggregated_params is not None:
                output.disaggregated_params.ctx_request_id = self._request_id
            for new in update.tensors if update.index == 0 else ():
                if new.context_logits is not None:
                    self._context_logits = as_tensor(new.context_logits)
        self._done = news.is_final

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(request_id={self._request_id}, prompt_token_ids={self.prompt_token_ids}, "
            f"outputs={self.outputs}, finished={self.finished})"
        )


def _likelihood(output: CompletionOutput) -> float:
    return float("-inf") if output.cumulative_logprob is None else output.cumulative_logprob


class RequestOutput(GenerationResult):
    """The result that LLM returns: a GenerationResult with the text of its prompt."""

    _prompt: str | None

    def __init__(self) -> None:
        raise RuntimeError("RequestOutput is not designed to be constructed by users; LLM.generate returns it")

    @classmethod
    def from_generation_result(cls, result: GenerationResult, prompt: str | None) -> RequestOutput:
        output = cls.__new__(cls)
        output.__dict__ = result.__dict__
        output._prompt = prompt
        return output

    @property
    def prompt(self) -> str | None:
        """The text that was given; None where token ids were."""
        return self._prompt

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, outputs={self.outputs}, finished={self.finished})"
        )
