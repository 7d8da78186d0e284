"""Options of the command line, up to what a server receives and what the shell gets back."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from client import cli, errors
from client.cli import _prompt, app
from client.located import Located
from client.option_names import OPTIONS, on_the_command_line
from tests.client.servers import grpc_answer, grpc_server, http_server
from tests.client.test_terminal import Terminal

ANSWER = {"text_output": "hi", "finish_reason": "stop"}


def run(*arguments: str, typed: str = "") -> Any:
    return CliRunner().invoke(app, arguments, input=typed)


def test_the_options_of_generate_reach_the_server() -> None:
    options = ["--max-tokens", "7", "--stop", "a", "--stop", "b", "--namespace", "alice", "--top-k", "1", "--quiet"]
    options += ["--lora-name", "doll"]
    with http_server(ANSWER) as server:
        done = run("generate", "-", "--url", server.url, "--timeout", "2", *options, typed="from a pipe")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "hi\n", "")
    ((_, body),) = server.requests
    wanted = {"text_input": "from a pipe", "max_tokens": 7, "stop_words": ["a", "b"], "top_k": 1, "cache_salt": "alice"}
    wanted["lora_name"] = "doll"
    assert {name: body[name] for name in wanted} == wanted and body["timeout"] == 2_000_000


def test_every_turn_of_a_chat_and_its_end_are_in_the_namespace() -> None:
    with http_server(ANSWER) as server:
        options = ["--namespace", "alice", "--lora-name", "doll"]
        done = run("chat", "--url", server.url, *options, typed="one\n/reset\ntwo\n")
    assert done.exit_code == 0
    bodies = [body for _, body in server.requests]
    assert [body.get("lora_name") for body in bodies] == ["doll", None, "doll", None], "to end a session takes none"
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


# ---- the prompt of generate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[], ["-"]])
def test_a_prompt_may_come_from_a_pipe_with_or_without_a_dash(given: list[str]) -> None:
    with http_server(ANSWER) as server:
        assert run("generate", *given, "--url", server.url, typed="from a\npipe\n").exit_code == 0
    assert server.requests[0][1]["text_input"] == "from a\npipe\n"


@pytest.mark.parametrize("given", [[], ["-"]])
def test_without_a_prompt_nothing_is_sent_and_the_dash_is_named(given: list[str]) -> None:
    done = run("generate", *given)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert "there is no prompt; name one, or send one to standard input (-" in done.stderr


def test_a_terminal_is_read_only_when_the_dash_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("typed"))
    with pytest.raises(typer.Exit):
        _prompt(None)
    assert _prompt("-") == "typed"


def test_standard_input_that_is_no_text_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    with pytest.raises(typer.Exit) as caught:
        _prompt("-")
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == "everbatch: standard input is no text in UTF-8; convert it\n"


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_no_tokens_are_refused_before_the_server_is_asked(command: list[str]) -> None:
    """It would refuse them."""
    done = run(*command, "--max-tokens", "0", "--url", "127.0.0.1:9")
    assert done.exit_code == 2 and "--max-tokens" in done.stderr


# ---- the form of the reply of generate -------------------------------------------------------------------------------


def test_a_schema_in_a_file_and_a_regular_expression_reach_the_server_as_guides(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["ü"]}', "utf-8")
    forms = {"json_schema": ["--json-schema", str(file)], "regex": ["--regex", "a|b"]}
    with http_server(ANSWER) as server:
        for options in forms.values():
            assert run("generate", "x", "--url", server.url, *options).exit_code == 0
    bodies = [body for _, body in server.requests]
    assert [body["guided_decoding_guide_type"] for body in bodies] == list(forms)
    assert [body["guided_decoding_guide"] for body in bodies] == ['{"enum": ["ü"]}', "a|b"]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (b"{}", ["--regex", "a"], "--json-schema and --regex are both given"),
        (b"\xff", [], "is no text in UTF-8; convert it"),
        (None, [], "cannot be read: No such file or directory"),
    ],
)
def test_a_form_that_cannot_be_asked_for_is_refused_before_anything_is_sent(
    tmp_path: Path, content: bytes | None, options: list[str], words: str
) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_bytes(content)
    with http_server(ANSWER) as server:
        done = run("generate", "x", "--url", server.url, "--json-schema", str(file), *options)
    assert done.exit_code == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert server.requests == []


def test_an_empty_form_is_refused_in_the_words_of_the_guide() -> None:
    done = run("generate", "x", "--regex", "", "--url", "127.0.0.1:9")
    assert done.exit_code == 1 and "guide.text is empty beside type regex; give one" in done.stderr


# ---- names of options, names of arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_the_class", "of_the_command"),
    [
        (str(errors.no_server("h:1")), "or name another with --url HOST:PORT"),
        (str(errors.no_entry("h:1", has_key=False)), "give one in EVERBATCH_API_KEY or with --api-key KEY"),
        (str(errors.no_trust("https://h")), "with --ca-file FILE"),
        (str(errors.no_tls("https://h:1")), "name it with --url http://h:1 if"),
        ("stop_words[3] holds half of a surrogate pair", "--stop holds half"),
        ("timeout_s is 0, more than 0 is expected", "--timeout is 0"),
        ("[INVALID_ARGUMENT] max_tokens is 9; raise it with --set model.max_seq_len=9", "] max_tokens is 9; raise"),
        ("url is 'http://h?model=x'", "--url is"),
    ],
)
def test_the_command_line_names_options_where_the_class_names_arguments(of_the_class: str, of_the_command: str) -> None:
    assert of_the_command in on_the_command_line(of_the_class)
    assert not any(f" {option} " in of_the_class for option in OPTIONS.values())


def test_the_names_are_those_of_the_options() -> None:
    generate = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    assert set(OPTIONS.values()) <= {name for option in generate.params for name in option.opts}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "https://h", "--ca-file", "/nowhere"], "--ca-file '/nowhere' cannot be read: No such file"),
        (["--url", "http://h", "--ca-file", "/nowhere"], "--ca-file is given, and http://h speaks no TLS"),
        (["--url", "127.0.0.1:9"], "or name another with --url HOST:PORT"),
        (["--max-tokens", "3000000000"], "--max-tokens is 3000000000, allowed is"),
        (["--stop", "x\udcff"], "--stop holds half of a surrogate pair"),
    ],
)
def test_an_error_of_the_command_line_begins_with_its_option(arguments: list[str], words: str) -> None:
    done = run("generate", "x", *arguments)
    assert done.exit_code == 1 and words in done.stderr


@pytest.fixture(autouse=True)
def nobody_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a server that somebody has started in this checkout would be asked."""
    monkeypatch.setattr(cli, "locate", lambda: None)


