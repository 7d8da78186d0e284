"""Fetches images from the hosts that the operator of the server has allowed (gateway/image_hosts.py has the rules).

A name is resolved once for each connection, its addresses are looked at, and the connection goes to one of these: there is no
second look-up whose answer could be another. TLS is verified by the name. Redirects are followed here, each like a new URL.
Nothing of the environment is used: no proxies, no cookies, no credentials.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gateway.errors import GatewayError
from gateway.image_hosts import AllowedHosts, Target, UrlFault, is_public, redirected
from gateway.images import Picture, checked, refused, shown, too_large

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

MOST_REDIRECTS = 3
AT_ONCE = 16  # fetches for all requests
AT_ONCE_OF_ONE = 4  # fetches for one request
_CHUNK = 1 << 16
_AGENT = "everbatch"
_REDIRECTS = (301, 302, 303, 307, 308)


class ImageFetcher:
    """Belongs to the event loop in which it is first used. `is_allowed` says of an address whether it may be asked."""

    def __init__(
        self,
        hosts: Sequence[str],
        timeout_s: float,
        is_allowed: Callable[[str], bool] = is_public,
        tls: Any = True,  # ssl.SSLContext; True: the system's certificates
    ) -> None:
        self._hosts, self._timeout_s = AllowedHosts(hosts), timeout_s
        self._is_allowed, self._tls = is_allowed, tls
        self._places = asyncio.Semaphore(AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def fetched(self, pictures: Sequence[Picture], limit: int, together: int) -> list[bytes]:
        """The bytes of each image, one for each URL. `limit`: bytes of one; `together`: of all. Raises GatewayError(400)."""
        places, budget = asyncio.Semaphore(AT_ONCE_OF_ONE), _Budget(together)
        first = {picture.url: picture for picture in reversed(pictures)}

        async def one(picture: Picture) -> bytes:
            async with places, self._places:
                return checked(picture, await self._fetched(picture, limit, budget), limit)

        targets = [self._checked(picture) for picture in first.values()]  # before anything is asked
        assert len(targets) == len(first)
        tasks = {url: asyncio.ensure_future(one(picture)) for url, picture in first.items()}
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(*tasks.values())
        except TimeoutError:
            late = next((one for one in pictures if not _has_come(tasks[one.url])), pictures[0])
            raise _fault(late, f"did not arrive within {self._timeout_s:g} s, the limit; send a data: URL") from None
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return [tasks[picture.url].result() for picture in pictures]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _checked(self, picture: Picture) -> Target:
        """Raises GatewayError(400)."""
        try:
            return self._hosts.target(picture.url)
        except UrlFault as fault:
            raise _fault(picture, str(fault)) from None

    async def _fetched(self, picture: Picture, limit: int, budget: _Budget) -> bytes:
        """Raises GatewayError(400)."""
        import aiohttp  # here, because most servers fetch nothing

        target = self._checked(picture)
        try:
            for _ in range(MOST_REDIRECTS + 1):
                found = await self._asked(target, picture, limit, budget)
                if isinstance(found, bytes):
                    return found
                target = redirected(target, found, self._hosts)
        except UrlFault as fault:
            text = str(fault) if target.url == picture.url else f"leads to {shown(target.url)}, which {fault}"
            raise _fault(picture, text) from None
        except _NotAllowed:
            text = f"is not fetched, because {target.host[:80]} has no address of the internet; send a data: URL"
            raise _fault(picture, text) from None
        except (aiohttp.ClientError, OSError, ValueError):  # the library's words tell clients of this server's network
            text = f"cannot be fetched: no image comes from {target.host[:80]}; check the URL, or send a data: URL"
            raise _fault(picture, text) from None
        raise _fault(picture, f"leads to more than {MOST_REDIRECTS} other URLs, the limit; send the last one")

    async def _asked(self, target: Target, picture: Picture, limit: int, budget: _Budget) -> bytes | str:
        """The bytes, or the URL that is to be asked instead. Raises GatewayError, UrlFault, _NotAllowed and errors of aiohttp."""
        if _is_address(target.host) and not self._is_allowed(target.host):  # The resolver is not asked for these.
            raise _NotAllowed
        async with self._opened().get(_as_url(target), allow_redirects=False) as response:
            if response.status in _REDIRECTS and (location := response.headers.get("location")):
                return location
            if response.status != 200:
                raise UrlFault(f"answers {response.status}; check the URL, or send a data: URL")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise UrlFault("answers with a compressed body, which is not read; send a data: URL")
            if not response.content_type.startswith("image/"):
                raise UrlFault(
                    f"answers with the type {response.content_type[:40]!r}, which is no image; check the URL"
                )
            named = f"the image at {picture.place}"
            if (response.content_length or 0) > limit:
                raise refused(picture, too_large(named, limit))
            data = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK):
                data += chunk
                if len(data) > limit:
                    raise refused(picture, too_large(named, limit))
                if not budget.take(len(chunk)):
                    raise refused(picture, too_large("all images of this request together", budget.total))
            return bytes(data)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            connector = aiohttp.TCPConnector(
                resolver=_resolver(self._is_allowed),
                use_dns_cache=False,
                force_close=True,
                limit=AT_ONCE,
                ssl=self._tls,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": _AGENT, "Accept": "image/*", "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=None),  # `fetched` has one for all of it
                trust_env=False,
                auto_decompress=False,
                requote_redirect_url=False,
            )
        return self._session


class _NotAllowed(Exception):
    """A host has an address that may not be asked."""


class _Budget:
    """Bytes that the images of one request may have together."""

    def __init__(self, total: int) -> None:
        self.total = self._left = total

    def take(self, count: int) -> bool:
        self._left -= count
        return self._left >= 0


def _resolver(is_allowed: Callable[[str], bool]) -> Any:
    from aiohttp.abc import AbstractResolver, ResolveResult

    class CheckedResolver(AbstractResolver):
        """Finds the addresses of a name, all of which must be allowed. What it returns is what is connected to."""

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
            if not found or not all(is_allowed(str(sockaddr[0])) for *_, sockaddr in found):
                raise _NotAllowed
            return [
                ResolveResult(
                    hostname=host,
                    host=str(sockaddr[0]),
                    port=port,
                    family=kind,
                    proto=proto,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
                for kind, _, proto, _, sockaddr in found
            ]

        async def close(self) -> None:
            """Nothing is held."""

    return CheckedResolver()


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()


def _as_url(target: Target) -> URL:
    """Made of its parts, so that no second reading of a text finds another host in it."""
    from yarl import URL

    return URL.build(
        scheme=target.scheme,
        host=target.host,
        port=target.port,
        path=target.path,
        query_string=target.query,
        encoded=True,
    )


def _has_come(task: asyncio.Future[bytes]) -> bool:
    return task.done() and not task.cancelled()


def _fault(picture: Picture, text: str) -> GatewayError:
    return refused(picture, f"the image at {picture.place}, {shown(picture.url)}, {text}", "invalid_image_url")
