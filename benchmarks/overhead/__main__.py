"""What a token costs on its way from the engine to a client, part by part, and how many can go it: `./everbatch bench overhead`.

    ./everbatch bench overhead --streams 32,256                     a null device: the way alone, as fast as it goes
    ./everbatch bench overhead --streams 256 --tokens-per-s 10000   a null device of this speed
    ./everbatch bench overhead --model-dir .run/M --weights w8a8    a real engine

A real tritonserver with our model, under a client that costs next to nothing (`bare_client`). CPU times of processes are the
kernel's; those of parts are counted in a run of its own, because to count them costs time as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from backend.api import EngineConfig, load_config
from benchmarks.overhead.service import Service, serve
from deploy import ROOT

RESULTS = Path(__file__).parents[1] / "results"
PROMPT = 16
WARM_UP_TOKENS = 16
console = Console()


@dataclass(frozen=True)
class Run:
    figures: dict[str, Any]  # bare_client.Figures
    cpu_us: dict[str, float]  # of each process, for a token
    parts_us: dict[str, dict[str, float]]  # process -> part -> for a token
    calls: dict[str, dict[str, float]]  # likewise calls

    @property
    def tokens_per_s(self) -> float:
        return float(self.figures["num_tokens"] / self.figures["elapsed_s"])


def request_of(model: str, new: int, vocab_size: int) -> bytes:
    """A serialised ModelInferRequest for `new` tokens, streamed."""
    import tritonclient.grpc as grpc
    from tritonclient.grpc._utils import _get_inference_request

    def tensor(name: str, value: np.ndarray[Any, Any], kind: str) -> grpc.InferInput:
        made = grpc.InferInput(name, list(value.shape), kind)
        made.set_data_from_numpy(value)
        return made

    def int32(name: str, *values: int) -> grpc.InferInput:
        return tensor(name, np.array([values], np.int32), "INT32")

    yes = np.array([[True]])
    if model == "tensorrt_llm":
        ids = np.random.default_rng(0).integers(5, vocab_size, PROMPT)
        inputs = [int32("input_ids", *map(int, ids)), int32("input_lengths", PROMPT), int32("request_output_len", new)]
        inputs += [int32("end_id", -1), tensor("streaming", yes, "BOOL")]
    else:
        text = np.array([["a house by the sea, with a garden"]], dtype=np.object_)
        inputs = [tensor("text_input", text, "BYTES"), int32("max_tokens", new), int32("end_id", -1)]
        inputs += [tensor("stream", yes, "BOOL"), tensor("return_num_output_tokens", yes, "BOOL")]
    request = _get_inference_request(
        model_name=model,
        inputs=inputs,
        model_version="",
        request_id="",
        outputs=None,
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=None,
        parameters=None,
    )
    return bytes(request.SerializeToString())


def run(service: Service, scratch: Path, model: str, streams: int, connections: int, new: int, vocab: int) -> Run:
    load(service, scratch, streams, connections, request_of(model, WARM_UP_TOKENS, vocab))
    parts, cpu = service.parts(), service.cpu_s()
    figures = load(service, scratch, streams, connections, request_of(model, new, vocab))
    used = {name: (now - cpu[name]) for name, now in service.cpu_s().items()} | {"client": figures["client_cpu_s"]}
    if figures["num_tokens"] != streams * new:
        raise SystemExit(f"{figures['num_tokens']} tokens were received, {streams * new} were asked for")
    counted = {
        process: {
            name: [now - before for now, before in zip(both, parts[process][name])] for name, both in told.items()
        }
        for process, told in service.parts().items()
    }
    total = figures["num_tokens"]
    return Run(
        figures,
        {name: seconds * 1e6 / total for name, seconds in used.items()},
        {process: {name: ns / 1e3 / total for name, (_, ns) in told.items()} for process, told in counted.items()},
        {process: {name: calls / total for name, (calls, _) in told.items()} for process, told in counted.items()},
    )


def load(service: Service, scratch: Path, streams: int, connections: int, request: bytes) -> dict[str, Any]:
    """The figures of the client, which is a process of its own."""
    file = scratch / "request"
    file.write_bytes(request)
    command = [
        sys.executable,
        "-m",
        "benchmarks.overhead.bare_client",
        service.url,
        str(streams),
        str(connections),
        str(file),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    if done.returncode:
        raise SystemExit(f"the client failed: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main(
    model: Annotated[str, typer.Option(help="tensorrt_llm (token ids) or ensemble (text).")] = "tensorrt_llm",
    streams: Annotated[str, typer.Option(help="Streams at a time.")] = "32",
    connections: Annotated[int, typer.Option(help="gRPC connections that they share; 0 = one each.")] = 0,
    new: Annotated[int, typer.Option(help="Tokens of each stream.", min=8)] = 500,
    tokens_per_s: Annotated[float, typer.Option(help="Speed of the null device; 0 = without limit.", min=0)] = 0,
    model_dir: Annotated[Path | None, typer.Option(help="Checkpoint of a real engine; null without it.")] = None,
    weights: Annotated[str, typer.Option(help="bf16, int8 or w8a8, of a real engine.")] = "bf16",
    set: Annotated[list[str] | None, typer.Option(help="section.key=value of the configuration.")] = None,
    parts: Annotated[bool, typer.Option(help="Count the parts, in a run of its own.")] = True,
) -> None:
    """Measure, print two tables, and write benchmarks/results/overhead.json."""
    rows = []
    for level in map(int, streams.split(",")):
        config = _config(model_dir, weights, level, new, set or [])
        vocab = 32_000 if model_dir is None else json.loads((model_dir / "config.json").read_text())["vocab_size"]
        step_ms = 1e3 * level / tokens_per_s if tokens_per_s else 0.0
        for probed in (False, True)[: 1 + parts]:
            with tempfile.TemporaryDirectory() as name:
                scratch = Path(name)
                with serve(config, scratch, model, null=model_dir is None, step_ms=step_ms, probed=probed) as service:
                    done = run(service, scratch, model, level, connections or level, new, vocab)
            rows.append((level, probed, done))
            (show_parts if probed else show)(level, done)
    document = [{"streams": n, "probed": probed, "tokens_per_s": r.tokens_per_s, **vars(r)} for n, probed, r in rows]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overhead.json").write_text(json.dumps(document, indent=1) + "\n")


def _config(model_dir: Path | None, weights: str, streams: int, new: int, overrides: list[str]) -> EngineConfig:
    values = [
        f"model.path={model_dir or ROOT / 'models' / 'default'}",
        f"scheduler.max_batch_size={streams}",
        f"kv_cache.max_tokens={streams * (PROMPT + new + 64)}",
        "kv_cache.watermark=0",
        "kv_cache.enable_block_reuse=false",
        "triton.log_requests=false",
    ]
    if model_dir is not None:
        values += ["model.dtype=bfloat16", f"model.quantization={'none' if weights == 'bf16' else weights}"]
    return load_config(overrides=[*values, *overrides])


def show(streams: int, done: Run) -> None:
    figures = done.figures
    console.print(
        f"{streams} streams: {done.tokens_per_s:,.0f} tokens/s, {figures['num_tokens'] / figures['num_responses']:.2f} tokens a "
        f"response, between responses p50 {figures['gap_p50_ms']:.1f} ms, p99 {figures['gap_p99_ms']:.1f} ms"
    )
    table = Table(title="CPU us a token")
    table.add_column("process")
    table.add_column("us", justify="right")
    for name, us in done.cpu_us.items():
        table.add_row(name, f"{us:.1f}")
    total = sum(done.cpu_us.values())
    table.add_row(f"all: {total * done.tokens_per_s / 1e6:.2f} cores", f"{total:.1f}")
    console.print(table)


def show_parts(streams: int, done: Run) -> None:
    table = Table(title=f"the parts, counted: {streams} streams, {done.tokens_per_s:,.0f} tokens/s meanwhile")
    for column in ("process", "part", "CPU us a token", "calls a token"):
        table.add_column(column, justify="left" if column in ("process", "part") else "right")
    for process, told in done.parts_us.items():
        for name, us in told.items():
            table.add_row(process, name, f"{us:.1f}", f"{done.calls[process][name]:.3f}")
        table.add_row(process, "not counted: threads, locks", f"{done.cpu_us[process] - sum(told.values()):.1f}", "")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
