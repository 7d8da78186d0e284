"""A model that a server does not have, or that this client cannot ask: what is said instead of Triton's riddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from client.cli import app
from client.served_models import _sent
from tests.client.servers import GrpcServer, HttpServer, Models, grpc_answer, grpc_server, http_server

OURS = _sent()
VLLM = {"text_input": "BYTES", "sampling_parameters": "BYTES"}
OLD = {**OURS, "max_tokens": "UINT32"}
MISSING = "Request for unknown model: 'ensemble' is not found"
UNEXPECTED = "unexpected inference input 'return_perf_metrics' for model 'vllm_model'"
REMEDY = "start the server with --profile trtllm, alone or beside others (--profile trtllm,vllm)"
Serve = Callable[..., Any]


@contextmanager
def over_grpc(error: str, models: Models | None) -> Iterator[GrpcServer]:
    with grpc_server(lambda server: iter([grpc_answer(error=error)])) as server:
        server.models = models
        yield server


@contextmanager
def over_http(error: str, models: Models | None) -> Iterator[HttpServer]:
    with http_server({"error": error}, status=400) as server:
        server.models = models
        yield server


@pytest.fixture(params=[over_grpc, over_http])
def serve(request: pytest.FixtureRequest) -> Serve:
    found: Serve = request.param
    return found


def said(url: str, *arguments: str, command: tuple[str, ...] = ("generate", "x")) -> str:
    """The one sentence of a command that fails."""
    done = CliRunner().invoke(app, [*command, "--url", url, *arguments], input="hello\nagain\n")
    assert done.exit_code == 1 and done.stdout == ""
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",)])
def test_a_missing_model_is_told_with_those_that_there_are(serve: Serve, command: tuple[str, ...]) -> None:
    with serve(MISSING, {"vllm_model": VLLM, "everbatch": {"request": "BYTES"}}) as server:
        assert said(server.url, command=command).endswith(
            f"everbatch: there is no model 'ensemble' at {server.url}; the server has everbatch, vllm_model, of which this "
            f"client can ask none: {REMEDY}"
        )


def test_one_of_another_name_that_can_be_asked_is_told_with_the_option(serve: Serve) -> None:
    with serve(MISSING, {"mine": OURS, "vllm_model": VLLM}) as server:
        assert said(server.url).endswith("of which this client can ask mine: name one with --model-name NAME")


def test_a_model_of_another_protocol_is_told_as_that(serve: Serve) -> None:
    with serve(UNEXPECTED, {"vllm_model": VLLM}) as server:
        assert said(server.url, "--model-name", "vllm_model") == (
            "everbatch: the model 'vllm_model' takes other inputs than this client sends; the server has vllm_model, of which "
            f"this client can ask none: {REMEDY}"
        )


def test_a_model_with_types_of_older_clients_can_be_asked_over_http_only() -> None:
    reason = "inference input 'max_tokens' data-type is 'INT32', but model 'ensemble' expects 'UINT32'"
    with over_grpc(reason, {"ensemble": OLD}) as server:
        assert "speak HTTP to it, with --url http://HOST:PORT" in said(server.url)
    with over_http(reason, {"ensemble": OLD}) as web_server:
        assert said(web_server.url) == f"everbatch: {reason}"


def test_a_server_that_tells_nothing_is_told_with_the_remedy_alone(serve: Serve) -> None:
    with serve(MISSING, None) as server:
        assert said(server.url) == (
            f"everbatch: {MISSING}; name a model that the server has with --model-name NAME, or {REMEDY}"
        )


def test_an_error_for_another_reason_stays_as_it_is(serve: Serve) -> None:
    with serve("[INVALID_ARGUMENT] temperature is 9", {"ensemble": OURS}) as server:
        assert said(server.url) == "everbatch: [INVALID_ARGUMENT] temperature is 9"
    with serve("[INVALID_ARGUMENT] temperature is 9", None) as server:
        assert said(server.url) == "everbatch: [INVALID_ARGUMENT] temperature is 9"


def test_the_openai_endpoint_is_told_from_triton_and_its_error_is_a_sentence() -> None:
    error = {"message": "there is no such route", "type": "not_found_error"}
    with http_server({"error": error}, status=404) as server:
        assert said(server.url) == (
            "everbatch: there is no such route; if this is the OpenAI endpoint, name the port of Triton (8000 by default) "
            "with --url http://HOST:PORT"
        )
