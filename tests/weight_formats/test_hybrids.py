"""Quantised checkpoints of models with recurrent layers: logits are those of the weights that the checkpoints stand for.

Their writers leave convolutions and the projections of decay and strength as floats; those of the query and its gate are in one
tensor, which is split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.api import ConfigError
from backend.layers.linear import QuantizedLinear
from backend.models.loader import load_directory
from benchmarks.quality.perplexity import row_logits
from tests.weight_formats.checkpoints import quantization_config
from tests.weight_formats.four_bits import IN_SIXTEEN, LAYOUTS, write_pair

CPU = torch.device("cpu")
ROWS = torch.randint(1, 131, (2, 40), generator=torch.Generator().manual_seed(0))
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": dict(num_hidden_layers=4, linear_value_head_dim=32, linear_num_value_heads=8, num_key_value_heads=2),
    "lfm2": dict(hidden_size=128, num_attention_heads=4, intermediate_size=256),
}


def logits(directory: Path) -> Tensor:
    return row_logits(load_directory(directory, None, "float32", CPU), ROWS).log_softmax(-1)


@pytest.mark.parametrize("layout", IN_SIXTEEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_weights_that_it_stands_for(tmp_path: Path, family: str, layout: str) -> None:
    pair = write_pair(tmp_path, LAYOUTS[layout], family, **FAMILIES[family])
    model = load_directory(pair.quantised, None, "float32", CPU)
    assert {type(layer.attention.out) for layer in model.layers} == {QuantizedLinear}
    torch.testing.assert_close(logits(pair.quantised), logits(pair.floats), rtol=0, atol=2e-4)


def test_eight_bits_in_rows_are_split_with_their_scales(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, LAYOUTS["awq"], "qwen3_5", **FAMILIES["qwen3_5"])
    floats = load_file(pair.floats / "model.safetensors")
    stored = dict(floats)
    for name in pair.numbers:
        weight = stored.pop(name + ".weight")
        scale = weight.abs().amax(1, keepdim=True) / 127
        stored[name + ".weight"], stored[name + ".weight_scale"] = (weight / scale).round().to(torch.int8), scale
        floats[name + ".weight"] = stored[name + ".weight"] * scale
    save_file(stored, pair.quantised / "model.safetensors")
    save_file(floats, pair.floats / "model.safetensors", {"format": "pt"})
    section = quantization_config("int-quantized")
    raw = json.loads((pair.floats / "config.json").read_text()) | {"quantization_config": section}
    (pair.quantised / "config.json").write_text(json.dumps(raw))
    difference = (logits(pair.quantised) - logits(pair.floats)).abs()
    assert difference.mean() < 0.05  # activations are rounded as well


def test_the_format_of_qserve_is_refused(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, LAYOUTS["qoq-128"], "qwen3_5", **FAMILIES["qwen3_5"])
    with pytest.raises(ConfigError, match="in QServe's format is not supported; use one in the format of AWQ"):
        load_directory(pair.quantised, None, "float32", CPU)


def test_packs_of_rows_that_are_no_whole_part_are_refused(tmp_path: Path) -> None:
    rope = dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)
    sizes = FAMILIES["qwen3_5"] | dict(head_dim=12, num_attention_heads=32, rope_parameters=rope)
    pair = write_pair(tmp_path, LAYOUTS["awq"], "qwen3_5", **sizes)
    with pytest.raises(ConfigError, match="holds 8 rows in a number, and its parts have other borders"):
        load_directory(pair.quantised, None, "float32", CPU)
