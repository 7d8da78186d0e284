"""Each field of a description does what its formula says: the decoder against one that computes it plainly."""

from __future__ import annotations

import pytest
import torch

from tests.model.described import STEPS, TEXTS, Run, built, logits_of
from tests.model.descriptions import CASES
from tests.model.plain_decoder import PlainDecoder, random_tensors


@pytest.mark.parametrize("name", CASES)
def test_the_decoder_computes_what_the_formulas_say(name: str) -> None:
    config = CASES[name]
    tensors = random_tensors(config)
    model, plain = built(config, tensors), PlainDecoder(config, tensors)
    expected = [plain.logits(text) for text in TEXTS]
    for steps in STEPS:
        for measured, wanted in zip(logits_of(model, steps), expected, strict=True):
            assert measured.shape == wanted.shape
            assert ((measured - wanted).abs() / (1 + wanted.abs())).max() < 1e-4


LLAMA = random_tensors(CASES["Llama"])


@pytest.mark.parametrize(
    "name", [name for name in CASES if name != "Llama" and set(random_tensors(CASES[name])) == set(LLAMA)]
)
def test_fields_that_need_no_other_tensors_change_the_result(name: str) -> None:
    """Fields that the plain decoder ignored as well would prove nothing above."""
    measured, llama = (PlainDecoder(CASES[each], LLAMA).logits(TEXTS[0]) for each in (name, "Llama"))
    assert (measured - llama).norm() > 0.02 * llama.norm()


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_near(name: str) -> None:
    config = CASES[name]
    tensors = {key: tensor.bfloat16().float() for key, tensor in random_tensors(config).items()}
    model, plain = built(config, tensors, torch.bfloat16), PlainDecoder(config, tensors)
    run = Run(model)
    for measured, text in zip(run.step((11, 7)), TEXTS, strict=True):
        wanted = plain.logits(text)
        assert measured.dtype == torch.bfloat16
        assert (measured - wanted).norm() < 0.06 * wanted.norm()
