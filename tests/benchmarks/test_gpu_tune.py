"""The choices of `python -m benchmarks.gpu.tune` are in force within their context, and nowhere else."""

from __future__ import annotations

import pytest

from benchmarks.gpu import tune
from benchmarks.gpu.cases import all_cases
from kernels import decode_attention, w8a8
from kernels.common import attention_tiles, gemm_tiles

CASES = [case.name for case in all_cases(False) if tune.choices_of(case.name)]


def state() -> list[object]:
    tables = [dict(module.TILES[tune.ARCHITECTURE]) for module in (tune.w4a16, tune.w4a8, w8a8)]
    return [
        *tables,
        dict(attention_tiles.TILES),
        gemm_tiles.PROGRAMS,
        decode_attention.split_for,
        decode_attention._config,
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_choice_changes_what_its_case_reads_and_is_undone(name: str) -> None:
    before, choices = state(), tune.choices_of(name)
    changed = 0
    for choice in choices:
        with choice.applied():
            changed += state() != before
        assert state() == before
    assert changed >= len(choices) - 1, "at most one is what the tables hold already"
    assert len({choice.name for choice in choices}) == len(choices)


def test_there_are_choices_for_products_and_both_attentions() -> None:
    assert {name.split()[0] for name in CASES} == {"W4A16", "W4A8", "W8A8", "decode", "context"}
