"""llama-server's /props and /slots, which its tools read: the facts that there are here, and nothing in place of the others."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, RootModel

from gateway import translate
from gateway.core import Gateway
from gateway.errors import unavailable
from gateway.keys import READ_METRICS
from gateway.live import UNREADABLE, look_at
from gateway.openapi import answer_of, as_json
from gateway.request_context import RequestContext, visit_of

_FULL = "all {total} places of the batch are taken; try again later"
_OF_TOKENIZER = ("chat_template", "bos_token", "eos_token")


class Props(BaseModel):
    """`total_slots`: places of the batch, for those who may read metrics."""

    default_generation_settings: dict[str, Any]  # `n_ctx`: tokens of prompt and answer together
    total_slots: int | None = None
    model_alias: str
    modalities: dict[str, bool]
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    build_info: str


class NextToken(BaseModel):
    has_next_token: bool
    n_remain: int
    n_decoded: int


class Slot(BaseModel):
    """A place of the batch. Its number is its place in this answer."""

    id: int
    n_ctx: int | None
    is_processing: bool
    next_token: list[NextToken] = []


class Slots(RootModel[list[Slot]]):
    """All places of the batch."""


def add_props_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.get("/props", responses=answer_of(Props))
    async def props(request: Request, model: str = "") -> Response:
        context = visit_of(request.scope)
        name = _named(gateway, context, model)
        asked = translate.Asked({"prompt_token_ids": [0], "tokenize": True, "tell_tokenizer": True}, None)
        (job,) = gateway.jobs([asked], context, name)
        told = await gateway.tokens_of(job)
        tokenizer = told.tokenizer or {}
        slots = {}
        if gateway.keys is None or READ_METRICS.is_of(context.client):
            slots = {"total_slots": _total(await look_at(gateway.link, gateway.served_as(name).triton_model))}
        return as_json(
            {
                "default_generation_settings": {"n_ctx": told.max_model_len},
                **slots,
                "model_alias": name,
                "modalities": {"vision": told.takes_images, "audio": False},
                **{key: tokenizer[key] for key in _OF_TOKENIZER if key in tokenizer},
                "build_info": f"everbatch {gateway.settings.server_version}",
            }
        )

    @api.get("/slots", responses=answer_of(Slots))
    async def slots(request: Request, model: str = "", fail_on_no_slot: str = "") -> Response:
        context = visit_of(request.scope)
        gateway.check_right(READ_METRICS, context)
        served = gateway.served_as(_named(gateway, context, model))
        view, facts = await look_at(gateway.link, served.triton_model), await gateway.facts(served)
        found = slots_of(view, None if facts is None else facts.max_model_len)
        if fail_on_no_slot and all(slot["is_processing"] for slot in found):
            raise unavailable(_FULL.format(total=len(found)))
        return as_json(found)


def _named(gateway: Gateway, context: RequestContext, model: str) -> str:
    """The model that a request asks about, or the first one that its key may use. Raises GatewayError."""
    name = model or next(iter(gateway.models(context.client)), "")
    gateway.check_model(name, context.client)
    return name


def _total(view: dict[str, Any]) -> int:
    """Places of the batch. Raises GatewayError for a view without their number."""
    found = view.get("latest", {}).get("max_num_active_requests")
    if not isinstance(found, int):
        raise unavailable(UNREADABLE)
    return found


def slots_of(view: dict[str, Any], n_ctx: int | None) -> list[dict[str, Any]]:
    """The places of the batch: those of the rows that run, then the free ones. `view`: a LiveView."""
    found: list[dict[str, Any]] = []
    for number in range(max(_total(view), len(view["rows"]))):
        slot: dict[str, Any] = {"id": number, "n_ctx": n_ctx, "is_processing": number < len(view["rows"])}
        if slot["is_processing"]:
            row = view["rows"][number]
            decoded, most = row["num_output_tokens"], row["max_output_tokens"]
            slot["next_token"] = [{"has_next_token": True, "n_remain": most - decoded, "n_decoded": decoded}]
        found.append(slot)
    return found
