"""The interface of the libraries that compile grammars.

    GuideBackend.compile(guide)   -> CompiledGuide    takes any time and memory: only in a process with limits
    CompiledGuide.portable                            what crosses from there to the engine process
    GuideBackend.load(portable)   -> CompiledGuide    takes what it is known to take; for all who give the same guide
    CompiledGuide.matcher()       -> Matcher          fast: where one output stands within the guide
    Matcher                          fill (a mask of the tokens that may follow), accept, rollback, is_complete

A mask has a bit for each token, in int32 words: token t is bit t % 32 of word t // 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backend.api.guide import Guide


class GuideError(Exception):
    """A guide cannot be compiled. The text is a sentence for the client; `place`: what of the guide's text it is about, as in
    `.structures[1].schema`, or '' for all of it.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(reason)
        self.place = place


class Matcher(Protocol):
    def fill(self, masks: NDArray[np.int32], row: int) -> None:
        """Write the mask of the tokens that may follow to a row of masks [rows, words]. The vocabulary's stop ids are not among
        them: `is_complete` says if the output may end.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by a token. False when the guide forbids it; then nothing else may be asked."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Go back by so many tokens that were accepted."""
        ...

    @property
    def is_complete(self) -> bool:
        """True if the output may end here."""
        ...

    @property
    def error(self) -> str:
        """Why the matcher can tell nothing any more (a limit on its work was reached), or ''."""
        ...


def bits_of(token_ids: Sequence[int]) -> list[tuple[int, np.int32]]:
    """Where the tokens stand in a mask: its word, and the bit in that."""
    return [(i >> 5, np.int32(np.uint32(1 << (i & 31)).astype(np.int32))) for i in token_ids]


class CompiledGuide(Protocol):
    portable: bytes
    notes: tuple[str, ...]  # keywords of its schemas that are not held, with their places

    def matcher(self) -> Matcher:
        """A matcher at the beginning of the output."""
        ...


class GuideBackend(Protocol):
    name: str

    def compile(self, guide: Guide) -> CompiledGuide:
        """Raises GuideError."""
        ...

    def load(self, portable: bytes) -> CompiledGuide:
        """A guide that `compile` of the same library, over the same vocabulary, has compiled. Several threads may call it; it
        lets others run meanwhile.
        """
        ...
