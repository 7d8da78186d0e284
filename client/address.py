"""Where a server is, and how it is spoken to."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from typing import Literal

from client.checks import kind_of

ProtocolName = Literal["grpc", "http"]
DEFAULT_URLS: dict[str, str] = {"grpc": "127.0.0.1:8001", "http": "http://127.0.0.1:8000"}
# scheme -> protocol, whether it is TLS, default port
SCHEMES: dict[str, tuple[ProtocolName, bool, int]] = {
    "grpc": ("grpc", False, 8001),
    "grpcs": ("grpc", True, 443),
    "http": ("http", False, 8000),
    "https": ("http", True, 443),
}


@dataclass(frozen=True)
class Address:
    """One port of a server. `url` is how it is called in errors."""

    protocol: ProtocolName
    host: str
    port: int
    tls: bool
    url: str

    @property
    def authority(self) -> str:
        """HOST:PORT, with brackets around an address of IPv6."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(url: str | None = None, protocol: str | None = None) -> Address:
    """`url`: HOST:PORT, or with one of SCHEMES in front; None: a server on this machine with its default ports.

    `protocol`: grpc or http; None: what the URL says, and gRPC for one that says nothing. Raises TypeError for what is no
    text, and ValueError for an unknown scheme or protocol, for two that contradict each other, and for more than a host
    and a port.
    """
    for name, value in (("url", url), ("protocol", protocol)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} is {kind_of(value)}, a str is expected")
    if protocol not in (None, "grpc", "http"):
        raise ValueError(f"protocol is {protocol!r}, grpc or http is expected")
    text = url or DEFAULT_URLS[protocol or "grpc"]
    scheme, separator, rest = text.rstrip("/").partition("://")
    if not separator:
        scheme, rest = protocol or "grpc", text.rstrip("/")
    if scheme not in SCHEMES:
        raise ValueError(f"url is {text!r}, HOST:PORT, grpc://, grpcs://, http:// or https:// is expected")
    named, tls, default_port = SCHEMES[scheme]
    if protocol not in (None, named):
        secure = "s" if tls else ""
        remedy = f"{protocol}{secure}://{rest}"
        raise ValueError(f"url is {text!r}, which is not {protocol}; name {remedy!r}, or no protocol")
    host, port = _host_and_port(text, rest, default_port)
    return Address(named, host, port, tls, rest if scheme == "grpc" else f"{scheme}://{rest}")


def _host_and_port(text: str, rest: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urllib.parse.urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"url is {text!r}, its port is expected to be a number up to 65535") from None
    if not host or parts.path.strip("/") or parts.query or parts.fragment or "@" in rest:
        raise ValueError(f"url is {text!r}, a host and a port are expected and nothing behind them")
    return host, default_port if port is None else port
