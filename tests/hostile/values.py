"""Values that break parsers: numbers, texts and JSON texts."""

from __future__ import annotations

import json
import math
import random
import struct

INTEGERS = (
    *(0, -1, 1, 2, 3, 64, 4095, 4096, 99_999, -(2**31), 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1),
    *(2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, 10**30, -(10**30)),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 0.5, 100.5, 3.4e38, -3.4e38, math.nan, math.inf, -math.inf)
TEXTS = (
    *("", " ", "\0", "a\0b", "\n\r\t", "\ufeff", "\ufffe\uffff", "\U0001f600" * 30, "e\u0301" * 50, "\u202egnp.exe"),
    *("%s%n%x%p", "{{ 7 * 7 }}", "{% for i in range(10**9) %}{% endfor %}", "${jndi:ldap://127.0.0.1/a}", "`id`"),
    *("';--", "<script>", "<|im_start|>system", "</s><s>", "<|endoftext|>", "../../..", "a" * 257, "a" * 5000),
    *("(((((((((", "(a+)+$", "[[:alpha:", "\\", '"', "\x7f\x80\x9f"),
)
# JSON texts of anything but a plain value of the right type
JSON_ODDITIES = (
    *(
        "null",
        "true",
        "false",
        "{}",
        "[]",
        "[[]]",
        "[null]",
        "[{}]",
        '{"a": {"b": []}}',
        '"text"',
        '""',
        '"3"',
        '"1e5"',
    ),
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "3.5", "-0", "-0.0", "01", "1.", ".5", "0x10", "+1"),
    *('"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\x41"', '"\t"', "'single'", "undefined", "1e2e3", "tru", "nul"),
)
BAD_UTF8 = (
    b"\xff",
    b"\xfe\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf5\x80\x80\x80",
    b"\xe2\x82",
    b"a\x80b",
    b"\xf0\x9f\x98",
)

PACK = {
    "BOOL": "<B",
    "UINT8": "<B",
    "INT8": "<b",
    "INT32": "<i",
    "INT64": "<q",
    "UINT32": "<I",
    "UINT64": "<Q",
    "FP16": "<e",
    "FP32": "<f",
    "FP64": "<d",
}
WIDTH = {name: struct.calcsize(code) for name, code in PACK.items()}


def text(rng: random.Random) -> str:
    """A hostile text, now and then a random one."""
    if rng.random() < 0.8:
        return rng.choice(TEXTS)
    return "".join(
        chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x80, 0xD800)))) for _ in range(rng.randrange(60))
    )


def text_bytes(rng: random.Random) -> bytes:
    """The bytes of a STRING element, not always UTF-8."""
    if rng.random() < 0.3:
        return rng.choice((b"", b"ab ")) + rng.choice(BAD_UTF8)
    return text(rng).encode("utf-8", "surrogatepass")


def json_number(rng: random.Random) -> str:
    """A number as JSON text, also NaN, infinities and integers that fit no type."""
    pick = rng.random()
    if pick < 0.5:
        return str(rng.choice(INTEGERS))
    if pick < 0.9:
        return json.dumps(rng.choice(FLOATS))
    return rng.choice(("1" * rng.choice((20, 400, 4400)), "1e400", "-1e400", "0." + "0" * 400 + "1"))


def json_oddity(rng: random.Random) -> str:
    return rng.choice(JSON_ODDITIES)


def element(rng: random.Random, dtype: str) -> bytes:
    """One element of a tensor, packed; the value may be anything that the type can hold."""
    if dtype == "STRING":
        data = text_bytes(rng)
        return struct.pack("<I", len(data)) + data
    if dtype.startswith("FP"):
        value = rng.choice(FLOATS)
        return struct.pack(
            PACK[dtype], math.copysign(math.inf, value) if dtype == "FP16" and abs(value) > 6e4 else value
        )
    return struct.pack(PACK[dtype], wrapped(rng.choice(INTEGERS), dtype))


def wrapped(value: int, dtype: str) -> int:
    """The integer that the low bits of `value` are in this type."""
    bits = 8 * WIDTH[dtype]
    value &= (1 << bits) - 1
    if PACK[dtype].islower() and value >= 1 << (bits - 1):
        value -= 1 << bits
    return value
