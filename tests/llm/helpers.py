"""Executors over the model-free worker group with a real tokenizer, and over an engine that says what the test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from backend.api import EngineConfig, FinishReason, Request, Response, Result
from backend.api.config.schema import KvCacheConfig, SchedulerConfig
from backend.core.messages import Cancel, Command, Submit
from backend.core.step import StepInput
from backend.executor import Executor
from backend.text.tokenizer import Tokenizer
from compat.llm import GenerationExecutorWorker, PostprocWorkerConfig, SamplingParams
from tests.executor.helpers import ScriptedTransport
from tests.fakes.hash_worker import HashWorkerGroup, oracle
from tests.text.tokenizers_made import byte_level_bpe

CONFIG = EngineConfig(
    kv_cache=KvCacheConfig(block_size=4, max_tokens=4096),
    scheduler=SchedulerConfig(max_batch_size=8, max_num_tokens=256),
)
PATIENCE_S = 60.0  # for what comes at once, on a machine that is busy with something else
EVER = 3000  # tokens; far more than a test waits for


def make_tokenizer() -> Tokenizer:
    return Tokenizer(*byte_level_bpe())


class GatedWorkerGroup(HashWorkerGroup):
    """Runs no step while its gate is closed."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, step: StepInput) -> None:
        assert self.gate.wait(PATIENCE_S), "nobody has opened the gate"
        super().submit(step)


class StoppingWorkerGroup(GatedWorkerGroup):
    """Closes its own gate when it has run so many steps, until it is told to keep going."""

    def __init__(self, after: int, **options: object) -> None:
        super().__init__(**options)
        self._after = after
        self._is_free = False

    def keep_going(self) -> None:
        self._is_free = True
        self.gate.set()

    def submit(self, step: StepInput) -> None:
        if len(self.trace) == self._after and not self._is_free:
            self.gate.clear()
        super().submit(step)


def make_worker(
    tokenizer: Tokenizer | None = None,
    group: HashWorkerGroup | None = None,
    config: EngineConfig = CONFIG,
    **options: object,
) -> GenerationExecutorWorker:
    vocab_size = 1000 if tokenizer is None else tokenizer.vocab_size
    executor = Executor.in_process(config, group or HashWorkerGroup(vocab_size=vocab_size))
    return GenerationExecutorWorker(executor, tokenizer, **options)


@contextmanager
def gated(
    tokenizer: Tokenizer | None = None, **options: object
) -> Iterator[tuple[GenerationExecutorWorker, threading.Event]]:
    """An executor, and the gate of its model."""
    group = GatedWorkerGroup(vocab_size=1000 if tokenizer is None else tokenizer.vocab_size)
    worker = make_worker(tokenizer, group, **options)
    try:
        yield worker, group.gate
    finally:
        group.gate.set()
        worker.shutdown()


def params(max_tokens: int = 8, **fields: object) -> SamplingParams:
    """Without an end id, so that the length is known."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def expected(prompt: list[int], max_tokens: int, tokenizer: Tokenizer | None = None) -> list[int]:
    return oracle(prompt, max_tokens, 1000 if tokenizer is None else tokenizer.vocab_size)


class Engine:
    """A scripted engine below a real executor: it keeps what it is sent, and answers what the test says."""

    def __init__(
        self, tokenizer: Tokenizer | None = None, postprocess: PostprocWorkerConfig | None = None, **options: object
    ) -> None:
        self._transport = ScriptedTransport()
        self._submitted: list[Submit] = []
        self._transport.on_send = self._take
        self.worker = GenerationExecutorWorker(Executor(self._transport), tokenizer, postprocess=postprocess, **options)

    @property
    def requests(self) -> list[Request]:
        return [command.request for command in self._submitted]

    @property
    def cancelled(self) -> list[int]:
        """Request ids of the engine."""
        return [command.request_id for command in self._transport.sent if isinstance(command, Cancel)]

    def engine_id(self, number: int = -1) -> int:
        return self._submitted[number].request_id

    def _take(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submitted.append(command)
        else:
            self._transport.sent.append(command)

    def say(self, result: Result, number: int = -1) -> None:
        """Answer the request of that number, the last one unless told otherwise."""
        self._transport.answer(Response(self.engine_id(number), None, result))

    def fail(self, message: str, number: int = -1) -> None:
        self._transport.answer(Response(self.engine_id(number), None, error_or_none=message))

    def answer(self, response: Response) -> None:
        self._transport.answer(response)


def part(
    ids: list[int], index: int = 0, finish: FinishReason | None = None, is_final: bool = False, **fields: object
) -> Result:
    """New tokens of one sampled sequence; `finish` ends the sequence, `is_final` the request."""
    return Result(
        [ids],
        is_final=is_final,
        is_sequence_final=finish is not None,
        sequence_index=index,
        finish_reasons=(finish or FinishReason.NOT_FINISHED,),
        **fields,
    )
