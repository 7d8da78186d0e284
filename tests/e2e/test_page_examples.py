"""The curl lines of the pages on other servers' clients do what the pages say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from deploy.triton_server import TritonServer
from tests.e2e.wire import events, post

DOCS = Path(__file__).resolve().parents[2] / "docs"
REQUEST = re.compile(r"^curl (?:-N )?localhost:8000(/v2/models/\w+/generate(?:_stream)?) -d '(.*)'$", re.MULTILINE)


def requests_of(page: str) -> list[tuple[str, Any]]:
    """Path and body of each curl line of a page."""
    return [(path, json.loads(body)) for path, body in REQUEST.findall((DOCS / page).read_text())]


def answers(server: TritonServer, page: str) -> list[list[dict[str, Any]]]:
    """What each of a page's curl lines is answered with."""
    found = []
    for path, body in requests_of(page):
        status, text = post(server.http_url + path, body)
        assert status == 200, text
        found.append(events(text) if path.endswith("_stream") else [json.loads(text)])
    return found


def test_lmdeploys_lead_from_text_to_ids_to_more_and_back_to_text(lmdeploy_server: TritonServer) -> None:
    (tokenized,), turbomind, (text,), (of_lmdeploy,) = answers(lmdeploy_server, "lmdeploy.md")
    (_, generate), (_, back) = requests_of("lmdeploy.md")[1:3]
    assert (
        tokenized["INPUT_ID"] == generate["input_ids"] and tokenized["REQUEST_INPUT_LEN"] == generate["input_lengths"]
    )
    assert turbomind[-1]["output_ids"] == back["TOKENS_BATCH"] and len(turbomind) == generate["request_output_len"]
    assert text["OUTPUT"].strip() and of_lmdeploy["response"].strip()
