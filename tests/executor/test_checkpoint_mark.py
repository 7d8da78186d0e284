"""Another checkpoint has another mark, whatever has changed; the same one has the same."""

from __future__ import annotations

import os
from pathlib import Path

from backend.executor.served_engine import mark_of


def test_a_mark_tells_checkpoints_apart_and_not_what_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12")
    first = mark_of(tmp_path)
    (tmp_path / "README.md").write_text("new")
    assert first and mark_of(tmp_path) == first
    os.utime(tmp_path / "model.safetensors", ns=(5, 5))
    second = mark_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"123")
    os.utime(tmp_path / "model.safetensors", ns=(5, 5))
    assert len({first, second, mark_of(tmp_path)}) == 3
    assert mark_of(tmp_path / "nothing") == ""
