"""Identifies the process at the other end of a local socket, by the kernel."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple


class Peer(NamedTuple):
    pid: int  # 0: a process outside of this container
    uid: int


def peer(sock: socket.socket) -> Peer:
    """The process that connected, or that listens where this one has connected to."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return Peer(int(pid), int(uid))
