"""Thinking: the reasoning with which an output begins. See docs/reasoning.md."""

from __future__ import annotations

from msgspec import Struct

from backend.api.errors import InvalidRequest

MAX_MARK = 64  # tokens of a mark


class Thinking(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Reasoning is between `start_ids` and `end_ids` at the beginning of an output; without `start_ids` the prompt has begun it.

    A guide applies behind the reasoning. Where the output does not begin with `start_ids` there is none, and the guide applies
    from the beginning, except with `is_always`: a guided output then begins with `start_ids`.
    `follow_ids`: what follows `end_ids` ahead of what a guide applies to, and behind reasoning that was ended by its budget.
    `max_tokens`: after so many tokens of reasoning `end_ids` and `follow_ids` are the only ones that may follow; None: no limit.
    """

    end_ids: tuple[int, ...]
    start_ids: tuple[int, ...] = ()
    follow_ids: tuple[int, ...] = ()
    is_always: bool = False
    max_tokens: int | None = None


def check_thinking(thinking: Thinking, vocab_size: int) -> None:
    """Raise InvalidRequest for the first field that is out of its limits."""
    for name in ("end_ids", "start_ids", "follow_ids"):
        ids: tuple[int, ...] = getattr(thinking, name)
        if len(ids) > MAX_MARK or (name == "end_ids" and not ids):
            least = int(name == "end_ids")
            raise InvalidRequest(f"thinking.{name} has {len(ids)} tokens, allowed is {least} to {MAX_MARK}")
        wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"thinking.{name} has the token {wrong}, allowed is 0 to {vocab_size - 1}")
    if thinking.max_tokens is not None and not 0 <= thinking.max_tokens < 1 << 31:
        raise InvalidRequest(f"thinking.max_tokens is {thinking.max_tokens}, allowed is 0 to {(1 << 31) - 1}")
