"""The choices that the native kernels make by the machine (native/choices.h): vectors or tiles, pieces of panels, prefetching.

A table by the instruction set and the caches of a core, never by a vendor's name. No choice changes a bit of a result, so
another one may be set where it was measured to be faster: `EVERBATCH_CHOICES=vector_rows_of_int8=4,fetching_tiles=2`.
`./everbatch doctor` prints the choices for the machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import CDLL, Structure, byref, c_int32
from pathlib import Path
from typing import NamedTuple

from kernels.cpu.isa import AMX_EMULATED, best_isa

VARIABLE = "EVERBATCH_CHOICES"
ANY_NUMBER = 512  # rows of a pass over the weights: vectors multiply as many as there are
KIB = 1 << 10
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_BYTES_OF_ROW = 32 * 2  # a panel in bfloat16 has so many in a row


class Caches(NamedTuple):
    """Bytes of the data caches that a core of this machine reads through; 0 where Linux does not tell."""

    first: int
    second: int
    third: int

    def __str__(self) -> str:
        return ", ".join(f"L{level} {size // KIB:,} KiB" for level, size in enumerate(self, 1) if size) or "unknown"


class Choices(NamedTuple):
    """The fields of native/choices.h, in its order."""

    vector_rows_of_int8: int
    vector_rows_of_bits: int
    short_piece: int
    halves_piece: int
    long_piece: int
    ahead_of_few: int
    ahead: int
    fetching_tiles: int

    def __str__(self) -> str:
        vectors = (
            f"up to {self.vector_rows_of_int8} rows of int8 and {self.vector_rows_of_bits} of fewer bits by vectors"
        )
        if self.vector_rows_of_int8 == self.vector_rows_of_bits == ANY_NUMBER:
            vectors = "any number of rows by vectors"
        pieces = f"pieces of {self.short_piece}, {self.halves_piece} and {self.long_piece} rows"
        ahead = f"fetched {self.ahead_of_few} and {self.ahead} bytes ahead by up to {self.fetching_tiles} tiles"
        return f"{vectors}; {pieces}; {ahead}"


_ROWS, _PIECE, _AHEAD = range(ANY_NUMBER + 1), range(64, (1 << 16) + 1, 64), range(0, (1 << 20) + 1, 64)
# The values that each may have.
LIMITS: dict[str, Sequence[int]] = {
    "vector_rows_of_int8": _ROWS,
    "vector_rows_of_bits": _ROWS,
    "short_piece": range(64, 257, 64),
    "halves_piece": _PIECE,
    "long_piece": _PIECE,
    "ahead_of_few": _AHEAD,
    "ahead": _AHEAD,
    "fetching_tiles": (1, 2, 4, 8),
}


class ChoicesStruct(Structure):
    _fields_ = [(name, c_int32) for name in Choices._fields]


def choices_for(isa: str, caches: Caches) -> Choices:
    """The table.

    With tiles: measured where a core has 2 MB of second-level cache, but that eight tiles share the fetching, which was not
    measured. Without: measured where it has 512 KB and 1 MB, which hold a piece of 2,048 rows beside others. Smaller caches get a
    piece that fills a quarter of them.
    """
    if isa in ("amx", AMX_EMULATED):
        return Choices(6, 12, 256, 256, 2048, 8 * KIB, 8 * KIB, 8)
    of_cache = caches.second // 4 // _BYTES_OF_ROW // 64 * 64
    piece = min(2048, max(256, of_cache)) if caches.second else 2048
    return Choices(ANY_NUMBER, ANY_NUMBER, 256, piece, piece, 4 * KIB, 8 * KIB, 2)


def caches_of(directory: Path = _CACHES) -> Caches:
    """The caches of core 0 by Linux. A file that cannot be read as expected counts as missing."""
    found = {}
    for index in sorted(directory.glob("index*")):
        try:
            kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        except (OSError, UnicodeDecodeError):
            continue
        digits, unit = size.rstrip("KMG"), size[-1:]
        if kind != "Instruction" and digits.isascii() and digits.isdigit() and len(digits) < 8:
            found[level] = int(digits) * {"K": KIB, "M": KIB**2, "G": KIB**3}.get(unit, 1)
    return Caches(found.get("1", 0), found.get("2", 0), found.get("3", 0))


def chosen(isa: str) -> Choices:
    """The table's choices, with those that EVERBATCH_CHOICES names. Raises ValueError for one that there is not."""
    return with_named(choices_for(isa, caches_of()), os.environ.get(VARIABLE, ""))


def with_named(made: Choices, text: str) -> Choices:
    """`text`: NAME=NUMBER, with commas between. Raises ValueError for a name or a number that there is not."""
    named = {}
    for part in filter(None, text.split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in Choices._fields:
            raise ValueError(f"{VARIABLE} has {name[:40]!r}; name some of {', '.join(Choices._fields)}")
        allowed = LIMITS[name]
        number = int(value) if value.isascii() and value.isdigit() and len(value) < 8 else -1
        if number not in allowed:
            raise ValueError(
                f"{VARIABLE} has {name}={value[:20]}; use one of {allowed[0]}, {allowed[1]} .. {allowed[-1]}"
            )
        named[name] = number
    return made._replace(**named)


def choose(library: CDLL, made: Choices) -> None:
    """No product may be computed meanwhile."""
    library.everbatch_choose(byref(ChoicesStruct(*made)))


def main() -> None:
    isa = best_isa()
    print(f"{isa}; {caches_of()}; {chosen(isa)}")


if __name__ == "__main__":
    main()