@pytest.fixture
def located(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a server be known without --url, as ./everbatch knows those of its checkout."""

    def put(grpc_url: str = "127.0.0.1:9", http_url: str = "http://127.0.0.1:9", **more: Any) -> None:
        found = Located(grpc_url, http_url, "my-[model]", **more)
        monkeypatch.setattr(cli, "locate", lambda: found)

    return put


def test_without_an_address_the_server_of_the_checkout_is_asked_and_named(located: Callable[..., None]) -> None:
    with http_server(ANSWER) as http, grpc_server(lambda _: iter([grpc_answer("hi", final=True)])) as server:
        located(server.url, http.url)
        for protocol, url in (([], server.url), (["--protocol", "http"], http.url)):
            done = run("generate", "x", *protocol)
            assert (done.exit_code, done.stdout) == (0, "hi\n")
            assert done.stderr.splitlines()[0] == f"my-[model] answers, at {url}"
        assert f"my-[model] answers, at {server.url}" in run("chat", typed="hello\n").output
        assert "answers, at" not in run("generate", "x", "--quiet").stderr
        assert "answers, at" not in run("generate", "x", "--url", http.url).stderr, "who names an address knows it"


def test_where_no_server_is_known_the_default_address_is_named() -> None:
    done = run("generate", "x")
    assert "no server was started from here; asking the one at 127.0.0.1:8001, model ensemble" in done.stderr


@pytest.mark.parametrize(
    ("state", "sentence"), [("stopping", "is stopping: it finishes the requests"), ("starting", "is still starting")]
)
@pytest.mark.parametrize("given", [True, False])
def test_a_server_that_stops_or_starts_is_not_called_absent(
    located: Callable[..., None], state: str, sentence: str, given: bool
) -> None:
    located(state=state)
    done = run("generate", "x", "--quiet", *(["--url", "127.0.0.1:9"] if given else []))
    assert done.exit_code == 1 and f"everbatch: the server at 127.0.0.1:9 {sentence}" in done.stderr
    other = run("generate", "x", "--quiet", "--url", "127.0.0.1:10")
    assert "no server answers at 127.0.0.1:10" in other.stderr, "what is known is of another address"


@pytest.mark.parametrize("url", ["127.0.0.1:10", "http://localhost:10", "[::1]:10"])
def test_who_names_the_wrong_port_of_this_machine_is_told_the_right_one(located: Callable[..., None], url: str) -> None:
    located("127.0.0.1:9", "http://127.0.0.1:8")
    sentence = "; Triton is at 127.0.0.1:9, over HTTP at http://127.0.0.1:8"
    assert sentence in run("generate", "x", "--quiet", "--url", url).stderr
    assert "Triton is at" not in run("generate", "x", "--quiet", "--url", "127.0.0.1:9").stderr
    assert Located("127.0.0.1:9", "http://127.0.0.1:8", "m").instead_of("10.0.0.7:10") == "", "of another machine"


def test_to_ignore_the_end_of_a_text_is_to_have_no_token_that_ends_it() -> None:
    with http_server(ANSWER) as server:
        run("generate", "x", "--url", server.url, "--ignore-eos")
        run("generate", "x", "--url", server.url)
    assert [body.get("end_id") for _, body in server.requests] == [-1, None]


def test_what_samples_has_another_seed_each_time_that_is_told_and_can_be_given_again() -> None:
    with http_server(ANSWER) as server:
        url = ["--url", server.url, "--temperature", "0.7"]
        said = [run("generate", "x", *url).stderr, run("generate", "x", *url, "--seed", "7").stderr]
        said.append(run("chat", *url, typed="one\ntwo\n").output)
        greedy = run("generate", "x", "--url", server.url, "--temperature", "0")
        quiet = run("generate", "x", *url, "--quiet")
    seeds = [body.get("seed") for _, body in server.requests if body["text_input"] == "x" or "messages" in body]
    fresh, given, first, second, none, unsaid = seeds
    assert len({fresh, first, second, unsaid}) == 4 and given == 7 and none is None
    assert f"seed {fresh}" in said[0] and "seed 7" in said[1]
    assert f"seed {first}" in said[2] and f"seed {second}" in said[2]
    assert "seed" not in greedy.stderr and quiet.stderr == ""
