"""GET /metrics: Triton's page, the engine's figures under vLLM's names, and the gateway's own counters."""

from __future__ import annotations

import asyncio
import re
import secrets

from fastapi import FastAPI, Request, Response

from gateway.core import Gateway
from gateway.counters import triton_page
from gateway.errors import GatewayError
from gateway.keys import READ_METRICS
from gateway.request_context import visit_of
from gateway.triton_client import Job

VLLM_TIMEOUT_S = 2.0
# Families that a Triton model publishes by itself (REPORT_CUSTOM_METRICS) count the same requests once more.
_VLLM_LINES = re.compile(r"^(?:# (?:HELP|TYPE) )?vllm:.*\n", re.MULTILINE)


def add_metrics_route(api: FastAPI, gateway: Gateway) -> None:
    @api.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        gateway.check_right(READ_METRICS, visit_of(request.scope))
        found, vllm = await asyncio.gather(_of_triton(gateway), _of_engine(gateway))
        own = gateway.counters.page(gateway.requests.taken, gateway.running.choices, gateway.store.held())
        page = "# Triton's metrics page does not answer\n" if found is None else found
        if vllm:
            page = _VLLM_LINES.sub("", page)
        return Response(page + vllm + own, media_type="text/plain; version=0.0.4")


async def _of_triton(gateway: Gateway) -> str | None:
    """Empty where the page is switched off; None if it does not answer."""
    url = gateway.settings.metrics_url
    return "" if url is None else await triton_page(url)


async def _of_engine(gateway: Gateway) -> str:
    """The page with vLLM's names, which model `everbatch` makes; empty while it does not answer."""
    job = Job({"metrics": gateway.settings.model_names[0]}, f"{secrets.token_hex(12)}-0", "")
    try:
        async with asyncio.timeout(VLLM_TIMEOUT_S):
            return (await gateway.tokens_of(job)).text
    except (GatewayError, TimeoutError):
        return ""
