"""The examples of the pages on the LLM API and its adapters, each in a program of its own, as a reader would run them."""

from __future__ import annotations

import pytest

from compat.llm.parameters import ARGUMENTS
from tests.docs.pages import examples, printed_by, text_of

PAGE = text_of("llm.md")
EXAMPLES, OF_LORA = examples("llm.md"), [*examples("lora.md"), *examples("prompt-adapters.md")]


@pytest.mark.parametrize("number", range(len(EXAMPLES) + len(OF_LORA)))
def test_an_example_runs(number: int) -> None:
    assert printed_by((EXAMPLES + OF_LORA)[number]).strip()


def test_the_page_has_examples_and_names_every_argument() -> None:
    assert (len(EXAMPLES), len(OF_LORA)) == (5, 2)
    served = [argument.key for argument in ARGUMENTS if argument.fate != "refused" and "." not in argument.key]
    assert served and [name for name in served if f"`{name}" not in PAGE] == []
