"""The page /openapi.json: FastAPI's, with the bodies that the routes read by themselves."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.anthropic_messages import CountTokensRequest, MessagesRequest
from gateway.batches.messages import NewBatch
from gateway.infill_messages import InfillRequest
from gateway.interactive_messages import EncodeRequest, InteractiveRequest
from gateway.messages import ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter, Wire
from gateway.middleware import OPEN_TO_ALL
from gateway.ollama_messages import OllamaChat, OllamaEmbed, OllamaEmbeddings, OllamaGenerate, OllamaShow
from gateway.outputs import ErrorBody
from gateway.response_messages import (
    ConversationItems,
    ConversationMetadata,
    InputTokensRequest,
    NewConversation,
    ResponseRequest,
)
from gateway.token_messages import DetokenizeRequest, TokenizeRequest
from gateway.vector_messages import EmbeddingRequest, RerankRequest
from gateway.without_effect import keys_of, schema_of

REFERENCE = "#/components/schemas/{model}"
_REQUESTS: tuple[type[Wire], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    InputTokensRequest,
    MessagesRequest,
    CountTokensRequest,
    NewConversation,
    ConversationMetadata,
    ConversationItems,
    LoadAdapter,
    UnloadAdapter,
    EmbeddingRequest,
    RerankRequest,
    TokenizeRequest,
    DetokenizeRequest,
    InteractiveRequest,
    EncodeRequest,
    NewBatch,
    InfillRequest,
    OllamaChat,
    OllamaGenerate,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaShow,
)
_EVENT = {
    "type": "object",
    "description": "A server-sent event; its data is a JSON object, or [DONE]",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra` of a route that reads `kind`."""
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def errors_of(kind: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """For `responses` of a route whose errors have this shape."""
    return {
        "4XX": {"model": kind, "description": "The request cannot be served as it is"},
        "5XX": {"model": kind, "description": "The server cannot serve it now"},
    }


def answer_of(
    kind: type[BaseModel], streamed: bool = False, errors: type[BaseModel] = ErrorBody, lines: bool = False
) -> dict[int | str, dict[str, Any]]:
    """For `responses` of a route that answers with `kind`, or with events (`streamed`) or lines of JSON that tell how it grows,
    or with `errors`.
    """
    content: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}} if streamed else {}
    content |= {"application/x-ndjson": {"schema": {"type": "string"}}} if lines else {}
    return {200: {"model": kind, "content": content, "description": "The reply"}, **errors_of(errors)}


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def page(app: FastAPI, keys_are_asked_for: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document["components"]["schemas"]
    _, definitions = models_json_schema([(kind, "validation") for kind in _REQUESTS], ref_template=REFERENCE)
    schemas.update(definitions.get("$defs", {}))
    for kind in _REQUESTS:
        for key in keys_of(kind).get("", {}).values():
            schemas[kind.__name__]["properties"][key.name] = schema_of(key)
    if keys_are_asked_for:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in OPEN_TO_ALL:
            for operation in document["paths"].get(path, {}).values():
                operation["security"] = []
    return document
