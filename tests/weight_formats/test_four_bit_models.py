"""Whole models from checkpoints of 4-bit weights: the logits of the float model that has the same weights."""

from __future__ import annotations

import gc
import logging
import weakref
from ctypes import CDLL
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.layers.linear import DenseLinear, Linear, Weight, make_torch_linear
from backend.models.linears import LinearOptions
from backend.models.loader import load_directory
from backend.worker.native_tier import PackLinears
from benchmarks.quality.perplexity import row_logits
from kernels.common.quantize import dequantize, quantize_activations
from kernels.cpu.build import NativeUnavailable
from kernels.cpu.library import load_kernels
from tests.weight_formats.four_bits import IN_EIGHT_BITS, IN_SIXTEEN, LAYOUTS, Pair, compressed, write_pair

CPU = torch.device("cpu")
ROWS = torch.randint(131, (2, 33), generator=torch.Generator().manual_seed(0))
LIMIT = 1e-4  # absolute, on logits of magnitude 1 to 10
ODD = dict(attention_bias=True, mlp_bias=True)


def logits(directory: Path, **options: Any) -> Tensor:
    return row_logits(load_directory(directory, None, "float32", CPU, LinearOptions(**options)), ROWS)


@pytest.fixture(scope="module")
def library() -> CDLL:
    try:
        return load_kernels()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


class QuantizesActivations(DenseLinear):
    """A float layer behind activations that have been quantised, with one scale a row or for each `group` columns."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: int | None = None) -> None:
        super().__init__(weight, bias)
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        if self.shape[0] == 131:  # the output head is not quantised
            return super().__call__(x)
        group = self._group or x.shape[1]
        return super().__call__(dequantize(*quantize_activations(x, group), group))


def round_scales(pair: Pair, dtype: torch.dtype) -> None:
    """Rounds the scales in the float checkpoint."""
    path = pair.floats / "model.safetensors"
    weights = {name + ".weight": numbers.weight(dtype) for name, numbers in pair.numbers.items()}
    save_file(load_file(path) | weights, path, {"format": "pt"})


@pytest.mark.parametrize("layout", IN_SIXTEEN)
def test_the_torch_tier_has_the_logits_of_the_dequantised_weights(tmp_path: Path, layout: str) -> None:
    pair = write_pair(tmp_path, LAYOUTS[layout], **ODD)
    torch.testing.assert_close(logits(pair.quantised), logits(pair.floats), rtol=0, atol=LIMIT)


@pytest.mark.parametrize("family, overrides", [("qwen2", {}), ("qwen3", {}), ("llama3", {})])
def test_every_family_is_read(tmp_path: Path, family: str, overrides: dict[str, object]) -> None:
    pair = write_pair(tmp_path, LAYOUTS["gptq"], family, **overrides)
    torch.testing.assert_close(logits(pair.quantised), logits(pair.floats), rtol=0, atol=LIMIT)


@pytest.mark.parametrize("layout", IN_EIGHT_BITS)
def test_qoq_quantises_activations_by_row(tmp_path: Path, layout: str) -> None:
    pair = write_pair(tmp_path, LAYOUTS[layout], **ODD)
    measured, expected = logits(pair.quantised), logits(pair.floats, make=QuantizesActivations)
    assert (measured - logits(pair.floats)).abs().max() > 1e-2, "activations were not quantised"
    # A value half-way between two steps may round either way after a different order of addition.
    assert (measured - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_native_tier_holds_them_in_four_bits(tmp_path: Path, library: CDLL, layout: str) -> None:
    """With scales as bfloat16, and activations as int8 in groups of 32. Of a number half-way between two steps, see above."""
    pair = write_pair(tmp_path, LAYOUTS[layout], **ODD)
    round_scales(pair, torch.bfloat16)
    model = load_directory(pair.quantised, None, "float32", CPU, LinearOptions(make=PackLinears(library)))
    measured = row_logits(model, ROWS)
    expected = logits(pair.floats, make=partial(QuantizesActivations, group=32))
    assert (measured - expected).norm() < 0.01 * expected.norm()
    assert (measured - logits(pair.floats)).norm() > 0.001 * expected.norm(), "activations were not quantised"
    n, k = model.layers[0].mlp.down.shape
    assert model.layers[0].mlp.down.num_bytes < 0.7 * n * k, "a weight takes more than 5.5 bits"


@pytest.mark.parametrize("dtype, lines", [(torch.float16, 1), (torch.bfloat16, 0)])
def test_scales_that_the_native_tier_rounds_are_one_line_of_the_log(
    tmp_path: Path, library: CDLL, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, lines: int
) -> None:
    pair = write_pair(tmp_path, compressed(128, True, dtype))
    with caplog.at_level(logging.INFO, "everbatch.worker"):
        logits(pair.quantised, make=PackLinears(library))
    assert len([line for line in caplog.messages if "this checkpoint's are rounded" in line]) == lines


@pytest.mark.parametrize("layout", ["compressed-tensors", "awq", "gptq", "qoq-128"])
def test_a_weight_is_let_go_before_the_next_is_made(tmp_path: Path, layout: str) -> None:
    earlier: list[weakref.ref[Tensor]] = []

    def pack(weight: Weight, bias: Tensor | None) -> Linear:
        assert not [tensor for tensor in earlier if tensor() is not None], "an original outlived its packing"
        earlier.extend(weakref.ref(part) for part in weight if isinstance(part, Tensor))
        return make_torch_linear(weight, bias)

    logits(write_pair(tmp_path, LAYOUTS[layout], tie_word_embeddings=True).quantised, make=pack)
    assert len(earlier) >= 2 * 4 * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loaded_model_holds_nothing_of_its_file(tmp_path: Path, layout: str) -> None:
    pair = write_pair(tmp_path, LAYOUTS[layout])
    model = load_directory(pair.quantised, None, "float32", torch.device("cpu"))
    gc.collect()
    assert str(pair.quantised) not in Path("/proc/self/maps").read_text()
    assert model.num_linear_bytes
