"""GGUF files of models with latent attention have the logits of the checkpoints that they were made of.

llama.cpp's own converter (llama-cpp-python 0.3.36) made files of the first three checkpoints in bfloat16, with an empty
vocabulary: their log-probabilities were those of the checkpoints bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backend.api import ConfigError
from backend.api.checkpoint.gguf import read_header
from backend.architectures.checkpoint import examine
from backend.convert.run import ConvertSettings, convert_checkpoint
from backend.models.gguf import read_config
from backend.models.loader import load_directory
from benchmarks.quality.perplexity import row_logits
from tests.families.gguf_latent import write_latent
from tests.families.test_gguf import CPU, HELD, ROWS, dequantised, logits
from tests.families.tiny import make
from tests.families.tiny_latent import YARN

SCALED = dict(rope_parameters=YARN | dict(mscale=YARN["mscale_all_dim"]))  # Files hold one of the two numbers.
CASES: dict[str, dict[str, Any]] = {
    "deepseek v2": SCALED,
    "deepseek v2 lite": {},
    "deepseek v3": SCALED,
    "glm 4.7 flash": dict(rope_interleave=True, first_k_dense_replace=1, mlp_layer_types=["dense", "sparse", "sparse"]),
}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_logits_of_its_checkpoint(tmp_path: Path, name: str, is_old: bool) -> None:
    directory = make(tmp_path / "checkpoint", name, **CASES[name])
    file = write_latent(directory, tmp_path / "model.gguf", is_old=is_old)
    torch.testing.assert_close(logits(file), logits(directory), rtol=0, atol=1e-5)
    found, config = examine(file), read_config(read_header(file))
    assert (found.num_layers, found.num_kv_heads, config.num_kv_heads) == (config.num_layers, 1, 1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("is_old", [False, True])
def test_blocks_stay_as_they_are(tmp_path: Path, kind: str, is_old: bool) -> None:
    sizes = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256, kv_lora_rank=256, q_lora_rank=256)
    directory = make(tmp_path / "checkpoint", "deepseek v3", **SCALED, **sizes, qk_nope_head_dim=32, v_head_dim=128)
    file = write_latent(directory, tmp_path / "model.gguf", kind, is_old)
    expected = logits(dequantised(file, tmp_path / "floats.gguf"))
    torch.testing.assert_close(logits(file), expected, rtol=0, atol=1e-4)
    held = load_directory(file, None, "float32", CPU, HELD)
    if not isinstance(held.embedding, torch.Tensor):
        held.embedding = held.embedding.weight  # type: ignore[attr-defined]
    torch.testing.assert_close(row_logits(held, ROWS).log_softmax(-1), expected, rtol=0, atol=1e-4)


def test_what_is_not_converted_is_told(tmp_path: Path) -> None:
    directory = make(tmp_path / "checkpoint", "deepseek v2 lite")
    file = write_latent(directory, tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="latent attention is not converted to a checkpoint; serve the file as it is"):
        convert_checkpoint(file, tmp_path / "back", ConvertSettings())
