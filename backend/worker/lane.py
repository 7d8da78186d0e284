"""Lane: where the steps of a worker group run, one after the other, in the order in which they are submitted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from backend.core.step import StepOutput, WorkersLost
from backend.worker.pipeline import Pending

T = TypeVar("T")


class Lane:
    """Runs work in the caller's thread; or in one thread of its own, so that the caller plans the next step meanwhile."""

    def __init__(self, has_thread: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "everbatch-steps") if has_thread else None

    def start(self, launch: Callable[[], Pending]) -> Pending:
        """Run a step. With a thread it runs once those ahead of it have, and `wait` raises what `launch` raises."""
        return launch() if self._thread is None else _Started(self._thread.submit(lambda: launch().wait()))

    def wait_for(self, work: Callable[[], T]) -> T:
        """Run `work` behind every step that was started, and return its result."""
        return work() if self._thread is None else self._thread.submit(work).result()

    def drain(self) -> None:
        """Return when every step that was started has ended, well or not."""
        self.wait_for(lambda: None)

    def close(self) -> None:
        """Let the step that runs end; those behind it do not begin."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


class _Started(NamedTuple):
    future: Future[StepOutput]

    def wait(self) -> StepOutput:
        return self.future.result()


@contextmanager
def all_or_nothing(in_flight: deque[Pending], lane: Lane, device: torch.device) -> Iterator[None]:
    """On a failure drop every step in flight, once the device has finished them. WorkersLost if the device is lost."""
    try:
        yield
    except Exception:  # it is raised again below: whatever failed, the steps in flight are lost
        in_flight.clear()
        lane.drain()
        if device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as error:
                raise WorkersLost(f"the device {device} is lost: {error}") from error
        raise
