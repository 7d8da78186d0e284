"""APIClient: LMDeploy's client of its HTTP server, for the OpenAI endpoint of this project (docs/lmdeploy.md)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from compat.llm.errors import RequestError

MAX_REPLY_BYTES = 256 << 20
MAX_SHOWN = 500


class APIClient:
    """`api_server_url`: where the endpoint listens, as http://localhost:9000. Methods raise RequestError for refusals."""

    def __init__(
        self, api_server_url: str, api_key: str | None = None, timeout_s: float = 600.0, **kwargs: Any
    ) -> None:
        self.api_server_url = api_server_url.rstrip("/")
        self.api_key = api_key
        self._timeout_s = timeout_s
        self._models: list[str] = []

    @property
    def available_models(self) -> list[str]:
        """The names of the models, asked for once."""
        if not self._models:
            self._models = [each["id"] for each in self._json("GET", "/v1/models")["data"]]
        return self._models

    def encode(
        self, input: str | list[str], do_preprocess: bool | None = False, add_bos: bool | None = True
    ) -> tuple[Any, Any]:
        """Token ids of a text and their number, or a list of each for several texts."""
        body = {"input": input, "do_preprocess": do_preprocess, "add_bos": add_bos}
        answer = self._json("POST", "/v1/encode", body)
        return answer["input_ids"], answer["length"]

    def chat_completions_v1(self, model: str, messages: Any, stream: bool = False, **fields: Any) -> Iterator[Any]:
        """Yield the one answer, or the chunks of a stream, as dictionaries."""
        return self._events("/v1/chat/completions", {"model": model, "messages": messages, "stream": stream, **fields})

    def completions_v1(self, model: str, prompt: Any, stream: bool = False, **fields: Any) -> Iterator[Any]:
        """Complete a text, or several."""
        return self._events("/v1/completions", {"model": model, "prompt": prompt, "stream": stream, **fields})

    def chat_interactive_v1(
        self, prompt: Any, session_id: int = -1, interactive_mode: bool = False, stream: bool = False, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the one answer, or the chunks of a stream: text, tokens, input_tokens, history_tokens and finish_reason."""
        body = {"prompt": prompt, "session_id": session_id, "interactive_mode": interactive_mode, "stream": stream}
        for line in self._lines("POST", "/v1/chat/interactive", body | fields):
            yield json.loads(line)

    def end_session(self, session_id: int) -> None:
        """Let the server forget a session."""
        for _ in self.chat_interactive_v1("", session_id=session_id, request_output_len=0):
            pass

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        for line in self._lines("POST", path, {name: value for name, value in body.items() if value is not None}):
            if not body["stream"]:
                yield json.loads(line)
            elif line.startswith(b"data: ") and (data := line.removeprefix(b"data: ")) != b"[DONE]":
                yield json.loads(data)

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(b"".join(self._lines(method, path, body)))

    def _lines(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[bytes]:
        """The lines of the answer that are not empty. Raises RequestError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.api_server_url + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        if self.api_key:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                read = 0
                while line := answer.readline(MAX_REPLY_BYTES + 1):
                    read += len(line)
                    if read > MAX_REPLY_BYTES:
                        raise RequestError(f"the answer has more than {MAX_REPLY_BYTES} bytes; ask for fewer tokens")
                    if line.strip():
                        yield line.strip()
        except urllib.error.HTTPError as error:
            raise RequestError(f"status {error.code}: {_message_of(error.read(MAX_REPLY_BYTES))}") from None
        except OSError as error:
            raise RequestError(
                f"{self.api_server_url} does not answer ({error}); start it with ./everbatch serve"
            ) from None


def get_model_list(api_url: str, api_key: str | None = None) -> list[str]:
    """The models of the endpoint whose list is at `api_url`, as http://localhost:9000/v1/models."""
    return APIClient(api_url.partition("/v1/")[0], api_key).available_models


def _message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:MAX_SHOWN]
    except (ValueError, KeyError, TypeError):
        return body[:MAX_SHOWN].decode(errors="replace")
