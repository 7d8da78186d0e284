"""Checks the types of a request's fields if the request was not decoded from a socket.

A request that has come over a socket has been checked by the decoder. One that was constructed in this process may hold
anything, because Python does not check constructor arguments.
"""

from __future__ import annotations

import re

import msgspec

from backend.api.errors import InvalidRequest, without_long_values
from backend.api.request import Request
from backend.api.tensor import TensorData

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode
_REPORT = re.compile(r"(?P<what>.*) - at `\$\.(?P<where>.*)`", re.DOTALL)  # text of a msgspec.ValidationError


def with_checked_types(request: Request) -> Request:
    """The request as the decoder of a socket would make it: a dict in the place of a struct becomes one.

    Values of extra inputs are left to their reader. Raises InvalidRequest that names the first field of a wrong type.
    """
    if not isinstance(request, Request):
        raise InvalidRequest(f"the request is a {type(request).__name__}, a Request is expected")
    inputs, data = request.extra_inputs, _embedding_bytes(request.prompt_embeddings)
    if not isinstance(inputs, dict) or not all(isinstance(name, str) for name in inputs):
        raise InvalidRequest("extra_inputs: expected an object whose keys are texts")
    plain = msgspec.structs.replace(request, extra_inputs={})
    if data:  # it may have megabytes, which need not be copied
        assert request.prompt_embeddings is not None  # it has data
        plain = msgspec.structs.replace(
            plain, prompt_embeddings=msgspec.structs.replace(request.prompt_embeddings, data=b"")
        )
    try:
        checked = _decode(_encode(plain))
    except msgspec.ValidationError as error:
        report = _REPORT.fullmatch(str(error))
        what, where = (report["what"], report["where"]) if report else (str(error), "the request")
        expected = what[:1].lower() + without_long_values(what)[1:].replace("`", "").replace("null", "None")
        raise InvalidRequest(f"{where.replace('[...]', '')}: {expected}") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        where = next((f"{name}: " for name in plain.__struct_fields__ if not _is_plain(getattr(plain, name))), "")
        raise InvalidRequest(f"{where}expected plain numbers of at most 64 bits, texts and lists: {error}") from None
    if data and checked.prompt_embeddings is not None:
        embeddings = msgspec.structs.replace(checked.prompt_embeddings, data=data)
        checked = msgspec.structs.replace(checked, prompt_embeddings=embeddings)
    return msgspec.structs.replace(checked, extra_inputs=inputs) if inputs else checked


def _is_plain(value: object) -> bool:
    try:
        _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def _embedding_bytes(table: object) -> bytes:
    """The bytes of an embedding table; empty for a wrong type, which decoding then reports."""
    return table.data if isinstance(table, TensorData) and isinstance(table.data, bytes) else b""
