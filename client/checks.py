"""Checks of arguments: each error names the argument, what it is and what is expected."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

MAX_NAMESPACE = 256  # The server allows so many characters, here and of a request id.
MAX_REQUEST_ID = 256
MAX_TIMEOUT_S = 10.0 * 365 * 86400  # In microseconds it fits the wire's 64 bits with room to spare.
FP32_MAX = (2 - 2**-23) * 2.0**127
RANGES: dict[str, tuple[float, float]] = {
    "INT32": (-(2**31), 2**31 - 1),
    "UINT64": (0, 2**64 - 1),
    "FP32": (-FP32_MAX, FP32_MAX),  # JSON has no infinity and no NaN.
}
_TYPES: dict[str, tuple[type[Any], str]] = {
    "INT32": (numbers.Integral, "an int"),
    "UINT64": (numbers.Integral, "an int"),
    "FP32": (numbers.Real, "a number"),
    "BOOL": (bool, "a bool"),
    "BYTES": (str, "a str"),
}


def kind_of(value: object) -> str:
    """The type of a value as error messages name it: `an int`, `a str`, `None`."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def check_type(name: str, value: object, kind: type[Any], expected: str) -> None:
    """Raise TypeError unless `value` is a `kind`. A bool is no number here."""
    is_misplaced_bool = isinstance(value, bool) and kind is not bool
    if is_misplaced_bool or not isinstance(value, kind):
        raise TypeError(f"{name} is {kind_of(value)}, {expected} is expected")


def check_value(name: str, datatype: str, value: object) -> Any:
    """`value` as Python's own type for a tensor's datatype. Raises TypeError and ValueError for what it cannot hold."""
    kind, expected = _TYPES[datatype]
    check_type(name, value, kind, expected)
    if isinstance(value, str):
        check_text(name, value)
        return value
    if isinstance(value, bool):
        return value
    number: Any = value  # numpy's numbers as well, which JSON does not know
    plain = float(number) if datatype == "FP32" else int(number)
    minimum, maximum = RANGES[datatype]
    if not minimum <= plain <= maximum:
        raise ValueError(f"{name} is {plain}, allowed is {minimum} to {maximum}")
    return plain


def check_texts(name: str, values: object) -> list[str]:
    """A list of texts. A single text is refused: it would be taken for the list of its characters."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {kind_of(values)}, a list of str is expected")
    return [check_value(f"{name}[{index}]", "BYTES", value) for index, value in enumerate(values)]


def check_messages(messages: object) -> None:
    """Raise TypeError unless `messages` is a list of mappings, as {"role": "user", "content": "..."}."""
    if isinstance(messages, str) or not isinstance(messages, list | tuple):
        raise TypeError(f"messages is {kind_of(messages)}, a list of dict with role and content is expected")
    for index, message in enumerate(messages):
        check_type(f"messages[{index}]", message, Mapping, "a dict with role and content")


def check_namespace(namespace: str) -> None:
    """Raise ValueError for a namespace that the server would refuse or that cannot be sent, TypeError for no text."""
    check_type("namespace", namespace, str, "a str")
    if len(namespace) > MAX_NAMESPACE:
        raise ValueError(
            f"namespace has {len(namespace)} characters, the limit is {MAX_NAMESPACE}; send a hash of it, for example"
        )
    # The server sees a C string: what follows would be lost, and strangers would share a namespace.
    if "\0" in namespace:
        raise ValueError("namespace holds a zero character, which ends a text for the server; leave it out")
    check_text("namespace", namespace)


def check_api_key(api_key: str) -> None:
    """Raise ValueError for a key that no header can carry, TypeError for no text. Neither holds the key."""
    check_type("api_key", api_key, str, "a str")
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ValueError("the API key holds a space or a character that is not printable ASCII; send the key alone")


def check_request_id(request_id: str) -> None:
    """Raise TypeError or ValueError for a request id that the server would refuse or that cannot be sent."""
    check_type("request_id", request_id, str, "a str")
    if len(request_id) > MAX_REQUEST_ID:
        raise ValueError(
            f"request_id has {len(request_id)} characters, the limit is {MAX_REQUEST_ID}; send a hash of it"
        )
    check_text("request_id", request_id)


def check_timeout(timeout_s: float) -> None:
    """Raise TypeError or ValueError for what is no time that a request could take."""
    check_type("timeout_s", timeout_s, numbers.Real, "a number of seconds")
    if not 0 < timeout_s <= MAX_TIMEOUT_S or math.isnan(timeout_s):
        raise ValueError(f"timeout_s is {timeout_s}, more than 0 and at most {MAX_TIMEOUT_S:g} seconds are expected")


def check_text(name: str, text: str) -> None:
    """Raise ValueError for half a surrogate pair: what Python makes of bytes that are no text. UTF-8 cannot hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        reason = f"{name} holds half of a surrogate pair; send a text that can be written as UTF-8"
        raise ValueError(reason) from None
