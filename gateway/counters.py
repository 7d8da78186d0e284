"""The gateway's own counters in Prometheus' text format, behind Triton's page."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from collections.abc import Iterable

LARGEST_PAGE = 16 << 20
PAGE_TIMEOUT_S = 5.0


class Counters:
    """Counted since the gateway was started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by (route, status)
        self.disconnects = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def page(self, in_flight: int, choices: int, stored: tuple[int, int]) -> str:
        """Requests that are `in_flight`, `choices` that are being generated, `stored` responses and their bytes."""
        requests = [
            (f'{{route="{route}",status="{status}"}}', count)
            for (route, status), count in sorted(self.requests.items())
        ]
        families: list[tuple[str, str, str, Iterable[tuple[str, int]]]] = [
            ("requests_total", "counter", "HTTP requests that have ended", requests),
            ("requests_in_flight", "gauge", "POST requests that are being answered", [("", in_flight)]),
            ("choices_in_flight", "gauge", "Replies that are being generated", [("", choices)]),
            (
                "disconnects_total",
                "counter",
                "Clients that left before their reply was complete",
                [("", self.disconnects)],
            ),
            ("prompt_tokens_total", "counter", "Prompt tokens of complete replies", [("", self.prompt_tokens)]),
            ("completion_tokens_total", "counter", "Tokens received from the model", [("", self.completion_tokens)]),
            ("stored_responses", "gauge", "Responses kept for previous_response_id", [("", stored[0])]),
            ("stored_bytes", "gauge", "Bytes of these responses", [("", stored[1])]),
        ]
        return "".join(_family(*family) for family in families)


def _family(name: str, kind: str, meaning: str, samples: Iterable[tuple[str, int]]) -> str:
    full = f"everbatch_gateway_{name}"
    lines = [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", *(f"{full}{labels} {n}" for labels, n in samples)]
    return "\n".join(lines) + "\n"


async def triton_page(url: str) -> str | None:
    """Triton's metrics as they are; None when it does not answer with them."""
    try:
        text = await asyncio.to_thread(_fetch, url)
    except (OSError, ValueError):
        return None
    return text if not text or text.endswith("\n") else text + "\n"


def _fetch(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=PAGE_TIMEOUT_S) as response:
        data: bytes = response.read(LARGEST_PAGE + 1)
    if len(data) > LARGEST_PAGE:
        raise ValueError("the page is too large")
    return data.decode(errors="replace")
