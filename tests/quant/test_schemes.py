"""What is written, decoded by hand as the formats are published, is what the grid says; and the engine reads the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.api.errors import ConfigError
from backend.quant.grids import nearest, values
from backend.quant.schemes import W4A8, W4A16, W8A8, Scheme, make_scheme, pack_words
from kernels.common.qserve_checkpoint import from_qserve
from kernels.w4a8 import dequantize


def random_weight(n: int, k: int) -> Tensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
    weight[1] *= 30
    weight[2] = 0
    return weight


def stored(scheme: Scheme, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns (the checkpoint's tensors of a layer `x`, the values that the grid says they stand for)."""
    grid = scheme.grid(weight, torch.ones(len(weight), scheme.groups(weight.shape[1])))
    q = nearest(weight, grid)
    return scheme.tensors("x", q, grid), values(q, grid)


def nibble(words: Tensor, row: int, column: int) -> int:
    return (int(words[row, column // 8]) & 0xFFFFFFFF) >> 4 * (column % 8) & 15


def test_words_hold_eight_numbers_the_first_lowest() -> None:
    q = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15], [15, 0, 0, 0, 0, 0, 0, 8]])
    assert pack_words(q).tolist() == [[0xF7654321 - (1 << 32)], [0x8000000F - (1 << 32)]]
    assert pack_words(torch.ones(1, 9)).tolist() == [[0x11111111, 1]]


def test_w8a8_is_a_scale_a_row_that_two_bytes_hold() -> None:
    tensors, expected = stored(W8A8(), random_weight(6, 100))
    assert tensors["x.weight"].dtype == torch.int8 and tensors["x.weight_scale"].shape == (6, 1)
    assert torch.equal(tensors["x.weight"].float() * tensors["x.weight_scale"].float(), expected)


@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_w4a16_is_packed_as_compressed_tensors_packs(group: int, has_zeros: bool) -> None:
    weight = random_weight(16, 256) + (0.4 if has_zeros else 0)
    tensors, expected = stored(W4A16(group, has_zeros, torch.bfloat16), weight)
    assert tensors["x.weight_shape"].tolist() == [16, 256]
    assert tensors["x.weight_packed"].shape == (16, 32)
    assert tensors["x.weight_scale"].shape == (16, 256 // group) and tensors["x.weight_scale"].dtype == torch.bfloat16
    if has_zeros:
        assert tensors["x.weight_zero_point"].shape == (2, 256 // group)
    else:
        assert "x.weight_zero_point" not in tensors
    for row, column in ((0, 0), (1, 7), (2, 9), (9, 255), (15, 130)):
        zero = nibble(tensors["x.weight_zero_point"].T, column // group, row) if has_zeros else 8
        scale = tensors["x.weight_scale"][row, column // group].float()
        assert (nibble(tensors["x.weight_packed"], row, column) - zero) * scale == expected[row, column]


@pytest.mark.parametrize("per_group", [True, False])
def test_w4a8_is_read_back_from_qserves_tensors(per_group: bool) -> None:
    weight = random_weight(64, 256)
    weight[3:9] *= torch.tensor([1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9])[:, None]  # float16 scales lose digits, then all
    tensors, expected = stored(W4A8(per_group), weight)
    names = ("qweight", "s1_scales", "s1_szeros", "s2_scales", "s2_zeros")
    read = from_qserve(*(tensors.get("x." + name) for name in names))
    assert tensors["x.qweight"].shape == (64, 128)
    assert set(tensors) == {"x.qweight", "x.s1_scales"} | (
        {"x.s2_scales", "x.s2_zeros"} if per_group else {"x.s1_szeros"}
    )
    torch.testing.assert_close(dequantize(read), expected, rtol=1e-6, atol=0)


def test_the_largest_group_that_divides_every_width_is_taken() -> None:
    assert make_scheme("w4a16", None, {(64, 256), (256, 640)}, torch.bfloat16).groups(640) == 5
    assert make_scheme("w4a16", None, {(64, 256), (256, 320)}, torch.bfloat16).groups(320) == 5
    assert make_scheme("w4a16", None, {(64, 96), (96, 352)}, torch.bfloat16).groups(96) == 3
    assert make_scheme("w4a16", 64, {(64, 256)}, torch.bfloat16).groups(256) == 4


def test_rows_that_are_no_multiple_of_eight_have_no_zero_points() -> None:
    def config(n: int) -> bool:
        section = make_scheme("w4a16", None, {(n, 128)}, torch.bfloat16).config()
        return section["config_groups"]["group_0"]["weights"]["symmetric"]

    assert (config(64), config(60)) == (False, True)


@pytest.mark.parametrize(
    "name, group, widths, message",
    [
        ("w4a16", None, {(8, 90)}, "90 columns; w4a16 needs groups of 128, 64 or 32"),
        ("w4a16", 128, {(8, 96)}, "--group is 128, and the layers have 96 columns"),
        ("w4a16", -1, {(8, 128)}, "--group is -1"),
        ("w4a8", None, {(8, 96)}, "96 columns, w4a8 needs a multiple of 128"),
        ("w4a8", None, {(8, 128)}, "8 rows, w4a8 needs a multiple of 32"),
        ("w4a8", 64, {(8, 128)}, "w4a8 has groups of 128, or -1"),
        ("w8a8", 128, {(8, 128)}, "w8a8 has one scale a row; leave it out"),
    ],
)
def test_widths_and_groups_that_a_scheme_cannot_have_are_refused(
    name: str, group: int | None, widths: set[tuple[int, int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheme(name, group, widths, torch.bfloat16)
