"""The routes of the OpenAI-compatible endpoint."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway import translate
from gateway.answers import Outlet
from gateway.choices import whole
from gateway.chunks import ChatChunks, CompletionChunks, Head, chat_body, completion_body
from gateway.core import Gateway
from gateway.counters import triton_page
from gateway.errors import GatewayError, unavailable
from gateway.front import Front
from gateway.messages import ChatRequest, Completing, CompletionRequest
from gateway.openapi import answer_of, body_of, page
from gateway.outputs import ChatCompletion, Completion, DeletedResponse, Health, ModelCard, ModelList, ResponseBody
from gateway.request_log import RouteNames
from gateway.response_events import ResponseWriter
from gateway.response_messages import ResponseRequest
from gateway.tools import wants_calls
from gateway.visit import visit_of


def create_app(gateway: Gateway) -> ASGIApp:
    """The whole ASGI application. Nothing is fetched from the net for its pages: there is /openapi.json only."""

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        async with gateway.linked():
            yield

    api = FastAPI(
        title="Everbatch", version="1", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(GatewayError, _gateway_error)
    add_generating_routes(api, gateway)
    add_response_routes(api, gateway)
    add_other_routes(api, gateway)
    document = page(api, gateway.keys is not None)
    api.openapi = lambda: document  # type: ignore[method-assign]
    return Front(api, RouteNames(api.routes), gateway.settings, gateway.keys, gateway.counters)


def add_generating_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post(
        "/v1/chat/completions", openapi_extra=body_of(ChatRequest), responses=answer_of(ChatCompletion, streamed=True)
    )
    async def chat_completions(request: Request) -> Response:
        message, visit = gateway.read(ChatRequest, request), visit_of(request.scope)
        jobs = gateway.jobs([translate.chat(message)], visit, message.model)
        name, count = f"chatcmpl-{visit.request_id}", message.n or 1

        async def work(out: Outlet) -> None:
            if message.stream:
                head = Head(name, "chat.completion.chunk", message.model)
                chunks = ChatChunks(head, count, wants_usage(message), wants_calls(message))
                await gateway.send_chunks(out, jobs, visit, chunks)
            else:
                replies = await whole(gateway.link, jobs, visit)
                head = Head(name, "chat.completion", message.model)
                await out.json(chat_body(head, replies, wants_calls(message)))

        return gateway.answer(work, jobs)

    @api.post(
        "/v1/completions", openapi_extra=body_of(CompletionRequest), responses=answer_of(Completion, streamed=True)
    )
    async def completions(request: Request) -> Response:
        message, visit = gateway.read(CompletionRequest, request), visit_of(request.scope)
        count = message.n or 1
        jobs = gateway.jobs(translate.completions(message), visit, message.model)
        head = Head(f"cmpl-{visit.request_id}", "text_completion", message.model)

        async def work(out: Outlet) -> None:
            if message.stream:
                chunks = CompletionChunks(head, len(jobs) * count, count, wants_usage(message))
                await gateway.send_chunks(out, jobs, visit, chunks)
            else:
                await out.json(completion_body(head, await whole(gateway.link, jobs, visit), count))

        return gateway.answer(work, jobs)


def add_response_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post("/v1/responses", openapi_extra=body_of(ResponseRequest), responses=answer_of(ResponseBody, streamed=True))
    async def create_response(request: Request) -> Response:
        message, visit = gateway.read(ResponseRequest, request), visit_of(request.scope)
        earlier = gateway.earlier(message, visit.namespace)
        turns = [] if earlier is None else earlier.conversation()
        (job,) = gateway.jobs([translate.response(message, turns)], visit, message.model)
        writer = ResponseWriter(message)

        async def work(out: Outlet) -> None:
            await gateway.respond(out, message, job, earlier, visit, writer)

        return gateway.answer(work, [job], writer.failure)

    @api.get("/v1/responses/{response_id}", responses=answer_of(ResponseBody))
    async def get_response(request: Request, response_id: str) -> Response:
        found = gateway.store.get(visit_of(request.scope).namespace, response_id)
        if found is None:
            raise no_response()
        return Response(found.answer, media_type="application/json")

    @api.delete("/v1/responses/{response_id}", responses=answer_of(DeletedResponse))
    async def delete_response(request: Request, response_id: str) -> Response:
        if not gateway.store.delete(visit_of(request.scope).namespace, response_id):
            raise no_response()
        return as_json({"id": response_id, "object": "response", "deleted": True})


def add_other_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.get("/v1/models", responses=answer_of(ModelList))
    async def models() -> Response:
        names = (*gateway.settings.model_names, *gateway.settings.adapters)
        return as_json({"object": "list", "data": [gateway.card(name) for name in names]})

    @api.get("/v1/models/{name:path}", responses=answer_of(ModelCard))
    async def model(name: str) -> Response:
        gateway.check_model(name)
        return as_json(gateway.card(name))

    @api.post("/v1/embeddings", include_in_schema=False)
    async def embeddings() -> Response:
        text = "embeddings are not served here: the models generate text; use /v1/chat/completions or /v1/completions"
        raise GatewayError(404, text, code="unsupported_endpoint")

    @api.get("/health", responses=answer_of(Health))
    async def health() -> Response:
        if gateway.running.stopping or not await gateway.link.is_ready():
            raise unavailable("the server is not ready: the model is being loaded, or the server is being stopped")
        return as_json({"status": "ready"})

    @api.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        url = gateway.settings.metrics_url
        found = "" if url is None else await triton_page(url)
        own = gateway.counters.page(gateway.running.choices, gateway.store.held())
        if found is None:
            own += "# Triton's metrics page does not answer\n"
        return Response((found or "") + own, media_type="text/plain; version=0.0.4")


def wants_usage(message: Completing) -> bool:
    return message.stream_options is not None and bool(message.stream_options.include_usage)


def no_response() -> GatewayError:
    return GatewayError(
        404, "there is no such response; it was not stored, or is forgotten", "response_id", "not_found"
    )


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    visit_of(request.scope).error = error
    return as_json(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What FastAPI refuses by itself: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    text = "the request cannot be read"
    if error.status_code == 404:
        text = f"there is no such route; {_nearest_route(request)}"
    elif error.status_code == 405:
        text = "this method is not allowed here; the header Allow names those that are"
    return await _gateway_error(request, GatewayError(error.status_code, text, headers=dict(error.headers or {})))


def _nearest_route(request: Request) -> str:
    paths = [route.path for route in request.app.routes if isinstance(route, Route)]
    near = difflib.get_close_matches(request.url.path[:80], paths, n=1)
    return f"did you mean {near[0]}?" if near else "/openapi.json lists them"
