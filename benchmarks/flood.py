"""One client floods the server, and others ask now and then: `./everbatch bench flood --model-dir M` (docs/isolation.md).

    saturation     the flooding client alone, with as many streams as the batch has slots: output tokens/s, requests/s
    alone          the others alone, at a steady rate: time to the first token
    flood          both; the flooding client sends requests at `--overload` times the rate of saturation

The table has the others' first tokens with the flood and without it (ratios of medians and of 99th percentiles), output tokens/s
under the flood as a ratio to saturation, how many requests were refused, and the memory of the engine's process before and
after. The three phases run one after the other on one engine process.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from backend.api import EngineConfig, OutputConfig, Request, Response, load_config
from backend.api.errors import EverbatchError
from backend.executor import Executor

console = Console()
FLOOD, OTHERS = "flood", "others"
GOALS = {"first_token_p99_ratio": 2.0, "goodput_ratio": 0.95}


@dataclass
class Client:
    """What one namespace got in a phase."""

    name: str
    executor: Executor
    vocab_size: int
    prompt: int
    new: int
    first_token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_done: int = 0
    num_refused: int = 0
    num_live: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def ask(self, on_end: Callable[[], None] = lambda: None) -> None:
        prompt = [self.dice.randrange(5, self.vocab_size) for _ in range(self.prompt)]
        output = OutputConfig(exclude_input_from_output=True)
        request = Request(prompt, self.new, streaming=True, cache_salt=self.name, output_config=output)
        asked, has_begun = time.perf_counter(), False

        def on_response(response: Response) -> None:
            nonlocal has_begun
            with self.lock:
                if response.has_error():
                    self.num_refused += 1
                else:
                    self.num_tokens += len(response.result.output_token_ids[0])
                    if not has_begun:
                        self.first_token_s.append(time.perf_counter() - asked)
                    has_begun = True
                if response.is_final:
                    self.num_live -= 1
                    self.num_done += not response.has_error()
            if response.is_final:
                on_end()

        with self.lock:
            self.num_live += 1
        try:
            self.executor.submit(request, on_response)
        except EverbatchError:
            with self.lock:
                self.num_live, self.num_refused = self.num_live - 1, self.num_refused + 1

    def restart(self) -> None:
        with self.lock:
            self.first_token_s, self.num_tokens, self.num_done, self.num_refused = [], 0, 0, 0

    def percentile(self, share: float) -> float:
        times = sorted(self.first_token_s)
        return times[min(len(times) - 1, int(share * len(times)))] if times else float("inf")


def at_rate(client: Client, per_second: float, until: float) -> None:
    """Open loop: requests at a steady rate, whatever becomes of them."""
    begun, number = time.perf_counter(), 0
    while time.perf_counter() < until:
        number += 1
        client.ask()
        time.sleep(max(0.0, begun + number / per_second - time.perf_counter()))


def saturate(client: Client, streams: int, seconds: float) -> tuple[float, float]:
    """Closed loop: (output tokens/s, requests/s) with so many streams at once; the first third is not counted."""
    until = time.perf_counter() + seconds

    def again() -> None:
        if time.perf_counter() < until:
            client.ask(again)

    for _ in range(streams):
        client.ask(again)
    time.sleep(seconds / 3)
    client.restart()
    begun = time.perf_counter()
    time.sleep(max(0.0, until - begun))
    elapsed = time.perf_counter() - begun
    figures = client.num_tokens / elapsed, client.num_done / elapsed
    _wait_for(lambda: client.num_live == 0)
    return figures


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(executor: Executor, pid: int, vocab_size: int, options: Options) -> dict[str, float]:
    """The figures of one run."""
    shape = vocab_size, options.prompt, options.new
    flood, others = Client(FLOOD, executor, *shape), Client(OTHERS, executor, *shape)
    console.print("saturation: the flooding client alone")
    tokens_per_s, requests_per_s = saturate(flood, options.slots, options.seconds)
    rate = options.share * requests_per_s
    console.print(
        f"  {tokens_per_s:.0f} output tokens/s, {requests_per_s:.2f} requests/s; others alone, {rate:.2f} requests/s"
    )
    at_rate(others, rate, time.perf_counter() + options.seconds)
    _wait_for(lambda: others.num_live == 0)
    alone = others.percentile(0.5), others.percentile(0.99), len(others.first_token_s)
    console.print(f"  first token {alone[0]:.2f} s, p99 {alone[1]:.2f} s; now with the flood")
    others.restart()
    flood.restart()
    end = time.perf_counter() + options.seconds
    overload = options.overload * requests_per_s
    threading.Thread(target=at_rate, args=(flood, overload, end), daemon=True).start()
    time.sleep(options.seconds / 4)  # the queue is long by now
    before_mb = memory_mb(pid)
    others.restart()
    num_tokens, begun = flood.num_tokens, time.perf_counter()
    at_rate(others, rate, end)
    elapsed = time.perf_counter() - begun
    goodput = (flood.num_tokens - num_tokens + others.num_tokens) / elapsed
    after_mb, refused = memory_mb(pid), flood.num_refused
    _wait_for(lambda: others.num_live == 0)
    return {
        "others_alone_s": alone[0],
        "others_alone_p99_s": alone[1],
        "others_flooded_s": others.percentile(0.5),
        "others_flooded_p99_s": others.percentile(0.99),
        "others_requests": len(others.first_token_s),
        "others_refused": others.num_refused,
        "first_token_ratio": others.percentile(0.5) / alone[0],
        "first_token_p99_ratio": others.percentile(0.99) / alone[1],
        "goodput_ratio": goodput / tokens_per_s,
        "flood_refused": refused,
        "flood_first_token_s": statistics.median(flood.first_token_s) if flood.first_token_s else float("inf"),
        "memory_before_mb": before_mb,
        "memory_after_mb": after_mb,
    }


@dataclass(frozen=True)
class Options:
    slots: int
    seconds: float
    prompt: int
    new: int
    share: float
    overload: float


def main(
    model_dir: Annotated[Path, typer.Option(help="Checkpoint directory; tools/make_random_model.py makes one.")],
    seconds: Annotated[float, typer.Option(help="Seconds of each of the three phases.", min=5)] = 60.0,
    slots: Annotated[int, typer.Option(help="scheduler.max_batch_size.", min=1)] = 16,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    new: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 32,
    share: Annotated[float, typer.Option(help="Rate of the others, of the rate of saturation.", min=0.01)] = 0.1,
    overload: Annotated[float, typer.Option(help="Rate of the flood, of the rate of saturation.", min=1)] = 10.0,
    setting: Annotated[
        list[str] | None, typer.Option(help="section.key=value of the engine's configuration, repeatable.")
    ] = None,
) -> None:
    """What a client that floods the server does to the others."""
    options = Options(slots, seconds, prompt, new, share, overload)
    config: EngineConfig = load_config(
        overrides=[
            f"model.path={model_dir}",
            f"scheduler.max_batch_size={slots}",
            f"kv_cache.max_tokens={2 * slots * (prompt + new + 64)}",
            *(setting or []),
        ]
    )
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    with (
        tempfile.TemporaryDirectory(prefix="everbatch-flood-") as directory,
        Executor.launch(config, f"{directory}/engine.sock") as executor,
    ):
        pid = executor._transport.engine_pid
        assert pid is not None, "it was launched here"
        figures = measure(executor, pid, vocab_size, options)
    table = Table(title=f"{model_dir.name}, {slots} slots, {prompt} + {new} tokens, flood of {overload:g} x saturation")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        goal = GOALS.get(name)
        table.add_row(name + (f" (goal {goal:g})" if goal else ""), f"{value:,.3f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
