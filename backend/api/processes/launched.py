"""Reads what torchrun, mpirun and srun give to their processes: rank, number of ranks, address of rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from backend.api.config.endpoints import check_address
from backend.api.errors import ConfigError, shown

ENV = "env"  # as workers.join_address: the address is the one that such a program gives
# Names of a rank's number and of the number of ranks: torchrun, Open MPI, MPICH and its relatives, Slurm.
_NAMES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_MOST_RANKS = 1024
KEY_VARIABLE = "EVERBATCH_RANK_KEY"
MIN_KEY = 16  # characters


class Launched(NamedTuple):
    rank: int
    num_ranks: int
    address: str  # HOST:PORT of rank 0


def launched(environment: Mapping[str, str]) -> Launched | None:
    """Read the environment; None where no such program has started this process. Raises ConfigError for a number out of range."""
    for of_rank, of_number in _NAMES:
        if of_rank in environment and of_number in environment:
            break
    else:
        return None
    number = _number(environment, of_number, 1, _MOST_RANKS)
    rank = _number(environment, of_rank, 0, number - 1)
    host = environment.get("MASTER_ADDR", "")
    if not host or "MASTER_PORT" not in environment:
        raise ConfigError(
            f"{of_rank} is {rank} and MASTER_ADDR or MASTER_PORT is not set, so it is not known where rank 0 is; set both to the "
            f"address of rank 0's machine and a free port there"
        )
    # torchrun itself listens at MASTER_PORT.
    port = _number(environment, "MASTER_PORT", 1, 65534) + (environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    address = f"{host}:{port}"
    check_address("MASTER_ADDR and MASTER_PORT", address)
    return Launched(rank, number, address)


def _number(environment: Mapping[str, str], name: str, least: int, greatest: int) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and least <= int(text) <= greatest):
        raise ConfigError(f"{name} is {shown(text)!r}, allowed is {least} to {greatest}; set it, or unset it")
    return int(text)


def rank_0_of(environment: Mapping[str, str]) -> Launched:
    """What the launching program gave to rank 0. Raises ConfigError in another rank, and where no such program has started this
    process."""
    found = launched(environment)
    if found is None:
        raise ConfigError(
            "workers.join_address is env, and none of RANK, OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID is set; start this "
            "with torchrun, mpirun or srun, or write HOST:PORT"
        )
    if found.rank:
        raise ConfigError(
            f"this process is rank {found.rank} of {found.num_ranks}, and rank 0 alone takes requests; run ./everbatch rank here"
        )
    return found


def key_of(environment: Mapping[str, str]) -> bytes:
    """The key that all ranks of a group share. Raises ConfigError."""
    key = environment.get(KEY_VARIABLE, "")
    if len(key) < MIN_KEY:
        said = f"has {len(key)} characters" if key else "is not set"
        raise ConfigError(
            f"{KEY_VARIABLE} {said}, and ranks of other machines prove by it that they belong to this one; give it the same "
            f"secret of {MIN_KEY} characters or more on every machine"
        )
    return key.encode()


def check_join_address(address: str, num_ranks: int, has_replicas: bool) -> None:
    """Raise ConfigError for a workers.join_address that is no address, or does not fit the other settings."""
    if not address:
        return
    if address != ENV:
        check_address("workers.join_address", address)
    if num_ranks == 1:
        raise ConfigError(
            f"workers.join_address is {address} and there is one rank, so that no other one can join; raise "
            f"workers.tensor_parallel_size or workers.pipeline_parallel_size, or leave it out"
        )
    if has_replicas:
        raise ConfigError(
            f"workers.join_address is {address} and there are replicas, or workers.orchestrator is ray; ranks that join are of "
            f"one engine, and Ray starts its own: leave one of them out"
        )
