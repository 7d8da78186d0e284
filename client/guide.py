"""Guide: the form that an output must have, and its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from client.checks import check_type, check_value, kind_of

GuideType = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag"]
GUIDE_TYPES: tuple[str, ...] = get_args(GuideType)
_JSON_TYPES = ("json_schema", "structural_tag")  # their text is JSON, so a dictionary is accepted as well


@dataclass(frozen=True)
class Guide:
    """Asks for an output of one form: `Guide("json")` any JSON object, `Guide("json_schema", {...})`, `Guide("regex", "[a-z]+")`,
    `Guide("ebnf_grammar", "root ::= ...")`, `Guide("structural_tag", {...})`. Schemas and tags may be texts, too.
    """

    type: GuideType
    text: str | Mapping[str, Any] = ""

    def tensors(self) -> dict[str, tuple[str, list[Any]]]:
        """Wire name -> (datatype, values). Raises TypeError and ValueError for what no server could accept."""
        check_type("guide.type", self.type, str, "a str")
        if self.type not in GUIDE_TYPES:
            raise ValueError(f"guide.type is {self.type[:80]!r}, allowed are {', '.join(GUIDE_TYPES)}")
        text = self._text()
        if bool(text) == (self.type == "json"):
            remedy = "give none, or type json_schema" if text else "give one"
            raise ValueError(f"guide.text is {'a text' if text else 'empty'} beside type {self.type}; {remedy}")
        found = {"guided_decoding_guide_type": ("BYTES", [str(self.type)])}
        return found | {"guided_decoding_guide": ("BYTES", [text])} if text else found

    def _text(self) -> str:
        if not isinstance(self.text, Mapping):
            text: str = check_value("guide.text", "BYTES", self.text)
            return text
        if self.type not in _JSON_TYPES:
            raise TypeError(f"guide.text is {kind_of(self.text)}, for type {self.type} a str is expected")
        try:
            return json.dumps(dict(self.text), allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise TypeError(
                "guide.text holds a value that JSON cannot say; send texts, numbers, lists and dicts"
            ) from None
