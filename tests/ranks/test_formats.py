"""Checkpoints that are quantised already: each rank has its part of every published layout, with the scales that belong to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.api import ConfigError
from tests.model.gguf_files import write_gguf
from tests.ranks.harness import Ran, engine_config, run
from tests.weight_formats.four_bits import LAYOUTS, write_pair
from tools.make_random_model import make_random_model

pytestmark = pytest.mark.usefixtures("ranks_in_threads")
SIZES = dict(hidden_size=512, head_dim=32, num_attention_heads=16, num_key_value_heads=4, intermediate_size=512)
KINDS = {"token_embd": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_gate": "Q5_K", "ffn_up": "Q5_K"}
# Activations are quantised alike in both, so sums differ in their last bits alone, and now and then an activation by a step.
STEPS = 0.05


def ran(directory: Path, size: int) -> Ran:
    return run(engine_config(directory, size), num_tokens=1)


def assert_near(one: Ran, two: Ran) -> None:
    for a, b in zip(one.logits, two.logits, strict=True):
        assert 0 < (a - b).abs().max().item() < STEPS * a.abs().max().item()


@pytest.mark.feature("003-66")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_bits_in_every_layout(tmp_path: Path, layout: str) -> None:
    directory = write_pair(tmp_path, LAYOUTS[layout], **SIZES).quantised
    assert_near(ran(directory, 1), ran(directory, 2))


def gguf(directory: Path, **sizes: int) -> Path:
    model = make_random_model(directory, "llama", 0, tie_word_embeddings=True, **SIZES | sizes)
    return write_gguf(model, directory / "model.gguf", lambda name: KINDS.get(name.split(".")[-2], "Q4_K"))


def test_super_blocks_of_a_gguf_file(tmp_path: Path) -> None:
    directory = gguf(tmp_path)
    assert_near(ran(directory, 1), ran(directory, 2))


def test_super_blocks_that_would_be_cut_through_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="o_proj would be cut into parts of 128 columns.* a scale for each 256"):
        ran(gguf(tmp_path), 4)
