"""Requests whose LoRA adapter is being read wait beside the engine, in their order, and end like all others.

The fake worker's adapters take 10 bytes; its tokens depend on the namespace of the KV, and so on the adapter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest

from backend.api import EngineConfig, ErrorCode, InvalidRequest, Request, SessionConfig
from backend.api.config import KvCacheConfig, LoraSection, SchedulerConfig
from backend.api.errors import EngineUnavailable
from backend.api.lora import LoraConfig
from backend.api.response import Response
from backend.core.adapter import PreparedAdapter
from backend.core.messages import Cancel, Submit
from backend.engine.adapter_desk import AdapterDesk
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from tests.fakes.hash_worker import HashWorkerGroup


class Reader(HashWorkerGroup):
    """Reads an adapter when the test lets it."""

    def __init__(self, is_open: bool = True) -> None:
        super().__init__()
        self.info = msgspec.structs.replace(self.info, lora_module_bytes=1, device="cuda:0")
        self.gate = threading.Event()
        self.threads: set[str] = set()
        if is_open:
            self.gate.set()

    def prepare_adapter(self, lora: LoraConfig) -> PreparedAdapter:
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(10)
        if lora.path == "bad":
            raise InvalidRequest("a bad adapter")
        if lora.path == "worse":
            raise OSError("nobody knows why")
        return super().prepare_adapter(lora)


def make_core(workers: Reader, host_bytes: int = 1000, device_bytes: int = 1000, **lora: object) -> EngineCore:
    config = EngineConfig(
        kv_cache=KvCacheConfig(block_size=4, max_tokens=256),
        scheduler=SchedulerConfig(max_batch_size=8),
        lora=LoraSection(
            enabled=True, host_bytes=host_bytes, device_fraction=device_bytes / workers.free_bytes, **lora
        ),
    )
    return EngineCore(config, workers)


def request(task_id: int, path: str = "", max_tokens: int = 4, salt: str = "") -> Request:
    return Request([1, 2, 3], max_tokens, lora=LoraConfig(task_id, path=path), cache_salt=salt)


def serve(core: EngineCore, *requests: Request) -> dict[int, Response]:
    """The final responses of requests 1, 2, ... that arrive together."""
    loop, responses = EngineLoop(core), dict[int, Response]()
    for number, each in enumerate(requests, 1):
        loop.post(Submit(number, each))
    loop.stop(drain=True)
    loop.run(lambda news: responses.update({each.request_id: each for each in news}))
    core.check_integrity()
    return responses


def tokens(response: Response) -> list[int]:
    assert not response.has_error(), response.error_msg
    return response.result.output_token_ids[0]


def wait_for(desk: AdapterDesk, ready: threading.Event) -> None:
    assert ready.wait(10)
    desk.admit()


@pytest.mark.feature("000-19", "001-48")
def test_an_adapter_is_read_once_and_known_by_its_id_afterwards() -> None:
    core = make_core(Reader())
    got = serve(core, request(1, "a"), request(1), request(2, "b"), Request([1, 2, 3], 4), request(3))
    assert tokens(got[1]) == tokens(got[2])
    assert len({tuple(tokens(got[number])) for number in (1, 3, 4)}) == 3
    assert got[5].error_code is ErrorCode.INVALID_ARGUMENT
    assert "LoRA task 3 not found in cache" in got[5].error_msg


def test_an_id_belongs_to_the_namespace_of_its_client() -> None:
    got = serve(make_core(Reader()), request(1, "a", salt="x"), request(1, salt="x"), request(1, salt="y"))
    assert not got[2].has_error()
    assert "not found in cache" in got[3].error_msg


@pytest.mark.feature("001-41")
def test_adapters_are_read_by_as_many_threads_as_configured() -> None:
    for count in (1, 3):
        workers = Reader(is_open=False)
        core = make_core(workers, put_workers=count)
        ready = threading.Event()
        desk = AdapterDesk(core, ready.set)
        for task_id in range(5):
            desk.submit(task_id, request(task_id, f"adapter {task_id}"))
        deadline = threading.Event()
        while len(workers.threads) < count and not deadline.wait(0.01):
            pass
        assert not core.has_work
        workers.gate.set()
        while desk.num_waiting:
            ready.wait(0.01)
            desk.admit()
        assert len(workers.threads) == count
        assert core.num_live == 5
        desk.fail_all(EngineUnavailable("over"))


def test_requests_of_one_id_keep_their_order_while_others_pass() -> None:
    workers = Reader(is_open=False)
    core, ready = make_core(workers), threading.Event()
    desk = AdapterDesk(core, ready.set)
    desk.submit(1, request(7, "a"))
    desk.submit(2, request(7))
    desk.submit(3, Request([1], 4))
    assert core.live_ids() == [3]
    workers.gate.set()
    wait_for(desk, ready)
    assert core.live_ids() == [3, 1, 2]


@pytest.mark.parametrize(
    "path, message", [("bad", "a bad adapter"), ("worse", "LoRA adapter 1 cannot be read (OSError: nobody knows why)")]
)
def test_an_adapter_that_cannot_be_read_fails_its_own_request_only(path: str, message: str) -> None:
    got = serve(make_core(Reader()), request(1, path), request(2, "a"))
    assert got[1].error_msg == message
    assert tokens(got[2])


def test_a_request_that_is_cancelled_while_it_waits_has_one_final_response() -> None:
    workers = Reader(is_open=False)
    core, responses = make_core(workers), []
    loop = EngineLoop(core)
    loop.post(Submit(1, request(1, "a")))
    loop.post(Cancel(1))
    loop.stop(drain=True)
    threading.Timer(0.05, workers.gate.set).start()
    loop.run(responses.extend)
    assert [(each.request_id, each.result.finish_reasons[0].name) for each in responses] == [(1, "CANCELLED")]


def test_who_waits_is_told_of_a_shutdown() -> None:
    workers, responses = Reader(is_open=False), []
    loop = EngineLoop(make_core(workers))
    loop.post(Submit(1, request(1, "a")))
    loop.stop()
    loop.run(responses.extend)
    workers.gate.set()
    assert [each.error_msg for each in responses] == ["the engine is shutting down; send the request again later"]


def test_an_adapter_for_which_there_is_no_room_waits_until_one_is_free() -> None:
    """The host holds one adapter of 10 bytes; both requests are answered, one after the other."""
    core = make_core(Reader(), host_bytes=15)
    got = serve(core, request(1, "a", 9), request(2, "b", 9), request(3, "a", 9))
    assert all(len(tokens(each)) == 9 + 3 for each in got.values())


@pytest.mark.feature("001-42")
def test_no_more_adapters_run_at_once_than_the_device_holds() -> None:
    """Room for two of 10 bytes: each step has what it needs there (the fake asserts it), and nobody starves."""
    workers = Reader()
    core = make_core(workers, device_bytes=25)
    requests = [request(1 + number % 4, "abcd"[number % 4], 5 + number) for number in range(8)]
    got = serve(core, *requests)
    assert all(not each.has_error() for each in got.values())
    held: set[str] = set()
    for step in workers.trace:
        held = (held - set(step.adapters_out)) | {each.content for each in step.adapters_in}
        assert len(held) <= 2
    alone = serve(make_core(Reader()), requests[6])
    assert tokens(got[7]) == tokens(alone[1])


def test_a_failed_step_sends_the_adapters_again() -> None:
    workers = Reader()
    core = make_core(workers)
    serve(core, request(1, "a"))
    workers.fail_next, workers.adapters = RuntimeError("lost"), {}
    assert serve(core, request(1))[1].has_error()
    assert tokens(serve(core, request(1))[1])


def test_a_session_runs_with_one_adapter() -> None:
    core = make_core(Reader())
    turn: Callable[[int, str, bool], Request] = lambda task, path, start: msgspec.structs.replace(  # noqa: E731
        request(task, path), session=SessionConfig(5, start=start)
    )
    assert not serve(core, turn(1, "a", True))[1].has_error()
    assert not serve(core, turn(1, "", False))[1].has_error()
    assert "runs with another LoRA adapter" in serve(core, turn(2, "b", False))[1].error_msg
    assert "runs with another LoRA adapter" in serve(core, turn(1, "b", False))[1].error_msg
    assert not serve(core, turn(1, "b", True))[1].has_error()


@pytest.mark.feature("001-36")
def test_an_engine_without_lora_refuses() -> None:
    workers = Reader()
    core = EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=256)), workers)
    got = serve(core, request(1, "a"), request(1))
    assert {each.error_code for each in got.values()} == {ErrorCode.UNSUPPORTED}
    assert not workers.threads
