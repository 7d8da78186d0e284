"""Routes that generate nothing, as vLLM has them: the tokens of a prompt, and the text of tokens. Routers ask for the former."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from gateway import translate
from gateway.answers import Answer, Outlet
from gateway.core import Gateway
from gateway.errors import GatewayError
from gateway.messages import ChatRequest, ModelRequest
from gateway.openapi import answer_of, as_json, body_of
from gateway.request_context import RequestContext, visit_of
from gateway.token_messages import DetokenizeBody, DetokenizeRequest, TokenizeBody, TokenizeRequest, TokenizerInfo
from gateway.triton_client import Piece

_CLASS = "PreTrainedTokenizerFast"  # the class of transformers that reads every tokenizer here
_OF_CHATS = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def add_token_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post("/tokenize", openapi_extra=body_of(TokenizeRequest), responses=answer_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        message, context = await gateway.read(TokenizeRequest, request), visit_of(request.scope)
        asked = await gateway.translated(context, message.model, tokenizing, message)
        return _answer(gateway, asked, context, message, _tokens)

    @api.post("/detokenize", openapi_extra=body_of(DetokenizeRequest), responses=answer_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        message, context = await gateway.read(DetokenizeRequest, request), visit_of(request.scope)
        asked = translate.Asked({"prompt_token_ids": message.tokens, "echo": True, "tokenize": True}, None)
        return _answer(gateway, asked, context, message, lambda piece: {"prompt": piece.text})

    @api.get("/tokenizer_info", responses=answer_of(TokenizerInfo))
    async def tokenizer_info(request: Request, model: str = "") -> Response:
        context = visit_of(request.scope)
        name = model or next(iter(gateway.models(context.client)), "")
        gateway.check_model(name, context.client)
        asked = translate.Asked({"prompt_token_ids": [0], "tokenize": True, "tell_tokenizer": True}, None)
        (job,) = gateway.jobs([asked], context, name)
        return as_json(_info(await gateway.tokens_of(job)))


def _info(piece: Piece) -> dict[str, Any]:
    """As vLLM has it, with the names of tokenizer_config.json."""
    return {"tokenizer_class": _CLASS, "model_max_length": piece.max_model_len, **(piece.tokenizer or {})}


def tokenizing(message: TokenizeRequest) -> translate.Asked:
    """Raises GatewayError."""
    if (message.prompt is None) == (message.messages is None):
        found = "none" if message.prompt is None else "both"
        raise GatewayError(
            400, f"one of prompt and messages is expected, {found} of them is given", "prompt", "invalid_value"
        )
    is_chat = message.messages is not None
    if message.add_special_tokens not in (None, not is_chat):
        text = f"add_special_tokens is {str(is_chat).lower()}, which is not how the model reads this; leave it out"
        raise GatewayError(400, text, "add_special_tokens", "invalid_value")
    request = {"prompt": message.prompt} if message.messages is None else translate.conversation(_as_chat(message))
    return translate.Asked({**request, "tokenize": True}, None)


def _as_chat(message: TokenizeRequest) -> ChatRequest:
    given = {name: getattr(message, name) for name in _OF_CHATS if getattr(message, name) is not None}
    return ChatRequest.model_construct(**given)


def _answer(
    gateway: Gateway,
    asked: translate.Asked,
    context: RequestContext,
    message: ModelRequest,
    body: Callable[[Piece], dict[str, Any]],
) -> Answer:
    (job,) = gateway.jobs([asked], context, message.model)

    async def work(out: Outlet) -> None:
        await out.json([msgspec.json.encode(body(await gateway.tokens_of(job)))])

    return gateway.answer(work, 1)


def _tokens(piece: Piece) -> dict[str, Any]:
    ids = piece.token_ids
    return {"count": len(ids), "max_model_len": piece.max_model_len, "tokens": ids, "token_strs": None}
