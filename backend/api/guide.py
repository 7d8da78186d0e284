"""Guide: the form that an output must have (docs/guided-decoding.md). Thinking: the reasoning before it (docs/reasoning.md)."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence

from msgspec import Struct

from backend.api.errors import InvalidRequest

NOT_SET_UP = "GuidedDecoder is not setup"  # TensorRT-LLM's words, which its clients look for
A_CHOICE = "a choice is a regex red|green, or a json_schema with enum"  # hint for requests with a type `choice`
MAX_NESTING = 64  # brackets within brackets in a guide's text


class GuideType(enum.StrEnum):
    """Language of a guide's text. The names are those of TensorRT-LLM's Triton input."""

    JSON = "json"  # any JSON object; there is no text
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # must match the whole output
    EBNF_GRAMMAR = "ebnf_grammar"  # rules as `root ::= ...` (GBNF), or a Lark grammar that begins with `start`
    STRUCTURAL_TAG = "structural_tag"  # free text in which certain beginnings must be followed by JSON of a schema


class Guide(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Asks for outputs of one form. An output that ends by itself (FinishReason.END_ID) has it in full; one that is cut at
    its length, or cancelled, is the beginning of one that has it.
    """

    type: GuideType
    text: str = ""


class InvalidGuide(InvalidRequest):
    """A guide is refused. The message begins with the place in the request, as in `guide.structures[1].schema: ...`, so that
    the gateway, which makes guides from other fields, can name those fields instead.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"guide{place}: {reason}")


def no_token_left(bans: Sequence[str], guide: Guide | None, has_reasoning: bool = False) -> InvalidRequest:
    """The refusal of a request whose output no token may follow. `bans`: its parameters that forbid tokens."""
    forms = [*(["the guide"] if guide is not None else []), *(["the end of the reasoning"] if has_reasoning else [])]
    if not bans:
        return InvalidGuide(
            "the model has no token that goes on with the form behind this output; use other characters"
        )
    return InvalidRequest(
        f"{' and '.join([*bans, *forms])} leave no token {'together' if forms else 'over'}; forbid less"
    )


def choice_guide(name: str, choices: object) -> Guide:
    """The output is one of these texts. `name`: of the field, for the error (InvalidRequest) about another form."""
    if not (isinstance(choices, list) and choices and all(isinstance(each, str) and each for each in choices)):
        raise InvalidRequest(f"{name} is no list of texts; send at least one, none empty")
    return Guide(GuideType.REGEX, "|".join(re.escape(each) for each in choices))


def check_guide(guide: Guide, refusal: str, max_bytes: int, min_tokens: int | None) -> None:
    """Raise InvalidRequest for a guide that is not worth compiling. `refusal`: the reason why all guides are refused, or ''."""
    if refusal:
        raise InvalidRequest(refusal)
    if min_tokens is not None and min_tokens > 1:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, the limit beside a guide is 1, for where the guide is complete nothing can follow; "
            f"lower min_tokens or leave it out"
        )
    if guide.type is GuideType.JSON:
        if guide.text:
            raise InvalidGuide("type json has no text; use json_schema for a schema")
        return
    if not guide.text:
        raise InvalidGuide(f"type {guide.type.value} needs a text; give one")
    try:
        num_bytes = len(guide.text.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidGuide("it has a lone surrogate, only Unicode can be compiled; remove it") from None
    if num_bytes > max_bytes:
        raise InvalidGuide(f"it has {num_bytes} bytes, the limit is {max_bytes} (guided.max_bytes); shorten it")
    if "\0" in guide.text:
        raise InvalidGuide("it has a zero character; remove it")
    depth = nesting(guide.text)
    if depth > MAX_NESTING:
        raise InvalidGuide(f"it has brackets nested {depth} deep, the limit is {MAX_NESTING}; flatten it")


def nesting(text: str) -> int:
    """How deep brackets of any kind lie within each other, those in strings counted as well."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


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
