"""The worker's own state: slots, the flat batch, the KV pool, the step's order of side effects, memory."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from backend.api import ConfigError, EngineConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.api.sampling import SamplingConfig
from backend.core.step import NewRow, Row, SampledToken, StepInput, StepOutput
from backend.engine.core import EngineCore
from backend.models.decoder import Decoder
from backend.worker import group as group_module
from backend.worker.group import InProcessWorkerGroup
from backend.worker.input_batch import InputBatch, make_tensor_with_pad
from backend.worker.kv_storage import KVStorage
from backend.worker.memory import host_free_bytes, memory_use
from backend.worker.model_runner import ModelRunner
from tests.model.driver import GroupDriver, make_group
from tests.model.tiers import NATIVE, TierCase

CPU = torch.device("cpu")


def new_row(slot: int, tokens: list[int], blocks: list[int]) -> NewRow:
    return NewRow(slot, tokens, len(tokens), 0, blocks, SamplingConfig())


def make_batch(*rows: NewRow) -> InputBatch:
    batch = InputBatch(num_slots=4, max_seq_len=16, block_size=4, device=CPU)
    batch.take_in(list(rows))
    return batch


@pytest.mark.feature("003-56")
def test_two_prompts_become_one_flat_batch() -> None:
    batch = make_batch(new_row(2, [10, 11, 12, 13, 14], [7, 3]), new_row(0, [20, 21, 22], [5]))
    flat = batch.flatten([Row(2, 0, 5, True), Row(0, 0, 3, True)], [1, 1])
    assert flat.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert flat.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert flat.cells.tolist() == [28, 29, 30, 31, 12, 20, 21, 22]
    assert flat.rows.starts.tolist() == [0, 5, 8]
    assert flat.rows.lengths.tolist() == [5, 3]
    assert flat.rows.tables.tolist() == [[7, 3], [5, -1]]
    assert flat.logits_index.tolist() == [4, 7]


@pytest.mark.feature("003-57")
def test_running_sequences_give_one_token_each() -> None:
    batch = make_batch(new_row(1, [10, 11, 12, 13], [6]), new_row(3, [20, 21], [0]))
    batch.append_tokens([SampledToken(1, 14), SampledToken(3, 22)])
    batch.append_blocks(1, [9])
    flat = batch.flatten([Row(3, 2, 1, True), Row(1, 4, 1, True)], [1, 1])
    assert flat.token_ids.tolist() == [22, 14]
    assert flat.positions.tolist() == [2, 4]
    assert flat.cells.tolist() == [2, 36]
    assert flat.rows.starts.tolist() == [0, 1, 2]
    assert flat.rows.lengths.tolist() == [3, 5]
    assert flat.rows.tables.tolist() == [[0, -1], [6, 9]]
    assert flat.logits_index.tolist() == [0, 1]


@pytest.mark.feature("004-06")
def test_the_flat_batch_holds_exactly_the_rows_of_the_step() -> None:
    batch = make_batch(*(new_row(slot, [slot] * 8, [2 * slot, 2 * slot + 1]) for slot in range(4)))
    for rows in ([Row(1, 3, 2, False)], [Row(0, 7, 1, True), Row(3, 0, 8, True)], [Row(2, 0, 1, False)]):
        flat = batch.flatten(rows, [0] * len(rows))
        assert len(flat.token_ids) == sum(row.num_tokens for row in rows)
        assert len(flat.logits_index) == 0
        assert flat.token_ids.tolist() == [row.slot for row in rows for _ in range(row.num_tokens)]


def test_each_row_says_how_many_of_its_last_tokens_yield_logits() -> None:
    batch = make_batch(*(new_row(slot, [slot] * 8, [2 * slot, 2 * slot + 1]) for slot in range(4)))
    rows, num_logits = [Row(3, 2, 5, False), Row(0, 0, 3, False), Row(2, 7, 1, True), Row(1, 0, 4, False)], [2, 0, 1, 4]
    assert batch.flatten(rows, num_logits).logits_index.tolist() == [3, 4, 8, 9, 10, 11, 12]
    numbers = batch.row_numbers(rows, num_logits)
    assert numbers.tolist() == [[3, 2, 5, 2], [0, 0, 3, 0], [2, 7, 1, 1], [1, 0, 4, 4]]
    assert numbers.dtype == np.int32 and numbers.flags.c_contiguous


@pytest.mark.feature("004-06")
def test_the_forward_grows_and_shrinks_with_the_live_rows(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is about torch operators; the native kernels take a list of rows, and have no shapes to pad to."""
    seen: list[int] = []
    forward = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, ids, *more: seen.append(len(ids)) or forward(self, ids, *more))
    driver = GroupDriver.of(checkpoint("llama2"))
    for slot in range(8):
        driver.begin(slot, [slot + 1, slot + 2])
    driver.execute([(slot, 2) for slot in range(8)])
    for live in (8, 3, 1, 5):
        driver.execute([(slot, 1) for slot in range(live)])
    assert seen == [16, 8, 3, 1, 5]


