"""Several ranks compute what one does, in every native family and format, and always the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.harness import Format
from tests.ranks.harness import Ran, engine_config, run

pytestmark = pytest.mark.usefixtures("ranks_in_threads")
Checkpoint = Callable[..., Path]
# Sums over parts are rounded otherwise than whole sums. Logits are of the size of 10.
ROUNDING = 1e-4
FAMILIES = ["llama", "qwen2", "gemma 2", "gemma 3", "phi-3", "command r7b", "granite", "gpt-neox", "stablelm parallel"]
MIXTURES = ["qwen2 moe", "granite moe shared", "glm 4.5", "gpt-oss"]
CASES = [*((name, 2) for name in (*FAMILIES, *MIXTURES)), ("llama", 4), ("gemma 3", 4), ("gpt-neox", 4), ("glm 4.5", 4)]
# What the ranks could not share otherwise.
KEYS = {"gpt-neox": dict(num_key_value_heads=8), "qwen2 moe": dict(num_experts=8)}


def difference(one: Ran, other: Ran) -> float:
    """The greatest difference of two logits, behind the same tokens."""
    return max((a - b).abs().max().item() for a, b in zip(one.logits, other.logits, strict=True))


@pytest.mark.feature("002-37")
@pytest.mark.parametrize("name, size", CASES)
def test_ranks_compute_the_tokens_of_one(checkpoint: Checkpoint, name: str, size: int) -> None:
    directory = checkpoint(name, **KEYS.get(name, {}))
    one, several = run(engine_config(directory, 1)), run(engine_config(directory, size))
    assert several.tokens == one.tokens
    assert 0 < difference(one, several) < ROUNDING, "equal bits would mean that nothing was cut"


@pytest.mark.parametrize(
    "form, tolerance",
    [
        (Format("bfloat16"), 0.3),
        (Format("bfloat16", "int8"), 0.3),
        (Format("float32", "w8a8"), 0.3),
    ],
    ids=str,
)
def test_rounded_weights_and_activations_stay_near_those_of_one_rank(
    checkpoint: Checkpoint, form: Format, tolerance: float
) -> None:
    """Two ranks differ from one by how sums are rounded, and eight-bit weights, whose columns they rotate in other blocks."""
    directory = checkpoint("llama", form.dtype)
    one, two = (run(engine_config(directory, size, form), num_tokens=1) for size in (1, 2))
    assert difference(one, two) < tolerance


def test_four_bits_of_ranks_are_as_near_to_floats_as_those_of_one(checkpoint: Checkpoint) -> None:
    """A rank rotates its own columns, so they are rounded to other numbers, but as well."""
    directory, form = checkpoint("llama", "float32"), Format("float32", "w4a8", kv="int8")
    floats = run(engine_config(directory, 1, Format("float32")), num_tokens=1)
    one, two = (run(engine_config(directory, size, form), num_tokens=1) for size in (1, 2))
    assert 0 < difference(floats, two) < 1.3 * difference(floats, one)
