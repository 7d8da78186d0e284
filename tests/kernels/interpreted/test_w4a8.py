"""The W4A8 linear layer's Triton kernel, its machine words and its rounding."""

from __future__ import annotations

import re

import pytest
import torch

from kernels import int8_rows, w8a8
from kernels import w4a8 as kernel
from kernels.int8_rows import GROUP, Int8Rows
from tests.kernels.numbers import DTYPES, assert_near, random_tensor


def random_rows(m: int, k: int) -> Int8Rows:
    generator = torch.Generator().manual_seed(m + k)
    q = torch.randint(-127, 128, (m, k), generator=generator, dtype=torch.int8)
    return Int8Rows(q, torch.rand(m, generator=generator) / (75 * k**0.5) + 1e-5, int8_rows.group_sums(q))


def random_weight(n: int, k: int, per_group: bool) -> kernel.Weight4A8:
    """Every scale and zero occurs, and with them every q that stays within int8."""
    generator = torch.Generator().manual_seed(n + k)

    def integers(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=generator)

    q, scale = integers(16, n, k), torch.rand(n, generator=generator)
    if not per_group:
        packed = kernel.pack(q.to(torch.uint8), GROUP)
        return kernel.Weight4A8(packed, scale, None, integers(16, 1, n).to(torch.uint8))
    groups = k // GROUP
    group_scales, zeros = integers(16, groups, n) + 1, integers(16, groups, n)
    least, most = ((t.T[:, :, None]) for t in bounds(group_scales, zeros))
    q = q.unflatten(1, (-1, GROUP)).clamp(least, most).flatten(1)
    packed = kernel.pack(q.to(torch.uint8), GROUP)
    return kernel.Weight4A8(packed, scale, group_scales.to(torch.int8), zeros.to(torch.uint8))


