"""The map of characters in a SentencePiece file: what texts become before they are cut, in the form of its library.

    u32 bytes of a trie   the trie: u32 units   replacements: UTF-8, each ends with a zero byte

A unit says which byte leads to it, where its own children lie, and whether one of them holds the place of a replacement. Source:
darts-clone, as the library `tokenizers` and llama.cpp's xcda_array_view read it. The library follows the units without looking
where they lead, so that is checked here once, for each unit that a text can reach.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from backend.api.checkpoint.gguf import AGAIN
from backend.api.errors import ConfigError

MAX_BYTES = 4 << 20  # A larger map is refused; the usual one has 240 thousand.
MAX_REPLACEMENT = 128  # bytes that one character may become; Unicode's longest takes 33
_AT_ONCE = 4096  # nodes of the trie
_VALUE, _LABEL = np.uint32((1 << 31) - 1), np.uint32((1 << 31) | 0xFF)


def check_charsmap(values: list[int], name: str) -> bytes:
    """The map as bytes. `values`: bytes, signed or not; `name`: of the file. Raises ConfigError for one that leads nowhere."""
    wrong = f"{name}: tokenizer.ggml.precompiled_charsmap {{}}; {AGAIN}"
    if len(values) > MAX_BYTES:
        raise ConfigError(wrong.format(f"has {len(values)} bytes, at most {MAX_BYTES} are read"))
    content = bytes(value & 0xFF for value in values)
    size = int.from_bytes(content[:4], "little")
    if size % 4 or not 4 <= size < len(content) - 4:
        raise ConfigError(wrong.format(f"says that its trie has {size} bytes, and has {len(content)}"))
    units = np.frombuffer(content, "<u4", size // 4, 4)
    replacements = content[4 + size :]
    try:
        replacements.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(wrong.format("has replacements that are not UTF-8")) from None
    places = _reachable_places(units)
    ends = [index for index, byte in enumerate(replacements) if byte == 0]
    starts = {0, *(end + 1 for end in ends)}
    if places is None or not starts.issuperset(places) or not ends or ends[-1] + 1 != len(replacements):
        raise ConfigError(wrong.format("leads out of itself"))
    if max((end - start for start, end in pairwise([-1, *ends])), default=0) > MAX_REPLACEMENT:
        raise ConfigError(wrong.format(f"has a replacement of more than {MAX_REPLACEMENT} bytes"))
    return content


def _reachable_places(units: NDArray[np.uint32]) -> list[int] | None:
    """Where the replacements begin that a walk through the trie can find; None if a walk can leave the trie."""
    seen = np.zeros(len(units), bool)
    nodes = _children_of(units[:1])  # where children lie: the child for a byte is at the node's number XOR the byte
    places: set[int] = set()
    labels = np.arange(1, 256, dtype=np.int64)
    while len(nodes):  # Each unit has one parent at most, so there are never more nodes than units.
        some, rest = nodes[:_AT_ONCE], nodes[_AT_ONCE:]
        if int(some.max()) | 0xFF >= len(units):
            return None
        some = np.unique(some[~seen[some]])
        seen[some] = True
        at = some[:, None] ^ labels
        parents, columns = np.nonzero((units[at] & _LABEL) == labels)
        children = at[parents, columns]
        found = children ^ _children_of(units[children])
        leaves = found[(units[children] >> 8) & 1 == 1]
        if len(leaves) and int(leaves.max()) >= len(units):
            return None
        places.update((units[leaves] & _VALUE).tolist())
        nodes = np.concatenate([rest, found])
    return sorted(places)


def _children_of(units: NDArray[np.uint32]) -> NDArray[np.int64]:
    wide = units.astype(np.int64)
    return (wide >> 10) << ((wide & (1 << 9)) >> 6)
