"""The engine's side of the socket: what cannot be read or sent fails alone, and every connection's end is told once."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from backend.api import EngineConfig, ErrorCode, InvalidRequest, Request, Response, SamplingConfig
from backend.api.response import Result
from backend.api.stats import DebugTensors, IterationStats, Records
from backend.api.tensor import TensorData
from backend.core.messages import (
    CLIENT_SHIFT,
    Cancel,
    ClientGone,
    Command,
    Heartbeat,
    Hello,
    Message,
    Recorded,
    Responses,
    Submit,
)
from backend.core.step import ModelInfo
from backend.wire import engine_server, framing
from backend.wire.address import Peer as OtherEnd
from backend.wire.client import SocketTransport, wait_until
from backend.wire.engine_server import EngineServer
from backend.wire.framing import FrameTooLarge, decode_message, encode_frame, receive_frame
from backend.wire.heartbeat import HeartbeatSender

LIMIT = 10_000
MINE = 1 << CLIENT_SHIFT


class Peer:
    """A client on the bare socket."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(5)
        self.sock.connect(path)
        assert isinstance(self.receive(), Hello)

    def send(self, body: bytes, announced: int | None = None) -> None:
        self.sock.sendall((len(body) if announced is None else announced).to_bytes(4, "little") + body)

    def submit(self, number: int) -> None:
        self.sock.sendall(encode_frame(Submit(MINE | number, Request([1], 1))))

    def receive(self) -> Message | None:
        """The next message that is no heartbeat; None at the end of the stream. AssertionError when none comes for 5 s."""
        deadline = time.monotonic() + 5
        while (frame := receive_frame(self.sock)) is not None:
            assert time.monotonic() < deadline, "only heartbeats come"
            if not isinstance(message := decode_message(frame), Heartbeat):
                return message
        return None


@pytest.fixture
def posted() -> queue.SimpleQueue[Command | ClientGone]:
    return queue.SimpleQueue()


@pytest.fixture
def server(tmp_path: Path, posted: queue.SimpleQueue[Command | ClientGone]) -> Iterator[EngineServer]:
    hello = lambda index: Hello(index, ModelInfo("m", 9, 9), "", EngineConfig())
    server = EngineServer(str(tmp_path / "s"), posted.put, hello)
    yield server
    server.close()


