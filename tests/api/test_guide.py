"""What of a guide is refused before anybody compiles it."""

from __future__ import annotations

import pytest

from backend.api.errors import InvalidRequest
from backend.api.guide import Guide, GuideType, check_guide


def guide(text: str) -> Guide:
    return Guide(GuideType.REGEX, text)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (Guide(GuideType.JSON, "{}"), "has no text"),
        (Guide(GuideType.REGEX), "needs a text"),
        (guide("a" * 11), r"11 bytes, the limit is 10 \(guided.max_bytes\)"),
        (guide("\udc80"), "lone surrogate"),
        (guide("a\0"), "zero character"),
    ],
)
def test_guides_that_nobody_should_compile_are_refused_at_once(given: Guide, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        check_guide(given, "", 10, None)


@pytest.mark.parametrize("min_tokens", [None, 0, 1])
def test_one_token_is_what_any_output_has(min_tokens: int | None) -> None:
    """TensorRT-LLM's runtime default is 1, and many clients send it."""
    check_guide(guide("a"), "", 10, min_tokens)
    with pytest.raises(InvalidRequest, match="min_tokens is 2, the limit beside a guide is 1"):
        check_guide(guide("a"), "", 10, 2)


def test_nesting_is_bounded() -> None:
    check_guide(guide("(" * 64 + ")" * 64), "", 1000, None)
    with pytest.raises(InvalidRequest, match="nested 65 deep, the limit is 64"):
        check_guide(guide("(" * 65 + ")" * 65), "", 1000, None)
