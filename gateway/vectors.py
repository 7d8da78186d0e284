"""The routes that generate nothing: embeddings of texts, and the relevance of documents to a query.

Each text and each document is a request of its own for the model, whose engine batches them; AT_ONCE of them run together, so
that a long list leaves places to others.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI, Request, Response

from gateway.answers import Outlet
from gateway.choices import each_last
from gateway.core import Gateway
from gateway.errors import GatewayError
from gateway.messages import ModelRequest
from gateway.openapi import answer_of, body_of
from gateway.outputs import EmbeddingList, Ranking
from gateway.request_context import RequestContext, visit_of
from gateway.translate import Asked
from gateway.triton_client import Piece
from gateway.turns import Turns
from gateway.vector_messages import EmbeddingRequest, RerankRequest

MOST_INPUTS = 2048  # texts or documents of one request; OpenAI's own limit
AT_ONCE = 64
SLICE = 32  # vectors that are encoded before others use the event loop


def add_vector_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post("/v1/embeddings", openapi_extra=body_of(EmbeddingRequest), responses=answer_of(EmbeddingList))
    async def embeddings(request: Request) -> Response:
        message, context = await gateway.read(EmbeddingRequest, request), visit_of(request.scope)
        asked = embeddings_of(message)

        async def work(out: Outlet) -> None:
            pieces = await _pieces(gateway, asked, context, message, _Field("embed", "input", len(asked) > 1))
            await out.json(await embeddings_body(message, pieces, gateway.turns))

        return gateway.answer(work, _places(gateway, asked))

    @api.post("/v1/rerank", openapi_extra=body_of(RerankRequest), responses=answer_of(Ranking))
    @api.post("/rerank", openapi_extra=body_of(RerankRequest), responses=answer_of(Ranking))
    async def rerank(request: Request) -> Response:
        message, context = await gateway.read(RerankRequest, request), visit_of(request.scope)
        asked = ranking_of(message)

        async def work(out: Outlet) -> None:
            pieces = await _pieces(gateway, asked, context, message, _Field("documents", "documents", True))
            await out.json([msgspec.json.encode(ranking_body(message, pieces, f"rerank-{context.request_id}"))])

        return gateway.answer(work, _places(gateway, asked))


def embeddings_of(message: EmbeddingRequest) -> list[Asked]:
    """A request of the model for each text. Raises GatewayError."""
    given = message.input
    inputs: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    _check_count("input", inputs)
    more = {} if message.dimensions is None else {"dimensions": message.dimensions}
    return [Asked({"embed": one, **more}, None) for one in inputs]


def ranking_of(message: RerankRequest) -> list[Asked]:
    """A request of the model for each document. Raises GatewayError."""
    _check_count("documents", message.documents)
    task = {} if message.instruction is None else {"task": message.instruction}
    texts = [one if isinstance(one, str) else one.text for one in message.documents]
    return [Asked({"rank": {"query": message.query, "document": text, **task}}, None) for text in texts]


class Vectors(NamedTuple):
    """How the vectors of some texts are had: `make` asks the model, within so many `places`."""

    make: Callable[[], Awaitable[list[Piece]]]
    places: int


def vectors_of(
    gateway: Gateway,
    context: RequestContext,
    model: str,
    field: str,
    texts: list[str],
    dimensions: int | None = None,
    is_list: bool = True,
) -> Vectors:
    """`field`: holds the texts, or the text, in the client's request. Raises GatewayError."""
    _check_count(field, texts)
    more = {} if dimensions is None else {"dimensions": dimensions}
    asked = [Asked({"embed": text, **more}, None) for text in texts]
    named, places = _Field("embed", field, is_list), _places(gateway, asked)
    jobs = gateway.jobs(asked, context, model)
    return Vectors(lambda: each_last(gateway.link, jobs, context, max(1, places), named.named), places)


def _check_count(name: str, entries: list[Any]) -> None:
    if len(entries) > MOST_INPUTS:
        text = f"{name} has {len(entries)} entries, the limit is {MOST_INPUTS}; send them in several requests"
        raise GatewayError(400, text, name, "invalid_value")


def _places(gateway: Gateway, asked: list[Asked]) -> int:
    return min(len(asked), AT_ONCE, gateway.settings.max_choices)


class _Field(NamedTuple):
    """Names of a request's entries, the model's and the client's; `request` is the model's name for one that is far too long."""

    of_model: str
    of_client: str
    is_list: bool

    def named(self, error: GatewayError, index: int) -> GatewayError:
        """The error in the client's words."""
        first = next((word for word in (self.of_model, "request") if error.message.startswith(word)), None)
        if first is None:
            return error
        name = f"{self.of_client}[{index}]" if self.is_list else self.of_client
        text = name + error.message.removeprefix(first)
        return GatewayError(error.status, text, name, error.code or "invalid_value", logged=self.of_client)


async def _pieces(
    gateway: Gateway, asked: list[Asked], context: RequestContext, message: ModelRequest, field: _Field
) -> list[Piece]:
    """The model's answers, one for each entry. Raises GatewayError that names the entry."""
    jobs = gateway.jobs(asked, context, message.model)
    return await each_last(gateway.link, jobs, context, _places(gateway, asked), field.named)


async def embeddings_body(message: EmbeddingRequest, pieces: list[Piece], turns: Turns) -> list[bytes]:
    """The parts of the JSON text."""
    parts = [b'{"object":"list","data":[']
    for index, piece in enumerate(pieces):
        if index % SLICE == SLICE - 1:
            await turns.next()
        vector = numbers_of(piece.embedding) if message.encoding_format != "base64" else _in_base64(piece.embedding)
        entry = {"object": "embedding", "index": index, "embedding": vector}
        parts.append((b"," if index else b"") + msgspec.json.encode(entry))
    end = {"model": message.model, "usage": _usage(pieces)}
    return [*parts, b"],", msgspec.json.encode(end)[1:]]


def ranking_body(message: RerankRequest, pieces: list[Piece], name: str) -> dict[str, Any]:
    """The best `top_n` documents, the most relevant first."""
    order = sorted(range(len(pieces)), key=lambda index: -pieces[index].score)[: message.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": pieces[index].score} for index in order]
    if message.return_documents:
        for result in results:
            given = message.documents[result["index"]]
            result["document"] = {"text": given if isinstance(given, str) else given.text}
    return {"id": name, "model": message.model, "results": results, "usage": _usage(pieces)}


def numbers_of(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def _in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _usage(pieces: list[Piece]) -> dict[str, int]:
    count = sum(piece.usage.prompt_tokens for piece in pieces if piece.usage is not None)
    return {"prompt_tokens": count, "total_tokens": count}
