"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from fastapi import FastAPI, Request, Response

from gateway import anthropic_turns
from gateway.answers import Outlet
from gateway.anthropic_answers import MessageWriter
from gateway.anthropic_messages import CountTokensRequest, MessagesRequest
from gateway.anthropic_outputs import AnthropicErrorBody, InputTokensCount, MessageBody
from gateway.choices import pieces
from gateway.core import Gateway
from gateway.openapi import answer_of, body_of
from gateway.parts import PlainReader
from gateway.request_context import visit_of


def add_message_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post(
        "/v1/messages",
        openapi_extra=body_of(MessagesRequest),
        responses=answer_of(MessageBody, streamed=True, errors=AnthropicErrorBody),
    )
    async def create_message(request: Request) -> Response:
        message, context = await gateway.read(MessagesRequest, request), visit_of(request.scope)
        dialect = gateway.dialect(message.model)
        chat = anthropic_turns.as_chat(message, dialect)
        asked = await gateway.translated(context, message.model, anthropic_turns.messages, message, chat, dialect)
        (job,) = gateway.jobs([asked], context, message.model)
        writer = MessageWriter(message, dialect.reader(chat) or PlainReader(), context)

        async def work(out: Outlet) -> None:
            async with aclosing(pieces(gateway.link, [job], context, out.waiting)) as source:
                async for _, piece in source:
                    if not message.stream:
                        writer.take(piece)
                    elif data := writer.events(piece):
                        await out.event(data)
            if message.stream:
                await out.end_of_events(writer.closing())
            else:
                await out.json([writer.body()])

        return gateway.answer(work, 1, writer.failure)

    @api.post(
        "/v1/messages/count_tokens",
        openapi_extra=body_of(CountTokensRequest),
        responses=answer_of(InputTokensCount, errors=AnthropicErrorBody),
    )
    async def count_tokens(request: Request) -> Response:
        message, context = await gateway.read(CountTokensRequest, request), visit_of(request.scope)
        dialect = gateway.dialect(message.model)
        asked = await gateway.translated(context, message.model, anthropic_turns.counting, message, dialect)
        (job,) = gateway.jobs([asked], context, message.model)

        async def work(out: Outlet) -> None:
            await out.json([msgspec.json.encode({"input_tokens": await gateway.count_tokens(job, context)})])

        return gateway.answer(work, 1)
