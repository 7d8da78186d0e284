"""The file of the second level: what is written is found by the next engine, and nothing else is taken for a block."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backend.api.errors import ConfigError
from backend.core.kept_block import BlockRecord, HostBlocks, Miss, RecordFormat, chain, digest_of, root_of
from backend.storage.block_file import HEADER_BYTES, BlockFile

FORM = RecordFormat(4, 100)
ROOM = HEADER_BYTES + 5 * FORM.place_bytes
MODEL = digest_of("model")
FIRST, SECOND = chain(MODEL, "salt", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4, 2)
DATA = bytes(range(100))


def opened(directory: Path, max_bytes: int = ROOM, fingerprint: str = "model", form: RecordFormat = FORM) -> BlockFile:
    return BlockFile(str(directory), max_bytes, fingerprint, form)


def found(store: BlockFile) -> dict[int, BlockRecord]:
    return {each.place: each.record.block for each in store.scan()}


def test_the_next_engine_finds_what_was_written(tmp_path: Path) -> None:
    store = opened(tmp_path / "made")
    store.write(3, FORM.encode(FIRST, DATA, 1))
    store.write(0, FORM.encode(SECOND, DATA[::-1], 2))
    store.close()
    again = opened(tmp_path / "made")
    assert found(again) == {0: SECOND, 3: FIRST}
    assert [each.record.stamp for each in again.scan()] == [2, 1]
    assert FORM.check(again.read(3), FIRST) == DATA and FORM.check(again.read(0), SECOND) == DATA[::-1]
    again.close()
    (file,) = (tmp_path / "made").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    assert file.stat().st_size == ROOM, "all that is written about blocks counts"


def test_two_engines_have_two_files_and_a_file_is_free_when_its_engine_has_gone(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert sorted(path.name[-9:] for path in tmp_path.iterdir()) == ["-0.blocks", "-1.blocks"]
    first.write(0, FORM.encode(FIRST, DATA, 1))
    assert FORM.check(second.read(0), FIRST) is Miss.DAMAGED
    first.close()
    third = opened(tmp_path)
    assert found(third) == {0: FIRST} and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "options", [{"fingerprint": "another"}, {"max_bytes": ROOM + FORM.place_bytes}, {"form": RecordFormat(4, 99)}]
)
def test_a_file_of_another_model_form_or_size_begins_anew(tmp_path: Path, options: dict[str, object]) -> None:
    store = opened(tmp_path)
    store.write(0, FORM.encode(FIRST, DATA, 1))
    store.close()
    other = opened(tmp_path, **options)
    assert list(other.scan()) == []
    assert len(list(tmp_path.iterdir())) == 1, "the file that no engine can use has gone"


def test_a_file_that_another_model_uses_now_stays(tmp_path: Path) -> None:
    store, other = opened(tmp_path), opened(tmp_path, fingerprint="another")
    store.write(0, FORM.encode(FIRST, DATA, 1))
    assert len(list(tmp_path.iterdir())) == 2
    assert FORM.check(store.read(0), FIRST) == DATA and FORM.check(other.read(0), FIRST) is Miss.DAMAGED


def test_links_and_files_that_others_may_read_are_passed_over(tmp_path: Path) -> None:
    name = digest_of("model").hex()[:16]
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / f"{name}-1.blocks").write_bytes(b"")
    (tmp_path / f"{name}-1.blocks").chmod(0o644)
    (tmp_path / f"{name}-0.blocks").write_bytes(b"")
    (tmp_path / f"{name}-0.blocks").chmod(0o600)
    os.link(tmp_path / f"{name}-0.blocks", tmp_path / "second-name")
    opened(tmp_path)
    assert (tmp_path / f"{name}-2.blocks").stat().st_size == ROOM
    assert (tmp_path / f"{name}-1.blocks").stat().st_size == (tmp_path / f"{name}-0.blocks").stat().st_size == 0
    (tmp_path / f"{name}-3.blocks").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="where no file can be kept"):
        opened(tmp_path)
    assert (tmp_path / "secret").read_bytes() == b"x"


def test_a_directory_that_others_may_write_and_too_little_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"a file with one block takes {HEADER_BYTES + FORM.place_bytes}; raise it"):
        opened(tmp_path, HEADER_BYTES + FORM.place_bytes - 1)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="where others may write"):
        opened(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="which cannot be used .*; name another one"):
        opened(tmp_path / "file")


def test_a_block_is_what_was_asked_for_or_a_miss_that_says_why() -> None:
    place = FORM.encode(FIRST, DATA, 1)
    assert FORM.check(place, FIRST) == DATA
    assert FORM.check(place, FIRST._replace(fingerprint=digest_of("other"))) is Miss.FOREIGN
    assert FORM.check(place, FIRST._replace(namespace=digest_of("other"))) is Miss.FOREIGN
    assert FORM.check(place, FIRST._replace(prefix=root_of(MODEL, MODEL))) is Miss.STALE
    assert FORM.check(place, FIRST._replace(token_ids=(1, 2, 3, 5))) is Miss.STALE
    assert FORM.check(place, SECOND) is Miss.STALE
    for wrong in (b"", place[:-1], place + b"x", place[: FORM.num_bytes], DATA + place[100:]):
        assert FORM.check(wrong, FIRST) is Miss.DAMAGED


def test_one_wrong_bit_anywhere_is_found_or_is_in_the_filling() -> None:
    place = FORM.encode(FIRST, DATA, 1)
    filling = range(
        len(place) - 100 - place[: FORM.num_bytes][::-1].index(place[: FORM.num_bytes].rstrip(b"\0")[-1]),
        FORM.num_bytes,
    )
    for bit in range(0, 8 * len(place), 3):
        changed = bytearray(place)
        changed[bit // 8] ^= 1 << bit % 8
        outcome = FORM.check(bytes(changed), FIRST)
        assert outcome is Miss.DAMAGED or (outcome == DATA and bit // 8 in filling), bit


def test_the_key_of_a_block_depends_on_all_before_it() -> None:
    keys = {
        record.key
        for fingerprint in ("a", "b")
        for namespace in ("", "s")
        for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 5, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9])
        for record in chain(digest_of(fingerprint), namespace, tokens, 4, 2)
    }
    assert len(keys) == 2 * 2 * 5, "the first block of two of the texts is the same"


def test_host_memory_holds_what_was_written() -> None:
    store = HostBlocks(2)
    store.write(1, b"x")
    assert (store.read(0), store.read(1), list(store.scan()), store.num_places) == (b"", b"x", [], 2)


def test_what_a_file_held_before_it_began_anew_is_not_found_by_a_later_engine_either(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(1, FORM.encode(FIRST, DATA, 1))
    store.close()
    for _ in range(2):  # the first one begins the file anew, the second one goes on with it
        larger = opened(tmp_path, ROOM + FORM.place_bytes)
        assert found(larger) == {}
        larger.close()
