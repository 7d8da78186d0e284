"""A gRPC client that costs next to nothing: it frames HTTP/2 by hand, and looks into what it received only after the end.

    python -m benchmarks.overhead.bare_client URL STREAMS CONNECTIONS FILE     FILE: a serialised ModelInferRequest

It opens `STREAMS` streams of ModelStreamInfer over so many connections, sends the same request on each, reads until all have
ended, and prints a line of JSON (Figures). Nothing but the frames that this needs is known here: it is no library.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW, MAX_FRAME = 4, 5  # settings
LARGEST_WINDOW = (1 << 31) - 1
HEADER_BYTES = 9
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass(frozen=True)
class Figures:
    num_tokens: int
    num_responses: int
    elapsed_s: float  # from the first response to the last
    client_cpu_s: float  # from the first to the last, too
    gap_p50_ms: float  # between two responses of a stream
    gap_p99_ms: float


class Stream:
    def __init__(self) -> None:
        self.chunks: list[tuple[float, bytes]] = []  # with the time of their arrival
        self.has_ended = False


class Connection:
    """One socket, with streams of its own."""

    def __init__(self, url: str, num_streams: int, message: bytes) -> None:
        host, port = url.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._left = b""
        self.streams = {1 + 2 * n: Stream() for n in range(num_streams)}
        settings = struct.pack(">HIHI", INITIAL_WINDOW, LARGEST_WINDOW, MAX_FRAME, (1 << 24) - 1)
        opening = PREFACE + frame(SETTINGS, 0, 0, settings)
        opening += frame(WINDOW, 0, 0, struct.pack(">I", LARGEST_WINDOW - 65_535))
        for number in self.streams:
            opening += frame(HEADERS, END_HEADERS, number, headers(url))
            opening += frame(DATA, END_STREAM, number, b"\0" + struct.pack(">I", len(message)) + message)
        self._opening = opening

    def begin(self) -> None:
        self.socket.sendall(self._opening)

    @property
    def has_ended(self) -> bool:
        return all(stream.has_ended for stream in self.streams.values())

    def read(self) -> None:
        """Take in what there is. Raises SystemExit when the server ends the connection or a stream before its time."""
        received = self.socket.recv(1 << 18)
        now = time.perf_counter()
        if not received:
            raise SystemExit("the server closed the connection")
        data = self._left + received if self._left else received
        at = 0
        while len(data) - at >= HEADER_BYTES:
            high, low, kind, flags, number = struct.unpack_from(">BHBBI", data, at)
            end = at + HEADER_BYTES + (high << 16 | low)
            if end > len(data):
                break
            if kind == DATA:
                self.streams[number].chunks.append((now, data[at + HEADER_BYTES : end]))
            elif kind in (RESET, GOAWAY):
                raise SystemExit(f"the server sent a frame of kind {kind}: {data[at + HEADER_BYTES : end]!r}")
            elif kind in (SETTINGS, PING) and not flags & ACK:
                self.socket.sendall(frame(kind, ACK, 0, b"" if kind == SETTINGS else data[at + HEADER_BYTES : end]))
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                self.streams[number].has_ended = True
            at = end
        self._left = data[at:]


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def headers(url: str) -> bytes:
    """As literals, which need no state of either side (RFC 7541, 6.2.2)."""
    fields = {":method": "POST", ":scheme": "http", ":path": METHOD, ":authority": url}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def responses_of(stream: Stream) -> tuple[list[float], list[bytes]]:
    """When each gRPC message of a stream was complete, and the messages."""
    times, messages = [], []
    data, at = bytearray(), 0
    for now, chunk in stream.chunks:
        data += chunk
        while len(data) - at >= 5:
            end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
            if end > len(data):
                break
            messages.append(bytes(data[at + 5 : end]))
            times.append(now)
            at = end
    return times, messages


def tokens_of(messages: list[bytes]) -> int:
    """Raises SystemExit for a response with an error."""
    from tritonclient.grpc import service_pb2

    total = 0
    for message in messages:
        response = service_pb2.ModelStreamInferResponse.FromString(message)
        if response.error_message:
            raise SystemExit(response.error_message)
        names = [output.name for output in response.infer_response.outputs]
        if "sequence_length" in names:
            total += int.from_bytes(
                response.infer_response.raw_output_contents[names.index("sequence_length")], "little"
            )
        elif "num_output_tokens" in names:
            raw = response.infer_response.raw_output_contents[names.index("num_output_tokens")]
            total += int.from_bytes(raw, "little")
    return total


def measure(url: str, num_streams: int, num_connections: int, message: bytes) -> Figures:
    shares = [len(range(n, num_streams, num_connections)) for n in range(num_connections)]
    connections = [Connection(url, share, message) for share in shares]
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.begin()
    cpu = time.process_time()
    num_open = len(connections)
    while num_open:
        for key, _ in selector.select():
            key.data.read()
            if key.data.has_ended:
                selector.unregister(key.data.socket)
                num_open -= 1
    cpu = time.process_time() - cpu
    told = [responses_of(stream) for connection in connections for stream in connection.streams.values()]
    first, last = min(times[0] for times, _ in told), max(times[-1] for times, _ in told)
    gaps = np.concatenate([np.diff(times) for times, _ in told]) * 1e3
    return Figures(
        num_tokens=sum(tokens_of(messages) for _, messages in told),
        num_responses=sum(len(times) for times, _ in told),
        elapsed_s=last - first,
        client_cpu_s=cpu,
        gap_p50_ms=float(np.percentile(gaps, 50)),
        gap_p99_ms=float(np.percentile(gaps, 99)),
    )


if __name__ == "__main__":
    _, url, num_streams, num_connections, file = sys.argv
    print(json.dumps(asdict(measure(url, int(num_streams), int(num_connections), Path(file).read_bytes()))))
