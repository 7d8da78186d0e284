"""llama-server's /infill: what stands between two texts, in its words (docs/fim.md)."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from gateway import translate
from gateway.answers import Outlet
from gateway.choices import pieces
from gateway.core import Gateway
from gateway.infill_messages import InfillBody, InfillRequest
from gateway.openapi import answer_of, body_of
from gateway.request_context import visit_of
from gateway.stopwatch import Stopwatch
from gateway.triton_client import Piece

_SETTINGS = ("n_predict", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stream")


def add_infill_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.post("/infill", openapi_extra=body_of(InfillRequest), responses=answer_of(InfillBody, streamed=True))
    async def infill(request: Request) -> Response:
        message, context = await gateway.read_for_any(InfillRequest, request), visit_of(request.scope)
        await gateway.check_fills(message.model, "input_suffix")
        asked = await gateway.aside(context, infilling, message)
        (job,) = gateway.jobs([asked], context, message.model)
        facts = await gateway.facts(gateway.served_as(message.model))
        writer = InfillWriter(message, None if facts is None else facts.max_model_len)

        async def work(out: Outlet) -> None:
            async with aclosing(pieces(gateway.link, [job], context, out.waiting)) as source:
                async for _, piece in source:
                    event = writer.take(piece)
                    if message.stream and (piece.text or piece.token_ids):
                        await out.event(_event(event))
                    if writer.is_late():
                        break
            if message.stream:
                await out.end_of_events(_event(writer.body("")))
            else:
                await out.json([msgspec.json.encode(writer.body(writer.text))])

        return gateway.answer(work, 1)


def infilling(message: InfillRequest) -> translate.Asked:
    """The request of the Triton model. It streams in any case, so that the parts of the answer can be timed."""
    files = [
        {"text": one.text, **({} if one.filename is None else {"path": one.filename})}
        for one in message.input_extra or []
    ]
    fill = {"prefix": message.input_prefix + (message.prompt or ""), "suffix": message.input_suffix, "files": files}
    request = {"fill": fill, **translate.sampling(message), "tell_prompt": "counts", "stream": True}
    if message.n_predict not in (None, translate.NO_LIMIT):
        request["max_tokens"] = message.n_predict
    if message.seed == -1:  # llama.cpp's word for a random one
        del request["seed"]
    return translate.Asked(request, None)


class InfillWriter:
    """One answer: `take` each piece in order, then `body`."""

    def __init__(self, message: InfillRequest, max_model_len: int | None) -> None:
        self._message, self._max_model_len = message, max_model_len
        self._watch = Stopwatch()
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._last = Piece()
        self._has_line = False  # a line break is in the text

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, piece: Piece) -> dict[str, Any]:
        """Take in a piece. Returns an event about it."""
        self._watch.take(piece)
        self._texts.append(piece.text)
        self._has_line = self._has_line or "\n" in piece.text
        self._tokens += piece.token_ids
        self._last = piece
        return {**self._begin(piece.text, piece.token_ids), "stop": False}

    def is_late(self) -> bool:
        """True if the time for the answer is over."""
        most = self._message.t_max_predict_ms
        return most is not None and self._has_line and self._watch.output_s * 1e3 >= most

    def _begin(self, text: str, tokens: list[int]) -> dict[str, Any]:
        usage, shown = self._watch.usage, tokens if self._message.return_tokens else []
        counts = {"tokens_predicted": usage.completion_tokens, "tokens_evaluated": usage.prompt_tokens}
        return {"index": 0, "content": text, "tokens": shown, **counts}

    def body(self, content: str) -> dict[str, Any]:
        """The whole answer, or the last event of a stream."""
        usage, reason = self._watch.usage, self._last.stop_reason
        word = reason if isinstance(reason, str) else ""
        stop_type = "limit" if self._last.finish_reason != "stop" else "word" if word else "eos"
        found = {
            **self._begin(content, [] if self._message.stream else self._tokens),
            "stop": True,
            "model": self._message.model,
            "stop_type": stop_type,
            "stopping_word": word,
            "has_new_line": self._has_line,
            "truncated": self._watch.files_left_out > 0,
            "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
            "generation_settings": self._settings(),
            "timings": timings(self._watch),
        }
        fields = self._message.response_fields
        return found if not fields else chosen(found, fields)

    def _settings(self) -> dict[str, Any]:
        """The settings that the request names, and the length of the context."""
        given = {name: value for name in _SETTINGS if (value := getattr(self._message, name)) is not None}
        return given if self._max_model_len is None else {"n_ctx": self._max_model_len, **given}


def timings(watch: Stopwatch) -> dict[str, Any]:
    """As llama-server tells them."""
    usage = watch.usage
    prompt, predicted = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    return {
        "cache_n": usage.cached_tokens,
        **_rates("prompt", prompt, watch.prompt_s),
        **_rates("predicted", predicted, watch.output_s),
    }


def _rates(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def chosen(body: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    """The values at these paths, `timings/prompt_n` being one, under their paths."""
    found = {}
    for path in fields:
        value: Any = body
        for name in path.split("/"):
            value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[path] = value
    return found


_MISSING = object()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