def test_samples_come_in_row_order_and_mixed_rows_keep_theirs(
    checkpoint: Callable[[str], Path], tier: TierCase
) -> None:
    driver = GroupDriver.of(checkpoint("llama2"), tier)
    driver.begin(5, [1, 2, 3])
    driver.run(5, [3])
    driver.begin(0, [4, 5, 6, 7])
    output = driver.group.execute(msgspec.structs.replace(driver.make_step([(0, 4), (5, 1)]), step_id=9))
    assert output.step_id == 9
    assert [sample.slot for sample in output.sampled] == [0, 5]


@pytest.mark.feature("003-58")
def test_rows_are_padded_behind_their_ends() -> None:
    padded = make_tensor_with_pad([[1, 2, 3], [], [4]], width=4, pad=-1, dtype=np.int32)
    assert padded.tolist() == [[1, 2, 3, -1], [-1] * 4, [4, -1, -1, -1]]
    assert padded.dtype == np.int32
    with pytest.raises(ValueError):
        make_tensor_with_pad([[1, 2, 3]], width=2, pad=0, dtype=np.int32)


@pytest.mark.parametrize(
    "row, message",
    [
        (Row(1, 4, 1, True), "knows 4 tokens"),
        (Row(1, 0, 4, False, [9]), None),
        (Row(2, 0, 2, False), "has 0 blocks"),
    ],
)
def test_a_step_that_runs_what_the_slot_does_not_have_is_refused(row: Row, message: str | None) -> None:
    batch = make_batch(new_row(1, [1, 2, 3, 4], [0]), new_row(2, [1, 2], []))
    if message is None:
        assert len(batch.flatten([row], [0]).token_ids) == 4
        assert batch.row_numbers([row], [0]).tolist() == [[1, 0, 4, 0]]
        return
    for assemble in (batch.flatten, batch.row_numbers):
        with pytest.raises(IndexError, match=message):
            assemble([row], [0])


def test_a_token_in_a_block_that_was_let_go_is_refused() -> None:
    batch = make_batch(new_row(1, [1, 2, 3, 4, 5], [-1, 3]))
    assert batch.flatten([Row(1, 4, 1, True)], [1]).cells.tolist() == [12]
    with pytest.raises(IndexError, match="was let go"):
        batch.flatten([Row(1, 3, 2, True)], [1])


def test_a_slot_remembers_nothing_of_its_earlier_sequence() -> None:
    batch = make_batch(new_row(1, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1]))
    batch.take_in([new_row(1, [9], [3])])
    assert batch.block_tables[1].tolist() == [3, -1, -1, -1]
    with pytest.raises(IndexError, match="knows 1 tokens"):
        batch.flatten([Row(1, 1, 1, True)], [1])


def test_a_token_beyond_the_longest_sequence_is_not_written() -> None:
    batch = make_batch(new_row(1, list(range(16)), [0, 1, 2, 3]), new_row(2, [7], [4]))
    before = batch.token_ids.clone()
    batch.append_tokens([SampledToken(1, 99), SampledToken(2, 98)])
    before[2, 1] = 98
    assert torch.equal(batch.token_ids, before)


def bytes_of(memory: torch.Tensor) -> torch.Tensor:
    """A copy; unlike numbers, bytes are equal to themselves even where nothing was written yet (NaN)."""
    return memory.view(torch.uint8).clone()


