"""Small images for tests, and a server that hands them out."""

from __future__ import annotations

import base64
import ssl
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def png(width: int = 2, height: int = 2, colour: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = (b"\0" + bytes(colour) * width) * height
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PNG, OTHER = png(), png(3, 1, (0, 90, 200))
IN_BASE64, OTHER_IN_BASE64 = base64.b64encode(PNG).decode(), base64.b64encode(OTHER).decode()
DATA_URL = f"data:image/png;base64,{IN_BASE64}"
OTHER_URL = f"data:image/png;base64,{OTHER_IN_BASE64}"


class ImageServer:
    """What came to it, and how it answers a path: `answers` writes to the handler."""

    def __init__(self, answers: Callable[[BaseHTTPRequestHandler], None], tls: ssl.SSLContext | None) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []  # paths with headers
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                answers(self)

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@contextmanager
def image_server(
    answers: Callable[[BaseHTTPRequestHandler], None], tls: ssl.SSLContext | None = None
) -> Iterator[ImageServer]:
    server = ImageServer(answers, tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def send(
    handler: BaseHTTPRequestHandler, body: bytes = PNG, kind: str = "image/png", status: int = 200, **headers: str
) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    if "Transfer_Encoding" not in headers:
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
