"""Zero points of four bits: every value that a format can store, and numbers of rows that fill no whole word."""

from __future__ import annotations

import pytest
import torch

from backend.models.config import parse_quantization
from backend.models.quantized import QuantizedLayers, nibbles
from backend.models.tensors import TensorSource
from kernels import w4a16
from tests.weight_formats.four_bits import Layout, Numbers, awq, compressed, gptq

GROUP = 32
LAYOUTS = {
    "awq": awq(GROUP),
    "gptq": gptq(GROUP),
    "gptq_v2": gptq(GROUP, version=2),
    "compressed-tensors": compressed(GROUP, False),
}


def reader(layout: Layout) -> QuantizedLayers:
    layers, _ = parse_quantization({"quantization_config": layout.section})
    assert layers is not None
    return layers


def every_zero(n: int, groups: int) -> Numbers:
    """Zero points 0 to 15, of which no two neighbours, in rows or groups, are alike; the weights' numbers differ too."""
    rows, columns = torch.arange(n)[:, None], torch.arange(groups)
    zeros = ((rows + 5 * columns) % 16).to(torch.uint8)
    q = ((3 * rows + torch.arange(groups * GROUP)) % 16).to(torch.uint8)
    return Numbers(q, zeros, 1.0 + rows + n * columns)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("n", [16, 24])
def test_every_zero_point_belongs_to_its_row_and_group(layout: Layout, n: int) -> None:
    numbers = every_zero(n, groups=3)
    tensors = {name: tensor.contiguous() for name, tensor in layout.write("layer", numbers).items()}
    weight = reader(layout).take(TensorSource(tensors, torch.float32, torch.device("cpu")), "layer", n, 3 * GROUP)
    assert isinstance(weight, w4a16.Weight4) and weight.zeros is not None
    assert torch.equal(weight.zeros.T.to(torch.uint8), numbers.zero)
    assert torch.equal(weight.scales.T.float(), numbers.scale)
    assert torch.equal(w4a16.unpack(weight.packed, weight.group), numbers.q)


def test_the_zero_point_0_of_gptq_s_version_1_is_stored_as_15() -> None:
    """It stores a zero point less one in four bits, so this one wraps."""
    stored = gptq(GROUP).write("layer", every_zero(16, groups=1))["layer.qzeros"]
    assert nibbles(stored).flatten().tolist() == [15, *range(15)]


@pytest.mark.parametrize("n", [9, 20])
def test_rows_that_fill_no_whole_word_are_read_without_the_padding(n: int) -> None:
    layout = LAYOUTS["compressed-tensors"]
    numbers = every_zero(n, groups=2)
    tensors = {name: tensor.contiguous() for name, tensor in layout.write("layer", numbers).items()}
    weight = reader(layout).take(TensorSource(tensors, torch.float32, torch.device("cpu")), "layer", n, 2 * GROUP)
    assert torch.equal(weight.zeros.T.to(torch.uint8), numbers.zero)
