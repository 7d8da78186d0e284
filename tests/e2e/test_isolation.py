"""Over the wire: a prober recovers no secret of other clients' prompts, and a session has an owner."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.triton_server import TritonServer
from tests.e2e.wire import post
from tests.fakes.prober import Observe, recover, secret_of, victims_prompt

COUNTERS = (
    "num_cached_tokens",
    "num_context_tokens",
    "num_recomputed_tokens",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
)


def ask(url: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": 1, "return_perf_metrics": True}
    status, text = post(f"{url}/v2/models/tensorrt_llm/generate", {**body, **fields})
    return {"status": status, **json.loads(text)}


def prober(url: str, **fields: Any) -> Observe:
    def observe(prompt: list[int]) -> tuple[int, ...]:
        answer = ask(url, prompt, **fields)
        return tuple(answer[name] for name in COUNTERS)

    return observe


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("victim, attacker", [({}, {}), ({"cache_salt": "alice"}, {}), ({}, {"cache_salt": "mallory"})])
def test_a_prober_recovers_no_digit_of_a_strangers_prompt(
    server: TritonServer, seed: int, victim: dict[str, str], attacker: dict[str, str]
) -> None:
    secret = secret_of(seed)
    assert ask(server.http_url, victims_prompt(secret), **victim)["status"] == 200
    assert recover(prober(server.http_url, **attacker)) == []


def test_the_prober_is_not_blind(server: TritonServer) -> None:
    """Within one namespace tokens are shared by intention, and there the same program reads the whole secret."""
    secret, party = secret_of(77), {"cache_salt": "one party"}
    assert ask(server.http_url, victims_prompt(secret), **party)["status"] == 200
    assert recover(prober(server.http_url, **party)) == secret


def test_a_session_of_one_namespace_is_not_known_in_another(server: TritonServer) -> None:
    session = {"CORRID": 4711, "START": 1, "END": 0}
    assert ask(server.http_url, [5, 6, 7], **session, cache_salt="alice")["status"] == 200
    later = {"CORRID": 4711, "START": 0, "END": 0}
    for stranger in ({}, {"cache_salt": "mallory"}):
        assert "session error 1" in ask(server.http_url, [8], **later, **stranger)["error"]
    owner = ask(server.http_url, [8], **{**later, "END": 1}, cache_salt="alice")
    assert owner["status"] == 200 and owner["num_cached_tokens"] == 3
