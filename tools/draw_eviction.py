"""Draws docs/design/eviction.png from a real run: three sessions of the default model over a pool that holds the KV of about two.

    .venv/bin/python -m tools.draw_eviction

Each column is an engine step, each row a KV block. A block is dark while its session runs, light while it is only cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.api import EngineConfig, Request, SessionConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.api.request import RequestId, SessionId
from backend.core.sequence import Sequence, SessionKey
from backend.engine.core import EngineCore
from backend.worker.group import InProcessWorkerGroup
from benchmarks import pictures

OUT = Path(__file__).resolve().parents[1] / "docs" / "design" / "eviction.png"
NUM_BLOCKS, BLOCK_SIZE = 10, 8
COLOURS = {1: "#2a6fdb", 2: "#c4511d", 3: "#2a8c55"}
NAMES = {1: "A", 2: "B", 3: "C"}
TURNS = [(1, 30, True), (2, 30, True), (3, 28, True), (1, 6, False), (1, 6, False)]  # (session, new tokens, first turn)
OUTPUT_TOKENS = 7


@dataclass
class Trace:
    """The state of the pool after each step, and the events."""

    columns: list[dict[int, tuple[int, bool]]]  # block id -> (session, runs)
    notes: list[tuple[int, str, int]]  # (step, text, session)


def run() -> Trace:
    section, scheduler = ModelConfigSection(num_threads=1), SchedulerConfig(max_batch_size=2, max_num_tokens=64)
    kv = KvCacheConfig(block_size=BLOCK_SIZE, max_tokens=NUM_BLOCKS * BLOCK_SIZE, enable_block_reuse=False)
    core = EngineCore(EngineConfig(section, kv, scheduler), InProcessWorkerGroup(section, scheduler, kv))
    trace = Trace([], [])
    for index, (session, num_tokens, start) in enumerate(TURNS):
        known = 0 if start else _session(core, session).num_tokens
        core.begin_poll()
        prompt = [(17 * index + 3 * i) % core.model.vocab_size for i in range(num_tokens)]
        config = SessionConfig(SessionId(session), start=start)
        core.enqueue(RequestId(index), Request(prompt, OUTPUT_TOKENS, session=config))
        first = len(trace.columns)
        while core.has_work:
            core.step()
            trace.columns.append(_look(core))
        trace.notes.append((first, _note(known, num_tokens, _session(core, session).num_recomputed_tokens), session))
    return trace


def _session(core: EngineCore, session: int) -> Sequence:
    seq = core.sessions.get(SessionKey("", SessionId(session)))
    assert seq is not None, f"session {session} has not started"
    return seq


def _look(core: EngineCore) -> dict[int, tuple[int, bool]]:
    owners: dict[int, tuple[int, bool]] = {}
    for session in NAMES:
        seq = core.sessions.get(SessionKey("", SessionId(session)))
        table = core.kv.state.tables.get(seq.seq_id) if seq else None
        if table is None:
            continue
        for handle in table.handles:
            if core.kv.state.blocks.is_current(handle):
                owners[handle.block_id] = (session, table.is_locked)
    return owners


def _note(known: int, num_tokens: int, recomputed: int) -> str:
    if not known:
        return f"new: {num_tokens} tokens"
    lost = f"{recomputed} computed again" if recomputed else "nothing computed again"
    return f"returns with {known} token ids:\n{lost}"


def draw(trace: Trace) -> None:
    pyplot = pictures.pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 4.3), layout="constrained")
    for step, owners in enumerate(trace.columns):
        for block_id, (session, runs) in owners.items():
            box = pyplot.Rectangle(
                (step, block_id + 0.06), 1, 0.88, color=COLOURS[session], alpha=0.95 if runs else 0.28, linewidth=0
            )
            axes.add_patch(box)
    for step, text, session in trace.notes:
        axes.axvline(step, color="#444", linewidth=0.8, linestyle=":")
        axes.text(
            step + 0.3,
            NUM_BLOCKS + 0.25,
            f"session {NAMES[session]}\n{text}",
            fontsize=8,
            va="bottom",
            color=COLOURS[session],
        )
    _dress(pyplot, axes, len(trace.columns))
    figure.savefig(OUT, dpi=130)


def _dress(pyplot: Any, axes: Any, num_steps: int) -> None:
    axes.set_xlim(0, num_steps)
    axes.set_ylim(0, NUM_BLOCKS + 2.6)
    axes.set_yticks([i + 0.5 for i in range(NUM_BLOCKS)], [str(i) for i in range(NUM_BLOCKS)], fontsize=8)
    axes.set_xlabel("engine step")
    axes.set_ylabel("KV block")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    legend = [
        pyplot.Rectangle((0, 0), 1, 1, color="#555", alpha=0.95, label="in use by a running turn"),
        pyplot.Rectangle((0, 0), 1, 1, color="#555", alpha=0.28, label="cached, evictable"),
    ]
    axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False, fontsize=8)
    axes.set_title(
        f"{NUM_BLOCKS} KV blocks, three conversations: the least recently used one gives its blocks away and keeps its token ids",
        fontsize=10,
    )


if __name__ == "__main__":
    draw(run())
    print(f"written: docs/design/{OUT.name}")
