"""grpc_transport for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc  # type: ignore[import-untyped]

from client.errors import Cancelled, Unavailable
from client.grpc_messages import CHANNEL_OPTIONS, encode_request, read_answer, rpc_failure
from client.grpc_transport import NO_END
from client.messages import GenerateRequest, TextChunk
from client.settings import Settings


class AsyncGrpcTransport:
    """A channel to one server, made at the first request, in the event loop of that request."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._channel: Any = None
        self._closed = False

    async def stream(
        self, request: GenerateRequest, timeout_s: float, request_id: str
    ) -> AsyncGenerator[TextChunk, None]:
        """Yield chunks until the final one. Leaving the iteration early cancels the request. Raises ClientError."""
        settings = self._settings
        if self._closed:
            raise Cancelled("the client is closed; make another")
        message = encode_request(request, settings.model, request_id, timeout_s)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._open())
        call = stub.ModelStreamInfer(iter([message]), timeout=timeout_s, metadata=settings.metadata)
        try:
            async for answer in call:
                chunk = read_answer(answer)
                yield chunk
                if chunk.final:
                    return
            raise Unavailable(NO_END)
        except asyncio.CancelledError:
            if self._closed and not _task_is_cancelled():
                raise Cancelled(f"the request to {settings.address.url} was cancelled") from None
            raise
        except grpc.RpcError as error:
            raise rpc_failure(error, settings.address, timeout_s, has_key=bool(settings.api_key)) from None
        finally:
            call.cancel()  # Nothing happens when the stream is over already.

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    def _open(self) -> Any:
        if self._channel is None:
            address = self._settings.address
            if address.tls:
                credentials = grpc.ssl_channel_credentials(self._settings.ca_pem)
                self._channel = grpc.aio.secure_channel(address.authority, credentials, options=CHANNEL_OPTIONS)
            else:
                self._channel = grpc.aio.insecure_channel(address.authority, options=CHANNEL_OPTIONS)
        return self._channel


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
