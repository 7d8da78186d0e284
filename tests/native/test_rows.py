"""The kernels between the products: norms, activation functions, quantisation of activations."""

from __future__ import annotations

import random
from collections.abc import Callable
from ctypes import CDLL, byref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import norm
from kernels.common import quantize
from kernels.common.kv_format import quantize_rows
from kernels.common.kv_rotation import rotated_key, rotated_query
from kernels.cpu.structs import ACTIVATIONS, NORMS, NormStruct

ROUNDING = 1e-6  # relative to 1 + |expected|


def widths(seed: int, count: int = 30) -> list[tuple[int, int]]:
    """Returns (rows, columns)."""
    rng = random.Random(seed)
    return [(1, 1), (2, 16), (3, 15), (1, 17)] + [(rng.randint(1, 9), rng.randint(1, 700)) for _ in range(count)]


def random_tensor(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng)


def assert_near(measured: Tensor, expected: Tensor, case: object) -> None:
    error = ((measured.double() - expected).abs() / (1 + expected.abs())).max()
    assert error <= ROUNDING, f"{case}: {error:.1e}"


def normed(kernels: CDLL, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    of = NormStruct(weight.data_ptr(), None if bias is None else bias.data_ptr())
    kernels.everbatch_norm(NORMS[kind], x.data_ptr(), byref(of), *x.shape, 1e-3, out.data_ptr())


def exact_norm(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return norm.reference(x.double(), weight.double(), 1e-3, None if bias is None else bias.double(), kind == "layer")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_those_of_torch(kernels: CDLL, kind: str, has_bias: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    for rows, n in widths(1):
        x, weight = random_tensor(rng, rows, n) * 3 + 1, random_tensor(rng, n)
        bias, out = random_tensor(rng, n) if has_bias else None, torch.empty(rows, n)
        normed(kernels, kind, x, weight, bias, out)
        assert_near(out, exact_norm(kind, x, weight, bias), (rows, n))


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_may_write_to_its_input(kernels: CDLL, kind: str) -> None:
    rng = torch.Generator().manual_seed(2)
    x, weight, bias = random_tensor(rng, 3, 77), random_tensor(rng, 77), random_tensor(rng, 77)
    expected = exact_norm(kind, x, weight, bias)
    normed(kernels, kind, x, weight, bias, x)
    assert_near(x, expected, "in place")


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def activate(kernels: CDLL, kind: str, inputs: Tensor, is_gated: bool) -> Tensor:
    rows, width = inputs.shape
    out = torch.empty(rows, width // 2 if is_gated else width)
    kernels.everbatch_activate(ACTIVATIONS[kind], is_gated, inputs.data_ptr(), *out.shape, out.data_ptr())
    return out


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_activations_are_those_of_torch(kernels: CDLL, kind: str, is_gated: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    for rows, n in widths(3):
        x = random_tensor(rng, rows, 2 * n) * 5
        gate, up = x.double().split(n, 1) if is_gated else (x.double(), 1)
        assert_near(activate(kernels, kind, x, is_gated), FUNCTIONS[kind](gate) * up, (rows, n))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_an_activation_has_the_same_bits_in_whole_vectors_and_behind_them(kernels: CDLL, kind: str) -> None:
    x = random_tensor(torch.Generator().manual_seed(5), 1, 64) * 4
    whole = activate(kernels, kind, x, False)
    for n in range(1, 64):
        assert torch.equal(activate(kernels, kind, x[:, 64 - n :].contiguous(), False), whole[:, 64 - n :]), n


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_activations_neither_overflow_nor_make_nan_of_large_numbers(kernels: CDLL, kind: str) -> None:
    gate = torch.tensor([-3e38, -1e4, -100.0, -88.0, -87.0, -0.0, 0.0, 1e-30, 87.0, 100.0, 1e4, 3e38])
    for n in (len(gate), 2 * len(gate)):  # the tail of a row goes another way than its whole vectors
        gates = gate.repeat(n // len(gate))
        out = activate(kernels, kind, torch.cat((gates, torch.ones(n)))[None], True)
        assert_near(out[0], FUNCTIONS[kind](gates.double()), n)


def quantised(kernels: CDLL, x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [rows, k], k a multiple of group -> (q [rows, k], scale [rows, k / group])."""
    q, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0], x.shape[1] // group)
    kernels.everbatch_quantize(x.data_ptr(), x.numel(), group, q.data_ptr(), scale.data_ptr())
    return q, scale


@pytest.mark.parametrize("group", [32, 64, 128, 192, 704])
def test_activations_are_quantised_as_the_reference_does(kernels: CDLL, group: int) -> None:
    """Halves may be rounded in either direction: the kernel multiplies by the scale's inverse, the reference divides."""
    rng = torch.Generator().manual_seed(4)
    for rows in range(1, 20):
        x = random_tensor(rng, rows, group * (1 + rows % 3)) * 10.0 ** (rows % 7 - 3)
        q, scale = quantised(kernels, x, group)
        expected_q, expected_scale = quantize.quantize_activations(x, group)
        assert torch.equal(scale, expected_scale)
        exact = x.double().view(rows, -1, group) / expected_scale.double()[:, :, None]
        is_half = ((exact - exact.floor() - 0.5).abs() < 1e-4).flatten(1)
        assert torch.equal(q[~is_half], expected_q[~is_half])
        assert ((q.int() - expected_q.int()).abs() <= 1).all()


def test_a_group_of_zeros_has_scale_zero_and_tiny_values_stay_tiny(kernels: CDLL) -> None:
    x = torch.zeros(2, 64)
    x[1, :32] = 1e-38 * torch.arange(-16, 16)
    q, scale = quantised(kernels, x, 32)
    assert scale[0].tolist() == [0, 0] and scale[1, 1] == 0
    assert not q[0].any() and not q[1, 32:].any()
    assert (q.double() * scale.double().repeat_interleave(32, 1)).abs().max() <= 1.01 * x.abs().max()


def test_heads_are_rotated_with_the_bits_of_the_reference(kernels: CDLL) -> None:
    rng = torch.Generator().manual_seed(6)
    for columns in (1, 2, 6, 7, 8, 20, 32, 64, 80, 96, 128, 160, 256, 1024):
        x = random_tensor(rng, 9, columns) * 10 ** torch.linspace(-6, 6, 9)[:, None]
        for are_keys, expected in ((False, rotated_query(x)), (True, rotated_key(x))):
            found = x.clone()
            kernels.everbatch_rotate_heads(found.data_ptr(), *x.shape, are_keys)
            assert torch.equal(found, expected), f"{columns} columns"


@pytest.mark.feature("003-72")
def test_int4_kv_is_rounded_as_on_every_tier(kernels: CDLL) -> None:
    """Bit for bit: rows of any width, constant ones, ones too far apart for float16, and numbers that lie halfway."""
    rng = torch.Generator().manual_seed(4)
    for columns in (1, 6, 20, 64, 80, 128, 1024):
        x = random_tensor(rng, 40, columns) * 10 ** torch.linspace(-6, 5, 40)[:, None]
        x[3], x[4], x[5] = 0.0, 1.2345, -7e4
        x[6] = torch.arange(columns) % 31 / 2  # scale 1: every second number lies between two
        expected = quantize_rows(x, 4)
        q, parameters = torch.empty(40, columns, dtype=torch.uint8), torch.empty(40, 2, dtype=torch.float16)
        kernels.everbatch_quantize_int4(x.data_ptr(), 40, columns, q.data_ptr(), parameters.data_ptr())
        for measured, wanted in zip((q, parameters[:, 0], parameters[:, 1]), expected, strict=True):
            assert torch.equal(measured, wanted), f"{columns} columns"
