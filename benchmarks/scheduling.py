"""What the host spends on a step besides the model: CPU time of scheduling, bookkeeping and delivery.

    ./everbatch bench scheduling                       1, 8, 32 and 256 rows that generate
    ./everbatch bench scheduling --rows 32 --queued 64

The device is a `NullDevice`: it answers with random tokens, so these figures say nothing about a model's speed, and its own time
is taken out. Time is CPU time (of the loop's thread, and of the whole process), because a wall clock measures what else runs on
the machine. A figure is the median over blocks of 32 steps, in each of which every row takes one KV block.

    hot        the device answers at once: EngineCore.step() and its parts
    cold       the device reads and writes 64 MiB first, without the GIL, as a model's weights go through the caches; what the
               host touches comes from memory again, as it does in earnest
    loop       the loop's thread with delivery: inbox, routing, encoding, sending to a client in another process (cold)
    process    all threads of the engine process (cold)

A second table: admissions beside 100 and 10,000 cached conversations under one template (benchmarks/admission.py).
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from backend.api import EngineConfig, Request
from backend.api.config.schema import KvCacheConfig, SchedulerConfig
from backend.api.errors import InvalidRequest
from backend.api.lora import LoraConfig
from backend.api.processes.setup import calm_garbage_collector
from backend.core.messages import Command, Hello
from backend.core.step import BlockId, MemoryUse, ModelInfo, PreparedAdapter, SampledToken, StepInput, StepOutput
from backend.engine.core import EngineCore
from backend.engine.loop import EngineLoop
from backend.wire.engine_server import EngineServer
from benchmarks.admission import admission_table, measure_admission

RESULTS = Path(__file__).parent / "results"
PROMPT_TOKENS = 128
BLOCK_STEPS = 32  # steps of one measurement, and tokens of a KV block
VOCAB = 32_000
COLD_BLOCKS = 4  # a cold step takes some 15 ms
SWEEP_BYTES = 64 << 20
GOALS_MS = {32: 0.3, 256: 1.5}
LOOP, PROCESS, SCHEDULE, COMMIT = range(4)  # a NullDevice's clocks; the last two only where they are added
COLUMNS = {
    "hot": "hot_ms",
    "(best)": "hot_best_ms",
    "schedule": "schedule_ms",
    "commit": "commit_ms",
    "update, publish": "update_ms",
    "cold": "cold_ms",
    "loop": "loop_ms",
    "process": "process_ms",
}
console = Console()


@dataclass
class Figures:
    """Milliseconds of CPU time per step; `best` is the fastest block, all others are medians."""

    rows: int
    queued: int
    hot_ms: float
    hot_best_ms: float
    schedule_ms: float  # these three add up to hot_ms
    commit_ms: float
    update_ms: float
    cold_ms: float
    loop_ms: float
    process_ms: float
    goal_ms: float | None


class NullDevice:
    """A WorkerGroup without a model: random tokens. Reads its `clocks` while `rows` rows generate, and none else runs."""

    def __init__(self, rows: int, num_blocks: int, is_cold: bool) -> None:
        self._rows = rows
        self._memory = np.zeros(SWEEP_BYTES if is_cold else 0, np.uint8)
        self._num_blocks = num_blocks
        self._random = random.Random(0)
        self._own_ns = 0
        self._num_steps = 0
        self.clocks = [lambda: time.thread_time_ns() - self._own_ns, lambda: time.process_time_ns() - self._own_ns]
        self._marks: list[list[int]] = []  # all clocks, every BLOCK_STEPS steps
        self.is_done = threading.Event()

    guides = None

    def load(self) -> ModelInfo:
        return ModelInfo("null", VOCAB, 1 << 20, kv_bytes_per_token=1)

    def prepare_adapter(self, lora: LoraConfig) -> PreparedAdapter:
        raise InvalidRequest(f"adapter {lora.shown} is asked for, and there is no model")

    def free_memory_bytes(self) -> int:
        return 1 << 40

    def check(self) -> None:
        """Nothing to check: these workers have no processes."""

    def memory_use(self) -> MemoryUse:
        return MemoryUse()

    def initialize_kv_cache(self, max_blocks: int, block_size: int, num_blocks: int, layers: object = None) -> None:
        pass

    def read_blocks(self, block_ids: list[BlockId]) -> bytes:
        raise NotImplementedError("no KV travels here")

    def write_blocks(self, block_ids: list[BlockId], data: bytes, num_blocks: int) -> None:
        raise NotImplementedError("no KV travels here")

    def submit(self, step: StepInput) -> None:
        started_ns = time.thread_time_ns()
        np.add(self._memory, 1, out=self._memory)
        sampled = [SampledToken(row.slot, self._random.randrange(VOCAB)) for row in step.rows if row.samples]
        self._own_ns += time.thread_time_ns() - started_ns
        if len(step.rows) == self._rows and all(row.num_tokens == 1 for row in step.rows):
            if self._num_steps % BLOCK_STEPS == 0:
                self._marks.append([clock() for clock in self.clocks])
            self._num_steps += 1
            if len(self._marks) > self._num_blocks:
                self.is_done.set()
        self._output = StepOutput(step.step_id, sampled)

    def collect(self) -> StepOutput:
        return self._output

    def shutdown(self) -> None:
        pass

    def per_step_ms(self, clock: int) -> list[float]:
        """What one of the clocks showed per step, for each block but the first, which holds the end of the last prompts."""
        marks = [mark[clock] for mark in self._marks[1:]]
        return [(after - before) / BLOCK_STEPS / 1e6 for before, after in zip(marks, marks[1:])]


class Stopwatch:
    """Adds up the CPU time of a method while it stands in for it."""

    def __init__(self, owner: object, name: str) -> None:
        self._total_ns = 0
        self._call: Callable[..., object] = getattr(owner, name)
        setattr(owner, name, self._timed)

    def _timed(self, *arguments: object) -> object:
        started_ns = time.thread_time_ns()
        result = self._call(*arguments)
        self._total_ns += time.thread_time_ns() - started_ns
        return result

    def read(self) -> int:
        """Returns the nanoseconds so far."""
        return self._total_ns


def make_core(rows: int, device: NullDevice) -> EngineCore:
    config = EngineConfig(
        kv_cache=KvCacheConfig(block_size=BLOCK_STEPS, max_tokens=2 * rows * request_tokens(device._num_blocks)),
        scheduler=SchedulerConfig(max_batch_size=rows, max_num_tokens=max(1024, 4 * rows)),
    )
    core = EngineCore(config, device)
    calm_garbage_collector()
    return core


def request_tokens(num_blocks: int) -> int:
    """Prompt and output of a request that outlives the measurement, the others' prompts included."""
    return PROMPT_TOKENS + BLOCK_STEPS * (num_blocks + 8)


