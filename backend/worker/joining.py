"""How ranks of several machines find each other (docs/design/ranks.md).

    rank 0 listens     the others connect, prove that they know the key, and say Join: what program they run, on which machine
    rank 0 says Load   it has given each a number; or Refused, with a sentence
    MakePool           names the address of every rank; each connects to those of lower numbers, whose native steps it meets
                       on that connection

One port of rank 0 takes both kinds of connection. A connection that does not prove the key is closed before a message is read.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from backend.api.errors import ConfigError
from backend.api.processes.launched import KEY_VARIABLE
from backend.wire.address import HANDSHAKE_S, NetworkAddress
from backend.worker.rank_messages import At, FromNewcomer, Join, Link, Refused, receive_first, send
from backend.worker.weight_cache import code_version

log = logging.getLogger("everbatch.worker")
SHARE = 0.9  # part of the time for a start in which ranks may join; so the error comes before the stub gives up
LINK_S = 30.0  # for all ranks to connect to each other, which they begin at the same time
WAIT_S = 0.5  # between two looks at what else may have happened
MAX_REJECTIONS = 3  # a key that is rejected so often is wrong
# A connection on which nothing comes is asked for after so many seconds, and ends when so many questions have no answer.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}


class Newcomer(NamedTuple):
    """A connection of a rank that knows the key, and its first message."""

    socket: socket.socket
    host: str
    message: FromNewcomer


class Joined(NamedTuple):
    """A rank that has joined."""

    socket: socket.socket
    host: str
    join: Join

    def at(self, rank: int) -> At:
        return At(rank, self.host, self.join.port)


def network_address(text: str, key: bytes) -> NetworkAddress:
    """The address of HOST:PORT, which check_address has seen."""
    host, _, port = text.rpartition(":")
    return NetworkAddress(host, int(port), key)


@cache
def program_version() -> str:
    """The version of this program: ranks work together only with ranks of an equal one."""
    return code_version()[:12]


@cache
def machine_id() -> str:
    """An id that all processes of this machine share, until the machine is started again."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()


class JoinPoint:
    """Where rank 0 listens."""

    def __init__(self, address: NetworkAddress, failure: Callable[[], str] = lambda: "") -> None:
        """failure: why no more ranks will come, a sentence; empty while they may. Raises ConfigError."""
        self._key, self._failure = address.key, failure
        try:
            self._listener = address.listen()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"workers.join_address is {address.host}:{address.port}, and this machine cannot listen there "
                f"({error}); give an address of its own, and a free port"
            ) from None
        self.address = NetworkAddress(address.host, self._listener.getsockname()[1], address.key)

    def __str__(self) -> str:
        return f"{self.address.host}:{self.address.port}"

    def gather(self, number: int, timeout_s: float, progress: Callable[[str], None]) -> list[Joined]:
        """Wait for `number` ranks to join; they are the ranks 1, 2, ... timeout_s: for all of the start; SHARE of it is for this.
        Raises ConfigError.
        """
        found: list[Joined] = []
        progress(f"waiting for {number} more ranks at {self}")
        timeout_s *= SHARE
        try:
            for newcomer in _newcomers(self._listener, self.address, time.monotonic() + timeout_s):
                if newcomer is not None and isinstance(newcomer.message, Join):
                    found.append(Joined(newcomer.socket, newcomer.host, newcomer.message))
                    _check(found, number + 1)
                    progress(f"{len(found)} of {number} more ranks have joined")
                elif newcomer is not None:
                    newcomer.socket.close()
                if len(found) == number:
                    return _in_order(found)
                if reason := self._failure():
                    raise ConfigError(reason)
            raise ConfigError(
                f"{len(found)} of {number} more ranks have joined at {self} within {timeout_s:g} s "
                f"({SHARE:g} of triton.attach_timeout_s); start each with ./everbatch rank --join HOST:{self.address.port}, and "
                f"the same {KEY_VARIABLE}"
            )
        except BaseException:
            for each in found:
                each.socket.close()
            raise

    def links(self, group: str, ranks: Collection[int]) -> dict[int, socket.socket]:
        """The links of rank 0 to these ranks, which they make. Raises ConfigError."""
        return accept_links(0, group, ranks, self._listener, self.address)

    def close(self) -> None:
        self._listener.close()


class Joiner:
    """A rank of another machine: its connection to rank 0, and where it listens for other ranks."""

    def __init__(
        self, rank_0: NetworkAddress, rank: int | None, num_ranks: int | None, cores: int, timeout_s: float
    ) -> None:
        """Join. rank, num_ranks: those of torchrun or mpirun; None: rank 0 chooses. Raises ConfigError when the time is over, or
        the key is wrong.
        """
        self._rank_0 = rank_0
        self.socket = _connected(rank_0, time.monotonic() + timeout_s, f"within {timeout_s:g} s")
        own = NetworkAddress(self.socket.getsockname()[0], 0, rank_0.key)
        self._listener = own.listen()
        self._own = NetworkAddress(own.host, self._listener.getsockname()[1], own.key)
        send(self.socket, Join(program_version(), machine_id(), cores, self._own.port, rank, num_ranks))
        self.socket.settimeout(None)
        _keep_alive(self.socket)

    def links(self, own: int, group: str, ranks: Sequence[At]) -> dict[int, socket.socket]:
        """The links of the rank `own` to all others. ranks: all but rank 0. Raises ConfigError."""
        found: dict[int, socket.socket] = {}
        lower = {each.rank: NetworkAddress(each.host, each.port, self._rank_0.key) for each in ranks if each.rank < own}
        try:
            for number, address in ({0: self._rank_0} | lower).items():
                found[number] = _link_to(own, number, address, group)
            higher = [each.rank for each in ranks if each.rank > own]
            return found | accept_links(own, group, higher, self._listener, self._own)
        except BaseException:
            for link in found.values():
                link.close()
            raise

    def close(self) -> None:
        self.socket.close()
        self._listener.close()


