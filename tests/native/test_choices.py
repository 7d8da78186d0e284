"""What the kernels choose by the machine (kernels/cpu/choices.py): the table, and that no choice changes a bit."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from backend.worker.native_tier import PackLinears
from benchmarks.linear import FORMATS
from kernels.common.super_blocks import FORMS
from kernels.cpu.choices import LIMITS, Caches, Choices, caches_of, choices_for, choose, chosen, with_named
from kernels.cpu.isa import AMX_EMULATED, LADDER
from tests.native.test_linear import random_tensor

USUAL = choices_for("avx2", Caches(1 << 15, 1 << 19, 1 << 23))
# Every extreme of every choice is in one of these.
OTHERS = [
    Choices(0, 0, 64, 64, 64, 0, 0, 1),
    Choices(512, 512, 256, 1 << 16, 1 << 16, 1 << 20, 1 << 20, 8),
    Choices(1, 3, 128, 192, 320, 64, 64, 4),
    Choices(6, 12, 192, 256, 2048, 8192, 8192, 2),
]


@pytest.fixture
def chosen_again(kernels: CDLL, isa: str) -> Iterator[None]:
    yield
    choose(kernels, chosen(isa))


@pytest.mark.parametrize("name", FORMATS)
def test_no_choice_changes_a_bit(kernels: CDLL, isa: str, name: str, chosen_again: None) -> None:
    """Rows of one and of several tiles. 960 columns of two levels have five groups of 192, no piece may cut one."""
    torch.manual_seed(3)
    of_blocks = {kind.lower().replace(" ", "_"): 768 for kind, form in FORMS.items() if form.is_super}
    k = (of_blocks | {"awq-128": 896}).get(name, 960)
    n, most = (40, 70) if isa == AMX_EMULATED else (100, 150)
    weight = FORMATS[name].make(n, k)
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    x = random_tensor(torch.Generator().manual_seed(4), most, k).to(dtype)
    layer = PackLinears(kernels)(weight, None)
    choose(kernels, USUAL)
    expected = {rows: layer(x[:rows]) for rows in (1, 5, 13, most)}
    for choices in OTHERS:
        choose(kernels, choices)
        for rows, of_rows in expected.items():
            assert torch.equal(layer(x[:rows]), of_rows), f"{rows} rows, {choices}"


def test_these_are_all_extremes() -> None:
    for place, (name, allowed) in enumerate(LIMITS.items()):
        found = {choices[place] for choices in OTHERS}
        assert name == Choices._fields[place] and {allowed[0], allowed[-1]} <= found, name


@pytest.mark.parametrize("isa", [*LADDER, AMX_EMULATED])
@pytest.mark.parametrize("second", [0, 1, 1 << 17, 1 << 18, 1 << 21, 1 << 40])
def test_the_table_keeps_to_the_limits(isa: str, second: int) -> None:
    for name, value in choices_for(isa, Caches(0, second, 0))._asdict().items():
        assert value in LIMITS[name], name


def test_a_small_cache_gets_short_pieces() -> None:
    pieces = [choices_for("avx2", Caches(0, size << 10, 0)).long_piece for size in (0, 64, 256, 512, 2048)]
    assert pieces == [2048, 256, 1024, 2048, 2048]


def test_the_environment_may_name_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERBATCH_CHOICES", "ahead=64, fetching_tiles=4")
    assert chosen("avx2") == choices_for("avx2", caches_of())._replace(ahead=64, fetching_tiles=4)


@pytest.mark.parametrize(
    "text, message",
    [
        ("speed=1", "has 'speed'; name some of vector_rows_of_int8, "),
        ("ahead", "has ahead=; use one of 0, 64 .. 1048576"),
        ("ahead=-64", "has ahead=-64; use one of 0, 64 .. 1048576"),
        ("ahead=١", "use one of 0, 64"),
        ("short_piece=320", "has short_piece=320; use one of 64, 128 .. 256"),
        ("long_piece=65", "has long_piece=65; use one of 64, 128 .. 65536"),
        ("fetching_tiles=3", "has fetching_tiles=3; use one of 1, 2 .. 8"),
        ("vector_rows_of_int8=513", "use one of 0, 1 .. 512"),
        ("long_piece=" + "9" * 5000, "use one of 64, 128"),
    ],
)
def test_what_there_is_not_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        with_named(USUAL, text)
    assert len(str(caught.value)) < 300


def test_caches_are_read_as_linux_tells_them(tmp_path: Path) -> None:
    told = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "1G")]
    told += [("4", "Unified", "64M"), ("2", "Unified", "much"), ("3", "Unified", ""), ("1", "Data", "9" * 400 + "K")]
    for index, numbers in enumerate(told):
        at = tmp_path / f"index{index}"
        at.mkdir()
        for name, value in zip(("level", "type", "size"), numbers, strict=True):
            (at / name).write_text(value + "\n")
    (tmp_path / "index9").mkdir()
    caches = caches_of(tmp_path)
    assert caches == Caches(48 << 10, 2 << 20, 1 << 30)
    assert str(caches) == "L1 48 KiB, L2 2,048 KiB, L3 1,048,576 KiB"
    assert str(caches_of(tmp_path / "none")) == "unknown"
