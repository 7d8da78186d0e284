"""The file of the pool: an engine finds what the one before it has left, if its own pool has the same size."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from backend.core.kept_block import RecordFormat, chain, checksum_of, digest_of
from backend.storage.pool_file import PoolFile

FORM = RecordFormat(4, 64)
LAYERS = 2
(BLOCK,) = chain(digest_of("model"), "", [1, 2, 3, 4], 4, 1)


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("pool")
    yield descriptor
    os.close(descriptor)


def left_by_another(descriptor: int, num_blocks: int) -> bytes:
    """The record of block 1, which an engine has left in a pool of so many blocks."""
    pool = PoolFile(descriptor, "model", FORM, LAYERS)
    pool.map(num_blocks)
    for number, layer in enumerate(pool.layers):
        layer[:] = bytes([number + 1]) * len(layer)
    data = bytes([1]) * 32 + bytes([2]) * 32
    assert pool.checksum(1) == checksum_of(data), "the parts of a block come layer by layer"
    record = FORM.encode_record(BLOCK, pool.checksum(1), 7)
    pool.write(1, record)
    return record


def test_a_pool_of_the_same_size_is_inherited_with_its_records(descriptor: int) -> None:
    left_by_another(descriptor, 3)
    pool = PoolFile(descriptor, "model", FORM, LAYERS)
    pool.map(3)
    assert pool.num_inherited_blocks == 3
    ((block_id, record),) = pool.records()
    assert block_id == 1 and record is not None and (record.block, record.stamp) == (BLOCK, 7)
    assert record.checksum == pool.checksum(1)


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_of_a_pool_of_another_size_nothing_is_inherited(descriptor: int, num_blocks: int) -> None:
    left_by_another(descriptor, 3)
    pool = PoolFile(descriptor, "model", FORM, LAYERS)
    assert pool.num_inherited_blocks == 3, "until the size of the new pool is known"
    pool.map(num_blocks)
    assert pool.num_inherited_blocks == 0 and list(pool.records()) == []
    assert not any(any(layer) for layer in pool.layers)
    assert PoolFile(descriptor, "model", FORM, LAYERS).num_inherited_blocks == num_blocks, "the next one finds it"


@pytest.mark.parametrize(
    "changed", [("other", FORM, LAYERS), ("model", RecordFormat(2, 64), LAYERS), ("model", FORM, 4)]
)
def test_the_pool_of_another_model_or_form_is_emptied(descriptor: int, changed: tuple[str, RecordFormat, int]) -> None:
    left_by_another(descriptor, 3)
    assert PoolFile(descriptor, *changed).num_inherited_blocks == 0
    assert os.fstat(descriptor).st_size == 0


def test_a_block_that_is_erased_is_not_found_again_and_a_torn_record_says_so(descriptor: int) -> None:
    record = left_by_another(descriptor, 3)
    pool = PoolFile(descriptor, "model", FORM, LAYERS)
    pool.map(3)
    pool.write(2, bytes([record[0] ^ 1]) + record[1:])
    pool.erase(1)
    assert list(pool.records()) == [(2, None)]
