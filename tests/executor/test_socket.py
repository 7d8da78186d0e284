"""The engine behind its socket: several clients, clients that leave, an engine that dies and returns."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from backend.api import ErrorCode, InvalidRequest, OutputConfig, Request, Response
from backend.executor import Executor
from backend.wire import framing
from backend.wire.client import wait_until
from backend.wire.framing import MAX_FRAME_BYTES, receive_frame
from tests.executor.helpers import assert_processed, drain, engine, tokens_of
from tests.fakes.hash_worker import oracle


def streaming(prompt: list[int], max_tokens: int) -> Request:
    return Request(prompt, max_tokens, streaming=True)


def test_two_clients_share_one_engine_and_get_only_their_own_responses(tmp_path: Path) -> None:
    with (
        engine(tmp_path / "s"),
        Executor.attach(str(tmp_path / "s"), 5) as one,
        Executor.attach(str(tmp_path / "s"), 5) as two,
    ):
        ids = {one: one.enqueue_request(streaming([1], 20)), two: two.enqueue_request(streaming([2], 20))}
        assert len(set(ids.values())) == 2
        for executor, first in ((one, 1), (two, 2)):
            assert tokens_of(drain(executor, [ids[executor]])[ids[executor]]) == oracle([first], 20, 1000)


@pytest.mark.feature("000-06")
def test_over_the_socket_too_awaiting_a_consumed_id_gives_one_error(tmp_path: Path) -> None:
    with engine(tmp_path / "s"), Executor.attach(str(tmp_path / "s"), 5) as executor:
        request_id = executor.enqueue_request(streaming([1], 4))
        assert tokens_of(drain(executor, [request_id])[request_id]) == oracle([1], 4, 1000)
        assert_processed(executor, request_id)


def test_the_requests_of_a_client_that_leaves_are_cancelled(tmp_path: Path) -> None:
    with engine(tmp_path / "s") as core:
        client = Executor.attach(str(tmp_path / "s"), 5)
        client.enqueue_request(Request([1, 2, 3], 200))
        client.enqueue_request(Request([4, 5, 6], 200))
        client.shutdown()
        assert wait_until(lambda: core.num_live == 0 and core.kv.stats().used_num_blocks == 0, 5)


def test_a_live_request_of_a_lost_engine_is_answered_by_the_next_one_unless_it_was_told_of_the_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with engine(path):
        client = Executor.attach(str(path), 5)
        heard, done = [], threading.Event()
        client.submit(Request([1, 2], 254), lambda response: (heard.append(response), done.set()))
    assert wait_until(lambda: not client.is_ready(), 5)
    late = client.enqueue_request(Request([1], 1))
    with engine(path):
        assert wait_until(client.is_ready, 5)
        assert done.wait(60) and len(heard) == 1
        if heard[0].has_error():
            assert heard[0].error_code is ErrorCode.UNAVAILABLE
        else:
            assert tokens_of(heard) == [1, 2, *oracle([1, 2], 254, 1000)]
        request_id = client.enqueue_request(streaming([3], 4))
        answers = drain(client, [late, request_id])
        assert tokens_of(answers[request_id]) == oracle([3], 4, 1000)
        assert tokens_of(answers[late]) == [1, *oracle([1], 1, 1000)], "it came while there was no engine, and waited"
        client.shutdown()


def test_statistics_arrive_by_themselves(tmp_path: Path) -> None:
    with engine(tmp_path / "s"), Executor.attach(str(tmp_path / "s"), 5) as client:
        drain(client, [client.enqueue_request(streaming([1], 5))])
        assert wait_until(
            lambda: client.latest_stats() and client.latest_stats().counters.generated_tokens_total == 5, 5
        )


def test_garbage_on_the_socket_harms_nobody(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with engine(tmp_path / "s"), Executor.attach(path, 5) as client:
        for garbage in (b"\x05\x00\x00\x00hello", (MAX_FRAME_BYTES + 1).to_bytes(4, "little"), b"\x00"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.connect(path)
                assert receive_frame(stranger) is not None  # the Hello
                stranger.sendall(garbage)
        request_id = client.enqueue_request(streaming([3], 4))
        assert tokens_of(drain(client, [request_id])[request_id]) == oracle([3], 4, 1000)


def test_the_socket_is_private(tmp_path: Path) -> None:
    with engine(tmp_path / "run" / "s"):
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "run" / "s").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"cache_salt": "x" * 20_000}, "takes 20.* bytes .* limit is 10000; shorten"),
        ({"cache_salt": "\ud800"}, "lone surrogate"),
    ],
)
def test_a_request_that_cannot_be_sent_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 10_000)
    with engine(tmp_path / "s"), Executor.attach(str(tmp_path / "s"), 5) as client:
        running = client.enqueue_request(streaming([1], 200))
        with pytest.raises(InvalidRequest, match=message):
            client.enqueue_request(Request([1], 1, **fields))
        assert tokens_of(drain(client, [running])[running]) == oracle([1], 200, 1000)


def test_a_request_that_the_engine_cannot_read_is_answered_and_the_others_go_on(tmp_path: Path) -> None:
    with engine(tmp_path / "s"), Executor.attach(str(tmp_path / "s"), 5) as client:
        running = client.enqueue_request(streaming([1], 200))
        wrong = client.enqueue_request(Request(["one"], 1))
        got = drain(client, [running, wrong])
        assert got[wrong][0].error_code is ErrorCode.INVALID_ARGUMENT
        assert tokens_of(got[running]) == oracle([1], 200, 1000)


def test_an_answer_that_is_too_large_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path / "s"), Executor.attach(str(tmp_path / "s"), 5) as client:
        monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 8000)
        all_of_it = Request([2], 250, output_config=OutputConfig(return_log_probs=True, top_log_probs=5))
        running, large = client.enqueue_requests([streaming([1], 200), all_of_it])
        got = drain(client, [running, large])
        assert [answer.error_code for answer in got[large]] == [ErrorCode.INVALID_ARGUMENT]
        assert "the limit is 8000" in got[large][0].error_msg
        assert tokens_of(got[running]) == oracle([1], 200, 1000)


def test_a_callback_that_raises_ends_neither_the_connection_nor_other_requests(tmp_path: Path) -> None:
    def fail(response: Response) -> None:
        raise RuntimeError("a mistake")

    with engine(tmp_path / "s"), Executor.attach(str(tmp_path / "s"), 5) as client:
        client.submit(streaming([5], 20), fail)
        request_id = client.enqueue_request(streaming([3], 20))
        assert tokens_of(drain(client, [request_id])[request_id]) == oracle([3], 20, 1000)


def test_an_engine_that_says_what_cannot_be_read_is_left_and_asked_again(tmp_path: Path) -> None:
    """Nobody knows whose answers were in it: all are told that they are lost, and the client goes on."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        client = Executor.attach(str(path))
        connection, _ = listener.accept()
        connection.sendall(b"\x05\x00\x00\x00hello")
        listener.settimeout(5)
        again, _ = listener.accept()
        for end in (connection, again):
            end.close()
    path.unlink()
    with engine(path), client:
        assert wait_until(client.is_ready, 5)


def test_a_client_that_was_shut_down_stays_away(tmp_path: Path) -> None:
    with engine(tmp_path / "s"):
        client = Executor.attach(str(tmp_path / "s"), 5)
        client.shutdown()
        assert not client._transport._thread.is_alive() and not client.is_ready()
