"""How the two ends of a connection between an engine and its client meet: at a file of this machine, or over a network.

At a file (AF_UNIX in a directory of mode 0700) the kernel says which user the other process belongs to. Over a network (TCP) both
ends prove that they know a key, by the challenge of multiprocessing.connection (HMAC); the key itself never travels. What follows
is neither encrypted nor signed, so it belongs on a network of its own, as the traffic of Ray itself does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import NamedTuple, Protocol

from backend.wire.outgoing import hang_up

log = logging.getLogger("everbatch.engine")
HANDSHAKE_S = 5.0
GIVEN_UP = "engine-given-up"  # a file beside the socket of an engine that is not started again
_BY_STRANGERS = (
    AuthenticationError,
    OSError,
    EOFError,
    AssertionError,
    ValueError,
)  # Arbitrary bytes raise any of these.


class Address(Protocol):
    """Where a client finds an engine."""

    def connect(self) -> socket.socket:
        """Raises OSError while no engine listens."""
        ...

    def may_be_served(self) -> bool:
        """False once it is certain that no engine will listen here again."""
        ...


class ListeningAddress(Address, Protocol):
    """Where an engine waits for its clients."""

    def listen(self) -> socket.socket:
        """A socket that listens. Raises OSError."""
        ...

    def admits(self, connection: socket.socket) -> bool:
        """True if the other end of an accepted connection may be a client. May take HANDSHAKE_S."""
        ...


class FileAddress(NamedTuple):
    """A socket in the file system, for processes of one user on one machine."""

    path: str

    def connect(self) -> socket.socket:
        return _connected(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), self.path)

    def may_be_served(self) -> bool:
        """A supervisor that gives its engine up leaves a file beside the socket; one that ends removes the directory."""
        return not Path(self.path).with_name(GIVEN_UP).exists() and Path(self.path).parent.exists()

    def listen(self) -> socket.socket:
        """Listen at this address: its directory is made with mode 0700, and a stale socket is replaced."""
        Path(self.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(self.path).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        os.chmod(self.path, 0o600)
        listener.listen()
        return listener

    def admits(self, connection: socket.socket) -> bool:
        user = peer(connection).uid
        if user in (os.getuid(), 0):
            return True
        log.warning("a connection of user %d was refused", user)
        return False


class NetworkAddress(NamedTuple):
    """A port, for processes that share a key. Port 0 listens at a free one."""

    host: str
    port: int
    key: bytes

    def connect(self) -> socket.socket:
        sock = _connected(socket.socket(socket.AF_INET, socket.SOCK_STREAM), (self.host, self.port))
        if _agree(sock, self.key, challenges_first=False):
            return sock
        sock.close()
        raise ConnectionRefusedError("the engine has another key")

    def may_be_served(self) -> bool:
        return True

    def listen(self) -> socket.socket:
        return socket.create_server((self.host, self.port))

    def admits(self, connection: socket.socket) -> bool:
        if _agree(connection, self.key, challenges_first=True):
            return True
        with contextlib.suppress(OSError):  # The stranger has gone, and its address with it.
            log.warning("a connection from %s was refused: it does not know the key", connection.getpeername()[0])
        return False


def _connected(sock: socket.socket, to: str | tuple[str, int]) -> socket.socket:
    try:
        if sock.family == socket.AF_INET:
            sock.settimeout(HANDSHAKE_S)
        sock.connect(to)
        sock.settimeout(None)
    except OSError:
        sock.close()
        raise
    return sock


def _agree(sock: socket.socket, key: bytes, challenges_first: bool) -> bool:
    """Each end proves to the other one that it knows the key. False if one cannot, or takes longer than HANDSHAKE_S in all."""
    steps = [deliver_challenge, answer_challenge]
    limit = threading.Timer(HANDSHAKE_S, hang_up, (sock,))
    limit.daemon = True
    limit.start()
    with contextlib.closing(Connection(os.dup(sock.fileno()))) as connection:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for step in steps if challenges_first else reversed(steps):
                step(connection, key)
        except _BY_STRANGERS:
            return False
        finally:
            limit.cancel()
    return True


class Peer(NamedTuple):
    pid: int  # 0: a process outside of this container
    uid: int


def peer(sock: socket.socket) -> Peer:
    """The process that connected, or that listens where this one has connected to."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return Peer(int(pid), int(uid))
