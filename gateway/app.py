"""The routes of the OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway import translate
from gateway.adapters import add_adapter_routes
from gateway.administration import add_administration_routes
from gateway.answers import Outlet
from gateway.anthropic_routes import add_message_routes
from gateway.batches.routes import add_batch_routes, answering_batches
from gateway.choices import whole
from gateway.chunks import ChatChunks, CompletionChunks, Head, chat_body, completion_body
from gateway.conversations import add_conversation_routes
from gateway.core import Gateway, Responding
from gateway.errors import GatewayError, failed, unavailable
from gateway.infill import add_infill_routes
from gateway.interactive import add_interactive_routes
from gateway.items import LISTED, items_of, listed
from gateway.loads import add_load_routes
from gateway.messages import ChatRequest, Completing, CompletionRequest
from gateway.metrics import add_metrics_route
from gateway.middleware import Middleware
from gateway.ollama_routes import add_ollama_routes
from gateway.openapi import answer_of, as_json, body_of, page
from gateway.outputs import (
    ChatCompletion,
    Completion,
    DeletedResponse,
    Health,
    InputTokens,
    ItemList,
    ModelCard,
    ModelList,
    ResponseBody,
)
from gateway.page_routes import add_page_routes
from gateway.parts import PlainReader
from gateway.props import add_props_routes
from gateway.request_context import visit_of
from gateway.request_log import RouteNames
from gateway.response_events import ResponseWriter
from gateway.response_messages import InputTokensRequest, ResponseRequest
from gateway.tokens import add_token_routes
from gateway.vectors import add_vector_routes


def create_app(gateway: Gateway) -> ASGIApp:
    """The whole ASGI application. Nothing is fetched from the net for its pages: there is /openapi.json only."""

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        async with gateway.linked(), answering_batches(gateway, api):
            yield

    api = FastAPI(
        title="Everbatch", version="1", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan
    )
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(GatewayError, _gateway_error)
    api.add_exception_handler(Exception, _failed)
    add_generating_routes(api, gateway)
    add_response_routes(api, gateway)
    add_message_routes(api, gateway)
    add_vector_routes(api, gateway)
    add_infill_routes(api, gateway)
    add_ollama_routes(api, gateway)
    add_props_routes(api, gateway)
    add_conversation_routes(api, gateway)
    add_batch_routes(api, gateway)
    add_adapter_routes(api, gateway)
    add_token_routes(api, gateway)
    add_interactive_routes(api, gateway)
    add_load_routes(api, gateway)
    add_administration_routes(api, gateway)
    add_metrics_route(api, gateway)
    add_other_routes(api, gateway)
    add_page_routes(api, gateway)
    document = page(api, gateway.keys is not None)
    api.openapi = lambda: document  # type: ignore[method-assign]
    _answer_head(api)
    own = (gateway.settings, gateway.keys, gateway.counters, gateway.requests, gateway.body_limit)
    return Middleware(api, RouteNames(api.routes), *own)


def add_generating_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post(
        "/v1/chat/completions", openapi_extra=body_of(ChatRequest), responses=answer_of(ChatCompletion, streamed=True)
    )
    async def chat_completions(request: Request) -> Response:
        message, context = await gateway.read(ChatRequest, request), visit_of(request.scope)
        places = gateway.places(message)
        dialect = gateway.dialect(message.model)
        asked = await gateway.translated(context, message.model, translate.chat, message, dialect)
        jobs = gateway.jobs([asked], context, message.model)
        name, count = f"chatcmpl-{context.request_id}", message.n or 1
        kind = "chat.completion.chunk" if message.stream else "chat.completion"
        head = Head(name, kind, message.model, message.service_tier is not None, *told_of(message))
        readers = [dialect.reader(message) or PlainReader() for _ in range(count)]

        async def work(out: Outlet) -> None:
            if message.stream:
                chunks = ChatChunks(head, count, message.stream_options, readers)
                await gateway.send_chunks(out, jobs, context, chunks)
            else:
                replies = await whole(gateway.link, jobs, context)
                await out.json(await chat_body(head, replies, gateway.turns, readers))

        return gateway.answer(work, places)

    @api.post(
        "/v1/completions", openapi_extra=body_of(CompletionRequest), responses=answer_of(Completion, streamed=True)
    )
    async def completions(request: Request) -> Response:
        message, context = await gateway.read(CompletionRequest, request), visit_of(request.scope)
        places, count = gateway.places(message), message.n or 1
        if message.suffix:
            await gateway.check_fills(message.model, "suffix")
        jobs = gateway.jobs(await gateway.aside(context, translate.completions, message), context, message.model)
        tells_tier = message.service_tier is not None
        head = Head(f"cmpl-{context.request_id}", "text_completion", message.model, tells_tier, *told_of(message))

        async def work(out: Outlet) -> None:
            if message.stream:
                chunks = CompletionChunks(head, len(jobs) * count, count, message.stream_options)
                await gateway.send_chunks(out, jobs, context, chunks)
            else:
                replies = await whole(gateway.link, jobs, context)
                await out.json(await completion_body(head, replies, gateway.turns, count))

        return gateway.answer(work, places)


def told_of(message: Completing) -> tuple[bool, bool]:
    """True if the answer has the ids of its tokens, and True if it has the log-probabilities of the prompt."""
    return bool(message.return_token_ids), message.prompt_logprobs is not None


def add_response_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post("/v1/responses", openapi_extra=body_of(ResponseRequest), responses=answer_of(ResponseBody, streamed=True))
    async def create_response(request: Request) -> Response:
        message, context = await gateway.read(ResponseRequest, request), visit_of(request.scope)
        before, items = gateway.before(message, context.namespace), items_of(message.input)
        arguments = (message, before.items, items, gateway.dialect(message.model))
        asked = await gateway.translated(context, message.model, translate.response, *arguments)
        (job,) = gateway.jobs([asked], context, message.model)
        writer = ResponseWriter(message, gateway.turns, gateway.dialect(message.model).reader(message))

        async def work(out: Outlet) -> None:
            await gateway.respond(out, Responding(message, items, before), job, context, writer)

        return gateway.answer(work, 1, writer.failure)

    @api.post("/v1/responses/input_tokens", openapi_extra=body_of(InputTokensRequest), responses=answer_of(InputTokens))
    async def input_tokens(request: Request) -> Response:
        message, context = await gateway.read(InputTokensRequest, request), visit_of(request.scope)
        before, items = gateway.before(message, context.namespace), items_of(message.input)
        arguments = (message, before.items, items, gateway.dialect(message.model))
        asked = await gateway.translated(context, message.model, translate.counting, *arguments)
        (job,) = gateway.jobs([asked], context, message.model)

        async def work(out: Outlet) -> None:
            count = await gateway.count_tokens(job, context)
            await out.json([msgspec.json.encode({"object": "response.input_tokens", "input_tokens": count})])

        return gateway.answer(work, 1)

    @api.get("/v1/responses/{response_id}/input_items", responses=answer_of(ItemList))
    async def input_items(
        request: Request, response_id: str, limit: str = str(LISTED), order: str = "desc", after: str = ""
    ) -> Response:
        found = gateway.response(response_id, visit_of(request.scope).namespace)
        return as_json(listed(found.input, limit, order, after))

    @api.get("/v1/responses/{response_id}", responses=answer_of(ResponseBody))
    async def get_response(request: Request, response_id: str) -> Response:
        found = gateway.response(response_id, visit_of(request.scope).namespace)
        return Response(found.answer, media_type="application/json")

    @api.delete("/v1/responses/{response_id}", responses=answer_of(DeletedResponse))
    async def delete_response(request: Request, response_id: str) -> Response:
        namespace = visit_of(request.scope).namespace
        gateway.store.delete(namespace, gateway.response(response_id, namespace).id)
        return as_json({"id": response_id, "object": "response", "deleted": True})


def add_other_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.get("/v1/models", responses=answer_of(ModelList))
    async def models(request: Request) -> Response:
        names = gateway.models(visit_of(request.scope).client)
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        cards = await asyncio.gather(
            *map(gateway.card, names)
        )  # a model that does not answer delays all of its names once
        return as_json({"object": "list", "data": cards, "has_more": False, **ends})

    @api.get("/v1/models/{name:path}", responses=answer_of(ModelCard))
    async def model(request: Request, name: str) -> Response:
        gateway.check_model(name, visit_of(request.scope).client)
        return as_json(await gateway.card(name))

    @api.get("/health", responses=answer_of(Health))
    @api.get("/ping", responses=answer_of(Health))
    @api.post("/ping", responses=answer_of(Health))
    async def health() -> Response:
        if gateway.running.stopping or not await gateway.link.is_ready():
            raise unavailable("the server is not ready: the model is being loaded, or the server is being stopped")
        return as_json({"status": "ready"})


def _answer_head(api: FastAPI) -> None:
    """Answer HEAD wherever GET is answered, with the same headers: the server leaves the body out. Health checks ask so."""
    for route in api.routes:
        if isinstance(route, Route) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    context = visit_of(request.scope)
    context.error = error
    status, body = context.refusal(error)
    return as_json(body, status, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """The answer to a request at which this program failed. The front logs where."""
    return await _gateway_error(request, failed(visit_of(request.scope).request_id))


async def _http_error(request: Request, error: Exception) -> Response:
    """The answer to requests that FastAPI itself refuses: unknown routes and methods."""
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
