"""The process that compiles guides: `python -m backend.guided.compile_process FD`, FD being its end of a socket pair.

It imports the library and reads the vocabulary once, then compiles each guide in a child (core/limited_server.py), whose memory
is that of one guide. A child is niced, so that it does not slow the steps of the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from functools import partial

import msgspec

from backend.api.guide import Guide, GuideType
from backend.core.limited_messages import Begin, Ending, Limits, Outcome
from backend.core.limited_server import Perform, serve_jobs
from backend.guided.compile_jobs import CompileSetup, decode_guide
from backend.guided.protocol import GuideBackend, GuideError

NICENESS = 5
MOST_NOTES, LONGEST_NOTE = 16, 160  # limits for the notes of a guide that is not held in full
_libc = ctypes.CDLL(None)


class _Heap(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_libc.mallinfo2.restype = _Heap


def allocated_bytes() -> int:
    """Bytes that this process has allocated with malloc and not freed."""
    heap = _libc.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


def compile_guide(backend: GuideBackend, begin: Begin) -> Outcome:
    """Compile a guide and measure the memory that it holds. Raises whatever the library raises."""
    before = allocated_bytes()
    try:
        compiled = backend.compile(decode_guide(begin.task))
    except GuideError as error:
        return Outcome(begin.job, Ending.REFUSED, text=str(error), place=error.place)
    held = max(0, allocated_bytes() - before)
    notes = tuple(note[:LONGEST_NOTE] for note in compiled.notes[:MOST_NOTES])
    return Outcome(begin.job, Ending.DONE, compiled.portable, held, notes)


def set_up(body: bytes) -> tuple[Perform, Limits]:
    """Raises EverbatchError if the materials are not usable."""
    setup = msgspec.msgpack.decode(body, type=CompileSetup)
    backend = setup.materials.make()
    with contextlib.suppress(GuideError):
        backend.compile(Guide(GuideType.JSON))  # so that children need not initialise the library
    gc.disable()
    return partial(compile_guide, backend), setup.limits


if __name__ == "__main__":
    sys.exit(serve_jobs("guides", set_up, niceness=NICENESS))
