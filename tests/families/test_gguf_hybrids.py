"""GGUF files of hybrids have the logits of the checkpoints that they were made of.

llama.cpp's own converter (llama-cpp-python 0.3.36) made files of the same checkpoints, with an empty vocabulary and without
layers that predict further tokens: their log-probabilities were those of the checkpoints bit for bit, of granitehybrid to 2e-6.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backend.api import ConfigError
from backend.api.checkpoint.gguf import read_header
from backend.architectures.checkpoint import examine
from backend.architectures.gguf.held import held_forms
from backend.convert.run import ConvertSettings, convert_checkpoint
from backend.models.gguf import read_config
from backend.models.loader import load_directory
from benchmarks.quality.perplexity import row_logits
from tests.families.gguf_hybrids import write_hybrid
from tests.families.test_gguf import CPU, HELD, HYBRIDS, ROWS, dequantised, logits
from tests.families.tiny import make

# (architecture, name of a tiny checkpoint, what the files cannot say)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen35", "qwen3.5", {}),
    ("qwen35", "qwen3.5 with images", {}),
    ("qwen35moe", "qwen3.5 moe", {}),
    ("qwen3next", "qwen3 next", dict(mlp_only_layers=[])),
    ("lfm2", "lfm2", dict(conv_bias=False)),
    ("lfm2moe", "lfm2 moe", dict(routed_scaling_factor=1.0)),
    ("granitehybrid", "granite 4 hybrid", dict(position_embedding_type=None, mamba_proj_bias=False)),
    ("granitehybrid", "granite 4 hybrid with experts", dict(mamba_conv_bias=True)),
]
ids = [name for _, name, _ in CASES]
# Sizes of which each projection is one of whole blocks of 256.
WHOLE = dict(
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    shared_intermediate_size=256,
    mamba_n_heads=8,
    mamba_d_head=64,
    block_auto_adjust_ff_dim=False,
    linear_value_head_dim=128,
    linear_num_value_heads=4,
)


def test_every_architecture_has_a_case() -> None:
    assert {arch for arch, _, _ in CASES} == HYBRIDS


@pytest.mark.parametrize("arch, name, changes", CASES, ids=ids)
def test_a_file_has_the_logits_of_its_checkpoint(tmp_path: Path, arch: str, name: str, changes: dict[str, Any]) -> None:
    directory = make(tmp_path / "checkpoint", name, **changes)
    file = write_hybrid(directory, tmp_path / "model.gguf", arch)
    torch.testing.assert_close(logits(file), logits(directory), rtol=0, atol=1e-5)
    found, config = examine(file), read_config(read_header(file))
    assert (found.num_layers, found.num_kv_heads) == (config.num_layers, config.num_kv_heads)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "BF16"])
@pytest.mark.parametrize("arch, name, changes", [case for case in CASES if "images" not in case[1]], ids=str)
def test_blocks_stay_as_they_are(tmp_path: Path, arch: str, name: str, changes: dict[str, Any], kind: str) -> None:
    known = make(tmp_path / "small", name, **changes)
    keys = (known / "config.json").read_text()
    sizes = {key: value for key, value in WHOLE.items() if f'"{key}"' in keys}
    directory = make(tmp_path / "checkpoint", name, **changes | sizes)
    file = write_hybrid(directory, tmp_path / "model.gguf", arch, kind)
    expected = logits(dequantised(file, tmp_path / "floats.gguf"))
    torch.testing.assert_close(logits(file), expected, rtol=0, atol=1e-4)
    held = load_directory(file, None, "float32", CPU, HELD)
    if not isinstance(held.embedding, torch.Tensor):
        held.embedding = held.embedding.weight  # type: ignore[attr-defined]
    torch.testing.assert_close(row_logits(held, ROWS).log_softmax(-1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("width, is_held", [(256, True), (128, False)])
def test_only_blocks_within_a_head_are_moved(tmp_path: Path, width: int, is_held: bool) -> None:
    """The columns of `ssm_out` are in another order; blocks of two heads' columns become floats."""
    sizes = WHOLE | dict(linear_value_head_dim=width, head_dim=64)
    directory = make(tmp_path / "checkpoint", "qwen3.5", **{key: sizes[key] for key in sizes if "mamba" not in key})
    file = write_hybrid(directory, tmp_path / "model.gguf", "qwen35", "Q4_K")
    kinds = held_forms(read_header(file), False, True).kinds
    assert ("blk.0.ssm_out.weight" in kinds) == is_held and "blk.0.attn_qkv.weight" in kinds
    load_directory(file, None, "float32", CPU, HELD)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    directory = make(tmp_path / "checkpoint", "qwen3.5")
    plain = write_hybrid(directory, tmp_path / "plain.gguf", "qwen35")
    file = write_hybrid(directory, tmp_path / "model.gguf", "qwen35", extra_layer=True)
    assert torch.equal(logits(file), logits(plain)) and examine(file).num_layers == 4


def test_what_is_not_converted_is_told(tmp_path: Path) -> None:
    directory = make(tmp_path / "checkpoint", "lfm2", conv_bias=False)
    file = write_hybrid(directory, tmp_path / "model.gguf", "lfm2")
    with pytest.raises(ConfigError, match="a model with recurrent layers is not converted to a checkpoint; serve the"):
        convert_checkpoint(file, tmp_path / "back", ConvertSettings())
