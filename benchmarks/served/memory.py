"""Whether all servers fit into the memory at the same time."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.work import kv_tokens_for
from benchmarks.peers.engines import GIB, PEERS, ours
from benchmarks.peers.models import Model
from benchmarks.served import installing
from benchmarks.served.options import Plan
from deploy.errors import UserError

SHARE = 0.95  # of the available memory


def check(plan: Plan, model: Model) -> None:
    """Raise UserError when they do not, by the estimates of `bench peers`."""
    kv = max(kv_tokens_for(cells) for cells in (plan.single, plan.turns) if cells) * model.kv_bytes_per_token
    engines = [ours(), *(PEERS[name] for name in plan.peers if installing.is_installed(name))]
    needed = sum(engine.held_bytes(model.resident_bytes("bf16"), kv) for engine in engines)
    if needed > SHARE * available():
        raise UserError(
            f"{len(engines)} servers take about {needed / GIB:.1f} GiB, {available() / GIB:.1f} are available; "
            f"give fewer --peers, a smaller --scale or fewer --users"
        )


def available() -> int:
    """Bytes that new processes can have without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
