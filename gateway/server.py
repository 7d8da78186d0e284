"""The gateway as a process: uvicorn with an end that its clients hear of."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket

import uvicorn

from gateway.app import create_app
from gateway.connection import Connection
from gateway.core import Gateway
from gateway.settings import Settings

_log = logging.getLogger("everbatch.gateway")
LAST_EVENTS_S = 3  # for the last events to go out, after the replies were ended


class GatewayServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT; replies then have `shutdown_grace_s` to end by themselves."""

    def __init__(self, settings: Settings) -> None:
        self.gateway = Gateway(settings)
        super().__init__(
            uvicorn.Config(
                create_app(self.gateway),
                host=settings.host,
                port=settings.port,
                http=Connection,
                log_config=None,
                access_log=False,
                lifespan="on",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(settings.shutdown_grace_s) + LAST_EVENTS_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.freeze()  # modules live as long as the process does: to look through them again and again takes 50 ms each time
        if self.started:
            _log.info(
                "OpenAI-compatible endpoint at http://%s/v1, its page at http://%s", self.address(), self.address()
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = self.gateway.running
        self.gateway.viewers.stop()  # they watch for hours; nothing of theirs is worth waiting for
        asyncio.get_running_loop().call_later(self.gateway.settings.shutdown_grace_s, running.stop)
        await super().shutdown(sockets)

    def address(self) -> str:
        """HOST:PORT, once started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"{host}:{port}"
