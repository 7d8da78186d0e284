"""Commands of model `everbatch` that generate nothing: the embedding of a text, and how relevant a document is to a query.

    {"embed": "a text", "dimensions": 256, "normalize": true}       or token ids; the last two may be left out
    {"rank": {"query": "a question", "document": "a text", "task": "what to look for"}}      the task may be left out

Each is answered with the end of a reply (commands.py), with `embedding` (base64 of little-endian float32) or
`score` (0 to 1) besides.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from backend.api import FinishReason, Request, Result
from backend.serving.intake.requests import Parameters, ServingContext
from backend.serving.wires.commands import EndOfReply
from backend.serving.wires.front import TextTools
from backend.serving.wires.limits import timeout_of
from backend.serving.wires.named_adapters import named_adapter
from backend.serving.wires.named_sampling import from_json
from backend.serving.wires.vectors import (
    TASK,
    VectorOutput,
    check_text_bytes,
    checked_dimensions,
    embedding_of,
    embedding_request,
    given_ids,
    relevance_of,
    relevance_request,
    text_ids,
)
from backend.serving.work import Arrays, Work


class _Command(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    timeout_s: float | None = None
    lora_name: str | None = None
    priority: float = 0.5


class Embed(_Command, frozen=True, forbid_unknown_fields=True, kw_only=True):
    embed: str | list[int]
    dimensions: int | None = None
    normalize: bool | None = None


class Pair(Struct, frozen=True, forbid_unknown_fields=True):
    query: str
    document: str
    task: str = TASK


class Rank(_Command, frozen=True, forbid_unknown_fields=True, kw_only=True):
    rank: Pair


class VectorReply(EndOfReply, frozen=True, kw_only=True):
    """The reply has an embedding or a score, or neither where the prompt was not computed."""

    embedding: bytes | UnsetType = UNSET
    score: float | UnsetType = UNSET


def is_vector_command(value: Any) -> bool:
    return isinstance(value, dict) and ("embed" in value or "rank" in value)


def read_vector_command(value: Any, context: ServingContext, parameters: Parameters, tools: TextTools) -> Work:
    """Raises InvalidRequest and Unsupported."""
    if "embed" in value:
        return _embed(from_json("request", value, Embed), context, parameters, tools)
    asked: Rank = from_json("request", value, Rank)
    pair = asked.rank
    check_text_bytes("query", pair.query, context)
    check_text_bytes("documents", pair.document, context)
    request = relevance_request(pair.query, pair.document, pair.task, context, tools, parameters)
    return _work(asked, request, context, lambda result: {"score": relevance_of(result)})


def _embed(asked: Embed, context: ServingContext, parameters: Parameters, tools: TextTools) -> Work:
    pooling, given = tools.pooling.of_model(context.model.reads_whole_texts), asked.embed
    dimensions = checked_dimensions(asked.dimensions, pooling, context)
    if isinstance(given, str):
        check_text_bytes("embed", given, context)
        ids = text_ids("embed", given, tools, context)
    else:
        ids = given_ids("embed", given, context)
    request = embedding_request(ids, pooling, parameters)

    def told(result: Result) -> dict[str, Any]:
        return {"embedding": embedding_of(result, pooling, dimensions, asked.normalize).astype("<f4").tobytes()}

    return _work(asked, request, context, told)


def _work(asked: _Command, request: Request, context: ServingContext, told: Any) -> Work:
    """`told`: the key that the answer has besides, of a result whose prompt was computed."""
    changes: dict[str, Any] = {"lora": named_adapter(asked.lora_name, context.adapters, context.config.lora.enabled)}
    changes["priority"] = asked.priority
    if asked.timeout_s is not None:
        changes["timeout_s"] = timeout_of(asked.timeout_s, asked.priority, context)

    def render(result: Result) -> list[Arrays]:
        reason = result.finish_reasons[0]
        perf = result.perf_metrics
        usage = {
            "prompt_tokens": len(request.input_token_ids),
            "completion_tokens": 0,
            "cached_tokens": 0 if perf is None else perf.num_cached_tokens,
        }
        more = told(result) if reason is FinishReason.LENGTH else {}
        return [VectorReply(finish_reason=reason.openai_name or "cancelled", usage=usage, **more).arrays()]

    return Work(msgspec.structs.replace(request, **changes), VectorOutput(render))
