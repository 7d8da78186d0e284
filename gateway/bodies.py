"""A body's JSON as Python objects, within bounds: what a request costs to read grows with its size, and by little.

A number or a text of a list costs a few nanoseconds, so that prompts of a million token ids are read. Lists, objects and
the entries of objects cost a hundred times as much; of these there may be MOST_PARTS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic_core import from_json

from gateway.errors import GatewayError

MOST_PARTS = 100_000
LARGE_BODY = 64 * 1024  # bytes; a smaller one cannot cost much, whatever it holds
_QUOTE, _PARTS = ord('"'), b"[{:"


def decoded(body: bytes) -> Any:
    """The JSON value. Raises GatewayError(400)."""
    if len(body) > LARGE_BODY and (parts := num_parts(body)) > MOST_PARTS:
        text = f"the body has {parts} lists, objects and entries of objects, the limit is {MOST_PARTS}; send fewer"
        raise GatewayError(400, text, code="invalid_json")
    try:
        return from_json(body)
    except ValueError as error:
        raise GatewayError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def num_parts(body: bytes) -> int:
    """Lists, objects and entries of objects in a JSON text: what opens or names one of them, outside strings."""
    unescaped = body.replace(rb"\\", b"__").replace(rb"\"", b"__")
    text = np.frombuffer(unescaped, np.uint8)
    in_string = np.logical_xor.accumulate(text == _QUOTE)
    is_part = np.isin(text, np.frombuffer(_PARTS, np.uint8), kind="table")
    return int(np.count_nonzero(is_part & ~in_string))
