"""The drivers of `bench served`: what they send, and the figures that come of the answers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from benchmarks.harness.answers import Answer, DriverFailed, Limits, figures_of, percentile
from benchmarks.harness.work import Ask, Cell, asks_of
from benchmarks.served import drive_aiperf, drive_python
from benchmarks.served.servers import Start
from tests.benchmarks.fake_server import fake_server

WIDE = Limits(1e6, 1e6)
DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "models" / "default"


def test_the_driver_sends_every_request_once_and_counts_what_the_server_says() -> None:
    asks = asks_of(Cell(8, 5, users=3), 100, repeat=0, per_user=2)
    with fake_server() as fake:
        answers = drive_python.run(Start("fake", fake.url, "any"), "openai", asks, users=3, seconds=60)
    assert sorted(body["prompt"] for body in fake.bodies) == sorted(ask.prompt for ask in asks)
    assert {(body["max_tokens"], body["ignore_eos"], body["temperature"]) for body in fake.bodies} == {(5, True, 0)}
    assert [(answer.tokens, len(answer.gaps_s), answer.error) for answer in answers] == [(5, 4, "")] * 6


def test_after_its_time_a_user_sends_no_further_request() -> None:
    asks = asks_of(Cell(8, 4, users=1), 100, repeat=0, per_user=100)
    with fake_server(pace_s=0.05) as fake:
        answers = drive_python.run(Start("fake", fake.url, "any"), "openai", asks, users=1, seconds=0.3)
    assert 1 <= len(answers) < 100
    assert len(fake.bodies) == len(answers)


def test_a_server_that_refuses_gives_errors_and_no_figures() -> None:
    with fake_server(status=500) as fake:
        answers = drive_python.run(Start("fake", fake.url, "any"), "openai", [Ask("a", [1], 2)], users=1, seconds=5)
    assert "HTTP 500" in answers[0].error
    with pytest.raises(DriverFailed, match="no request succeeded; .*HTTP 500"):
        figures_of(answers, WIDE)


def test_figures_of_answers_whose_times_are_known() -> None:
    answers = [
        Answer(started_s=0.0, first_s=0.1, ended_s=1.1, tokens=11, gaps_s=[0.1] * 10),
        Answer(started_s=0.5, first_s=1.5, ended_s=2.0, tokens=6, gaps_s=[0.1] * 5, turn=1),
        Answer(started_s=0.0, first_s=0.0, ended_s=0.2, tokens=0, error="refused"),
    ]
    figures = figures_of(answers, Limits(first_token_ms=500, inter_token_ms=150))
    expected = {
        "requests": 2,
        "failed": 1,
        "output_tokens_per_s": 17 / 2,
        "goodput_per_s": 1 / 2,
        "first_token_ms_p50": 100,
        "first_token_ms_p99": 1000,
        "inter_token_ms_p50": 100,
        "returning_first_token_ms_p50": 1000,
        "gap_ms_p99": 100,
    }
    assert {key: figures[key] for key in expected} == pytest.approx(expected)


def test_a_percentile_is_one_of_the_values_and_not_exceeded_by_its_share() -> None:
    for size, share in itertools.product((1, 2, 3, 99, 100, 101), (0.5, 0.99)):
        values = [float(value) for value in range(size)]
        found = percentile(values, share)
        assert sum(value <= found for value in values) == math.ceil(share * size)


def test_a_record_of_aiperf_becomes_an_answer() -> None:
    record = {
        "metadata": {"request_start_ns": 2_000_000_000, "request_end_ns": 3_200_000_000, "conversation_id": "c1t1"},
        "metrics": {
            "time_to_first_token": {"value": 200.0},
            "request_latency": {"value": 1100.0},
            "output_sequence_length": {"value": 10},
            "inter_chunk_latency": {"value": [100.0] * 9},
        },
    }
    answer = drive_aiperf.answer_of(record, {"c1t1": 1})
    assert (answer.first_token_ms, answer.inter_token_ms) == pytest.approx((200.0, 100.0))
    assert (answer.tokens, answer.turn, sum(answer.gaps_s), answer.error) == (10, 1, pytest.approx(0.9), "")
    failed = drive_aiperf.answer_of({"metadata": record["metadata"], "error": {"message": "refused"}}, {})
    assert "refused" in failed.error


def test_the_reason_of_a_failure_of_aiperf_is_its_last_error() -> None:
    output = ["12:00:00.1 INFO  begins", "12:00:00.2 ERROR  no tokenizer", "a box of text", ""]
    assert drive_aiperf.reason_of(output) == "12:00:00.2 ERROR  no tokenizer"
    assert drive_aiperf.reason_of([]) == "it said nothing"


@pytest.mark.skipif(not drive_aiperf.is_installed(), reason="./everbatch bench served --install aiperf")
def test_aiperf_itself_sends_the_same_requests_as_the_driver_in_python() -> None:
    asks = asks_of(Cell(8, 5, users=2), 100, repeat=0, per_user=2)
    with fake_server(pace_s=0.01) as fake:
        driver = drive_aiperf.AIPerf(DEFAULT_MODEL, lambda: None)
        answers = driver.run(Start("fake", fake.url, "any"), "openai", asks, users=2, seconds=30)
    sent = [body["prompt"] for body in fake.bodies if len(body["prompt"]) == 8 and body["max_tokens"] == 5]
    assert sorted(sent) == sorted(ask.prompt for ask in asks)
    assert {(body["ignore_eos"], body["temperature"], body["stream"]) for body in fake.bodies} == {(True, 0, True)}
    assert [(answer.tokens, answer.error) for answer in answers] == [(5, "")] * 4
