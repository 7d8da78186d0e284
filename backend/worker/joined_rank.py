"""A rank of another machine: `python -m backend.worker.joined_rank --join HOST:PORT [--rank N --num-ranks M]`.

It joins the rank 0 that listens there (joining.py), with the key of the environment, and then does what rank_process.py does.
`./everbatch rank` starts it, and starts it again after the end of a group.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from msgspec import Struct

from backend.api.config.endpoints import check_address
from backend.api.errors import ConfigError
from backend.api.processes.arguments import arguments_of
from backend.api.processes.launched import key_of
from backend.api.processes.setup import physical_cores, set_up_logging
from backend.wire.address import NetworkAddress
from backend.worker.joining import Joiner, network_address
from backend.worker.rank_messages import MakePool
from backend.worker.rank_process import Links, end_with_parent, serve

log = logging.getLogger("everbatch.rank")
REFUSED = 2  # exit status: it makes no sense to join again


class JoinArguments(Struct, forbid_unknown_fields=True):
    """`rank` and `num_ranks`: those of torchrun or mpirun; None: rank 0 chooses. `timeout`: in seconds."""

    join: str
    rank: int | None = None
    num_ranks: int | None = None
    timeout: float = 600.0
    parent: int | None = None


def main() -> int:
    arguments = arguments_of(JoinArguments)
    set_up_logging("rank" if arguments.rank is None else f"rank {arguments.rank}")
    if arguments.parent is not None:
        end_with_parent(arguments.parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent acts on it
    try:
        check_address("--join", arguments.join)
        rank_0 = network_address(arguments.join, key_of(os.environ))
        return run(rank_0, arguments.rank, arguments.num_ranks, arguments.timeout)
    except ConfigError as error:
        log.error("%s", error.message)
        return REFUSED


class JoinedRank:
    """A rank that has joined rank 0."""

    def __init__(self, rank_0: NetworkAddress, rank: int | None, num_ranks: int | None, timeout_s: float) -> None:
        """Join. rank, num_ranks: those of torchrun or mpirun; None: rank 0 chooses. timeout_s: for rank 0 to answer.

        Raises ConfigError.
        """
        self._joiner = Joiner(rank_0, rank, num_ranks, physical_cores(), timeout_s)
        log.info("joined rank 0 at %s:%d", rank_0.host, rank_0.port)

    def serve(self) -> int:
        """Be this rank until the group ends. Returns 0 when rank 0 has gone, 1 when another rank was lost. Raises ConfigError."""
        try:
            return serve(self._joiner.socket, self._links)
        except (EOFError, OSError):
            log.info("rank 0 has gone")
            return 0
        finally:
            self._joiner.close()

    def _links(self, number: int, pool: MakePool) -> Links:
        return self._joiner.links(number, pool.group, pool.ranks)


def run(rank_0: NetworkAddress, rank: int | None, num_ranks: int | None, timeout_s: float) -> int:
    """Join and serve. Arguments, result and errors are those of JoinedRank."""
    return JoinedRank(rank_0, rank, num_ranks, timeout_s).serve()


if __name__ == "__main__":
    sys.exit(main())