def make_requests(count: int, num_blocks: int) -> list[Request]:
    rng = random.Random(1)
    length = request_tokens(num_blocks) - PROMPT_TOKENS
    return [Request([rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)], length, streaming=True) for _ in range(count)]


def run_core(
    rows: int,
    queued: int,
    num_blocks: int,
    is_cold: bool = False,
    prepare: Callable[[EngineCore], None] = lambda core: None,
) -> NullDevice:
    """Step an EngineCore in this thread until the device has seen enough."""
    device = NullDevice(rows, num_blocks, is_cold)
    core = make_core(rows, device)
    prepare(core)
    core.begin_poll()
    for request_id, request in enumerate(make_requests(rows + queued, num_blocks)):
        core.enqueue(request_id, request)
    while not device.is_done.is_set():
        core.step()
    return device


def split_core(rows: int, queued: int, num_blocks: int) -> tuple[float, float]:
    """Shares of schedule and commit in the CPU time of a step."""

    def prepare(core: EngineCore) -> None:
        for name in ("schedule", "commit"):
            core.workers.clocks.append(Stopwatch(core.scheduler, name).read)

    device = run_core(rows, queued, num_blocks, prepare=prepare)
    whole, schedule, commit = (sum(device.per_step_ms(clock)) for clock in (LOOP, SCHEDULE, COMMIT))
    return schedule / whole, commit / whole


