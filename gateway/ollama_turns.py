"""Requests of /api/chat and /api/generate as those of the Triton model. Pure functions; GatewayError(400) names what cannot be
served.

OPTIONS is the table of names: what Ollama calls an option, and what chat completions call it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from gateway import translate
from gateway.dialect import Dialect
from gateway.errors import GatewayError
from gateway.formats import asked_form
from gateway.images import Picture, check_image_role, content_of
from gateway.messages import ChatRequest, CompletionRequest, JsonObjectFormat, JsonSchema, JsonSchemaFormat, Tool
from gateway.ollama_messages import OllamaChat, OllamaGenerate, OllamaMessage, OllamaRequest
from gateway.origin import GuideOrigin
from gateway.translate import Asked

OPTIONS = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
}
_TIMED = {"stream": True, "tell_prompt": "counts"}  # the parts of an answer are timed, so that it comes in parts


def chat(message: OllamaChat, asked: ChatRequest, dialect: Dialect) -> Asked:
    """`asked` is what `as_chat` has made of the message."""
    return _timed(translate.chat(asked, dialect), {"messages": turns_of(message.messages or [])})


def generate(message: OllamaGenerate, asked: ChatRequest, dialect: Dialect, has_template: bool) -> Asked:
    """The prompt as a chat; as it stands where `raw` says so, or where the model has no chat template; with a suffix the text in
    front of it.
    """
    if message.suffix:
        return _plain(message, {"fill": {"prefix": message.prompt or "", "suffix": message.suffix}})
    if message.raw or not has_template:
        system = f"{message.system}\n\n" if message.system and not message.raw else ""
        return _plain(message, {"prompt": system + (message.prompt or "")})
    turns = [] if not message.system else [{"role": "system", "content": message.system}]
    content = content_of([message.prompt or "", *_pictures(message.images, "images")])
    return _timed(translate.chat(asked, dialect), {"messages": [*turns, {"role": "user", "content": content}]})


def _plain(message: OllamaGenerate, prompt: dict[str, Any]) -> Asked:
    """A request whose prompt is no chat. Raises GatewayError."""
    if message.images:
        text = "images cannot be had with raw or suffix, and need a model with a chat template; leave one out"
        raise GatewayError(400, text, "images", "invalid_value")
    asked = CompletionRequest.model_construct(model=message.model, prompt="", **_common(message))
    form = asked_form(asked)
    request = {**prompt, **translate.sampling(asked)}
    if asked.max_tokens is not None:
        request["max_tokens"] = asked.max_tokens
    if message.logprobs:
        request["logprobs"] = message.top_logprobs or 0
    found = Asked(request, None) if form is None else Asked({**request, "guide": form.guide}, form.origin)
    return _timed(found, {})


def _timed(asked: Asked, prompt: dict[str, Any]) -> Asked:
    origin = None if asked.origin is None else _own_names(asked.origin)
    return Asked({**asked.request, **prompt, **_TIMED}, origin)


def as_chat(message: OllamaRequest, dialect: Dialect) -> ChatRequest:
    """Everything but the turns. Raises GatewayError."""
    given = {"model": message.model, "messages": [], **_common(message), **_thinking(message, dialect)}
    if message.logprobs:
        given |= {"logprobs": True, "top_logprobs": message.top_logprobs}
    if isinstance(message, OllamaChat) and message.tools:
        given["tools"] = [Tool.model_construct(type="function", function=one.function) for one in message.tools]
    return ChatRequest.model_construct(**given)


def _common(message: OllamaRequest) -> dict[str, Any]:
    """Sampling and the form of the answer, by the names of chat completions. Raises GatewayError."""
    if message.top_logprobs and not message.logprobs:
        raise GatewayError(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_value")
    options = {} if message.options is None else message.options.model_dump(exclude_none=True)
    found = {OPTIONS[name]: value for name, value in options.items()}
    if found.get("max_tokens", 0) < 0:
        del found["max_tokens"]
    if found.get("seed") == -1:  # a random one, as with llama.cpp
        del found["seed"]
    if message.format == "json":
        found["response_format"] = JsonObjectFormat.model_construct(type="json_object")
    elif message.format:
        schema = JsonSchema.model_construct(name="format", schema_=message.format)
        found["response_format"] = JsonSchemaFormat.model_construct(type="json_schema", json_schema=schema)
    return found


def _thinking(message: OllamaRequest, dialect: Dialect) -> dict[str, Any]:
    think = message.think
    if think is None:
        return {}
    if think and dialect.marks is None:
        text = f"think is not served by the model {message.model[:80]!r}, whose reasoning has no marks that are known"
        raise GatewayError(400, f"{text}; leave it out", "think", "unsupported_parameter")
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {"enable_thinking": bool(think), **effort}


def turns_of(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """The turns of a chat. Calls without an id get one, by which the results behind them name them."""
    waiting: deque[tuple[str, str]] = deque()  # (id, name) of the calls that nothing has answered yet
    turns = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if message.images:
            check_image_role(message.role, f"{place}.images")
        content = content_of([message.content or "", *_pictures(message.images, f"{place}.images")])
        turn: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                (one.id or f"call_{index}_{number}", one.function) for number, one in enumerate(message.tool_calls)
            ]
            waiting.extend((call_id, function.name) for call_id, function in calls)
            turn["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for call_id, one in calls
            ]
        if message.role == "tool":
            turn |= _answered(message, waiting)
        turns.append(turn)
    return turns


def _answered(message: OllamaMessage, waiting: deque[tuple[str, str]]) -> dict[str, str]:
    """Id and name of the call that a result belongs to, which waits no longer."""
    name, call_id = message.tool_name, message.tool_call_id
    fits = (one for one in waiting if call_id in (None, one[0]) and name in (None, one[1]))
    if (found := next(fits, None)) is not None:
        waiting.remove(found)
        call_id, name = found
    told = {"tool_call_id": call_id, "name": name}
    return {key: value for key, value in told.items() if value is not None}


def _pictures(images: list[str] | None, place: str) -> list[str | Picture]:
    return [Picture(f"{place}[{number}]", data=data) for number, data in enumerate(images or [])]


def _own_names(origin: GuideOrigin) -> GuideOrigin:
    """The fields of a guide by the names that they have here."""
    fields = {"response_format.json_schema.schema": "format", "response_format": "format"}
    structures = tuple(fields.get(name, name) for name in origin.structures)
    return replace(origin, field=fields.get(origin.field, origin.field), structures=structures)
