"""Reads STRING tensors as bytes objects, up to a limit on their number.

Triton's Python backend reads every STRING input with a loop of Python on the stub's main thread, before it calls the model.
For 4 MB of empty strings that takes a second, in which no other request is served. pb.py puts `deserialize` in the place of that
loop. It does not read a tensor with more strings than a request may hold, and reading.py then refuses the request.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_STRINGS = 1 << 17  # in all rows of one tensor; reading them takes the main thread some 50 ms
_LENGTH = struct.Struct("<I")


class TooMany:
    """Takes the place of the elements of a tensor that was not read."""

    def reshape(self, shape: Sequence[int]) -> NDArray[np.object_]:
        """An array of the shape that Triton asks for. It repeats one meaningless element, and so takes no memory."""
        return np.broadcast_to(np.array(b"", dtype=np.object_), tuple(shape))


def deserialize(encoded: Any) -> NDArray[np.object_] | TooMany:
    """Read a buffer of strings, each of which is a 4-byte little-endian length followed by its bytes.

    Raises struct.error when the buffer ends within a length, as Triton's own function does. Triton has checked it before.
    """
    data = bytes(encoded)
    strings: list[bytes] = []
    position, end = 0, len(data)
    while position < end:
        if len(strings) == MAX_STRINGS:
            return TooMany()
        start = position + _LENGTH.size
        position = start + _LENGTH.unpack_from(data, position)[0]
        strings.append(data[start:position])
    array = np.empty(len(strings), dtype=np.object_)
    array[:] = strings
    return array
