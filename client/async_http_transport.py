"""http_transport for asyncio, over aiohttp."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp
from yarl import URL

from client.errors import Cancelled, ClientError, no_http, no_server, no_tls, no_trust, too_late
from client.http_messages import (
    FinalMark,
    broken,
    comes_in_parts,
    decode_answer,
    parse_event,
    read_answer,
    request_body,
    request_headers,
    request_path,
    status_error,
)
from client.messages import GenerateRequest, TextChunk
from client.settings import Settings

MAX_EVENT_BYTES = 2**24


class AsyncHttpTransport:
    """One server, a connection for each request; the session is made at the first, in the event loop of that request."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._url = settings.address.url
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def stream(
        self, request: GenerateRequest, timeout_s: float, request_id: str
    ) -> AsyncGenerator[TextChunk, None]:
        """Yield chunks until the final one. Leaving the iteration early disconnects, which cancels. Raises
        ClientError.
        """
        try:
            response = await self._send(request, timeout_s, request_id)
            try:
                if response.status != 200:
                    has_key = bool(self._settings.api_key)
                    raise status_error(response.status, await response.read(), self._url, has_key=has_key)
                if not comes_in_parts(request):
                    yield read_answer(await response.read())
                    return
                mark = FinalMark(request.num_streams)
                async for line in response.content:
                    if (answer := parse_event(line)) is not None:
                        for chunk in mark.push(decode_answer(answer, final=False)):
                            yield chunk
                            if chunk.final:
                                return
                if self._closed:
                    raise self._cancelled()
                yield mark.end()
            finally:
                response.close()  # It hangs up, which cancels what has not ended.
        except TimeoutError:
            raise too_late(self._url, timeout_s) from None
        except aiohttp.ClientConnectorCertificateError:
            raise no_trust(self._url) from None
        except aiohttp.ClientSSLError:
            raise no_tls(self._url) from None
        except aiohttp.ClientConnectorError:
            raise no_server(self._url) from None
        except aiohttp.ClientResponseError:
            raise no_http(self._url) from None
        except (aiohttp.ClientError, OSError):  # The response was cut short, for example.
            raise self._cancelled() if self._closed else broken(self._url) from None

    def _cancelled(self) -> ClientError:
        return Cancelled(f"the request to {self._url} was cancelled")

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _send(self, request: GenerateRequest, timeout_s: float, request_id: str) -> aiohttp.ClientResponse:
        if self._closed:
            raise Cancelled("the client is closed; make another")
        scheme = "https" if self._settings.address.tls else "http"
        path = request_path(request, self._settings.model)
        return await self._opened().post(
            URL(f"{scheme}://{self._settings.address.authority}{path}", encoded=True),
            data=request_body(request, timeout_s, request_id),
            headers=request_headers(self._settings.api_key),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
        )

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            context = self._settings.ssl_context() if self._settings.address.tls else True
            # Sockets are not kept: one that the server has closed meanwhile would fail the next request.
            connector = aiohttp.TCPConnector(ssl=context, limit=0, force_close=True)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=jar, read_bufsize=MAX_EVENT_BYTES)
        return self._session
