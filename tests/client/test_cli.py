"""Options of the command line, up to what a server receives and what the shell gets back."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from client.cli import app
from tests.client.servers import grpc_answer, grpc_server, http_server

ANSWER = {"text_output": "hi", "finish_reason": "stop"}


def run(*arguments: str, typed: str = "") -> Any:
    return CliRunner().invoke(app, arguments, input=typed)


def test_the_options_of_generate_reach_the_server() -> None:
    options = ["--max-tokens", "7", "--stop", "a", "--stop", "b", "--namespace", "alice", "--top-k", "1", "--quiet"]
    with http_server(ANSWER) as server:
        done = run("generate", "-", "--url", server.url, "--timeout", "2", *options, typed="from a pipe")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "hi\n", "")
    ((_, body),) = server.requests
    wanted = {"text_input": "from a pipe", "max_tokens": 7, "stop_words": ["a", "b"], "top_k": 1, "cache_salt": "alice"}
    assert {name: body[name] for name in wanted} == wanted and body["timeout"] == 2_000_000


def test_every_turn_of_a_chat_and_its_end_are_in_the_namespace() -> None:
    with http_server(ANSWER) as server:
        done = run("chat", "--url", server.url, "--namespace", "alice", typed="one\n/reset\ntwo\n")
    assert done.exit_code == 0
    bodies = [body for _, body in server.requests]
    assert [body["cache_salt"] for body in bodies] == ["alice"] * 4
    assert [body["STOP"] for body in bodies] == [0, 1, 0, 1]


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
@pytest.mark.parametrize("given", ["option", "environment"])
def test_the_key_of_a_gateway_is_sent_and_never_shown(command: list[str], given: str) -> None:
    options, variables = (["--api-key", "k3y"], {}) if given == "option" else ([], {"EVERBATCH_API_KEY": "k3y"})
    with http_server(ANSWER) as server:
        done = CliRunner().invoke(app, [*command, "--url", server.url, *options], input="hello\n", env=variables)
    assert done.exit_code == 0 and server.keys[0] == "Bearer k3y"
    asked_for_help = CliRunner().invoke(app, [command[0], "--help"], env={"EVERBATCH_API_KEY": "k3y"})
    assert "k3y" not in done.output and "k3y" not in asked_for_help.output


@pytest.mark.parametrize("options", [[], ["--protocol", "grpc"]])
def test_an_address_without_http_is_spoken_to_over_grpc(options: list[str]) -> None:
    with grpc_server(lambda server: iter([grpc_answer("hi", final=True)])) as server:
        done = run("generate", "x", "--url", server.url, "--namespace", "alice", *options)
    assert (done.exit_code, done.stdout) == (0, "hi\n")
    assert server.requests[0].parameters["cache_salt"].string_param == "alice"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generate", "x", "--namespace", "n" * 257], "namespace has 257 characters, the limit is 256"),
        (["chat", "--namespace", "n" * 257], "namespace has 257 characters, the limit is 256"),
        (["generate", "x", "--temperature", "1e39"], "temperature is 1e+39"),
        (["generate", "x\udcff"], "prompt holds half of a surrogate pair"),
        (["generate", "x", "--protocol", "ftp"], "'ftp', grpc or http is expected"),
        (["generate", "x", "--url", "127.0.0.1:9"], "no server answers at 127.0.0.1:9"),
    ],
)
def test_an_error_is_one_sentence_and_the_exit_status_one(arguments: list[str], reason: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("everbatch: ") and reason in done.stderr and len(done.stderr.splitlines()) == 1
