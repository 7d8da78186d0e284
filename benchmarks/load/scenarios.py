"""The table of loads. A scenario says which lanes take turns and which cells they are measured in; the harness does the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.work import Cell

SERVER = "everbatch"  # the server's lanes are named after its wires
REUSE_OFF = ("kv_cache.enable_block_reuse=false",)


@dataclass(frozen=True)
class EngineSpec:
    """An engine that takes part: settings beside those that all have, and how many of it stand beside each other."""

    settings: tuple[str, ...] = ()
    replicas: int = 1


@dataclass(frozen=True)
class Size:
    """What a scenario's cells are made of. `users`: one cell each. `prompt`: lengths that requests take in turn."""

    users: tuple[int, ...]
    prompt: tuple[int, ...]
    new: int


@dataclass(frozen=True)
class Scenario:
    """`engines`: by the name of the lane, from the settings of `--setting`. `wires`: of the server, beside them.

    `kv_cells`: tokens of the KV pool, from the cells; None: room for all. `sessions`: conversations are sessions.
    """

    about: str
    size: Size
    engines: Callable[[Sequence[str]], Mapping[str, EngineSpec]]
    cells: Callable[[Size], list[Cell]]
    wires: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    kv_cells: Callable[[Sequence[Cell]], int] | None = None
    sessions: bool = False


def alone(settings: Sequence[str]) -> dict[str, EngineSpec]:
    """One engine with all the settings."""
    return {"engine": EngineSpec(tuple(settings))}


def each(settings: Sequence[str]) -> dict[str, EngineSpec]:
    """An engine for each setting; one setting may be several with commas."""
    return {text or "default": EngineSpec(tuple(filter(None, text.split(",")))) for text in settings or [""]}


def ways(settings: Sequence[str]) -> dict[str, EngineSpec]:
    """Ways to use all cores: threads, ranks, stages in turns and with micro-batches, replicas."""
    cores = len(os.sched_getaffinity(0))
    all_threads = f"model.num_threads={cores}"
    stages = f"workers.pipeline_parallel_size={cores}"
    own = tuple(settings)
    return {
        f"1 rank x {cores} threads": EngineSpec((*own, all_threads)),
        f"{cores} ranks x 1 thread": EngineSpec((*own, all_threads, f"workers.tensor_parallel_size={cores}")),
        f"{cores} stages in turns": EngineSpec((*own, all_threads, stages)),
        f"{cores} stages, micro-batches": EngineSpec((*own, all_threads, stages, f"workers.micro_batches={2 * cores}")),
        f"{cores} replicas x 1 thread": EngineSpec((*own, "model.num_threads=1"), replicas=cores),
    }


def requests(size: Size) -> list[Cell]:
    """Requests that have nothing to do with each other."""
    first, *others = size.prompt
    return [Cell(first, size.new, users, others=tuple(others)) for users in size.users]


def requests_and_chats(size: Size) -> list[Cell]:
    """Beside them a chat of five turns, and a request as long as its last turn, whose prompt is not in the cache."""
    chat = Cell(size.prompt[0], 16, 1, conversations=1, turns=5)
    return [*requests(size), chat, Cell(chat.longest - 16, 16, 1)]


def one_and_three(size: Size) -> list[Cell]:
    """One session, whose history stays, and three in turn over a pool for two, whose history has always been evicted."""
    history = size.prompt[0]
    return [Cell(16, size.new, 1, conversations=number, turns=6, history=history) for number in (1, 3)]


def crowds(size: Size) -> list[Cell]:
    """1, 4 and 16 times as many conversations as the pool holds, in the order that is worst for it."""
    (users,) = size.users[:1]
    return [Cell(size.prompt[0], size.new, users, conversations=factor * users, turns=4) for factor in (1, 4, 16)]


def room_for(conversations: int) -> Callable[[Sequence[Cell]], int]:
    """A pool that holds so many conversations of the longest cell."""
    block = 32
    return lambda cells: conversations * -(-(max(cell.longest for cell in cells) + 1) // block) * block


SCENARIOS = {
    "serving": Scenario(
        "the server by Triton's gRPC stream and by generate_stream beside the engine alone",
        Size((8, 32), (128,), 64), alone, requests, wires=("grpc", "http"), settings=REUSE_OFF,
    ),
    "endpoint": Scenario(
        "the server by /v1/completions beside the engine alone, and a chat whose KV is found beside one whose KV is not",
        Size((8, 32), (128,), 64), alone, requests_and_chats, wires=("openai",),
    ),
    "sessions": Scenario(
        "a turn whose history is cached, and one whose history was evicted",
        Size((1,), (1000,), 8), alone, one_and_three, kv_cells=room_for(2), sessions=True,
    ),
    "crowd": Scenario(
        "more conversations than the KV pool holds, in turn",
        Size((4,), (64,), 32), alone, crowds, kv_cells=room_for(4), sessions=True,
        settings=("scheduler.policy=max_utilization",),
    ),
    "mixed": Scenario(
        "prompts of several lengths together; each --setting is a lane",
        Size((32,), (16, 16, 16, 900), 64), each, requests, settings=REUSE_OFF,
    ),
    "scale": Scenario(
        "threads, ranks, stages and replicas on the same cores",
        Size((1, 8, 32), (128,), 64), ways, requests, settings=REUSE_OFF,
    ),
}  # fmt: skip
