"""PackedLinear against the same product in float64, over random shapes."""

from __future__ import annotations

import random
from ctypes import CDLL

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backend.api.errors import ConfigError
from backend.layers.linear import QuantizedWeight
from backend.worker.native_tier import PackLinears
from benchmarks.linear import FORMATS
from kernels.common import rotation
from kernels.common.quantize import dequantize, quantize_activations, quantize_weight
from kernels.cpu.isa import AMX_EMULATED
from kernels.cpu.linear import PackedLinear, RotateInBlocks
from kernels.cpu.structs import FLOAT16, FLOAT32, ROTATED
from tests.native.harness import threads

DTYPES = [torch.float32, torch.bfloat16]
GROUPS = [32, 64, 128, 96, None]  # columns that share a scale; None = one scale a row
SUM_ERROR = 1e-6  # error of a sum in float32, relative to the sum of its magnitudes
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}  # relative error of rounding the result


def shapes(seed: int, isa: str, count: int) -> list[tuple[int, int, int]]:
    """Returns (rows, n, k); few and small ones for the slow emulation."""
    rng = random.Random(seed)
    most = 100 if isa == AMX_EMULATED else 400
    edges = [(1, 1, 1), (33, 33, 65), (40, 32, 64), (12, 31, 257)]
    return edges + [(rng.randint(1, 40), rng.randint(1, most), rng.randint(1, 2 * most)) for _ in range(count)]


def random_tensor(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng)


