"""This server beside vLLM, llama.cpp and OpenVINO, over the network: the same checkpoint, cores, requests, in one run.

    ./everbatch bench served --install aiperf,vllm             what is to take part; nothing is installed without being asked for
    ./everbatch bench served                                   the default model, lengths scaled down to a quarter
    ./everbatch bench served --model L --scale 0.5 --repeats 5 a shape of random weights
    ./everbatch bench served --model DIR --peers vllm          a checkpoint of the Llama family
    ./everbatch bench served --peers ovms=http://127.0.0.1:8100     a server that runs already
    ./everbatch bench compare BEFORE.json AFTER.json           what changed between two runs

docs/bench.md says what is measured and how.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.harness import picture, results, table
from benchmarks.harness.called_from import from_caller
from benchmarks.harness.measure import Outcome
from benchmarks.peers.__main__ import alone
from benchmarks.peers.commands import CommandFailed
from benchmarks.peers.errors import Skipped
from benchmarks.peers.models import Model
from benchmarks.served import checkpoint, drive_aiperf, drive_python, installing, memory
from benchmarks.served.measure import Drivers, measure
from benchmarks.served.options import DRIVERS, INSTALLED, OURS, PAIRS, PEERS, WIRES, Plan, Raw, checked
from deploy.errors import UserError
from deploy.progress import SteppedProgress

IDLE_LOAD = 0.5  # of the system, over the last minute
console = Console() if sys.stdout.isatty() else Console(width=130)


def main(
    peers: Annotated[
        str, typer.Option(help=f"From {', '.join(PEERS)}; NAME=http://HOST:PORT: one that runs already; '': none.")
    ] = ",".join(PEERS),
    model: Annotated[
        str, typer.Option(help="Checkpoint directory, or S, M, M-long, L, E of random weights; else the default model.")
    ] = "",
    wires: Annotated[str, typer.Option(help=f"Of this server: {', '.join(WIRES)}. Peers have openai.")] = ",".join(
        WIRES
    ),
    scale: Annotated[float, typer.Option(help="Factor of all lengths.")] = 0.25,
    users: Annotated[str, typer.Option(help="Requests at a time.")] = "1,4,16,32",
    pairs: Annotated[str, typer.Option(help="Tokens PROMPT:ANSWER, before --scale.")] = PAIRS,
    seconds: Annotated[float, typer.Option(help="After them a measurement sends no further request.")] = 30,
    requests: Annotated[int, typer.Option(help="Requests of each user in a measurement.")] = 4,
    repeats: Annotated[int, typer.Option(help="Measurements of each server in each cell.")] = 3,
    conversations: Annotated[
        int,
        typer.Option(
            help="That come round in turn, over KV for half of them, up to a quarter of them at a time; 0: none."
        ),
    ] = 16,
    turns: Annotated[
        int, typer.Option(help="Turns of each: of the first pair's prompt, and a part of its answer.")
    ] = 4,
    first_token_limit_ms: Annotated[float, typer.Option(help="Of a request that counts as goodput.")] = 2000,
    inter_token_limit_ms: Annotated[float, typer.Option(help="The same, from token to token.")] = 100,
    driver: Annotated[
        str, typer.Option(help=f"Of OpenAI's wire: {', '.join(DRIVERS)}; auto: AIPerf where it is installed.")
    ] = "auto",
    second_level: Annotated[
        int, typer.Option(help="MiB for KV outside of the cache: a file here, --cache-ram of llama.cpp; 0: none.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Directory for the JSON and the picture.")] = Path("bench-served"),
    install: Annotated[
        str, typer.Option(help=f"Only install: from {', '.join(INSTALLED)}, each in an environment of its own.")
    ] = "",
) -> None:
    """Measure this server and its peers over the network; write JSON and a picture."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers are ended with us
    raw = Raw(
        model, peers, wires, scale, users, pairs, seconds, requests, repeats, conversations, turns,
        first_token_limit_ms, inter_token_limit_ms, driver, second_level, from_caller(out),
    )  # fmt: skip
    progress = SteppedProgress()
    try:
        if install:
            return installing.install(install, progress)
        most = checkpoint.most_tokens(model)
        plan = checked(raw, most)
        with alone():
            run(plan, progress)
    except (UserError, CommandFailed, Skipped) as error:
        console.print(f"[red]bench served: {error}[/red]", soft_wrap=True)
        raise typer.Exit(getattr(error, "exit_code", 1)) from None


def run(plan: Plan, progress: SteppedProgress) -> None:
    """Measure, and write what came out; after Ctrl-C what was measured until then."""
    for sentence in plan.left_out:
        progress.step(f"left out: {sentence}")
    model = checkpoint.model_of(plan.model, progress)
    memory.check(plan, model)
    drivers = drivers_of(plan, model, progress)
    outcome = Outcome()
    if outcome.load > IDLE_LOAD:
        progress.step(
            f"the machine is busy (load {outcome.load:.1f}): servers whose threads spin fall far behind on it"
        )
    try:
        measure(plan, model, drivers, outcome, progress)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # seconds, which a second Ctrl-C is not to lose
            signal.signal(number, signal.SIG_IGN)
        if any(row.repeats for row in outcome.rows.values()):
            show(plan, model, drivers, outcome)


def drivers_of(plan: Plan, model: Model, progress: SteppedProgress) -> Drivers:
    """AIPerf for OpenAI's wire where it is installed and wanted. Raises UserError where it is wanted and missing."""
    has_aiperf = drive_aiperf.is_installed()
    missing = "AIPerf is not installed; ./everbatch bench served --install aiperf"
    if plan.driver == "aiperf" and not has_aiperf:
        raise UserError(missing)
    if plan.driver == "python" or not has_aiperf:
        if plan.driver == "auto":
            progress.step(f"{missing} - the driver in Python stands in for it")
        return Drivers(drive_python.run, drive_python.NAME)
    driver = drive_aiperf.AIPerf(model.directory, progress.tick)
    return Drivers(driver.run, drive_aiperf.pinned())


def show(plan: Plan, model: Model, drivers: Drivers, outcome: Outcome) -> None:
    """The table, the ratios to the best peer, the JSON and the picture."""
    more = {"driver": drivers.openai_name, "left_out": list(plan.left_out), "second_level_mib": plan.second_level}
    document = results.document_of(about(model, "bfloat16"), plan.effort, outcome, **more)
    document["ratios"] = table.ratios(document, OURS)
    console.print(table.table_of(document))
    for sentence in document["ratios"]:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
    written = [results.write(document, plan.out, "served"), picture.draw(document, plan.out / "served.png")]
    for path in written:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)


def about(model: Model, weights: str) -> dict[str, object]:
    """What results say of a model. Its `shape`: `30 layers, hidden size 576, vocabulary of 49,152`."""
    layers, hidden = model.config["num_hidden_layers"], model.config["hidden_size"]
    shape = f"{layers} layers, hidden size {hidden:,}, vocabulary of {model.vocab_size:,}"
    return {"name": model.name, "weights": weights, "most_tokens": model.max_length, "shape": shape}


if __name__ == "__main__":
    try:
        typer.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
