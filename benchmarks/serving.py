"""Tokens per second through Triton against the engine alone: `./everbatch bench serving`.

The same requests (random prompts of token ids, no end token, greedy) go to the engine in this process, and as gRPC streams, one
a request, to `tensorrt_llm` on a real tritonserver. Server, stub, engine and client share the machine's cores. The two are
measured in turn, A/B/A/B, with only one of them loaded at a time. Decode counts from when every request has its first token.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from backend.api import EngineConfig, Request, Response, load_config
from backend.executor.served_engine import SPIN_COUNT

RESULTS = Path(__file__).parent / "results"
GOAL = 0.9  # share of the engine's own throughput
START_TIMEOUT_S = 300
console = Console()


@dataclass(frozen=True)
class Row:
    model: str
    weights: str
    concurrency: int
    engine_tokens_per_s: float  # best of the repeats
    triton_tokens_per_s: float
    interval_ms: float = 0.0  # triton.stream_interval_ms

    @property
    def ratio(self) -> float:
        return self.triton_tokens_per_s / self.engine_tokens_per_s


class Arrivals:
    """Notes when the tokens of some requests that run together arrived. `add` may be called from any thread."""

    def __init__(self, num_requests: int) -> None:
        self._lock = threading.Lock()
        self._events: list[tuple[float, int]] = []
        self._waiting = set(range(num_requests))
        self._open = set(range(num_requests))
        self._all_began = 0.0
        self._done = threading.Event()
        self._error: str | None = None

    def add(self, request: int, num_tokens: int, is_final: bool) -> None:
        with self._lock:
            now = time.perf_counter()
            self._events.append((now, num_tokens))
            if num_tokens and request in self._waiting:
                self._waiting.remove(request)
                self._all_began = now
            if is_final:
                self._open.discard(request)
                if not self._open:
                    self._done.set()

    def fail(self, message: str) -> None:
        self._error = message
        self._done.set()

    def tokens_per_s(self) -> float:
        """Waits for the end of all."""
        self._done.wait()
        if self._error is not None:
            raise SystemExit(self._error)
        later = [(at, tokens) for at, tokens in self._events if at > self._all_began]
        return sum(tokens for _, tokens in later) / (later[-1][0] - self._all_began)


Measure = Callable[[list[list[int]], int], float]  # prompts, tokens to generate -> tokens per second


def engine_alone(config: EngineConfig) -> tuple[Measure, Callable[[], None]]:
    """Returns (measure, close)."""
    from backend.executor import Executor
    from backend.worker.group import InProcessWorkerGroup

    workers = InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache)
    executor = Executor.in_process(config, workers, config.model.path)

    def measure(prompts: list[list[int]], new: int) -> float:
        arrivals = Arrivals(len(prompts))

        def receiver(index: int) -> Callable[[Response], None]:
            def on_response(response: Response) -> None:
                if response.has_error():
                    return arrivals.fail(response.error_msg)
                arrivals.add(index, len(response.result.output_token_ids[0]), response.is_final)

            return on_response

        for index, prompt in enumerate(prompts):
            executor.submit(Request(prompt, new, streaming=True), receiver(index))
        return arrivals.tokens_per_s()

    return measure, executor.shutdown


def through_triton(config: EngineConfig, run_dir: Path) -> tuple[Measure, Callable[[], None]]:
    """Returns (measure, close): a server of its own, one gRPC connection and stream a request."""
    import tritonclient.grpc as grpc

    from deploy.triton_server import TritonServer

    server = TritonServer(config, run_dir=run_dir, exit_timeout_s=5)
    server.start()
    server.wait_ready(START_TIMEOUT_S)

    def inputs(prompt: list[int], new: int) -> list[grpc.InferInput]:
        values = {"input_ids": prompt, "input_lengths": [len(prompt)], "request_output_len": [new]}
        made = []
        for name, value in values.items():
            made.append(grpc.InferInput(name, [1, len(value)], "INT32"))
            made[-1].set_data_from_numpy(np.array([value], dtype=np.int32))
        made.append(grpc.InferInput("streaming", [1, 1], "BOOL"))
        made[-1].set_data_from_numpy(np.array([[True]]))
        return made

    def measure(prompts: list[list[int]], new: int) -> float:
        arrivals = Arrivals(len(prompts))
        clients = [grpc.InferenceServerClient(server.grpc_url) for _ in prompts]

        def receiver(index: int) -> Callable[[grpc.InferResult | None, Exception | None], None]:
            def on_result(result: grpc.InferResult | None, error: Exception | None) -> None:
                if error is not None:
                    return arrivals.fail(str(error))
                response = result.get_response()
                length = result.as_numpy("sequence_length")
                tokens = 0 if length is None else int(length[0, 0])
                arrivals.add(index, tokens, response.parameters["triton_final_response"].bool_param)

            return on_result

        for index, client in enumerate(clients):
            client.start_stream(receiver(index))
        for client, prompt in zip(clients, prompts, strict=True):
            client.async_stream_infer("tensorrt_llm", inputs(prompt, new))
        rate = arrivals.tokens_per_s()
        for client in clients:
            client.stop_stream()
            client.close()
        return rate

    return measure, server.stop


def best_of(measure: Measure, concurrency: int, prompt: int, new: int, vocab_size: int, repeats: int) -> float:
    """The first of `repeats` + 1 measurements only warms up."""
    rates = []
    for repeat in range(repeats + 1):
        rng = random.Random(repeat)
        prompts = [[rng.randrange(5, vocab_size) for _ in range(prompt)] for _ in range(concurrency)]
        rates.append(measure(prompts, new if repeat else 8))
    return max(rates[1:])


def main(
    model_dir: Annotated[Path | None, typer.Option(help="Checkpoint directory; the L shape without it.")] = None,
    weights: Annotated[str, typer.Option(help="bf16, int8 or w8a8.")] = "bf16",
    concurrency: Annotated[str, typer.Option(help="Streams at a time.")] = "8,32",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    new: Annotated[int, typer.Option(help="Tokens to generate.", min=8)] = 64,
    repeats: Annotated[int, typer.Option(help="Measurements of each in a round.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds: engine alone, then Triton.", min=1)] = 2,
    interval_ms: Annotated[float, typer.Option(help="triton.stream_interval_ms, of the server only.", min=0)] = 0,
) -> None:
    """Measure both in turn; write a table and the figures."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    levels = [int(level) for level in concurrency.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        if model_dir is None:
            from tools.make_random_model import make_random_model

            console.print("making the L shape of random weights")
            model_dir = make_random_model(Path(scratch) / "L", shape="L", tokenizer_from="models/default")
        vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
        overrides = [
            f"model.path={model_dir}",
            "model.dtype=bfloat16",
            f"model.quantization={'none' if weights == 'bf16' else weights}",
            f"scheduler.max_batch_size={max(levels)}",
            f"kv_cache.max_tokens={max(levels) * (prompt + new + 32)}",
            "kv_cache.watermark=0",
            "kv_cache.enable_block_reuse=false",
        ]
        config = load_config(overrides=overrides)
        best: dict[tuple[str, int], float] = {}
        for turn in range(rounds):
            for name in ("engine", "triton"):
                console.print(f"round {turn + 1} of {rounds}: {'the engine alone' if name == 'engine' else 'Triton'}")
                if name == "engine":
                    measure, close = engine_alone(config)
                else:
                    triton = msgspec.structs.replace(config.triton, stream_interval_ms=interval_ms)
                    served = msgspec.structs.replace(config, triton=triton)
                    measure, close = through_triton(served, Path(scratch) / f"run{turn}")
                try:
                    for level in levels:
                        rate = best_of(measure, level, prompt, new, vocab_size, repeats)
                        best[name, level] = max(rate, best.get((name, level), 0.0))
                finally:
                    close()
    rows = [
        Row(model_dir.name, weights, level, best["engine", level], best["triton", level], interval_ms)
        for level in levels
    ]
    show(rows, prompt, new)


def show(rows: list[Row], prompt: int, new: int) -> None:
    """Print the table and write benchmarks/results/serving-MODEL-WEIGHTS.json."""
    table = Table(title=f"{rows[0].model} {rows[0].weights}: decode tokens/s, prompt {prompt}, {new} new, best of all")
    for column in ("streams", "engine alone", "through Triton", "ratio", "goal"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row.concurrency),
            f"{row.engine_tokens_per_s:.1f}",
            f"{row.triton_tokens_per_s:.1f}",
            f"{row.ratio:.2f}",
            f"{GOAL}",
        )
    console.print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"serving-{rows[0].model}-{rows[0].weights}.json"
    document = [{**asdict(row), "ratio": row.ratio} for row in rows]
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    typer.run(main)
