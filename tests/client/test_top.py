"""`everbatch top`: what a view of the server looks like in a terminal."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from backend.engine.live import LiveViews
from client import top
from client.client import EverbatchClient
from client.errors import ClientError, Unavailable
from tests.client.servers import http_server
from tests.engine.driver import Driver


def view_of(driver: Driver) -> dict[str, Any]:
    """As a client gets it."""
    view: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(LiveViews(driver.core).view()))
    return view


def drawn(view: dict[str, Any], width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(top.page(view, dict.fromkeys(top.RATES, 12.0)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def busy() -> Driver:
    driver = Driver(slots=2, pool_tokens=64)
    for prompt in ([1] * 9, [2] * 4, [3] * 5):
        driver.ask(prompt, 10)
    driver.step(3)
    return driver


def test_rows_pool_queue_and_rates_are_drawn() -> None:
    text = drawn(view_of(busy()))
    assert "12 output tokens/s" in text and "2 of 2 slots" in text and "1 waiting" in text
    assert text.count("generation") == 2 and "3 / 10" in text
    assert "of 16 KV blocks" in text and "(5 tokens, queued)" in text


def test_snapshots_of_states_are_told_where_a_model_has_them() -> None:
    driver = Driver(pool_tokens=64, is_recurrent=True)
    driver.ask([1] * 9, 10)
    driver.step(12)
    stats = driver.core.kv.states
    assert stats is not None and stats.stats().used_num_snapshots
    told = f"{stats.stats().used_num_snapshots} of {stats.stats().max_num_snapshots:,} snapshots of states"
    assert told in drawn(view_of(driver)) and "snapshots" not in drawn(view_of(busy()))


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_broken_in_a_narrow_terminal(width: int) -> None:
    """Columns of less worth are left out, and figures stay whole."""
    view = view_of(busy())
    for row in view["rows"]:
        row.update(num_prompt_tokens=123_456, num_output_tokens=1_024, max_output_tokens=16_384, namespace="a" * 12)
    lines = drawn(view, width).splitlines()
    assert max(map(len, lines)) <= width
    (names,) = [line.split() for line in lines if "stage" in line]
    assert {"request", "stage", "output"} <= set(names)
    assert ("progress" in names) == (width >= 80) and ("recomputed" in names) == (width == 140)
    assert sum("1,024 / 16,384" in line for line in lines) == 2
    assert sum("ms first token p50 / p99" in line for line in lines) == 1


def test_the_page_says_whose_it_is() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    top.once(lambda: view_of(busy()), console, "the default model answers, at 127.0.0.1:8001")
    assert console.file.getvalue().startswith("the default model answers, at 127.0.0.1:8001\n")  # type: ignore[attr-defined]


def test_an_idle_server_and_one_that_never_ran_are_drawn() -> None:
    text = drawn(view_of(Driver()))
    assert "0 of 4 slots" in text and "16 free" in text and "waiting:" not in text


def test_the_map_has_two_cells_a_character_and_fits_any_width() -> None:
    view = view_of(busy())
    for width, lines in ((4, 2), (8, 1), (200, 1)):
        drawn_map = drawn(view, width).splitlines() if width == 200 else _map(view, width)
        assert sum(top.UPPER_HALF in line for line in drawn_map) == lines
    view["blocks"], view["num_blocks"] = [top.FREE, 100_000], 100_000
    assert len(_map(view, 40)) <= top.MAP_LINES


def _map(view: dict[str, Any], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(top.BlockMap(view))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_rates_begin_anew_with_another_engine() -> None:
    rates, driver = top.Rates(), Driver()
    first = view_of(driver)
    assert set(rates.take(first).values()) == {0.0}
    driver.ask([1, 2], 6)
    driver.run()
    driver.clock.advance(2.0)
    second = {**view_of(driver), "engine": first["engine"]}
    assert rates.take(second)["generated_tokens_total"] == 3.0
    more = {name: 5 + (number if isinstance(number, int) else 0) for name, number in second["counters"].items()}
    assert set(rates.take({**second, "engine": "another", "counters": more}).values()) == {0.0}


def test_a_server_that_is_away_is_told_and_asked_again() -> None:
    answers = iter([Unavailable("the engine is not running"), view_of(busy()), KeyboardInterrupt()])

    def look() -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with contextlib.suppress(KeyboardInterrupt):
        top.watch(look, console, 0.0)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no answer: " in text and "2 of 2 slots" in text


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({}, "cut short, or no JSON"),
        ([1], "cut short, or no JSON"),
        ({"response": '{"text": '}, "cut short, or no JSON"),
        ({"response": '{"text": ""}'}, "does not say what its engine does"),
        ({"response": '{"error": "[UNAVAILABLE] the engine is away"}'}, "the engine is away"),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_no_traceback(answer: Any, sentence: str) -> None:
    """A server that is stopped, or something else at its address; the page says so and goes on."""
    with http_server(answer) as server, EverbatchClient(server.url) as client:
        with pytest.raises(ClientError, match=sentence):
            client.look()
