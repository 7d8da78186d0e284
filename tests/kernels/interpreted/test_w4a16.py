"""The 4-bit linear layer's Triton kernel and formats."""

from __future__ import annotations

import re

import pytest
import torch

from kernels import w4a16 as kernel
from kernels.common.kv_format import unpacking
from tests.kernels.numbers import assert_near, random_tensor

DTYPES = [torch.float16, torch.bfloat16]


def random_q(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)


def random_weight(n: int, k: int, group: int, zero_points: bool, dtype: torch.dtype) -> kernel.Weight4:
    """Rows of about unit length; every zero 0..16 occurs."""
    generator = torch.Generator().manual_seed(n + k)
    scales = (torch.rand(k // group, n, generator=generator) + 0.5) / (8 * k**0.5)
    zeros = torch.randint(0, 17, scales.shape, generator=generator).to(dtype) if zero_points else None
    return kernel.Weight4(kernel.pack(random_q(n, k), group), scales.to(dtype), zeros, group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", kernel.CASES)
def test_the_layer(case: tuple[int, int, int, int, bool], dtype: torch.dtype) -> None:
    m, n, k, group, zero_points = case
    x, weight = random_tensor(m, k, dtype=dtype), random_weight(n, k, group, zero_points, dtype)
    for bias in (None, random_tensor(n, dtype=dtype)):
        expected = x.double() @ kernel.dequantize(weight).double().T
        y = kernel.w4a16(x, weight, bias)
        assert y.dtype == dtype
        if m:
            assert_near(y, expected if bias is None else expected + bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_repeat_within_a_bucket_of_rows(dtype: torch.dtype) -> None:
    x, weight = random_tensor(140, 2048, dtype=dtype), random_weight(72, 2048, 128, True, dtype)
    for largest, fewer in ((16, (1, 7)), (140, (100,))):
        assert kernel._splits(kernel._tiles(90, largest, 128), largest, 72, 16) == 4
        several = kernel.w4a16(x[:largest], weight)
        for m in fewer:
            assert torch.equal(kernel.w4a16(x[:m], weight), several[:m])


def test_all_numbers_of_rows_in_a_bucket_split_k_alike() -> None:
    """Else float sums would differ between 100 and 200 rows."""
    for bucket in (range(1, 17), range(17, 65), range(65, 257)):
        assert len({kernel._splits(kernel._tiles(90, m, 128), m, 4096, 112) for m in bucket}) == 1


def test_scales_of_another_type_are_refused() -> None:
    weight = random_weight(8, 128, 128, True, torch.float16)
    with pytest.raises(ValueError, match="float16"):
        kernel.w4a16(random_tensor(1, 128, dtype=torch.bfloat16), weight)
    kernel.w4a16(random_tensor(1, 128, dtype=torch.bfloat16), weight.to(torch.bfloat16))


def test_another_number_of_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="columns"):
        kernel.w4a16(random_tensor(1, 160, dtype=torch.float16), random_weight(8, 128, 128, True, torch.float16))


def run_ptx(code: str, pairs: torch.Tensor) -> list[torch.Tensor]:
    """The registers $0 and $1 after the instructions of `code`; pairs: two bytes as int64, in $2."""
    registers = {"$2": pairs}

    def value(name: str) -> torch.Tensor | int:
        return registers[name] if name in registers else int(name, 0)

    def permuted(low: torch.Tensor | int, high: torch.Tensor | int, selector: int) -> torch.Tensor | int:
        eight = low | high << 32
        return sum((eight >> 8 * (selector >> 4 * at & 7) & 255) << 8 * at for at in range(4))

    def looked_up(
        a: torch.Tensor | int, b: torch.Tensor | int, c: torch.Tensor | int, table: int
    ) -> torch.Tensor | int:
        """lop3: bit i of the table is the result where (a, b, c) is i in binary."""
        made = 0
        for at in range(8):
            if table >> at & 1:
                made = made | (a if at & 4 else ~a) & (b if at & 2 else ~b) & (c if at & 1 else ~c)
        return made

    does = {
        "cvt.u32.u16": lambda a: a & 0xFFFF,
        "prmt.b32": permuted,
        "lop3.b32": looked_up,
        "shr.u32": lambda a, b: a >> b,
    }
    for operation, target, sources in re.findall(r"(\S+) (\S+), (.*);", code.split(".reg", 1)[1].split("\n", 1)[1]):
        registers[target] = does[operation](*map(value, sources.split(", "))) & 0xFFFFFFFF
    return [registers["$0"], registers["$1"]]


def floats_of(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n] words as int64 -> [n, 2] of two 16-bit floats."""
    return torch.stack([words & 0xFFFF, words >> 16], 1).to(torch.uint16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_bytes_become_the_weights_of_the_formula(dtype: torch.dtype) -> None:
    """The sm_90 kernel's PTX on every pair of bytes; then, in x's type, every q, every zero and random scales."""
    constants = kernel._unpacking(90, dtype, True)
    assert constants["IN_PAIRS"]
    pairs = torch.arange(1 << 16)
    low, high = (floats_of(made, dtype) for made in run_ptx(constants["ASM"], pairs | 0xABCD << 16))  # $2 has 16 bits
    read = torch.stack([pairs & 255, pairs >> 8], 1)
    check_weights(low, read & 15, constants["BIAS"])
    check_weights(high, read >> 4, constants["BIAS"])


def check_weights(floats: torch.Tensor, q: torch.Tensor, bias: int) -> None:
    dtype, scales = floats.dtype, random_tensor(64) * torch.logspace(-4, 2, 64)
    assert torch.equal(floats.float(), q + float(bias))
    # q + bias are sixteen floats: the rest is proven on them.
    floats, q = torch.arange(bias, bias + 16).to(dtype), torch.arange(16)
    for zero in torch.arange(17).to(dtype):
        difference = (floats.float() - (zero.float() + bias).to(dtype).float()).to(dtype)
        assert torch.equal(difference.float(), q - zero.float())
        for scale in scales.to(dtype):
            exact = (q - zero.double()) * scale.double()
            assert torch.equal((difference.float() * scale.float()).to(dtype), exact.to(dtype))


@pytest.mark.parametrize("architecture", kernel.TILES)
def test_other_architectures_read_four_bytes_at_once(architecture: int) -> None:
    for dtype in DTYPES:
        made = kernel._unpacking(architecture, dtype, True)
        assert made["IN_PAIRS"] == (architecture == 90)
        if made["IN_PAIRS"]:
            assert made["BIAS"] == kernel.MAGIC[dtype][1]
        else:  # tests/kernels/test_kv_format.py runs it
            assert (made["ASM"], made["BIAS"]) == unpacking(dtype, 4, True)


@pytest.mark.parametrize("group", kernel.GROUPS)
def test_bytes_hold_the_halves_of_a_group(group: int) -> None:
    q = random_q(5, 3 * group)
    packed = kernel.pack(q, group)
    assert packed.shape == (5, 3 * group // 2)
    assert packed[2, group // 2 + 3] == q[2, group + 3] + 16 * q[2, group + group // 2 + 3]
    assert torch.equal(kernel.unpack(packed, group), q)


@pytest.mark.parametrize("zero_points", [True, False])
@pytest.mark.parametrize("group", kernel.GROUPS)
def test_rounding_is_to_nearest(group: int, zero_points: bool) -> None:
    w = random_tensor(6, 2 * group)
    w[3, :group] = 0
    weight = kernel.quantize(w, group, zero_points)
    error = (kernel.dequantize(weight) - w).abs().unflatten(1, (-1, group)).amax(2)
    # Half a step; the scale's and the zero's own rounding move the outermost values by at most as much again.
    assert (error <= 1.01 * weight.scales.float().T + 1e-9).all()
    median = (kernel.dequantize(weight) - w).abs().unflatten(1, (-1, group)).median(2).values
    assert (median <= 0.5 * weight.scales.float().T).all()
    assert not kernel.dequantize(weight)[3, :group].any()
    assert (kernel.dequantize(weight) - w).norm() / w.norm() < 0.13
