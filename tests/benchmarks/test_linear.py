"""benchmarks/linear.py measures what it is asked for, and refuses what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from rich.console import Console

from benchmarks import linear
from benchmarks.linear import FORMATS, Rate
from kernels.cpu.build import NativeUnavailable


def test_every_format_has_a_rate_for_each_number_of_rows_and_a_peak() -> None:
    try:
        rates = linear.ours(FORMATS, 64, 256, [1, 3], 1, 0.0)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    assert [rate.format for rate in rates] == list(FORMATS)
    assert all(len(rate.rates) == 2 and min(rate.rates) > 0 and rate.peak and rate.peak > 0 for rate in rates)


def test_a_table_tells_the_share_of_the_peak(tmp_path: Path) -> None:
    rates = [Rate("avx2", "w8a8", 200.0, [10.0, 50.0])]
    console = Console(width=150, record=True, file=(tmp_path / "out").open("w"))
    console.print(linear.table_of(rates, [1, 256], "a layer"))
    told = console.export_text()
    assert "share at 256" in told and "25%" in told


@pytest.mark.parametrize("text", ["", "0", "a", "1,,2", "5000", "-3"])
def test_rows_that_are_no_numbers_in_range_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="numbers of 1 to 4,096"):
        linear._numbers(text)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(typer.BadParameter, match="'w9a9' is none of f32, "):
        linear._names("bf16,w9a9", FORMATS, "--formats")
