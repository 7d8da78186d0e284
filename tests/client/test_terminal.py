"""What is printed under a reply, and what is never printed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from client.messages import TextChunk
from client.statistics import AnswerClock
from client.terminal import printable
from deploy import ROOT


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
    allowed = {"client", "grpc", "tritonclient", "typer", "rich", *sys.stdlib_module_names}
    for path in Path(ROOT, "client").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path.name
