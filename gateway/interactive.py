"""LMDeploy's own routes: /v1/chat/interactive, whose sessions are kept here under numbers, and /v1/encode.

A session is kept in the store under a number that the client chooses, within the namespace of its key. It is bounded and
forgotten as conversations are. The KV of its turns is found by their tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from gateway import translate
from gateway.answers import Outlet
from gateway.choices import Reply, pieces
from gateway.core import Gateway
from gateway.errors import GatewayError
from gateway.interactive_messages import EncodeBody, EncodeRequest, InteractiveBody, InteractiveRequest
from gateway.items import Item, call_item, message_item, output_item, reasoning_item, turns_of
from gateway.messages import ChatMessage, ChatRequest
from gateway.openapi import answer_of, as_json, body_of
from gateway.request_context import RequestContext, visit_of
from gateway.store import Session
from gateway.triton_client import Piece

_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "seed",
    "stream",
)


class RunningTurns:
    """The turns that are being generated, by namespace and session: one each, which may be ended."""

    def __init__(self) -> None:
        self._stops: dict[tuple[str, int], asyncio.Event] = {}

    @contextmanager
    def turn(self, namespace: str, session_id: int) -> Iterator[asyncio.Event]:
        """Within it the event says that the turn is not wanted any more. Raises GatewayError(409) for a second turn."""
        if session_id == -1:
            yield asyncio.Event()
            return
        if (namespace, session_id) in self._stops:
            text = f"session {session_id} has a turn that is running; wait for it, or send cancel: true"
            raise GatewayError(409, text, "session_id", "session_busy")
        stop = self._stops[namespace, session_id] = asyncio.Event()
        try:
            yield stop
        finally:
            del self._stops[namespace, session_id]

    def stop(self, namespace: str, session_id: int) -> None:
        if (stop := self._stops.get((namespace, session_id))) is not None:
            stop.set()


def add_interactive_routes(api: FastAPI, gateway: Gateway) -> None:
    turns = RunningTurns()

    @api.post(
        "/v1/chat/interactive",
        openapi_extra=body_of(InteractiveRequest),
        responses=answer_of(InteractiveBody, streamed=True),
    )
    async def interactive(request: Request) -> Response:
        message, context = await gateway.read_body(InteractiveRequest, request), visit_of(request.scope)
        model = message.adapter_name or gateway.settings.model_names[0]
        gateway.check_model(model, context.client)
        if message.cancel or message.stop is True:
            turns.stop(context.namespace, message.session_id)
            return as_json(_chunk("", 0, 0, 0, None))
        if message.request_output_len == 0:
            if not message.interactive_mode:
                gateway.store.delete(context.namespace, _id(message.session_id))
            return as_json(_chunk("", 0, 0, 0, None))

        async def work(out: Outlet) -> None:
            with turns.turn(context.namespace, message.session_id) as stop:
                await _answer(gateway, out, message, context, model, stop)

        return gateway.answer(work, 1, _error_line)

    @api.post("/v1/encode", openapi_extra=body_of(EncodeRequest), responses=answer_of(EncodeBody))
    async def encode(request: Request) -> Response:
        message, context = await gateway.read_body(EncodeRequest, request), visit_of(request.scope)
        model = gateway.settings.model_names[0]
        gateway.check_model(model, context.client)
        texts = [message.input] if isinstance(message.input, str) else message.input
        jobs = gateway.jobs([_encoding(text, bool(message.do_preprocess)) for text in texts], context, model)

        async def work(out: Outlet) -> None:
            ids = [(await gateway.tokens_of(job)).token_ids for job in jobs]
            lengths = [len(each) for each in ids]
            is_one = isinstance(message.input, str)
            body = {"input_ids": ids[0], "length": lengths[0]} if is_one else {"input_ids": ids, "length": lengths}
            await out.json([msgspec.json.encode(body)])

        return gateway.answer(work, 1)


async def _answer(
    gateway: Gateway, out: Outlet, message: InteractiveRequest, context: RequestContext, model: str, stop: asyncio.Event
) -> None:
    """Generate a turn, tell the client of it, and keep it in its session. Raises GatewayError."""
    session, added = _session(gateway, context, message.session_id), _items(message)
    asked = await gateway.translated(context, model, _asked, message, [*session.items, *added])
    (job,) = gateway.jobs([asked], context, model)
    reply, tokens, history, held = Reply(), 0, session.tokens, ""

    async def waiting() -> None:
        """A chunk without text, so that a proxy does not end a stream that waits for the server."""
        if out.started:
            await out.event(_line(_chunk("", tokens, 0, history, None)))

    async with aclosing(pieces(gateway.link, [job], context, waiting)) as source:
        async for piece in _until(stop, source):
            reply.add(piece)
            tokens += len(piece.token_ids)
            if not message.stream or piece.finish_reason is not None:
                held += piece.text  # the last chunk has it, with the counts that come with the last piece
            else:
                await out.event(_line(_chunk(piece.text, tokens, 0, history, None)))
    new = max(0, reply.usage.prompt_tokens - history)
    tokens = reply.usage.completion_tokens or tokens
    answer = message_item("assistant", reply.text)
    _keep(gateway, context, message, session, [*added, answer], history + new + tokens)
    last = _chunk(held, tokens, new, history, reply.finish_reason or "stop")
    await (out.end_of_events(_line(last)) if message.stream else out.json([msgspec.json.encode(last)]))


async def _until(stop: asyncio.Event, source: AsyncGenerator[tuple[int, Piece], None]) -> AsyncIterator[Piece]:
    """The pieces until the last one, or until the event is set."""
    stopped = asyncio.ensure_future(stop.wait())
    step: asyncio.Future[Any] = stopped
    try:
        while True:
            step = asyncio.ensure_future(anext(source, None))
            await asyncio.wait({step, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not step.done() or (found := step.result()) is None:
                return
            yield found[1]
    finally:
        for task in (step, stopped):
            task.cancel()
        await asyncio.gather(step, stopped, return_exceptions=True)


def _id(session_id: int) -> str:
    return f"interactive_{session_id}"


def _session(gateway: Gateway, context: RequestContext, session_id: int) -> Session:
    """The session, or an empty one."""
    found = None if session_id == -1 else gateway.store.get(context.namespace, _id(session_id))
    return found if isinstance(found, Session) else Session(_id(session_id))


def _keep(
    gateway: Gateway,
    context: RequestContext,
    message: InteractiveRequest,
    session: Session,
    added: list[Item],
    tokens: int,
) -> None:
    """Put the turn into the session; one that is not interactive ends with it."""
    if message.session_id == -1:
        return
    if not message.interactive_mode:
        gateway.store.delete(context.namespace, session.id)
        return
    gateway.store.put(context.namespace, session.with_turn(added, tokens))


def _items(message: InteractiveRequest) -> list[Item]:
    """The messages of this turn. Raises GatewayError."""
    if isinstance(message.prompt, str):
        return [message_item("user", message.prompt)]
    return [item for index, turn in enumerate(message.prompt) for item in _items_of(turn, index)]


def _items_of(turn: ChatMessage, index: int) -> list[Item]:
    """A turn, with its reasoning ahead of it and its calls behind it. Raises GatewayError."""
    shown = translate.chat_turn(turn, index)
    if turn.role == "tool":
        return [output_item(shown["tool_call_id"], shown["content"])]
    reasoning = shown.get("reasoning_content")
    calls = [call_item(call.id, call.function.name, call.function.arguments) for call in turn.tool_calls or []]
    ahead = [] if reasoning is None else [reasoning_item(reasoning)]
    return [*ahead, message_item(shown["role"], shown["content"]), *calls]


def _asked(message: InteractiveRequest, items: list[Item]) -> translate.Asked:
    return translate.Asked(_request(message, items), None)


def _request(message: InteractiveRequest, items: list[Item]) -> dict[str, Any]:
    fields = {name: getattr(message, name) for name in _SAME_NAME}
    stop = None if isinstance(message.stop, bool) else message.stop
    chat = ChatRequest.model_construct(model="", messages=[], top_k=message.top_k, stop=stop, **fields)
    request = {"messages": turns_of(items), **translate.sampling(chat)}
    if message.session_id != -1:  # a turn that is ended early keeps what has come
        request["stream"] = True
    if message.request_output_len is not None:
        request["max_tokens"] = message.request_output_len
    if message.min_new_tokens is not None:
        request["min_tokens"] = message.min_new_tokens
    return request


def _encoding(text: str, is_message: bool) -> translate.Asked:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_message else {"prompt": text}
    return translate.Asked({**prompt, "tokenize": True}, None)


def _chunk(text: str, tokens: int, input_tokens: int, history: int, reason: str | None) -> dict[str, Any]:
    own = {"text": text, "tokens": tokens, "input_tokens": input_tokens, "history_tokens": history}
    return {**own, "finish_reason": reason}


def _line(chunk: dict[str, Any]) -> bytes:
    """LMDeploy's streams are JSON objects, one a line."""
    return msgspec.json.encode(chunk) + b"\n"


def _error_line(error: GatewayError) -> bytes:
    return _line(_chunk(error.message, 0, 0, 0, "error"))
