"""The examples of the pages on the LLM API, its adapters and two engines, each in a program of its own."""

from __future__ import annotations

import pytest

from compat.llm.parameters import ARGUMENTS
from tests.docs.pages import examples, printed_by, text_of

PAGE = text_of("llm.md")
EXAMPLES, OF_LORA = examples("llm.md"), [*examples("lora.md"), *examples("prompt-adapters.md")]
OF_TWO_ENGINES = [program.replace('"DIR"', '"models/default"') for program in examples("scale.md")]
RUN = [*EXAMPLES, *OF_LORA, *OF_TWO_ENGINES]


@pytest.mark.parametrize("number", range(len(RUN)))
def test_an_example_runs(number: int) -> None:
    assert printed_by(RUN[number]).strip()


def test_the_page_has_examples_and_names_every_argument() -> None:
    assert (len(EXAMPLES), len(OF_LORA), len(OF_TWO_ENGINES)) == (6, 2, 1)
    served = [argument.key for argument in ARGUMENTS if argument.fate != "refused" and "." not in argument.key]
    assert served and [name for name in served if f"`{name}" not in PAGE] == []
