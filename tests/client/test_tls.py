"""TLS over a self-made certificate: it is spoken, and a certificate that nobody vouches for is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from client.async_client import AsyncEverbatchClient
from client.cli import app
from client.client import EverbatchClient
from client.errors import Unreachable
from tests.client.servers import CERTIFICATE, GrpcServer, HttpServer, grpc_answer, grpc_server, http_server

WHOLE = {"text_output": "hi", "finish_reason": "stop"}
Server = Callable[[bool], AbstractContextManager[GrpcServer | HttpServer]]
Ask = Callable[..., str]


def over_grpc(tls: bool) -> AbstractContextManager[GrpcServer | HttpServer]:
    def answers(server: GrpcServer) -> Iterator[Any]:
        yield grpc_answer("hi", final=True)

    return grpc_server(answers, tls=tls)


def over_http(tls: bool) -> AbstractContextManager[GrpcServer | HttpServer]:
    return http_server(WHOLE, tls=tls)


def ask(url: str, **settings: Any) -> str:
    with EverbatchClient(url, **settings) as client:
        return client.generate("x", timeout_s=20).text


def ask_async(url: str, **settings: Any) -> str:
    async def main() -> str:
        async with AsyncEverbatchClient(url, **settings) as client:
            return (await client.generate("x", timeout_s=20)).text

    return asyncio.run(main())


def secure_url(server: GrpcServer | HttpServer, host: str = "127.0.0.1") -> str:
    port = server.url.rpartition(":")[2]
    return f"grpcs://{host}:{port}" if isinstance(server, GrpcServer) else f"https://{host}:{port}"


@pytest.mark.parametrize("asking", [ask, ask_async])
@pytest.mark.parametrize("serve", [over_grpc, over_http])
def test_tls_is_spoken_to_a_server_whose_certificate_is_trusted(asking: Ask, serve: Server) -> None:
    with serve(True) as server:
        for host in ("127.0.0.1", "localhost"):
            assert asking(secure_url(server, host), ca_file=CERTIFICATE, api_key="k3y") == "hi"
    assert len(server.requests) == 2 and server.keys == ["Bearer k3y"] * 2


@pytest.mark.parametrize("asking", [ask, ask_async])
@pytest.mark.parametrize("serve", [over_grpc, over_http])
def test_a_certificate_that_nobody_vouches_for_is_refused_and_the_remedy_named(asking: Ask, serve: Server) -> None:
    with serve(True) as server, pytest.raises(Unreachable, match="is not trusted.*ca_file=FILE") as caught:
        asking(secure_url(server))
    assert server.requests == [] and secure_url(server) in str(caught.value)


@pytest.mark.parametrize("asking", [ask, ask_async])
@pytest.mark.parametrize("serve", [over_grpc, over_http])
def test_tls_is_never_given_up_for_a_server_that_does_not_speak_it(asking: Ask, serve: Server) -> None:
    with serve(False) as server, pytest.raises(Unreachable, match="does not speak TLS") as caught:
        asking(secure_url(server), ca_file=CERTIFICATE)
    assert server.requests == [] and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("serve", [over_grpc, over_http])
def test_the_command_line_speaks_tls(serve: Server) -> None:
    from typer.testing import CliRunner

    with serve(True) as server:
        options = ["--url", secure_url(server), "--ca-file", str(CERTIFICATE), "--quiet"]
        done = CliRunner().invoke(app, ["generate", "x", *options])
    assert (done.exit_code, done.stdout, done.stderr) == (0, "hi\n", "")
