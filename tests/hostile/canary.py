"""Between hostile requests an honest client must get exactly what it got at the start."""

from __future__ import annotations

import itertools
import json

from tests.e2e.wire import TokenClient, eventually, post, scrape
from tests.hostile.target import Target

PROMPT, TOKENS = "def main(", 12
FIRST_TURN, SECOND_TURN = "import os", "import sys"
_TIMEOUT_S = 20.0
_sessions = itertools.count(1 << 40)  # ids that no hostile request uses


class Canary:
    """Greedy texts of every model and a session of two turns, noted on a fresh server and asked for again."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._expected: dict[str, str] = {}

    def learn(self) -> None:
        """Note the answers of a fresh server."""
        self._expected = self._ask()

    def check(self) -> list[str]:
        """What is wrong now, in sentences; nothing when all is well."""
        try:
            found = self._ask()
        except Exception as error:  # whatever the honest client runs into is the finding
            return [f"an honest request failed: {type(error).__name__}: {str(error)[:200]}"]
        wrong = [
            f"{name} answered {found[name]!r}, not {self._expected[name]!r}"
            for name in found
            if found[name] != self._expected[name]
        ]
        if not eventually(self._idle, 30):
            wrong.append("requests or KV blocks stay in use although every client is gone")
        return wrong

    def _ask(self) -> dict[str, str]:
        server = self._target.server
        found = {}
        for model in ("ensemble", "tensorrt_llm_bls"):
            found[f"greedy text of {model}"] = self._text(model, {"text_input": PROMPT, "max_tokens": TOKENS})
        with TokenClient(server.grpc_url) as client:
            found["greedy ids of tensorrt_llm"] = str(client.generate([5, 6, 7], TOKENS))
        session = next(_sessions)
        turn = {"CORRID": session, "max_tokens": 6}
        found["first turn"] = self._text("ensemble", {**turn, "text_input": FIRST_TURN, "START": 1, "END": 0})
        found["second turn"] = self._text("ensemble", {**turn, "text_input": SECOND_TURN, "START": 0, "END": 1})
        return found

    def _text(self, model: str, fields: dict[str, object]) -> str:
        status, text = post(f"{self._target.server.http_url}/v2/models/{model}/generate", fields, timeout=_TIMEOUT_S)
        if status != 200:
            raise RuntimeError(f"{model} answered status {status}: {text[:200]}")
        return str(json.loads(text)["text_output"])

    def _idle(self) -> bool:
        metrics = scrape(self._target.server.metrics_url)
        return metrics["everbatch_kv_blocks{state=used}"] == 0 and metrics["everbatch_requests{state=active}"] == 0
