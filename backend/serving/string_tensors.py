"""STRING tensors as bytes objects, with a bound on how many.

Triton's Python backend reads every STRING input with a loop of Python on the stub's main thread, before the model is
asked: 4 MB of empty strings take a second, and nobody else is served meanwhile. `deserialize` takes the place of that loop
(pb.py puts it there); a tensor of more strings than a request may hold is not read, and reading.py refuses it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_STRINGS = 1 << 17  # in one tensor, all rows together; some 50 ms of the main thread
_LENGTH = struct.Struct("<I")


class TooMany:
    """What stands for the elements of a tensor that was not read."""

    def reshape(self, shape: Sequence[int]) -> np.ndarray:
        """An array of that shape, as Triton asks for it; it takes no memory, and its one element means nothing."""
        return np.broadcast_to(np.array(b"", dtype=np.object_), tuple(shape))


def deserialize(encoded: Any) -> np.ndarray | TooMany:
    """`encoded`: a buffer of strings, each a 4-byte little-endian length and its bytes. Raises struct.error when it ends
    within a length, as Triton's own does; Triton has checked the buffer before.
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
