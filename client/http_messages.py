"""Requests and answers as JSON: generate (one answer) and generate_stream (server-sent events). Both transports over HTTP
use it.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from client.errors import ClientError, Unavailable, client_error, code_in, no_entry
from client.messages import GenerateRequest, TextChunk

Tensor = tuple[str, list[Any]]  # Triton's name of a type, and a value for each row
_OURS = frozenset(
    "text_output finish_reason num_output_tokens num_input_tokens num_cached_tokens num_context_tokens"
    " num_recomputed_tokens first_token_time_ns last_token_time_ns output_log_probs sequence_index".split()
)
_READ = _OURS | {"response"}  # `everbatch` answers requests with images so
# HTTP statuses with a meaning of their own, from Triton or from a gateway or proxy in front of it -> code.
_CODES = {404: "NOT_FOUND", 413: "INVALID_ARGUMENT", 429: "UNAVAILABLE", 502: "UNAVAILABLE", 503: "UNAVAILABLE"}
_CODES[504] = "DEADLINE_EXCEEDED"


def decode_answer(answer: dict[str, Any], final: bool) -> TextChunk:
    """A TextChunk from the JSON object of one response (one element is a scalar, several are a list)."""
    outputs = {name: value if isinstance(value, list) else [value] for name, value in answer.items() if name in _READ}
    return TextChunk.from_outputs(outputs, final)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line `data: {...}`; None for the blank lines between events. Raises ClientError."""
    text = line.decode(errors="replace").strip()
    if not text.startswith("data:"):
        return None
    return _load(text[len("data:") :])


class FinalMark:
    """Marks the last chunk as final: over HTTP the end of the stream is the only sign, so a chunk without text is held
    until the next comes. A chunk that carries a finish reason, the last one of `num_ends`, is known to be the last and is not
    held back.
    """

    def __init__(self, num_ends: int = 1) -> None:
        self._held: list[TextChunk] = []
        self._num_ends = num_ends

    def push(self, chunk: TextChunk) -> list[TextChunk]:
        """The chunks that may be handed over now."""
        before, self._held = self._held, []
        if chunk.finish_reason is not None:
            self._num_ends -= 1
            return [*before, replace(chunk, final=self._num_ends == 0)]
        if chunk.text:
            return [*before, chunk]
        self._held = [chunk]
        return before

    def end(self) -> TextChunk:
        """The final chunk of a stream that has ended without a finish reason."""
        return replace(self._held[0], final=True) if self._held else TextChunk("", final=True)


def with_final_mark(chunks: Iterator[TextChunk], num_ends: int = 1) -> Iterator[TextChunk]:
    """The chunks, of which the last is marked as final: the last of the `num_ends` that have a finish reason."""
    mark = FinalMark(num_ends)
    for chunk in chunks:
        for ready in mark.push(chunk):
            yield ready
            if ready.final:
                return
    yield mark.end()


def request_body(request: GenerateRequest, timeout_s: float, request_id: str) -> bytes:
    """The JSON of generate and generate_stream."""
    body = request.json_body() | request.parameters(timeout_s)
    return json.dumps(body | {"id": request_id} if request_id else body).encode()


def infer_body(tensors: Mapping[str, Tensor], parameters: Mapping[str, str | int]) -> bytes:
    """The JSON of Triton's infer, for tensors [rows, 1]."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": [len(values), 1], "data": values}
        for name, (datatype, values) in tensors.items()
    ]
    return json.dumps({"inputs": inputs, "parameters": dict(parameters)}).encode()


def read_outputs(body: bytes) -> dict[str, list[Any]]:
    """The outputs in an answer of infer, by name. Raises ClientError."""
    return {output["name"]: output["data"] for output in _load(body.decode(errors="replace")).get("outputs", [])}


def comes_in_parts(request: GenerateRequest) -> bool:
    """True if there may be several responses: generate takes one, also where each is a whole output."""
    return request.stream or request.num_streams > 1


def request_path(request: GenerateRequest, model: str) -> str:
    verb = "generate_stream" if comes_in_parts(request) else "generate"
    return f"/v2/models/{urllib.parse.quote(request.model(model), safe='')}/{verb}"


def request_headers(api_key: str) -> dict[str, str]:
    key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"Content-Type": "application/json", **key}


def status_error(status: int, body: bytes, url: str, *, has_key: bool) -> ClientError:
    """The error of a status that is no success. What the status says goes before a code that the text names."""
    if status == 401:
        return no_entry(url, has_key=has_key)
    message = _error_text(body.decode(errors="replace").strip()) or f"the server answered status {status}"
    return client_error(message, _CODES.get(status, code_in(message)))


def read_answer(body: bytes) -> TextChunk:
    """The answer of generate. Raises ClientError for one that is an error."""
    return decode_answer(_load(body.decode(errors="replace")), final=True)


def read_command_answer(body: bytes) -> dict[str, Any]:
    """The object that model `everbatch` answers a command with. Raises ClientError."""
    return _load(str(_load(body.decode(errors="replace")).get("response", "")))


def broken(url: str) -> ClientError:
    """The error of a connection that ended in the middle."""
    return Unavailable(f"the connection to {url} broke: the server was stopped or started again")


def _load(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise Unavailable("the answer is cut short, or no JSON: the server was stopped, or is another")
    if "error" in answer:
        raise client_error(str(answer["error"]))
    return answer


def _error_text(text: str) -> str:
    """The message in a body `{"error": ...}` or `data: {"error": ...}`, also where it is an object as OpenAI's; the body
    itself when it is neither. Empty for the page of a gateway, which is HTML.
    """
    try:
        error = json.loads(text.removeprefix("data:"))["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return "" if text.startswith("<") else text[:300]
