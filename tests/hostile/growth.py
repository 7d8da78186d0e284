"""Which class of requests makes which process grow: each class alone, against a fresh server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.campaign import Campaign, Settings
from tests.hostile.mix import Mix
from tests.hostile.report import table
from tests.hostile.target import Target

SHOWN = ("tritonserver", "stub tensorrt_llm", "stub ensemble", "stub vllm", "stub everbatch", "engine", "gateway")


def run(
    directory: Path, cases: int, seed: int, kinds: tuple[str, ...], tell: Callable[[str], None]
) -> tuple[str, dict, bool]:
    """Resident megabytes before, after half and after all of the cases of each class."""
    found: dict[str, dict] = {}
    for kind in kinds:
        mix = Mix(seed, kinds=(kind,), grpc_error=0.0)  # without the metadata no class is known to end the server
        target = Target(directory / kind)
        campaign = Campaign(target, Settings(chunk=max(1, cases // 2)))
        try:
            campaign.start()
            campaign.run(mix.case, range(cases))
        finally:
            target.stop()
        sent = sum(mix.case(index).size for index in range(cases))
        found[kind] = {"sent MB": sent / 1e6, "samples": campaign.tally.samples, "deaths": len(campaign.tally.deaths)}
        tell(f"{kind}: {_row(kind, found[kind])[1:]}")
    head = ["class of request", "sent MB", *(f"{name}" for name in SHOWN), "deaths"]
    return table(head, [_row(kind, entry) for kind, entry in found.items()]), found, False


def _row(kind: str, entry: dict[str, Any]) -> list[str]:
    samples = entry["samples"]
    shown = [" > ".join(f"{sample.get(name, 0.0):.0f}" for sample in samples) for name in SHOWN]
    return [kind, f"{entry['sent MB']:.1f}", *shown, str(entry["deaths"])]
