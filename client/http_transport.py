"""Requests over HTTP: generate (one JSON answer) and generate_stream (server-sent events). Standard library only."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Generator, Iterator
from typing import Any

from client.errors import ClientError, code_in, no_entry, no_http, no_server
from client.messages import GenerateRequest, TextChunk

_OURS = frozenset(
    "text_output finish_reason num_output_tokens num_input_tokens num_cached_tokens num_context_tokens"
    " num_recomputed_tokens first_token_time_ns last_token_time_ns output_log_probs".split()
)


def decode_answer(answer: dict[str, Any], final: bool) -> TextChunk:
    """A TextChunk from the JSON object of one response (one element is a scalar, several are a list)."""
    outputs = {name: value if isinstance(value, list) else [value] for name, value in answer.items() if name in _OURS}
    return TextChunk.from_outputs(outputs, final)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line `data: {...}`; None for the blank lines between events. Raises ClientError."""
    text = line.decode(errors="replace").strip()
    if not text.startswith("data:"):
        return None
    answer = json.loads(text[len("data:") :])
    if "error" in answer:
        raise ClientError(str(answer["error"]), code_in(str(answer["error"])))
    return dict(answer)


def with_final_mark(chunks: Iterator[TextChunk]) -> Iterator[TextChunk]:
    """Mark the last chunk as final: over HTTP the end of the stream is the only sign, so each is held until the next
    comes.

    A chunk that carries a finish reason is known to be the last and is not held back.
    """
    held: TextChunk | None = None
    for chunk in chunks:
        if held is not None:
            yield held
            held = None
        if chunk.finish_reason is not None:
            yield TextChunk(**{**chunk.__dict__, "final": True})
            return
        if chunk.text:
            yield chunk
        else:
            held = chunk
    yield TextChunk(**{**held.__dict__, "final": True}) if held is not None else TextChunk("", final=True)


class HttpTransport:
    """One server; a connection per request."""

    def __init__(self, url: str, model: str, api_key: str = "") -> None:
        """`api_key`: sent as the header `Authorization: Bearer KEY` with every request, unless it is empty."""
        self.url = url if "://" in url else f"http://{url}"
        self._model = model
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def stream(self, request: GenerateRequest, timeout_s: float, request_id: str) -> Generator[TextChunk, None, None]:
        """Yield chunks until the final one. Leaving the iteration early disconnects, which cancels. Raises
        ClientError.
        """
        body = request.json_body() | request.parameters(timeout_s)
        if request_id:
            body["id"] = request_id
        verb = "generate_stream" if request.stream else "generate"
        connection = self._connect(timeout_s)
        try:
            response = self._send(connection, verb, body)
            if request.stream:
                yield from with_final_mark(self._events(connection, response, timeout_s))
            else:
                yield decode_answer(self._answer(response), final=True)
        except TimeoutError:
            raise ClientError(f"no final answer from {self.url} within {timeout_s:g} s", "DEADLINE_EXCEEDED") from None
        except OSError as error:  # It comes first: RemoteDisconnected is an OSError and a BadStatusLine.
            raise self._broken(error) from None
        except (http.client.BadStatusLine, http.client.LineTooLong):
            raise no_http(self.url) from None
        except http.client.HTTPException as error:
            raise self._broken(error) from None
        finally:
            connection.close()

    def close(self) -> None:
        """Nothing is kept open between requests."""

    def _broken(self, error: Exception) -> ClientError:
        return ClientError(f"the connection to {self.url} broke: {error or type(error).__name__}", "UNAVAILABLE")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 8000, timeout=timeout_s)
        try:
            connection.connect()
        except OSError:
            raise no_server(self.url) from None
        return connection

    def _send(
        self, connection: http.client.HTTPConnection, verb: str, body: dict[str, Any]
    ) -> http.client.HTTPResponse:
        path = f"/v2/models/{urllib.parse.quote(self._model)}/{verb}"
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **self._key})
        response = connection.getresponse()
        if response.status == 200:
            return response
        text = response.read().decode(errors="replace").strip()
        if response.status == 401:
            raise no_entry(self.url, has_key=bool(self._key))
        message = _error_text(text) or f"the server answered status {response.status}"
        raise ClientError(message, "NOT_FOUND" if response.status == 404 else code_in(message))

    def _events(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, timeout_s: float
    ) -> Iterator[TextChunk]:
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            if connection.sock is not None:
                connection.sock.settimeout(remaining)
            line = response.readline()
            if not line:
                return
            if (answer := parse_event(line)) is not None:
                yield decode_answer(answer, final=False)

    def _answer(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        answer = json.loads(response.read())
        if "error" in answer:
            raise ClientError(str(answer["error"]), code_in(str(answer["error"])))
        return dict(answer)


def _error_text(text: str) -> str:
    """The message in a body `{"error": ...}` or `data: {"error": ...}`; the body itself when it is neither. Empty for
    the page of a gateway, which is HTML.
    """
    try:
        return str(json.loads(text.removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return "" if text.startswith("<") else text[:300]
