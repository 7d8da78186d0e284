"""Makes a failing schedule simpler: fewer kinds of faults, fewer requests, as long as it still fails."""

from __future__ import annotations

from typing import NamedTuple

from tests.simulation.server.simulation import ServerSimulation


class Failure(NamedTuple):
    seed: int
    error: BaseException
    without: frozenset[str] = frozenset()
    num_requests: int | None = None

    @property
    def command(self) -> str:
        """The line that runs it again."""
        parts = [f"python -m tests.simulation.server --seed {self.seed}"]
        parts += [f"--without {kind!r}" for kind in sorted(self.without)]
        parts += [f"--requests {self.num_requests}"] if self.num_requests is not None else []
        return " ".join(parts)


def failure_of(
    seed: int,
    without: frozenset[str] = frozenset(),
    num_requests: int | None = None,
    simulation: type = ServerSimulation,
) -> Failure | None:
    """Run a schedule. None if it passes."""
    try:
        simulation(seed, without, num_requests).run()
    except Exception as error:  # Any exception out of the server is a finding.
        return Failure(seed, error, without, num_requests)
    return None


def shrink(failure: Failure) -> Failure:
    """The simplest schedule found that fails with the same class of exception."""
    swarm = ServerSimulation(failure.seed).swarm
    kinds = sorted(swarm.kinds | swarm.disk_kinds)
    for kind in kinds:
        found = failure_of(failure.seed, failure.without | {kind}, failure.num_requests)
        if found is not None and type(found.error) is type(failure.error):
            failure = found
    count = failure.num_requests or ServerSimulation(failure.seed).swarm.num_requests
    for fewer in range(1, count):
        found = failure_of(failure.seed, failure.without, fewer)
        if found is not None and type(found.error) is type(failure.error):
            return found
    return failure


def report(failure: Failure) -> str:
    """What went wrong, and how to see it again."""
    simplest = shrink(failure)
    simulation = ServerSimulation(simplest.seed, simplest.without, simplest.num_requests)
    swarm = simulation.swarm
    lines = [
        f"seed {failure.seed}: {type(failure.error).__name__}: {failure.error}",
        f"simplest: faults {sorted(swarm.kinds | swarm.disk_kinds)}, {swarm.num_requests} requests, steps of {swarm.step_s} s",
    ]
    if str(simplest.error) != str(failure.error):
        lines.append(f"  {type(simplest.error).__name__}: {simplest.error}")
    return "\n".join([*lines, f"again: {simplest.command}"])


def failed_seeds(seeds: range) -> list[int]:
    """Those of `seeds` that fail. For worker processes."""
    return [seed for seed in seeds if failure_of(seed) is not None]


def first_failure(seeds: range) -> Failure | None:
    return next((found for seed in seeds if (found := failure_of(seed)) is not None), None)
