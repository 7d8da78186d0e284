"""Decoders of every kind of description on the Triton kernels, against one that computes them plainly."""

from __future__ import annotations

import msgspec
import pytest

from tests.model.described import TEXTS, built, logits_of
from tests.model.descriptions import CASES
from tests.model.plain_decoder import PlainDecoder, random_tensors

BLOCK_SIZE = 16  # the fewest that the kernels take
STEPS = [(5, 2), (1, 1), (1, 4)]  # tokens of each text
# What reaches the kernels in another way than Llama's; which numbers they give is proven kernel by kernel.
NAMES = [
    "LayerNorm with biases",
    "norm offset",
    "norms of inputs and outputs",
    "parallel, two norms",
    "LayerNorms of heads",
    "norms of rows and outputs",
    "residual scale",
    "embedding scale",
    "logit soft cap",
    "gelu",
    "gated gelu_tanh",
    "two ropes and windows",
    "a layer without rope",
    "partial interleaved rope",
    "partial rope and norms of heads",
    "query scaling",
    "attention scale",
    "sinks and a soft cap",
]
CONTEXT_ONLY = ["two ropes and windows", "attention scale", "sinks and a soft cap"]  # with heads of 16


@pytest.mark.parametrize("name, head_dim", [*((name, 32) for name in NAMES), *((name, 16) for name in CONTEXT_ONLY)])
def test_the_kernels_compute_what_the_formulas_say(name: str, head_dim: int) -> None:
    config = msgspec.structs.replace(CASES[name], head_dim=head_dim)
    tensors = random_tensors(config)
    for logits, text in zip(logits_of(built(config, tensors), STEPS, BLOCK_SIZE), TEXTS, strict=True):
        wanted = PlainDecoder(config, tensors).logits(text[:7])
        assert ((logits - wanted).abs() / (1 + wanted.abs())).max() < 1e-4
