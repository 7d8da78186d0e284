"""What a client is told when no token may follow its output: of the parameters that forbid tokens, those that it sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backend.api import SamplingConfig
from backend.api.guide import Guide, GuideType, Thinking, no_token_left
from backend.core.step import NewRow, Row, SampledToken, SlotId
from backend.guided.protocol import Matcher
from backend.worker.guided_rows import GuidedRows

CODE = Guide(GuideType.REGEX, "[A-Z]{2}")
SLOT = SlotId(0)


class Refusing:
    """A guide, and its matcher, that no token satisfies."""

    error = ""
    is_complete = False

    def matcher(self, guide: Guide) -> Matcher:
        return self

    def fill(self, masks: NDArray[np.int32], row: int) -> None:
        masks[row] = 0

    def accept(self, token_id: int) -> bool:
        return False

    def rollback(self, num_tokens: int) -> None:
        pass


@pytest.mark.parametrize(
    ("bans", "guide", "has_reasoning", "message"),
    [
        (["bad_words"], CODE, False, "bad_words and the guide leave no token together; forbid less"),
        (["min_tokens"], None, True, "min_tokens and the end of the reasoning leave no token together; forbid less"),
        (["min_tokens"], None, False, "min_tokens leave no token over; forbid less"),
        ([], CODE, False, "guide: the model has no token that goes on with the form"),
    ],
)
def test_who_is_told_that_no_token_is_left_reads_of_what_was_sent(
    bans: list[str], guide: Guide | None, has_reasoning: bool, message: str
) -> None:
    assert no_token_left(bans, guide, has_reasoning).message.startswith(message)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "guide: "),
        ({"bad_words": [[]]}, "guide: "),
        ({"bad_words": [[5]]}, "bad_words and the guide "),
        ({"sampling": SamplingConfig(min_tokens=1)}, "min_tokens and the guide "),
        (
            {"bad_words": [[5]], "thinking": Thinking((5,), (6,))},
            "bad_words and the guide and the end of the reasoning ",
        ),
    ],
)
def test_a_row_without_a_token_names_the_parameters_of_its_own_request(fields: dict[str, Any], named: str) -> None:
    """The token is one that its guide forbids, as if no other had been left."""
    rows = GuidedRows(Refusing(), 1, 64)
    rows.set_row(NewRow(SLOT, [1, 2], 2, 0, [], **{"sampling": SamplingConfig(), "guide": CODE, **fields}))
    step = rows.of_step([Row(SLOT, 0, 2, samples=True)])
    ((number, error),) = step.accept([SampledToken(SLOT, 5)])
    assert number == 0 and error.startswith(named)
