"""Stages compute the very bits of one rank, in every native family and format, in micro-batches too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from backend.worker import packed_model
from tests.native.harness import Format
from tests.ranks.harness import Ran, engine_config, run
from tests.ranks.test_formats import SIZES, gguf
from tests.ranks.test_tokens import FAMILIES as RANKED
from tests.weight_formats.four_bits import LAYOUTS, write_pair

pytestmark = pytest.mark.usefixtures("ranks_in_threads")
Checkpoint = Callable[..., Path]
# Among them: tied heads, layers that differ in window and rope, parallel halves, norms over all heads.
FAMILIES = [*RANKED, "olmo 2"]
FORMATS = [
    Format("bfloat16"),
    Format("bfloat16", "w4a8", kv="int4"),
    Format("bfloat16", "w8a8", kv="int8"),
    Format("float32", "w4a8"),
    Format("float32", "int8", kv="int8"),
    Format("float16"),
]
STORED = ["awq", "gptq", "compressed-tensors-channel", "qoq-128"]


def assert_same(found: Ran, expected: Ran) -> None:
    assert found.tokens == expected.tokens
    for a, b in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(a, b)


@pytest.mark.feature("002-38")
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_compute_the_bits_of_one_rank(checkpoint: Checkpoint, name: str) -> None:
    directory = checkpoint(name, **({"num_key_value_heads": 8} if name == "gpt-neox" else {}))
    one = run(engine_config(directory, 1))
    assert len({token for tokens in one.tokens for token in tokens}) > 5, "tokens that hardly change prove nothing"
    assert_same(run(engine_config(directory, 1, stages=2)), one)
    assert_same(run(engine_config(directory, 1, stages=3, micro_batches=2)), one)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_stages_compute_the_bits_of_one_rank_in_every_format(checkpoint: Checkpoint, form: Format) -> None:
    directory = checkpoint("llama", form.dtype)
    one = run(engine_config(directory, 1, form))
    assert_same(run(engine_config(directory, 1, form, stages=2, micro_batches=3)), one)


@pytest.mark.parametrize("name", ["gemma 3", "qwen2"])
def test_stages_of_two_ranks_compute_the_bits_of_two_ranks(checkpoint: Checkpoint, name: str) -> None:
    directory = checkpoint(name)
    two = run(engine_config(directory, 2))
    assert_same(run(engine_config(directory, 2, stages=2)), two)
    assert_same(run(engine_config(directory, 2, stages=2, micro_batches=2)), two)


@pytest.mark.parametrize("layout", [*STORED, "gguf"])
def test_quantised_checkpoints_are_cut_between_layers(tmp_path: Path, layout: str) -> None:
    directory = gguf(tmp_path) if layout == "gguf" else write_pair(tmp_path, LAYOUTS[layout], **SIZES).quantised
    one = run(engine_config(directory, 1), num_tokens=2)
    assert_same(run(engine_config(directory, 1, stages=2), num_tokens=2), one)


def test_packed_weights_of_each_stage_are_kept(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_model, "MIN_BYTES", 0)
    cache, directory = tmp_path / "cache", checkpoint("gemma 3")
    cache.mkdir(0o700)
    config = engine_config(directory, 1, stages=3)
    config = replace(config, model=replace(config.model, cache_dir=str(cache)))
    plain, files = run(engine_config(directory, 1)), []
    for _ in range(2):
        assert_same(run(config), plain)
        files.append({each: each.stat().st_ino for each in cache.glob("*.weights")})
    assert len(files[0]) == 3 and files[0] == files[1], "the second start has packed them anew"
