"""A data set through GptManager, at a rate or all at once, after TensorRT-LLM's gptManagerBenchmark: latency and throughput.

    .venv/bin/python -m benchmarks.gpt_manager --engine-dir models/default --dataset requests.json --request-rate 5

The data set is JSON: {"samples": [{"input_ids": [1, 2, 3], "output_len": 20}, ...]}. A rate of -1 sends all at once.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from compat.trtllm import bindings

KINDS = {
    "V1": bindings.TrtGptModelType.V1,
    "IFB": bindings.TrtGptModelType.InflightBatching,
    "UIFB": bindings.TrtGptModelType.InflightFusedBatching,
}


@dataclass
class Driver:
    """GptManager's callbacks: hands out each request when it is due, and notes when its first and last response came."""

    requests: list[bindings.InferenceRequest]
    interval_s: float  # between requests
    started: float = field(default_factory=time.monotonic)
    num_given: int = 0
    sent_at: dict[int, float] = field(default_factory=dict)
    first_at: dict[int, float] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_logits: int = 0
    errors: list[str] = field(default_factory=list)
    last_stats: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def get(self, max_count: int) -> list[bindings.InferenceRequest]:
        due = len(self.requests)
        if self.interval_s:
            due = min(due, 1 + int((time.monotonic() - self.started) / self.interval_s))
        given = self.requests[self.num_given : min(due, self.num_given + max_count)]
        self.num_given += len(given)
        self.sent_at |= {each.request_id: time.monotonic() for each in given}
        return given

    def send(self, request_id: int, tensors: list[bindings.NamedTensor], is_final: bool, error: str) -> None:
        self.first_at.setdefault(request_id, time.monotonic())
        by_name = {each.name: each.tensor for each in tensors}
        if error:
            self.errors.append(error)
        if is_final:
            self.ended_at[request_id] = time.monotonic()
            prompt = self.requests[request_id].input_ids.numel()
            if by_name:
                self.num_tokens += by_name[bindings.tensor_names.SEQUENCE_LENGTH].item() - prompt
        for name in (bindings.tensor_names.CONTEXT_LOGITS, bindings.tensor_names.GENERATION_LOGITS):
            if name in by_name and by_name[name].numel() > 1:
                self.num_logits += by_name[name].numel()
        if len(self.ended_at) == len(self.requests):
            self.done.set()

    def note(self, stats: str) -> None:
        self.last_stats = stats

    def figures(self) -> dict[str, float]:
        """Times in ms, throughput a second."""
        total_s = max(self.ended_at.values()) - self.started
        latencies = sorted(self.ended_at[i] - sent for i, sent in self.sent_at.items())
        firsts = sorted(self.first_at[i] - sent for i, sent in self.sent_at.items())
        count = len(latencies)
        return {
            "num_samples": count,
            "num_error_samples": len(self.errors),
            "total_latency(ms)": 1e3 * total_s,
            "seq_throughput(seq/sec)": count / total_s,
            "token_throughput(token/sec)": self.num_tokens / total_s,
            "avg_sequence_latency(ms)": 1e3 * sum(latencies) / count,
            "p50_sequence_latency(ms)": 1e3 * latencies[count // 2],
            "p99_sequence_latency(ms)": 1e3 * latencies[min(count - 1, 99 * count // 100)],
            "avg_time_to_first_response(ms)": 1e3 * sum(firsts) / count,
        }


def read_requests(dataset: Path, streaming: bool, context: bool, generation: bool) -> list[bindings.InferenceRequest]:
    """A request for each sample; ids count from 0. Raises typer.BadParameter for a file of another form."""
    try:
        samples = [(each["input_ids"], each["output_len"]) for each in json.loads(dataset.read_text())["samples"]]
    except (KeyError, TypeError, ValueError):
        form = '{"samples": [{"input_ids": [1], "output_len": 5}]}'
        raise typer.BadParameter(f"{dataset.name} is no data set; its form is {form}") from None
    requests = []
    for request_id, (input_ids, output_len) in enumerate(samples):
        request = bindings.InferenceRequest(request_id, is_streaming=streaming)
        request.input_ids = torch.tensor([input_ids], dtype=torch.int32)
        request.max_new_tokens = torch.tensor([[output_len]], dtype=torch.int32)
        request.return_context_logits = torch.tensor([context])
        request.return_generation_logits = torch.tensor([generation])
        requests.append(request)
    return requests


def main(
    engine_dir: Annotated[Path, typer.Option(help="directory of a checkpoint")],
    dataset: Annotated[Path, typer.Option(help="JSON with samples")],
    type: Annotated[str, typer.Option(help="V1, IFB (prompts in steps of their own) or UIFB (fused)")] = "UIFB",
    request_rate: Annotated[float, typer.Option(help="requests a second; -1: all at once")] = -1.0,
    max_batch_size: Annotated[int, typer.Option(help="requests that run at once")] = 64,
    max_tokens_in_kvcache: Annotated[int | None, typer.Option(help="of all requests together")] = None,
    streaming: Annotated[bool, typer.Option(help="a response for each token")] = False,
    return_context_logits: Annotated[bool, typer.Option(help="with the logits of the prompts")] = False,
    return_generation_logits: Annotated[bool, typer.Option(help="with those of the output")] = False,
) -> None:
    """Run the data set once and print the figures, and the statistics of the last iteration."""
    if type not in KINDS:
        raise typer.BadParameter(f"--type is {type!r}, allowed are {', '.join(KINDS)}")
    options: dict[str, Any] = {
        "max_batch_size": max_batch_size,
        "gather_context_logits": return_context_logits,
        "gather_generation_logits": return_generation_logits,
    }
    parameters = bindings.TrtGptModelOptionalParams(bindings.KvCacheConfig(max_tokens_in_kvcache), **options)
    requests = read_requests(dataset, streaming, return_context_logits, return_generation_logits)
    driver = Driver(requests, 1 / request_rate if request_rate > 0 else 0.0)
    callbacks = (driver.get, driver.send, set, driver.note)
    with bindings.GptManager(engine_dir, KINDS[type], *callbacks, parameters):
        driver.done.wait()
    for name, value in driver.figures().items():
        print(f"[BENCHMARK] {name} {value:.2f}")
    if driver.num_logits:
        print(f"[BENCHMARK] num_logits {driver.num_logits}")
    print(driver.last_stats)
    for error in driver.errors[:3]:
        print(f"[ERROR] {error}")


if __name__ == "__main__":
    typer.run(main)
