"""Rank 0 and ranks that are unlike it, and each other: what each is told, when, and what becomes of its answers. No model."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend.api import ConfigError
from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection, WorkersConfig
from backend.architectures.description import Shard
from backend.core.step import StepInput, WorkersLost
from backend.worker import joined_group, ranked_group
from backend.worker.joined_group import JoinedWorkerGroup
from backend.worker.kv_storage import KVStorage
from backend.worker.leading import LeadingRunner
from backend.worker.model_runner import ModelRunner
from backend.worker.pipeline import Runner
from backend.worker.rank_followers import RankFollowers
from backend.worker.rank_messages import (
    Failed,
    FromRank,
    Load,
    Loaded,
    Measured,
    Prepare,
    Progress,
    Ready,
    ToRank,
    receive,
    send,
)
from backend.worker.rank_process import RankWorker
from backend.worker.ranked_group import RankedWorkerGroup

LOAD_S, STEP_S = 30.0, 7.0


class RankFollower:
    """A rank whose part the test plays, over `other_end`."""

    pid, has_ended, end = None, False, "does not answer"

    def __init__(self, rank: int) -> None:
        self.rank, self.who, self.num_stops = rank, f"of machine {rank}", 0
        self.socket, self.other_end = socket.socketpair()

    def stop(self) -> None:
        self.num_stops += 1

    def told(self) -> ToRank:
        return receive(self.other_end)[0]

    def say(self, *messages: FromRank) -> None:
        for message in messages:
            send(self.other_end, message)


@contextmanager
def followers(number: int = 2) -> Iterator[tuple[RankFollowers, list[RankFollower]]]:
    ranks = [RankFollower(rank) for rank in range(1, number + 1)]
    loads = [
        Load(Shard(rank, number + 1), ModelConfigSection(num_threads=rank), KvCacheConfig(), LoraSection())
        for rank in range(1, number + 1)
    ]
    made = RankFollowers(loads, LOAD_S, STEP_S, ranks)
    try:
        yield made, ranks
    finally:
        made.stop()
        for each in ranks:
            each.other_end.close()


def test_each_rank_loads_its_own_part_with_its_own_settings() -> None:
    with followers(3) as (_, ranks):
        loads = [each.told() for each in ranks]
        assert [(load.shard.rank, load.model.num_threads) for load in loads] == [(1, 1), (2, 2), (3, 3)]


def test_a_rank_has_the_time_for_loading_until_its_pool_is_there_and_then_that_of_a_step() -> None:
    with followers() as (made, ranks):
        timeouts = [[each.socket.gettimeout() for each in ranks]]
        for each in ranks:
            each.say(Loaded("k", each.rank))
        made.wait_until_loaded(lambda line: None)
        timeouts.append([each.socket.gettimeout() for each in ranks])
        for each in ranks:
            each.say(Ready())
        made.wait_for_pool()
        timeouts.append([each.socket.gettimeout() for each in ranks])
    assert timeouts == [[LOAD_S] * 2, [LOAD_S] * 2, [STEP_S] * 2]


def test_answers_come_in_the_order_of_ranks_whoever_is_first() -> None:
    lines: list[str] = []
    with followers() as (made, ranks):
        for each in reversed(ranks):
            each.say(Progress(f"line {each.rank}"), Progress("more"), Loaded("k", 10 * each.rank))
        assert [each.mapped_bytes for each in made.wait_until_loaded(lines.append)] == [10, 20]
        for each in reversed(ranks):
            each.say(Measured(100 * each.rank))
        assert made.measure() == [100, 200]
    assert lines == ["rank 1: line 1", "rank 1: more", "rank 2: line 2", "rank 2: more"]


def test_the_failure_of_the_second_rank_names_it() -> None:
    with followers() as (made, ranks):
        ranks[0].say(Loaded("k", 1))
        ranks[1].say(Progress("so far"), Failed("there is no file"))
        with pytest.raises(ConfigError, match="rank 2 of machine 2: there is no file"):
            made.wait_until_loaded(lambda line: None)


def test_each_rank_is_told_its_own_message_and_a_lost_one_is_named() -> None:
    with followers() as (made, ranks):
        for each in ranks:
            each.told()
        made.tell_each([Prepare(num_blocks=rank) for rank in (1, 2)])
        made.tell(Prepare(num_blocks=9))
        assert [[each.told().num_blocks for _ in range(2)] for each in ranks] == [[1, 9], [2, 9]]
        made.check()
        ranks[1].has_ended = True
        with pytest.raises(WorkersLost, match=r"rank 2 \(of machine 2\) does not answer"):
            made.check()
        assert f"for more than {STEP_S:g} s" in str(made.lost(0))


def test_stopping_twice_reaches_every_rank() -> None:
    with followers() as (made, ranks):
        made.stop()
        made.stop()
        assert [each.num_stops for each in ranks] == [2, 2] and all(each.socket.fileno() == -1 for each in ranks)


def storage_of(values: list[float]) -> KVStorage:
    storage = KVStorage(2, (1,), torch.float32, torch.device("cpu"))
    storage.grow(len(values))
    for layer, pool in enumerate(storage.pools):
        pool[:, 0] = torch.tensor(values) + 100 * layer
    return storage


def a_rank(storage: KVStorage) -> Callable[..., object]:
    rank = object.__new__(RankWorker)
    rank._storage, rank._adapters = storage, {}
    return lambda **changes: rank.prepare(Prepare(**changes))


def rank_0(storage: KVStorage) -> Callable[..., object]:
    nothing: Any = SimpleNamespace(update=lambda step: None, take_in=lambda rows: None)
    runner = Runner(storage, nothing, nothing, lambda row: None, None, None, None)
    return lambda **changes: runner.prepare(StepInput(1, [], **changes))


@pytest.mark.parametrize("make", [a_rank, rank_0])
def test_kv_is_swapped_out_before_its_block_is_used_anew_and_swapped_in_before_it_is_copied(
    make: Callable[[KVStorage], Callable[..., object]],
) -> None:
    """Every rank does the same in the same order, else their parts of a block differ."""
    storage = storage_of([0.0, 1.0, 2.0, 3.0])
    prepare = make(storage)
    prepare(swap_out=[(2, 7), (3, 5)], copies=[(0, 2), (1, 3)], num_blocks=4)
    assert [pool[:, 0].tolist() for pool in storage.pools] == [[0, 1, 0, 1], [100, 101, 100, 101]]
    prepare(swap_in=[(4, 7), (1, 5)], copies=[(4, 0), (1, 5)], num_blocks=6)
    assert [pool[:, 0].tolist() for pool in storage.pools] == [[2, 3, 0, 1, 2, 3], [102, 103, 100, 101, 102, 103]]


class Told:
    """In place of RankFollowers: what the other ranks are told."""

    def __init__(self) -> None:
        self.messages: list[list[Prepare]] = []

    def tell_each(self, messages: list[Prepare]) -> None:
        self.messages.append(messages)


@pytest.fixture
def leading(monkeypatch: pytest.MonkeyPatch) -> LeadingRunner:
    """Rank 0 of three with a pool of four blocks, which only tells the others."""
    monkeypatch.setattr(ModelRunner, "prepare", lambda self, step: step)
    monkeypatch.setattr(LeadingRunner, "_part_of", lambda self, adapter, rank: (adapter.content, rank))
    runner = object.__new__(LeadingRunner)
    runner._followers, runner._others, runner._told = Told(), ["one", "two"], set()  # type: ignore[assignment, list-item]
    runner.storage = SimpleNamespace(num_blocks=4)  # type: ignore[assignment]
    return runner


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({}, False),
        ({"num_blocks": 4}, False),
        ({"num_blocks": 5}, True),
        ({"copies": [(0, 1)]}, True),
        ({"swap_out": [(0, 1)]}, True),
        ({"swap_in": [(0, 1)]}, True),
    ],
)
def test_ranks_are_told_of_each_kind_of_change(leading: LeadingRunner, change: dict[str, Any], is_told: bool) -> None:
    leading.prepare(StepInput(1, [], **change))
    expected = Prepare(**({"num_blocks": 0, "copies": [], "swap_out": [], "swap_in": []} | change))
    assert leading._followers.messages == ([[expected, expected]] if is_told else [])


def test_an_adapter_that_left_is_sent_again_and_one_that_stays_is_not(leading: LeadingRunner) -> None:
    """What is uploaded once more for rank 0, the others may hold."""
    a, b = SimpleNamespace(content="a"), SimpleNamespace(content="b")
    steps = [
        ({"adapters_in": [a]}, ([], ["a"])),
        ({"adapters_in": [a]}, None),
        ({"adapters_in": [b], "adapters_out": ["a", "unknown"]}, (["a"], ["b"])),
        ({"adapters_in": [a], "adapters_out": ["a"]}, ([], ["a"])),
        ({"adapters_in": [a], "adapters_out": ["a"]}, (["a"], ["a"])),
    ]
    for changes, expected in steps:
        leading._followers.messages.clear()
        leading.prepare(StepInput(1, [], **changes))
        told = [
            [(message.adapters_out, message.adapters_in) for message in messages]
            for messages in leading._followers.messages
        ]
        each = (
            []
            if expected is None
            else [(expected[0], [(name, rank) for name in expected[1]]) for rank in ("one", "two")]
        )
        assert told == ([each] if each else [])


def test_every_rank_has_a_pool_of_the_size_that_the_fullest_machine_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = object.__new__(JoinedWorkerGroup)
    group._loaded, group._draft = SimpleNamespace(mapped_bytes=100), SimpleNamespace(mapped_bytes=50)
    group._found = [Loaded("k", mapped) for mapped in (200, 300, 0)]
    group._ranks_of, group.device = {"a": [0], "b": [1, 2], "c": [3]}, torch.device("cpu")
    for free, expected in (
        ([1150, 5000, 5000, 1700], 1000),
        ([9000, 3000, 2500, 1700], 1000),  # two ranks share what one of them has seen last
        ([9000, 9000, 9000, 700], 700),
        ([9000, 400, 400, 700], 0),
    ):
        monkeypatch.setattr(joined_group, "free_bytes", lambda device, own=free[0]: own)
        group._followers = SimpleNamespace(measure=lambda others=free[1:]: others)
        assert group.free_memory_bytes() == expected


def test_ranks_of_one_machine_share_what_the_weights_of_all_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    group = object.__new__(RankedWorkerGroup)
    group._loaded, group._draft, group._mapped_bytes = SimpleNamespace(mapped_bytes=100), None, 0
    group._shards, group.device = [Shard(rank, 3) for rank in range(3)], torch.device("cpu")
    monkeypatch.setattr(RankedWorkerGroup, "_check_loaded", lambda self, found: None)
    answers = [Loaded("k", 150), Loaded("k", 50)]
    group._followers = SimpleNamespace(wait_until_loaded=lambda progress: answers)
    group._progress = lambda line: None
    group._wait_for_others()
    for free, draft_bytes, expected in ((1200, None, 300), (1200, 300, 200), (100, None, 0)):
        monkeypatch.setattr(ranked_group, "free_bytes", lambda device, own=free: own)
        group._draft = None if draft_bytes is None else SimpleNamespace(mapped_bytes=draft_bytes)
        assert group.free_memory_bytes() == expected


@pytest.mark.parametrize(
    ("micro_batches", "asked", "threads"),
    [(1, None, [8, 2, 2, 6]), (2, None, [8, 2, 2, 6]), (1, 3, [3, 3, 3, 3])],
)
def test_the_cores_of_unequal_machines_are_shared_by_their_own_ranks(
    monkeypatch: pytest.MonkeyPatch, micro_batches: int, asked: int | None, threads: list[int]
) -> None:
    group = object.__new__(JoinedWorkerGroup)
    group._threads, group._section = asked, ModelConfigSection()
    group._shards = [Shard(rank, 4) for rank in range(4)]
    group._workers = WorkersConfig(4, 1, micro_batches)
    group._joined = [SimpleNamespace(join=SimpleNamespace(cores=cores), host=f"host{cores}") for cores in (5, 5, 6)]
    group._ranks_of = {"a": [0], "b": [1, 2], "c": [3]}
    monkeypatch.setattr(joined_group, "physical_cores", lambda: 8)
    assert [group._section_of(rank).num_threads for rank in range(4)] == threads
    group._ranks_of = {"a": [0], "b": [1, 2, 3]}
    group._joined[0].join.cores = 2
    with pytest.raises(ConfigError, match="3 ranks have joined on host5, which has 2 cores"):
        group._section_of(1)
