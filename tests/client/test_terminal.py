"""What is printed of a reply and under it, what is never printed, and how a chat goes on."""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from client.chat import run_chat
from client.errors import ClientError
from client.messages import GenerateRequest, TextChunk
from client.statistics import AnswerClock
from client.terminal import printable, run_generate
from deploy import ROOT
from tests.client.test_conversation import ScriptedClient


class Ticks:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer(*timed: tuple[float, TextChunk]) -> str:
    ticks = Ticks()
    clock = AnswerClock(ticks)
    for ticks.now, chunk in timed:
        clock.add(chunk)
    return clock.summary()


def test_the_summary_has_tokens_speed_first_token_time_and_reuse() -> None:
    first = TextChunk("a", num_output_tokens=1, num_input_tokens=230, num_cached_tokens=212)
    last = TextChunk("b", True, "length", num_output_tokens=4)
    assert answer((0.025, first), (2.025, last)) == (
        "5 tokens, 2.0 tokens/s, first after 25 ms, reused 212 of 230 prompt tokens, length"
    )


def test_the_speed_is_the_servers_when_it_tells() -> None:
    times = {"first_token_time_ns": 10**9, "last_token_time_ns": 3 * 10**9}
    bunch = [(0.5, TextChunk("a", num_output_tokens=1)), (0.501, TextChunk("b", True, num_output_tokens=4, **times))]
    assert "2.0 tokens/s" in answer(*bunch)


def test_recomputed_tokens_are_told() -> None:
    chunk = TextChunk("a", True, num_output_tokens=1, num_input_tokens=9, num_cached_tokens=2, num_recomputed_tokens=6)
    assert answer((0.1, chunk)).endswith("reused 2 of 9 prompt tokens (6 recomputed)")


def test_a_reply_without_tokens_has_no_speed() -> None:
    assert answer((0.1, TextChunk("", True, "cancelled"))) == "0 tokens, cancelled"


