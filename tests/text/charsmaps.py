"""Maps of characters in SentencePiece's form, made of a few replacements: see backend/text/charsmap.py."""

from __future__ import annotations

import struct

BLOCK = 256  # units; the children of each node lie in a block of their own


def charsmap(replacements: dict[str, str]) -> bytes:
    units = {0: 1 << 10 | 1 << 9}  # Block 1 is the root's.
    texts = b""
    num_blocks = 2
    nodes = {b"": BLOCK}  # bytes so far -> where the children lie: that for a byte at this number XOR the byte
    for source, target in replacements.items():
        data = source.encode()
        for length in range(1, len(data) + 1):
            if data[:length] in nodes:
                continue
            at = nodes[data[: length - 1]] ^ data[length - 1]
            units[at] = (at // BLOCK ^ num_blocks) << 10 | 1 << 9 | data[length - 1]
            nodes[data[:length]] = num_blocks * BLOCK + at % BLOCK
            num_blocks += 1
        units[nodes[data[:-1]] ^ data[-1]] |= 1 << 8  # A replacement is behind it,
        units[nodes[data]] = 1 << 31 | len(texts)  # and this is where it begins.
        texts += target.encode() + b"\0"
    trie = struct.pack(f"<{num_blocks * BLOCK}I", *(units.get(index, 0) for index in range(num_blocks * BLOCK)))
    return struct.pack("<I", len(trie)) + trie + texts
