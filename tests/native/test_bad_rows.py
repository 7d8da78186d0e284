"""Rows that ask for what does not exist: refused by number, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.architectures.description import LayerConfig
from backend.core.step import Row
from backend.worker.native_tier import NativeTier, PackLinears
from kernels.common.kv_format import PLAIN
from kernels.cpu.decoder import NativeDecoder, NativeForm, NativeNorm, NativeShape, UnknownCell
from kernels.cpu.given import Given
from tests.model.driver import Driver
from tests.native.harness import Format, drive, load, native_driver, prompt
from tools.make_random_model import make_random_model

VOCAB, LONGEST, BLOCKS = 131, 200, 20


@pytest.fixture(scope="module")
def driver(best_kernels: CDLL, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Two sequences: slot 0 with 70 computed tokens of 100, slot 1 with none of 40."""
    directory = make_random_model(tmp_path_factory.mktemp("model"), max_position_embeddings=LONGEST)
    return prepared(native_driver(directory, best_kernels, Format(), num_blocks=BLOCKS))


def prepared(driver: Driver) -> Driver:
    driver.begin(0, prompt(100, VOCAB))
    driver.begin(1, prompt(40, VOCAB, seed=1))
    driver.run(0, [70])
    driver.runner.prepare(driver.make_step([(0, 30), (1, 40)]))  # has blocks for all, runs nothing
    return driver


class Attempt:
    """A step of two good rows that a test may spoil: its arrays are copies, and the pools are looked at afterwards."""

    def __init__(self, driver: Driver) -> None:
        self._runner = driver.runner
        self.rows = np.array([[1, 0, 40, 1], [0, 70, 30, 2]], dtype=np.int32)
        self.token_ids = driver.runner.batch.token_ids.clone()
        self.tables = driver.runner.batch.block_tables.copy()
        self.given: Given | None = None

    def run(self) -> tuple[NDArray[np.int64], Tensor | None]:
        decoder: NativeDecoder = self._runner.tier._decoder
        return decoder.step(self.rows, self.token_ids, self.tables, self._runner.storage.pools, True, given=self.given)

    def assert_refused(self, row: int) -> None:
        before = [pool.view(torch.uint8).clone() for pool in self._runner.storage.pools]
        with pytest.raises(UnknownCell) as error:
            self.run()
        assert error.value.row == row
        assert f"row {row} of the step" in str(error.value)
        for pool, old in zip(self._runner.storage.pools, before, strict=True):
            assert torch.equal(pool.view(torch.uint8), old)


def test_the_rows_that_tests_spoil_are_good(driver: Driver) -> None:
    greedy, logits = Attempt(driver).run()
    assert greedy.shape == (3,) and logits.shape == (3, VOCAB)
    assert not logits.isnan().any()


@pytest.mark.parametrize(
    "column, value",
    [(1, -1), (1, -(2**31)), (1, LONGEST), (2, 0), (2, -1), (2, LONGEST), (2, 2**31 - 1), (3, -1), (3, 31)],
)
def test_numbers_that_no_sequence_can_have_are_refused(driver: Driver, column: int, value: int) -> None:
    attempt = Attempt(driver)
    attempt.rows[1, column] = value
    attempt.assert_refused(1)


