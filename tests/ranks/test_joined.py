"""Ranks that share no memory: they join rank 0 over TCP, and compute the very bits of ranks that share it."""

from __future__ import annotations

import hashlib
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from backend.api import OutputConfig, Request, SamplingConfig, TensorData
from backend.api.config.schema import EngineConfig, LoraSection, SpeculationConfig
from backend.api.lora import LoraConfig
from backend.core.step import WorkersLost
from backend.executor.load import workers_of
from backend.worker.native_tier import NativeCall, NativeTier
from backend.worker.rank_process import RankWorker
from tests.families.tiny import VOCAB
from tests.model.adapters import make_adapter
from tests.native.harness import Format, prompt
from tests.parity.scenario import RecordingEngine
from tests.ranks.conftest import SIZES
from tests.ranks.harness import PROMPTS, Ran, engine_config, run, run_in_turns
from tests.ranks.joined import joined, ranks_of, run_joined
from tests.ranks.test_invariance import assert_same, outputs

pytestmark = pytest.mark.usefixtures("joined_ranks")
Checkpoint = Callable[..., Path]


WAYS = [
    dict(size=2),
    dict(size=1, stages=2),
    dict(size=1, stages=3, micro_batches=2),
    dict(size=2, stages=2, micro_batches=2),
    dict(size=4),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_bits_are_those_of_ranks_that_share_memory(checkpoint: Checkpoint, way: dict[str, int]) -> None:
    config = engine_config(checkpoint("llama"), **way)
    plain = run(config)
    assert len({token for tokens in plain.tokens for token in tokens}) > 5, "tokens that hardly change prove nothing"
    assert_same(run_joined(config), plain)


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_bits_do_not_depend_on_eviction_chunks_or_company(checkpoint: Checkpoint, way: dict[str, int]) -> None:
    form = Format("bfloat16", "w8a8", kv="int8")
    config = engine_config(checkpoint("llama", "bfloat16"), form=form, **way)
    plain = run(config)
    assert_same(run_joined(config, evict_every=4), plain)
    assert_same(run_joined(engine_config(checkpoint("llama", "bfloat16"), form=form, max_num_tokens=16, **way)), plain)
    assert_same(run_joined(config, prompts=PROMPTS[:1]), Ran(plain.tokens[:1], plain.logits[:1]))


def test_adapters_and_prompts_that_bring_embeddings(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = checkpoint("llama", attention_bias=False, mlp_bias=False)
    adapter = LoraConfig(7, path=str(make_adapter(directory, tmp_path / "adapter", seed=3)))
    config = engine_config(directory, 2, stages=2, lora=LoraSection(enabled=True))
    table = torch.randn(4, SIZES["hidden_size"], generator=torch.Generator().manual_seed(4))
    ids = [3, 1, VOCAB, 4, VOCAB + 1, VOCAB + 2, 1, 5, VOCAB + 3]
    given = dict(
        prompt_embeddings=TensorData("float32", tuple(table.shape), table.numpy().tobytes()),
        position_ids=[0, 1, 2, 2, 3, 3, 4, 5, 6],
    )
    for prompts, fields in ((PROMPTS, {}), ([ids], given)):
        fields = dict(lora=adapter, cache_salt="one client", **fields)
        plain = run(config, prompts, **fields)
        assert plain.tokens != run(config, [[3, 1, 4, 1, 5]]).tokens
        assert_same(run_joined(config, prompts=prompts, evict_every=4, **fields), plain)


def test_beams_and_draft_tokens(checkpoint: Checkpoint) -> None:
    config = engine_config(checkpoint("qwen2"), 2)
    request = Request(prompt(45, VOCAB), 12, output_config=OutputConfig(exclude_input_from_output=True))
    beams = replace(request, sampling_config=SamplingConfig(beam_width=3))
    plain, searched = outputs(config, request), outputs(config, beams)
    drafted = replace(request, draft_tokens=plain[0][0][:4])
    guessing = replace(config, speculation=SpeculationConfig("draft_model", config.model.path))
    for ran, expected, base in ((beams, searched, config), (drafted, plain, config), (request, plain, guessing)):
        with ranks_of(other := joined(base)):
            assert outputs(other, ran, evict_every=11) == expected


@pytest.mark.feature("004-23")
def test_groups_of_one_process_run_in_turns(checkpoint: Checkpoint) -> None:
    configs = [engine_config(checkpoint(name), 2) for name in ("llama", "qwen2")]
    alone = [run(config, PROMPTS[:1], num_tokens=30).tokens[0] for config in configs]
    configs = [joined(config) for config in configs]
    with ranks_of(configs[0]), ranks_of(configs[1]):
        assert run_in_turns(configs, PROMPTS[0], 30) == alone


def lost(config: EngineConfig, said: str) -> float:
    """Run until a rank is lost; returns the seconds that it took."""
    with ranks_of(config):
        workers = workers_of(config)
        try:
            engine = RecordingEngine(config, workers)
            engine.start(PROMPTS[0], 200)
            started = time.monotonic()
            with pytest.raises(WorkersLost, match=said):
                engine.run()
            return time.monotonic() - started
        finally:
            workers.shutdown()


@pytest.mark.parametrize("way", [WAYS[1], WAYS[3], WAYS[4]], ids=str)
def test_a_rank_that_does_not_come_is_lost_when_its_time_is_over(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, way: dict[str, int]
) -> None:
    on_time = RankWorker.run

    def late(self: RankWorker, told: object) -> None:
        if self.shard.number != 1:
            on_time(self, told)

    monkeypatch.setattr(RankWorker, "run", late)
    config = joined(engine_config(checkpoint("llama"), **way), rank_timeout_s=1.0)
    assert 0.9 < lost(config, r"rank 1 \(at 127.0.0.1\) does not answer") < 30


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=str)
def test_a_rank_that_ends_within_a_step_ends_it_at_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, way: dict[str, int]
) -> None:
    steps, on_time = [], RankWorker.run

    def fail(self: RankWorker, told: object) -> None:
        steps.append(self.shard.number)
        if self.shard.number == 1 and len(steps) > 10:
            raise EOFError
        on_time(self, told)

    monkeypatch.setattr(RankWorker, "run", fail)
    config = joined(engine_config(checkpoint("llama"), **way))
    assert config.workers.rank_timeout_s > 60
    assert lost(config, r"rank 1 \(at 127.0.0.1\) has ended its connection") < 30


