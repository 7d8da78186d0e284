"""Requests whose LoRA adapter is being read wait beside the queue, in their order, and end like all others.

The fake worker's adapters take 10 bytes; its tokens depend on the namespace of the KV, and so on the adapter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from backend.api import EngineConfig, ErrorCode, InvalidRequest, Request, SessionConfig
from backend.api.config.schema import KvCacheConfig, LoraSection, SchedulerConfig
from backend.api.errors import EngineUnavailable
from backend.api.guide import Guide, GuideType
from backend.api.lora import LoraConfig
from backend.api.response import Response
from backend.core.messages import Cancel, Submit
from backend.core.step import PreparedAdapter
from backend.engine.core import EngineCore
from backend.engine.loop import MAX_IDLE_S, EngineLoop
from tests.engine.test_preparation_guides import FakeGuides
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


def admit_all(core: EngineCore) -> None:
    """Until nobody waits."""
    woken = threading.Event()
    core.preparation.on_ready(woken.set)
    core.admit()
    while core.preparation:
        assert woken.wait(10)
        woken.clear()
        core.admit()


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
        for task_id in range(5):
            core.enqueue(task_id, request(task_id, f"adapter {task_id}"))
        while len(workers.threads) < count:
            threading.Event().wait(0.01)
        assert not core.has_work
        workers.gate.set()
        admit_all(core)
        assert len(workers.threads) == count
        assert core.num_live == len(core.scheduler.waiting) == 5
        core.fail_all(EngineUnavailable("over"))


def test_requests_of_one_id_keep_their_order_while_others_pass() -> None:
    workers = Reader(is_open=False)
    core = make_core(workers)
    core.enqueue(1, request(7, "a"))
    core.enqueue(2, request(7))
    core.enqueue(3, Request([1], 4))
    assert core.live_ids() == [3, 1, 2] and [seq.request_id for seq in core.scheduler.waiting] == [3]
    workers.gate.set()
    admit_all(core)
    assert [seq.request_id for seq in core.scheduler.waiting] == [3, 1, 2]
    core.fail_all(EngineUnavailable("over"))


def note_reads(core: EngineCore) -> list[str]:
    """The paths of the adapters that are read from now on."""
    read: list[str] = []
    prepare = core.preparation._reading._prepare
    core.preparation._reading._prepare = lambda lora: (read.append(lora.path), prepare(lora))[1]
    return read


def test_no_more_adapters_are_read_ahead_than_there_is_room_for() -> None:
    """The host has room for one adapter of 10 bytes, and request 1 runs with it: of the three that come then one is read, and
    waits for room; the others are read one after the other.
    """
    core = make_core(Reader(), host_bytes=15)
    core.enqueue(1, request(1, "a"))
    admit_all(core)
    read = note_reads(core)
    for number, path in enumerate("bcd", 2):
        core.enqueue(number, request(number, path))
    woken = threading.Event()
    core.preparation.on_ready(woken.set)
    assert woken.wait(10) or read == ["b"]
    core.admit()
    assert list(core.preparation) == [2, 3, 4] and read == ["b"]
    ended = []
    while core.num_live:
        ended += [each.request_id for each in core.step()]
    assert ended == [1, 2, 3, 4] and read == ["b", "c", "d"]


def test_who_leaves_a_line_leaves_its_adapter_to_those_who_mean_it() -> None:
    """Requests 2 and 3 bring "b" and "c" under the id of request 1, which is being read; 4 names the id alone. 2 and 3 are
    cancelled: nobody means "b" any more, but 4 means "c".
    """
    workers = Reader(is_open=False)
    core = make_core(workers)
    read = note_reads(core)
    core.enqueue(1, request(7, "a"))
    core.enqueue(2, request(7, "b"))
    core.enqueue(3, request(7, "c"))
    core.enqueue(4, request(7))
    for request_id in (2, 3):
        core.cancel(request_id)
    assert [each.result.finish_reasons[0].name for each in core.take_responses()] == ["CANCELLED"] * 2
    workers.gate.set()
    admit_all(core)
    assert read == ["a", "c"]
    (alone,) = serve(make_core(Reader()), request(7, "c")).values()
    got = {}
    while core.num_live:
        got.update({each.request_id: each for each in core.step()})
    assert set(got) == {1, 4} and tokens(got[4]) == tokens(alone)
    core.check_integrity()


def test_cancelled_requests_leave_nothing_to_read() -> None:
    """One reader, which is busy: of 50 adapters whose requests are cancelled none is read, and their lines are gone."""
    workers = Reader(is_open=False)
    core = make_core(workers)
    for number in range(51):
        core.enqueue(number, request(number, f"adapter {number}"))
    for number in range(1, 51):
        core.cancel(number)
    core.admit()
    assert len(core.preparation._lines) == 1 and not core.preparation._reading._unread
    workers.gate.set()
    admit_all(core)
    core.fail_all(EngineUnavailable("over"))


@pytest.mark.parametrize("is_read_first", [True, False])
def test_an_adapter_that_nobody_means_does_not_keep_a_reader(is_read_first: bool) -> None:
    """The host has room for one adapter, with which request 1 runs. Request 2 brings another one and is cancelled, when it has
    been read or before; request 3 brings that of request 1 again, for which there is room, and need not wait for its end.
    """
    workers = Reader()
    core = make_core(workers, host_bytes=15)
    core.enqueue(1, request(1, "a", 50))
    admit_all(core)
    core.step()
    woken = threading.Event()
    core.preparation.on_ready(woken.set)
    workers.gate.clear()
    core.enqueue(2, request(2, "b"))
    if not is_read_first:
        core.cancel(2)
    workers.gate.set()
    assert woken.wait(10)
    core.admit()
    core.cancel(2)
    core.enqueue(3, request(3, "a"))
    admit_all(core)
    assert [seq.request_id for seq in core.scheduler.waiting] == [3] and core.num_live == 2
    core.fail_all(EngineUnavailable("over"))


def test_a_request_may_wait_for_its_guide_and_its_adapter() -> None:
    """It is queued when both are there, whichever comes first, and its adapter cannot leave the cache in between: a guide
    that fails leaves the adapter to those behind.
    """
    for error in ("", "the guide is bad"):
        workers = Reader()
        workers.guides = FakeGuides()
        workers.info = msgspec.structs.replace(workers.info, eos_ids=(7,), guide_refusal="")
        core = make_core(workers)
        guided = msgspec.structs.replace(request(1, "a"), guide=Guide(GuideType.REGEX, "a"))
        core.enqueue(1, guided)
        core.enqueue(2, request(1))
        woken = threading.Event()
        core.preparation.on_ready(woken.set)
        while not any(each.adapter and each.adapter.outcome for each in core.preparation._waiting.values()):
            woken.wait(0.05)
            core.admit()
        assert list(core.preparation) == [1, 2] and len(core.adapters.host) == 0
        workers.guides.tell(1, error)
        admit_all(core)
        assert [seq.request_id for seq in core.scheduler.waiting] == ([2] if error else [1, 2])
        core.fail_all(EngineUnavailable("over"))
        assert workers.guides.ended == [1]


@pytest.mark.parametrize(
    "path, message", [("bad", "a bad adapter"), ("worse", "LoRA adapter 1 cannot be read (OSError: nobody knows why)")]
)
def test_an_adapter_that_cannot_be_read_fails_its_own_request_only(path: str, message: str) -> None:
    got = serve(make_core(Reader()), request(1, path), request(2, "a"))
    assert got[1].error_msg == message
    assert tokens(got[2])


def test_a_request_that_is_cancelled_while_it_waits_ends_at_once() -> None:
    """Before its adapter has been read."""
    workers, responses = Reader(is_open=False), []
    loop = EngineLoop(make_core(workers))
    loop.post(Submit(1, request(1, "a")))
    loop.post(Cancel(1))
    loop.stop(drain=True)
    loop.run(responses.extend)
    workers.gate.set()
    assert [(each.request_id, each.result.finish_reasons[0].name) for each in responses] == [(1, "CANCELLED")]


def test_a_loop_without_work_wakes_up_for_a_deadline() -> None:
    workers, responses = Reader(is_open=False), []
    loop = EngineLoop(make_core(workers))
    loop.post(Submit(1, msgspec.structs.replace(request(1, "a"), timeout_s=0.05)))
    loop.stop(drain=True)
    began = time.monotonic()
    loop.run(responses.extend)
    assert time.monotonic() - began < MAX_IDLE_S
    workers.gate.set()
    assert [(each.request_id, each.result.finish_reasons[0].name) for each in responses] == [(1, "TIMED_OUT")]


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
    """Room for two of 10 bytes: each step has what it needs there (the fake asserts it), and nobody starves. All four are read
    before, so that the eight requests are there at once.
    """
    workers = Reader()
    core = make_core(workers, device_bytes=25)
    for number in range(4):
        serve(core, request(1 + number, "abcd"[number]))
    requests = [request(1 + number % 4, max_tokens=5 + number) for number in range(8)]
    got = serve(core, *requests)
    assert all(not each.has_error() for each in got.values())
    held: set[str] = set()
    for step in workers.trace:
        held = (held - set(step.adapters_out)) | {each.content for each in step.adapters_in}
        assert len(held) <= 2
    alone = serve(make_core(Reader()), request(3, "c", 11))
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
    turn: Callable[[int, str, bool], Request] = lambda task, path, start: msgspec.structs.replace(
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


@pytest.mark.feature("001-46")
@pytest.mark.parametrize(("num_blocks", "expected"), [(500, 400), (2400, 20)])
def test_adapters_get_a_share_of_what_an_injected_probe_finds_behind_weights_and_kv(
    num_blocks: int, expected: int
) -> None:
    """10,000 bytes are free behind the weights, and a block takes four: of what the pool leaves, adapters get 5 %."""
    workers = HashWorkerGroup(free_bytes=10_000, bytes_per_token=1)
    workers.info = msgspec.structs.replace(workers.info, lora_module_bytes=1, device="cuda:0")
    kv_cache = KvCacheConfig(block_size=4, max_tokens=4 * num_blocks)
    core = EngineCore(EngineConfig(kv_cache=kv_cache, lora=LoraSection(enabled=True)), workers)
    assert core.adapters.device.capacity == expected
    core.close()
