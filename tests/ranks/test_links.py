"""What a link does with frames: sound ones are put where they belong, any other one ends the link, and the rank is lost."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from kernels.cpu.library import load_kernels
from kernels.cpu.ranks import RankPlace, RanksMemory, RanksShape

pytestmark = pytest.mark.usefixtures("native_kernels")
PUT, BEAT, LOST = (0x50555430 + kind for kind in range(3))
SHAPE = RanksShape(2, 2, 1, max_tokens=16, hidden=64, vocab=128, slots=2, max_seq_len=64, max_blocks=2)
# Marks: 1 and 2 are of stages 0 and 1, 3 to 6 of their ranks. Rank 0 here is rank 0 of stage 1, and rank 2 is rank 0 of stage 0.
OF_STAGE, OF_RANK = 1, 3


class Linked(NamedTuple):
    memory: RanksMemory  # of rank 0
    rank_2: socket.socket


@pytest.fixture
def linked() -> Iterator[Linked]:
    own, other = socket.socketpair()
    rest = [socket.socketpair() for _ in range(2)]
    links = {1: rest[0][0], 2: own, 3: rest[1][0]}
    memory = RanksMemory(load_kernels(), SHAPE, RankPlace(0, 1), 1.0, links=links)
    yield Linked(memory, other)
    memory.disconnect()
    memory.close()
    for each in (other, rest[0][1], rest[1][1]):
        each.close()


def frame(kind: int, mark: int = -1, count: int = 0, offset: int = 0, size: int = 0, data: bytes = b"") -> bytes:
    return struct.pack("<IiIIqq", kind, mark, count, 0, offset, size) + data


def lost(memory: RanksMemory) -> int:
    """The number of the lost rank, or -1: the first word of the memory."""
    return int(memory._memory[:4].view(torch.int32)) - 1


def within(condition: object, limit_s: float = 10.0) -> bool:
    until = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def count_of(memory: RanksMemory, mark: int) -> int:
    return int(memory._memory[128 * mark :][:4].view(torch.int32))


def test_bytes_are_put_where_they_belong_before_the_mark_counts(linked: Linked) -> None:
    memory, rank_2 = linked
    states = memory.entering
    assert states is not None and not states.any()
    sent = torch.arange(4 * 64, dtype=torch.float32)
    offset = states.data_ptr() - memory.address
    whole = frame(PUT, OF_STAGE, 7, offset, sent.nbytes, sent.numpy().tobytes())
    for part in (whole[:20], whole[20:100], whole[100:]):  # as a network may cut it
        assert count_of(memory, OF_STAGE) == 0
        rank_2.sendall(part)
        time.sleep(0.02)
    assert within(lambda: count_of(memory, OF_STAGE) == 7)
    assert torch.equal(states[:4], sent.view(4, 64)) and not states[4:].any()
    rank_2.sendall(frame(PUT, OF_RANK, 3) + frame(BEAT, OF_STAGE))
    assert within(lambda: count_of(memory, OF_RANK) == 3)
    assert lost(memory) == -1


ROOM = 1 << 40
UNSOUND = {
    "no frame": b"GET / HTTP/1.1\r\nHost: everbatch\r\n\r\n",
    "another kind": frame(PUT + 9),
    "before the memory": frame(PUT, -1, 0, -4096, 8, bytes(8)),
    "the marks": frame(PUT, -1, 0, 0, 8, bytes(8)),
    "behind the memory": frame(PUT, -1, 0, ROOM, 8, bytes(8)),
    "an end that overflows": frame(PUT, -1, 0, 8192, (1 << 63) - 1),
    "a negative size": frame(PUT, -1, 0, 8192, -8),
    "the mark of another rank": frame(PUT, OF_RANK + 1, 5),
    "the mark of another stage": frame(PUT, OF_STAGE + 1, 5),
    "no mark": frame(PUT, 1000, 5),
    "the mark of the lost rank": frame(PUT, 0, 5),
    "a beat with data": frame(BEAT, OF_STAGE, 0, 8192, 8, bytes(8)),
    "a beat of another stage": frame(BEAT, OF_STAGE + 1),
    "a lost rank that there is not": frame(LOST, -1, 4),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_frame_that_no_rank_sends_ends_the_link(linked: Linked, name: str) -> None:
    memory, rank_2 = linked
    before = memory._memory.clone()
    rank_2.sendall(UNSOUND[name])
    assert within(lambda: lost(memory) == 2)
    assert torch.equal(memory._memory[4:], before[4:]), "the frame has written to the memory"


def test_the_end_of_a_link_loses_its_rank_and_tells_the_others(linked: Linked) -> None:
    memory, rank_2 = linked
    rank_2.close()
    assert within(lambda: lost(memory) == 2)


def test_the_rank_that_others_name_is_lost_not_the_one_that_names_it(linked: Linked) -> None:
    memory, rank_2 = linked
    rank_2.sendall(frame(LOST, -1, 3))
    rank_2.close()
    assert within(lambda: lost(memory) == 3)
    memory.disconnect()
    assert lost(memory) == 3


def test_a_rank_that_disconnects_names_itself(linked: Linked) -> None:
    """Its own links end one after the other, and none of the ranks at their other ends is lost."""
    memory, rank_2 = linked
    memory.disconnect()
    assert lost(memory) == 0
    rank_2.settimeout(10)
    assert rank_2.recv(64) == frame(LOST, -1, 0)
    assert rank_2.recv(64) == b""


def test_the_first_loss_is_told_to_all_others(linked: Linked) -> None:
    memory, rank_2 = linked
    memory.lose(1)
    memory.lose(3)
    rank_2.settimeout(10)
    assert rank_2.recv(64) == frame(LOST, -1, 1)
