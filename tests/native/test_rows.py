"""The kernels between the products: norms, the activation function, quantisation of activations."""

from __future__ import annotations

import random
from ctypes import CDLL

import pytest
import torch
from torch import Tensor

from kernels import activation, norm
from kernels.common import quantize
from kernels.common.kv_format import quantize_rows

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


def test_rms_norm_is_that_of_torch(kernels: CDLL) -> None:
    rng = torch.Generator().manual_seed(1)
    for rows, n in widths(1):
        x, weight, out = random_tensor(rng, rows, n) * 3, random_tensor(rng, n), torch.empty(rows, n)
        kernels.everbatch_rms_norm(x.data_ptr(), weight.data_ptr(), rows, n, 1e-3, out.data_ptr())
        assert_near(out, norm.reference(x.double(), weight.double(), 1e-3), (rows, n))


def test_rms_norm_may_write_to_its_input(kernels: CDLL) -> None:
    rng = torch.Generator().manual_seed(2)
    x, weight = random_tensor(rng, 3, 77), random_tensor(rng, 77)
    expected = norm.reference(x.double(), weight.double(), 1e-3)
    kernels.everbatch_rms_norm(x.data_ptr(), weight.data_ptr(), 3, 77, 1e-3, x.data_ptr())
    assert_near(x, expected, "in place")


def test_silu_mul_is_that_of_torch(kernels: CDLL) -> None:
    rng = torch.Generator().manual_seed(3)
    for rows, n in widths(3):
        x, out = random_tensor(rng, rows, 2 * n) * 5, torch.empty(rows, n)
        kernels.everbatch_silu_mul(x.data_ptr(), rows, n, out.data_ptr())
        assert_near(out, activation.reference(x.double()), (rows, n))


def test_silu_neither_overflows_nor_makes_nan_of_large_numbers(kernels: CDLL) -> None:
    gate = torch.tensor([-3e38, -1e4, -100.0, -88.0, -87.0, -0.0, 0.0, 1e-30, 87.0, 100.0, 1e4, 3e38])
    for n in (len(gate), 2 * len(gate)):  # the tail of a row goes another way than its whole vectors
        gates, out = gate.repeat(n // len(gate)), torch.empty(n)
        gate_up = torch.cat((gates, torch.ones(n)))
        kernels.everbatch_silu_mul(gate_up.data_ptr(), 1, n, out.data_ptr())
        assert_near(out, torch.nn.functional.silu(gates.double()), n)


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
