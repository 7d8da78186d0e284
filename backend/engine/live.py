"""Makes LiveViews of the engine (api/live_view.py), between two steps and only on demand."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable
from itertools import islice

from backend.api.live_view import LiveRow, LiveSession, LiveView, Quantiles
from backend.api.request import RequestId
from backend.api.response import FinishReason, Response, Result
from backend.core.sequence import Sequence, Status
from backend.engine.core import EngineCore
from backend.kvcache.block_map import block_map

MAX_ROWS = 256
MAX_QUEUED = 50
MAX_SESSIONS = 50
REUSE_NS = 50_000_000


class LiveViews:
    """Makes views of one engine, in which hashes under a random key stand for requests, namespaces and sessions."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._latest: LiveView | None = None
        self._made_ns = 0
        self._name, self._key = secrets.token_hex(4), secrets.token_bytes(16)

    def answer(self, request_id: RequestId) -> Response:
        """The response to a Look command. Looks within REUSE_NS get the same view, so that many of them do not delay steps."""
        now_ns = self._core.clock.monotonic_ns()
        if self._latest is None or now_ns - self._made_ns >= REUSE_NS:
            self._latest, self._made_ns = self.view(), now_ns
        reasons = (FinishReason.END_ID,)
        result = Result([[]], is_final=True, is_sequence_final=True, finish_reasons=reasons, live_view=self._latest)
        return Response(request_id, None, result)

    def view(self) -> LiveView:
        core = self._core
        now_ns = core.clock.monotonic_ns()
        stats = core.stats()
        running = core.scheduler.running[:MAX_ROWS]
        idle = list(islice((seq for seq in core.sessions.newest() if seq.status is Status.IDLE), MAX_SESSIONS))
        cells, blocks_per_cell = block_map(core.kv.state, [*running, *idle])
        return LiveView(
            engine=self._name,
            time_ns=stats.latest.timestamp_ns,
            uptime_s=stats.uptime_s,
            latest=stats.latest,
            counters=stats.counters,
            first_token_s=_quantiles(core.statistics.first_token_s),
            per_token_s=_quantiles(core.statistics.per_token_s),
            rows=self._rows(running, now_ns),
            queue=self._rows(islice(core.scheduler.waiting, MAX_QUEUED), now_ns),
            num_queued=len(core.scheduler.waiting),
            sessions=[self._session(seq) for seq in idle],
            num_sessions=len(core.sessions),
            blocks=cells,
            blocks_per_cell=blocks_per_cell,
            num_blocks=core.kv.state.blocks.num_blocks,
        )

    def _rows(self, sequences: Iterable[Sequence], now_ns: int) -> list[LiveRow]:
        return [self._row(seq, now_ns) for seq in sequences]

    def _row(self, seq: Sequence, now_ns: int) -> LiveRow:
        table = self._core.kv.state.tables.get(seq.seq_id)
        return LiveRow(
            id=self._hash(f"{seq.request_id} {seq.sequence_index}"),
            stage=_stage(seq),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_computed_tokens=seq.num_computed_tokens,
            num_output_tokens=seq.num_output_tokens,
            max_output_tokens=seq.max_output_tokens,
            num_blocks=table.num_held if table is not None and table.is_locked else 0,
            num_cached_tokens=seq.num_cached_tokens,
            num_recomputed_tokens=seq.num_recomputed_tokens,
            num_evictions=seq.num_evictions,
            age_s=round((now_ns - seq.arrival_ns) / 1e9, 3),
            namespace=self._hash(seq.request.cache_salt),
            session=self._session_hash(seq),
        )

    def _session(self, seq: Sequence) -> LiveSession:
        num_cached = self._core.kv.state.survivors(seq, seq.num_tokens)[1]
        namespace = "" if seq.session_key is None else seq.session_key.namespace
        return LiveSession(self._session_hash(seq), seq.num_tokens, num_cached, self._hash(namespace))

    def _session_hash(self, seq: Sequence) -> str:
        return "" if seq.session_key is None else self._hash(f"session {seq.session_key}")

    def _hash(self, name: str) -> str:
        """Eight hexadecimal digits; of an empty name none."""
        return hashlib.blake2b(name.encode(errors="replace"), digest_size=4, key=self._key).hexdigest() if name else ""


def _quantiles(seconds: Collection[float]) -> Quantiles:
    """By nearest rank."""
    ordered = sorted(seconds)
    return (
        Quantiles(*(round(ordered[int(q * (len(ordered) - 1))], 6) for q in (0.5, 0.9, 0.99)))
        if ordered
        else Quantiles()
    )


def _stage(seq: Sequence) -> str:
    match seq.status:
        case Status.RUNNING:
            return "generation" if seq.is_generating else "context"
        case Status.PAUSED:
            return "paused"
        case _:
            return "queued"