def test_a_rank_that_has_ended_is_found_without_a_step(checkpoint: Checkpoint) -> None:
    config = joined(engine_config(checkpoint("llama"), 2))
    with ranks_of(config):
        workers = workers_of(config)
        try:
            workers.load()
            workers.check()
            workers._joined[0].socket.shutdown(socket.SHUT_RD)  # as when nothing more will come
            with pytest.raises(WorkersLost, match="rank 1 .* has ended its connection"):
                workers.check()
        finally:
            workers.shutdown()


@pytest.mark.feature("001-62")
@pytest.mark.parametrize("way", [WAYS[0], WAYS[3]], ids=str)
@pytest.mark.parametrize("joins", [False, True], ids=["shared memory", "joined"])
def test_all_ranks_run_the_same_rows_and_ids_in_every_step(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, way: dict[str, int], joins: bool
) -> None:
    seen: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    step = NativeTier.step

    def note(self: NativeTier, call: NativeCall) -> tuple[NDArray[np.int64], torch.Tensor | None]:
        digest = hashlib.sha256(call.rows.numbers.tobytes())
        for slot, first, count, _ in call.rows.numbers.tolist():
            digest.update(call.token_ids[slot, first : first + count].numpy().tobytes())
        place = self._ranks.place  # type: ignore[union-attr]
        seen[place.stage, place.rank].append(digest.digest())
        return step(self, call)

    monkeypatch.setattr(NativeTier, "step", note)
    config = engine_config(checkpoint("llama"), **way)
    (run_joined if joins else run)(config, evict_every=4)
    assert len(seen) == config.workers.num_ranks
    first, *others = seen.values()
    assert len(set(first)) > 5
    assert all(each == first for each in others)
