"""Loading, unloading and replacing models while the server runs: for keys with the word `admin` in the file of API keys;
without keys, for local programs. The launcher does it, and answers on its socket (deploy/control_socket.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from gateway.core import Gateway
from gateway.errors import GatewayError, unavailable
from gateway.keys import OPERATE_MODELS
from gateway.openapi import answer_of, as_json
from gateway.request_context import visit_of

LARGEST_ANSWER = 1 << 20
_ONE_MODEL = (
    "this server has one model; start it with --models FILE, or --model NAME=DIRECTORY, to load and unload models"
)


class ModelState(BaseModel):
    name: str
    state: str  # loaded, asleep, unloaded, failed
    engine: int  # its number; a replacement has another one
    owner: str  # the Triton model that starts the engine
    memory_bytes: int  # the size of weights and KV; 0 while it is not loaded
    requests: int  # that run or wait
    why: str  # it is not loaded; empty while it is
    operation: str  # the operation that runs; empty: none does


class ModelStates(BaseModel):
    models: list[ModelState]


def add_administration_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.get("/v1/admin/models", responses=answer_of(ModelStates))
    async def states(request: Request) -> Response:
        gateway.check_right(OPERATE_MODELS, visit_of(request.scope))
        return as_json({"models": await _ask(gateway, "list", "")})

    @api.post("/v1/admin/models/{name}/load", responses=answer_of(ModelStates))
    async def load(request: Request, name: str) -> Response:
        return await _change(gateway, request, "load", name)

    @api.post("/v1/admin/models/{name}/unload", responses=answer_of(ModelStates))
    async def unload(request: Request, name: str) -> Response:
        return await _change(gateway, request, "unload", name)

    @api.post("/v1/admin/models/{name}/replace", responses=answer_of(ModelStates))
    async def replace(request: Request, name: str) -> Response:
        return await _change(gateway, request, "replace", name)


async def _change(gateway: Gateway, request: Request, operation: str, name: str) -> Response:
    """Answers when it is done. It goes on where the client does not wait for that."""
    gateway.check_right(OPERATE_MODELS, visit_of(request.scope))
    work = asyncio.ensure_future(_operate(gateway, operation, name[:256]))
    return as_json({"models": await asyncio.shield(work)})


async def _operate(gateway: Gateway, operation: str, name: str) -> list[dict[str, Any]]:
    """Raises GatewayError."""
    try:
        return await _ask(gateway, operation, name)
    finally:
        gateway.forget_facts()  # a replacement may take other lengths, or images


async def _ask(gateway: Gateway, operation: str, name: str) -> list[dict[str, Any]]:
    """Raises GatewayError."""
    path = gateway.settings.control
    if path is None:
        raise GatewayError(404, _ONE_MODEL, code="not_found")
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=LARGEST_ANSWER)
        try:
            writer.write(msgspec.json.encode({"operation": operation, "model": name}) + b"\n")
            answer = msgspec.json.decode(await reader.readline())
        finally:
            writer.close()
    except (OSError, ValueError):  # no socket, or no answer because it has just been closed
        raise unavailable("the launcher does not answer; the server is being started or stopped") from None
    if answer["error"]:
        status = 400 if answer["is_request"] else 503
        raise GatewayError(status, answer["error"], code="model_operation_failed")
    models: list[dict[str, Any]] = answer["models"]
    return models
