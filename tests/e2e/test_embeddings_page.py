"""docs/embeddings.md: its programs and its curl line do what the page says, before a server of the default model."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest

from deploy.triton_server import TritonServer
from tests.docs.pages import examples, text_of
from tests.gateway.conftest import Served

PAGE = "embeddings.md"


@pytest.mark.parametrize("source", examples(PAGE), ids=["openai", "own", "triton"])
def test_every_program_of_the_page_runs(server: TritonServer, served: Served, source: str) -> None:
    source = source.replace("http://127.0.0.1:9000", served.url).replace("127.0.0.1:8001", server.grpc_url)
    source = source.replace("127.0.0.1:8000", server.http_url.removeprefix("http://"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, PAGE, "exec"), {"__name__": "example"})
    assert re.match(r"\[64, 64\] \d+|\(2, 256\) ", printed.getvalue())


def test_the_curl_line_of_the_page_is_understood(served: Served) -> None:
    """The default model has no tokens for the answers, and says so."""
    path, body = re.findall(r"^curl localhost:9000(\S+) .*\n.*-d '(.*)'$", text_of(PAGE), re.MULTILINE)[0]
    status, answer, _ = served.request("POST", path, json.loads(body))
    sentence = "this model cannot rank documents: its vocabulary has no tokens yes and no; use a reranker"
    assert (status, answer["error"]["message"]) == (400, sentence)
