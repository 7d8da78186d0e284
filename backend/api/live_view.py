"""LiveView: what the engine does at one moment, for people who watch it. It holds no text, token or name of a client.

The names of namespaces and sessions are shown as keyed hashes: equal names look equal until the engine ends, and trying names
does not find them.
"""

from __future__ import annotations

from msgspec import Struct

from backend.api.stats import EngineCounters, IterationStats

FREE, CACHED = -2, -1  # in LiveView.blocks


class LiveRow(Struct, frozen=True, omit_defaults=True):
    """A sequence that runs, or waits in the queue."""

    id: str  # hash of the request and the number of its sequence
    stage: str  # queued, paused, context or generation
    num_prompt_tokens: int  # history of the session included
    num_computed_tokens: int  # tokens with KV in the pool: in the context phase, the progress of the prompt
    num_output_tokens: int
    max_output_tokens: int
    num_blocks: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the cache
    num_recomputed_tokens: int = 0  # run again because their KV had been evicted
    num_evictions: int = 0
    age_s: float = 0.0  # since it arrived
    namespace: str = ""  # empty: the client named none
    session: str = ""  # empty: it belongs to none


class LiveSession(Struct, frozen=True, omit_defaults=True):
    """A session between two turns."""

    session: str
    num_tokens: int
    num_cached_tokens: int  # tokens with KV in the pool; the others are computed again when the session returns
    namespace: str = ""


class Quantiles(Struct, frozen=True):
    """Seconds. All 0 before the first request has ended."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class LiveView(Struct, frozen=True):
    """`blocks` is the map of the KV pool, in runs: state, number of cells, state, number of cells ... A cell stands for
    `blocks_per_cell` blocks and has the state of the first of them: FREE, CACHED, an index of `rows` (in use by this running
    sequence), or len(rows) + an index of `sessions` (cached, and this session's).
    """

    engine: str  # names the life of the engine: after a restart there is another name
    time_ns: int  # wall clock
    uptime_s: float
    latest: IterationStats
    counters: EngineCounters
    first_token_s: Quantiles  # from arrival to the first token, of the latest 512 requests that have ended
    per_token_s: Quantiles  # from one output token to the next
    rows: list[LiveRow]  # running, oldest first
    queue: list[LiveRow]  # the first ones, in the order of admission
    num_queued: int  # all that wait
    sessions: list[LiveSession]  # idle ones, the most recently used first; the first of them
    num_sessions: int
    blocks: list[int]
    blocks_per_cell: int
    num_blocks: int
