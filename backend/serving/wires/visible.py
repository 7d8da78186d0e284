"""Special tokens that are text, and the marks of reasoning, in requests of the model `everbatch`."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from backend.api import InvalidRequest
from backend.api.guide import Thinking
from backend.text.tokenizer import Tokenizer

MAX_VISIBLE = 64
MAX_CHARS = 256  # in the text of a token or mark


class Reasoning(NamedTuple):
    """`begun`: the mark that the prompt has ended with and that belongs to the output's text, or ''."""

    thinking: Thinking
    begun: str

    def for_engine(self, is_guided: bool) -> Thinking | None:
        """The reasoning as the engine has to know it; None where it changes nothing there."""
        return self.thinking if is_guided or self.thinking.max_tokens is not None else None


class ReasoningMarks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields are those of backend.api.guide.Thinking, with texts for tokens. Where the prompt ends with `start`, the
    output's text begins with it.
    """

    start: str
    end: str
    follow: str = ""
    is_always: bool = False
    max_tokens: int | None = None  # the budget of the reasoning

    def found(self, prompt: str, tokenizer: Tokenizer) -> Reasoning | None:
        """The reasoning behind this prompt; None where the chat template has closed it in advance, so that the prompt ends with
        `end`. Raises InvalidRequest.
        """
        for name in ("start", "end", "follow"):
            text: str = getattr(self, name)
            if len(text) > MAX_CHARS or (not text and name != "follow"):
                least = int(name != "follow")
                raise InvalidRequest(
                    f"reasoning.{name} has {len(text)} characters, allowed is {least} to {MAX_CHARS}; correct it"
                )
        if self.max_tokens is not None and not 0 <= self.max_tokens < 1 << 31:
            raise InvalidRequest(f"reasoning.max_tokens is {self.max_tokens}, allowed is 0 to {(1 << 31) - 1}")
        if prompt.rstrip().endswith(self.end):
            return None
        is_begun = prompt.rstrip().endswith(self.start)
        start, end, follow = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (self.start, self.end, self.follow)
        )
        thinking = Thinking(end, () if is_begun else start, follow, self.is_always, self.max_tokens)
        return Reasoning(thinking, self.start if is_begun else "")


def check_visible(tokens: list[str]) -> None:
    """Raise InvalidRequest for more texts of tokens than any model has marks, or longer ones."""
    if len(tokens) > MAX_VISIBLE:
        raise InvalidRequest(f"visible_tokens has {len(tokens)} entries, the limit is {MAX_VISIBLE}; send fewer")
    if any(len(token) > MAX_CHARS for token in tokens):
        raise InvalidRequest(f"visible_tokens has an entry of more than {MAX_CHARS} characters; shorten it")


def visible_ids(tokens: list[str], tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens with these texts. The others are no special tokens here, so that their text is shown anyway."""
    found = (tokenizer.token_to_id(token) for token in tokens)
    return frozenset(token_id for token_id in found if token_id in tokenizer.special_ids)
