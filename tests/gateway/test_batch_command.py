"""`everbatch batch` against the endpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from client import batch_file
from client.cli import app
from tests.gateway.conftest import Served
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_batches import chat, jsonl

Serve = Callable[..., AbstractContextManager[Served]]


def run(served: Served | None, path: Path, *options: str) -> Any:
    url = "http://127.0.0.1:1" if served is None else served.url
    return CliRunner().invoke(app, ["batch", str(path), "--url", url, *options])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "POLL_S", 0.01)


def test_a_file_is_answered_and_nothing_is_left_behind(serve: Serve, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_bytes(b"\n" + jsonl(chat(1), chat(2, "error [INVALID_ARGUMENT] no"), chat(3)))
    with serve(batches=tmp_path / "b") as served:
        done = run(served, asked)
        assert done.exit_code == 1 and "completed: 2 lines answered, 1 failed" in done.stderr
        lines = [json.loads(line) for line in (tmp_path / "asked.out.jsonl").read_text().splitlines()]
        assert [line["custom_id"] for line in lines] == ["c1", "c3", "c2"]
        assert served.request("GET", "/v1/files")[1]["data"] == []
        assert "exists; name another --output" in run(served, asked).stderr
    assert {path.name for path in tmp_path.iterdir()} == {"asked.jsonl", "asked.out.jsonl", "b"}


def test_it_goes_on_where_it_was_interrupted(
    serve: Serve, tmp_path: Path, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, output = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    asked.write_bytes(jsonl(chat(1), chat(2)))
    with serve(batches=tmp_path / "b") as served:
        with monkeypatch.context() as patch:
            patch.setattr(batch_file.time, "sleep", interrupt)
            done = run(served, asked, "--output", str(output))
        assert done.exit_code == 130 and "run the same command again" in done.stderr and not output.exists()
        asked.write_bytes(jsonl(chat(1)))
        assert "is of another input" in run(served, asked, "--output", str(output)).stderr
        asked.write_bytes(jsonl(chat(1), chat(2)))
        assert run(served, asked, "--output", str(output)).exit_code == 0
    assert len(output.read_text().splitlines()) == 2
    assert len([seen for seen in triton.requests if "messages" in seen.body]) == 2, "the first command's batch"


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def test_what_is_wrong_is_said_in_a_sentence(serve: Serve, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    assert "cannot be read: No such file" in run(None, asked).stderr
    asked.write_text("hello\n")
    assert "its first line is no JSON object with custom_id" in run(None, asked).stderr
    asked.write_bytes(jsonl(chat(1), chat(1)))
    assert "no OpenAI endpoint answers at http://127.0.0.1:1" in run(None, asked).stderr
    with serve(batches=tmp_path / "b") as served:
        done = run(served, asked)
        assert done.exit_code == 1 and "line 2: custom_id 'c1' stands in line 1 already" in done.stderr.replace(
            "\n", " "
        )
    with serve() as served:
        assert "start it with --batches DIRECTORY" in run(served, asked).stderr
