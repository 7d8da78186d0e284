"""What the rows of a step read and write of states, as it is handed to kernels."""

from __future__ import annotations

import torch

from kernels.common.state_rows import PlacedRows, StateRows
from tests.kernels.state_steps import Given, every_kind, rows_of

CPU = torch.device("cpu")


def read_back(placed: PlacedRows) -> list[tuple[list[int], list[list[int]]]]:
    """(first token, source, target, count) and the pieces of each row."""
    rows = placed.rows.tolist()
    return [(row[:4], placed.pieces[row[4] : row[5]].tolist()) for row in rows]


def test_pieces_end_where_states_are_written_and_where_rows_end() -> None:
    given = [
        Given(5, 3, 3),
        Given(4, -1, 7, drafts=2, saves=((1, 8), (3, 9))),
        Given(1, 2, -1),
        Given(3, 4, 5, saves=((3, 6),)),
    ]
    placed = rows_of(given).on(CPU)
    assert read_back(placed) == [
        ([0, 3, 3, 5], [[5, 3]]),
        ([5, -1, 7, 2], [[6, 8], [7, 7], [8, 9], [9, -1]]),
        ([9, 2, -1, 1], [[10, -1]]),
        ([10, 4, 5, 3], [[13, 5], [13, 6]]),
    ]
    assert placed.row_of_token.tolist() == [0] * 5 + [1] * 4 + [2] + [3] * 3


def test_every_write_of_a_row_is_behind_a_piece_and_pieces_cover_the_row() -> None:
    rows = rows_of(every_kind([1, 4, 9, 2, 1, 7]))
    placed = rows.on(CPU)
    for index, ((first, *_), pieces) in enumerate(read_back(placed)):
        assert sorted((end - first, state) for end, state in pieces if state >= 0) == sorted(rows.writes_of(index))
        ends = [end for end, _ in pieces]
        assert ends == sorted(ends) and ends[-1] == rows.starts[index + 1]


def test_all_parts_are_aligned_and_of_one_copy_that_is_kept() -> None:
    rows = rows_of(every_kind([1, 4, 9])).placed_on(CPU)
    placed = rows.on(CPU)
    assert placed is rows.placed and StateRows(*rows[:3]).placed is None
    parts = placed
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.storage_offset() % 4 == 0 and part.is_contiguous() for part in parts)


def test_a_step_may_have_no_rows() -> None:
    placed = rows_of([]).on(CPU)
    assert [len(part) for part in placed] == [0, 0, 0]
