"""The ranks of an engine in a Ray cluster: an actor for each, on whichever node Ray has reserved for it.

    EngineActor        rank 0: schedules, samples, answers; it creates the others
      RankActor 1, 2   join it over TCP (backend/worker/joining.py), and end with it

An engine and its ranks live and die together: when one ends, rank 0 ends, Ray starts it again, and it creates new ranks.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.executor.served_engine import SPIN_COUNT
from backend.wire.address import NetworkAddress

if TYPE_CHECKING:
    from backend.worker.joining import JoinPoint

log = logging.getLogger("everbatch.replicas")
ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """The methods that every actor has, for `collective_rpc`."""

    number = 0  # among the ranks of all replicas

    def rank(self) -> int:
        return self.number

    def node_id(self) -> str:
        return str(import_module("ray").get_runtime_context().get_node_id())

    def pid(self) -> int:
        return os.getpid()


class RankActor(Worker):
    """A rank other than 0."""

    def __init__(self, number: int) -> None:
        self.number = number

    def run(self, host: str, port: int, key: bytes, rank: int, num_ranks: int, timeout_s: float) -> int:
        """Join rank 0, and be this rank until it ends. Raises ConfigError."""
        from backend.worker.joined_rank import run

        return run(NetworkAddress(host, port, key), rank, num_ranks, timeout_s)


class RayRanks:
    """The ranks besides rank 0 of a replica, whose bundles of the placement group are `first` + 1, `first` + 2, ..."""

    def __init__(self, first: int, num_ranks: int, num_threads: int, host: str, timeout_s: float) -> None:
        """Called in the actor of rank 0, which listens at `host`. num_threads: of each rank. timeout_s: for all to join."""
        from backend.worker.joining import JoinPoint

        self._ray = import_module("ray")
        group = import_module("ray.util").get_current_placement_group()
        strategies = import_module("ray.util.scheduling_strategies")
        key = secrets.token_bytes(32)
        self.point: JoinPoint = JoinPoint(NetworkAddress(host, 0, key), self._failure)
        actor = self._ray.remote(RankActor)
        self._actors = [
            actor.options(
                num_cpus=num_threads,
                max_restarts=0,
                max_concurrency=8,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=first + rank
                ),
                runtime_env=runtime_env({}),
            ).remote(first + rank)
            for rank in range(1, num_ranks)
        ]
        port = self.point.address.port
        self._runs = [
            each.run.remote(host, port, key, rank, num_ranks, timeout_s) for rank, each in enumerate(self._actors, 1)
        ]

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a method of every rank; returns one value for each."""
        return list(self._ray.get([getattr(each, method).remote(*args, **kwargs) for each in self._actors]))

    def _failure(self) -> str:
        """Why a rank has ended before it joined; empty while none has."""
        ended, _ = self._ray.wait(self._runs, num_returns=1, timeout=0)
        for each in ended:
            try:
                self._ray.get(each)
            except Exception as error:  # Ray has many kinds for the end of an actor
                return f"rank {self._runs.index(each) + 1} cannot run on its node: {reason(error)}"
            return f"rank {self._runs.index(each) + 1} has ended; its lines in Ray's log say why"
        return ""


def runtime_env(variables: Mapping[str, str]) -> dict[str, Any]:
    """The environment of an actor, which finds the program at the same path on its node."""
    return {"env_vars": {"PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": SPIN_COUNT, **variables}}


def reason(error: Exception) -> str:
    """The program's own sentence, where an actor failed with one; else the first line of Ray's."""
    text = str(error)
    found = text.rpartition("ConfigError: ")[2].partition("\n")[0] if "ConfigError: " in text else ""
    return found or text.strip().splitlines()[0]
