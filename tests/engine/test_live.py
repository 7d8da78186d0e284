"""What the engine shows to people who watch it: its batch, queue and KV blocks, and nothing that clients wrote."""

from __future__ import annotations

import msgspec
import pytest

from backend.api import EngineConfig, Request, Response, SessionConfig
from backend.api.config.schema import KvCacheConfig
from backend.api.live_view import CACHED, FREE, LiveView
from backend.core.messages import Look, Submit
from backend.engine.core import EngineCore
from backend.engine.live import MAX_QUEUED, LiveViews
from backend.engine.loop import EngineLoop
from backend.kvcache import block_map
from tests.engine.driver import Driver
from tests.fakes.hash_worker import HashWorkerGroup


def cells(view: LiveView) -> list[int]:
    runs = view.blocks
    return [state for state, number in zip(runs[::2], runs[1::2], strict=True) for _ in range(number)]


def test_rows_tell_the_progress_of_prompt_and_output() -> None:
    driver = Driver(max_num_tokens=8, pool_tokens=128)
    driver.ask([1] * 20, 6, cache_salt="alice")
    driver.ask([2] * 3, 6)
    driver.step()
    rows = LiveViews(driver.core).view().rows
    assert [(row.stage, row.num_prompt_tokens, row.num_computed_tokens) for row in rows] == [("context", 20, 8)]
    driver.step(3)
    driver.clock.advance(2)
    rows = LiveViews(driver.core).view().rows
    assert [(row.stage, row.num_output_tokens, row.max_output_tokens) for row in rows] == [
        ("generation", 2, 6),
        ("generation", 2, 6),
    ]
    assert rows[0].num_blocks == 6 and rows[0].age_s == 2.0 and rows[0].namespace and not rows[1].namespace


def test_the_queue_has_a_bounded_head_and_its_whole_length() -> None:
    driver = Driver(slots=1)
    for request in range(MAX_QUEUED + 5):
        driver.ask([request], 3)
    driver.step()
    view = LiveViews(driver.core).view()
    assert (len(view.rows), len(view.queue), view.num_queued) == (1, MAX_QUEUED, MAX_QUEUED + 4)
    assert {row.stage for row in view.queue} == {"queued"}


def test_each_block_of_the_pool_is_in_the_map_with_its_owner() -> None:
    driver = Driver(pool_tokens=64, block_size=4)
    driver.turn(7, [1, 2, 3, 4, 5], 4, start=True)
    driver.run()
    driver.ask([9] * 9, 8)
    driver.step()
    view = LiveViews(driver.core).view()
    states, cache = cells(view), driver.core.stats().latest.kv_cache
    assert len(states) == view.num_blocks == 16 and view.blocks_per_cell == 1
    assert states.count(0) == cache.used_num_blocks == 3
    assert states.count(1) + states.count(CACHED) == cache.cached_num_blocks and states.count(1) >= 2
    assert states.count(FREE) == cache.free_num_blocks
    assert [(each.num_tokens, each.num_cached_tokens) for each in view.sessions] == [(9, 8)]


def test_an_evicted_session_is_shown_without_kv() -> None:
    driver = Driver(pool_tokens=32, block_size=4)
    driver.turn(7, [1, 2, 3, 4, 5], 4, start=True)
    driver.run()
    driver.ask([9] * 27, 4)
    driver.run()
    view = LiveViews(driver.core).view()
    assert [(each.num_tokens, each.num_cached_tokens) for each in view.sessions] == [(9, 0)]
    assert set(cells(view)) == {CACHED, FREE}, "its former blocks hold the KV of somebody else"


def test_a_large_pool_has_a_bounded_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_map, "MAX_CELLS", 5)
    driver = Driver(pool_tokens=64, block_size=4)
    driver.ask([9] * 20, 8)
    driver.step()
    view = LiveViews(driver.core).view()
    assert (view.blocks_per_cell, len(cells(view)), view.num_blocks) == (4, 4, 16)
    assert 1 <= cells(view).count(0) <= 2, "of the five blocks in use one or two are the first of four"


