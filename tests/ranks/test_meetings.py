"""How ranks wait for each other: delays change nothing, several groups do not meet each other, and who does not come is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from backend.api.config.schema import WorkersConfig
from backend.core.step import WorkersLost
from backend.executor.load import workers_of
from backend.worker import ranked_group
from backend.worker.leading import LeadingTier
from backend.worker.native_tier import NativeCall, NativeRows, NativeTier
from backend.worker.rank_process import RankWorker
from kernels.cpu.decoder import UnknownCell
from tests.parity.scenario import RecordingEngine
from tests.ranks.harness import PROMPTS, engine_config, run, run_in_turns

pytestmark = pytest.mark.usefixtures("ranks_in_threads")
Checkpoint = Callable[..., Path]


@pytest.mark.feature("004-21")
def test_random_delays_of_a_thousand_steps_change_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(checkpoint("llama", eos_token_id=None), 2)
    plain = run(config, num_tokens=340)
    assert [len(tokens) for tokens in plain.tokens] == [340] * 3
    rng, on_time = random.Random(1), RankWorker.run

    def late(self: RankWorker, told: object) -> None:
        if rng.random() < 0.1:
            time.sleep(rng.random() / 200)
        on_time(self, told)

    monkeypatch.setattr(RankWorker, "run", late)
    for _ in range(3):
        assert run(config, num_tokens=340).tokens == plain.tokens


@pytest.mark.feature("004-23")
def test_groups_of_one_process_run_in_turns(checkpoint: Checkpoint) -> None:
    configs = [engine_config(checkpoint(name), 2) for name in ("llama", "qwen2")]
    alone = [run(config, PROMPTS[:1], num_tokens=30).tokens[0] for config in configs]
    assert run_in_turns(configs, PROMPTS[0], 30) == alone


def test_a_rank_that_does_not_come_is_lost_when_its_time_is_over(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankWorker, "run", lambda self, told: None)
    config = replace(engine_config(checkpoint("llama"), 4), workers=WorkersConfig(4, rank_timeout_s=1.0))
    workers = workers_of(config)
    try:
        engine = RecordingEngine(config, workers)
        engine.start(PROMPTS[0], 5)
        started = time.monotonic()
        with pytest.raises(WorkersLost, match="rank [123] .* does not answer"):
            engine.run()
        assert 0.9 < time.monotonic() - started < 20
    finally:
        workers.shutdown()


def test_a_rank_that_has_ended_is_found_without_a_step(checkpoint: Checkpoint) -> None:
    config = engine_config(checkpoint("llama"), 2)
    workers = workers_of(config)
    try:
        workers.load()
        workers._others.check()
        workers._others._all[0].stop()
        with pytest.raises(WorkersLost, match="rank 1"):
            workers.check()
    finally:
        workers.shutdown()


def test_a_rank_that_fails_within_a_step_ends_it_at_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RankWorker, told: object) -> None:
        raise EOFError

    monkeypatch.setattr(RankWorker, "run", fail)
    config = engine_config(checkpoint("llama"), 2)
    assert config.workers.rank_timeout_s > 60
    workers = workers_of(config)
    try:
        engine = RecordingEngine(config, workers)
        engine.start(PROMPTS[0], 5)
        started = time.monotonic()
        with pytest.raises(WorkersLost, match="rank 1"):
            engine.run()
        assert time.monotonic() - started < 30
    finally:
        workers.shutdown()


def test_ranks_share_threads_and_memory(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_group, "free_bytes", lambda device: 1 << 20)
    config = engine_config(checkpoint("llama"), 2)
    config = replace(config, model=replace(config.model, num_threads=6))
    workers = workers_of(config)
    try:
        one = workers.load().kv_bytes_per_token
        assert workers._section.num_threads == 3
        assert workers.free_memory_bytes() == 1 << 19
    finally:
        workers.shutdown()
    whole = workers_of(engine_config(checkpoint("llama"), 1))
    assert whole.load().kv_bytes_per_token == 2 * one
    whole.shutdown()


def test_a_rank_0_that_kept_the_others_waiting_ends_too(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_time = NativeTier.step

    def late(self: NativeTier, *arguments: object) -> object:
        if isinstance(self, LeadingTier):
            time.sleep(3.0)
        return in_time(self, *arguments)

    monkeypatch.setattr(NativeTier, "step", late)
    config = replace(engine_config(checkpoint("llama"), 2), workers=WorkersConfig(2, rank_timeout_s=1.0))
    workers = workers_of(config)
    try:
        engine = RecordingEngine(config, workers)
        engine.start(PROMPTS[0], 5)
        with pytest.raises(WorkersLost, match="rank 0 kept the others waiting for more than 1 s"):
            engine.run()
    finally:
        workers.shutdown()


def test_stages_have_pools_of_the_size_of_the_largest(checkpoint: Checkpoint) -> None:
    """The first of the stages has two of the three layers, and as many blocks as the other one."""
    per_token = []
    for stages in (1, 2):
        workers = workers_of(engine_config(checkpoint("llama"), 1, stages=stages))
        try:
            per_token.append(workers.load().kv_bytes_per_token)
            assert len(workers.model.layers) == (3, 1)[stages - 1]
        finally:
            workers.shutdown()
    assert per_token[1] * 3 == per_token[0] * 2


STAGES = dict(stages=3, micro_batches=2)


def test_a_stage_that_does_not_come_is_named_by_the_one_that_waits(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has the last of three stages, rank 2 the first."""
    in_time = RankWorker.run
    for late in (1, 2):
        monkeypatch.setattr(
            RankWorker, "run", lambda self, told, late=late: None if self.shard.number == late else in_time(self, told)
        )
        config = engine_config(checkpoint("llama"), 1, **STAGES)
        workers = workers_of(replace(config, workers=replace(config.workers, rank_timeout_s=1.0)))
        try:
            engine = RecordingEngine(config, workers)
            engine.start(PROMPTS[0], 5)
            with pytest.raises(WorkersLost, match=f"rank {late} .* does not answer"):
                engine.run()
        finally:
            workers.shutdown()


def test_random_delays_of_stages_change_nothing(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(checkpoint("llama", eos_token_id=None), 1, **STAGES)
    plain = run(config, num_tokens=100)
    rng, on_time = random.Random(1), RankWorker.run

    def late(self: RankWorker, told: object) -> None:
        if rng.random() < 0.2:
            time.sleep(rng.random() / 200)
        on_time(self, told)

    monkeypatch.setattr(RankWorker, "run", late)
    assert run(config, num_tokens=100).tokens == plain.tokens


def test_rows_that_cannot_run_are_told_to_nobody(checkpoint: Checkpoint) -> None:
    """A rank that finds them out for itself might look at other times, and would then count other handovers than the next one."""
    config = engine_config(checkpoint("llama"), 1, **STAGES)
    workers = workers_of(config)
    try:
        engine = RecordingEngine(config, workers)
        first = engine.start(PROMPTS[0], 5)
        engine.run()
        batch = workers.runner.batch
        numbers = np.array([[0, 0, 4, 1]], dtype=np.int32)
        batch.token_ids[0, 2] = -7
        call = NativeCall(
            NativeRows(numbers), [], batch.token_ids, batch.block_tables, workers.runner.storage.pools, False
        )
        with pytest.raises(UnknownCell):
            workers.runner.tier._tier.step(call)
        again = engine.start(PROMPTS[0], 5)
        engine.run()
    finally:
        workers.shutdown()
    assert again.tokens == first.tokens
