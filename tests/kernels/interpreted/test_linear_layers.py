"""The linear layers of a GPU against those of torch: the same weights in every form that they are held in."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from backend.layers.device_linear import W4A8Linear, W4A16Linear, W8A8Linear, make_triton_linear
from backend.layers.linear import DenseLinear, QuantizedLinear, QuantizedWeight, Weight, make_torch_linear
from kernels import int8_rows, w4a8, w4a16, w8a8
from kernels.common.quantize import quantize_weight
from tests.kernels.numbers import DTYPES, assert_near, random_tensor

N, K = 72, 256
SIXTEEN = [torch.float16, torch.bfloat16]


def weight_of(form: str, dtype: torch.dtype) -> Weight:
    w = random_tensor(N, K) / K**0.5
    if form == "floats":
        return w.to(dtype)
    if form.startswith("w4a16"):
        return w4a16.quantize(w, 64, form == "w4a16-zeros", torch.float16 if dtype == torch.float32 else dtype)
    if form.startswith("w4a8"):
        return w4a8.quantize(w, form == "w4a8-groups")
    group = 64 if form.endswith("-groups") else K
    return QuantizedWeight(*quantize_weight(w, group), group, form.removesuffix("-groups"))


FORMS = {
    "floats": DenseLinear,
    "w8a8": W8A8Linear,
    "w8a8-groups": QuantizedLinear,
    "int8": QuantizedLinear,
    "w4a16": W4A16Linear,
    "w4a16-zeros": W4A16Linear,
    "w4a8": W4A8Linear,
    "w4a8-groups": W4A8Linear,
}
TAKING_INT8 = [form for form, kind in FORMS.items() if kind in (W8A8Linear, W4A8Linear)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_that_of_torch_in_every_form(form: str, dtype: torch.dtype) -> None:
    weight = weight_of(form, dtype)
    x = random_tensor(5, K, dtype=dtype)
    for bias in (None, random_tensor(N, dtype=dtype)):
        layer, expected = make_triton_linear(dtype)(weight, bias), make_torch_linear(weight, bias)
        is_slow = form.startswith("w4a16") and dtype == torch.float32
        assert type(layer) is (QuantizedLinear if is_slow else FORMS[form])
        assert layer.takes_int8 == (form in TAKING_INT8) and not expected.takes_int8
        assert layer.shape == expected.shape == (N, K)
        y = layer(x)
        assert y.dtype == dtype
        seen = x.float()
        if form in TAKING_INT8:
            rows = int8_rows.reference(x)
            seen = rows.q * rows.scale[:, None]  # torch's layer quantises these to the same integers
        held = weight.float() if form == "floats" else weight
        assert_near(y, make_torch_linear(held, None if bias is None else bias.float())(seen))


@pytest.mark.parametrize("form", TAKING_INT8)
def test_rows_in_int8_give_what_the_floats_they_were_made_of_give(form: str) -> None:
    layer = make_triton_linear(torch.float16)(weight_of(form, torch.float16), None)
    x = random_tensor(5, K, dtype=torch.float16)
    rows = w8a8.quantize(x)
    y = layer(rows)
    assert y.dtype == torch.float16 and torch.equal(y, layer(x))
    assert layer(x[:0]).shape == (0, N)


@pytest.mark.parametrize("form", [form for form, kind in FORMS.items() if kind is not QuantizedLinear])
def test_bytes_are_those_of_the_tensors_held(form: str) -> None:
    weight, bias = weight_of(form, torch.float16), random_tensor(N, dtype=torch.float16)
    held = [weight] if isinstance(weight, Tensor) else [part for part in weight if isinstance(part, Tensor)]
    layer = make_triton_linear(torch.float16)(weight, bias)
    assert layer.num_bytes == sum(part.nbytes for part in (*held, bias))


def test_what_has_no_kernel_and_what_is_rounded_is_said_once_a_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "everbatch.layers"):
        make = make_triton_linear(torch.bfloat16)
        for form in ("int8", "w8a8-groups", "int8"):
            make(weight_of(form, torch.bfloat16), None)
        assert [line for line in caplog.messages if "have no GPU kernel and are slow" in line] == caplog.messages
        assert len(caplog.messages) == 1
        caplog.clear()
        for dtype in (torch.bfloat16, torch.float16, torch.float16):
            make(weight_of("w4a16", dtype), None)
        assert len(caplog.messages) == 1
        assert "scales of torch.float16 are rounded to torch.bfloat16, by up to 0.003" in caplog.messages[0]
        caplog.clear()
        make_triton_linear(torch.float32)(weight_of("w4a16", torch.float32), None)
        assert "4-bit weights in float32 have no GPU kernel" in caplog.messages[0]


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_a_4_bit_layer_takes_scales_of_another_type(dtype: torch.dtype) -> None:
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    weight, x = weight_of("w4a16-zeros", other), random_tensor(3, K, dtype=dtype)
    exact = x.double() @ w4a16.dequantize(weight).double().T
    assert_near(make_triton_linear(dtype)(weight, None)(x), exact)
