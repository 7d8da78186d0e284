"""The request log: one line for each request that ended, whatever ended it, and never a secret or a text in it."""

from __future__ import annotations

import json
import os
import queue
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from backend.api import EngineConfig, ErrorCode, FinishReason, PerfMetrics, RequestId, Response, Result
from backend.api.config.schema import TritonConfig
from backend.serving.delivery.outputs import Answer, SeparateOutput
from backend.serving.delivery.sequence_output import SequenceOutput
from backend.serving.observe import ended
from backend.serving.observe.ended import EndedRow, EndedRows
from backend.serving.observe.request_log import RequestLog, hash_of
from backend.serving.server import ModelServer
from backend.serving.stream import Failure, OutputRow, Stream
from backend.text.stream import TextStream
from backend.text.tokenizer import Tokenizer
from tests.serving.fake_triton import InferenceRequest, ResponseSender
from tests.serving.helpers import bools, streamed, token_inputs
from tests.serving.scripted import ScriptedExecutor

TOKENIZER = Tokenizer.from_directory(str(Path(__file__).resolve().parents[2] / "models" / "default"))
BOOKS = PerfMetrics(
    arrival_ns=1_010_000_000,
    first_scheduled_ns=1_030_000_000,
    first_token_ns=1_100_000_000,
    last_token_ns=1_900_000_000,
    num_cached_tokens=2,
    num_recomputed_tokens=1,
    num_output_tokens=5,
)
ROW = EndedRow("r 1", "alice's secret", None, "length", "", 3, 5, 10**9, 2 * 10**9, 1_700_000_000.5, BOOKS)


def lines_of(as_json: bool, *rows: EndedRow) -> list[str]:
    lines: list[str] = []
    request_log = RequestLog("ensemble", as_json, lines.append)
    for row in rows:
        request_log.add(row)
    return lines


def test_a_line_of_json_tells_who_why_how_much_and_how_long() -> None:
    (line,) = lines_of(True, ROW)
    assert line.endswith("\n") and json.loads(line) == {
        "level": "INFO",
        "process": "ensemble",
        "logger": "everbatch.requests",
        "message": "request ended",
        "time": "2023-11-14T22:13:20.500+00:00",
        "event": "request",
        "model": "ensemble",
        "request_id": "r 1",
        "namespace": hash_of("alice's secret"),
        "reason": "length",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "recomputed_tokens": 1,
        "output_tokens": 5,
        "queue_ms": 20.0,
        "first_token_ms": 100.0,
        "total_ms": 1000.0,
    }


def test_preparation_and_queue_are_told_apart() -> None:
    """Of a request that waited for its guide 15 ms and then 5 ms for the batch."""
    prepared = msgspec.structs.replace(BOOKS, prepared_ns=1_025_000_000)
    (line,) = lines_of(True, ROW._replace(account=prepared))
    told = json.loads(line)
    assert (told["prepare_ms"], told["queue_ms"]) == (15.0, 5.0)


def test_a_line_of_text_has_the_same_in_pairs() -> None:
    (line,) = lines_of(False, ROW._replace(code="UNAVAILABLE", reason="error", row=2))
    assert line.startswith('2023-11-14T22:13:20.500+00:00 request model=ensemble request_id="r 1" row=2 namespace=')
    assert " reason=error code=UNAVAILABLE prompt_tokens=3 " in line and line.endswith(" total_ms=1000.0\n")


@pytest.mark.parametrize("as_json", [True, False])
def test_a_request_id_forges_no_line_and_a_namespace_is_not_shown(as_json: bool) -> None:
    hostile = 'x"\n2023-11-14T22:13:20+00:00 request model=evil\r\x1b[2J\x7f\ud800 reason=length'
    (line,) = lines_of(as_json, ROW._replace(request_id=hostile))
    assert line.isascii() and "alice" not in line
    assert [character for character in line[:-1] if not character.isprintable()] == []


