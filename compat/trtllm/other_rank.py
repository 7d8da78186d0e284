"""A process of the program that is not rank 0: mpirun or torchrun starts the same program once for each rank.

It has an Executor, too, which computes its rank's part in a thread, and neither takes requests nor gives responses: those are
with the Executor of rank 0 alone.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import NoReturn

from backend.api import EngineConfig, EverbatchError
from backend.api.processes.launched import ENV, Launched, launched
from backend.executor.load import join_rank_0

log = logging.getLogger("everbatch.rank")


def other_rank_of(config: EngineConfig) -> OtherRank | None:
    """This process as a rank that is not rank 0; None if it is rank 0, or all ranks are of one program. Raises ConfigError."""
    if config.workers.join_address != ENV:
        return None
    found = launched(os.environ)
    return OtherRank(found, config.triton.attach_timeout_s) if found is not None and found.rank else None


class OtherRank:
    """Stands where an Executor of the engine does. All but `can_enqueue_requests` and `shutdown` is refused."""

    def __init__(self, found: Launched, timeout_s: float) -> None:
        """Join rank 0. Raises ConfigError."""
        self._found = found
        self._serve = join_rank_0(found, timeout_s)
        self._thread = threading.Thread(target=self._run, name=f"everbatch-rank-{found.rank}", daemon=True)
        self._thread.start()

    def can_enqueue_requests(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Wait for rank 0, which ends the group: the other ranks cannot compute without this one."""
        self._thread.join()

    def __getattr__(self, name: str) -> NoReturn:
        raise (
            AttributeError
            if name.startswith("__")
            else RuntimeError(
                f"this process is rank {self._found.rank} of {self._found.num_ranks}, and rank 0 alone takes requests and gives "
                f"responses; ask can_enqueue_requests() first"
            )
        )

    def _run(self) -> None:
        try:
            self._serve()
        except EverbatchError as error:
            log.error("rank %d: %s", self._found.rank, error)
