"""Ctrl-C beside grpc. KeyboardInterrupt is raised between any two steps of the main thread, and grpc's Python code holds
locks there: one that is raised inside leaves a lock taken for ever, and every later call on the channel waits for it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred(wake: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C within the block calls `wake`, which should end what the block waits for; KeyboardInterrupt is raised when
    the block is left, instead of whatever it raised. Other threads, and programs with a SIGINT handler of their own, see
    no difference.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        wake()

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt from None