def quantized(w: Tensor, group: int | None, format: str) -> QuantizedWeight:
    group = group or w.shape[1]
    q, scale = quantize_weight(w, group)
    q.view(-1)[:: max(1, q.numel() // 7)] = -128  # checkpoints of others hold it
    return QuantizedWeight(q, scale, group, format)


def regrouped(group: int | None, k: int) -> int:
    """What the native kernels make of a group: 32, or a multiple of 64."""
    if group is None or group >= k:
        return -(-k // 64) * 64
    return group if group == 32 or group % 64 == 0 else 32


def as_the_kernels_quantise(library: CDLL, x: Tensor, group: int) -> Tensor:
    """x [rows, k] float32 -> what stands for it in w8a8, float64; test_rows proves it near x."""
    padded = F.pad(x, (0, -x.shape[1] % group)).contiguous()
    q, scale = torch.empty(padded.shape, dtype=torch.int8), torch.empty(padded.numel() // group)
    library.everbatch_quantize(padded.data_ptr(), padded.numel(), group, q.data_ptr(), scale.data_ptr())
    values = q.double().view(-1, group) * scale.double()[:, None]
    return values.view(padded.shape)[:, : x.shape[1]]


def assert_product(measured: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, case: object) -> None:
    """x [rows, k], w [n, k] float64: the very values that are multiplied."""
    added = torch.zeros(w.shape[0]).double() if bias is None else bias.double()
    expected, magnitude = x @ w.T + added, x.abs() @ w.abs().T + added.abs()
    assert measured.shape == expected.shape
    excess = (measured.double() - expected).abs() - SUM_ERROR * magnitude - ROUNDING[measured.dtype] * expected.abs()
    assert excess.max() <= 1e-30, f"{case}: {excess.max():.1e} beyond what rounding explains"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_float_layer_is_a_product_and_a_bias(kernels: CDLL, isa: str, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    for rows, n, k in shapes(1, isa, 12):
        x, w = random_tensor(rng, rows, k).to(dtype), random_tensor(rng, n, k).to(dtype)
        bias = random_tensor(rng, n).to(dtype) if n % 2 else None
        layer = PackLinears(kernels)(w, bias)
        assert layer.shape == (n, k)
        assert_product(layer(x), x.double(), w.double(), bias, (rows, n, k))


def test_a_float32_weight_that_float16_holds_takes_half_the_memory_and_yields_the_same_bits(
    kernels: CDLL, isa: str
) -> None:
    """The bits of the same weight beside one, in a column of zeros, that float16 does not hold."""
    rng = torch.Generator().manual_seed(7)
    extremes = torch.tensor([0.0, -0.0, 2.0**-24, -(2.0**-15), 65504.0, -65504.0])
    for rows, n, k in shapes(7, isa, 6):
        x, w = random_tensor(rng, rows, k), random_tensor(rng, n, k).half().float()
        w.view(-1)[: len(extremes)] = extremes[: w.numel()]
        bias = random_tensor(rng, n) if n % 2 else None
        held = PackLinears(kernels)(w, bias)
        more = torch.cat([w, torch.full((1, k), 1e-9)])
        other = PackLinears(kernels)(more, None if bias is None else torch.cat([bias, torch.zeros(1)]))
        assert (held.struct.format, other.struct.format) == (FLOAT16, FLOAT32)
        assert torch.equal(held(x), other(x)[:, :n])
    panels = -(-n // 32) * 32 * (-(-k // 64) * 64)
    assert held.num_bytes == 2 * panels + (0 if bias is None else -(-n // 32) * 32 * 4)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 65520.0, 1 + 2.0**-11, 2.0**-25])
def test_a_weight_with_a_number_that_float16_does_not_hold_stays_float32(best_kernels: CDLL, value: float) -> None:
    w = torch.ones(40, 70)
    w[39, 69] = value
    layer = PackLinears(best_kernels)(w, None)
    assert layer.struct.format == FLOAT32
    assert layer(torch.ones(1, 70))[0, 39].isnan() == (value != value)


def test_a_layer_held_in_float16_takes_float32_only(best_kernels: CDLL) -> None:
    layer = PackLinears(best_kernels)(torch.ones(40, 70), None)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(TypeError, match="this layer takes torch.float32"):
            layer(torch.ones(1, 70, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_int8_weights_stand_for_the_numbers_that_they_were_made_of(
    kernels: CDLL, isa: str, group: int | None, dtype: torch.dtype
) -> None:
    """In bfloat16 a weight is rounded once more, to the bfloat16 that is multiplied."""
    rng = torch.Generator().manual_seed(2)
    for rows, n, k in shapes(2, isa, 5):
        x, weight = random_tensor(rng, rows, k).to(dtype), quantized(random_tensor(rng, n, k), group, "int8")
        bias = random_tensor(rng, n) if n % 2 else None
        w = dequantize(weight.q, weight.scale, weight.group).to(dtype)
        measured = PackLinears(kernels)(weight, bias)(x)
        assert_product(measured, x.double(), w.double(), bias, (rows, n, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_int8_activations_are_multiplied_in_integers(
    kernels: CDLL, isa: str, group: int | None, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(3)
    for rows, n, k in shapes(3, isa, 5):
        x, weight = random_tensor(rng, rows, k).to(dtype), quantized(random_tensor(rng, n, k), group, "w8a8")
        bias = random_tensor(rng, n) if n % 2 else None
        w = dequantize(weight.q, weight.scale, weight.group).double()
        values = as_the_kernels_quantise(kernels, x.float(), regrouped(group, k))
        measured = PackLinears(kernels)(weight, bias)(x)
        assert_product(measured, values, w, bias, (rows, n, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotated_layers_rotate_their_inputs(kernels: CDLL, isa: str, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(9)
    for rows, n, k in [(1, 33, 64), (5, 40, 192), (33, 70, 128)] + [(40, 100, 640)] * (isa != AMX_EMULATED):
        x, group = random_tensor(rng, rows, k).to(dtype), rotation.group_of(k)
        assert group is not None
        q, scale = rotation.round_weight(random_tensor(rng, n, k), group)
        bias = random_tensor(rng, n) if n % 2 else None
        values = as_the_kernels_quantise(kernels, rotation.rotate(x), group)
        measured = PackLinears(kernels)(QuantizedWeight(q, scale, group, "w8a8", True), bias)(x)
        assert_product(measured, values, dequantize(q, scale, group).double(), bias, (rows, n, k))


def test_the_native_rotation_has_the_bits_of_the_reference(kernels: CDLL) -> None:
    rng = torch.Generator().manual_seed(10)
    for rows, k in [(1, 64), (3, 128), (2, 192), (5, 256), (2, 640), (3, 1152), (1, 4096)]:
        x = random_tensor(rng, rows, k)
        assert torch.equal(RotateInBlocks(kernels)(x), rotation.rotate(x))


def test_a_rotated_layer_whose_groups_do_not_divide_its_columns_is_refused(best_kernels: CDLL) -> None:
    q = torch.zeros(4, 192, dtype=torch.int8)
    with pytest.raises(ValueError, match="groups of 128 of 192 columns cannot be rotated"):
        PackLinears(best_kernels)(QuantizedWeight(q, torch.ones(4, 2), 128, "w8a8", True), None)
    with pytest.raises(ValueError, match="there is no format"):
        PackedLinear.of_parts(best_kernels, (None,) * 5, 4, 192, ROTATED, 128)


@pytest.mark.parametrize("format", ["none", "int8", "w8a8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_rows_than_one_pass_takes(kernels: CDLL, isa: str, format: str, dtype: torch.dtype) -> None:
    """A pass over the weights serves up to 512 rows; a row's result is the same, bit for bit, in any of them."""
    rng = torch.Generator().manual_seed(4)
    n, k = (33, 70) if isa == AMX_EMULATED else (130, 600)
    x, w = random_tensor(rng, 1030, k).to(dtype), random_tensor(rng, n, k).to(dtype)
    layer = PackLinears(kernels)(w if format == "none" else quantized(w, 64, format), None)
    whole = layer(x)
    for part in (slice(0, 1), slice(1, 41), slice(500, 1013), slice(1013, 1030)):
        assert torch.equal(layer(x[part]), whole[part])
    for row in (0, 511, 512, 513, 1024, 1029):
        assert torch.equal(layer(x[row : row + 1])[0], whole[row])
    if format == "none":
        assert_product(whole, x.double(), w.double(), None, (n, k))


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.inputs == "int8"])
def test_a_row_has_the_same_bits_whether_vectors_or_tiles_multiply_it(kernels: CDLL, name: str) -> None:
    """Few rows are multiplied by vectors and more by tiles, where there are tiles; which, only the number of rows decides."""
    torch.manual_seed(8)
    x, layer = torch.randn(33, 256), PackLinears(kernels)(FORMATS[name].make(40, 256), None)
    alone = torch.cat([layer(x[row : row + 1]) for row in range(len(x))])
    for rows in (6, 7, 12, 13, 33):
        assert torch.equal(layer(x[:rows]), alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("format", ["none", "int8", "w8a8"])
def test_the_number_of_threads_changes_no_bit(best_kernels: CDLL, format: str) -> None:
    rng = torch.Generator().manual_seed(5)
    x, w = random_tensor(rng, 37, 300), random_tensor(rng, 500, 300)
    weight = w if format == "none" else quantized(w, 64, format)
    with threads(1):
        alone = PackLinears(best_kernels)(weight, None)(x)
    for count in (2, 3, 5):
        with threads(count):
            assert torch.equal(PackLinears(best_kernels)(weight, None)(x), alone)


@pytest.mark.parametrize("format", ["int8", "w8a8"])
def test_a_quantised_layer_is_near_the_float_one(best_kernels: CDLL, format: str) -> None:
    rng = torch.Generator().manual_seed(6)
    x, w = random_tensor(rng, 20, 500), random_tensor(rng, 90, 500)
    q, scale = quantize_weight(w, 64)
    expected = F.linear(x, w)
    measured = PackLinears(best_kernels)(QuantizedWeight(q, scale, 64, format), None)(x)
    reference_x = dequantize(*quantize_activations(x, 64), 64) if format == "w8a8" else x
    reference = F.linear(reference_x, dequantize(q, scale, 64))
    error, error_of_reference = ((part - expected).norm() / expected.norm() for part in (measured, reference))
    assert error < 1.02 * error_of_reference < 0.02


def test_no_rows_give_no_rows(best_kernels: CDLL) -> None:
    layer = PackLinears(best_kernels)(torch.randn(40, 70), None)
    assert layer(torch.empty(0, 70)).shape == (0, 40)
    assert layer(torch.randn(2, 3, 70)).shape == (2, 3, 40)


def test_an_input_of_another_kind_is_refused(best_kernels: CDLL) -> None:
    make = PackLinears(best_kernels)
    with pytest.raises(TypeError, match=r"x is torch.bfloat16, this layer takes torch.float32"):
        make(torch.randn(40, 70), None)(torch.randn(1, 70).bfloat16())
    with pytest.raises(TypeError, match="this layer takes torch.bfloat16"):
        make(torch.randn(40, 70).bfloat16(), None)(torch.randn(1, 70))
    with pytest.raises(TypeError, match="x is torch.float16, this layer takes torch.float32 or torch.bfloat16"):
        make(quantized(torch.randn(40, 70), 64, "int8"), None)(torch.randn(1, 70).half())
    with pytest.raises(ValueError, match="x has 71 columns, this layer takes 70"):
        make(torch.randn(40, 70), None)(torch.randn(1, 71))


def test_weights_that_cannot_be_packed_are_refused(best_kernels: CDLL) -> None:
    make = PackLinears(best_kernels)
    with pytest.raises(ConfigError, match="weights of torch.float16 .*model.dtype=bfloat16"):
        make(torch.randn(4, 4).half(), None)
    with pytest.raises(ConfigError, match="a scale for each 48 columns; .*model.kernels=torch"):
        make(quantized(torch.randn(4, 100), 48, "int8"), None)
