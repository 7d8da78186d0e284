"""PoolKeeper: its thread writes the records of blocks, and ends with the engine."""

from __future__ import annotations

import threading

import pytest

from backend.engine import pool_keeper
from backend.engine.pool_keeper import PoolKeeper


class Records:
    """What is due, and what has been recorded."""

    def __init__(self, *due: str) -> None:
        self.due, self.recorded = list(due), list[str]()
        self.has_begun, self.may_write = threading.Event(), threading.Event()

    def take_due(self) -> list[str]:
        due, self.due = self.due, []
        return due

    def record(self, due: str) -> None:
        self.has_begun.set()
        assert self.may_write.wait(30)
        self.recorded.append(due)


def test_an_idle_thread_is_woken_and_ended_by_the_close() -> None:
    records = Records("a", "b")
    records.may_write.set()
    keeper = PoolKeeper(records)  # type: ignore[arg-type]
    keeper.advance()
    keeper.settle()
    assert records.recorded == ["a", "b"]
    keeper.close()
    keeper._thread.join(30)
    assert not keeper._thread.is_alive()


def test_what_waits_at_the_close_gets_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_keeper, "CLOSE_S", 0.0)
    records = Records("a", "b")
    keeper = PoolKeeper(records)  # type: ignore[arg-type]
    keeper.advance()
    assert records.has_begun.wait(30)
    keeper.close()
    records.may_write.set()
    keeper._thread.join(30)
    assert not keeper._thread.is_alive() and records.recorded == ["a"]
