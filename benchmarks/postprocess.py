"""When do post-processing processes pay: `python -m benchmarks.postprocess`.

What a token costs between the engine and its text, in microseconds of CPU time, which other programs on the machine change
little: in the program itself (dispatching, the caller's queue, and without processes the text) and in the processes. The engine
is a script: 64 streams of 200 tokens, one token in each response. The median of ROUNDS rounds.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backend.api import EngineConfig, FinishReason, RequestId, Response, Result, TopLogProb
from backend.core.messages import Command, Hello, Message, Responses, Submit
from backend.core.step import ModelInfo
from backend.executor import Executor
from backend.models.loader import DEFAULT_MODEL
from backend.text.tokenizer import Tokenizer
from compat.llm import GenerationExecutorWorker, PostprocWorkerConfig, SamplingParams

ROUNDS = 7
STREAMS, TOKENS = 64, 200
KINDS: dict[str, SamplingParams] = {
    "text": SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    "text, 3 stop strings": SamplingParams(max_tokens=TOKENS, ignore_eos=True, stop=["\x00", "\x01", "\x02"]),
    "text, 5 log-probabilities": SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=5),
}


class Script:
    """A Transport whose engine answers each step with a token of every stream."""

    is_remote = False

    def __init__(self, vocab_size: int) -> None:
        self._model = ModelInfo("script", vocab_size, 4096)
        self._ids: list[RequestId] = []
        self._random = random.Random(1)

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._say = on_message
        self._say(Hello(1, self._model, "", EngineConfig()))

    def send(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._ids.append(command.request_id)

    def close(self, drain: bool) -> None:
        pass

    def messages(self) -> list[Message]:
        """All tokens of all streams that have come since the last call, a step in each message."""
        ids, self._ids = self._ids, []
        return [Responses([self._response(i, step == TOKENS - 1) for i in ids]) for step in range(TOKENS)]

    def say(self, message: Message) -> None:
        self._say(message)

    def _response(self, request_id: RequestId, is_last: bool) -> Response:
        finish = FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED
        token_id = self._random.randrange(10, self._model.vocab_size)
        top = [TopLogProb(token_id + n, -1.0 - n) for n in range(5)]
        result = Result(
            [[token_id]], is_last, is_last, finish_reasons=(finish,), log_probs=[[-1.0]], top_log_probs=[top]
        )
        return Response(request_id, None, result)


def main() -> None:
    table = Table(title="microseconds of CPU time for a token")
    for name in ("", "no processes", "1 process: program", "1 process: process"):
        table.add_column(name, justify="right")
    for kind, params in KINDS.items():
        (alone, _), (program, process) = costs(params, 0), costs(params, 1)
        table.add_row(kind, f"{alone:.0f}", f"{program:.0f}", f"{process:.0f}")
    Console().print(table)


def costs(params: SamplingParams, processes: int) -> tuple[float, float]:
    """Microseconds for a token in this program, and in the processes together."""
    tokenizer = Tokenizer.from_directory(DEFAULT_MODEL)
    script = Script(tokenizer.vocab_size)
    config = PostprocWorkerConfig(processes)
    with GenerationExecutorWorker(Executor(script), tokenizer, str(DEFAULT_MODEL), config) as worker:
        rounds = [_round(worker, script, params) for _ in range(ROUNDS + 1)][1:]  # the first one is not counted
    return statistics.median(own for own, _ in rounds), statistics.median(others for _, others in rounds)


def _round(worker: GenerationExecutorWorker, script: Script, params: SamplingParams) -> tuple[float, float]:
    results = [worker.generate_async([1, 2, 3], params, streaming=True) for _ in range(STREAMS)]
    messages = script.messages()
    own, others = time.process_time(), _cpu_seconds(worker.postprocess_pids)
    for message in messages:
        script.say(message)
    for result in results:
        result.result()
    own, others = time.process_time() - own, _cpu_seconds(worker.postprocess_pids) - others
    num_tokens = sum(len(result.token_ids) for result in results)
    return 1e6 * own / num_tokens, 1e6 * others / num_tokens


def _cpu_seconds(pids: list[int]) -> float:
    """Of these processes so far, in ticks of ten milliseconds."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
