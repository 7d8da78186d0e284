"""TritonStream: a gRPC stream to Triton that is never cancelled while its request lives.

Triton writes to freed memory now and then when a client cancels a stream on which answers are being sent, and keeps a request
whose stream is cancelled after its last response, with the instance of its model, which can then never be unloaded
(docs/reliability.md). When a client has left, `to_its_end` therefore reads on for as long as the server needs: a step of a large
model may take longer than any limit that could be set here. For the same reason no stream has a deadline.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc  # type: ignore[import-untyped]


class TritonStream:
    """One reader at a time."""

    def __init__(self, call: Any, *, takes_more: bool = False) -> None:
        """`takes_more`: requests are written to it with `write`."""
        self._call, self._takes_more = call, takes_more
        # Cancelling a task within read() or write() would cancel the stream, so they run in tasks of their own.
        self._reading: asyncio.Future[Any] | None = None
        self._writing: asyncio.Future[Any] | None = None

    @property
    def is_over(self) -> bool:
        return bool(self._call.done())

    async def read(self, timeout_s: float | None = None) -> Any:
        """The next response, or grpc.aio.EOF. Raises TimeoutError, and grpc.RpcError where the connection has ended."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        reading, self._reading = self._reading, None
        return reading.result()

    async def write(self, message: Any) -> None:
        """Raises asyncio.InvalidStateError for a stream that has ended, and grpc.RpcError."""
        self._writing = asyncio.ensure_future(self._call.write(message))
        await asyncio.wait({self._writing})
        writing, self._writing = self._writing, None
        writing.result()

    async def to_its_end(self) -> None:
        """Read until the server ends the stream. Only to be cancelled when this process ends: that cancels the stream."""
        try:
            if self._writing is not None:
                await asyncio.wait({self._writing})
                self._writing.exception()
            if self._takes_more:
                await self._call.done_writing()
            while await self.read() is not grpc.aio.EOF:
                pass
        except (
            grpc.RpcError,
            asyncio.InvalidStateError,
            asyncio.CancelledError,
        ):  # The reply was complete, or its reader has left.
            pass
        finally:
            self._call.cancel()  # Nothing happens when the stream is over.
