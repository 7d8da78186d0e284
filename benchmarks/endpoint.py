"""The OpenAI-compatible endpoint: `./everbatch bench endpoint`.

Two questions. What does the way through gateway and Triton cost? Tokens per second of the same requests, from the first one sent
to the last one ended, by the engine alone in this process and by streams of /v1/completions. And does a chat that goes on find
its KV? Time to the first token of turn 5 of a chat, beside the same messages sent with another key, which may not share KV.

Server, stubs, engine, gateway and client share the machine's cores; the two ways are measured in turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from backend.api import EngineConfig, load_config
from backend.executor.served_engine import SPIN_COUNT
from benchmarks.serving import RESULTS, START_TIMEOUT_S, Measure, engine_alone

GOAL = 0.88  # share of the engine's own throughput
TURNS_GOAL = 5.0  # times sooner than cold
KEYS = ("alice-0123456789abcdef", "bob-0123456789abcdef")
PROMPT, NEW = 128, 64
console = Console()


class Endpoint:
    """A server of its own with the gateway beside it."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        from deploy.gateway import GatewayOptions, ServerWithGateway
        from deploy.ports import Ports
        from deploy.triton_server import TritonServer

        keys = directory / "keys"
        keys.write_text("".join(f"{key.split('-')[0]} {key}\n" for key in KEYS))
        keys.chmod(0o600)
        server = TritonServer(config, run_dir=directory / "run", exit_timeout_s=5)
        self._both = ServerWithGateway(server, GatewayOptions(Ports.free().http, api_keys=keys, names=("any",)))
        self._both.start()
        self._both.wait_ready(START_TIMEOUT_S, on_phase=lambda phase: None)
        self.url = self._both.url

    def close(self) -> None:
        self._both.stop()

    def measure(self, prompts: list[list[int]], new: int) -> float:
        """Tokens per second over all: those that the endpoint counts in its usage."""
        return asyncio.run(self._run(prompts, new))

    async def _run(self, prompts: list[list[int]], new: int) -> float:
        async with aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            began = time.perf_counter()
            counts = await asyncio.gather(*(self._complete(session, prompt, new) for prompt in prompts))
            return sum(counts) / (time.perf_counter() - began)

    async def _complete(self, session: aiohttp.ClientSession, prompt: list[int], new: int) -> int:
        body = {"model": "any", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        tokens = 0
        async for event in stream(session, "v1/completions", body, KEYS[0]):
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        assert tokens == new, f"{tokens} tokens came where {new} were asked for"
        return tokens

    def first_token_s(self, messages: list[dict[str, str]], key: str, new: int = 16) -> tuple[float, str]:
        """Seconds to the first text of the next turn, and the whole of it."""
        return asyncio.run(self._turn(messages, key, new))

    async def _turn(self, messages: list[dict[str, str]], key: str, new: int) -> tuple[float, str]:
        body = {"model": "any", "messages": messages, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        began, first, said = time.perf_counter(), 0.0, ""
        async with aiohttp.ClientSession(self.url) as session:
            async for event in stream(session, "v1/chat/completions", body, key):
                text = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if text:
                    first = first or time.perf_counter() - began
                    said += text
        return first, said


async def stream(session: aiohttp.ClientSession, path: str, body: dict[str, Any], key: str) -> Any:
    """The events of one streamed reply."""
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"/{path}", json=whole, headers={"Authorization": f"Bearer {key}"}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line[6:])


def engine_total(config: EngineConfig) -> tuple[Measure, Any]:
    """The engine alone, in tokens per second over all."""
    measure, close = engine_alone(config)

    def total(prompts: list[list[int]], new: int) -> float:
        began = time.perf_counter()
        measure(prompts, new)
        return len(prompts) * new / (time.perf_counter() - began)

    return total, close


def best_of(measure: Measure, level: int, vocab_size: int, repeats: int) -> float:
    rates = []
    for repeat in range(repeats + 1):  # the first only warms up
        rng = random.Random(repeat)
        prompts = [[rng.randrange(5, vocab_size) for _ in range(PROMPT)] for _ in range(level)]
        rates.append(measure(prompts, NEW if repeat else 8))
    return max(rates[1:])


def turns(endpoint: Endpoint, repeats: int) -> dict[str, float]:
    """Medians, in seconds, of turn 5 of chats of about 1,000 tokens: by the client that held it, and by another."""
    warm, cold = [], []
    for repeat in range(repeats):
        rng = random.Random(repeat)
        messages: list[dict[str, str]] = []
        for turn in range(5):
            length = 240 if turn < 4 else 40  # a short question about a chat of about 1,000 tokens
            words = " ".join(rng.choice(("def", "return", "value", "self", "import", "name")) for _ in range(length))
            messages.append({"role": "user", "content": f"chat {repeat} turn {turn}: {words}"})
            seconds, said = endpoint.first_token_s(messages, KEYS[0])
            if turn == 4:
                warm.append(seconds)
                cold.append(endpoint.first_token_s(messages, KEYS[1])[0])
            messages.append({"role": "assistant", "content": said})
    return {"warm_s": statistics.median(warm), "cold_s": statistics.median(cold)}


def main(
    shape: Annotated[str, typer.Option(help="S, M or L: a model of random weights.")] = "L",
    concurrency: Annotated[str, typer.Option(help="Streams at a time.")] = "8,32",
    weights: Annotated[str, typer.Option(help="none, int8 or w8a8.")] = "none",
    repeats: Annotated[int, typer.Option(help="Measurements of each in a round, and chats.", min=1)] = 3,
    rounds: Annotated[int, typer.Option(help="Rounds: engine alone, then the endpoint.", min=1)] = 2,
) -> None:
    """Measure, show a table, write benchmarks/results/endpoint-SHAPE-WEIGHTS.json."""
    from tools.make_random_model import make_random_model

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    levels = [int(level) for level in concurrency.split(",")]
    default = Path("models/default")
    vocab_size = json.loads((default / "config.json").read_text())["vocab_size"]  # so that every token has a text
    best: dict[tuple[str, int], float] = {}
    chats: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_random_model(Path(scratch) / shape, shape=shape, tokenizer_from=default, vocab_size=vocab_size)
        overrides = [f"model.path={model}", "model.dtype=bfloat16", f"model.quantization={weights}"]
        overrides += [f"scheduler.max_batch_size={max(levels)}", f"kv_cache.max_tokens={max(levels) * 256 + 4096}"]
        config = load_config(overrides=[*overrides, "kv_cache.watermark=0"])
        for turn in range(rounds):
            console.print(f"round {turn + 1} of {rounds}")
            measure, close = engine_total(config)
            for level in levels:
                best["engine", level] = max(
                    best.get(("engine", level), 0), best_of(measure, level, vocab_size, repeats)
                )
            close()
            directory = Path(scratch) / f"run{turn}"
            directory.mkdir()
            endpoint = Endpoint(config, directory)
            for level in levels:
                rate = best_of(endpoint.measure, level, vocab_size, repeats)
                best["endpoint", level] = max(best.get(("endpoint", level), 0), rate)
            chats = chats or turns(endpoint, repeats)
            endpoint.close()
    show(shape, weights, levels, best, chats)


def show(
    shape: str, weights: str, levels: list[int], best: dict[tuple[str, int], float], chats: dict[str, float]
) -> None:
    table = Table(title=f"{shape} {weights}: tokens/s over all, prompt {PROMPT}, {NEW} new, best of all")
    for column in ("streams", "engine alone", "/v1/completions", "ratio", "goal"):
        table.add_column(column, justify="right")
    rows = []
    for level in levels:
        engine, endpoint = best["engine", level], best["endpoint", level]
        rows.append({"streams": level, "engine": engine, "endpoint": endpoint, "ratio": endpoint / engine})
        table.add_row(str(level), f"{engine:.1f}", f"{endpoint:.1f}", f"{endpoint / engine:.2f}", f"{GOAL}")
    console.print(table)
    sooner = chats["cold_s"] / chats["warm_s"]
    console.print(
        f"first text of turn 5 of a chat: {chats['warm_s'] * 1000:.0f} ms, cold {chats['cold_s'] * 1000:.0f} ms: "
        f"{sooner:.1f} times sooner (goal {TURNS_GOAL:g})"
    )
    path = RESULTS / f"endpoint-{shape}-{weights}.json"
    path.write_text(json.dumps({"rows": rows, "turn_5": {**chats, "times_sooner": sooner}}, indent=1) + "\n")
    console.print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    typer.run(main)