def test_a_pool_that_has_not_grown_yet_is_free() -> None:
    driver = Driver(pool_tokens=64, block_size=4, kv_cache={"chunk_blocks": 2})
    driver.ask([1] * 4, 2)
    driver.step()
    assert cells(LiveViews(driver.core).view()).count(FREE) >= 14


def test_nothing_that_clients_wrote_is_part_of_a_view() -> None:
    driver = Driver()
    secret = 987
    driver.ask([secret] * 5, 4, cache_salt="a secret name")
    driver.turn(31415926, [secret], 2, start=True)
    driver.step()
    views = LiveViews(driver.core)
    text = msgspec.json.encode(views.view()).decode()
    assert "secret" not in text and "31415926" not in text and f"{secret}," not in text
    same = views.view()
    assert [row.id for row in views.view().rows] == [row.id for row in same.rows], "a row keeps its name"
    assert LiveViews(driver.core).view().rows[0].id != same.rows[0].id, "another engine has another key"


def test_times_of_requests_that_ended_are_told() -> None:
    driver = Driver()
    assert LiveViews(driver.core).view().first_token_s.p50 == 0.0
    driver.ask([1], 3)
    while driver.core.has_work:
        driver.clock.advance(0.5)
        driver.step()
    view = LiveViews(driver.core).view()
    assert (view.first_token_s.p50, view.first_token_s.p99, view.per_token_s.p50) == (0.5, 0.5, 0.5)


def test_the_loop_answers_a_look_between_steps_with_one_final_response() -> None:
    core = EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024)), HashWorkerGroup())
    responses: list[Response] = []
    loop = EngineLoop(core)
    loop.post(Submit(1, Request([1, 2], 4)))
    loop.post(Look(2))
    loop.stop(drain=True)
    loop.run(responses.extend)
    (look,) = [response for response in responses if response.request_id == 2]
    assert look.is_final and look.result.live_view is not None and len(look.result.live_view.queue) == 1
    encoded = msgspec.msgpack.encode(look)
    assert msgspec.msgpack.decode(encoded, type=Response) == look, "it crosses the process boundary"


def test_many_looks_at_a_time_share_a_view() -> None:
    driver = Driver()
    views = LiveViews(driver.core)

    def num_rows() -> int:
        view = views.answer(1).result.live_view
        assert view is not None
        return len(view.queue)

    assert num_rows() == 0
    driver.ask([1], 3)
    driver.clock.advance(0.049)
    assert num_rows() == 0
    driver.clock.advance(0.001)
    assert num_rows() == 1


def test_sessions_of_one_number_in_two_namespaces_are_told_apart() -> None:
    driver = Driver(pool_tokens=128)
    for salt in ("alice", "bob"):
        driver.ask([1], 2, session=SessionConfig(7, start=True), cache_salt=salt)
        driver.run()
    running = driver.ask([2], 9, session=SessionConfig(7), cache_salt="bob")
    driver.step()
    view = LiveViews(driver.core).view()
    (idle,), (row,) = view.sessions, view.rows
    assert idle.namespace and row.namespace and idle.namespace != row.namespace
    assert idle.session and row.session and idle.session != row.session
    driver.core.cancel(running)
    driver.run()
    assert len({each.session for each in LiveViews(driver.core).view().sessions}) == 2


def test_a_paused_row_holds_no_blocks() -> None:
    driver = Driver(pool_tokens=24, policy="max_utilization")
    for token in (1, 2):
        driver.ask([token] * 8, 12)
    while not driver.core.scheduler.waiting.num_paused:
        driver.step()
    view = LiveViews(driver.core).view()
    assert [(row.stage, row.num_blocks > 0) for row in (*view.rows, *view.queue)] == [
        ("generation", True),
        ("paused", False),
    ]
