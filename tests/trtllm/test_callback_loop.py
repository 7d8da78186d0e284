"""The callback interface of docs/features.md, 001."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from backend.api import FinishReason, Request, Response
from backend.api.config.schema import LimitsConfig
from backend.engine.core import EngineCore
from compat.trtllm.callback_loop import CallbackLoop
from tests.executor.helpers import CONFIG, make_core
from tests.fakes.hash_worker import oracle


class Client:
    """Feeds a CallbackLoop from a list and records what it says, with the events in order."""

    def __init__(self, requests: list[tuple[int, Request]], stop_after: dict[int, int] | None = None) -> None:
        self.todo = list(requests)
        self.stop_after = stop_after or {}
        self.tokens: dict[int, list[int]] = {}
        self.finals: list[int] = []
        self.errors: dict[int, str] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.threads: set[str] = set()
        self.on_final = lambda request_id: None
        self.done = threading.Event()
        self.expected = len(requests)

    def get(self, max_count: int) -> list[tuple[int, Request]]:
        self.threads.add(threading.current_thread().name)
        taken, self.todo = self.todo[:max_count], self.todo[max_count:]
        return taken

    def send(self, request_id: int, response: Response | None, is_final: bool, error: str) -> None:
        self.threads.add(threading.current_thread().name)
        if error:
            self.errors[request_id] = error
        else:
            self.tokens.setdefault(request_id, []).extend(response.result.output_token_ids[0])
            self.reasons[request_id] = response.result.finish_reasons[0]
        if is_final:
            self.finals.append(request_id)
            self.on_final(request_id)
        if len(self.finals) >= self.expected:
            self.done.set()

    def poll(self) -> set[int]:
        return {i for i, n in self.stop_after.items() if len(self.tokens.get(i, ())) >= n} | {999_999}

    def run(self, core: EngineCore | None = None, **options: object) -> CallbackLoop:
        core = core or make_core()
        with CallbackLoop(core, self.get, self.send, self.poll, **options) as manager:
            assert self.done.wait(20)
        return manager


def streaming(prompt: list[int], max_tokens: int) -> Request:
    return Request(prompt, max_tokens, streaming=True)


@pytest.mark.feature("001-07", "001-06")
def test_a_duplicate_id_is_refused_and_the_first_request_is_untouched() -> None:
    client = Client([(7, streaming([1, 2], 6)), (7, streaming([3, 4], 6))])
    client.run()
    assert "in use" in client.errors[7]
    assert client.finals == [7, 7]
    assert client.tokens[7] == oracle([1, 2], 6, 1000)


@pytest.mark.feature("001-08", "001-58")
def test_an_id_may_be_used_again_from_inside_its_final_callback() -> None:
    client = Client([(1, streaming([1], 1))])
    client.expected = 1000
    client.on_final = lambda request_id: client.todo.append((1, streaming([1], 1)))
    client.run()
    assert not client.errors
    assert set(client.tokens[1]) == set(oracle([1], 1, 1000))


@pytest.mark.feature("001-58")
def test_in_the_final_callback_the_blocks_are_free_already() -> None:
    core = make_core()
    used = []
    client = Client([(1, streaming([1, 2, 3], 10))])
    client.on_final = lambda request_id: used.append(core.kv.stats().used_num_blocks)
    client.run(core)
    assert used == [0]


@pytest.mark.feature("001-09")
def test_a_stop_signal_ends_an_active_request_and_unknown_ids_are_ignored() -> None:
    core = make_core()
    client = Client([(1, streaming([1, 2], 100)), (2, streaming([3, 4], 8))], stop_after={1: 5})
    client.run(core)
    assert client.reasons[1] is FinishReason.CANCELLED
    assert client.tokens[1] == oracle([1, 2], 100, 1000)[: len(client.tokens[1])]
    assert 5 <= len(client.tokens[1]) <= 6
    assert client.tokens[2] == oracle([3, 4], 8, 1000)
    assert core.kv.stats().used_num_blocks == 0


@pytest.mark.feature("001-09")
def test_a_queued_request_can_be_stopped() -> None:
    requests = [(i, streaming([i], 20)) for i in range(1, 5)] + [(5, streaming([5], 20))]
    client = Client(requests, stop_after={5: 0})
    client.run()
    assert client.reasons[5] is FinishReason.CANCELLED
    assert client.tokens[5] == []


@pytest.mark.feature("001-56")
def test_the_worker_thread_runs_from_construction_and_makes_the_callbacks() -> None:
    client = Client([(1, streaming([1], 2))])
    manager = client.run()
    assert client.threads == {"gpt-manager"}
    assert not manager.worker_thread.is_alive()


@pytest.mark.feature("001-57")
def test_streaming_gives_one_token_per_response_and_otherwise_the_full_response() -> None:
    sizes: dict[int, list[int]] = {1: [], 2: []}
    client = Client([(1, streaming([1], 5)), (2, Request([1], 5))])
    send = client.send

    def record(request_id: int, response: Response | None, is_final: bool, error: str) -> None:
        sizes[request_id].append(len(response.result.output_token_ids[0]))
        send(request_id, response, is_final, error)

    client.send = record
    client.run()
    assert sizes == {1: [1] * 5, 2: [6]}


@pytest.mark.feature("001-59")
def test_leaving_the_context_finishes_what_is_active() -> None:
    client = Client([(i, streaming([i], 30)) for i in range(1, 4)])
    started = threading.Event()
    client.on_final = lambda request_id: None
    get = client.get

    def get_and_tell(max_count: int) -> list[tuple[int, Request]]:
        taken = get(max_count)
        if taken:
            started.set()
        return taken

    manager = CallbackLoop(make_core(), get_and_tell, client.send)
    assert started.wait(5)
    manager.shutdown()
    assert sorted(client.finals) == [1, 2, 3]
    assert all(client.tokens[i] == oracle([i], 30, 1000) for i in (1, 2, 3))
    assert not manager.worker_thread.is_alive()


def test_statistics_are_told_of_every_step_the_last_one_too() -> None:
    told = []
    client = Client([(1, streaming([1, 2], 5))])
    client.run(return_stats=told.append)
    assert [stats.counters.generated_tokens_total for stats in told] == [1, 2, 3, 4, 5]


def test_no_more_is_asked_for_than_there_is_room_in_the_queue() -> None:
    core = make_core(msgspec.structs.replace(CONFIG, limits=LimitsConfig(max_queue_size=3)))
    client = Client([(i, streaming([i], 20)) for i in range(1, 20)])
    client.run(core)
    assert client.errors == {}


@pytest.mark.feature("001-02")
def test_requests_are_asked_for_once_at_the_start_of_each_iteration() -> None:
    events: list[str] = []
    core = make_core()
    client = Client([(1, streaming([1], 3)), (2, streaming([2], 5))])
    get, step = client.get, core.step

    def record_get(max_count: int) -> list[tuple[int, Request]]:
        assert 0 <= max_count <= core.config.limits.max_queue_size
        events.append("get")
        return get(max_count)

    core.step = lambda: (events.append("step"), step())[1]
    client.get = record_get
    client.run(core)
    assert events[: 2 * 5] == ["get", "step"] * 5


@pytest.mark.feature("001-02")
def test_more_requests_than_were_asked_for_are_refused_and_the_others_served() -> None:
    client = Client([(i, streaming([i], 4)) for i in range(1, 9)])
    everything = client.get(8)
    client.get = lambda max_count: (everything.copy(), everything.clear())[0]
    client.run(make_core(msgspec.structs.replace(CONFIG, limits=LimitsConfig(max_queue_size=3))))
    assert sorted(client.errors) == [4, 5, 6, 7, 8]
    assert all("maximum queue size" in error for error in client.errors.values())
    assert client.tokens == {i: oracle([i], 4, 1000) for i in (1, 2, 3)}


@pytest.mark.parametrize("name", ["get", "send", "poll", "stats"])
@pytest.mark.parametrize("error", [RuntimeError("planted"), SystemExit(3)])
def test_a_callback_that_raises_is_logged_once_and_the_token_loop_goes_on(
    name: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client([(1, streaming([1, 2], 6)), (2, streaming([3, 4], 6))])
    left = [3]  # how often it still raises

    def raising_first(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object) -> object:
            if left[0]:
                left[0] -= 1
                if name == "send":
                    call(*args)
                raise error
            return call(*args)

        return wrapped

    calls: dict[str, Callable[..., Any]] = {
        "get": client.get,
        "send": client.send,
        "poll": client.poll,
        "stats": lambda stats: None,
    }
    calls[name] = raising_first(calls[name])
    with CallbackLoop(make_core(), calls["get"], calls["send"], calls["poll"], calls["stats"]):
        assert client.done.wait(20)
    assert client.tokens == {1: oracle([1, 2], 6, 1000), 2: oracle([3, 4], 6, 1000)} and left == [0]
    assert caplog.text.count("failed; the token loop goes on") == 1


BAD_REQUESTS: list[tuple[Any, Any, str]] = [
    (5, "a text", "the request is a str, a Request is expected"),
    (5, Request([1], 10**400), "max_tokens: expected plain numbers of at most 64 bits"),
    (5, Request([1], 4, timeout_s=1e308), "timeout is 1e+308 s, allowed is more than 0 to 86400 s"),
    (5, Request([1], 4, timeout_s="soon"), "timeout_s: expected float | None, got str"),
]


@pytest.mark.parametrize(("request_id", "request_", "error"), BAD_REQUESTS)
def test_what_is_no_request_is_answered_and_the_next_one_is_served(request_id: int, request_: Any, error: str) -> None:
    client = Client([(request_id, request_), (6, streaming([1], 3))])
    client.run()
    assert error in client.errors[5] and client.tokens[6] == oracle([1], 3, 1000)


@pytest.mark.parametrize("request_id", [-1, 1 << 64, 1e308, "seven", None])
def test_an_id_that_is_no_unsigned_number_is_logged_and_the_next_request_is_served(
    request_id: Any, caplog: pytest.LogCaptureFixture
) -> None:
    todo = [[(request_id, streaming([1], 3)), (6, streaming([1], 3))]]
    client = Client([(6, streaming([1], 3))])
    with CallbackLoop(make_core(), lambda most: todo.pop(0) if todo else [], client.send):
        assert client.done.wait(20)
    assert client.tokens[6] == oracle([1], 3, 1000) and "whose id is no unsigned 64-bit number" in caplog.text
