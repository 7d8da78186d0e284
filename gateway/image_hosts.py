"""Which URLs of images may be fetched: pure rules for hosts, URLs and addresses.

A server that fetches what its clients name can be made to ask programs that only it reaches. So the operator names the hosts,
and each address is looked at, whatever name it belongs to.
"""

from __future__ import annotations

import ipaddress
import re
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple

OPTION = "--allow-image-hosts HOST[,HOST]"
LONGEST_URL = 4096
_PORTS = {"http": 80, "https": 443}
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_ENTRY = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:]+)(?::(?P<port>[0-9]{1,5}))?")
_PLAIN = re.compile(r"[!-~]+")  # no space, no control character, nothing beyond ASCII
# Networks that lead to others, where an address of a machine nearby hides in one that looks public; and what clouds keep at
# addresses that are public by their number.
_ALSO_REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            *("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::ffff:0:0/96", "::/96", "fec0::/10"),
            *("168.63.129.16/32", "192.88.99.0/24"),
        ),
    )
)


class UrlFault(ValueError):
    """A fault of a URL: the part of a sentence that follows its name."""


class Target(NamedTuple):
    """A URL that may be asked, once its address is known to be allowed. `path` and `query` are encoded as they were given."""

    scheme: str
    host: str
    port: int
    path: str
    query: str

    @property
    def authority(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS[self.scheme] else f"{name}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}" + (f"?{self.query}" if self.query else "")


class AllowedHosts:
    """The hosts that images may come from: HOST, HOST:PORT, or *.HOST for every name below it. Without a port: 80 and 443."""

    def __init__(self, entries: Sequence[str]) -> None:
        """Raises ValueError, one sentence, for an entry that is no host."""
        self._names: dict[str, set[int]] = {}
        self._below: dict[str, set[int]] = {}
        for entry in entries:
            name, ports = _entry(entry)
            held = self._below if name.startswith("*.") else self._names
            held.setdefault(name.removeprefix("*."), set()).update(ports)

    def __bool__(self) -> bool:
        return bool(self._names or self._below)

    def target(self, url: str) -> Target:
        """Raises UrlFault."""
        target = parsed(url)
        if not self:
            raise UrlFault(f"is not fetched, because this server was started without {OPTION}; send a data: URL")
        if not self._holds(target):
            of_port = "" if target.port in _PORTS.values() else f" with port {target.port}"
            raise UrlFault(
                f"is not fetched, because {target.host[:80]}{of_port} is no host of {OPTION}; send a data: URL"
            )
        return target

    def _holds(self, target: Target) -> bool:
        labels = target.host.split(".")
        above = (".".join(labels[i:]) for i in range(1, len(labels)))
        ports = self._names.get(target.host, set()).union(*(self._below.get(name, set()) for name in above))
        return target.port in ports


def fault_of_hosts(entries: Sequence[str]) -> str | None:
    """A sentence about the first wrong value of the option; None if there is none."""
    try:
        AllowedHosts(entries)
    except ValueError as error:
        return str(error)
    return None


def split(values: Sequence[str]) -> tuple[str, ...]:
    """The hosts of an option that may be given several times, each time with several hosts."""
    return tuple(host.strip() for value in values for host in value.split(",") if host.strip())


def _entry(text: str) -> tuple[str, set[int]]:
    found = _ENTRY.fullmatch(text.lower())
    name = "" if found is None else found["name"]
    is_address = _address(name.strip("[]")) is not None
    if found is None or not (is_address or (_HOST.fullmatch(name.removeprefix("*.")) and len(name) <= 255)):
        raise ValueError(
            f"--allow-image-hosts {text[:80]!r} is no host; write it as images.example.org or *.example.org, without https://"
        )
    if found["port"] is not None and not 1 <= int(found["port"]) <= 65535:
        raise ValueError(f"--allow-image-hosts {text[:80]!r}: a port is a number from 1 to 65535")
    ports = set(_PORTS.values()) if found["port"] is None else {int(found["port"])}
    return name.strip("[]"), ports


def parsed(url: str) -> Target:
    """The parts of an http: or https: URL. What another program could read differently is refused. Raises UrlFault."""
    if len(url) > LONGEST_URL:
        raise UrlFault(f"has {len(url)} characters, the limit is {LONGEST_URL}; send a data: URL")
    if not _PLAIN.fullmatch(url) or "\\" in url:
        raise UrlFault(
            "has a character that a URL cannot have; encode it, and write the host in its form of ASCII (xn--...)"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        raise UrlFault("is no URL; check its host and port") from None
    if parts.scheme not in _PORTS:
        raise UrlFault(f"has the scheme {parts.scheme[:20]!r}; https and http are fetched, or send a data: URL")
    if "@" in parts.netloc:
        raise UrlFault("holds a user or a password, which is not sent; leave it out")
    host = (parts.hostname or "").removesuffix(".")
    if _address(host) is None and not (_HOST.fullmatch(host) and len(host) <= 253):
        raise UrlFault("names no host that can be asked; check it")
    if port == 0 or (port is None and parts.netloc.endswith(":")):
        raise UrlFault("has a port that nothing listens at; leave it out")
    port = _PORTS[parts.scheme] if port is None else port
    return Target(parts.scheme, host, port, parts.path or "/", parts.query)


def redirected(target: Target, location: str, allowed: AllowedHosts) -> Target:
    """Where an answer sends its reader. Raises UrlFault."""
    after = allowed.target(urllib.parse.urljoin(target.url, location))
    if target.scheme == "https" and after.scheme == "http":
        raise UrlFault(
            "leads from https: to http:, where anybody on the way could exchange the image; send a data: URL"
        )
    return after


def is_public(text: str) -> bool:
    """True for an address of the internet at large; False for one that stands for this machine, its network or its cloud."""
    address = _address(text)
    if address is None or getattr(address, "scope_id", None) is not None:
        return False
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    return not any(address in network for network in _ALSO_REFUSED if network.version == address.version)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
