"""Four bits with two levels of scales (native/two_levels.h, rounding.cpp) against float64, integers and the reference."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from backend.layers.linear import QuantizedWeight, make_torch_linear
from backend.worker.native_tier import PackLinears
from kernels.common import rotation, two_levels
from kernels.common.quantize import dequantize
from kernels.cpu.isa import AMX_EMULATED
from kernels.cpu.linear import PackedLinear, RoundToLevels
from kernels.cpu.structs import TWO_LEVELS
from tests.native.harness import threads
from tests.native.test_linear import DTYPES, as_the_kernels_quantise, assert_product, random_tensor


def weight(n: int, k: int, group: int, seed: int = 0) -> QuantizedWeight:
    """Random levels of every multiple, and scales."""
    rng = torch.Generator().manual_seed(seed)
    multiples = torch.randint(-63, 64, (n, k // 32), generator=rng)
    multiples.view(-1)[:127] = torch.arange(-63, 64)[: multiples.numel()]
    places = torch.randint(16, (n, k // 32, 32), generator=rng)
    places[:, :, :2] = torch.tensor([0, 15])
    q = two_levels.levels_of(multiples).gather(2, places).flatten(1).to(torch.int8)
    scale = (0.1 + torch.rand(n, k // group, generator=rng)).bfloat16().float()
    return QuantizedWeight(q, scale, group, "w4a8", is_rotated=True)


def floats(w: QuantizedWeight) -> Tensor:
    return dequantize(w.q, w.scale, w.group).double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k, group", [(64, 64), (192, 192), (384, 128), (640, 320), (960, 192), (1024, 512)])
def test_a_layer_is_the_product_of_what_its_bits_stand_for(
    kernels: CDLL, isa: str, k: int, group: int, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(1)
    for rows, n in [(1, 33), (2, 1), (5, 64), (13, 40)] + [(40, 100)] * (isa != AMX_EMULATED):
        x, w = random_tensor(rng, rows, k).to(dtype), weight(n, k, group)
        bias = random_tensor(rng, n) if n % 2 else None
        values = as_the_kernels_quantise(kernels, rotation.rotate(x), group)
        assert_product(PackLinears(kernels)(w, bias)(x), values, floats(w), bias, (rows, n))


@pytest.mark.parametrize("rows", [1, 3, 13])  # vectors, and tiles of AMX
def test_sums_of_the_largest_numbers_are_exact(kernels: CDLL, rows: int) -> None:
    """Rotated inputs are integers whose greatest is 127, so that their scale is 1; so are the weights' scales.

    The sums stay below 2^24, so float32 holds them. All numbers of the first rows are 127 and -127, beside columns of 63 and -63.
    """
    n, k = 40, 512
    w = weight(n, k, k)
    w.scale.fill_(1)
    w.q[0], w.q[1] = 63, -63
    rotated = torch.randint(-127, 128, (rows, k), generator=torch.Generator().manual_seed(2))
    rotated[:, ::32] = 127
    rotated[0] = 127
    if rows > 1:
        rotated[1] = -127
    x = rotation.rotate(rotated.float()) / 256  # Hadamard's matrix is its own inverse, times the columns of a block
    assert torch.equal(PackLinears(kernels)(w, None)(x).long(), rotated @ w.q.long().T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_rows_changes_no_bit(kernels: CDLL, isa: str, dtype: torch.dtype) -> None:
    """A pass serves up to 512 rows; AMX takes vectors up to 12 rows and tiles beyond."""
    n, k = (33, 192) if isa == AMX_EMULATED else (130, 1152)
    x = random_tensor(torch.Generator().manual_seed(4), 530, k).to(dtype)
    layer = PackLinears(kernels)(weight(n, k, rotation.group_of(k) or 0), None)
    whole = layer(x)
    for count in (1, 2, 3, 6, 7, 12, 13, 40):
        assert torch.equal(layer(x[:count]), whole[:count])
    for row in (0, 511, 512, 529):
        assert torch.equal(layer(x[row : row + 1])[0], whole[row])


def test_the_number_of_threads_changes_no_bit(best_kernels: CDLL) -> None:
    x, layer = (
        random_tensor(torch.Generator().manual_seed(5), 37, 640),
        PackLinears(best_kernels)(weight(500, 640, 320), None),
    )
    with threads(1):
        alone = layer(x)
    for count in (2, 3, 5):
        with threads(count):
            assert torch.equal(layer(x), alone)


def test_it_has_the_bits_of_the_same_weight_in_eight_bits(kernels: CDLL, isa: str) -> None:
    """Both sum up the same integers of a group, and scale them in the same order."""
    x = random_tensor(torch.Generator().manual_seed(6), 14, 640)
    w = weight(40, 640, 320)
    layers = [PackLinears(kernels)(w._replace(format=format), None) for format in ("w4a8", "w8a8")]
    for rows in (1, 2, 14):
        assert torch.equal(*(layer(x[:rows]) for layer in layers)), rows


@pytest.mark.parametrize("k, group", [(192, 192), (1024, 512)])
def test_it_takes_a_byte_for_32_weights_and_two_for_a_group_beside_its_bits(
    best_kernels: CDLL, k: int, group: int
) -> None:
    layer = PackLinears(best_kernels)(weight(512, k, group), None)
    assert layer.num_bytes == 512 * k * (4 + 8 / 32 + 16 / group) / 8


def test_native_rounding_is_as_good_as_its_reference(kernels: CDLL) -> None:
    """Sums go in another order, so that another of two equally good scales may be taken."""
    rng = torch.Generator().manual_seed(9)
    for n, k, group in ((50, 256, 256), (3, 192, 192), (20, 1024, 512), (1, 64, 64)):
        w = random_tensor(rng, n, k)
        w[0, : k // 2] = 0
        errors = []
        for q, scale in (RoundToLevels(kernels)(w, group), two_levels.round_weight(w, group)):
            assert scale.shape == (n, k // group) and torch.equal(scale, scale.bfloat16().float())
            assert not q[0, : k // 2].any()
            PackLinears(kernels)(
                QuantizedWeight(q, scale, group, "w4a8", True), None
            )  # which refuses what are no levels
            errors.append((dequantize(q, scale, group) - w).norm().item())
        assert errors[0] <= 1.002 * errors[1] and errors[1] <= 1.002 * errors[0]


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_the_error_is_what_the_search_promises(best_kernels: CDLL, scale: float) -> None:
    """7.4 % on normal numbers, as kernels/common/two_levels.py says."""
    w = random_tensor(torch.Generator().manual_seed(10), 300, 1024) * scale
    for q, scales in (RoundToLevels(best_kernels)(w, 512), two_levels.round_weight(w[:40], 512)):
        of = w[: len(q)].double()
        assert 0.0725 < (dequantize(q, scales, 512).double() - of).norm() / of.norm() < 0.0745


def test_zeros_stay_zeros(best_kernels: CDLL) -> None:
    for rounded in (RoundToLevels(best_kernels), two_levels.round_weight):
        q, scale = rounded(torch.zeros(3, 128), 128)
        assert not q.any() and not scale.any()


def test_the_torch_tier_reads_the_same_weight(best_kernels: CDLL) -> None:
    x, w = random_tensor(torch.Generator().manual_seed(11), 9, 640), weight(70, 640, 320)
    expected, measured = make_torch_linear(w, None)(x), PackLinears(best_kernels)(w, None)(x)
    assert (measured - expected).norm() < 1e-3 * expected.norm()


def test_weights_that_are_no_levels_of_one_multiple_are_refused(best_kernels: CDLL) -> None:
    w = weight(40, 128, 128)
    w.q[3, 40:44] = torch.tensor([63, 62, 61, 60])
    w.q[39, 0] = -128
    w.q[39, 127] = 64
    with pytest.raises(ValueError, match="3 runs of 32 columns of the weight are no levels of one multiple"):
        PackLinears(best_kernels)(w, None)


def test_groups_that_do_not_divide_the_columns_are_refused(best_kernels: CDLL) -> None:
    with pytest.raises(ValueError, match="there is no format"):
        PackLinears(best_kernels)(weight(4, 1024, 1024), None)  # the greatest group has 512
    for group in (0, 32, 96, 128):
        with pytest.raises(ValueError, match=f"groups of {group} of 192 columns cannot be rotated"):
            PackLinears(best_kernels)(weight(4, 192, 192)._replace(group=group), None)
    with pytest.raises(ValueError, match="there is no format"):
        PackedLinear.of_parts(best_kernels, (None,) * 5, 4, 192, TWO_LEVELS, 128)
    with pytest.raises(ValueError, match="the parts have"):
        PackedLinear.of_parts(best_kernels, (torch.empty(5),) + (None,) * 4, 4, 192, TWO_LEVELS, 192)
