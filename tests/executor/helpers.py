"""Executors over the model-free worker group, or over a transport that does as it is told; what tests ask of responses."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import msgspec

from backend.api import EngineConfig, Response
from backend.api.config.schema import KvCacheConfig, SchedulerConfig
from backend.core.messages import Command, Hello, Message, Responses
from backend.core.step import ModelInfo, WorkersLost
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.executor import Executor
from backend.wire.engine_server import EngineServer
from tests.fakes.hash_worker import HashWorkerGroup

CONFIG = EngineConfig(
    kv_cache=KvCacheConfig(block_size=4, max_tokens=4 * 64),
    scheduler=SchedulerConfig(max_batch_size=4, max_num_tokens=64),
)
POOL = msgspec.structs.replace(CONFIG, kv_cache=KvCacheConfig(block_size=4, max_tokens=4 * 512))  # for long streams


def make_core(config: EngineConfig = CONFIG, **worker: object) -> EngineCore:
    return EngineCore(config, HashWorkerGroup(**worker))


def make_executor(config: EngineConfig = CONFIG, **worker: object) -> Executor:
    return Executor.in_process(config, HashWorkerGroup(**worker))


@contextmanager
def engine(socket_path: Path, config: EngineConfig = CONFIG) -> Iterator[EngineCore]:
    """An engine that listens, in this process."""
    core = make_core(config)
    loop = EngineLoop(core, stats_period_s=0.01, clients_hold=True)
    name = secrets.token_hex(8)
    hello = lambda index: Hello(index, core.model, "", config, engine=name)
    server = EngineServer(str(socket_path), loop.post, hello)

    def run() -> None:
        with suppress(WorkersLost):
            loop.run(server.deliver, server.publish_stats, server.publish_records)

    core.thread = thread = threading.Thread(target=run)
    thread.start()
    try:
        yield core
    finally:
        loop.stop()
        thread.join()
        server.close()


def crash(core: EngineCore) -> None:
    """Let an engine of `engine` end without a word: its next step, or look at its workers, finds that they are gone."""

    def lost(*arguments: object) -> None:
        raise WorkersLost("a rank has ended")

    core.workers.submit = core.workers.check = lost
    core.thread.join(10)


class ScriptedTransport:
    """An engine that says what the test makes it say, on the test's own thread."""

    def __init__(self, is_remote: bool = False) -> None:
        self.is_remote = is_remote
        self.engine_pid = 4711 if is_remote else None
        self.sent: list[Command] = []
        self.on_send: Callable[[Command], None] = self.sent.append

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self.say, self.lose = on_message, on_lost
        self.say(Hello(1, ModelInfo("scripted", 1000, 1000), "", CONFIG))

    def answer(self, response: Response) -> None:
        self.say(Responses([response]))

    def send(self, command: Command) -> None:
        self.on_send(command)

    def close(self, drain: bool) -> None:
        pass


def drain(executor: Executor, ids: list[int]) -> dict[int, list[Response]]:
    """Collect responses until each of `ids` has had its final one."""
    got: dict[int, list[Response]] = {i: [] for i in ids}
    while not all(responses and responses[-1].is_final for responses in got.values()):
        responses = executor.await_responses(timedelta(seconds=10))
        assert responses, f"nothing came for 10 s; so far {got}"
        for response in responses:
            got[response.request_id].append(response)
    return got


def tokens_of(responses: list[Response]) -> list[int]:
    return [token for response in responses for token in response.result.output_token_ids[0]]


def assert_processed(executor: Executor, request_id: int) -> None:
    """Waiting again on an id whose final response was fetched gives one error, at once and each time."""
    message = f"ReqId {request_id} has already been processed and was terminated."
    for _ in range(2):
        (response,) = executor.await_responses(request_id, 60.0)
        assert (response.request_id, response.error_or_none, response.is_final) == (request_id, message, True)
        ((again,),) = executor.await_responses([request_id], 60.0)
        assert again == response
