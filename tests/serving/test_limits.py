"""Prompts that certainly have too many tokens are refused before they are tokenised."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from backend.api import InvalidRequest
from backend.core.step import ModelInfo
from backend.serving.wires.limits import check_length, ids_within, prompt_too_long
from backend.serving.wires.vectors import given_ids


class Counted:
    """A tokenizer with a token for every two characters at the most, which counts its work."""

    def __init__(self) -> None:
        self.tokenised = 0

    def least_tokens(self, text: str) -> int:
        return len(text) // 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.tokenised += len(text)
        return [0] * len(text)


@pytest.mark.parametrize(
    "length, tokenised, told",
    [(10, 10, None), (11, 11, "has 11 tokens"), (21, 21, "has 21 tokens"), (22, 0, "has at least 11 tokens")],
)
def test_only_what_may_fit_is_tokenised(length: int, tokenised: int, told: str | None) -> None:
    tokenizer, refused = Counted(), ""
    try:
        ids = ids_within(tokenizer, "7" * length, 10, lambda count: prompt_too_long(count, 11))  # type: ignore[arg-type]
        assert len(ids) == length
    except InvalidRequest as error:
        refused = error.message
    assert (tokenizer.tokenised, bool(refused)) == (tokenised, told is not None)
    assert (told or "") in refused


def test_ids_that_are_too_many_are_refused_before_they_are_looked_at() -> None:
    ids = [-1] * 4096
    context = SimpleNamespace(model=ModelInfo("m", 256, 4096))
    with pytest.raises(InvalidRequest, match="the prompt has 4096 tokens, the limit is 4095"):
        check_length(len(ids), context)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="input_ids has 4097 tokens, the limit is 4096"):
        given_ids("input_ids", [*ids, -1], context)  # type: ignore[arg-type]
