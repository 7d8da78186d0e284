"""When do post-processing processes pay: `python -m benchmarks.postprocess`.

Two questions, each answered with 0, 1 and 2 processes:

    dispatch   how many tokens a second become text at most. The engine is a script: 64 streams of 200 tokens, one token in
               each response, as fast as they are taken.
    model      how many tokens a second a model gives with 32 streams at once: the default model, its engine in a process of its
               own, so that the dispatching thread shares no interpreter with it.

The caller takes each update out of its queue in both. The median of ROUNDS rounds.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from backend.api import EngineConfig, FinishReason, Response, Result
from backend.core.messages import Command, Hello, Message, Responses, Submit
from backend.core.step import ModelInfo
from backend.executor import Executor
from backend.llm import LLM, GenerationExecutorWorker, PostprocWorkerConfig, SamplingParams
from backend.models.loader import DEFAULT_MODEL
from backend.text.tokenizer import Tokenizer

ROUNDS = 5
STREAMS, TOKENS = 64, 200  # of the script
MODEL_STREAMS, MODEL_TOKENS = 32, 100
PROCESSES = (0, 1, 2)


class Script:
    """A Transport whose engine answers each step with a token of every stream."""

    is_remote = False

    def __init__(self, vocab_size: int) -> None:
        self._model = ModelInfo("script", vocab_size, 4096)
        self._ids: list[int] = []
        self._random = random.Random(1)

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._say = on_message
        self._say(Hello(1, self._model, "", EngineConfig()))

    def send(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._ids.append(command.request_id)

    def close(self, drain: bool) -> None:
        pass

    def run(self) -> None:
        """All tokens of all streams that have come since the last call."""
        for step in range(TOKENS):
            is_last = step == TOKENS - 1
            finish = FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED
            self._say(
                Responses(
                    [
                        Response(i, None, Result([[self._token()]], is_last, is_last, finish_reasons=(finish,)))
                        for i in self._ids
                    ]
                )
            )
        self._ids.clear()

    def _token(self) -> int:
        return self._random.randrange(10, self._model.vocab_size)


def main() -> None:
    table = Table(title=f"tokens a second, {os.cpu_count()} cores")
    for name in ("processes", "dispatch", "model"):
        table.add_column(name, justify="right")
    for count in PROCESSES:
        table.add_row(str(count), f"{dispatch_speed(count):,.0f}", f"{model_speed(count):,.0f}")
    Console().print(table)


def dispatch_speed(processes: int) -> float:
    tokenizer = Tokenizer.from_directory(DEFAULT_MODEL)
    script = Script(tokenizer.vocab_size)
    config = PostprocWorkerConfig(processes)
    with GenerationExecutorWorker(Executor(script), tokenizer, str(DEFAULT_MODEL), config) as worker:

        def run() -> int:
            asked = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            results = [worker.generate_async([1, 2, 3], asked, streaming=True) for _ in range(STREAMS)]
            script.run()
            for result in results:
                result.result()
            return STREAMS * TOKENS

        return median_speed(run)


def model_speed(processes: int) -> float:
    with LLM(orchestrator_type="rpc", num_postprocess_workers=processes) as llm:

        def run() -> int:
            asked = SamplingParams(max_tokens=MODEL_TOKENS, ignore_eos=True)
            results = [llm.generate_async(f"def function_{n}(", asked, streaming=True) for n in range(MODEL_STREAMS)]
            readers = [threading.Thread(target=lambda result=result: list(result)) for result in results]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            return MODEL_STREAMS * MODEL_TOKENS

        return median_speed(run)


def median_speed(run: Callable[[], int]) -> float:
    """Tokens a second of `run`, which returns how many it made. One round ahead is not counted."""
    run()
    speeds: list[float] = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        speeds.append(run() / (time.perf_counter() - started))
    return statistics.median(speeds)


if __name__ == "__main__":
    main()
