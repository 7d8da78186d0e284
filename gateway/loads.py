"""Routes for routers in front of several servers: the version, the model, and the load of this server.

The names are those of vLLM (/version, /load) and SGLang (/server_info, /v1/loads), which smg and sglang-router read. What a
server of one process on one machine does not have is left out.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from gateway.core import Gateway
from gateway.counters import triton_page
from gateway.errors import unavailable
from gateway.keys import READ_METRICS
from gateway.openapi import answer_of, as_json
from gateway.request_context import visit_of

_SAMPLE = re.compile(r"^nv_trt_llm_(request|kv_cache_block)_metrics\{([^}]*)\} ([0-9.e+]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Version(BaseModel):
    version: str


class ServerInfo(BaseModel):
    version: str
    model_path: str
    served_model_name: str
    max_model_len: int | None
    tp_size: int
    dp_size: int


class ServerLoad(BaseModel):
    server_load: int  # requests that are being answered


class Load(BaseModel):
    dp_rank: int
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float  # part of the KV cache that running requests use
    max_running_requests: int
    utilization: float  # part of the places of the batch that are taken


class Loads(BaseModel):
    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: dict[str, float]


def add_load_routes(api: FastAPI, gateway: Gateway) -> None:
    @api.get("/version", responses=answer_of(Version))
    async def version() -> Response:
        return as_json({"version": gateway.settings.server_version})

    @api.get("/server_info", responses=answer_of(ServerInfo))
    async def server_info(request: Request) -> Response:
        names = gateway.models(visit_of(request.scope).client)
        name = names[0] if names else ""
        facts = await gateway.facts(gateway.served_as(name))
        told = {
            "version": gateway.settings.server_version,
            "model_path": name,
            "served_model_name": name,
            "max_model_len": None if facts is None else facts.max_model_len,
        }
        return as_json({**told, "tp_size": 1, "dp_size": 1})

    @api.get("/load", responses=answer_of(ServerLoad))
    @api.get("/v1/load", responses=answer_of(ServerLoad))
    async def load(request: Request) -> Response:
        gateway.check_right(READ_METRICS, visit_of(request.scope))
        return as_json({"server_load": gateway.requests.taken})

    @api.get("/v1/loads", responses=answer_of(Loads))
    async def loads(request: Request, model: str = "") -> Response:
        gateway.check_right(READ_METRICS, visit_of(request.scope))
        url = gateway.settings.metrics_url
        page = None if url is None else await triton_page(url)
        if model:
            gateway.check_model(model, visit_of(request.scope).client)
        if (load := load_of(page or "", gateway.served_as(model).label)) is None:
            raise unavailable("the load is not known: Triton's page of metrics does not answer, or is switched off")
        return as_json(loads_body(load, gateway.settings.server_version))


def load_of(page: str, label: str = "") -> Load | None:
    """Reads the load of an engine from Triton's page of metrics; None without the metrics that it needs. `label`: what they call
    its model, where there are several; of two engines of a model the newer one counts.
    """
    told: dict[str, int] = {}
    newest = -1
    for family, labels, value in _SAMPLE.findall(page):
        named = dict(_LABEL.findall(labels))
        if label and named.get("model") != label:
            continue
        version = int(named["version"]) if label and named.get("version", "").isdecimal() else 0
        if version > newest:
            told, newest = {}, version
        kind = next((text for name, text in named.items() if name.endswith("_type")), "")
        if version == newest:
            told[f"{family} {kind}"] = int(float(value))
    try:
        running, waiting, places = (told[f"request {kind}"] for kind in ("active", "waiting", "max"))
        used, blocks, size = (told[f"kv_cache_block {kind}"] for kind in ("used", "max", "tokens_per"))
    except KeyError:
        return None
    return Load(
        dp_rank=0,
        timestamp=time.time(),
        num_running_reqs=running - waiting,
        num_waiting_reqs=waiting,
        num_used_tokens=used * size,
        max_total_num_tokens=blocks * size,
        token_usage=used / max(1, blocks),
        max_running_requests=places,
        utilization=(running - waiting) / max(1, places),
    )


def loads_body(load: Load, version: str) -> dict[str, Any]:
    """One rank, and the sums over all ranks, which are the same."""
    sums = {
        "total_running_reqs": load.num_running_reqs,
        "total_waiting_reqs": load.num_waiting_reqs,
        "total_reqs": load.num_running_reqs + load.num_waiting_reqs,
        "avg_token_usage": load.token_usage,
        "avg_utilization": load.utilization,
    }
    told = {"timestamp": datetime.now(UTC).isoformat(), "version": version, "dp_rank_count": 1}
    return {**told, "loads": [load.model_dump()], "aggregate": sums}
