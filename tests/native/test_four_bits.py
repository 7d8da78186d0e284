"""Four-bit weights (native/four_bits.h) against float64 and exact integers."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from backend.worker.native_tier import PackLinears
from kernels import w4a8, w4a16
from kernels.common.quantize import dequantize
from kernels.cpu.isa import AMX_EMULATED
from kernels.cpu.linear import PackedLinear
from kernels.cpu.memory import Arena
from tests.native.harness import threads
from tests.native.test_linear import DTYPES, as_the_kernels_quantise, assert_product, random_tensor, shapes

KINDS = ["even", "zeros"]
GROUPS = [32, 64, 128, None]  # columns that share a scale; None = one scale a row
ACTIVATION_GROUP = 32


class Numbers:
    """A random layer of four bits, and the numbers that its weights stand for."""

    def __init__(self, kind: str, n: int, k: int, group: int | None, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.group = group or -(-k // 64) * 64
        groups = -(-k // self.group)
        self.q = torch.randint(16, (n, k), generator=rng, dtype=torch.uint8)
        self.scale = (0.1 + torch.rand(n, groups, generator=rng)).bfloat16().float()
        self.extra: Tensor | None = None
        if kind == "zeros":
            self.extra = torch.randint(17, (n, groups), generator=rng, dtype=torch.uint8)
        self.whole = self._whole()

    def _whole(self) -> Tensor:
        """int8 [n, k]: the weights over their scales."""
        zeros = (
            8
            if self.extra is None
            else self.extra.repeat_interleave(self.group, 1)[:, : self.q.shape[1]].to(torch.int8)
        )
        return self.q.to(torch.int8) - zeros

    def weight(self) -> Tensor:
        return dequantize(self.whole, self.scale, self.group).double()

    def layer(self, library: CDLL, bias: Tensor | None = None) -> PackedLinear:
        return PackedLinear.of_four_bits(library, Arena(), self.q, self.scale, self.extra, self.group, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_product_of_what_its_bits_stand_for(
    kernels: CDLL, isa: str, kind: str, group: int | None, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(1)
    for rows, n, k in shapes(7, isa, 4):
        x, numbers = random_tensor(rng, rows, k).to(dtype), Numbers(kind, n, k, group)
        bias = random_tensor(rng, n) if n % 2 else None
        values = as_the_kernels_quantise(kernels, x.float(), ACTIVATION_GROUP)
        assert_product(numbers.layer(kernels, bias)(x), values, numbers.weight(), bias, (kind, rows, n, k))


@pytest.mark.parametrize("rows", [1, 4, 5, 33])  # vectors and tiles of AMX, both
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_numbers_are_exact(kernels: CDLL, isa: str, kind: str, rows: int) -> None:
    """Activations are integers whose groups have 127 as the greatest, so that their scale is 1; so are the weights' scales.

    A float32 sum of integers is exact while it stays below 2^24: 192 columns of at most 127 * 127 give 3.1 million. The first
    row has only 127 and the second only -127, beside columns of only the greatest and only the least weights.
    """
    n, k = 40, 192
    numbers = Numbers(kind, n, k, 64)
    numbers.scale.fill_(1)
    numbers.q[0], numbers.q[1] = 15, 0
    if kind == "zeros" and numbers.extra is not None:
        numbers.extra[0], numbers.extra[1] = 0, 16
    numbers.whole = numbers._whole()
    x = torch.randint(-127, 128, (rows, k), generator=torch.Generator().manual_seed(2))
    x[:, ::ACTIVATION_GROUP] = 127
    x[0] = 127
    if rows > 1:
        x[1] = -127
    expected = x @ numbers.whole.long().T
    assert torch.equal(numbers.layer(kernels)(x.float()).long(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_rows_changes_no_bit(kernels: CDLL, isa: str, kind: str, dtype: torch.dtype) -> None:
    """A pass serves up to 512 rows; AMX takes vectors up to 4 rows and tiles beyond."""
    n, k = (33, 160) if isa == AMX_EMULATED else (130, 600)
    x = random_tensor(torch.Generator().manual_seed(4), 530, k).to(dtype)
    layer = Numbers(kind, n, k, 32).layer(kernels)
    whole = layer(x)
    for count in (1, 2, 4, 5, 6, 7, 13, 40):
        assert torch.equal(layer(x[:count]), whole[:count])
    for row in (0, 511, 512, 529):
        assert torch.equal(layer(x[row : row + 1])[0], whole[row])


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_changes_no_bit(best_kernels: CDLL, kind: str) -> None:
    x, layer = random_tensor(torch.Generator().manual_seed(5), 37, 320), Numbers(kind, 500, 320, 64).layer(best_kernels)
    with threads(1):
        alone = layer(x)
    for count in (2, 3, 5):
        with threads(count):
            assert torch.equal(layer(x), alone)


@pytest.mark.parametrize("kind, bits", [("even", 4.5), ("zeros", 4.75)])
def test_a_group_of_32_takes_16_bits_of_scale_and_8_of_zero_point(best_kernels: CDLL, kind: str, bits: float) -> None:
    n, k = 512, 1024
    assert Numbers(kind, n, k, 32).layer(best_kernels).num_bytes == n * k * bits / 8


@pytest.mark.parametrize("zero_points", [True, False])
@pytest.mark.parametrize("group", [32, 128])
def test_four_bits_of_awq_and_gptq_are_held_as_they_are(best_kernels: CDLL, group: int, zero_points: bool) -> None:
    rng = torch.Generator().manual_seed(6)
    x, weight = random_tensor(rng, 9, 384), w4a16.quantize(random_tensor(rng, 70, 384), group, zero_points)
    layer = PackLinears(best_kernels)(weight, None)
    values = as_the_kernels_quantise(best_kernels, x, ACTIVATION_GROUP)
    assert_product(layer(x), values, w4a16.dequantize(weight).double(), None, group)
    bits = 4 + (16 + 8 * zero_points) / group
    assert layer.num_bytes == 96 * 384 * bits / 8  # 70 outputs are three panels of 32


@pytest.mark.parametrize("per_group", [True, False])
def test_both_scales_of_qoq_become_one(best_kernels: CDLL, per_group: bool) -> None:
    """Its first scales are powers of two here, so that their products with the second are exact in bfloat16."""
    rng = torch.Generator().manual_seed(7)
    x, weight = random_tensor(rng, 9, 384), w4a8.quantize(random_tensor(rng, 70, 384), per_group)
    weight = weight._replace(scale=2.0 ** weight.scale.log2().round())
    values = as_the_kernels_quantise(best_kernels, x, ACTIVATION_GROUP)
    assert_product(
        PackLinears(best_kernels)(weight, None)(x), values, w4a8.dequantize(weight).double(), None, per_group
    )


def test_a_group_that_the_kernels_do_not_take_is_refused(best_kernels: CDLL) -> None:
    with pytest.raises(ValueError, match="group is 48, the native kernels take 32 or a multiple of 64"):
        PackedLinear.of_four_bits(
            best_kernels, Arena(), torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 2), None, 48, None
        )
