"""Addresses as an operator writes them, checked before anything connects: ZeroMQ sockets, and collectors of traces."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from backend.api.errors import ConfigError, shown

MAX_SOCKET_PATH = 107  # bytes of the path of a Unix socket
_TCP = re.compile(r"tcp://(?:\*|[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(\d{1,5})")


_ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,253}:(\d{1,5})")


def check_address(key: str, address: str) -> None:
    """Raise ConfigError unless it is HOST:PORT, HOST a name or an IPv4 address, PORT 1 to 65535."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found[1]) <= 65535:
        raise ConfigError(
            f"{key} is {shown(address)!r}; write HOST:PORT, a name or an IPv4 address and a port of 1 to 65535"
        )


def is_bound(endpoint: str) -> bool:
    """True if a publisher binds its socket there, False if it connects to a subscriber that does. As vLLM decides it."""
    return endpoint.startswith(("tcp://*:", "tcp://[::]:", "ipc://"))


def port_of(endpoint: str) -> int | None:
    """The port of a TCP endpoint; None for another one."""
    tcp = _TCP.fullmatch(endpoint)
    return None if tcp is None else int(tcp[1])


def endpoint_of_replica(endpoint: str, index: int) -> str:
    """The endpoint that the replica `index` binds: ports are counted on, paths get its number. The first one's is `endpoint`."""
    port = port_of(endpoint)
    if port is not None:
        return f"{endpoint.rpartition(':')[0]}:{port + index}"
    return f"{endpoint}-{index}" if endpoint and index else endpoint


def check_endpoint(key: str, endpoint: str) -> None:
    """Raise ConfigError unless it is `tcp://HOST:PORT`, HOST a name, an address or `*`, or `ipc:///PATH`."""
    tcp = _TCP.fullmatch(endpoint)
    if tcp is not None and 1 <= int(tcp[1]) <= 65535:
        return
    scheme, _, path = endpoint.partition("://")
    if scheme == "ipc" and path.startswith("/") and path.isprintable():
        if len(path.encode()) <= MAX_SOCKET_PATH:
            return
        raise ConfigError(
            f"{key} is {shown(endpoint)}: the path has {len(path.encode())} bytes, the limit is {MAX_SOCKET_PATH}; choose a "
            f"shorter one"
        )
    raise ConfigError(
        f"{key} is {shown(endpoint)}, which is no endpoint; write tcp://*:5557, tcp://HOST:PORT with a port of 1 to 65535, "
        f"or ipc:///PATH"
    )


def check_otlp_endpoint(key: str, endpoint: str) -> None:
    """Raise ConfigError unless it is the address of a web server, without user, query and fragment."""
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    plain = endpoint.isascii() and endpoint.isprintable() and " " not in endpoint
    is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    if not (plain and is_url) or "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{key} is {shown(endpoint)!r}, which is no address of a collector; write http://HOST:4318, the port of OTLP over "
            f"HTTP, or leave it out"
        )
