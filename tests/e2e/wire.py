"""What a client on the wire needs: token requests over gRPC, JSON over HTTP, metrics. Of libraries, tritonclient only."""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

TYPES = {
    "input_ids": np.int32,
    "input_lengths": np.int32,
    "request_output_len": np.int32,
    "streaming": bool,
    "stop": bool,
    "end_id": np.int32,
    "runtime_top_k": np.int32,
    "runtime_top_p": np.float32,
    "temperature": np.float32,
    "seed": np.uint64,
    "START": np.int32,
    "END": np.int32,
    "STOP": np.int32,
    "CORRID": np.uint64,
    "step": np.int32,
    "session_len": np.int32,
    "stop_words_list": np.int32,
    "bad_words_list": np.int32,
    "exclude_input_in_output": bool,
    "return_log_probs": bool,
    "top_log_probs": np.int32,
    "return_perf_metrics": bool,
    "repetition_penalty": np.float32,
    "min_tokens": np.int32,
    "embedding_bias": np.float32,
    "resume_output_ids": np.int32,
    "resume_log_probs": np.float32,
    "resume_ended": bool,
    "guided_decoding_guide_type": np.object_,
    "guided_decoding_guide": np.object_,
    "context_phase_params": np.uint8,
}

CANCELLED = "everbatch_requests_finished_total{reason=cancelled}"
SETTLED_WITHIN_S = 120


@dataclass
class Stream:
    """One request on a gRPC stream of its own."""

    client: grpcclient.InferenceServerClient
    responses: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[grpcclient.InferResult]:
        """Yield responses up to the final one. Raises InferenceServerException for an error response."""
        while True:
            result, error = self.responses.get(timeout=120)
            if error is not None:
                raise error
            yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return

    def token_ids(self) -> list[int]:
        return [token for result in self for token in ids_of(result)]

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self.client.stop_stream()
        self.client.close()


def ids_of(result: grpcclient.InferResult) -> list[int]:
    """Valid token ids of a response of `tensorrt_llm`; none for the empty answer to a stop."""
    if result.as_numpy("output_ids") is None:
        return []
    length = int(result.as_numpy("sequence_length").reshape(-1)[0])
    return result.as_numpy("output_ids").reshape(-1)[:length].tolist()


class TokenClient:
    """Requests to `tensorrt_llm`."""

    def __init__(self, url: str, model: str = "tensorrt_llm") -> None:
        self._url, self._model = url, model
        self._streams: list[Stream] = []

    def start(
        self, prompt: list[int], max_tokens: int, request_id: str = "", request_type: str = "", **inputs: Any
    ) -> Stream:
        """Send a request on a stream of its own; scalars and lists become [1, n] tensors of the right type."""
        if "CORRID" in inputs:  # what is left out of a turn means a session of one turn (START=1, END=1)
            inputs = {"START": 0, "END": 0, **inputs}
        values = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": max_tokens, **inputs}
        return self.send(
            {
                name: np.array(value, dtype=TYPES[name]).reshape(1, *np.shape(value) or (1,))
                for name, value in values.items()
            },
            request_id,
            {"request_type": request_type} if request_type else None,
        )

    def send(
        self, arrays: dict[str, np.ndarray], request_id: str = "", parameters: dict[str, str] | None = None
    ) -> Stream:
        """Send tensors as they are."""
        stream = Stream(grpcclient.InferenceServerClient(self._url))
        self._streams.append(stream)
        stream.client.start_stream(lambda result, error: stream.responses.put((result, error)))
        stream.client.async_stream_infer(
            self._model, [to_input(*item) for item in arrays.items()], request_id=request_id, parameters=parameters
        )
        return stream

    def generate(self, prompt: list[int], max_tokens: int, **inputs: Any) -> list[int]:
        """Returns only the generated tokens, from one response."""
        stream = self.start(prompt, max_tokens, exclude_input_in_output=True, **inputs)
        ids = stream.token_ids()
        stream.close()
        self._streams.remove(stream)
        return ids

    def error_of(self, stream: Stream) -> str:
        """The message of a request that must fail."""
        try:
            ids = stream.token_ids()
        except InferenceServerException as error:
            return str(error.message())
        raise AssertionError(f"no error, but {len(ids)} tokens")

    def __enter__(self) -> TokenClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.close()


def to_input(name: str, array: np.ndarray) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def post(url: str, body: Any, timeout: float = 120) -> tuple[int, str]:
    """POST JSON (or bytes as they are). Returns status and text, of errors too."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a server-sent event stream."""
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def scrape(metrics_url: str) -> dict[str, float]:
    """Our metrics by `name{label=value,...}`; the labels `model` and `version` are left out."""
    with urllib.request.urlopen(metrics_url, timeout=10) as response:
        text = response.read().decode()
    found = {}
    for name, labels, value in re.findall(r"^(\w+)(?:\{(.*?)\})? (\S+)$", text, re.MULTILINE):
        kept = sorted(f"{k}={v}" for k, v in re.findall(r'(\w+)="(.*?)"', labels) if k not in ("model", "version"))
        found[name + (f"{{{','.join(kept)}}}" if kept else "")] = float(value)
    return found


def settled(metrics_url: str) -> dict[str, float]:
    """Our metrics once two reads agree that are further apart than the periods of engine and stub, a second each.

    A busy machine may publish later than that: who counts something waits for `reaches` first.
    """
    deadline = time.monotonic() + SETTLED_WITHIN_S
    before = scrape(metrics_url)
    while True:
        time.sleep(2.5)
        after = scrape(metrics_url)
        if _ours(before) == _ours(after):
            return after
        assert time.monotonic() < deadline, "something still runs, or the metrics change by themselves"
        before = after


def reaches(metrics_url: str, name: str, value: float) -> bool:
    """Whether a counter of ours gets to `value`. It is published up to two seconds after what it counts."""
    return eventually(lambda: scrape(metrics_url).get(name, 0) >= value, 30)


def num_cancelled(metrics_url: str) -> float:
    """How many requests the engine has ended because they were cancelled.

    That a gauge of running requests is 0 does not show it: a short request may come and go between two publications.
    """
    return scrape(metrics_url).get(CANCELLED, 0)


def _ours(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("everbatch_")}


def eventually(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def still(count: Callable[[], int]) -> int:
    """A count of Triton's own once it does not grow: a request is counted when Triton lets go of it, after its answer."""
    counts: list[int] = []

    def is_still() -> bool:
        counts.append(count())
        return len(counts) > 5 and len(set(counts[-6:])) == 1  # half a second

    assert eventually(is_still, 30), counts
    return counts[-1]
