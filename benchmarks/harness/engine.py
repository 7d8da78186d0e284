"""An engine (a process of its own, or several replicas) that requests go to without a server, as a lane of a benchmark."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count

from backend.api import EngineConfig, OutputConfig, Request, Response, SessionConfig
from backend.api.errors import ConfigError, EverbatchError
from backend.api.request import SessionId
from backend.executor import Executor
from benchmarks.harness.answers import Answer, Stream
from benchmarks.harness.work import Ask
from deploy.errors import UserError

SESSIONS_APART = 1 << 20  # from the numbers of one measurement's sessions to those of the next


def launched(stack: ExitStack, config: EngineConfig) -> Executor:
    """An engine process that ends with the stack. Raises UserError for a configuration that the model does not bear."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="everbatch-load-"))
    try:
        return stack.enter_context(Executor.launch(config, f"{directory}/engine.sock"))
    except ConfigError as error:  # such as a model whose heads the ranks cannot share
        raise UserError(f"{error}; or give another --model") from None


class EngineLane:
    """`replicas`: requests go to them in turn. `sessions`: a conversation is a session, whose turns send their new tokens alone.

    `namespace`: of all requests; "" is the anonymous one.
    """

    driver = "engine"

    def __init__(self, name: str, replicas: Sequence[Executor], sessions: bool = False, namespace: str = "") -> None:
        self.name = name
        self._replicas = replicas
        self._sessions = sessions
        self._namespace = namespace
        self._measurements = count()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """An idle engine sleeps, so nothing is stopped."""
        yield

    def warm(self, asks: Sequence[Ask], users: int, seconds: float) -> None:
        """As `send`, without the answers."""
        self.send(asks, users, seconds)

    def send(self, asks: Sequence[Ask], users: int, seconds: float) -> list[Answer]:
        """Closed loop: a request that has ended is followed by the next, none after `seconds`."""
        sending = _Sending(self, asks)
        sending.closed_loop(users, time.perf_counter() + seconds)
        return sending.answers()

    def send_at_rate(self, asks: Sequence[Ask], per_second: float, stop: Callable[[], bool]) -> list[Answer]:
        """Open loop: requests at a steady rate, whatever becomes of them, until they are all sent or `stop` says so."""
        sending = _Sending(self, asks)
        began = time.perf_counter()
        for number in range(len(asks)):
            time.sleep(max(0.0, began + number / per_second - time.perf_counter()))
            if stop():
                break
            sending.next()
        return sending.answers()

    def start(self, ask: Ask, number: int, base: int, on_response: Callable[[Response], None]) -> None:
        """Send one request. Raises EverbatchError when it is refused at once."""
        session, prompt = None, ask.prompt
        if self._sessions and ask.conversation:
            session = SessionConfig(SessionId(base + ask.conversation), start=ask.turn == 0)
            prompt = ask.prompt[-ask.fresh :]
        output = OutputConfig(exclude_input_from_output=True, return_perf_metrics=bool(ask.conversation))
        request = Request(
            prompt, ask.new, streaming=True, session=session, output_config=output, cache_salt=self._namespace
        )
        self._replicas[number % len(self._replicas)].submit(request, on_response)

    def next_base(self) -> int:
        """What the numbers of a measurement's sessions begin at."""
        return next(self._measurements) * SESSIONS_APART


class _Sending:
    """The requests of one measurement; responses come on the executors' threads."""

    def __init__(self, lane: EngineLane, asks: Sequence[Ask]) -> None:
        self._lane, self._asks, self._base = lane, asks, lane.next_base()
        self._changed = threading.Condition()
        self._streams: list[Stream] = []
        self._ended: list[Answer] = []

    def closed_loop(self, users: int, until: float) -> None:
        for _ in range(min(users, len(self._asks))):
            self.next()
        while len(self._streams) < len(self._asks) and time.perf_counter() < until:
            with self._changed:
                self._changed.wait_for(lambda: len(self._streams) - len(self._ended) < users)
            self.next()

    def next(self) -> None:
        number = len(self._streams)
        ask = self._asks[number]
        stream = Stream(ask.turn)
        self._streams.append(stream)

        def on_response(response: Response) -> None:
            if response.has_error():
                stream.error = response.error_msg
            else:
                if tokens := len(response.result.output_token_ids[0]):
                    stream.add(tokens)
                if response.is_final and response.result.perf_metrics is not None:
                    stream.recomputed = response.result.perf_metrics.num_recomputed_tokens
            if response.is_final:
                self._end(stream)

        try:
            self._lane.start(ask, number, self._base, on_response)
        except EverbatchError as refusal:
            stream.error = str(refusal)
            self._end(stream)

    def answers(self) -> list[Answer]:
        """Blocks until every request that was sent has ended."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ended) == len(self._streams))
        return self._ended

    def _end(self, stream: Stream) -> None:
        with self._changed:
            self._ended.append(stream.answer())
            self._changed.notify_all()
