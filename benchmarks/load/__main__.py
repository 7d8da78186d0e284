"""This engine, alone or behind its server, under a table of loads; what is compared takes turns in one run.

    ./everbatch bench load serving                                  the shape M of random weights
    ./everbatch bench load mixed --model DIR --setting scheduler.max_mixed_context_tokens=512 --setting ""
    ./everbatch bench load scale --model L --users 1,8 --prompt 64 --new 32 --without stages
    ./everbatch bench load flood --seconds 60                       one client floods, others ask now and then

A chat's or session's later turns have a column of their own ("returning"). The results have the form of `bench served`, so that
`bench compare` reads them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from backend.api import EngineConfig, load_config
from backend.api.errors import ConfigError
from backend.executor.served_engine import SPIN_COUNT
from benchmarks.harness import picture, results, table
from benchmarks.harness.answers import Limits
from benchmarks.harness.called_from import from_caller
from benchmarks.harness.engine import EngineLane, launched
from benchmarks.harness.measure import Effort, Lane, Outcome, alternate
from benchmarks.harness.work import Cell, kv_tokens_for
from benchmarks.load import flood
from benchmarks.load.scenarios import SCENARIOS, EngineSpec, Scenario, Size
from benchmarks.peers.__main__ import alone
from benchmarks.peers.commands import CommandFailed
from benchmarks.peers.environments import BENCH
from benchmarks.peers.errors import Skipped
from benchmarks.peers.models import Model
from benchmarks.served import checkpoint, contestants
from benchmarks.served.__main__ import about
from benchmarks.served.measure import ServerLane, ready
from benchmarks.served.options import in_range, listed, one_of, user_levels, whole, writable
from deploy.errors import UserError
from deploy.progress import SteppedProgress

FLOOD = "flood"
NAMES = (*SCENARIOS, FLOOD)
WEIGHTS = ("bf16", "int8", "w8a8", "w4a8")
TABLE = "\n\n".join(f"{name}: {scenario.about}." for name, scenario in SCENARIOS.items())
console = Console() if sys.stdout.isatty() else Console(width=130)


@dataclass(frozen=True)
class Run:
    """The options, checked."""

    scenario: Scenario
    model: Model
    weights: str
    settings: tuple[str, ...]
    cells: list[Cell]
    effort: Effort
    without: tuple[str, ...]

    @property
    def kv_tokens(self) -> int:
        """Tokens of the pool."""
        return self.scenario.kv_cells(self.cells) if self.scenario.kv_cells else kv_tokens_for(self.cells)

    def overrides(self) -> list[str]:
        """What all engines of the run, and the server's, are configured with."""
        return [
            *shared_settings(self.model, self.weights, max(cell.users for cell in self.cells), self.kv_tokens),
            *self.scenario.settings,
        ]


def shared_settings(model: Model, weights: str, users: int, kv_tokens: int) -> list[str]:
    """Overrides of the configuration."""
    return [
        f"model.path={model.directory}",
        "model.dtype=bfloat16",
        f"model.quantization={'none' if weights == 'bf16' else weights}",
        f"scheduler.max_batch_size={users}",
        f"kv_cache.max_tokens={kv_tokens}",
        "kv_cache.watermark=0",
    ]


