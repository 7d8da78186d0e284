"""What clients learn of each other: a prober that recovers secrets by its own requests' counters, and who owns a session."""

from __future__ import annotations

import random

import pytest

from backend.api import OutputConfig, PerfMetrics, Request, SessionConfig
from tests.engine.driver import Driver, answer
from tests.fakes.prober import Observe, recover, secret_of, victims_prompt

BLOCK = 32


def counters(metrics: PerfMetrics) -> tuple[int, ...]:
    """All that a client is told of a request, but for times."""
    times = [name for name in metrics.__struct_fields__ if name.endswith("_ns")]
    times.append("first_iteration")  # every step of the engine counts it up, as it does Result.decoding_iter
    return tuple(getattr(metrics, name) for name in metrics.__struct_fields__ if name not in times)


def prober(driver: Driver, namespace: str) -> Observe:
    """Sends a prompt of its own and looks at the counters that come back."""

    def observe(prompt: list[int]) -> tuple[int, ...]:
        output = OutputConfig(return_perf_metrics=True)
        request = driver.ask(prompt, 1, streaming=False, output_config=output, cache_salt=namespace)
        driver.run()
        return counters(driver.responses[request][-1].result.perf_metrics)

    return observe


def attack(seed: int, victim: str, attacker: str, **config: object) -> list[int]:
    """What another client recovers of a victim's secret."""
    driver = Driver(pool_tokens=4096, block_size=BLOCK, slots=2, **config)
    driver.ask(victims_prompt(secret_of(seed)), 4, cache_salt=victim)
    driver.run()
    return recover(prober(driver, attacker))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("victim, attacker", [("", ""), ("alice", ""), ("", "mallory"), ("alice", "mallory")])
def test_a_prober_recovers_nothing_of_a_strangers_prompt(seed: int, victim: str, attacker: str) -> None:
    assert attack(seed, victim, attacker) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sharing, namespace", [("all", ""), ("namespace", "team")])
def test_the_prober_is_not_blind(seed: int, sharing: str, namespace: str) -> None:
    """Where per-token sharing is wanted, the same program reads the secret out: that is what such sharing means."""
    assert attack(seed, namespace, namespace, sharing=sharing) == secret_of(seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_prober_that_knows_all_but_a_blocks_last_token_is_told_nothing_either(seed: int) -> None:
    """Whole blocks are shared with strangers, so a right guess of a whole block does find it; its counters do not say so."""
    driver = Driver(pool_tokens=4096, block_size=BLOCK, slots=2)
    prompt = [random.Random(seed).randrange(10) for _ in range(2 * BLOCK)]
    driver.ask([*prompt, 7], 2)
    driver.run()
    observe = prober(driver, "")
    assert len({observe([*prompt[:-1], digit, 900 + digit]) for digit in range(10)}) == 1


def test_a_paused_request_is_told_nothing_of_strangers_when_it_returns() -> None:
    """Two that say the same under pressure: what one finds of the other's KV is told as run again."""
    driver = Driver(pool_tokens=10 * 4, block_size=4, slots=4, policy="max_utilization")
    output = OutputConfig(return_perf_metrics=True)
    requests = [driver.ask([1, 2, 3, 4, 5, 6, 7, 8, 9], 12, output_config=output) for _ in range(3)]
    driver.run()
    for request in requests:
        metrics = driver.responses[request][-1].result.perf_metrics
        assert metrics.num_cached_tokens == 0 and metrics.num_context_tokens >= 9
        assert driver.tokens(request) == answer([1, 2, 3, 4, 5, 6, 7, 8, 9], 12)


def converse(driver: Driver, namespace: str, prompt: list[int], **session: object) -> int:
    request = driver.ask(prompt, 2, session=SessionConfig(7, **session), cache_salt=namespace)
    driver.run()
    return request


def test_a_number_names_another_session_in_another_namespace() -> None:
    driver = Driver()
    converse(driver, "alice", [1, 2, 3], start=True)
    stranger = converse(driver, "", [4])
    assert "session 7 is not known" in driver.error(stranger)
    converse(driver, "bob", [5, 6], start=True)
    assert driver.session(7, "alice").token_ids[:3].tolist() == [1, 2, 3]
    again = converse(driver, "alice", [9])
    assert driver.tokens(again) == answer(
        [*driver.session(7, "alice").token_ids[:5], 9], 2, namespace="alice", counter=2
    )


@pytest.mark.parametrize("end", [False, True])
def test_nobody_stops_or_erases_the_session_of_another_namespace(end: bool) -> None:
    driver = Driver()
    running = driver.ask([1, 2], 8, session=SessionConfig(7, start=True), cache_salt="alice")
    driver.step(2)
    assert "session 7 is not known" in driver.error(driver.stop(7, end))
    assert "session 7 is not known" in driver.error(driver.stop(7, end, "mallory"))
    driver.run()
    assert len(driver.tokens(running)) == 8
    driver.stop(7, end=True, namespace="alice")
    assert driver.session(7, "alice") is None


def test_sessions_of_two_namespaces_do_not_collide_within_one_poll() -> None:
    driver = Driver()
    driver.core.begin_poll()
    for request_id, namespace in ((1, "alice"), (2, "bob")):
        request = Request([request_id], 1, session=SessionConfig(7, start=True), cache_salt=namespace)
        driver.core.enqueue(request_id, request)
    driver.run()
    assert driver.session(7, "alice") is not None and driver.session(7, "bob") is not None
