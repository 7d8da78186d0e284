"""Commands of model `everbatch`: LoRA adapters that are loaded, unloaded and listed while the server runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backend.api.config.schema import EngineConfig, LoraSection
from backend.core.step import ModelInfo
from backend.serving.assembly import ToolsLoader
from backend.serving.server import ModelServer
from backend.serving.wires.everbatch import EVERBATCH
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import MODEL_DIRECTORY
from tests.serving.scripted import ScriptedExecutor

Send = Callable[..., InferenceRequest]


@pytest.fixture
def send(make_server: Callable[..., ModelServer], executor: ScriptedExecutor) -> Send:
    config = EngineConfig(lora=LoraSection(enabled=True))
    executor.hello = type(executor.hello)(1, ModelInfo("m", 4096, 256), str(MODEL_DIRECTORY), config)
    tools = ToolsLoader(executor)
    tools.prepare()
    parse = lambda batch, context, parameters: EVERBATCH.parse(batch, context, parameters, tools.loaded())
    server = make_server(EVERBATCH.tensors, parse, config=config)

    def send(**command: Any) -> InferenceRequest:
        request = InferenceRequest({"request": np.array([json.dumps(command).encode()], dtype=np.object_)})
        server.execute([request])
        return request

    return send


def answer(request: InferenceRequest) -> dict[str, Any]:
    (only,) = request.sender.column("response")
    decoded: dict[str, Any] = json.loads(only)
    return decoded


def test_commands_reach_the_engine_and_are_answered_like_the_end_of_a_reply(
    send: Send, executor: ScriptedExecutor
) -> None:
    """The gateway adds timeout_s to whatever it sends."""
    loaded = answer(send(load_adapter={"name": "doll", "directory": "a/doll"}, timeout_s=5.0))
    assert (loaded["text"], loaded["token_ids"], loaded["finish_reason"]) == ("", [], "stop")
    assert loaded["usage"]["prompt_tokens"] == 0
    assert answer(send(unload_adapter="doll"))["finish_reason"] == "stop"
    assert executor.named == [("doll", "a/doll"), ("doll", None)]


def test_a_refusal_of_the_engine_is_the_command_s_error(send: Send) -> None:
    """And the only response: a client that reads a first one without an error takes the command for done."""
    for command in ({"load_adapter": {"name": "bad", "directory": "x"}}, {"unload_adapter": "bad"}):
        sender = send(**command).sender
        assert sender.error() == "[INVALID_ARGUMENT] it is bad" and len(sender.sent) == 1


def test_the_names_in_force_are_listed_and_may_be_asked_for(send: Send, executor: ScriptedExecutor) -> None:
    """They change without a new start of the engine or the stub."""
    assert json.loads(answer(send(list_adapters=True))["text"]) == []
    assert "no adapter has a name here" in (send(prompt="a", lora_name="doll").sender.error() or "")
    executor.adapters = {"doll": "/loras/doll", "sheep": "/loras/sheep"}
    assert json.loads(answer(send(list_adapters=True))["text"]) == ["doll", "sheep"]
    send(prompt="a", lora_name="doll")
    assert executor.submitted.acquire(timeout=20)
    lora = executor.requests[1].lora
    assert lora is not None and (lora.name, lora.path) == ("doll", "/loras/doll")
    executor.end(1, 50)
    executor.adapters = {"sheep": "/loras/sheep"}
    assert "there are sheep; name one" in (send(prompt="a", lora_name="doll").sender.error() or "")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ({"load_adapter": {"name": "doll"}}, "request.load_adapter: object missing required field `directory`"),
        ({"load_adapter": "doll"}, "request.load_adapter: expected `object | null`"),
        ({"load_adapter": {"name": 1, "directory": "x"}}, "request.load_adapter.name: expected `str`, got `int`"),
        ({"unload_adapter": ["doll"]}, "request.unload_adapter: expected `str | null`, got `array`"),
        ({"unload_adapter": "doll", "prompt": "a"}, "'prompt' is no known parameter"),
        ({"unload_adapter": "doll", "list_adapters": True}, "unload_adapter and list_adapters is given"),
        ({"list_adapters": False}, "exactly one of load_adapter, unload_adapter, list_adapters is expected, none is"),
    ],
)
def test_what_is_no_command_is_refused_by_name(
    send: Send, executor: ScriptedExecutor, command: dict[str, Any], sentence: str
) -> None:
    assert sentence in (send(**command).sender.error() or "")
    assert not executor.named and not executor.requests


def test_a_look_is_answered_with_what_the_engine_does(send: Send) -> None:
    """Like the end of a reply; the gateway adds timeout_s."""
    told = answer(send(look=True, timeout_s=5.0))
    assert told["live"]["num_blocks"] == 7 and told["live"]["rows"] == []
    assert (told["text"], told["finish_reason"], told["usage"]["prompt_tokens"]) == ("", "stop", 0)


def test_a_look_with_anything_else_is_refused(send: Send) -> None:
    for command in ({"look": False}, {"look": 1}, {"look": True, "prompt": "x"}, {"look": None}):
        request = send(**command)
        expected = "[UNSUPPORTED] request: 'prompt'" if "prompt" in command else "[INVALID_ARGUMENT]"
        assert (request.sender.error() or "").startswith(expected), command