def run_loop(rows: int, queued: int, num_blocks: int) -> NullDevice:
    """An EngineLoop with an EngineServer in this process, its client in another one. Cold."""
    device = NullDevice(rows, num_blocks, is_cold=True)
    core = make_core(rows, device)
    loop = EngineLoop(core)
    arrived = threading.Semaphore(0)

    def post(command: Command) -> None:
        loop.post(command)
        arrived.release()

    with tempfile.TemporaryDirectory() as directory:
        socket_path = str(Path(directory) / "engine.sock")
        server = EngineServer(socket_path, post, lambda index: Hello(index, core.model, "", core.config))
        thread = threading.Thread(target=loop.run, args=(server.deliver, server.publish_stats))
        arguments = [socket_path, str(rows + queued), str(num_blocks)]
        with subprocess.Popen([sys.executable, "-m", "benchmarks.scheduling", "client", *arguments]):
            for _ in range(rows + queued):  # so fast a device would be through with the first before the last is sent
                arrived.acquire()
            thread.start()
            device.is_done.wait()
            loop.stop()
            thread.join()
            server.close()
    return device


def client(socket_path: str, count: int, num_blocks: int) -> None:
    """The other process: send the requests, take the responses and throw them away."""
    from backend.executor import Executor

    ended = threading.Semaphore(0)
    with Executor.attach(socket_path, wait_s=10) as executor:
        for request in make_requests(count, num_blocks):
            executor.submit(request, lambda response: ended.release() if response.is_final else None)
        for _ in range(count):
            ended.acquire()


def measure(rows: int, queued: int, num_blocks: int) -> Figures:
    hot_ms = run_core(rows, queued, num_blocks).per_step_ms(LOOP)
    schedule, commit = split_core(rows, queued, num_blocks)
    hot = statistics.median(hot_ms)
    cold = statistics.median(run_core(rows, queued, COLD_BLOCKS, is_cold=True).per_step_ms(LOOP))
    device = run_loop(rows, queued, COLD_BLOCKS)
    return Figures(
        rows=rows,
        queued=queued,
        hot_ms=hot,
        hot_best_ms=min(hot_ms),
        schedule_ms=schedule * hot,
        commit_ms=commit * hot,
        update_ms=(1 - schedule - commit) * hot,
        cold_ms=cold,
        loop_ms=statistics.median(device.per_step_ms(LOOP)),
        process_ms=statistics.median(device.per_step_ms(PROCESS)),
        goal_ms=GOALS_MS.get(rows),
    )


def show(figures: list[Figures]) -> None:
    """A table; a goal is met when the cold figure is within it."""
    table = Table(title=f"CPU time of a step, ms (null device, prompts of {PROMPT_TOKENS}, all rows stream)")
    for name in ("rows", "queued", *COLUMNS, "goal"):
        table.add_column(name, justify="right")
    for f in figures:
        goal = "" if f.goal_ms is None else f"{f.goal_ms} {'met' if f.cold_ms <= f.goal_ms else 'missed'}"
        table.add_row(str(f.rows), str(f.queued), *(f"{getattr(f, field):.3f}" for field in COLUMNS.values()), goal)
    console.print(table)


def main(
    rows: Annotated[str, typer.Option(help="Rows that generate at the same time; several with commas.")] = "1,8,32,256",
    queued: Annotated[int, typer.Option(help="Requests that wait behind them.", min=0)] = 0,
    blocks: Annotated[int, typer.Option(help="Blocks of 32 steps to measure.", min=3)] = 15,
) -> None:
    """Measure, show a table, write benchmarks/results/scheduling.json."""
    counts = [int(count) for count in rows.split(",")]
    figures = [measure(count, queued, blocks) for count in track(counts, "rows", console=console)]
    show(figures)
    cases = [(count, namespace) for count in (100, 10_000) for namespace in ("", "team")]
    admissions = [
        measure_admission(NullDevice(0, 1, is_cold=False), *case)
        for case in track(cases, "admissions", console=console)
    ]
    console.print(admission_table(admissions))
    RESULTS.mkdir(exist_ok=True)
    name = "scheduling.json" if not queued else f"scheduling-{queued}-queued.json"
    (RESULTS / name).write_text(json.dumps([asdict(f) for f in [*figures, *admissions]], indent=1) + "\n")
    console.print(f"written: benchmarks/results/{name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        client(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        typer.run(main)