@pytest.mark.parametrize(
    ("text", "shown"), [("a\tb\nc", "a\tb\nc"), ("\x1b[2Jx\x07", "[2Jx"), ("\x9b31mx", "31mx"), ("\r\x08é", "é")]
)
def test_no_model_moves_the_cursor(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_the_client_imports_nothing_of_the_server() -> None:
    allowed = {
        "client",
        "grpc",
        "tritonclient",
        "typer",
        "rich",
        "aiohttp",
        "yarl",
        "prompt_toolkit",
        "numpy",
        *sys.stdlib_module_names,
    }
    for path in Path(ROOT, "client").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path.name


def test_a_token_without_text_is_a_first_token() -> None:
    """This happens with a character whose bytes are several tokens."""
    waiting, shown = TextChunk("", num_output_tokens=1), TextChunk("é", True, "length", num_output_tokens=1)
    assert answer((0.1, waiting), (0.6, shown)) == "2 tokens, 2.0 tokens/s, first after 100 ms, length"


# ---- generate and chat -----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Talking(ScriptedClient):
    """Its stream() follows the script as well."""

    url = "somewhere"
    closed = False

    def stream(self, prompt: str, *, timeout_s: float, **options: Any) -> Generator[TextChunk, None, None]:
        return self.send(GenerateRequest(prompt, **options), timeout_s=timeout_s)

    def close(self) -> None:
        self.closed = True


class Interrupted(Talking):
    """Ctrl-C is pressed after the first chunk of every reply."""

    def send(self, request: GenerateRequest, *, timeout_s: float = 1.0) -> Generator[TextChunk, None, None]:
        yield next(super().send(request, timeout_s=timeout_s))
        if request.max_tokens:
            raise KeyboardInterrupt


def generate(client: Talking, prompt: str = "x", *, quiet: bool = True) -> int:
    return run_generate(client, prompt, {}, 1.0, quiet)  # type: ignore[arg-type]


def chat(client: Talking, typed: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return run_chat(client, None, options)  # type: ignore[arg-type]


def test_prompt_and_reply_are_cleaned_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert generate(Talking(["\x1b]0;title\x07", "b"]), "a\x1b[2J") == 0
    assert terminal.getvalue() == "\x1b[2ma[2J\x1b[0m]0;titleb\n"


def test_a_reply_goes_into_a_pipe_unchanged_and_its_statistics_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    client = Talking(["\x1b[2J", "b\n"])
    assert generate(client, quiet=False) == 0
    written = capsys.readouterr()
    assert written.out == "\x1b[2Jb\n" and "stop" in written.err
    assert client.closed


def test_ctrl_c_ends_generate_with_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    client = Interrupted(["a", "b"])
    assert generate(client) == 130
    assert capsys.readouterr().out == "a\n" and client.closed


def test_ctrl_c_ends_a_reply_of_a_chat_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Interrupted(["a", "b"], ["c", "d"], [""])
    assert chat(client, "one\ntwo\n", monkeypatch) == 0
    contents = [message["content"] for message in client.requests[1].messages or ()]
    assert contents == ["one", "a", "two"]


def test_a_chat_without_a_server_ends_at_its_first_turn_and_not_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ClientError("no server answers", "UNREACHABLE")
    with pytest.raises(ClientError):
        chat(Talking(gone), "one\ntwo\n", monkeypatch)
    client = Talking(["a"], gone, ["b"], [""])
    assert chat(client, "one\ntwo\nthree\n", monkeypatch) == 1
    assert client.script == [] and client.closed


@pytest.mark.parametrize("code", ["NOT_FOUND", "UNAUTHENTICATED", "UNKNOWN"])
def test_a_chat_ends_at_its_first_turn_where_no_other_would_do_better(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    with pytest.raises(ClientError, match="none for you"):
        chat(Talking(ClientError("none for you", code)), "one\ntwo\n", monkeypatch)


def test_a_chat_in_a_pipe_leaves_nothing_but_replies_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(Talking(["a", "b"], ["c\n"], [""]), "one\n/help\ntwo\n/nope\n", monkeypatch) == 0
    written = capsys.readouterr()
    assert written.out == "ab\nc\n"
    for shown in ("somewhere\n/help tells the commands", "> ", "0 tokens", "forgotten", "/nope is no command"):
        assert shown in written.err


def test_a_turn_that_fails_in_a_pipe_is_told_on_standard_error_and_by_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = ClientError("[INVALID_ARGUMENT] no; url=HOST:PORT", "INVALID_ARGUMENT")
    assert chat(Talking(["a"], refused, ["b"], [""]), "one\ntwo\nthree\n", monkeypatch) == 1
    written = capsys.readouterr()
    assert written.out == "a\nb\n"
    assert "[INVALID_ARGUMENT] no; --url HOST:PORT\n" in written.err


def test_a_line_that_is_no_command_is_not_sent_and_a_reset_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Talking(["a"], [""], ["b"], [""])
    assert chat(client, "one\n\n/rest\n/reset\ntwo\n/quit\nthree\n", monkeypatch) == 0
    talk = [request for request in client.requests if request.messages is not None]
    assert [len(request.messages or ()) for request in talk] == [1, 1]
    assert talk[0].session.id != talk[1].session.id  # type: ignore[union-attr]


TOO_LONG = ClientError("[INVALID_ARGUMENT] the prompt has 99 tokens, the limit is 63: shorten it", "INVALID_ARGUMENT")


def test_turns_that_are_left_out_of_a_full_context_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Talking(["a"], ["b"], TOO_LONG, ["c"], [""])
    assert chat(client, "one\ntwo\nthree\n", monkeypatch) == 0
    assert "the context was full: the oldest turn was left out" in capsys.readouterr().err
    assert [message["content"] for message in client.requests[3].messages or ()] == ["two", "b", "three"]


def test_a_turn_that_fits_nowhere_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(Talking(TOO_LONG, ["a"], [""]), "one\ntwo\n", monkeypatch) == 1
    assert "shorten it; send less, or start afresh with /reset" in capsys.readouterr().err


@pytest.mark.parametrize(("max_tokens", "told"), [(5, False), (50, True)])
def test_a_reply_that_the_context_cuts_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], max_tokens: int, told: bool
) -> None:
    class Cut(Talking):
        def send(self, request: GenerateRequest, *, timeout_s: float = 1.0) -> Generator[TextChunk, None, None]:
            yield TextChunk("a", True, "length", num_output_tokens=5)

    assert chat(Cut(), "one\n", monkeypatch, max_tokens=max_tokens) == 0
    assert ("which cut this reply" in capsys.readouterr().err) is told


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_a_chat_is_left_by_its_commands(leave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Talking()
    assert chat(client, f" {leave} \none\n", monkeypatch) == 0
    assert client.requests == [] and client.closed
