"""Ollama's API: chats, completions and embeddings, and the models that are there (docs/ollama.md)."""

from __future__ import annotations

import hashlib
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from gateway import ollama_turns
from gateway.answers import LINES, Answer, Outlet
from gateway.choices import pieces
from gateway.core import Facts, Gateway
from gateway.errors import GatewayError, unavailable
from gateway.messages import ModelRequest
from gateway.ollama_answers import OllamaWriter, loaded
from gateway.ollama_messages import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaRequest,
    OllamaShow,
)
from gateway.ollama_outputs import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaErrorBody,
    OllamaGenerateBody,
    OllamaModels,
    OllamaShowBody,
    OllamaVersion,
)
from gateway.openapi import answer_of, as_json, body_of
from gateway.parts import PartReader, PlainReader
from gateway.request_context import RequestContext, visit_of
from gateway.stopwatch import Stopwatch
from gateway.translate import Asked
from gateway.vectors import numbers_of, vectors_of

WIRE_VERSION = "0.13.0"  # the release of Ollama whose API this is: clients ask for a least one
LATEST = ":latest"  # the tag that Ollama adds to a name without one
_NEVER = "9999-12-31T23:59:59Z"
_NAMES = {
    "chat": "",
    "fim": "insert",
    "reasoning": "thinking",
}  # capabilities that Ollama calls otherwise, or not at all
_NO_MODEL_IS_CHANGED = (
    "models are not {what} here: the server is started with its models, --model NAME; served are: {served}"
)
_REFUSED = (
    ("POST", "/api/pull", "pulled"),
    ("POST", "/api/push", "pushed"),
    ("POST", "/api/create", "created"),
    ("POST", "/api/copy", "copied"),
    ("DELETE", "/api/delete", "deleted"),
)
_Message = TypeVar("_Message", bound=ModelRequest)


def add_ollama_routes(api: FastAPI, gateway: Gateway) -> None:
    _add_generating(api, gateway)
    _add_embedding(api, gateway)
    _add_lists(api, gateway)
    for method, path, word in _REFUSED:
        _refuse(api, gateway, method, path, word)


def _add_generating(api: FastAPI, gateway: Gateway) -> None:
    @api.post(
        "/api/chat",
        openapi_extra=body_of(OllamaChat),
        responses=answer_of(OllamaChatBody, errors=OllamaErrorBody, lines=True),
    )
    async def ollama_chat(request: Request) -> Response:
        message, context = await _read(gateway, OllamaChat, request), visit_of(request.scope)
        if not message.messages:
            return await _loaded(gateway, message)
        name = _served_name(gateway, message.model)
        dialect = gateway.dialect(name)
        chat = ollama_turns.as_chat(message, dialect)
        asked = await gateway.translated(context, name, ollama_turns.chat, message, chat, dialect)
        return _answer(gateway, message, context, asked, dialect.reader(chat) or PlainReader())

    @api.post(
        "/api/generate",
        openapi_extra=body_of(OllamaGenerate),
        responses=answer_of(OllamaGenerateBody, errors=OllamaErrorBody, lines=True),
    )
    async def ollama_generate(request: Request) -> Response:
        message, context = await _read(gateway, OllamaGenerate, request), visit_of(request.scope)
        if not (message.prompt or message.suffix or message.images):
            return await _loaded(gateway, message)
        name = _served_name(gateway, message.model)
        dialect = gateway.dialect(name)
        if message.suffix:
            await gateway.check_fills(name, "suffix")
        chat = ollama_turns.as_chat(message, dialect)
        is_chat = "chat" in (await _facts(gateway, name)).capabilities
        arguments = (message, chat, dialect, is_chat)
        asked = await gateway.translated(context, name, ollama_turns.generate, *arguments)
        reader = dialect.reader(chat) if "messages" in asked.request else None
        return _answer(gateway, message, context, asked, reader or PlainReader())


def _answer(
    gateway: Gateway, message: OllamaRequest, context: RequestContext, asked: Asked, reader: PartReader
) -> Answer:
    (job,) = gateway.jobs([asked], context, _served_name(gateway, message.model))
    writer = OllamaWriter(message, reader)

    async def work(out: Outlet) -> None:
        async with aclosing(pieces(gateway.link, [job], context, out.waiting)) as source:
            async for _, piece in source:
                if not message.streams:
                    writer.take(piece)
                elif line := writer.line(piece):
                    await out.event(line)
        if message.streams:
            await out.end_of_events(writer.last())
        else:
            await out.json([msgspec.json.encode(writer.body())])

    return gateway.answer(work, 1, _error_line, LINES)


def _add_embedding(api: FastAPI, gateway: Gateway) -> None:
    @api.post(
        "/api/embed",
        openapi_extra=body_of(OllamaEmbed),
        responses=answer_of(OllamaEmbedBody, errors=OllamaErrorBody),
    )
    async def ollama_embed(request: Request) -> Response:
        message, context = await _read(gateway, OllamaEmbed, request), visit_of(request.scope)
        is_list, watch = not isinstance(message.input, str), Stopwatch()
        texts = [message.input] if isinstance(message.input, str) else message.input
        name = _served_name(gateway, message.model)
        vectors = vectors_of(gateway, context, name, "input", texts, message.dimensions, is_list)

        async def work(out: Outlet) -> None:
            found = await vectors.make()
            parts = [b'{"model":' + msgspec.json.encode(message.model) + b',"embeddings":[']
            for index, piece in enumerate(found):
                await gateway.turns.next()
                parts.append((b"," if index else b"") + msgspec.json.encode(numbers_of(piece.embedding)))
            count = sum(piece.usage.prompt_tokens for piece in found if piece.usage is not None)
            times = {"total_duration": round(watch.total_s * 1e9), "load_duration": 0, "prompt_eval_count": count}
            await out.json([*parts, b"],", msgspec.json.encode(times)[1:]])

        return gateway.answer(work, vectors.places)

    @api.post(
        "/api/embeddings",
        openapi_extra=body_of(OllamaEmbeddings),
        responses=answer_of(OllamaEmbeddingsBody, errors=OllamaErrorBody),
    )
    async def ollama_embeddings(request: Request) -> Response:
        message, context = await _read(gateway, OllamaEmbeddings, request), visit_of(request.scope)
        name = _served_name(gateway, message.model)
        vectors = vectors_of(gateway, context, name, "prompt", [message.prompt], is_list=False)

        async def work(out: Outlet) -> None:
            (piece,) = await vectors.make()
            await out.json([msgspec.json.encode({"embedding": numbers_of(piece.embedding)})])

        return gateway.answer(work, vectors.places)