def accept_links(
    own: int, group: str, ranks: Collection[int], listener: socket.socket, address: NetworkAddress
) -> dict[int, socket.socket]:
    """The links that these ranks make to the rank `own`. Links of other groups are ended. Raises ConfigError."""
    found: dict[int, socket.socket] = {}
    missing = set(ranks)
    for newcomer in _newcomers(listener, address, time.monotonic() + LINK_S) if missing else ():
        if newcomer is None:
            continue
        message = newcomer.message
        if isinstance(message, Link) and message.group == group and message.rank in missing:
            missing.remove(message.rank)
            found[message.rank] = newcomer.socket
        else:
            with suppress(OSError):
                send(newcomer.socket, Refused("the group has all its ranks"))
            newcomer.socket.close()
        if not missing:
            return found
    for link in found.values():
        link.close()
    if missing:
        raise ConfigError(
            f"rank {min(missing)} has not connected to rank {own} at {address.host}:{address.port} within {LINK_S:g} s; the "
            f"machines of all ranks must reach each other's ports"
        )
    return found


def _newcomers(listener: socket.socket, address: NetworkAddress, until: float) -> Iterator[Newcomer | None]:
    """Yields each connection that proves the key, and None every WAIT_S, until the time is over."""
    while (left := until - time.monotonic()) > 0:
        listener.settimeout(min(left, WAIT_S))
        try:
            connection, (host, _) = listener.accept()
        except TimeoutError:
            yield None
            continue
        if not address.admits(connection):
            connection.close()
            continue
        try:
            connection.settimeout(HANDSHAKE_S)
            message = receive_first(connection)
            connection.settimeout(None)
            _keep_alive(connection)
        except (EOFError, OSError, msgspec.MsgspecError, MemoryError, OverflowError):
            log.warning("a connection from %s was ended: it said nothing that a rank says", host)
            connection.close()
            continue
        yield Newcomer(connection, host, message)


def _check(joined: Sequence[Joined], num_ranks: int) -> None:
    """Raise ConfigError if the last one cannot be one of the group, and tell it so."""
    last, others = joined[-1], joined[:-1]
    objection, join = "", last.join
    same = [each for each in others if join.rank is not None and each.join.rank == join.rank]
    if join.program != program_version():
        objection = (
            f"a rank at {last.host} runs version {join.program} of the program, and rank 0 runs {program_version()}; install "
            f"the same version on every machine"
        )
    elif join.num_ranks not in (None, num_ranks):
        objection = (
            f"a rank at {last.host} is one of {join.num_ranks} (WORLD_SIZE), and workers.tensor_parallel_size x "
            f"workers.pipeline_parallel_size is {num_ranks}; start as many"
        )
    elif join.rank is not None and not 1 <= join.rank < num_ranks:
        objection = f"a rank at {last.host} says that it is rank {join.rank} (RANK), and they are 1 to {num_ranks - 1}"
    elif same:
        objection = (
            f"ranks at {same[0].host} and {last.host} both say that they are rank {join.rank}; give each its own RANK"
        )
    if objection:
        with suppress(OSError):
            send(last.socket, Refused(objection))
        raise ConfigError(objection)


def _in_order(joined: Sequence[Joined]) -> list[Joined]:
    """Ranks 1, 2, ...: each has the number that it was given; the others come machine by machine, this one's first."""
    counted = {each.join.rank: each for each in joined if each.join.rank is not None}
    others = sorted(
        (each for each in joined if each.join.rank is None),
        key=lambda each: (each.join.machine != machine_id(), each.join.machine),
    )
    return [counted[number] if number in counted else others.pop(0) for number in range(1, len(joined) + 1)]


def _link_to(own: int, number: int, address: NetworkAddress, group: str) -> socket.socket:
    until = time.monotonic() + LINK_S
    while True:
        try:
            link = address.connect()
            send(link, Link(group, own))
            _keep_alive(link)
            return link
        except OSError as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"rank {own} cannot reach rank {number} at {address.host}:{address.port} ({error}); the machines of all "
                    f"ranks must reach each other's ports"
                ) from None
            time.sleep(WAIT_S / 5)


def _connected(address: NetworkAddress, until: float, limit: str) -> socket.socket:
    rejections = 0
    while True:
        try:
            return address.connect()
        except OSError as error:
            rejections += error.errno is None and isinstance(error, ConnectionRefusedError)
            where = f"rank 0 at {address.host}:{address.port}"
            if rejections >= MAX_REJECTIONS:
                raise ConfigError(
                    f"{where} has another key, or all its ranks; set {KEY_VARIABLE} to the same secret for all ranks of a group"
                ) from None
            if time.monotonic() > until:
                raise ConfigError(
                    f"{where} does not answer {limit} ({error}); start it first, with workers.join_address, and open its port"
                ) from None
            time.sleep(WAIT_S)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def machines(own: str, joined: Sequence[Joined]) -> Mapping[str, list[int]]:
    """The ranks of each machine. own: that of rank 0."""
    found: dict[str, list[int]] = {own: [0]}
    for number, each in enumerate(joined, 1):
        found.setdefault(each.join.machine, []).append(number)
    return found
