"""One client floods the engine, and others ask now and then: what each of them gets alone, and beside the other.

    flood              the flooding client alone, in a closed loop over all slots: how fast the engine is
    others             the others alone, at a tenth of that rate
    flood, others      both; the flooding client sends requests at ten times the engine's rate, and most are refused

The phases follow each other on one engine process. Its memory is shown before and after.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from backend.api import EngineConfig
from benchmarks.harness.answers import Answer
from benchmarks.harness.engine import EngineLane, launched
from benchmarks.harness.measure import Effort, Outcome, noted
from benchmarks.harness.work import Ask, Cell, asks_of
from benchmarks.load.scenarios import Size
from deploy.progress import SteppedProgress

ABOUT = "one client asks for ten times what the engine can do, others at a tenth of its rate"
SIZE = Size((16,), (128,), 32)
SHARE, OVERLOAD = 0.1, 10.0  # rates of the others and of the flood, of the engine's own
MOST_REQUESTS = 20_000


def cell_of(size: Size) -> Cell:
    """The one cell; its users are the engine's slots."""
    return Cell(size.prompt[0], size.new, size.users[0])


def measure(
    config: EngineConfig, vocab_size: int, cell: Cell, effort: Effort, outcome: Outcome, progress: SteppedProgress
) -> None:
    """Fill the outcome: lanes are the clients, alone and beside each other."""
    with ExitStack() as stack:
        progress.step("loading")
        engine = launched(stack, config)
        pid = engine._transport.engine_pid
        assert pid is not None, "it was launched here"
        lanes = {name: [EngineLane(title, [engine], namespace=name) for title in titles] for name, titles in TITLES}
        for repeat in range(effort.repeats):
            before = memory_mb(pid)
            _phases(cell, lanes, vocab_size, repeat, effort, outcome, progress)
            progress.step(f"memory of the engine: {before:,.0f} MB before, {memory_mb(pid):,.0f} MB after")


TITLES = (("flood", ("flood alone", "flood beside others")), ("others", ("others alone", "others beside the flood")))


def _phases(
    cell: Cell,
    lanes: dict[str, list[EngineLane]],
    vocab_size: int,
    repeat: int,
    effort: Effort,
    outcome: Outcome,
    progress: SteppedProgress,
) -> None:
    flood, others = lanes["flood"], lanes["others"]
    saturated = flood[0].send(
        asks_of(cell, vocab_size, 3 * repeat, MOST_REQUESTS // cell.users), cell.users, effort.seconds
    )
    _keep(cell, flood[0], saturated, effort, outcome, progress)
    rate = len(saturated) / (max(answer.ended_s for answer in saturated) - saturated[0].started_s)
    asks = _asks_for(cell, vocab_size, 3 * repeat + 1, SHARE * rate * effort.seconds)
    _keep(cell, others[0], others[0].send_at_rate(asks, SHARE * rate, lambda: False), effort, outcome, progress)
    flooding = _asks_for(cell, vocab_size, 3 * repeat + 2, OVERLOAD * rate * effort.seconds)
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(flood[1].send_at_rate, flooding, OVERLOAD * rate, over.is_set)
        answered = others[1].send_at_rate(asks, SHARE * rate, lambda: False)
        over.set()
        _keep(cell, flood[1], sent.result(), effort, outcome, progress)
    _keep(cell, others[1], answered, effort, outcome, progress)


def _asks_for(cell: Cell, vocab_size: int, repeat: int, number: float) -> list[Ask]:
    """So many requests, at least one."""
    asks = asks_of(cell, vocab_size, repeat, min(MOST_REQUESTS, int(number)) // cell.users + 1)
    return asks[: max(1, int(number))]


def _keep(
    cell: Cell, lane: EngineLane, answers: Sequence[Answer], effort: Effort, outcome: Outcome, progress: SteppedProgress
) -> None:
    with noted(cell, lane, outcome, progress) as keep:
        keep(answers, effort.limits)


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))
