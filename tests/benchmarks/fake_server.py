"""A server with OpenAI's streamed completions that generates nothing: words at a fixed pace, as a peer of benchmarks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fake:
    """`url` of the server, the bodies that it got, and what it does: `pace_s` from word to word, `status` of its answers."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    pace_s: float = 0.0
    status: int = 200


@contextmanager
def fake_server(pace_s: float = 0.0, status: int = 200) -> Iterator[Fake]:
    """A server in this process, on a port of its own."""
    fake = Fake(pace_s=pace_s, status=status)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            self._json(200, {"data": [{"id": "fake-model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            if fake.status != 200:
                return self._json(fake.status, {"error": {"message": "out of order"}})
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for _ in range(body["max_tokens"]):
                time.sleep(fake.pace_s)
                self._event({"choices": [{"index": 0, "text": "word "}]})
            self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
            self.wfile.write(b"data: [DONE]\n\n")
            return None

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps({"object": "text_completion", **event}).encode() + b"\n\n")

        def _json(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
