"""Addresses: who may connect, over a file and over a network."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection

import pytest

from backend.api.config.schema import EngineConfig
from backend.api.request import RequestId
from backend.core.messages import Cancel, ClientGone, Command, Hello, Message
from backend.core.step import ModelInfo
from backend.wire import address as addresses
from backend.wire.address import NetworkAddress
from backend.wire.client import SocketTransport, wait_until
from backend.wire.engine_server import MAX_GREETINGS, EngineServer

KEY = b"k" * 32


@pytest.fixture
def posted() -> queue.SimpleQueue[Command | ClientGone]:
    return queue.SimpleQueue()


@pytest.fixture
def server(posted: queue.SimpleQueue[Command | ClientGone]) -> Iterator[EngineServer]:
    hello = lambda index: Hello(index, ModelInfo("m", 10, 20), "", EngineConfig())
    server = EngineServer(NetworkAddress("127.0.0.1", 0, KEY), posted.put, hello)
    yield server
    server.close()


def transport(port: int, key: bytes, messages: queue.SimpleQueue[Message]) -> SocketTransport:
    made = SocketTransport(NetworkAddress("127.0.0.1", port, key))
    made.start(messages.put, lambda: None)
    return made


def test_both_ends_that_know_the_key_talk(
    server: EngineServer, posted: queue.SimpleQueue[Command | ClientGone]
) -> None:
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    client = transport(server.port, KEY, messages)
    hello = messages.get(timeout=10)
    assert isinstance(hello, Hello)
    command = Cancel(RequestId(hello.client_index << 40 | 1))
    client.send(command)
    assert posted.get(timeout=10) == command
    client.close(False)
    assert posted.get(timeout=10) == ClientGone(hello.client_index)


def test_another_key_gets_nothing(server: EngineServer, posted: queue.SimpleQueue[Command | ClientGone]) -> None:
    with pytest.raises(ConnectionRefusedError, match="another key"):
        NetworkAddress("127.0.0.1", server.port, b"x" * 32).connect()
    assert posted.empty()


def test_a_server_that_does_not_know_the_key_is_refused() -> None:
    """A stranger who took the port welcomes every client, cannot answer a client's challenge, and never sees a request."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        with listener.accept()[0] as other, closing(Connection(os.dup(other.fileno()))) as connection:
            connection.send_bytes(b"#CHALLENGE#" + b"x" * 40)
            connection.recv_bytes(256)
            connection.send_bytes(b"#WELCOME#")
            with suppress(EOFError, OSError):
                connection.recv_bytes(256)
                connection.send_bytes(b"x" * 16)

    stranger = threading.Thread(target=pretend)
    stranger.start()
    with pytest.raises(ConnectionRefusedError, match="another key"):
        NetworkAddress("127.0.0.1", listener.getsockname()[1], KEY).connect()
    stranger.join(10)
    listener.close()


def test_a_stranger_who_speaks_slowly_has_no_more_time_than_others(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "HANDSHAKE_S", 0.5)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        with suppress(ConnectionError):
            for byte in b"\x00\x00\x00\x40" + b"x" * 64:
                stranger.sendall(bytes([byte]))
                time.sleep(0.1)
    assert time.monotonic() - began < 4, "it was hung up on before it had said all"


def test_strangers_who_keep_silent_take_a_bounded_number_of_threads(server: EngineServer) -> None:
    """Where all places are taken by them, others are refused until their time is over."""
    with ExitStack() as silent:
        for _ in range(MAX_GREETINGS):
            silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert wait_until(lambda: num_greetings() == MAX_GREETINGS, 10)
        with socket.create_connection(("127.0.0.1", server.port)) as refused:
            refused.settimeout(addresses.HANDSHAKE_S / 2)
            assert refused.recv(1) == b"", "closed at once, and not asked for the key"
    assert wait_until(lambda: num_greetings() == 0, 10)
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    client = transport(server.port, KEY, messages)
    assert isinstance(messages.get(timeout=10), Hello)
    client.close(False)


def num_greetings() -> int:
    return sum(thread.name == "engine-greeting" for thread in threading.enumerate())


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x04abcd"],
    ids=["silence", "http", "huge", "wrong"],
)
def test_strangers_are_hung_up_on_and_others_go_on(
    server: EngineServer, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "HANDSHAKE_S", 1.0)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(said)
        messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        client = transport(server.port, KEY, messages)
        assert isinstance(messages.get(timeout=10), Hello), "nobody waits for the stranger"
        client.close(False)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                if not stranger.recv(4096):
                    break
            except ConnectionError:
                break
        assert time.monotonic() < until, "the stranger is still connected"
