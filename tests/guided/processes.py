"""What is known of processes, from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Whichever of its threads has started them."""
    found = list[int]()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(each) for each in (task / "children").read_text().split()]
    return found


def all_children() -> set[int]:
    """Of this process."""
    return set(children_of(os.getpid()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(is_so: Callable[[], object], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < until:
        time.sleep(0.005)
    assert is_so()
