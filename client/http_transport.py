"""Requests over HTTP and HTTPS: a connection for each. Standard library only."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from client.errors import Cancelled, ClientError, no_http, no_server, no_tls, no_trust, too_late
from client.http_messages import (
    Tensor,
    broken,
    comes_in_parts,
    decode_answer,
    infer_body,
    parse_event,
    read_answer,
    read_command_answer,
    read_outputs,
    request_body,
    request_headers,
    request_path,
    status_error,
    with_final_mark,
)
from client.messages import GenerateRequest, TextChunk
from client.settings import Settings

Connection = http.client.HTTPConnection


def open_connection(settings: Settings, timeout_s: float) -> Connection:
    """A connection to the server that is not made yet. `timeout_s`: for each wait on it."""
    address = settings.address
    if not address.tls:
        return Connection(address.host, address.port, timeout=timeout_s)
    context = settings.ssl_context()
    return http.client.HTTPSConnection(address.host, address.port, timeout=timeout_s, context=context)


class HttpTransport:
    """One server. Any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._url = settings.address.url
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()  # under the lock, as is the next
        self._closed = False

    def stream(self, request: GenerateRequest, timeout_s: float, request_id: str) -> Generator[TextChunk, None, None]:
        """Yield chunks until the final one. Leaving the iteration early disconnects, which cancels. Raises
        ClientError.
        """
        if self._closed:
            raise Cancelled("the client is closed; make another")
        body = request_body(request, timeout_s, request_id)
        deadline = time.monotonic() + timeout_s
        with self._exchange(timeout_s) as (connection, sock):
            response = self._send(connection, request_path(request, self._settings.model), body)
            if comes_in_parts(request):
                yield from with_final_mark(self._events(sock, response, deadline), request.num_streams)
            else:
                yield read_answer(response.read())

    def infer(
        self, model: str, tensors: Mapping[str, Tensor], parameters: Mapping[str, str | int], timeout_s: float
    ) -> dict[str, list[Any]]:
        """The outputs of a model that answers once, each as a flat list. Every tensor has a value a row. Raises ClientError."""
        if self._closed:
            raise Cancelled("the client is closed; make another")
        with self._exchange(timeout_s) as (connection, _):
            body = infer_body(tensors, parameters)
            return read_outputs(self._send(connection, f"/v2/models/{model}/infer", body).read())

    def ask(self, request: dict[str, Any], timeout_s: float, model: str) -> dict[str, Any]:
        """The one answer of a model of the kind of `everbatch` to a command, both JSON objects. Raises ClientError."""
        if self._closed:
            raise Cancelled("the client is closed; make another")
        with self._exchange(timeout_s) as (connection, _):
            body = json.dumps({"request": json.dumps(request)}).encode()
            return read_command_answer(
                self._send(connection, f"/v2/models/{quote(model, safe='')}/generate", body).read()
            )

    @contextmanager
    def _exchange(self, timeout_s: float) -> Iterator[tuple[Connection, socket.socket]]:
        """A connection for one request, whose failures become ClientErrors."""
        connection, sock = self._connect(timeout_s)
        try:
            yield connection, sock
        except TimeoutError:
            raise too_late(self._url, timeout_s) from None
        except OSError:  # It comes first: RemoteDisconnected is an OSError and a BadStatusLine.
            raise self._broken() from None
        except (http.client.BadStatusLine, http.client.LineTooLong):
            raise no_http(self._url) from None
        except http.client.HTTPException:  # The response was cut short, for example.
            raise self._broken() from None
        finally:
            with self._lock:
                self._open.discard(sock)
            connection.close()

    def close(self) -> None:
        """End all connections; requests that wait for one fail as cancelled."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                _hang_up(sock)

    def _broken(self) -> ClientError:
        if self._closed:
            return Cancelled(f"the request to {self._url} was cancelled")
        return broken(self._url)

    def _connect(self, timeout_s: float) -> tuple[Connection, socket.socket]:
        """The socket besides, which the connection forgets as soon as a response has begun that ends with it."""
        connection = open_connection(self._settings, timeout_s)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError:
            raise no_trust(self._url) from None
        except ssl.SSLError:
            raise no_tls(self._url) from None
        except OSError:
            raise no_server(self._url) from None
        with self._lock:
            if not self._closed:
                self._open.add(connection.sock)
                return connection, connection.sock
        connection.close()
        raise Cancelled("the client is closed; make another")

    def _send(self, connection: Connection, path: str, body: bytes) -> http.client.HTTPResponse:
        settings = self._settings
        connection.request("POST", path, body, request_headers(settings.api_key))
        response = connection.getresponse()
        if response.status == 200:
            return response
        raise status_error(response.status, response.read(), self._url, has_key=bool(settings.api_key))

    def _events(self, sock: socket.socket, response: http.client.HTTPResponse, deadline: float) -> Iterator[TextChunk]:
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            sock.settimeout(remaining)
            line = response.readline()
            if not line and self._closed:
                raise self._broken()
            if not line:
                return
            if (answer := parse_event(line)) is not None:
                yield decode_answer(answer, final=False)


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # It is closed already.
