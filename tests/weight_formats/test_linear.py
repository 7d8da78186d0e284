"""The linear layers against y = x W^T + bias in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.layers import linear
from backend.layers.linear import (
    DenseLinear,
    Linear,
    OneDnnLinear,
    QuantizedLinear,
    QuantizedWeight,
    make_torch_linear,
    onednn_packs,
)
from kernels.common.quantize import ELEMENTS_AT_ONCE, quantize_activations, quantize_weight

SHAPES = [(1, 1), (7, 5), (131, 48), (60, 100), (33, 257), (256, 256)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative to 1 + |expected|
needs_packing = pytest.mark.skipif(not onednn_packs(), reason="torch has no packed bfloat16 linear on this machine")


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def random_weight(n: int, k: int) -> Tensor:
    """Its products with random values are near 1."""
    return random_tensor(n, k) / k**0.5


def quantized(w: Tensor, group: int, format: str = "int8") -> QuantizedWeight:
    return QuantizedWeight(*quantize_weight(w, group), group, format)


def assert_near(measured: Tensor, expected: Tensor) -> None:
    assert measured.shape == expected.shape
    if measured.numel():
        error = ((measured.double() - expected).abs() / (1 + expected.abs())).max().item()
        assert error <= TOLERANCE[measured.dtype], f"error {error:.1e}"


def exact(weight: QuantizedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """The exact product: in integers within a group, in float64 across groups."""
    q, scale, group, format, *_ = weight
    values, x_scale = (x.double(), None) if format == "int8" else quantize_activations(x, group)
    out = torch.zeros(x.shape[0], q.shape[0], dtype=torch.float64) + (0 if bias is None else bias.double())
    for index, columns in enumerate(torch.arange(q.shape[1]).split(group)):
        part = values[:, columns].double() @ q[:, columns].double().T * scale[:, index].double()
        out += part if x_scale is None else part * x_scale[:, index, None].double()
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("n, k", SHAPES)
def test_a_float_layer_multiplies_and_adds_its_bias(n: int, k: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = random_weight(n, k).to(dtype), random_tensor(n, dtype=dtype) if has_bias else None
    layer = make_torch_linear(weight, bias)
    assert layer.shape == (n, k)
    assert layer.num_bytes == (n * k + n * has_bias) * dtype.itemsize
    for tokens in (0, 1, 2, 17, 64):
        x = random_tensor(tokens, k, dtype=dtype)
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert layer(x).dtype == dtype
        assert_near(layer(x), expected)
        assert_near(layer(x.t().contiguous().t()), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("format", ["int8", "w8a8"])
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("n, k", SHAPES)
def test_a_quantised_layer_equals_integer_sums_times_scales(
    n: int, k: int, group: int | None, format: str, dtype: torch.dtype
) -> None:
    weight = quantized(random_weight(n, k), group or k, format)
    bias = random_tensor(n, dtype=dtype) if n % 2 else None
    layer = make_torch_linear(weight, bias)
    assert layer.shape == (n, k)
    scales = -(-k // (group or k))
    assert layer.num_bytes == n * (k + 4 * scales) + (0 if bias is None else n * dtype.itemsize)
    for tokens in (0, 1, 5):
        x = random_tensor(tokens, k, dtype=dtype)
        assert layer(x).dtype == dtype
        assert_near(layer(x), exact(weight, x, bias))


def test_a_weight_of_many_slices_is_multiplied_whole() -> None:
    weight, x, bias = quantized(random_weight(2200, 1024), 64), random_tensor(3, 1024), random_tensor(2200)
    assert weight.q.numel() > 2 * ELEMENTS_AT_ONCE
    assert_near(make_torch_linear(weight, bias)(x), exact(weight, x, bias))


def test_a_checkpoint_s_own_minus_128_is_taken_as_it_is() -> None:
    weight = QuantizedWeight(torch.tensor([[-128, 127]], dtype=torch.int8), torch.tensor([[0.5]]), 2, "int8")
    assert QuantizedLinear(weight, None)(torch.tensor([[1.0, 1.0]])).item() == -0.5


@needs_packing
def test_bfloat16_on_a_cpu_is_packed_and_other_floats_are_not() -> None:
    kinds = {dtype: type(make_torch_linear(random_tensor(8, 8, dtype=dtype), None)) for dtype in TOLERANCE}
    assert kinds == {torch.bfloat16: OneDnnLinear, torch.float32: DenseLinear, torch.float16: DenseLinear}


@needs_packing
def test_a_packed_layer_does_not_keep_the_weight_it_was_given() -> None:
    weight = random_tensor(256, 256, dtype=torch.bfloat16)
    layer, x = OneDnnLinear(weight, None), random_tensor(3, 256, dtype=torch.bfloat16)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)


def test_a_dense_layer_shares_the_weight_it_was_given() -> None:
    weight, x = random_tensor(4, 6), random_tensor(2, 6)
    layer = make_torch_linear(weight, None)
    weight.zero_()
    assert layer(x).abs().sum() == 0


class Missing:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")


class Changed:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        raise RuntimeError("mkldnn::_reorder_linear_weight() is missing value for argument 'format'")


class Wrong(DenseLinear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 1.05


@pytest.mark.parametrize("operator", [Missing, Changed, Wrong])
def test_where_the_private_operators_are_missing_changed_or_wrong_the_public_one_is_used(
    monkeypatch: pytest.MonkeyPatch, operator: type[Linear]
) -> None:
    monkeypatch.setattr(linear, "OneDnnLinear", operator)
    onednn_packs.cache_clear()
    try:
        layer: Linear = make_torch_linear(random_tensor(8, 8, dtype=torch.bfloat16), None)
        assert type(layer) is DenseLinear
    finally:
        onednn_packs.cache_clear()