def _add_lists(api: FastAPI, gateway: Gateway) -> None:
    @api.get("/api/version", responses=answer_of(OllamaVersion, errors=OllamaErrorBody))
    async def ollama_version() -> Response:
        return as_json({"version": WIRE_VERSION, "everbatch": gateway.settings.server_version})

    @api.get("/api/tags", responses=answer_of(OllamaModels, errors=OllamaErrorBody))
    async def ollama_tags(request: Request) -> Response:
        names = gateway.models(visit_of(request.scope).client)
        return as_json({"models": [_card(gateway, name) for name in names]})

    @api.get("/api/ps", responses=answer_of(OllamaModels, errors=OllamaErrorBody))
    async def ollama_ps(request: Request) -> Response:
        """The models that answer, each once."""
        client, running = visit_of(request.scope).client, []
        for served in gateway.served:
            name = next((each for each in served.names if client.may_use(each)), None)
            if name is not None and (facts := await gateway.facts(served)) is not None:
                length = {} if facts.max_model_len is None else {"context_length": facts.max_model_len}
                running.append({**_card(gateway, name), "expires_at": _NEVER, **length})
        return as_json({"models": running})

    @api.post(
        "/api/show", openapi_extra=body_of(OllamaShow), responses=answer_of(OllamaShowBody, errors=OllamaErrorBody)
    )
    async def ollama_show(request: Request) -> Response:
        message = await gateway.read_body(OllamaShow, request)
        name = _served_name(gateway, message.model or message.name or "")
        gateway.check_model(name, visit_of(request.scope).client)
        return as_json(_shown(gateway, name, await _facts(gateway, name)))


def _shown(gateway: Gateway, name: str, facts: Facts) -> dict[str, Any]:
    given = gateway.capabilities(gateway.served_as(name), facts)
    names = [_NAMES.get(one, one) for one in given]
    card = _card(gateway, name)
    return {
        "modified_at": card["modified_at"],
        "details": card["details"],
        "template": _template(given),
        "parameters": "",
        "capabilities": [one for one in names if one],
        "model_info": {"general.architecture": "everbatch", "everbatch.context_length": facts.max_model_len},
    }


def _template(capabilities: list[str]) -> str:
    """A comment in Ollama's template language, for clients that look for the variables that a template has."""
    variables = [".System", ".Prompt", ".Messages"]
    variables += [word for word, name in ((".Tools", "tools"), (".Suffix", "fim")) if name in capabilities]
    return (
        "{{- /* The server renders prompts by the model's own Jinja template, of " + ", ".join(variables) + ". */ -}}"
    )


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    """`digest` names the model in this life of the server; names of one model have the same."""
    served = gateway.served_as(name)
    own = served.triton_model if name in served.names else f"{served.triton_model} {name}"
    digest = hashlib.sha256(f"{own} {gateway.created}".encode()).hexdigest()
    details = {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
    when = datetime.fromtimestamp(gateway.created, UTC).isoformat().replace("+00:00", "Z")
    return {"name": name, "model": name, "modified_at": when, "digest": digest, "details": details}


def _refuse(api: FastAPI, gateway: Gateway, method: str, path: str, word: str) -> None:
    @api.api_route(path, methods=[method], include_in_schema=False)
    async def refused(request: Request) -> Response:
        served = ", ".join(gateway.models(visit_of(request.scope).client)[:20]) or "none for this key"
        text = _NO_MODEL_IS_CHANGED.format(what=word, served=served)
        raise GatewayError(400, text, code="unsupported_operation")


async def _read(gateway: Gateway, kind: type[_Message], request: Request) -> _Message:
    """The body of a request, for a model that is served here. Raises GatewayError."""
    message = await gateway.read_body(kind, request)
    gateway.check_model(_served_name(gateway, message.model), visit_of(request.scope).client)
    return message


def _served_name(gateway: Gateway, given: str) -> str:
    """The name that is served where a client adds the tag that Ollama adds."""
    bare = given.removesuffix(LATEST)
    return bare if given not in gateway.names and bare in gateway.names else given


async def _facts(gateway: Gateway, name: str) -> Facts:
    facts = await gateway.facts(gateway.served_as(name))
    if facts is None:
        raise unavailable("the model cannot be asked what it can do; try again when /health answers 200")
    return facts


async def _loaded(gateway: Gateway, message: OllamaRequest) -> Response:
    await _facts(gateway, _served_name(gateway, message.model))
    headers = {"content-type": "application/x-ndjson"} if message.streams else None
    return as_json(loaded(message), headers=headers)


def _error_line(error: GatewayError) -> bytes:
    return msgspec.json.encode({"error": error.message}) + b"\n"
