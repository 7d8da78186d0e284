"""Weights for inputs that are rotated: kernels/common/rotation.py, and the layers made of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.layers.linear import QuantizedLinear, QuantizedWeight, make_torch_linear
from backend.models.linears import WHOLE_ROW, LinearOptions, make_linear
from kernels.common import rotation
from kernels.common.quantize import DEFAULT_GROUPS, dequantize, quantize_activations, quantize_weight

GROUPS = {
    64: 64,
    128: 128,
    192: 192,
    256: 256,
    448: 64,
    576: 192,
    640: 320,
    896: 448,
    1152: 384,
    3328: 256,
    4096: 512,
    11008: 256,
}


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def hadamard(columns: int) -> Tensor:
    """Sylvester's matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < columns:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize("columns", GROUPS)
def test_groups_divide_the_columns_and_span_few_blocks(columns: int) -> None:
    group, block = rotation.group_of(columns), rotation.block_of(columns)
    assert group == GROUPS[columns]
    assert columns % group == columns % block == group % 64 == 0 and group <= 4 * block


@pytest.mark.parametrize("columns", [1, 32, 96, 100, 1120 + 8])
def test_columns_that_are_no_multiple_of_64_are_not_rotated(columns: int) -> None:
    assert rotation.group_of(columns) is None
    layer = make_linear(random_tensor(5, columns), None, LinearOptions("w8a8"))
    assert isinstance(layer, QuantizedLinear)
    assert layer._weight.group == DEFAULT_GROUPS["w8a8"] and not layer._weight.is_rotated


@pytest.mark.parametrize("group", [WHOLE_ROW, 64])
def test_who_names_a_group_gets_no_rotation(group: int) -> None:
    layer = make_linear(random_tensor(5, 128), None, LinearOptions("w8a8", group))
    assert isinstance(layer, QuantizedLinear) and not layer._weight.is_rotated


@pytest.mark.parametrize("columns", [64, 192, 256, 640])
def test_a_rotation_is_a_product_with_hadamards_matrix(columns: int) -> None:
    x, block = random_tensor(5, columns), rotation.block_of(columns)
    expected = (x.unflatten(1, (-1, block)).double() @ hadamard(block).double()).flatten(1)
    assert (rotation.rotate(x) - expected).abs().max() < 1e-4
    assert rotation.rotate(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("columns", [64, 192, 640])
def test_a_layer_is_the_product_of_what_rotated_numbers_stand_for(columns: int) -> None:
    x, w, bias = random_tensor(9, columns), random_tensor(33, columns), random_tensor(33)
    group = rotation.group_of(columns)
    assert group is not None
    q, scale = rotation.round_weight(w, group)
    layer = make_torch_linear(QuantizedWeight(q, scale, group, "w8a8", True), bias)
    values = dequantize(*quantize_activations(rotation.rotate(x), group), group).double()
    weight = dequantize(q, scale, group).double()
    expected, magnitude = values @ weight.T + bias, values.abs() @ weight.abs().T + bias.abs()
    assert ((layer(x) - expected).abs() <= 1e-6 * magnitude).all()
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    exact = x @ w.T + bias
    assert (layer(x) - exact).norm() < 0.015 * exact.norm()


def test_a_value_far_from_the_others_costs_them_less_than_in_a_group_of_32() -> None:
    """One column of the input is a hundred times as large as the others."""
    x, w = random_tensor(20, 512), random_tensor(40, 512)
    x[:, 5] *= 100
    w[:, 5] = 0  # what the others yield is all that there is
    expected = x @ w.T
    q, scale = quantize_weight(w, 32)
    error = {
        "rotated": (make_linear(w, None, LinearOptions("w8a8"))(x) - expected).norm(),
        "groups of 32": (make_torch_linear(QuantizedWeight(q, scale, 32, "w8a8"), None)(x) - expected).norm(),
    }
    assert error["rotated"] < error["groups of 32"]
