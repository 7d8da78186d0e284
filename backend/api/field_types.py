"""The types of a request's fields, checked where nothing has decoded it.

A request that has come over a socket has been checked by the decoder. One that a program of the same process has made may hold
anything: Python does not look at the types of the fields that a constructor is given.
"""

from __future__ import annotations

import re

import msgspec

from backend.api.errors import InvalidRequest
from backend.api.request import Request

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode
_REPORT = re.compile(r"(?P<what>.*) - at `\$\.(?P<where>.*)`", re.DOTALL)  # of msgspec.ValidationError


def check_field_types(request: Request) -> None:
    """Raise InvalidRequest that names the first field of a wrong type. Extra inputs and embeddings are left to their readers."""
    plain = msgspec.structs.replace(request, extra_inputs={}, prompt_embeddings=None)
    try:
        _decode(_encode(plain))
    except msgspec.ValidationError as error:
        report = _REPORT.fullmatch(str(error))
        what, where = (report["what"], report["where"]) if report else (str(error), "the request")
        expected = what[:1].lower() + what[1:].replace("`", "").replace("null", "None")
        raise InvalidRequest(f"{where.replace('[...]', '')}: {expected}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request holds a value that is no plain number, text or list: {error}") from None
