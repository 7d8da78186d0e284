"""LoRA adapters that are loaded and unloaded while the server runs, with vLLM's routes and bodies.

The engine reads directories below `lora.allowed_dir` only, and refuses all others by name. These routes are for keys with the
word `adapters` in the file of API keys; without keys, for local programs.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from gateway.choices import whole
from gateway.core import Gateway
from gateway.errors import GatewayError
from gateway.keys import CHANGE_ADAPTERS
from gateway.messages import LoadAdapter, UnloadAdapter
from gateway.openapi import body_of, errors_of
from gateway.request_context import RequestContext, visit_of
from gateway.served import Served
from gateway.triton_client import Job

_DONE: dict[int | str, dict[str, Any]] = {
    200: {"description": "Done", "content": {"text/plain": {"schema": {"type": "string"}}}},
    **errors_of(),
}


def add_adapter_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post("/v1/load_lora_adapter", openapi_extra=body_of(LoadAdapter), responses=_DONE, response_class=Response)
    async def load_adapter(request: Request) -> Response:
        context = visit_of(request.scope)
        gateway.check_right(CHANGE_ADAPTERS, context)
        message = await gateway.read_body(LoadAdapter, request)
        served = _model_of(gateway, context, message.model)
        name = message.lora_name
        if any(name in (*each.names, *each.prompt_adapters) for each in gateway.served):
            text = f"{name[:80]!r} is the name of a model or of a prompt adapter; give the adapter another one"
            raise GatewayError(400, text, "lora_name", "invalid_value")
        if any(name in each.adapters for each in gateway.served if each is not served):
            text = f"{name[:80]!r} is an adapter of another model; give this one another name"
            raise GatewayError(400, text, "lora_name", "invalid_value")
        command = {"load_adapter": {"name": name, "directory": message.lora_path}}
        await _change(gateway, served, context, command)
        return _done(f"Success: LoRA adapter '{name}' added successfully.")

    @api.post("/v1/unload_lora_adapter", openapi_extra=body_of(UnloadAdapter), responses=_DONE, response_class=Response)
    async def unload_adapter(request: Request) -> Response:
        context = visit_of(request.scope)
        gateway.check_right(CHANGE_ADAPTERS, context)
        message = await gateway.read_body(UnloadAdapter, request)
        served = _model_of(gateway, context, message.model, message.lora_name)
        await _change(gateway, served, context, {"unload_adapter": message.lora_name})
        return _done(f"Success: LoRA adapter '{message.lora_name}' removed successfully.")


def _model_of(gateway: Gateway, context: RequestContext, model: str | None, adapter: str = "") -> Served:
    """The model that an adapter is for: the one that is named, that has it, or the first. Raises GatewayError(404), also for a
    model of which the key may use nothing.
    """
    if model is not None:
        gateway.check_model(model, context.client)
    served = gateway.served_as(adapter if model is None else model)
    if not any(map(context.client.may_use, served.all_names)):
        text = "this key may not use the model that the adapter would be of; name another one as model"
        raise GatewayError(404, text, "model", "model_not_found")
    return served


async def _change(gateway: Gateway, served: Served, context: RequestContext, command: dict[str, Any]) -> None:
    """Send a command to the engine, and take over the names that requests may give from then on. Raises GatewayError."""
    async with gateway.changing_adapters:  # otherwise an older list could replace a newer one
        for index, request in enumerate((command, {"list_adapters": True})):
            job = Job(request, f"{context.request_id}-{index}", "", triton_model=served.triton_model)
            (reply,) = await whole(gateway.link, [job], context)
        served.adapters = tuple(msgspec.json.decode(reply.text, type=list[str]))


def _done(text: str) -> Response:
    return Response(text, media_type="text/plain")
