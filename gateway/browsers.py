"""Keeps web pages of other servers away. A server without keys trusts all programs of its machine, and a browser on that machine
runs the code of any page that it shows.

Two walls stand in front of all routes of a server without keys. A request that a browser sends for a page of another server
is refused, unless `allow_origins` has that page's origin. And the server answers to its own names only, where it listens on
a loopback address: a page whose name suddenly stands for this machine's address (DNS rebinding) is of no other server to a
browser, but still sends its own name. With keys neither is needed: a page does not have one.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from gateway.errors import GatewayError
from gateway.settings import Settings, is_loopback
from gateway.without_effect import IGNORED

OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")  # this machine itself
ANY_ORIGIN = "*"
EXPOSED = ("x-request-id", "request-id", "retry-after", IGNORED)  # headers that pages of other origins may read
PAGE = "/page/"  # the files of the page at / (gateway/page_routes.py), which links of other servers may lead to
_METHODS = ("GET", "HEAD", "POST", "DELETE")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]", re.IGNORECASE)
_PORT = re.compile(r":\d*$")
LONGEST_SHOWN = 80


def fault_of(origins: tuple[str, ...], hosts: tuple[str, ...], has_keys: bool) -> str | None:
    """The fault in the values of --allow-origin and --allow-host; None if there is none."""
    for origin in origins:
        if origin == ANY_ORIGIN and not has_keys:
            return (
                "--allow-origin * lets any web page use a server that asks for no key; "
                "give --api-keys FILE, or name the origins"
            )
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            return (
                f"--allow-origin {origin[:LONGEST_SHOWN]!r} is no origin; it is SCHEME://NAME or SCHEME://NAME:PORT, "
                "without a path"
            )
    for host in hosts:
        if not _NAME.fullmatch(host):
            return f"--allow-host {host[:LONGEST_SHOWN]!r} is no name of a server; it is NAME or an address, without a port"
    return None


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """The application with the headers by which a browser lets pages of these origins read its answers."""
    if not origins:
        return app
    return CORSMiddleware(
        app, [_lower(one) for one in origins], _METHODS, ("*",), expose_headers=EXPOSED, allow_private_network=True
    )


class Wall:
    """Refuses what a browser sends for a page that has no business here."""

    def __init__(self, settings: Settings) -> None:
        self._needs_no_key = settings.api_keys is None
        self._origins = frozenset(map(_lower, settings.allow_origins))
        named = frozenset(map(_lower, (*OWN_NAMES, settings.host, *settings.allow_hosts)))
        self._names = named if is_loopback(settings.host) or settings.allow_hosts else None  # None: any

    def check(self, scope: Scope) -> None:
        """Raises GatewayError(403)."""
        headers = Headers(scope=scope)
        is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if self._needs_no_key:
            self._check_host(headers.get("host", ""))
        if is_preflight or (self._needs_no_key and not _is_of_page(scope["path"])):
            self._check_origin(headers)

    def _check_host(self, given: str) -> None:
        """No browser leaves the header out."""
        name = _lower(_PORT.sub("", given))
        if given and self._names is not None and name not in self._names:
            shown = name[:LONGEST_SHOWN]
            text = (
                f"the request is for host {shown!r}, which is no name of this server, and it asks for no key; "
                "ask localhost, or start the server with --allow-host NAME"
            )
            raise GatewayError(403, text, code="permission_denied")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None:
            is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        elif ANY_ORIGIN in self._origins or _lower(origin) in self._origins:
            is_foreign = False
        else:
            site = headers.get("sec-fetch-site")  # what a browser says itself comes before what a page may have written
            is_foreign = site != "same-origin" if site is not None else not _is_own(origin, headers)
        if is_foreign:
            raise GatewayError(403, _foreign(origin), code="permission_denied")


def _is_of_page(path: str) -> bool:
    return path == "/" or path.startswith(PAGE)


def _is_own(origin: str, headers: Headers) -> bool:
    """True if a page of this origin came from the address that the request goes to, directly or through a proxy that says so.
    Browsers tell the same in Sec-Fetch-Site, but not over plain HTTP to other machines.
    """
    place = _lower(origin).partition("://")[2]
    return place != "" and place in (_lower(headers.get("host", "")), _lower(headers.get("x-forwarded-host", "")))


def _foreign(origin: str | None) -> str:
    shown = "another server" if origin is None else f"the origin {origin[:LONGEST_SHOWN]!r}"
    return f"a web page of {shown} may not use this server; start it with --allow-origin ORIGIN for pages that may"


def _lower(text: str) -> str:
    return text.strip().lower()
