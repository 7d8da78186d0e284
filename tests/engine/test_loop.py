"""The loop between inbox and EngineCore: whose requests end when a client has gone."""

from __future__ import annotations

import pytest

from backend.api import EngineConfig, Request, Response
from backend.api.config import KvCacheConfig
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
