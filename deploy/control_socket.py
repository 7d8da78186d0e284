"""The socket through which programs of this user ask the launcher for operations on models (the OpenAI endpoint does).

One line of JSON each way: {"operation": "load" | "unload" | "replace" | "list", "model": NAME} and then {"models": [...]} or
{"error": SENTENCE, "is_request": whether the request is at fault}. The answer comes when the operation has ended.
"""

from __future__ import annotations

import socketserver
import threading
from pathlib import Path
from typing import Literal

import msgspec

from backend.api.errors import without_long_values
from deploy.errors import UserError
from deploy.model_control import Described, ModelControl
from deploy.triton_control import ControlFailed

MAX_LINE = 4096


class ControlRequest(msgspec.Struct, forbid_unknown_fields=True):
    operation: Literal["load", "unload", "replace", "list"]
    model: str = ""


class ControlAnswer(msgspec.Struct):
    models: list[Described] = []
    error: str = ""
    is_request: bool = False


class ControlSocket:
    """Listens until it is closed; each connection has a thread."""

    def __init__(self, path: Path, control: ModelControl) -> None:
        path.unlink(missing_ok=True)

        class Handler(socketserver.StreamRequestHandler):
            timeout = 30.0  # for the line to come

            def handle(self) -> None:
                try:
                    line = self.rfile.readline(MAX_LINE)
                    self.wfile.write(msgspec.json.encode(answer(control, line)) + b"\n")
                except OSError:  # The client has closed its connection; the operation was carried out all the same.
                    pass

        self._server = _Server(str(path), Handler)
        path.chmod(0o600)
        self._path = path
        threading.Thread(target=self._server.serve_forever, name="everbatch-control", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    # Connections that wait to be accepted. One more is not told to wait: a client that does not block takes it for connected.
    request_queue_size = 1024


def answer(control: ModelControl, line: bytes) -> ControlAnswer:
    """Do what a line asks for. Any failure is the answer."""
    try:
        asked = msgspec.json.decode(line, type=ControlRequest)
    except msgspec.MsgspecError as error:
        return ControlAnswer(error=f"the line is no operation: {without_long_values(str(error))}", is_request=True)
    try:
        if asked.operation == "load":
            control.load(asked.model)
        elif asked.operation == "unload":
            control.unload(asked.model)
        elif asked.operation == "replace":
            control.replace(asked.model)
        return ControlAnswer(control.described())
    except UserError as error:
        return ControlAnswer(error=str(error), is_request=True)
    except ControlFailed as error:
        return ControlAnswer(error=str(error))
    except Exception as error:
        control.note_failure(f"{asked.operation} of model {asked.model}", error)
        return ControlAnswer(error=f"{asked.operation} failed: {type(error).__name__}; see the server's log")
