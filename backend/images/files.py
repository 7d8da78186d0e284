"""Image files out of what clients and programs give: base64, data: URLs, pixels."""

from __future__ import annotations

import binascii
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.api.errors import InvalidRequest

MAX_HEAD = 200  # characters of a data: URL ahead of its comma
_LONGEST_SHOWN = 60
_BMP = struct.Struct("<2sIHHIIiiHHIIiiII")  # the header of the file, 14 bytes, and that of the picture, 40


def of_base64(text: str, index: int, max_bytes: int) -> bytes:
    """The file of the image number `index`. Raises InvalidRequest for more than `max_bytes`, and for what is no base64."""
    if len(text) > -(-4 * max_bytes // 3) + 4:
        raise too_large(index, 3 * len(text) // 4, max_bytes)
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise InvalidRequest(
            f"image {index} is no base64 (the standard alphabet, without line breaks); encode it so"
        ) from None


def base64_of_url(name: str, url: str, remedy: str) -> str:
    """The base64 of a data: URL. name: the input that has it. Raises InvalidRequest for any other URL, with the remedy."""
    head, comma, _ = url[:MAX_HEAD].partition(",")
    scheme, _, parameters = head.partition(":")
    if scheme.lower() != "data" or not comma or "base64" not in parameters.lower().split(";"):
        shown = repr(url) if len(url) <= _LONGEST_SHOWN else f"{url[:_LONGEST_SHOWN]!r}..."
        raise InvalidRequest(f"{name} has {shown}, and nothing is fetched here; {remedy}")
    return url[len(head) + 1 :]


def check_size(index: int, size: int, max_bytes: int) -> None:
    """Raise InvalidRequest for a file of more than `max_bytes`."""
    if size > max_bytes:
        raise too_large(index, size, max_bytes)


def too_large(index: int, size: int, max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"image {index} has {size} bytes, the limit is {max_bytes} (images.max_bytes); send a smaller file"
    )


def bitmap(name: str, pixels: NDArray[Any]) -> bytes:
    """A file (BMP) of pixels, uint8 [height, width, 3] in RGB. Raises InvalidRequest for another number of channels."""
    height, width, channels = pixels.shape
    if channels != 3:
        raise InvalidRequest(
            f"{name} has pictures of the shape {list(pixels.shape)}; send [height, width, 3], the channels being red, green, blue"
        )
    rows = np.zeros((height, -(-3 * width // 4) * 4), np.uint8)
    rows[:, : 3 * width] = pixels[..., ::-1].reshape(height, 3 * width)
    header = _BMP.pack(b"BM", _BMP.size + rows.size, 0, 0, _BMP.size, 40, width, -height, 1, 24, 0, 0, 0, 0, 0, 0)
    return header + rows.tobytes()
