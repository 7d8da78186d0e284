"""What the console says: a time of day on each event, and addresses that can be reached."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from backend.api.config import EngineConfig
from deploy import ports as ports_module
from deploy.ports import Ports
from deploy.report import ConsoleReporter, addresses
from deploy.triton_server import TritonServer


@pytest.fixture
def said(tmp_path: Path) -> tuple[ConsoleReporter, io.StringIO]:
    output = io.StringIO()
    server = TritonServer(EngineConfig(), Ports(), tmp_path)
    return ConsoleReporter(Console(file=output, width=80), server), output


def test_every_event_has_the_time_of_day(said: tuple[ConsoleReporter, io.StringIO]) -> None:
    reporter, output = said
    reporter.phase("starting tritonserver")
    reporter.phase("loading the models")
    reporter.ready()
    reporter.event("the engine process was ended by signal 9 (SIGKILL)")
    reporter.problem("tritonserver was ended by signal 11 (SIGSEGV)")
    reporter.stopping()
    reporter.stopped()
    timed = [line.split("  ", 1)[1] for line in output.getvalue().splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    assert [line.strip()[:20] for line in timed] == [
        "0.0 s  starting trit",
        "0.0 s  loading the m",
        "ready after 0.0 s, w",
        "the engine process w",
        "tritonserver was end",
        "stopping: running re",
        "stopped; no process ",
    ]


@pytest.mark.parametrize("command", ["./everbatch", "everbatch"])
def test_the_examples_call_the_program_as_it_can_be_called_here(
    said: tuple[ConsoleReporter, io.StringIO], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed copy is on the PATH, and there is no ./everbatch."""
    reporter, output = said
    monkeypatch.setattr("deploy.report.COMMAND", command)
    reporter.ready()
    assert f"\n  {command} generate" in output.getvalue() and f"\n  {command} chat" in output.getvalue()


def test_long_events_are_one_line_and_brackets_are_no_markup(said: tuple[ConsoleReporter, io.StringIO]) -> None:
    reporter, output = said
    reporter.event("[bold]" + "x" * 200)
    reporter.problem("[bold]" + "y" * 200)
    first, second = output.getvalue().splitlines()
    assert first.endswith("  [bold]" + "x" * 200) and second.endswith("  [bold]" + "y" * 200)


def test_a_server_for_this_machine_has_its_own_addresses_only() -> None:
    assert addresses("127.0.0.1", Ports()) == [
        ("HTTP", "http://127.0.0.1:8000"),
        ("gRPC", "127.0.0.1:8001"),
        ("metrics", "http://127.0.0.1:8002/metrics"),
    ]


def test_a_server_on_every_interface_has_one_for_others_too_and_never_shows_0_0_0_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploy.report.seen_from_elsewhere", lambda host: "10.1.2.3" if host == "0.0.0.0" else None)
    shown = [address for _, address in addresses("0.0.0.0", Ports())]
    assert "http://10.1.2.3:8000 from elsewhere" in shown and "10.1.2.3:8001 from elsewhere" in shown
    assert "http://127.0.0.1:8000" in shown and not any("0.0.0.0" in address for address in shown)
    assert [address for address in shown if ":8002" in address] == ["http://127.0.0.1:8002/metrics"]


def test_the_address_for_others_is_looked_up_only_where_the_server_listens_everywhere() -> None:
    assert ports_module.seen_from_elsewhere("127.0.0.1") is None
    found = ports_module.seen_from_elsewhere("0.0.0.0")
    assert found is None or ports_module.check_port(found, 0, "--http-port") is None, "it is one of this machine's"
