"""Door: the server that clients of the replicas reach, as the front sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from backend.api.response import Response
from backend.api.stats import EngineStats, Records


class Door(Protocol):
    """The part of EngineServer that the front uses."""

    def deliver(self, responses: list[Response]) -> None: ...
    def publish_stats(self, stats: EngineStats) -> None: ...
    def publish_records(self, records: Records) -> None: ...
    def publish_adapters(self, adapters: Mapping[str, str]) -> None: ...
    def close(self) -> None: ...
