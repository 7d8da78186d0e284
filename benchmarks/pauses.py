"""How long streams pause when the engine process dies: `./everbatch bench pauses --model-dir DIR` (docs/replay.md).

Each time an engine process is launched, streams begin together, and the process is killed (SIGKILL) when one of them has had 20
tokens. Measured are the time until the engine is ready again, and until the next token of any stream. The tokens must be those
of a run without a kill. The benchmark alternates between three configurations:

    computed again      nothing outlives the engine: all tokens of the streams are computed once more
    pool                kv_cache.survives_engine, the default: whole blocks are found in the pool of the engine before
    pool and spare      triton.spare_engine as well: a process waits with Python, torch and the kernels loaded
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from backend.api import load_config
from backend.executor import Executor
from backend.wire.client import wait_until
from benchmarks.called_from import from_caller
from benchmarks.streams import Stream

RESULTS = Path(__file__).parent / "results"
SPARE = "triton.spare_engine=true"
WAYS = {"computed again": ("kv_cache.survives_engine=false",), "pool": (), "pool and spare": (SPARE,)}
KILLED_AT = 20  # tokens of the first stream
SPARE_S = 15.0  # for the spare process to load its libraries
TOO_EARLY = "the streams ended before the engine was killed; give more --new tokens"
SENT_S = 0.05  # after the kill, in which tokens may still arrive that the engine had sent
console = Console()


@dataclass(frozen=True)
class Pause:
    """Seconds from the kill on."""

    way: str
    ready_s: float
    next_token_s: float


@contextmanager
def launched(settings: list[str]) -> Iterator[Executor]:
    with tempfile.TemporaryDirectory(prefix="everbatch-pauses-") as directory:
        with Executor.launch(load_config(overrides=settings), f"{directory}/run/engine.sock") as executor:
            yield executor


def begun(executor: Executor, streams: int, prompt: int, new: int) -> list[Stream]:
    assert executor.hello is not None  # it has been launched
    rng, vocab_size = random.Random(0), executor.hello.model.vocab_size
    prompts = [[rng.randrange(5, vocab_size) for _ in range(prompt)] for _ in range(streams)]
    return [Stream(executor, each, new) for each in prompts]


def killed(executor: Executor, way: str, streams: list[Stream]) -> Pause:
    """Kills the engine in the midst of the streams. Raises SystemExit where they end too early or the engine stays away."""
    streams[0].wait_for(KILLED_AT)
    dead = executor.engine_pid
    if dead is None or streams[0].has_ended:
        raise SystemExit(TOO_EARLY)
    os.kill(dead, signal.SIGKILL)
    at = time.perf_counter()
    if not wait_until(lambda: executor.is_ready() and executor.engine_pid not in (None, dead), 300):
        raise SystemExit("the engine was not back 300 s after it was killed")
    ready_s = time.perf_counter() - at
    for stream in streams:
        stream.result()
    later = [came - at for stream in streams for came in stream.times if came > at + SENT_S]
    if not later:
        raise SystemExit(TOO_EARLY)
    return Pause(way, ready_s, min(later))


def show(pauses: list[Pause], title: str) -> None:
    table = Table(title=title)
    for column in ("what outlives the engine", "kills", "ready again, s", "next token, s: median", "least", "greatest"):
        table.add_column(column, justify="left" if not table.columns else "right")
    for way in WAYS:
        own = [pause for pause in pauses if pause.way == way]
        next_s = [pause.next_token_s for pause in own]
        table.add_row(
            *(way, str(len(own)), f"{statistics.median(pause.ready_s for pause in own):.2f}"),
            *(f"{value:.2f}" for value in (statistics.median(next_s), min(next_s), max(next_s))),
        )
    console.print(table)


def main(
    model_dir: Annotated[Path, typer.Option(help="Checkpoint directory; tools/make_random_model.py makes one.")],
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 1100,
    new: Annotated[int, typer.Option(help="Tokens of each answer.", min=KILLED_AT + 1)] = 60,
    streams: Annotated[int, typer.Option(help="Streams at once.", min=1, max=256)] = 1,
    repeats: Annotated[int, typer.Option(help="Kills of each way.", min=1)] = 3,
    setting: Annotated[
        list[str] | None, typer.Option(help="section.key=value of the configuration, repeatable.")
    ] = None,
) -> None:
    """Kill engines under streams; write how long the streams pause."""
    common = [f"model.path={from_caller(model_dir)}", f"scheduler.max_batch_size={max(2, streams)}", *(setting or [])]
    with launched(common) as executor:
        right = [stream.result() for stream in begun(executor, streams, prompt, new)]
    pauses = []
    for repeat in range(repeats):
        for way, settings in WAYS.items():
            with launched([*common, *settings]) as executor:
                if SPARE in settings:
                    time.sleep(SPARE_S)
                going = begun(executor, streams, prompt, new)
                pauses.append(killed(executor, way, going))
                if [stream.tokens for stream in going] != right:
                    raise SystemExit(f"{way}: other tokens than without a kill")
            console.print(f"{repeat + 1} of {repeats}, {way}: next token after {pauses[-1].next_token_s:.2f} s")
    title = (
        f"{model_dir.name}, {streams} stream{'s' * (streams > 1)}, {prompt} + {new} tokens, {' '.join(setting or [])}"
    )
    show(pauses, title)
    RESULTS.mkdir(exist_ok=True)
    document = {
        "model": model_dir.name,
        "settings": setting or [],
        "streams": streams,
        "prompt": prompt,
        "new": new,
        "pauses": [asdict(pause) for pause in pauses],
    }
    path = RESULTS / f"pauses-{model_dir.name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    typer.run(main)
