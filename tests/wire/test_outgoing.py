"""Frames to a client: in order and never waited for, whether it reads at once, late or never."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from backend.wire import outgoing
from backend.wire.client import wait_until
from backend.wire.outgoing import Outgoing, ReaderTooSlow

FRAME = bytes(range(256)) * 256


@pytest.fixture
def ends() -> Iterator[tuple[Outgoing, socket.socket]]:
    """Returns what the engine writes to, and what the client reads from."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    sender = Outgoing(ours, "test-writer")
    with ours, theirs:
        yield sender, theirs


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 20), b""))


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(4, "little") + FRAME for number in range(count)]


def test_a_frame_that_the_socket_takes_needs_no_thread(ends: tuple[Outgoing, socket.socket]) -> None:
    sender, client = ends
    sender.send(b"hello")
    assert client.recv(100) == b"hello"


def test_frames_that_the_socket_does_not_take_at_once_arrive_whole_and_in_order(
    ends: tuple[Outgoing, socket.socket],
) -> None:
    sender, client = ends
    frames = numbered(100)
    for frame in frames[:50]:  # more than any socket buffer holds, and nobody reads
        sender.send(frame)
    sender.start()
    for frame in frames[50:]:
        sender.send(frame)
    sender.finish()
    assert read_all(client) == b"".join(frames)


def test_after_a_backlog_frames_are_sent_at_once_again(ends: tuple[Outgoing, socket.socket]) -> None:
    sender, client = ends
    frames = numbered(20)
    for frame in frames:
        sender.send(frame)
    sender.start()
    expected = b"".join(frames)
    received = b""
    while len(received) < len(expected):
        received += client.recv(1 << 20)
    sender.send(b"next")
    assert received == expected and client.recv(100) == b"next"


def test_a_client_that_never_reads_is_given_up(
    ends: tuple[Outgoing, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "MAX_BACKLOG", 3)
    sender, _ = ends
    with pytest.raises(ReaderTooSlow):
        for frame in numbered(100):
            sender.send(frame)


def test_a_client_that_is_gone_is_an_error_of_the_socket(ends: tuple[Outgoing, socket.socket]) -> None:
    sender, client = ends
    client.close()
    with pytest.raises(OSError):
        sender.send(b"hello")


def test_a_backlog_is_bounded_in_bytes_too_and_what_was_sent_counts_no_more(
    ends: tuple[Outgoing, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "MAX_BACKLOG_BYTES", 20 * len(FRAME))
    sender, client = ends
    num_sent = 0
    with pytest.raises(ReaderTooSlow):
        for frame in numbered(1000):
            sender.send(frame)
            num_sent += 1
    sender.start()
    remaining = num_sent * len(numbered(1)[0])
    while remaining:
        remaining -= len(client.recv(1 << 20))
    assert wait_until(lambda: not sender._backlog, 5)
    for frame in numbered(15):
        sender.send(frame)  # as much as before again
