"""The map of characters in a SentencePiece file: what texts become before they are cut, in the form of its library.

    u32 bytes of a trie   the trie: u32 units   replacements: UTF-8, each ends with a zero byte

A unit says which byte leads to it, where its own children lie, and whether one of them holds the place of a replacement. Source:
darts-clone, as the library `tokenizers` and llama.cpp's xcda_array_view read it. The library follows the units without looking
where they lead, so that is checked here once, for each unit that a text can reach.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from backend.api.checkpoint.gguf import AGAIN
from backend.api.errors import ConfigError

MAX_BYTES = 4 << 20  # A larger map is refused; the usual one has 240 thousand.
MAX_REPLACEMENT = 128  # bytes that one character may become; Unicode's longest takes 33
_VALUE, _LABEL = (1 << 31) - 1, (1 << 31) | 0xFF


def check_charsmap(values: list[int], name: str) -> bytes:
    """The map as bytes. `values`: bytes, signed or not; `name`: of the file. Raises ConfigError for one that leads nowhere."""
    wrong = f"{name}: tokenizer.ggml.precompiled_charsmap {{}}; {AGAIN}"
    if len(values) > MAX_BYTES:
        raise ConfigError(wrong.format(f"has {len(values)} bytes, at most {MAX_BYTES} are read"))
    content = bytes(value & 0xFF for value in values)
    size = int.from_bytes(content[:4], "little")
    if size % 4 or not 4 <= size < len(content) - 4:
        raise ConfigError(wrong.format(f"says that its trie has {size} bytes, and has {len(content)}"))
    replacements = content[4 + size :]
    try:
        replacements.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(wrong.format("has replacements that are not UTF-8")) from None
    ends = [index for index, byte in enumerate(replacements) if byte == 0]
    starts = {0, *(end + 1 for end in ends[:-1])}
    places = _reachable_places(struct.unpack_from(f"<{size // 4}I", content, 4))
    if places is None or not places <= starts or not ends or ends[-1] + 1 != len(replacements):
        raise ConfigError(wrong.format("leads out of itself"))
    if max(end - start for start, end in pairwise([-1, *ends])) > MAX_REPLACEMENT + 1:
        raise ConfigError(wrong.format(f"has a replacement of more than {MAX_REPLACEMENT} bytes"))
    return content


def _reachable_places(units: Sequence[int]) -> set[int] | None:
    """Where the replacements begin that a walk through the trie can find; None if a walk can leave the trie.

    A walk stands at a node, a number below that of the units: for a byte it looks at the unit of that number XOR the byte.
    """
    children = defaultdict[int, list[int]](list)  # node -> its units
    for index, unit in enumerate(units):
        if 0 < (label := unit & _LABEL) < 256:
            children[index ^ label].append(index)
    nodes, seen, places = [_offset(units[0])], set[int](), set[int]()
    while nodes:
        node = nodes.pop()
        if node | 0xFF >= len(units):
            return None
        if node in seen:
            continue
        seen.add(node)
        for index in children.get(node, ()):
            child = index ^ _offset(units[index])
            nodes.append(child)
            if units[index] >> 8 & 1 and child < len(units):
                places.add(units[child] & _VALUE)
    return places


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & (1 << 9)) >> 6)
