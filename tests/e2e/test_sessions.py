"""Sessions over the wire: on a pool that holds four of them, a hundred cannot tell that they are being evicted."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from backend.api import EngineConfig, OutputConfig, Request
from backend.executor import Executor
from backend.worker.group import InProcessWorkerGroup
from deploy.triton_server import TritonServer
from tests.e2e.wire import TokenClient, ids_of, reaches, settled

NUM_SESSIONS, NUM_TURNS, NEW_TOKENS, OUTPUT_TOKENS = 100, 5, 8, 8
Conversation = list[tuple[list[int], list[int]]]  # (new tokens, reply) of each turn


def prompts_of(session: int) -> list[list[int]]:
    rng = random.Random(session)
    return [[rng.randrange(4, 4096) for _ in range(NEW_TOKENS)] for _ in range(NUM_TURNS)]


def ask(client: TokenClient, session: int, turn: int) -> list[int]:
    start, end = int(turn == 0), int(turn == NUM_TURNS - 1)
    return client.generate(prompts_of(session)[turn], OUTPUT_TOKENS, CORRID=session + 1, START=start, END=end)


def talk(client: TokenClient, session: int) -> list[list[int]]:
    return [ask(client, session, turn) for turn in range(NUM_TURNS)]


def replies_without_sessions(config: EngineConfig) -> list[list[list[int]]]:
    """The same conversations as stateless requests with the whole history, on an engine whose pool holds everything."""
    big = EngineConfig(model=config.model, scheduler=config.scheduler)
    replies = []
    with Executor.in_process(big, InProcessWorkerGroup(big.model, big.scheduler)) as executor:
        for session in range(NUM_SESSIONS):
            history: list[int] = []
            replies.append([])
            for prompt in prompts_of(session):
                history += prompt
                request = Request(
                    list(history), OUTPUT_TOKENS, output_config=OutputConfig(exclude_input_from_output=True)
                )
                (response,) = executor.await_responses(executor.enqueue_request(request), 60.0)
                replies[-1].append(response.result.output_token_ids[0])
                history += replies[-1][-1]
    return replies


@pytest.mark.feature("004-14", "004-15", "004-25", "004-29")
def test_100_sessions_on_a_pool_for_4_get_the_replies_of_unlimited_memory(
    small_pool_server: TritonServer, small_pool_config: EngineConfig
) -> None:
    before = settled(small_pool_server.metrics_url)
    replies: list[list[list[int]]] = [[] for _ in range(NUM_SESSIONS)]
    with TokenClient(small_pool_server.grpc_url) as client, ThreadPoolExecutor(4) as pool:
        for turn in range(NUM_TURNS):  # over all sessions, so that each has been evicted when it comes back
            for session, reply in enumerate(pool.map(lambda s, t=turn: ask(client, s, t), range(NUM_SESSIONS))):
                replies[session].append(reply)
    assert replies == replies_without_sessions(small_pool_config)
    num_evictions = before["everbatch_evictions_total"] + 0.9 * NUM_SESSIONS * (NUM_TURNS - 1)
    assert reaches(small_pool_server.metrics_url, "everbatch_evictions_total", num_evictions)
    after = settled(small_pool_server.metrics_url)
    assert after["everbatch_sessions"] == before["everbatch_sessions"]
    recomputed = after["everbatch_tokens_total{kind=recomputed}"] - before["everbatch_tokens_total{kind=recomputed}"]
    assert recomputed > NUM_SESSIONS * NEW_TOKENS * (NUM_TURNS - 1)


@pytest.mark.feature("004-05", "004-12")
def test_a_warm_turn_computes_only_its_new_tokens(tokens: TokenClient) -> None:
    tokens.generate(list(range(10, 110)), 8, CORRID=501, START=1)
    (result,) = list(tokens.start([5, 6, 7], 8, CORRID=501, END=1, return_perf_metrics=True))
    assert (
        result.as_numpy("num_context_tokens").item() == 3 + 1
    )  # and the last token of turn 1, whose KV no step had needed
    assert result.as_numpy("num_cached_tokens").item() == 100 + 8 - 1
    assert result.as_numpy("num_recomputed_tokens").item() == 0


@pytest.mark.feature("004-29")
def test_step_rewinds_a_session(tokens: TokenClient) -> None:
    first = tokens.generate([10, 11, 12, 13], 6, CORRID=502, START=1)
    once = tokens.generate([20, 21], 6, CORRID=502)
    assert tokens.generate([20, 21], 6, CORRID=502, step=4 + len(first)) == once
    assert tokens.generate([20, 21], 6, CORRID=502, step=0, END=1) == tokens.generate([20, 21], 6)


@pytest.mark.feature("004-30")
def test_session_errors_carry_their_codes(tokens: TokenClient) -> None:
    def message(prompt: Iterable[int] = (1, 2), **inputs: int) -> str:
        return tokens.error_of(tokens.start(list(prompt), 4, **inputs))

    assert "session error 1 (invalid)" in message(CORRID=600)
    assert "session error 1 (invalid)" in message(CORRID=600, START=1, STOP=1)
    tokens.generate([1, 2], 2, CORRID=601, START=1)
    assert "session error 4 (inactive)" in message(CORRID=601, STOP=1)
    assert "session error 6 (too long)" in message(range(1, 40), CORRID=601, session_len=30).replace("_", " ")
    running = tokens.start([1, 2], 2000, CORRID=602, START=1, streaming=True)
    next(iter(running))
    assert "session error 3 (busy)" in message(CORRID=602)
    stopped = tokens.start([1], 0, CORRID=602, STOP=1, END=1)
    assert stopped.token_ids() == []
    assert len(running.token_ids()) < 1999
    assert "session error 1 (invalid)" in message(CORRID=602)
    tokens.generate([1], 1, CORRID=601, END=1)


@pytest.mark.feature("004-31")
def test_session_len_cuts_the_output(tokens: TokenClient) -> None:
    assert len(tokens.generate(list(range(1, 21)), 100, CORRID=603, START=1, END=1, session_len=32)) == 12


def test_two_sessions_at_once_do_not_mix(tokens: TokenClient) -> None:
    expected = {s: talk(tokens, s) for s in (700, 701)}
    got: dict[int, list[list[int]]] = {}
    threads = [threading.Thread(target=lambda s=s: got.update({s: talk(tokens, s)})) for s in (700, 701)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected


def test_a_streamed_turn_equals_an_unstreamed_one(tokens: TokenClient) -> None:
    whole = tokens.generate([9, 8, 7], 10, CORRID=800, START=1, END=1)
    stream = tokens.start([9, 8, 7], 10, CORRID=800, START=1, END=1, streaming=True)
    assert [token for result in stream for token in ids_of(result)] == whole