def test_the_environment_chooses_json(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setenv("EVERBATCH_LOG_FORMAT", "json")
    RequestLog("m", write=lines.append).add(ROW)
    monkeypatch.delenv("EVERBATCH_LOG_FORMAT")
    RequestLog("m", write=lines.append).add(ROW)
    assert lines[0].startswith("{") and not lines[1].startswith("{")


def test_times_that_never_came_are_left_out() -> None:
    queued = PerfMetrics(arrival_ns=5)
    (line,) = lines_of(True, ROW._replace(reason="timed_out", account=queued, num_output_tokens=0))
    assert not {"queue_ms", "first_token_ms"} & json.loads(line).keys()


# ---- over a ModelServer ----------------------------------------------------------------------------------------------


def logged(capsys: pytest.CaptureFixture[str], server: ModelServer) -> list[dict[str, object]]:
    """The lines so far, once the server's housekeeper has ended."""
    server._housekeeper.stop = lambda: None  # type: ignore[method-assign]  # finalize() calls it once more
    type(server._housekeeper).stop(server._housekeeper)
    server._books.close()
    return [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]


@pytest.fixture
def json_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBATCH_LOG_FORMAT", "json")


@pytest.mark.usefixtures("json_log")
def test_each_row_that_ended_and_each_refusal_has_one_line(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server(labels={"model": "m", "version": "1"})
    rows = streamed([[1, 2], [3]], request_id="two")
    refused = streamed([[100]], request_id="bad")
    stopped = streamed([[1]], request_id="stopped")
    server.execute([rows, refused, stopped])
    executor.tokens(1, 7)
    executor.end(1, 8)
    executor.error(2, "no more memory")
    stop = InferenceRequest(token_inputs([[1]], stop=bools(True)), "stopped")
    server.execute([stop])
    for request in (rows, refused, stopped, stop):
        request.sender.wait()
    found = {(line["request_id"], line.get("row")): line for line in logged(capsys, server)}
    assert {key: (line["reason"], line.get("code"), line["output_tokens"]) for key, line in found.items()} == {
        ("two", 0): ("length", None, 2),
        ("two", 1): ("error", "UNAVAILABLE", 0),
        ("bad", None): ("refused", "INVALID_ARGUMENT", 0),
        ("stopped", None): ("cancelled", None, 0),
    }
    assert found["two", 0]["prompt_tokens"] == 2 and "namespace" not in found["two", 0]


@pytest.mark.usefixtures("json_log")
def test_the_log_can_be_off(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server(config=EngineConfig(triton=TritonConfig(stats_period_ms=5, log_requests=False)))
    request = streamed([[1]])
    server.execute([request])
    executor.end(1, 8)
    request.sender.wait()
    assert logged(capsys, server) == []


@pytest.mark.usefixtures("json_log")
def test_a_request_that_a_drain_ends_is_logged_when_the_engine_has_ended_it(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server(drain_grace_s=0.0)
    request = streamed([[1]], request_id="late")
    server.execute([request])
    executor.tokens(1, 5)
    server._begin_drain()
    request.sender.wait()
    executor.settle()
    (line,) = logged(capsys, server)
    assert (line["request_id"], line["reason"], line["code"]) == ("late", "cancelled", "UNAVAILABLE")


def test_rows_that_nobody_takes_are_forgotten_from_the_oldest_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ended, "MAX_WAITING", 10)
    rows = EndedRows()
    for n in range(13):
        rows.add_refused(stream_of(str(n)), Failure(ErrorCode.UNAVAILABLE, "full"))
    assert [row.request_id for row in rows.take(budget_s=60)] == [str(n) for n in range(3, 13)]
    assert "3 ended requests are missing from metrics and request log" in caplog.text
    caplog.clear()
    for number in (0, 1):
        for n in range(10 + number):
            rows.add_refused(stream_of(str(n)), Failure(ErrorCode.UNAVAILABLE, "full"))
        assert len(list(rows.take(budget_s=60))) == 10
        assert [record.args for record in caplog.records] == [(1,)] * number, "of each loss once"


def test_publishing_stops_when_its_time_is_over_and_goes_on_later() -> None:
    rows = EndedRows()
    rows.add_refused(stream_of("r"), Failure(ErrorCode.UNAVAILABLE, "full"))
    assert list(rows.take(budget_s=0.0)) == []
    assert [row.request_id for row in rows.take(budget_s=60)] == ["r"]


def test_a_reason_is_the_one_that_the_client_was_told() -> None:
    output = SeparateOutput([SequenceOutput(TextStream(TOKENIZER, stops=[".b"]), streaming=True)], lambda told: [])
    row, rows = OutputRow(output, num_input_tokens=1), EndedRows()
    last = Result(
        [TOKENIZER.encode("self.b = 1\n    return other")], is_final=True, finish_reasons=(FinishReason.LENGTH,)
    )
    output.feed(last)
    rows.add(stream_of("r", row), row, Response(RequestId(1), result_or_none=last))
    (noted,) = rows.take(budget_s=60)
    assert noted.reason == "stop_words" and noted.num_output_tokens < len(last.output_token_ids[0])


def test_what_asks_for_no_tokens_is_no_request() -> None:
    row, rows = OutputRow(Answer([]), is_request=False), EndedRows()
    rows.add(stream_of("r", row), row, Response(RequestId(1), result_or_none=Result([[]], is_final=True)))
    assert list(rows.take(budget_s=60)) == []


def stream_of(request_id: str, *rows: OutputRow) -> Stream:
    return Stream(ResponseSender(), request_id, list(rows), queue.SimpleQueue())


def test_a_line_for_which_there_is_no_room_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        rows = EndedRows()
        rows.add_refused(stream_of("r"), Failure(ErrorCode.UNAVAILABLE, "no"))
        (row,) = rows.take(budget_s=60)
        RequestLog("m", as_json=False).add(row)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what waits in its buffer goes there