def bounds(scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of q between which (q - zero) * scale lies within int8."""
    return (zero - 128 // scale).clamp(min=0), (zero + 127 // scale).clamp(max=15)


@pytest.mark.feature("003-67", "003-68")
@pytest.mark.parametrize("case", kernel.CASES)
def test_float32_results_are_those_of_the_same_int8_weight_to_the_bit(case: tuple[int, int, int, bool]) -> None:
    m, n, k, per_group = case
    x, weight = random_rows(m, k), random_weight(n, k, per_group)
    for bias in (None, random_tensor(n)):
        y = kernel.w4a8(x, weight, bias, torch.float32)
        assert torch.equal(y, w8a8.reference(x, *kernel.as_int8(weight), bias, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_output_type(dtype: torch.dtype) -> None:
    x, weight = random_rows(5, 256), random_weight(72, 256, True)
    y = kernel.w4a8(x, weight, None, dtype)
    assert y.dtype == dtype
    assert_near(y, kernel.reference(x, weight, None, torch.float32))


@pytest.mark.parametrize("per_group", [True, False])
def test_the_number_of_rows_does_not_change_a_bit(per_group: bool) -> None:
    """A row's result stays the same: with other tiles, and with k split or not."""
    n, k = 72, 2048
    x, weight = random_rows(260, k), random_weight(n, k, per_group)
    several = kernel.w4a8(x, weight)
    splits = set()
    for m in (1, 40, 100, 260):
        splits.add(kernel._splits(kernel._tiles(90, m), m, n, k // GROUP))
        assert torch.equal(kernel.w4a8(Int8Rows(*(part[:m] for part in x)), weight), several[:m])
    assert splits == {1, 4}


@pytest.mark.parametrize(
    "m, n, k, splits",
    [
        (16, 6144, 4096, 4),
        (16, 28672, 4096, 1),
        (64, 4096, 14336, 8),
        (1, 64, 44 * GROUP, 4),
        (65, 64, 4096, 8),
        (256, 4096, 14336, 4),
        (257, 64, 4096, 1),
    ],
)
def test_k_is_split_where_the_tiles_would_not_fill_the_gpu(m: int, n: int, k: int, splits: int) -> None:
    assert kernel._splits(kernel._tiles(90, m), m, n, k // GROUP) == splits


def test_other_columns_than_the_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="x has 256 columns, the weight 128"):
        kernel.w4a8(random_rows(1, 256), random_weight(8, 128, True))


def test_k_beyond_what_int32_holds_is_refused() -> None:
    k = w8a8.MAX_K + 1
    weight = kernel.Weight4A8(torch.zeros(1, k // 2, dtype=torch.uint8), torch.ones(1), None, torch.zeros(1, 1))
    with pytest.raises(ValueError, match="exact"):
        kernel.w4a8(random_rows(1, k), weight)


def run_ptx(code: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The registers $0, $1, ... after the instructions of `code`; inputs are words as int64, from $2 on."""
    registers = {f"${2 + at}": words for at, words in enumerate(inputs) if words is not None}

    def value(name: str) -> torch.Tensor | int:
        return registers[name] if name in registers else int(name, 0)

    does = {
        "and.b32": lambda a, b: a & b,
        "xor.b32": lambda a, b: a ^ b,
        "shr.u32": lambda a, b: a >> b,
        "mul.lo.u32": lambda a, b: a * b,
        "mad.lo.u32": lambda a, b, c: a * b + c,
    }
    for operation, target, sources in re.findall(r"(\S+) (\S+), (.*);", code.split(".reg", 1)[1].split("\n", 1)[1]):
        registers[target] = does[operation](*map(value, sources.split(", "))) & 0xFFFFFFFF
    return [registers["$0"], registers["$1"]]


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """[n] words as int64 -> int8 [n, 4]."""
    return torch.stack([words >> 8 * at & 255 for at in range(4)], 1).to(torch.uint8).view(torch.int8)


def test_a_words_arithmetic_is_that_of_its_bytes() -> None:
    """Every scale, zero and pair of q that stays within int8, among other such pairs in the other bytes of the word."""
    generator = torch.Generator().manual_seed(0)
    proven = 0
    for scale in range(1, 17):
        for zero in range(16):
            least, most = (int(b) for b in bounds(torch.tensor(scale), torch.tensor(zero)))
            q = torch.cartesian_prod(torch.arange(least, most + 1), torch.arange(least, most + 1))
            q = torch.stack([q, q.flip(0), *(q[torch.randperm(len(q), generator=generator)] for _ in range(2))], 1)
            words = sum((q[:, at, 0] | q[:, at, 1] << 4) << 8 * at for at in range(4))
            same = torch.full_like(words, scale), None, None, None, torch.full_like(words, zero)
            for half, made in enumerate(run_ptx(kernel.GROUP_ASM, words, *same)):
                assert torch.equal(bytes_of(made).int(), ((q[:, :, half] - zero) * scale).int())
            proven += len(q)
    assert proven > 30_000


def test_a_words_halves_are_those_of_its_bytes() -> None:
    words = torch.randint(0, 1 << 32, (1000,), generator=torch.Generator().manual_seed(0))
    q = bytes_of(words).view(torch.uint8)
    low, high = (bytes_of(made) for made in run_ptx(kernel.CHANNEL_ASM, words))
    assert torch.equal(low, (q & 15).view(torch.int8)) and torch.equal(high, (q >> 4).view(torch.int8))


@pytest.mark.parametrize("per_group, limit", [(True, 0.101), (False, 0.13)])
def test_rounding_is_to_nearest(per_group: bool, limit: float) -> None:
    w = random_tensor(24, 3 * GROUP)
    w[3, :GROUP], w[4] = 0, 0
    w[5], w[6] = w[5].abs() + 1, -w[6].abs()  # all of one sign
    w[7] *= 1e-6
    weight = kernel.quantize(w, per_group)
    dequantized = kernel.dequantize(weight)
    step = weight.scale[:, None].expand(-1, 3) * (weight.group_scales.T if per_group else 1)
    error = (dequantized - w).abs().unflatten(1, (-1, GROUP))
    near = error <= 0.5001 * step[:, :, None] + 1e-9  # the outermost values are moved by the zero's rounding, or cut
    assert near.float().mean((1, 2)).min() > 0.95
    assert not dequantized[3, :GROUP].any() and not dequantized[4].any()
    assert ((dequantized - w).norm(dim=1)[8:] / w.norm(dim=1)[8:]).mean() < limit


def test_a_groups_scale_is_the_better_of_the_two_around_the_one_that_fits() -> None:
    widest = torch.zeros(1, GROUP)
    widest[0, 0] = 119  # a step of the int8 weight is 1
    columns = torch.arange(GROUP)[None]
    even = columns % 22.0  # 21 / 15 fits: 1 would cut 16..21
    assert kernel.quantize(torch.cat((widest, even), 1), True).group_scales[1] == 2
    uneven = torch.where(columns == 0, 17.0, columns % 14)  # 17 / 15 fits: 1 cuts a single one, by 2
    assert kernel.quantize(torch.cat((widest, uneven), 1), True).group_scales[1] == 1


def test_groups_are_quantized_within_their_scales_and_int8() -> None:
    w = random_tensor(64, 8 * GROUP) * (1 + 20 * torch.rand(64, 1, generator=torch.Generator().manual_seed(1)))
    w[:, :GROUP] *= 30  # the other groups have small scales
    w[0, GROUP], w[0, GROUP + 1] = w[0].abs().max(), -w[0].abs().max()  # the widest group there is
    weight = kernel.quantize(w, True)
    assert weight.group_scales.min() == 1 and weight.group_scales.max() == 16
    q = kernel.unpack(weight.packed, GROUP).int().unflatten(1, (-1, GROUP))
    wide = (q - weight.zeros.int().T[:, :, None]) * weight.group_scales.int().T[:, :, None]
    assert torch.equal(kernel.as_int8(weight)[0].int(), wide.flatten(1))
    assert wide.abs().max() > 119


def test_columns_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 128, this one has 200"):
        kernel.quantize(random_tensor(4, 200), True)


def test_the_layer_is_near_the_float_one() -> None:
    x, w = random_tensor(6, 512), random_tensor(64, 512, seed=1)
    y, expected = kernel.w4a8(w8a8.quantize(x), kernel.quantize(w, True), None, torch.float32), x @ w.T
    assert (y - expected).norm() / expected.norm() < 0.12
