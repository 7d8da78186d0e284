"""What the commands that make checkpoints print while they work."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from backend.convert.__main__ import PERIOD_S
from backend.quant import command


def test_where_there_is_no_terminal_a_line_comes_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    console, now = Console(file=io.StringIO(), width=80), iter(range(1000, 2000))
    monkeypatch.setattr(command, "console", console)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(now)))
    names = [str(number) for number in range(30)]
    assert list(command.progress(names, "tensor", PERIOD_S)) == names
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "tensor 1 of 30" and 4 <= len(lines) <= 7
