"""benchmarks/postprocess.py counts what becomes text."""

from __future__ import annotations

import pytest

from benchmarks import postprocess


@pytest.mark.parametrize("processes", [0, 1])
def test_every_token_of_the_script_becomes_text(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STREAMS": 3, "TOKENS": 4}.items():
        monkeypatch.setattr(postprocess, name, value)
    counts: list[int] = []
    monkeypatch.setattr(postprocess, "median_speed", lambda run: (counts.append(run()), 1.0)[1])
    assert postprocess.dispatch_speed(processes) == 1.0
    assert counts == [12]
