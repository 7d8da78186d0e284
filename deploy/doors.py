"""Closes a port of another process to new connections, while those that are open go on.

Triton's gRPC front takes new connections until it ends, and answers requests on them with errors that no proxy can tell from
answers. A port that refuses connections is what every proxy and client understands: they go elsewhere. The launcher takes a
duplicate of the server's listening socket (pidfd_getfd, Linux 5.6) and shuts that down, which needs the right to trace it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PIDFD_GETFD = 438  # the number of this system call on every architecture
_LISTENING = "0A"
_SO_ATTACH_FILTER = 26
_FILTER = ctypes.create_string_buffer(  # instructions of the kernel's packet filter: code, two jumps, argument
    struct.pack("HBBI", 0x30, 0, 0, 13)  # load the byte with the flags of the TCP header
    + struct.pack("HBBI", 0x45, 0, 1, 0x02)  # does it open a connection (SYN)?
    + struct.pack("HBBI", 0x06, 0, 0, 0)  # yes: drop the packet
    + struct.pack("HBBI", 0x06, 0, 0, 0xFFFFFFFF),  # no: accept the packet
    32,
)


@contextmanager
def closing(pid: int, port: int) -> Iterator[bool]:
    """Close a TCP port of a process. Within the block connection attempts get no answer while earlier ones are still accepted;
    after it, new ones are refused.
    Without that pause a connection that is made but not yet accepted would be reset, with the request on it.

    Yields whether it works: not where the process has no such port, nor where tracing it is not allowed, as in most containers.
    """
    listeners = _duplicates(pid, port)
    try:
        for listener in listeners:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _drop_first_packets())
        yield bool(listeners)
        for listener in listeners:
            listener.shutdown(socket.SHUT_RDWR)
    finally:
        for listener in listeners:
            listener.close()


def _drop_first_packets() -> bytes:
    """A filter for the packets of a socket (struct sock_fprog): drop those that ask for a connection, of which the client sends
    another one a second later.
    """
    return struct.pack("HP", len(_FILTER) // 8, ctypes.addressof(_FILTER))


def _duplicates(pid: int, port: int) -> list[socket.socket]:
    """The process's sockets that listen at the port, shared with it."""
    try:
        numbers = list(_listening(pid, port))
        process = os.pidfd_open(pid)
    except OSError:  # The process has ended, or belongs to another user.
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        duplicates = [libc.syscall(_PIDFD_GETFD, process, number, 0) for number in numbers]
    finally:
        os.close(process)
    return [socket.socket(fileno=duplicate) for duplicate in duplicates if duplicate >= 0]


def _listening(pid: int, port: int) -> Iterator[int]:
    """File descriptors of the process's sockets that listen at the port."""
    inodes = _inodes(pid, port)
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # It was closed since the directory was listed.
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            yield int(entry.name)


def _inodes(pid: int, port: int) -> set[str]:
    """The sockets that listen at the port in the process's network, by their numbers."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found