@pytest.fixture
def peer(server: EngineServer, tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(str(tmp_path / "s"))
    assert wait_until(lambda: 1 in server._connections, 5)
    with peer.sock:
        yield peer


@pytest.fixture
def small_frames(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a frame may have LIMIT bytes, and ten times as many are dropped."""
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", LIMIT)
    monkeypatch.setattr(framing, "MAX_DROPPED_BYTES", 10 * LIMIT)


def responses_of(peer: Peer) -> list[Response]:
    message = peer.receive()
    assert isinstance(message, Responses)
    return message.responses


def long_response(number: int, num_tokens: int, is_final: bool = False) -> Response:
    """A response of about five bytes a token."""
    return Response(MINE | number, result_or_none=Result([[1 << 20] * num_tokens], is_final=is_final))


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"hello", b"\x81\xa2\xff\xff\x01", b"\x81\xa1a" + b"\x91" * 5000 + b"\x01"])
def test_a_frame_of_garbage_is_dropped_and_the_next_command_arrives(
    peer: Peer, posted: queue.SimpleQueue[Command | ClientGone], body: bytes
) -> None:
    peer.send(body)
    peer.submit(1)
    assert posted.get(timeout=5).request_id == MINE | 1


def test_a_command_that_cannot_be_read_is_answered_under_its_own_id_and_the_next_one_arrives(
    peer: Peer, posted: queue.SimpleQueue
) -> None:
    peer.send(msgspec.msgpack.encode(Submit(MINE | 7, Request(["one"], 1))))
    peer.submit(8)
    (answer,) = responses_of(peer)
    assert answer.request_id == MINE | 7 and answer.error_code is ErrorCode.INVALID_ARGUMENT
    assert "wrong type" in answer.error_msg and "$" not in answer.error_msg, "no text of a library"
    assert [posted.get(timeout=5) for _ in range(2)] == [Cancel(MINE | 7), Submit(MINE | 8, Request([1], 1))]


def test_a_command_that_cannot_be_read_does_not_answer_for_another_client(
    peer: Peer, posted: queue.SimpleQueue
) -> None:
    peer.send(msgspec.msgpack.encode(Submit(2 << CLIENT_SHIFT | 7, Request(["one"], 1))))
    peer.submit(8)
    assert posted.get(timeout=5).request_id == MINE | 8


def test_a_frame_that_is_too_large_is_dropped_and_the_next_command_arrives(
    peer: Peer, posted: queue.SimpleQueue[Command | ClientGone], small_frames: None
) -> None:
    peer.send(bytes(LIMIT + 1))
    peer.submit(1)
    assert posted.get(timeout=5).request_id == MINE | 1


def test_a_frame_of_just_the_limit_is_read(peer: Peer, small_frames: None) -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, ours:
        theirs.sendall(LIMIT.to_bytes(4, "little") + bytes(LIMIT))
        assert len(receive_frame(ours)) == LIMIT


@pytest.mark.parametrize("body, announced", [(b"", 10 * LIMIT + 1), (b"x", 100), (b"x", LIMIT + 1), (b"", None)])
def test_every_end_of_a_connection_is_told_exactly_once(
    peer: Peer, posted: queue.SimpleQueue[Command | ClientGone], small_frames: None, body: bytes, announced: int | None
) -> None:
    """Announced beyond all bounds, ended within a frame, within one that is dropped, or between two."""
    if announced is not None:
        peer.send(body, announced)
    peer.sock.shutdown(socket.SHUT_WR)
    assert posted.get(timeout=5) == ClientGone(1)
    assert peer.receive() is None and posted.empty()


def test_a_command_under_the_id_of_another_client_is_dropped(
    peer: Peer, posted: queue.SimpleQueue[Command | ClientGone]
) -> None:
    peer.sock.sendall(encode_frame(Cancel(2 << CLIENT_SHIFT | 7)))
    peer.submit(8)
    assert posted.get(timeout=5).request_id == MINE | 8


def test_another_user_is_hung_up_on(server: EngineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.wire.address.peer", lambda sock: OtherEnd(1, os.getuid() + 1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(5)
        stranger.connect(str(tmp_path / "s"))
        assert stranger.recv(1) == b""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_end_of_a_connection_is_told_also_when_its_reader_fails(tmp_path: Path) -> None:
    """Whatever ends it: nobody else cancels the requests of that client."""
    posted = queue.SimpleQueue()

    def post(command: Command | ClientGone) -> None:
        if isinstance(command, Submit):
            raise RuntimeError("a mistake")
        posted.put(command)

    server = EngineServer(
        str(tmp_path / "t"), post, lambda index: Hello(index, ModelInfo("m", 9, 9), "", EngineConfig())
    )
    peer = Peer(str(tmp_path / "t"))
    with peer.sock:
        peer.submit(1)
        assert posted.get(timeout=5) == ClientGone(1)
        assert wait_until(lambda: "engine-reader-1" not in [thread.name for thread in threading.enumerate()], 5)
    server.close()


# ---- responses -------------------------------------------------------------------------------------------------------


def test_responses_that_are_too_large_together_are_sent_apart_and_in_order(
    server: EngineServer, peer: Peer, small_frames: None
) -> None:
    sent = [long_response(number, LIMIT // 12) for number in range(5)]
    server.deliver(sent)
    received: list[Response] = []
    while len(received) < len(sent):
        received += responses_of(peer)
    assert received == sent


@pytest.mark.parametrize("is_final", [True, False])
def test_a_response_that_is_too_large_fails_its_request_only(
    server: EngineServer,
    peer: Peer,
    posted: queue.SimpleQueue[Command | ClientGone],
    small_frames: None,
    is_final: bool,
) -> None:
    sent = [long_response(1, 1), long_response(2, LIMIT, is_final), long_response(3, 1)]
    server.deliver(sent)
    received: list[Response] = []
    while len(received) < len(sent):
        received += responses_of(peer)
    assert (received[0], received[2]) == (sent[0], sent[2])
    assert received[1].request_id == MINE | 2 and received[1].error_code is ErrorCode.INVALID_ARGUMENT
    assert f"the limit is {LIMIT}" in received[1].error_msg and "stream" in received[1].error_msg
    assert posted.get(timeout=5) == Cancel(MINE | 2), "it would go on otherwise, for nobody"


# ---- what makes a frame ----------------------------------------------------------------------------------------------


def test_a_command_beyond_the_limit_is_refused_by_whoever_wants_to_send_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", LIMIT)
    with pytest.raises(FrameTooLarge, match=rf"takes \d+ bytes .* limit is {LIMIT}; shorten"):
        encode_frame(Submit(1, Request([1], 1, cache_salt="x" * LIMIT)))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cache_salt": "ab\ud800"}, "cache_salt has a lone surrogate at character 2, which is no text; remove it$"),
        (
            {"client_id": 1 << 64},
            "client_id is 18446744073709551616; integers of a request are -9223372036854775808 to 1844",
        ),
        ({"end_ids": (1, -(1 << 63) - 1)}, "end_ids is -9223372036854775809; integers of a request are"),
        (
            {"sampling_config": SamplingConfig(seed=10**4400)},
            "seed is an integer of more than 77 digits; integers of a request are",
        ),
        (
            {"sampling_config": SamplingConfig(logit_bias={1 << 70: 1.0})},
            "logit_bias is 1180591620717411303424; integers of a request are",
        ),
        ({"end_ids": (object(),)}, "the request holds a value that is neither a number nor text"),
    ],
)
def test_a_value_that_cannot_be_sent_is_an_error_of_its_request_that_names_it(
    fields: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{named}"):
        encode_frame(Submit(1, Request([1], 1, **fields)))


def test_the_largest_legal_request_fits_into_a_frame() -> None:
    """The request is the largest by the default limits, with a prompt of a million tokens."""
    caps = EngineConfig().limits
    word = [1 << 20] * caps.max_word_tokens
    request = Request(
        [1 << 20] * 1_000_000,
        1,
        stop_words=[word] * caps.max_words,
        bad_words=[word] * 4 * caps.max_words,
        extra_inputs={"image": bytes(caps.max_extra_bytes)},
    )
    assert len(encode_frame(Submit(1, request))) < framing.MAX_FRAME_BYTES // 2


# ---- heartbeats ------------------------------------------------------------------------------------------------------


def test_the_age_of_a_turn_is_counted_in_beats_and_only_while_it_is_the_same_turn() -> None:
    turns, told = [None, 1, 1, 1, None, 2, 3, 3], []
    heart = HeartbeatSender(lambda: turns[len(told)], lambda message: told.append(message.turn_age_s))
    for _ in turns:
        heart.beat()
    assert told == [0, 0, 0.25, 0.5, 0, 0, 0, 0.25]


def test_every_client_hears_the_heart_without_being_asked(peer: Peer) -> None:
    assert isinstance(decode_message(receive_frame(peer.sock)), Heartbeat)


def test_a_client_that_does_not_read_is_not_sent_one_heartbeat_after_the_other(
    server: EngineServer, peer: Peer
) -> None:
    """They would fill its backlog, and it would be cut off for that."""
    connection = server._connections[1]
    responses = Responses([long_response(1, 10_000)])
    for _ in range(100):
        connection.send(responses)
    before = len(connection._outgoing._backlog)
    for _ in range(100):
        connection.send(Heartbeat(0.0))
    assert 0 < len(connection._outgoing._backlog) <= before


# ---- records ---------------------------------------------------------------------------------------------------------


def debug_tensors(iteration: int, num_bytes: int) -> DebugTensors:
    return DebugTensors(iteration, {"logits": TensorData("float32", (num_bytes // 4,), bytes(num_bytes))})


def records_of(peer: Peer) -> Records:
    message = peer.receive()
    assert isinstance(message, Recorded)
    return message.records


def test_debug_tensors_that_are_too_large_take_no_other_records_with_them(
    server: EngineServer, peer: Peer, small_frames: None
) -> None:
    steps = [debug_tensors(0, 40), debug_tensors(1, LIMIT), debug_tensors(2, 40)]
    server.publish_records(Records([IterationStats(7)], debug_tensors=steps))
    assert [records_of(peer) for _ in range(3)] == [
        Records([IterationStats(7)]),
        Records(debug_tensors=steps[:1]),
        Records(debug_tensors=steps[2:]),
    ]


def test_a_client_that_is_slow_loses_debug_tensors_and_nothing_else(
    server: EngineServer, peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket takes far less than the 8 MB of the first step, and more than 1 MB of them then wait."""
    monkeypatch.setattr(engine_server, "MAX_FRAME_BYTES", 1 << 20)
    for number in range(3):
        server.publish_records(Records([IterationStats(number)], debug_tensors=[debug_tensors(number, 8 << 20)]))
    got = [records_of(peer) for _ in range(4)]
    assert [step.iter for records in got for step in records.iterations] == [0, 1, 2]
    assert [step.iter for records in got for step in records.debug_tensors] == [0]
    assert "client 1: debug tensors of a step were dropped" in caplog.text and "the limit is 1048576" in caplog.text


def threads_of(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_nothing_is_kept_of_clients_that_have_left(
    server: EngineServer, tmp_path: Path, posted: queue.SimpleQueue[Command | ClientGone]
) -> None:
    before = open_files()
    for index in range(1, 21):
        peer = Peer(str(tmp_path / "s"))
        peer.sock.close()
        assert posted.get(timeout=5) == ClientGone(index)
    assert wait_until(lambda: not threads_of("engine-reader") and not threads_of("engine-writer"), 5)
    assert wait_until(lambda: len(open_files()) <= len(before), 5)
    assert server._connections == {}


def test_nothing_is_kept_of_connections_that_a_client_has_lost(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    before = open_files()
    greeted, lost = threading.Semaphore(0), threading.Semaphore(0)
    transport = SocketTransport(path)
    transport.start(lambda message: greeted.release() if isinstance(message, Hello) else None, lost.release)
    for _ in range(5):
        hello = lambda index: Hello(index, ModelInfo("m", 9, 9), "", EngineConfig())
        server = EngineServer(path, lambda command: None, hello)
        assert greeted.acquire(timeout=5)
        server.close()
        assert lost.acquire(timeout=5)
    transport.close(drain=False)
    assert wait_until(lambda: not threads_of("engine-client"), 5), threads_of("engine-client")
    assert wait_until(lambda: len(open_files()) <= len(before), 5)