@pytest.mark.parametrize("block", [-1, BLOCKS, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("slot, row, index", [(0, 1, 0), (0, 1, 3), (1, 0, 1)])
def test_blocks_that_do_not_exist_are_refused(driver: Driver, slot: int, row: int, index: int, block: int) -> None:
    attempt = Attempt(driver)
    attempt.tables[slot, index] = block
    attempt.assert_refused(row)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_tokens_that_are_not_in_the_vocabulary_are_refused(driver: Driver, token: int) -> None:
    attempt = Attempt(driver)
    attempt.token_ids[0, 99] = token
    attempt.assert_refused(1)
    attempt = Attempt(driver)
    attempt.token_ids[0, 69] = token  # computed long ago: nobody reads it
    attempt.run()


@pytest.mark.parametrize("position", [-1, LONGEST, 2**40, -(2**63)])
@pytest.mark.parametrize("place, row", [(0, 0), (39, 0), (40, 1), (69, 1)])
def test_positions_that_the_model_has_not_are_refused(driver: Driver, place: int, row: int, position: int) -> None:
    attempt = Attempt(driver)
    positions = np.zeros(70, dtype=np.int64)
    positions[place] = position
    attempt.given = Given(None, positions)
    attempt.assert_refused(row)


def test_a_token_beyond_the_vocabulary_is_taken_where_its_embedding_is_given(driver: Driver) -> None:
    """At the first token of the second row; at the one behind it, it is refused."""
    vector = torch.zeros(driver.runner.tier._hidden_size)
    for place, is_refused in ((40, False), (41, True)):
        attempt = Attempt(driver)
        attempt.token_ids[0, 70] = VOCAB
        addresses = np.zeros(70, dtype=np.uintp)
        addresses[place] = vector.data_ptr()
        attempt.given = Given(addresses, None, vector)
        if is_refused:
            attempt.assert_refused(1)
        else:
            attempt.run()


def test_a_table_that_is_too_narrow_is_refused(driver: Driver) -> None:
    attempt = Attempt(driver)
    attempt.tables = np.ascontiguousarray(attempt.tables[:, :3])  # 96 tokens, row 1 runs up to 100
    attempt.assert_refused(1)


def test_the_first_of_several_bad_rows_is_named(driver: Driver) -> None:
    attempt = Attempt(driver)
    attempt.tables[:, 0] = -1
    attempt.assert_refused(0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda driver: driver.runner.batch.num_tokens.__setitem__(1, 39),
        lambda driver: driver.runner.batch.block_tables.__setitem__((1, 0), -1),
        lambda driver: driver.runner.batch.block_tables.__setitem__((1, 1), BLOCKS),
    ],
)
def test_the_tier_names_the_slot(best_kernels: CDLL, tmp_path: Path, spoil: Callable[[Driver], None]) -> None:
    directory = make_random_model(tmp_path, max_position_embeddings=LONGEST)
    driver = prepared(native_driver(directory, best_kernels, Format(), num_blocks=BLOCKS))
    spoil(driver)
    rows = [Row(0, 70, 30, True), Row(1, 0, 40, True)]
    with pytest.raises(IndexError, match=r"slot 1 .* engine and worker disagree"):
        driver.runner.tier.run(driver.runner.batch, rows, [1, 1], driver.runner.storage.pools, False)


@pytest.mark.parametrize("sink_tokens", [0, 1, 33])
@pytest.mark.parametrize("windows", [(13,) * 4, (13, 13, 40, 13), (13, 13, None, 13)], ids=str)
def test_blocks_behind_the_widest_window_and_the_sink_tokens_may_be_gone_and_no_others(
    best_kernels: CDLL, tmp_path: Path, windows: tuple[int | None, ...], sink_tokens: int
) -> None:
    model = load(
        make_random_model(tmp_path, num_hidden_layers=4, max_position_embeddings=LONGEST),
        Format(),
        PackLinears(best_kernels),
    )
    layers = tuple(map(LayerConfig, windows))
    model.config = msgspec.structs.replace(model.config, layers=layers, sink_tokens=sink_tokens)
    tier = NativeTier(model, best_kernels, 32)
    driver = prepared(drive(tier, model, best_kernels, num_blocks=BLOCKS))
    first_seen = 0 if None in windows else 70 - max(windows) + 1  # first token that position 70, the first to run, sees
    for index in range(3):
        attempt = Attempt(driver)
        attempt.tables[0, index] = -1
        if sink_tokens <= index * 32 and (index + 1) * 32 <= first_seen:
            assert not attempt.run()[1].isnan().any()
        else:
            attempt.assert_refused(1)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(block_size=48), "block_size is 48, the native kernels need a multiple of 32"),
        (dict(head_dim=1026), "head_dim is 1026, the native kernels take up to 1024"),
    ],
)
def test_a_shape_that_the_kernels_cannot_take_is_refused(
    best_kernels: CDLL, changes: dict[str, int], message: str
) -> None:
    sizes = (
        dict(heads=2, kv_heads=1, head_dim=8, intermediate=16, block_size=32, kv_format=PLAIN, max_seq_len=1) | changes
    )
    nothing = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=message):
        NativeDecoder(best_kernels, NativeShape(**sizes), NativeForm(1e-6), nothing, [], NativeNorm(nothing), None)


@pytest.mark.parametrize("at, end, row", [(3, 3, 0), (39, 41, 0), (0, 41, 0), (45, 75, 1), (45, 101, 1)])
def test_a_token_sees_no_key_that_its_row_lacks(driver: Driver, at: int, end: int, row: int) -> None:
    """Also not fewer than those up to its own."""
    attempt = Attempt(driver)
    ends = np.concatenate((np.arange(1, 41), np.arange(71, 101))).astype(np.int32)
    attempt.given = Given(None, None, ends=ends)
    plain = Attempt(driver).run()[1]
    assert torch.equal(attempt.run()[1], plain)
    ends[at] = end
    attempt.assert_refused(row)
