"""The loop between inbox and EngineCore: whose requests end when a client has gone."""

from __future__ import annotations

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
