"""`everbatch batch FILE.jsonl`: a file of requests through /v1/batches of a server, with a bar. Standard library only.

OUT.jsonl.batch remembers the batch from its beginning until all answers are in OUT.jsonl. A command that was interrupted goes on
with that batch; the server answers its lines meanwhile.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from client.errors import ClientError, InvalidArgument, NotFound, Unauthenticated, Unreachable
from client.http_transport import open_connection
from client.progress import FileProgress
from client.settings import Settings

POLL_S = 0.5
PATIENCE_S = 600.0  # a server that is away is waited for so long
TIMEOUT_S = 60.0
BLOCK = 1 << 18
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_BOUNDARY = "everbatch-batch-file"
_HEAD = (
    f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n'
)
_TAIL = f"\r\n--{_BOUNDARY}--\r\n".encode()
_ERRORS = {400: InvalidArgument, 401: Unauthenticated, 404: NotFound}


class Outcome(NamedTuple):
    """`faults`: sentences about lines for which the whole batch failed."""

    status: str
    completed: int
    failed: int
    faults: list[str]


class _Input(NamedTuple):
    path: Path
    digest: str
    size: int
    endpoint: str


def answer_file(settings: Settings, path: Path, output: Path, shown: bool) -> Outcome:
    """Have the server answer a file, and write the answers. `shown`: a bar on standard error. Raises ClientError, ValueError."""
    given, state = _read(path), output.with_name(output.name + ".batch")
    server = _Server(settings)
    batch = _known(server, state, given)
    if batch is None:
        if output.exists():
            raise ValueError(f"{str(output)!r} exists; name another --output, or delete it")
        batch = _begin(server, given)
        _write_state(state, batch["id"], given)
    with FileProgress(shown=shown) as bar:
        batch = _wait(server, batch, bar)
    faults = [
        f"line {fault['line']}: {fault['message']}" if fault["line"] else fault["message"]
        for fault in (batch["errors"] or {"data": []})["data"]
    ]
    if batch["status"] != "failed":
        _fetch(server, batch, output)
    state.unlink(missing_ok=True)
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        if batch[name] is not None:
            server.delete(batch[name])
    counts = batch["request_counts"]
    return Outcome(batch["status"], counts["completed"], counts["failed"], faults)


def _read(path: Path) -> _Input:
    """Read the input once; its first line names the endpoint. Raises ValueError."""
    digest, first, size = hashlib.sha256(), b"", 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                size += len(block)
            file.seek(0)
            first = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    try:
        endpoint = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = "its first line is no JSON object with custom_id, method, url and body"
        raise ValueError(f"{str(path)!r} is no file of requests: {text}") from None
    return _Input(path, digest.hexdigest(), size, str(endpoint))


def _known(server: _Server, state: Path, given: _Input) -> dict[str, Any] | None:
    """The batch that an earlier command has begun; None where there is none, or the server has it no more. Raises ValueError."""
    try:
        known = json.loads(state.read_text())
        batch_id, digest = known["batch"], known["sha256"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{str(state)!r} cannot be read; delete it to begin anew") from None
    if digest != given.digest:
        raise ValueError(f"{str(state)!r} is of another input; name another --output, or delete it to begin anew")
    try:
        return server.get(f"/v1/batches/{quote(batch_id, safe='')}")
    except NotFound:
        return None


def _begin(server: _Server, given: _Input) -> dict[str, Any]:
    file = server.upload(given)
    asked = {"input_file_id": file["id"], "endpoint": given.endpoint, "completion_window": "24h"}
    return server.post("/v1/batches", asked | {"metadata": {"sha256": given.digest}})


def _write_state(state: Path, batch_id: str, given: _Input) -> None:
    text = json.dumps({"batch": batch_id, "sha256": given.digest})
    part = state.with_name(state.name + ".part")
    part.write_text(text + "\n")
    os.replace(part, state)


def _wait(server: _Server, batch: dict[str, Any], bar: FileProgress) -> dict[str, Any]:
    """Until the batch has ended. A server that is away for a while is waited for."""
    seen_at = time.monotonic()
    while batch["status"] in _OPEN:
        time.sleep(POLL_S)
        try:
            batch = server.get(f"/v1/batches/{quote(batch['id'], safe='')}")
            seen_at = time.monotonic()
            bar.show(batch["request_counts"], (batch["usage"] or {}).get("output_tokens", 0), batch["status"])
        except ClientError as error:
            if error.code not in ("UNREACHABLE", "UNAVAILABLE") or time.monotonic() - seen_at > PATIENCE_S:
                raise
            bar.note("the server does not answer; waiting for it")
    return batch


def _fetch(server: _Server, batch: dict[str, Any], output: Path) -> None:
    """Write all answers, those of lines that failed behind the others."""
    part = output.with_name(output.name + ".part")
    with part.open("wb") as file:
        for file_id in (batch["output_file_id"], batch["error_file_id"]):
            if file_id is not None:
                for block in server.content(file_id):
                    file.write(block)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, output)


class _Server:
    """The OpenAI endpoint of a server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def get(self, path: str) -> dict[str, Any]:
        return self._json("GET", path, None, {})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._json("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})

    def delete(self, file_id: str) -> None:
        """A file that is gone already is no error."""
        try:
            self._json("DELETE", f"/v1/files/{quote(file_id, safe='')}", None, {})
        except ClientError:
            return

    def upload(self, given: _Input) -> dict[str, Any]:
        name = "".join(c if c.isalnum() or c in "-_. " else "_" for c in given.path.name).encode("ascii", "replace")
        head = (_HEAD % name.decode()).encode()

        def parts() -> Iterator[bytes]:
            yield head
            with given.path.open("rb") as file:
                while block := file.read(BLOCK):
                    yield block
            yield _TAIL

        headers = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}
        headers["content-length"] = str(len(head) + given.size + len(_TAIL))
        return self._json("POST", "/v1/files", parts(), headers)

    def content(self, file_id: str) -> Iterator[bytes]:
        connection = open_connection(self._settings, TIMEOUT_S)
        try:
            response = self._send(connection, "GET", f"/v1/files/{quote(file_id, safe='')}/content", None, {})
            while block := response.read(BLOCK):
                yield block
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()

    def _json(self, method: str, path: str, body: Any, headers: dict[str, str]) -> dict[str, Any]:
        connection = open_connection(self._settings, TIMEOUT_S)
        try:
            found = json.loads(self._send(connection, method, path, body, headers).read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()
        if not isinstance(found, dict):
            raise self._unreachable(ValueError("no object"))
        return found

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        """Raises ClientError for an answer that is an error."""
        key = self._settings.api_key
        connection.request(method, path, body, headers | ({"authorization": f"Bearer {key}"} if key else {}))
        response = connection.getresponse()
        if response.status < 400:
            return response
        try:
            text = str(json.loads(response.read())["error"]["message"])
        except (ValueError, KeyError, TypeError):
            text = f"{self._settings.address.url} answers with status {response.status}"
        if response.status in (429, 503):
            raise ClientError(text, "UNAVAILABLE")
        raise _ERRORS.get(response.status, ClientError)(text)

    def _unreachable(self, error: Exception) -> ClientError:
        url = self._settings.address.url
        text = f"no OpenAI endpoint answers at {url} ({type(error).__name__})"
        return Unreachable(f"{text}; start one with ./everbatch serve --batches DIRECTORY, or name it with --url")
