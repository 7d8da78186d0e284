"""A part of a weight, in every form: the same numbers as that part of the whole weight, without any rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.api import ConfigError
from backend.architectures.shards import Cut
from backend.layers.linear import QuantizedWeight, Weight, in_eight_bits
from backend.models.cut import cut_adapter, cut_bias, cut_weight
from kernels.common.adapter import Part
from kernels.common.quantize import dequantize, quantize_weight
from kernels.common.super_blocks import FORMS, SuperBlocks, floats
from kernels.w4a8 import Weight4A8
from kernels.w4a16 import Weight4
from tests.native.test_super_blocks import random_weight

N, K = 48, 512
ROWS = ((3, 17), (32, 40))
CUTS = [Cut(ROWS), Cut(((0, N),), (256, 512)), Cut(ROWS, (0, 256))]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def two_levels(has_groups: bool) -> Weight4A8:
    groups = K // 128
    return Weight4A8(
        integers(0, 256, N, K // 2),
        random(N).abs(),
        integers(1, 17, groups, N, dtype=torch.int8) if has_groups else None,
        integers(0, 16, groups if has_groups else 1, N),
    )


WEIGHTS: dict[str, Weight] = {
    "floats": random(N, K).bfloat16(),
    "int8": QuantizedWeight(*quantize_weight(random(N, K), 32), 32, "int8"),
    "int8 by rows": QuantizedWeight(*quantize_weight(random(N, K), K), K, "w8a8"),
    "4 bits": Weight4(integers(0, 256, N, K // 2), random(K // 64, N), integers(0, 16, K // 64, N).float(), 64),
    "4 bits without zeros": Weight4(integers(0, 256, N, K // 2), random(K // 128, N), None, 128),
    "two levels": two_levels(True),
    "4 bits by channels": two_levels(False),
    **{kind: random_weight(kind, N, K) for kind in FORMS},
}


def values(weight: Weight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.float()
    if isinstance(weight, SuperBlocks):
        return floats(weight)
    weight = weight if isinstance(weight, QuantizedWeight) else in_eight_bits(weight)
    return dequantize(weight.q, weight.scale, weight.group)


@pytest.mark.feature("003-66")
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("cut", CUTS, ids=["rows", "columns", "both"])
def test_a_part_has_the_numbers_of_the_whole(name: str, cut: Cut) -> None:
    whole, part = values(WEIGHTS[name]), values(cut_weight(WEIGHTS[name], cut, "layer"))
    rows = torch.cat([whole[first:end] for first, end in cut.rows])
    assert torch.equal(part, rows if cut.columns is None else rows[:, slice(*cut.columns)])


@pytest.mark.parametrize("name, columns", [("int8", 16), ("4 bits", 32), ("two levels", 64), ("Q4_K", 128)])
def test_a_cut_through_a_group_is_refused_with_both_sizes(name: str, columns: int) -> None:
    group = {"int8": 32, "4 bits": 64, "two levels": 128, "Q4_K": 256}[name]
    with pytest.raises(ConfigError, match=f"down_proj would be cut into parts of {columns} columns.* each {group};"):
        cut_weight(WEIGHTS[name], Cut(((0, N),), (0, columns)), "down_proj")


def test_one_rank_alone_adds_the_bias_of_sums() -> None:
    bias = random(N)
    assert torch.equal(cut_bias(bias, Cut(ROWS)), torch.cat((bias[3:17], bias[32:40])))
    assert cut_bias(bias, Cut(((0, N),), (0, 256), has_bias=False)) is None


def test_the_parts_of_an_adapter_add_what_the_whole_adds() -> None:
    x = random(5, K)
    fused = [Part(0, random(4, K), random(20, 4), 0.5), Part(20, random(2, K), random(28, 2), 2.0)]
    whole = [{"qkv": fused, "down": [Part(0, random(3, K), random(N, 3), 1.5)]}]
    (layer,) = cut_adapter(whole, {"qkv": Cut(ROWS), "down": Cut(((0, N),), (256, 512))})
    rows = torch.cat([added(fused, x, N)[:, first:end] for first, end in ROWS], 1)
    assert torch.allclose(added(layer["qkv"], x, 22), rows, rtol=1e-4, atol=1e-3)
    (other,) = cut_adapter(whole, {"qkv": Cut(ROWS), "down": Cut(((0, N),), (0, 256))})
    halves = added(layer["down"], x[:, 256:], N) + added(other["down"], x[:, :256], N)
    assert torch.allclose(halves, added(whole[0]["down"], x, N), rtol=1e-4, atol=1e-3)


def added(parts: list[Part], x: Tensor, n: int) -> Tensor:
    out = torch.zeros(len(x), n)
    for part in parts:
        out[:, part.first : part.first + len(part.b)] += part.scale * (x @ part.a.T @ part.b.T)
    return out
