"""Loops that look for what was seen once: streams cancelled midway, and starts of the server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.errors import ServerFailed
from tests.hostile import grpc_messages, report
from tests.hostile.campaign import Campaign, Settings
from tests.hostile.case import Case, GrpcCall
from tests.hostile.served import GENERATING
from tests.hostile.target import Target


def cancel_case(seed: int, index: int) -> Case:
    """A served request that streams, cancelled at once or after up to forty responses."""
    rng = random.Random(f"cancel {seed}:{index}")
    model = rng.choice(GENERATING)
    message = grpc_messages.streamed(model, rng.choice((40, 400, 1500)))
    call = GrpcCall(
        "ModelStreamInfer", (message.SerializeToString(),), leave_after=rng.choice((0, 0, 1, 1, 2, 3, 8, 20, 40))
    )
    return Case("cancel", f"cancelled after {call.leave_after} responses", model, call)


def cancels(
    directory: Path, count: int, seed: int, workers: int, tell: Callable[[str], None]
) -> tuple[str, dict[str, Any], bool]:
    """Cancel `count` gRPC streams midway; a canary, and a look for what stays in use, after each 500."""
    target = Target(directory)
    campaign = Campaign(target, Settings(workers=workers), tell)
    try:
        campaign.start()
        campaign.run(lambda index: cancel_case(seed, index), range(count))
    finally:
        target.stop()
    return report.text(campaign.tally), report.as_json(campaign.tally), bool(campaign.tally.failures())


def starts(directory: Path, times: int, tell: Callable[[str], None]) -> tuple[str, dict[str, Any], bool]:
    """Start and stop the server `times` times. Every log stays; a start that fails is told with its log's end."""
    seconds: list[float] = []
    failures: list[dict] = []
    for n in range(times):
        target = Target(directory / f"start-{n}")
        began = time.monotonic()
        try:
            target.start()
            seconds.append(time.monotonic() - began)
        except ServerFailed as failure:
            failures.append(
                {
                    "start": n,
                    "after s": time.monotonic() - began,
                    "said": str(failure),
                    "log": str(target.server.log_path),
                }
            )
        finally:
            target.stop()
        tell(
            f"{n + 1}/{times} starts, {len(failures)} failed, the last took {time.monotonic() - began:.1f} s with its stop"
        )
    longest = max(seconds, default=0.0)
    shown = (
        f"{times} starts, {len(failures)} failed, longest {longest:.1f} s, shortest {min(seconds, default=0.0):.1f} s"
    )
    shown += "".join(f"\n  start {f['start']}: {f['said'][:600]} (log {f['log']})" for f in failures)
    return shown, {"starts": times, "seconds": seconds, "failures": failures}, bool(failures)
