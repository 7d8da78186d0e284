"""The KV pool outlives the engine: the next one finds the blocks of its requests, and none that are not exactly theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from backend.api import EngineConfig, Request, SamplingConfig, SessionConfig
from backend.api.config.schema import KvCacheConfig, SchedulerConfig
from backend.core.kept_block import RecordFormat
from backend.engine.core import EngineCore
from backend.storage.pool_file import HEADER_BYTES
from tests.crashes.lives import Client, Lives
from tests.fakes.hash_worker import HashWorkerGroup, oracle

SIZE = 4  # tokens of a block
FORM = RecordFormat(SIZE, 8 * SIZE)
PROMPT = list(range(100, 141))  # 10 blocks, and a token


class Machine:
    """Engines one after the other over one piece of memory."""

    def __init__(self, pool_tokens: int = 400, **options: Any) -> None:
        self.file = os.memfd_create("test-pool")
        self.fingerprint, self.options = "hash", options
        self._config = EngineConfig(
            kv_cache=KvCacheConfig(block_size=SIZE, max_tokens=pool_tokens, watermark=0.0),
            scheduler=SchedulerConfig(max_batch_size=8, max_num_tokens=64),
        )
        self.lives = Lives(self._make)

    def _make(self) -> EngineCore:
        kv_cache = replace(self._config.kv_cache, **self.options.get("kv_cache", {}))
        workers = HashWorkerGroup(window=self.options.get("window"), looks_ahead=self.options.get("looks_ahead", False))
        workers.info = replace(workers.info, kv_fingerprint=self.fingerprint)
        return EngineCore(replace(self._config, kv_cache=kv_cache), workers, pool_descriptor=self.file)

    @property
    def core(self) -> EngineCore:
        return self.lives.core

    def ask(self, prompt: list[int], count: int = 8, seed: int = 0, **fields: Any) -> Client:
        sampling = SamplingConfig(temperature=1.0, seed=seed) if seed else SamplingConfig()
        return self.lives.ask(Request(prompt, count, streaming=True, sampling_config=sampling, **fields))

    def finish(self, *clients: Client) -> None:
        self.lives.run(lambda: all(client.has_ended for client in clients))

    def fill(self, prompt: list[int] = PROMPT, count: int = 8, **fields: Any) -> Client:
        """Run a request to its end, and let all records be written."""
        client = self.ask(prompt, count, **fields)
        self.finish(client)
        self.settle()
        return client

    def settle(self) -> None:
        self.core.admit()
        self.core.cache.keeper.settle()

    @property
    def num_run(self) -> int:
        """Prompt tokens that this engine has computed, also those of replayed outputs."""
        counters = self.core.counters
        return counters.context_tokens_total + counters.recomputed_tokens_total

    @property
    def adopted(self) -> int:
        return self.core.kv.stats().adopted_blocks_total

    @property
    def dropped(self) -> int:
        return self.core.kv.stats().dropped_blocks_total

    def recorded(self) -> list[int]:
        """Blocks of which there is a record that is whole, or torn."""
        num_blocks = self.core.kv.stats().max_num_blocks
        records = os.pread(self.file, num_blocks * FORM.num_bytes, HEADER_BYTES)
        size = FORM.num_bytes
        return [block for block in range(num_blocks) if any(records[block * size : (block + 1) * size])]

    def flip(self, offset: int) -> None:
        """Change a byte of the file."""
        (old,) = os.pread(self.file, 1, offset)
        os.pwrite(self.file, bytes([old ^ 1]), offset)

    def offset_of_kv(self, block: int) -> int:
        num_blocks = self.core.kv.stats().max_num_blocks
        start = -(-(HEADER_BYTES + num_blocks * FORM.num_bytes) // 4096) * 4096
        return start + block * 8 * SIZE

    def check(self) -> None:
        """Each record is of a block that can be found, or that nobody has asked for yet."""
        self.core.check_integrity()
        self.settle()
        records = self.core.kv._records
        waiting = set() if records is None else {each.handle.block_id for each in records._inherited.values()}
        assert all(block in waiting or self.core.kv.state.trie.holds(block) for block in self.recorded())


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.check()
    made.core.close()
    os.close(made.file)


def tokens_of(client: Client) -> list[int]:
    assert not client.responses[-1].has_error(), client.responses[-1].error_msg
    return [token for response in client.responses for token in response.result.output_token_ids[0]]


def right(prompt: list[int], count: int = 8, seed: int = 0, namespace: str = "") -> list[int]:
    return oracle(prompt, count, 1000, namespace, seed)


def test_a_stream_goes_on_with_the_kv_of_the_engine_before(machine: Machine) -> None:
    client = machine.ask(PROMPT, 30)
    machine.lives.run(lambda: len(client.responses) == 13)  # 54 tokens have KV cells, or are to have them
    machine.settle()
    machine.lives.crash()
    machine.finish(client)
    assert tokens_of(client) == right(PROMPT, 30)
    assert machine.adopted == 13 and machine.num_run < 2 * SIZE


def test_what_has_no_record_yet_is_computed_again(machine: Machine) -> None:
    client = machine.ask(PROMPT, 30)
    machine.lives.run(lambda: len(client.responses) == 13)
    kept, records = machine.core.cache.keeper, machine.core.kv._records
    kept.settle()
    num_recorded = len(machine.recorded())
    assert records is not None
    records.take_due()  # they are lost with the engine
    machine.lives.crash()
    machine.finish(client)
    assert tokens_of(client) == right(PROMPT, 30) and machine.adopted == num_recorded >= 10


def test_blocks_are_recorded_only_when_whole_and_forgotten_when_evicted(machine: Machine) -> None:
    machine.fill(PROMPT[:6], 1)
    assert len(machine.recorded()) == 1, "four of six tokens are a block"
    for number in range(20):
        machine.fill([500 + number, *range(200, 230)], 1)
        stats = machine.core.kv.stats()
        assert len(machine.recorded()) <= stats.cached_num_blocks
    assert machine.core.kv.stats().evicted_blocks_total > 30
    machine.lives.crash()
    assert machine.fill([519, *range(200, 230)], 1) and machine.adopted == 7


def test_kv_survives_again_and_again(machine: Machine) -> None:
    machine.fill()
    for _ in range(3):
        machine.lives.crash()
        assert tokens_of(machine.fill()) == right(PROMPT)
        assert machine.adopted == 10 and machine.dropped == 0


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_byte_is_a_miss_and_the_tokens_are_right(machine: Machine, where: str) -> None:
    machine.fill(count=1)
    blocks = machine.recorded()
    found = {"first": 0, "middle": 4, "last": 9}[where]
    table = machine.core.kv.state.trie.match("", PROMPT, 40, False)[0]
    assert len(table) == len(blocks) == 10
    machine.flip(machine.offset_of_kv(table[found].block_id) + 5)
    machine.lives.crash()
    assert tokens_of(machine.fill()) == right(PROMPT)
    assert (machine.adopted, machine.dropped) == (found, 1)


def test_a_torn_record_is_a_miss(machine: Machine) -> None:
    machine.fill(count=1)
    block = machine.core.kv.state.trie.match("", PROMPT, 40, False)[0][6].block_id
    os.pwrite(machine.file, bytes(40), HEADER_BYTES + block * FORM.num_bytes + 100)
    machine.lives.crash()
    assert machine.dropped == 4 and len(machine.recorded()) == 6, "that block, and those that only follow it"
    machine.lives.crash()
    assert machine.dropped == 0 and len(machine.recorded()) == 6, "what is of no use is not kept for the next engine"
    assert tokens_of(machine.fill()) == right(PROMPT) and machine.adopted == 6


def test_every_byte_of_a_record_counts(machine: Machine) -> None:
    rng = Random(3)
    for _ in range(40):
        machine.fill()
        block = machine.core.kv.state.trie.match("", PROMPT, 40, False)[0][rng.randrange(10)].block_id
        written = FORM.num_bytes - 64  # it ends with zeros up to a multiple of 64
        machine.flip(HEADER_BYTES + block * FORM.num_bytes + rng.randrange(written))
        machine.lives.crash()
        assert machine.dropped > 0 and tokens_of(machine.fill()) == right(PROMPT)


def test_kv_of_another_model_is_not_used(machine: Machine) -> None:
    machine.fill()
    machine.fingerprint = "another"
    machine.lives.crash()
    assert machine.recorded() == [] and tokens_of(machine.fill()) == right(PROMPT) and machine.adopted == 0
    machine.fingerprint = "hash"
    machine.lives.crash()
    machine.fill()
    assert machine.adopted == 0, "what the other model has left is not used either"


@pytest.mark.parametrize("offset", [0, 20, 50, 60, 70, 80, 90])
def test_a_damaged_header_empties_the_pool(machine: Machine, offset: int) -> None:
    machine.fill()
    machine.flip(offset)
    machine.lives.crash()
    assert tokens_of(machine.fill()) == right(PROMPT) and machine.adopted == 0


def test_a_file_that_was_cut_short_is_emptied(machine: Machine) -> None:
    machine.fill()
    size = os.fstat(machine.file).st_size
    machine.core.close()
    os.ftruncate(machine.file, size // 2)
    machine.lives.crash()
    assert tokens_of(machine.fill()) == right(PROMPT) and machine.adopted == 0


def test_namespaces_find_only_their_own(machine: Machine) -> None:
    machine.fill(cache_salt="one")
    machine.lives.crash()
    for salt in ("two", ""):
        client = machine.fill(cache_salt=salt)
        assert machine.adopted == 0, f"{salt!r} has got what is not its own"
        assert tokens_of(client) == right(PROMPT, namespace=machine_namespace(salt))
    machine.fill(cache_salt="one")
    assert machine.adopted == 10


def machine_namespace(salt: str) -> str:
    return Request([1], 1, cache_salt=salt).kv_origin.namespace


def test_a_session_goes_on_with_its_kv(machine: Machine) -> None:
    machine.fill(session=SessionConfig(7, start=True))
    machine.lives.crash()
    before = machine.num_run
    turn = machine.fill([300, 301], session=SessionConfig(7))
    log = [*PROMPT, *right(PROMPT), 300, 301]
    assert tokens_of(turn) == oracle(log, 8, 1000, counter=8)
    assert machine.adopted == 12 and machine.num_run - before < SIZE


def test_prompts_of_requests_without_streaming_are_found(machine: Machine) -> None:
    client = machine.lives.ask(Request(PROMPT, 20))
    machine.lives.run(lambda: machine.core.counters.generated_tokens_total > 5)
    machine.settle()
    machine.lives.crash()
    machine.finish(client)
    assert tokens_of(client)[-20:] == right(PROMPT, 20) and machine.adopted == 10


def test_inherited_blocks_are_evicted_like_others() -> None:
    machine = Machine(pool_tokens=80)
    machine.fill()
    machine.lives.crash()
    assert machine.core.kv.stats().cached_num_blocks == 12
    for number in range(4):
        prompt = [600 + number, *range(30)]
        assert tokens_of(machine.fill(prompt)) == right(prompt)
        machine.check()
    assert tokens_of(machine.fill()) == right(PROMPT)
    assert machine.adopted == machine.dropped == 0
    machine.core.close()


def test_a_block_that_is_given_away_before_its_record_is_written_gets_none(machine: Machine) -> None:
    client = machine.ask(PROMPT, 1)
    machine.finish(client)
    records = machine.core.kv._records
    assert records is not None
    due = records.take_due()
    assert len(due) == 10
    machine.core.kv.lose_everything()
    for each in due:
        records.record(each)
    assert machine.recorded() == []


def test_records_go_with_the_block_ahead_of_theirs(machine: Machine) -> None:
    machine.fill()
    head = machine.core.kv.state.trie.match("", PROMPT, 4, False)[0][0]
    machine.core.kv.state.blocks.discard(head.block_id)
    assert machine.recorded() == []


def test_a_damaged_block_is_tried_once(machine: Machine) -> None:
    machine.fill(count=1)
    machine.flip(machine.offset_of_kv(machine.core.kv.state.trie.match("", PROMPT, 4, False)[0][0].block_id))
    machine.lives.crash()
    machine.finish(machine.ask(PROMPT), machine.ask(PROMPT))
    assert machine.dropped == 1


def test_a_pool_that_grows_in_chunks_takes_them_all() -> None:
    machine = Machine(kv_cache={"chunk_blocks": 3})
    machine.fill()
    machine.lives.crash()
    assert tokens_of(machine.fill()) == right(PROMPT) and machine.adopted == 10
    machine.check()
    machine.core.close()


@pytest.mark.parametrize("options", [{"enable_block_reuse": False}, {"sharing": "none"}, {"survives_engine": False}])
def test_nothing_is_kept_where_it_is_not_to_be(options: dict[str, Any]) -> None:
    machine = Machine(kv_cache=options)
    machine.fill()
    assert os.fstat(machine.file).st_size == 0
    machine.lives.crash()
    assert tokens_of(machine.fill()) == right(PROMPT) and machine.adopted == 0
    machine.core.close()


def test_the_pool_keeps_its_size_and_its_memory_is_not_counted_twice() -> None:
    machine = Machine(kv_cache={"max_tokens": None})
    machine.fill()
    first, left = machine.core.kv.stats().max_num_blocks, machine.core.cache.free_bytes
    machine.lives.crash()
    assert machine.core.kv.stats().max_num_blocks == first
    assert machine.core.cache.free_bytes > left, "what the pool holds already is not taken from what is free"
    machine.core.close()


def test_a_step_that_fails_leaves_nothing_to_find(machine: Machine) -> None:
    machine.fill()
    client = machine.ask([1, 2, 3])
    machine.core.workers.fail_next = RuntimeError("planted")
    machine.lives.run(lambda: client.has_ended)
    assert machine.recorded() == []
    machine.lives.crash()
    assert tokens_of(machine.fill()) == right(PROMPT) and machine.adopted == 0


@pytest.mark.parametrize("options", [{}, {"looks_ahead": True}, {"window": 12}], ids=["plain", "looks ahead", "window"])
def test_no_token_differs_whenever_the_engine_is_killed(options: dict[str, Any]) -> None:
    """Prompts with common heads in a pool that is too small for all, and a death after any number of steps."""
    rng, machine = Random(11), Machine(pool_tokens=160, **options)
    adopted = 0
    for _ in range(60):
        asked = []
        for _ in range(rng.randrange(1, 5)):
            prompt = [*range(rng.choice((8, 16, 24))), *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))]
            count, seed, salt = rng.randrange(1, 20), rng.choice((0, 5)), rng.choice(("", "a"))
            expected = oracle(prompt, count, 1000, machine_namespace(salt), seed, window=options.get("window"))
            asked.append((machine.ask(prompt, count, seed, cache_salt=salt), expected))
        for _ in range(rng.randrange(12)):
            machine.lives.step()
        if rng.random() < 0.5:
            machine.core.cache.keeper.settle()
        machine.lives.crash()
        machine.finish(*(client for client, _ in asked))
        for client, expected in asked:
            assert tokens_of(client) == expected
        machine.check()
        adopted += machine.adopted
    assert adopted > 100
    machine.core.close()
