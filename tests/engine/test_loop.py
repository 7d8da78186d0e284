"""The loop between inbox and EngineCore: whose requests end when a client has gone, and since when a request waits."""

from __future__ import annotations

import pytest

from backend.api import EngineConfig, OutputConfig, Request, Response
from backend.api.config.schema import KvCacheConfig
from backend.core.clock import ManualClock
from backend.core.messages import CLIENT_SHIFT, ClientGone, Submit
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from tests.fakes.hash_worker import HashWorkerGroup


def test_only_the_requests_of_a_client_that_is_gone_are_cancelled() -> None:
    core = EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024)), HashWorkerGroup())
    responses: list[Response] = []
    loop = EngineLoop(core)
    first, second = 1 << CLIENT_SHIFT | 7, 2 << CLIENT_SHIFT | 7
    for request_id in (first, second):
        loop.post(Submit(request_id, Request([1, 2], 4)))
    loop.post(ClientGone(1))
    loop.stop(drain=True)
    loop.run(responses.extend)
    reasons = {response.request_id: response.result.finish_reasons[0].name for response in responses}
    assert reasons == {first: "CANCELLED", second: "LENGTH"}


def test_requests_that_a_failure_of_the_loop_ends_are_not_told_of_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose engine has failed looks for the cause; one whose engine is shut down sends its request again."""
    for fails, told in ((True, "the engine has failed; its log says why"), (False, "the engine is shutting down; ")):
        core = EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024)), HashWorkerGroup())
        loop, responses = EngineLoop(core), []
        loop.post(Submit(1, Request([1, 2], 4)))
        if fails:
            monkeypatch.setattr(core, "step", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loop.run(responses.extend)
        else:
            loop.stop()
            loop.run(responses.extend)
        assert [response.error_msg.startswith(told) for response in responses] == [True]


def test_a_request_waits_from_the_moment_it_was_posted() -> None:
    """A command is applied between steps: the rest of the step that ran when it came is part of its queue time."""
    clock = ManualClock()
    core = EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024)), HashWorkerGroup(), clock)
    loop, responses = EngineLoop(core), []
    asked = Request([1, 2], 4, output_config=OutputConfig(return_perf_metrics=True))
    clock.advance(1.0)
    loop.post(Submit(1, asked))
    clock.advance(0.25)
    loop.stop(drain=True)
    loop.run(responses.extend)
    metrics = responses[-1].result.perf_metrics
    assert metrics.first_scheduled_ns - metrics.arrival_ns == 250_000_000


def test_statistics_can_be_asked_for_between_two_steps() -> None:
    core = EngineCore(EngineConfig(kv_cache=KvCacheConfig(max_tokens=1024)), HashWorkerGroup())
    loop = EngineLoop(core, stats_period_s=1e9)
    asked = [loop.ask_stats()]
    loop.post(Submit(1, Request([1, 2], 4)))
    asked.append(loop.ask_stats())
    loop.stop(drain=True)
    loop.run(lambda responses: None)
    assert [future.result(0).latest.num_active_requests for future in asked] == [0, 1]