@pytest.mark.feature("003-53")
def test_copies_are_made_before_the_forward_writes(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    """The step writes to the source of the copy; the copy has to hold what was there before."""
    driver = GroupDriver.of(checkpoint("llama2"), tier)
    driver.begin(0, list(range(1, tier.block + 2)))
    driver.run(0, [tier.block + 1])
    source = driver.tables[0][-1]  # one of its cells is written
    before = [bytes_of(pool[source]) for pool in driver.runner.storage.pools]
    copy = driver.copy(source)
    driver.generate([0], 1)
    for pool, old in zip(driver.runner.storage.pools, before, strict=True):
        assert torch.equal(bytes_of(pool[copy]), old)
        assert not torch.equal(bytes_of(pool[source]), old)


def make_storage(num_blocks: int) -> KVStorage:
    storage = KVStorage(num_layers=2, block_shape=(4, 2, 2, 3), dtype=torch.bfloat16, device=CPU)
    storage.grow(num_blocks)
    for pool in storage.pools:
        pool.copy_(torch.arange(num_blocks)[:, None, None, None, None])
    return storage


def test_growing_keeps_what_is_in_the_blocks_and_never_shrinks() -> None:
    storage = make_storage(3)
    assert storage.bytes_per_block == 2 * 4 * 2 * 2 * 3 * 2
    storage.grow(8)
    storage.grow(2)
    for pool in storage.pools:
        assert pool.shape == (8, 4, 2, 2, 3)
        assert pool[:3, 0, 0, 0, 0].tolist() == [0, 1, 2]


@pytest.mark.feature("003-53")
def test_copies_move_whole_blocks_of_every_layer() -> None:
    storage = make_storage(6)
    storage.copy_blocks([(1, 4), (1, 5), (0, 3)])
    for pool in storage.pools:
        assert pool.flatten(1).float().unique(dim=1).T.tolist() == [[0, 1, 2, 0, 1, 1]]


def test_the_pool_grows_while_sequences_run(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    """Steps say how many blocks must be backed; the KV of running sequences survives the move."""
    directory, length = checkpoint("llama2"), 7 * tier.block + 2
    whole, growing = (GroupDriver.of(directory, tier, num_blocks=num_blocks) for num_blocks in (40, 10))
    logits = []
    for driver in (whole, growing):
        driver.begin(0, [1 + index % 100 for index in range(length)])
        logits.append(driver.run(0, [length]))
    assert growing.runner.storage.num_blocks == 10
    growing.num_blocks = 40
    growing.free = list(range(39, 9, -1)) + growing.free
    logits += [driver.generate([0], 5 * tier.block)[0] for driver in (whole, growing)]
    assert growing.runner.storage.num_blocks == 40
    torch.testing.assert_close(logits[0], logits[1])
    torch.testing.assert_close(logits[2], logits[3])


@pytest.mark.feature("003-55", "003-61")
def test_a_step_prepares_runs_and_samples(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    driver, twin = (GroupDriver.of(checkpoint("llama2"), tier) for _ in range(2))
    for each in (driver, twin):
        each.begin(3, [5, 6, 7])
    best = twin.run(3, [3])[-1].argmax().item()
    output = driver.group.execute(driver.make_step([(3, 3)]))
    assert output.sampled == [SampledToken(3, best)]
    assert driver.runner.batch.token_ids[3, :4].tolist() == [5, 6, 7, best]
    again = driver.group.execute(StepInput(2, [Row(3, 3, 1, True)], num_blocks=100))
    assert [sample.slot for sample in again.sampled] == [3]
    assert driver.group.execute(StepInput(3, [])).sampled == []


@pytest.mark.feature("003-59")
@pytest.mark.parametrize("num_slots, max_num_tokens", [(4, 64), (3, 2000), (2, 2)])
def test_a_dummy_run_is_one_full_step_and_leaves_nothing_behind(
    checkpoint: Callable[[str], Path],
    tier: TierCase,
    monkeypatch: pytest.MonkeyPatch,
    num_slots: int,
    max_num_tokens: int,
) -> None:
    group = make_group(checkpoint("llama2"), tier, max_batch_size=num_slots, max_num_tokens=max_num_tokens)
    group.load()
    group.initialize_kv_cache(8, tier.block, 8)
    forwards, runners = [], []
    original = group_module.ModelRunner.execute

    def execute(runner: ModelRunner, step: StepInput) -> StepOutput:
        assert all(row.num_tokens >= 1 and row.samples for row in step.rows)
        forwards.append((sum(row.num_tokens for row in step.rows), len(step.rows)))
        runners.append(id(runner.batch))
        return original(runner, step)

    monkeypatch.setattr(group_module.ModelRunner, "execute", execute)
    pools = [bytes_of(pool) for pool in group.runner.storage.pools]
    group._dummy_run()
    assert forwards == [(min(max_num_tokens, num_slots * 512), num_slots)]
    assert group.runner.batch.num_tokens == [0] * num_slots
    assert all(torch.equal(bytes_of(pool), old) for pool, old in zip(group.runner.storage.pools, pools, strict=True))
    gc.collect()
    alive = {id(thing) for thing in gc.get_objects() if isinstance(thing, InputBatch)} - {id(group.runner.batch)}
    assert not alive & set(runners)


def make_core(
    checkpoint: Callable[[str], Path], tier: TierCase, free_memory_fraction: float | None = None
) -> EngineCore:
    section = ModelConfigSection(
        path=str(checkpoint("llama2")), dtype="float32", kernels=tier.kernels, num_threads=1, device="cpu"
    )
    kv_cache = KvCacheConfig(block_size=tier.block, free_memory_fraction=free_memory_fraction)
    config = EngineConfig(section, kv_cache, SchedulerConfig(max_batch_size=4))
    return EngineCore(config, InProcessWorkerGroup(section, config.scheduler, kv_cache))


@pytest.mark.feature("003-65")
def test_a_probe_that_finds_no_memory_ends_in_a_clear_error(
    checkpoint: Callable[[str], Path], tier: TierCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match="room for 0 KV blocks"):
        make_core(checkpoint, tier)


@pytest.mark.feature("003-65")
def test_the_probe_decides_the_number_of_blocks(
    checkpoint: Callable[[str], Path], tier: TierCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dim = 32 if tier is NATIVE else 8  # native blocks are padded to whole panels
    block_bytes = 3 * 2 * 2 * head_dim * 4 * tier.block  # layers, key and value, kv heads, head_dim, float32
    monkeypatch.setattr(group_module, "free_bytes", lambda device: 2 * 37 * block_bytes)
    core = make_core(checkpoint, tier, free_memory_fraction=0.5)
    assert core.model.kv_bytes_per_token == block_bytes // tier.block
    assert core.workers.runner.storage.num_blocks == 37
    assert core.workers.runner.storage.bytes_per_block == block_bytes


def write_host(root: Path, available_kb: int, groups: dict[str, tuple[str, int, int]], own: str) -> tuple[Path, Path]:
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:  {available_kb} kB\n")
    (proc / "self" / "cgroup").write_text(f"0::{own}\n")
    for path, (limit, current, inactive) in groups.items():
        (cgroup / path).mkdir(parents=True, exist_ok=True)
        (cgroup / path / "memory.max").write_text(f"{limit}\n")
        (cgroup / path / "memory.current").write_text(f"{current}\n")
        (cgroup / path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")
    return proc, cgroup


@pytest.mark.feature("003-65")
@pytest.mark.parametrize(
    "groups, expected",
    [
        ({}, 1000 * 1024),
        ({"": ("max", 5, 0)}, 1000 * 1024),
        ({"": ("600000", 200000, 50000)}, 450000),
        ({"a": ("300000", 200000, 0), "a/b": ("max", 0, 0)}, 100000),
        ({"a": ("max", 0, 0), "a/b": ("300000", 400000, 0)}, 0),
        ({"other": ("1", 1, 0)}, 1000 * 1024),
    ],
)
def test_free_memory_respects_the_tightest_control_group(
    tmp_path: Path, groups: dict[str, tuple[str, int, int]], expected: int
) -> None:
    assert host_free_bytes(*write_host(tmp_path, 1000, groups, own="/a/b")) == expected


def test_the_resident_memory_of_this_process_is_told() -> None:
    """A mapping of its own, because an allocator may keep what is freed."""
    with mmap.mmap(-1, 64 << 20) as ballast:
        ballast.write(b"x" * len(ballast))
        with_ballast = memory_use(torch.device("cpu"))
    without = memory_use(torch.device("cpu"))
    assert with_ballast.cpu_bytes - without.cpu_bytes > 32 << 20 and with_ballast.gpu_bytes == 0


def test_a_device_that_is_not_there_is_refused() -> None:
    scheduler = SchedulerConfig()
    with pytest.raises(ConfigError, match="nonsense"):
        InProcessWorkerGroup(ModelConfigSection(device="nonsense"), scheduler)
    with pytest.raises(ConfigError, match="supported are cpu and cuda"):
        InProcessWorkerGroup(ModelConfigSection(device="meta"), scheduler)


def test_shutting_down_twice_is_harmless(checkpoint: Callable[[str], Path], tier: TierCase) -> None:
    driver = GroupDriver.of(checkpoint("llama2"), tier)
    driver.group.shutdown()
    driver.group.shutdown()
    assert driver.group.model is None
