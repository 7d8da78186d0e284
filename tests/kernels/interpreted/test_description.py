"""Decoders of every kind of description on the Triton kernels, against one that computes them plainly."""

from __future__ import annotations

import msgspec
import pytest

from tests.model.described import TEXTS, built, logits_of
from tests.model.descriptions import CASES
from tests.model.plain_decoder import PlainDecoder, random_tensors

BLOCK_SIZE = 16  # the fewest that the kernels take
STEPS = [(5, 2), (1, 1), (1, 4)]  # tokens of each text
CONTEXT_ONLY = (
    "attention scale",
    "attention soft cap",
    "sinks and a soft cap",
    "two ropes and windows",
    "partial rope",
)


@pytest.mark.parametrize(
    "name, head_dim",  # heads of 16 are in context_attention.py alone
    [*((name, 32) for name in CASES), *((name, 16) for name in CONTEXT_ONLY)],
)
def test_the_kernels_compute_what_the_formulas_say(name: str, head_dim: int) -> None:
    config = msgspec.structs.replace(CASES[name], head_dim=head_dim)
    tensors = random_tensors(config)
    for logits, text in zip(logits_of(built(config, tensors), STEPS, BLOCK_SIZE), TEXTS, strict=True):
        wanted = PlainDecoder(config, tensors).logits(text[:7])
        assert ((logits - wanted).abs() / (1 + wanted.abs())).max() < 1e-4
