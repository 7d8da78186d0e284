"""docs/everbatch-model.md: its curl lines and programs do what the page says, and its tables name every key."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest

from backend.serving.wires.everbatch import Generate
from backend.serving.wires.generated import Choice, Generated, Usage
from deploy.triton_server import TritonServer
from tests.docs.pages import examples, text_of
from tests.e2e.test_page_examples import answers

PAGE = "everbatch-model.md"


def test_the_curl_lines_tell_the_same_whole_and_as_a_stream(server: TritonServer) -> None:
    (whole,), pieces = answers(server, PAGE)
    told, *streamed = [json.loads(each["response"]) for each in (whole, *pieces)]
    assert len(streamed) > 1 and "".join(piece["text"] for piece in streamed) == told["text"]
    assert told["finish_reason"] == streamed[-1]["finish_reason"] and told["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize("source", examples(PAGE), ids=["http", "grpc"])
def test_every_program_of_the_page_runs(server: TritonServer, source: str) -> None:
    source = source.replace("http://127.0.0.1:8000", server.http_url).replace("127.0.0.1:8001", server.grpc_url)
    names: dict[str, object] = {"__name__": "example"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, PAGE, "exec"), names)
    told = names["told"]
    assert isinstance(told, dict) and told["finish_reason"] in ("stop", "length") and printed.getvalue().strip()
    form = names.get("form")
    if isinstance(form, dict) and form["finish_reason"] == "stop":
        assert list(json.loads(form["text"])) == ["n"]


def keys_of(heading: str) -> set[str]:
    """What stands in code in the first column of the table under a heading."""
    part = text_of(PAGE).split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_tables_name_every_key_and_no_other() -> None:
    assert keys_of("What is asked") == set(Generate.__struct_fields__)
    assert keys_of("The response") == set(Generated.__struct_fields__)
    told = text_of(PAGE).split("## The response")[1]
    assert all(f"`{name}`" in told for kind in (Choice, Usage) for name in kind.__struct_fields__)
