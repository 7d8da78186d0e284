"""Rank 0 calls every other rank, and gathers what they answer, over sockets whose other ends the test holds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection
from backend.api.errors import ConfigError
from backend.architectures.shards import shards_of
from backend.core.step import WorkersLost
from backend.worker.rank_followers import RankFollowers
from backend.worker.rank_messages import Load, Loaded, Measure, Measured, Prepare, Progress, receive, send

NUM_RANKS = 4
PATIENCE_S = 60.0


class Held:
    """A rank that takes what it is sent, and answers what the test says."""

    pid = None
    has_ended = False

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.who, self.end = f"of machine {rank}", f"has ended with code {rank}"
        self.socket, self.far = socket.socketpair()
        self.far.settimeout(PATIENCE_S)

    def stop(self) -> None:
        self.socket.close()
        self.far.close()


@pytest.fixture
def ranks() -> Iterator[list[Held]]:
    made = [Held(rank) for rank in range(1, NUM_RANKS)]
    yield made
    for each in made:
        each.stop()


@pytest.fixture
def followers(ranks: list[Held]) -> RankFollowers:
    loads = [Load(shard, ModelConfigSection(), KvCacheConfig(), LoraSection()) for shard in shards_of(NUM_RANKS, 1)[1:]]
    return RankFollowers(loads, PATIENCE_S, PATIENCE_S, ranks)


@pytest.mark.feature("003-64")
def test_every_rank_gets_its_own_part_to_load_and_then_each_message(
    followers: RankFollowers, ranks: list[Held]
) -> None:
    for each in ranks:
        told, _ = receive(each.far)
        assert isinstance(told, Load) and told.shard.number == each.rank
    followers.tell(Prepare(num_blocks=7))
    followers.tell_each([Prepare(num_blocks=each.rank) for each in ranks])
    for each in ranks:
        assert [receive(each.far)[0].num_blocks for _ in range(2)] == [7, each.rank]


@pytest.mark.feature("003-64", "003-62")
def test_answers_are_gathered_from_all_ranks_in_the_order_of_the_ranks(
    followers: RankFollowers, ranks: list[Held]
) -> None:
    """The last rank answers first, and each other one only when the rank behind it has."""

    def answer() -> None:
        for each in ranks:
            receive(each.far)  # Load
            assert receive(each.far)[0] == Measure(), "all are asked before one has answered"
        for each in reversed(ranks):
            send(each.far, Progress("reading"))
            send(each.far, Measured(100 * each.rank))

    thread = threading.Thread(target=answer)
    thread.start()
    assert followers.measure() == [100, 200, 300]
    thread.join()


@pytest.mark.feature("003-64")
def test_a_rank_that_is_gone_is_named_and_the_others_are_not_taken_for_it(
    followers: RankFollowers, ranks: list[Held]
) -> None:
    for each in ranks:
        send(each.far, Loaded("kernels", each.rank))
    assert [loaded.mapped_bytes for loaded in followers.wait_until_loaded(lambda line: None)] == [1, 2, 3]
    ranks[1].far.close()
    with pytest.raises((WorkersLost, ConfigError), match=r"rank 2 \(of machine 2\) has ended with code 2"):
        for _ in range(2):  # what is sent first may still find room in the socket
            followers.tell(Prepare())
