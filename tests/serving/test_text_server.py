"""ModelServer of a text model over a scripted executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.api import InvalidRequest
from backend.core.step import ModelInfo
from backend.serving.assembly import ToolsLoader
from backend.serving.served_model import Parse
from backend.serving.server import ModelServer
from backend.serving.wires.trtllm_tensors import ENSEMBLE
from backend.serving.wires.trtllm_text import parse_text_requests
from backend.text.tokenizer import Tokenizer
from tests.guided.processes import all_children
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import MODEL_DIRECTORY, bools, ints, strings
from tests.serving.scripted import ScriptedExecutor


def parser(tools: ToolsLoader) -> Parse:
    return lambda batch, context, parameters: parse_text_requests(batch, context, parameters, tools.loaded())


@pytest.fixture
def text_server(make_server: Callable[..., ModelServer], executor: ScriptedExecutor) -> tuple[ModelServer, Tokenizer]:
    executor.hello = type(executor.hello)(1, ModelInfo("m", 4096, 256), str(MODEL_DIRECTORY), executor.hello.config)
    tools = ToolsLoader(executor)
    tools.prepare()
    return make_server(ENSEMBLE, parser(tools)), tools.loaded().tokenizer


def test_a_text_stop_cancels_the_engine_at_the_token_that_completes_it(
    text_server: tuple[ModelServer, Tokenizer], executor: ScriptedExecutor
) -> None:
    server, tokenizer = text_server
    request = InferenceRequest(
        {"text_input": strings("a"), "max_tokens": ints(50), "stream": bools(True), "stop_words": strings([";\n"])}
    )
    server.execute([request])
    ids = tokenizer.encode("x = 1;\ny", add_special_tokens=False)
    for token in ids:
        executor.tokens(1, token)
    assert b"".join(request.sender.column("text_output")) == b"x = 1;\n"
    assert request.sender.column("finish_reason") == [b"stop"]
    ((request_id, kept),) = executor.cancelled
    assert request_id == 1 and tokenizer.decode(ids[:kept]).startswith("x = 1;\n") and kept < len(ids)


def test_text_of_a_cancelled_request_says_so(
    text_server: tuple[ModelServer, Tokenizer], executor: ScriptedExecutor
) -> None:
    server, tokenizer = text_server
    request = InferenceRequest(
        {"text_input": strings("a"), "max_tokens": ints(50), "stream": bools(True)}, request_id="t"
    )
    server.execute([request])
    executor.tokens(1, *tokenizer.encode("abc", add_special_tokens=False))
    server.execute([InferenceRequest({"max_tokens": ints(0), "stop": bools(True)}, request_id="t")])
    assert b"".join(request.sender.column("text_output")) == b"abc"
    assert request.sender.column("finish_reason") == [b"cancelled"]


def test_a_text_model_without_an_engine_becomes_ready_when_one_appears(
    make_server: Callable[..., ModelServer], executor: ScriptedExecutor
) -> None:
    hello, executor.hello = executor.hello, None
    tools = ToolsLoader(executor)
    prepared = threading.Event()

    def prepare() -> bool:
        if tools.prepare():
            prepared.set()
        return prepared.is_set()

    server = make_server(ENSEMBLE, parser(tools), prepare=prepare)
    early = InferenceRequest({"text_input": strings("a"), "max_tokens": ints(1)})
    server.execute([early])
    assert early.sender.error().startswith("[UNAVAILABLE]")
    executor.hello = type(hello)(1, ModelInfo("m", 4096, 256), str(MODEL_DIRECTORY), hello.config)
    assert prepared.wait(10)
    late = InferenceRequest({"text_input": strings("a"), "max_tokens": ints(1)})
    server.execute([late])
    executor.end(1, 50)
    assert len(late.sender.wait()) == 1


def test_chats_of_a_text_model_are_rendered_by_the_operators_template(
    executor: ScriptedExecutor, tmp_path: Path
) -> None:
    executor.hello = type(executor.hello)(1, ModelInfo("m", 4096, 256), str(MODEL_DIRECTORY), executor.hello.config)
    (tmp_path / "mine.jinja").write_text("only {{ messages | length }}")
    tools = ToolsLoader(executor, chat_template=str(tmp_path / "mine.jinja"))
    assert tools.prepare() and tools.loaded().template.render([{"role": "user", "content": "x"}]) == "only 1"
    tools.close()


def test_chats_of_a_text_model_are_rendered_under_limits_in_a_process_that_ends_with_the_model(
    executor: ScriptedExecutor, tmp_path: Path
) -> None:
    executor.hello = type(executor.hello)(1, ModelInfo("m", 4096, 256), str(MODEL_DIRECTORY), executor.hello.config)
    (tmp_path / "mine.jinja").write_text("{{ 'a' * 10 ** 10 }}")
    before = all_children()
    tools = ToolsLoader(executor, chat_template=str(tmp_path / "mine.jinja"), is_for_chats=True)
    assert tools.prepare() and len(all_children() - before) == 1, "it is started ahead of the first chat"
    with pytest.raises(InvalidRequest, match="takes more than 268435456 bytes of memory"):
        tools.loaded().template.render([{"role": "user", "content": "x"}])
    tools.close()
    assert all_children() == before
