"""How large the KV pool is: of several limits the smallest holds, and slots and blocks are prepared at the start."""

from __future__ import annotations

import pytest

from backend.api import ConfigError, EngineConfig
from backend.api.config.schema import KvCacheConfig, SchedulerConfig
from backend.core.step import ModelInfo
from backend.engine.core import EngineCore
from backend.kvcache.sizing import num_pool_blocks
from tests.engine.driver import Driver, answer
from tests.fakes.hash_worker import HashWorkerGroup

BLOCK = 4
BYTES_PER_TOKEN = 1024


def pool_of(free_blocks: int = 100, max_seq_len: int = 40, **kv_cache: object) -> int:
    """Blocks of an engine that finds memory for `free_blocks` of them."""
    workers = HashWorkerGroup(
        max_seq_len=max_seq_len, free_bytes=free_blocks * BLOCK * BYTES_PER_TOKEN, bytes_per_token=BYTES_PER_TOKEN
    )
    config = EngineConfig(
        kv_cache=KvCacheConfig(block_size=BLOCK, **kv_cache), scheduler=SchedulerConfig(max_batch_size=3)
    )
    core = EngineCore(config, workers)
    assert core.stats().latest.kv_cache.max_num_blocks == workers.max_blocks
    return workers.max_blocks


@pytest.mark.feature("001-28")
@pytest.mark.parametrize(("max_tokens", "blocks"), [(64, 16), (67, 16), (4, 1)])
def test_max_tokens_caps_the_pool_at_its_whole_blocks(max_tokens: int, blocks: int) -> None:
    assert pool_of(max_tokens=max_tokens) == blocks


@pytest.mark.feature("001-32")
@pytest.mark.parametrize(("max_tokens", "fraction", "blocks"), [(80, 0.5, 20), (400, 0.5, 50)])
def test_of_max_tokens_and_the_fraction_of_free_memory_the_smaller_holds(
    max_tokens: int, fraction: float, blocks: int
) -> None:
    assert pool_of(100, max_tokens=max_tokens, free_memory_fraction=fraction) == blocks


@pytest.mark.feature("001-32", "003-65")
def test_with_no_limit_given_a_quarter_of_a_cpus_free_memory_is_taken() -> None:
    assert pool_of(100) == 25
    assert pool_of(100, free_memory_fraction=0.9) == 90


@pytest.mark.feature("001-31")
@pytest.mark.parametrize(("device", "fraction", "free", "blocks"), [
    ("cuda:0", None, 1000 * 4096, 900),
    ("cuda:0", None, 1000 * 4096 + 4551, 900),  # 900.999...: whole blocks only
    ("cuda:0", None, 1000 * 4096 + 4552, 901),
    ("cuda:0", 0.5, 1000 * 4096, 500),
    ("cpu", 0.9, 1000 * 4096, 900),
])  # fmt: skip
def test_the_pool_is_a_share_of_the_free_memory_in_whole_blocks(
    device: str, fraction: float | None, free: int, blocks: int
) -> None:
    config = EngineConfig(kv_cache=KvCacheConfig(block_size=BLOCK, free_memory_fraction=fraction))
    model = ModelInfo("m", 100, 40, kv_bytes_per_token=BYTES_PER_TOKEN, device=device)
    assert num_pool_blocks(config, model, free) == blocks


@pytest.mark.feature("001-31")
def test_memory_is_measured_once_the_weights_are_loaded() -> None:
    class Loading(HashWorkerGroup):
        def load(self) -> ModelInfo:
            self.free_bytes //= 4
            return super().load()

    workers = Loading(free_bytes=400 * BLOCK * BYTES_PER_TOKEN, bytes_per_token=BYTES_PER_TOKEN)
    EngineCore(EngineConfig(kv_cache=KvCacheConfig(block_size=BLOCK, free_memory_fraction=0.9)), workers)
    assert workers.max_blocks == 90


@pytest.mark.feature("004-08")
@pytest.mark.parametrize(("num_slots", "blocks"), [(1, 10), (4, 40)])
def test_a_number_of_slots_is_space_for_as_many_sequences_of_full_length(num_slots: int, blocks: int) -> None:
    assert pool_of(max_seq_len=40, num_slots=num_slots) == blocks
    assert pool_of(max_seq_len=40, num_slots=num_slots, max_tokens=8) == 2, "the smaller limit holds"


@pytest.mark.feature("004-08")
def test_as_many_sequences_as_slots_were_asked_for_are_kept_whole_and_the_next_evicts_one() -> None:
    driver = Driver(pool_tokens=3 * 16, slots=3)
    for session in (1, 2, 3):
        driver.turn(session, [session] * 12, 4, start=True)
        driver.run()
    assert driver.core.kv.stats().evicted_blocks_total == 0
    driver.turn(4, [4] * 12, 4, start=True)
    driver.run()
    assert driver.core.kv.stats().evicted_blocks_total > 0


@pytest.mark.feature("003-65")
@pytest.mark.parametrize("kv_cache", [{"max_tokens": 3}, {"free_memory_fraction": 0.001}])
def test_a_pool_without_a_block_is_refused_with_the_key_to_change(kv_cache: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache.{next(iter(kv_cache))} leaves room for 0 KV blocks of 4 tokens"):
        pool_of(**kv_cache)


@pytest.mark.feature("001-64")
@pytest.mark.parametrize(("max_tokens", "is_served"), [(57, True), (58, False)])
def test_a_request_of_exactly_the_pool_is_served_and_one_token_more_is_refused(
    max_tokens: int, is_served: bool
) -> None:
    """The last sampled token needs no KV: 8 + 57 - 1 = 64 cells."""
    driver = Driver(pool_tokens=64)
    request = driver.ask([1] * 8, max_tokens)
    driver.run()
    if is_served:
        assert driver.tokens(request) == answer([1] * 8, max_tokens)
    else:
        assert "need 17 KV blocks, the pool has 16 of 4 tokens" in driver.error(request)
    following = driver.ask([2], 3)
    driver.run()
    assert driver.tokens(following) == answer([2], 3)


def test_a_pool_that_no_memory_can_back_is_refused_at_start() -> None:
    """Its blocks alone, without any KV, would take the machine's memory and minutes."""
    config = EngineConfig(kv_cache=KvCacheConfig(block_size=32, max_tokens=1 << 31))
    with pytest.raises(
        ConfigError, match="asks for 67108864 KV blocks of 32 tokens, which are 2097152 MiB; 1024 MiB are"
    ):
        EngineCore(config, HashWorkerGroup(free_bytes=1 << 30, bytes_per_token=1024))
