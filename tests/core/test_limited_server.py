"""The limits of a process that does one job after the other: each job has its own, whatever those before it have taken."""

from __future__ import annotations

import resource
import signal
import socket
from types import SimpleNamespace
from typing import NoReturn

import pytest

from backend.api.errors import ConfigError
from backend.core import limited_server
from backend.core.limited_messages import Begin, Ending, Outcome, frame

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("used", "hard", "soft"),
    [(0.0, UNLIMITED, 5), (100.5, UNLIMITED, 105), (100.5, 200, 105), (100.5, 103, 103)],
)
def test_the_processor_time_of_a_job_begins_with_it(
    used: float, hard: int, soft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(
        limited_server,
        "resource",
        SimpleNamespace(
            RLIMIT_CPU=resource.RLIMIT_CPU,
            RLIM_INFINITY=UNLIMITED,
            RUSAGE_SELF=resource.RUSAGE_SELF,
            getrusage=lambda who: (used * 0.75, used * 0.25, 7),
            getrlimit=lambda kind: (1, hard),
            setrlimit=lambda kind, limits: told.append((kind, limits)),
        ),
    )
    monkeypatch.setattr(limited_server.signal, "setitimer", lambda kind, seconds: told.append((kind, seconds)))
    limited_server._limit_cpu(3.0)
    assert told == [(resource.RLIMIT_CPU, (soft, hard)), (signal.ITIMER_PROF, 3.0)]


@pytest.mark.parametrize(
    ("status", "ending", "text"),
    [
        (-signal.SIGPROF, Ending.OVER_CPU, ""),
        (-signal.SIGXCPU, Ending.OVER_CPU, ""),
        (-signal.SIGABRT, Ending.OVER_MEMORY, ""),
        (-signal.SIGSEGV, Ending.FAILED, "the process of a job ended with SIGSEGV"),
        (1, Ending.FAILED, "the process of a job ended with exit code 1"),
    ],
)
def test_a_job_whose_process_died_ended_by_what_it_died_of(status: int, ending: Ending, text: str) -> None:
    assert limited_server._of_death(7, status) == Outcome(7, ending, text=text)


@pytest.mark.parametrize(("has_client", "status"), [(False, 0), (True, 1)])
def test_a_process_without_a_client_ends_well_and_one_whose_material_is_refused_with_1(
    has_client: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(body: bytes) -> NoReturn:
        raise ConfigError("the tokenizer cannot be read")

    client, server = socket.socketpair()
    with client:
        if has_client:
            client.sendall(frame(Begin(1, b"material")))
        client.shutdown(socket.SHUT_WR)
        monkeypatch.setattr(limited_server, "set_up_logging", lambda name: None)
        monkeypatch.setattr(limited_server.signal, "signal", lambda number, action: None)
        monkeypatch.setattr(limited_server.sys, "argv", ["process", str(server.detach())])
        assert limited_server.serve_jobs("tests", refuse) == status
