"""conversation for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Unpack

from client.async_client import AsyncEverbatchClient
from client.errors import ClientError
from client.history import END_TIMEOUT_S, History
from client.messages import TextChunk
from client.options import GenerateOptions


class AsyncConversation(History):
    """Messages so far (`messages`, of which `left_out` old turns are gone) and the session that holds their KV. One turn
    at a time.
    """

    def __init__(
        self, client: AsyncEverbatchClient, system: str | None = None, **options: Unpack[GenerateOptions]
    ) -> None:
        """`options`: for every turn. Raises TypeError for one that there is not."""
        self._client = client
        super().__init__(system, dict(options))

    async def say(self, text: str, images: Sequence[str] = ()) -> AsyncGenerator[TextChunk, None]:
        """Send a turn, yield the reply. Closing the iterator or cancelling the task cancels; what had come by then stays.

        `images`: encoded files in base64 (client/images.py), which stand ahead of the text.

        A turn that fails, or was cancelled before its first text, is taken back: the conversation is as before. Raises
        ClientError.
        """
        self._begin(text, images)
        reply: list[str] = []
        keep = False
        try:
            async with aclosing(self._send()) as chunks:
                async for chunk in chunks:
                    reply.append(chunk.text)
                    yield chunk
            keep = True
        except (GeneratorExit, asyncio.CancelledError):
            keep = any(reply)
            raise
        finally:
            self._finish("".join(reply), keep=keep)

    async def end(self) -> None:
        """Let the server forget the session. Best effort: it forgets idle ones by itself."""
        request = self._end_request()
        if request is None:
            return
        try:
            await self._client.complete(request, timeout_s=END_TIMEOUT_S)
        except ClientError:
            return  # A server that is gone, or that has forgotten the session already, has nothing to end.

    async def _send(self) -> AsyncGenerator[TextChunk, None]:
        while True:
            try:
                request = self._request()
                async with aclosing(self._client.send(request)) as chunks:
                    async for chunk in chunks:
                        self._known |= request.session is not None
                        yield chunk
                return
            except ClientError as error:
                pause_s = self._pause_after(error)
            await asyncio.sleep(pause_s)
