"""SecondLevel without a pool: what it takes from an engine before this one, and what readers and failures do to its places."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from backend.core.kept_block import Found, KeptRecord, chain, digest_of
from backend.core.sequence import Sequence
from backend.kvcache.geometry import Geometry
from backend.kvcache.second_level import SecondLevel
from tests.kvcache.harness import make_sequence

PROMPT = [1, 2, 3, 4, 5, 6, 7]  # three blocks of 2, and a token


def records(prompt: list[int], stamps: list[int], model: str = "model", namespace: str = "") -> list[KeptRecord]:
    blocks = chain(digest_of(model), namespace, prompt, 2, len(stamps))
    return [KeptRecord(block, bytes(16), stamp) for block, stamp in zip(blocks, stamps, strict=True)]


def opened(num_places: int, *found: Found) -> SecondLevel:
    level = SecondLevel("model", num_places, 0)
    level.bind(None, None, Geometry(2, None, 4))  # type: ignore[arg-type]
    level.open(found)
    level.check_integrity()
    return level


def sequence(prompt: list[int] = PROMPT) -> Sequence:
    return make_sequence(1, prompt)


def test_what_an_engine_before_has_left_is_found_as_far_as_it_goes() -> None:
    one, two, three = records(PROMPT, [5, 6, 7])
    level = opened(5, Found(4, three), Found(0, one), Found(2, two))
    assert [each.place for each in level.find(sequence(), 0)] == [0, 2, 4]
    assert [each.place for each in level.find(sequence(), 1)] == [2, 4]
    assert [each.place for each in level.find(sequence(PROMPT[:6]), 0)] == [0, 2], "its last token is computed"
    level.forget(level.find(sequence(), 1)[0])
    assert [each.place for each in level.find(sequence(), 0)] == [0]
    level.check_integrity()


def test_a_block_that_lies_twice_has_one_place_and_the_other_one_is_free() -> None:
    (one,) = records(PROMPT, [5])
    level = opened(3, Found(0, one), Found(2, one._replace(stamp=9)))
    assert len(level) == 1 and len(level.find(sequence(), 0)) == 1


def test_blocks_of_another_model_and_of_another_client_are_not_found() -> None:
    (own,), (other,), (client,) = (
        records(PROMPT, [3]),
        records(PROMPT, [4], model="other"),
        records(PROMPT, [5], namespace="a"),
    )
    level = opened(4, Found(0, own), Found(1, other), Found(2, client))
    assert len(level) == 2, "the place of the other model's is free"
    assert [each.place for each in level.find(sequence(), 0)] == [0]


def test_later_writes_have_later_stamps_than_what_was_left() -> None:
    left = records(PROMPT, [7, 40, 9])
    assert opened(4, *map(Found, range(3), left))._next_stamp == 41
    foreign = records(PROMPT, [90], model="other")
    assert opened(4, *map(Found, range(1), foreign))._next_stamp == 91
    assert opened(4)._next_stamp == 1


def test_the_oldest_go_first_and_what_is_read_stays() -> None:
    level = opened(3, *map(Found, (2, 0, 1), records(PROMPT, [5, 7, 6])))
    one, two, three = level.find(sequence(), 0)
    level.begin_read([one])
    assert level._take_place() == three.place == 1, "the first of those that nobody reads"
    assert level._take_place() == two.place == 0
    assert level._take_place() is None
    level.end_read([one])
    assert level._take_place() == one.place == 2


@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_a_place_without_a_block_is_free_once_its_last_reader_has_ended(num_readers: int) -> None:
    level = opened(1, *map(Found, range(1), records(PROMPT, [5])))
    (block,) = level.find(sequence(), 0)
    for _ in range(num_readers):
        level.begin_read([block])
    level.forget(block)
    level.forget(block)  # the next reader has found the same
    level.check_integrity()
    for _ in range(num_readers):
        assert level._take_place() is None
        level.end_read([block])
    assert level._take_place() == 0


def test_a_block_that_was_written_elsewhere_meanwhile_is_not_forgotten_with_its_old_place() -> None:
    level = opened(2, *map(Found, range(1), records(PROMPT, [5])))
    (block,) = level.find(sequence(), 0)
    level.begin_read([block])
    level.forget(block)
    place = level._take_place()
    assert place == 1
    level._writing[block.key] = place
    level.written(block.key, True)
    level.forget(block)
    assert level.find(sequence(), 0) == [block._replace(place=1)]
    level.end_read([block])
    level.check_integrity()


def test_what_one_turn_of_a_session_has_lost_is_not_written_after_its_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level, written = opened(4), []
    monkeypatch.setattr(level, "_note", lambda seq, num_tokens: written.append(num_tokens))
    seq = sequence()
    seq.num_computed_tokens = 6
    level.note_admission(SimpleNamespace(seq=seq, computed=2, lost=4), has_run=False)  # type: ignore[arg-type]
    level.note_release(seq, rests=True)
    level.note_admission(SimpleNamespace(seq=seq, computed=6, lost=0), has_run=False)  # type: ignore[arg-type]
    level.note_release(seq, rests=False)
    assert written == [2, 6, 6], "the end of the second turn writes nothing: nothing of it was found a second time"
