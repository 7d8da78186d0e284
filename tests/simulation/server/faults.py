"""Which faults a schedule has: by swarm, so that most schedules have some kinds of them and none has all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import msgspec

from backend.api import EngineConfig
from backend.api.config.schema import KvCacheConfig, LimitsConfig, SchedulerConfig, TritonConfig
from backend.core.kept_block import RecordFormat
from backend.storage.block_file import HEADER_BYTES
from tests.simulation.server import disk
from tests.simulation.setups import Setup

KINDS = (
    *(
        "kill",
        "terminate",
        "freeze",
        "hang",
        "cut",
        "kill text stub",
        "kill owner",
        "step fails",
        "sender slow",
        "sender fails",
    ),
    *(
        "no file",
        "no process",
        "thread held",
        "cancel",
        "stop",
        "garbage",
        "stranger",
        "slow text",
        "drain",
        "time out",
    ),
    *("kill at the end", "poison", "hang twice"),
)
GENTLE = (
    *("step fails", "sender slow", "sender fails", "cancel", "stop", "garbage", "stranger", "slow text", "time out"),
)  # The machine is well all the time, so every request must be served.
LEVEL_SHARE = 0.35  # of all seeds that have a second level of KV
RARE = ("kill owner", "no process", "drain", "many kills")


@dataclass
class Swarm:
    """The choices of one seed."""

    kinds: set[str]
    config: EngineConfig
    num_blocks: int
    num_requests: int
    step_s: float
    looks_ahead: bool
    switchiness: float
    by_priority: bool
    short_io: float
    socket_bytes: int
    clock_tick_ns: int
    switch_ns: int
    has_program: bool
    round_trip_s: float  # between a stub and Triton
    is_fine: bool  # threads may switch between any two statements
    load_s: float  # which an engine process takes to load its model
    disk_kinds: frozenset[str] = frozenset()  # what happens to the second level's file

    @property
    def has_level(self) -> bool:
        return bool(self.config.kv_cache.directory)

    @property
    def setup(self) -> Setup:
        return Setup(self.config, self.num_blocks, None, self.looks_ahead)


def swarm_of(seed: int) -> Swarm:
    rng = Random(f"swarm {seed}")
    share = rng.choice((0.0, 0.15, 0.3, 0.5))
    is_gentle = rng.random() < 0.35
    chosen = GENTLE if is_gentle else KINDS
    kinds = {kind for kind in chosen if rng.random() < share * (0.4 if kind in RARE else 1.0)}
    if rng.random() < 0.02 and not is_gentle:
        kinds.add("many kills")
    is_fine = rng.random() < 0.25
    block_size = rng.choice((2, 4))
    num_blocks = rng.randint(40, 80) // block_size
    config = EngineConfig(
        kv_cache=KvCacheConfig(block_size=block_size, max_tokens=block_size * num_blocks),
        scheduler=SchedulerConfig(
            max_batch_size=rng.choice((1, 2, 4)),
            max_num_tokens=rng.randint(6, 24),
            policy=rng.choice(("guaranteed_no_evict", "max_utilization")),
        ),
        limits=LimitsConfig(max_queue_size=rng.choice((3, 64, 64)), default_timeout_s=1000.0),
        triton=TritonConfig(
            sender_threads=rng.choice((1, 2, 4)),
            cancellation_check_period_ms=rng.choice((10, 50)),
            log_requests=False,
            one_response_per_token=rng.random() < 0.5,
            stream_interval_ms=rng.choice((0.0, 0.0, 40.0)),
            text_threads=rng.choice((1, 2)),
            text_timeout_s=2.0,
            watchdog_timeout_s=4.0,
            step_timeout_s=5.0,
            attach_timeout_s=30.0,
            hold_new_s=Random(f"hold {seed}").choice((0.0, 1.0, 10.0)),
        ),
    )
    swarm = Swarm(
        kinds=kinds,
        config=config,
        num_blocks=num_blocks,
        num_requests=rng.randint(3, 10),
        step_s=0.6 if is_gentle and rng.random() < 0.4 else rng.choice((0.0, 0.002, 0.02, 0.6)),
        looks_ahead=rng.random() < 0.5,
        switchiness=rng.choice((1.0, 0.5, 0.1)) if not is_fine else rng.choice((0.3, 0.1, 0.03)),
        by_priority=rng.random() < 0.3,
        short_io=rng.choice((0.0, 0.0, 0.3)),
        socket_bytes=rng.choice((300, 2000, 1 << 17, 1 << 17)),
        clock_tick_ns=rng.choice((1, 1, 16_000_000)),
        switch_ns=rng.choice((0, 1000, 20_000)),
        has_program=rng.random() < 0.5,
        round_trip_s=rng.choice((0.0, 0.0001, 0.003)),
        is_fine=is_fine,
        load_s=rng.choice((0.0, 2.5, 6.0)),
    )
    level = Random(f"level {seed}")  # of its own, so that seeds without a level keep their schedules
    return _with_level(swarm, level) if level.random() < LEVEL_SHARE else swarm


def _with_level(swarm: Swarm, rng: Random) -> Swarm:
    """A second level in a file, under a pool that holds little more than one request."""
    block_size = swarm.config.kv_cache.block_size
    num_blocks = 48 // block_size
    place_bytes = RecordFormat(block_size, 8 * block_size).place_bytes
    kv_cache = msgspec.structs.replace(
        swarm.config.kv_cache,
        max_tokens=block_size * num_blocks,
        directory="/kv",
        directory_bytes=HEADER_BYTES + place_bytes * rng.choice((1, 6, 20, 100)),
    )
    kinds = frozenset(kind for kind in disk.KINDS if rng.random() < disk.KIND_SHARE)
    config = msgspec.structs.replace(swarm.config, kv_cache=kv_cache)
    return replace(
        swarm,
        config=config,
        num_blocks=num_blocks,
        disk_kinds=kinds,
        num_requests=rng.randint(9, 17),
        step_s=rng.choice((0.002, 0.02, 0.6)),
    )