def main(
    name: Annotated[str, typer.Argument(help=f"From {', '.join(NAMES)}.", metavar="SCENARIO")],
    model: Annotated[str, typer.Option(help="Checkpoint directory, or S, M, M-long, L, E of random weights.")] = "M",
    weights: Annotated[str, typer.Option(help=f"From {', '.join(WEIGHTS)}.")] = "bf16",
    users: Annotated[str, typer.Option(help="Requests at a time; the scenario's own without it.")] = "",
    prompt: Annotated[str, typer.Option(help="Tokens of a prompt; requests take several lengths in turn.")] = "",
    new: Annotated[int, typer.Option(help="Tokens of an answer; 0: the scenario's own.")] = 0,
    requests: Annotated[int, typer.Option(help="Requests of each user in a measurement.")] = 2,
    repeats: Annotated[int, typer.Option(help="Measurements of each lane in each cell.")] = 3,
    seconds: Annotated[float, typer.Option(help="After them a measurement sends no further request.")] = 60,
    setting: Annotated[
        list[str] | None, typer.Option(help="section.key=value of the configuration; in `mixed` each is a lane.")
    ] = None,
    without: Annotated[str, typer.Option(help="Lanes to leave out, by a part of their names.")] = "",
    out: Annotated[Path, typer.Option(help="Directory for the JSON and the picture.")] = Path("bench-load"),
) -> None:
    """Measure, show a table, write SCENARIO.json and SCENARIO.png."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines and servers are ended with us
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    progress = SteppedProgress()
    try:
        one_of("SCENARIO", name, NAMES)
        one_of("--weights", weights, WEIGHTS)
        in_range("--requests", requests, 1, 100)
        in_range("--repeats", repeats, 1, 20)
        in_range("--seconds", seconds, 1, 3600)
        in_range("--new", new, 0, 131_072)
        usual = flood.SIZE if name == FLOOD else SCENARIOS[name].size
        lengths = tuple(at_least_one(prompt, "--prompt")) if prompt else usual.prompt
        size = Size(tuple(user_levels(users)) if users else usual.users, lengths, new or usual.new)
        effort = Effort(repeats, requests, seconds, Limits())
        cells = [flood.cell_of(size)] if name == FLOOD else SCENARIOS[name].cells(size)
        check(cells, checkpoint.most_tokens(model))
        settings = tuple(setting or ())
        configured([part for text in settings for part in text.split(",") if part])
        directory = writable(from_caller(out))
        with alone():
            checked = checkpoint.model_of(model, progress)
            outcome = Outcome()
            if name == FLOOD:
                engine = [*shared_settings(checked, weights, cells[0].users, kv_tokens_for(cells)), *settings]
                flood.measure(configured(engine), checked.vocab_size, cells[0], effort, outcome, progress)
            else:
                run = Run(SCENARIOS[name], checked, weights, settings, cells, effort, tuple(listed(without)))
                measure(run, outcome, progress)
    except (UserError, CommandFailed, Skipped, ConfigError) as error:
        console.print(f"[red]bench load: {escape(str(error))}[/red]", soft_wrap=True, highlight=False)
        raise typer.Exit(getattr(error, "exit_code", 1)) from None
    document = results.document_of(about(checked, weights), effort, outcome, scenario=name)
    console.print(table.table_of(document))
    for path in (results.write(document, directory, name), picture.draw(document, directory / f"{name}.png")):
        console.print(f"written: {path}", soft_wrap=True, highlight=False)


def measure(run: Run, outcome: Outcome, progress: SteppedProgress) -> None:
    """All lanes of a scenario, loaded at the same time, in turns."""
    with ExitStack() as stack:
        lanes: list[Lane] = list(engine_lanes(run, stack, progress))
        if run.scenario.wires:
            lanes += server_lanes(run, stack, progress)
        lanes = [lane for lane in lanes if not any(text in lane.name for text in run.without)]
        if not lanes:
            raise UserError("--without leaves no lane; name fewer")
        alternate(run.cells, lanes, run.effort, run.model.vocab_size, outcome, progress)


def engine_lanes(run: Run, stack: ExitStack, progress: SteppedProgress) -> list[EngineLane]:
    """The engines that --without has not left out, each a process of its own, loaded."""
    specs: Mapping[str, EngineSpec] = run.scenario.engines(run.settings)
    lanes = []
    for name, spec in specs.items():
        if not any(text in name for text in run.without):
            progress.step(f"loading {run.model.name} {run.weights}: {name}")
            config = configured([*run.overrides(), *spec.settings])
            replicas = [launched(stack, config) for _ in range(spec.replicas)]
            lanes.append(EngineLane(name, replicas, run.scenario.sessions))
    return lanes


def server_lanes(run: Run, stack: ExitStack, progress: SteppedProgress) -> list[ServerLane]:
    """This server by each wire of the scenario. Raises Skipped when it does not start."""
    longest, users = max(cell.longest for cell in run.cells), max(cell.users for cell in run.cells)
    settings = tuple(text for text in (*run.overrides(), *run.settings) if not text.startswith("model.path="))
    setup = contestants.Setup(run.model, run.kv_tokens, users, longest, BENCH, progress, settings=settings)
    server = ready(contestants.ours(setup), setup, stack)
    return [ServerLane(server, wire) for wire in run.scenario.wires]


def configured(overrides: Sequence[str]) -> EngineConfig:
    """Raises ConfigError."""
    return load_config(overrides=list(overrides))


def check(cells: Sequence[Cell], most_tokens: int) -> None:
    """Raise UserError for sequences that the model does not take."""
    longest = max(cells, key=lambda cell: cell.longest)
    if longest.longest > most_tokens:
        raise UserError(
            f"{longest.name}: {longest.longest:,} tokens, the model takes {most_tokens:,}; "
            f"give a smaller --prompt or --new, or another --model"
        )


def at_least_one(text: str, option: str) -> list[int]:
    """`16,900` as lengths. Raises UserError."""
    lengths = [whole(part, 131_072) for part in listed(text)]
    found = [length for length in lengths if length is not None]
    if not found or len(found) != len(lengths):
        raise UserError(f"{option} is {text[:60]!r}; give numbers from 1 to 131,072, such as 16,900")
    return found


main.__doc__ = f"{main.__doc__}\n\n{TABLE}\n\n{FLOOD}: {flood.ABOUT}."

if __name__ == "__main__":
    try:
        typer.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
