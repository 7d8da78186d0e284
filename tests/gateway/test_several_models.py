"""Several models behind one endpoint: `model` chooses the Triton model, and operators load, unload and replace."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.loads import load_of
from gateway.served import Served as Model
from gateway.served import served_of
from gateway.triton_client import Job, TritonLink
from gateway.turns import Turns
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_keys import ALICE, BOB, write
from tests.gateway.test_loads import PAGE

HELLO: Any = [{"role": "user", "content": "hello"}]
OTHER = Model("b.everbatch", ("b", "org/b"), ("sheep",), "b")
STATE = {
    **{"name": "b", "state": "loaded", "engine": 2, "owner": "b.engine", "memory_bytes": 7, "requests": 0},
    **{"why": "", "operation": ""},
}


@pytest.fixture(scope="module")
def several(shared_triton: FakeTriton) -> Iterator[Served]:
    options: dict[str, Any] = {"model_names": ("everbatch", "a"), "adapters": ("doll",), "others": (OTHER,)}
    with serving(shared_triton.url, **options) as served:
        served.wait_healthy()
        yield served


@pytest.mark.parametrize(
    ("name", "model", "adapter"),
    [
        ("everbatch", "everbatch", None),
        ("a", "everbatch", None),
        ("doll", "everbatch", "doll"),
        ("b", "b.everbatch", None),
        ("org/b", "b.everbatch", None),
        ("sheep", "b.everbatch", "sheep"),
    ],
)
def test_the_model_of_a_request_chooses_the_triton_model(
    name: str, model: str, adapter: str | None, several: Served, triton: FakeTriton
) -> None:
    with several.client() as client:
        assert client.chat.completions.create(model=name, messages=HELLO).model == name
        assert client.completions.create(model=name, prompt="a").model == name
    assert several.request("POST", "/tokenize", {"model": name, "prompt": "a"})[0] == 200
    assert [seen.model for seen in triton.requests] == [model] * 3
    assert triton.requests[0].body.get("lora_name") == adapter


def test_models_lists_all_of_them_with_their_adapters(several: Served, triton: FakeTriton) -> None:
    _, listed, _ = several.request("GET", "/v1/models")
    assert [(card["id"], card.get("parent")) for card in listed["data"]] == [
        *(("everbatch", None), ("a", None), ("doll", "everbatch"), ("b", None), ("org/b", None), ("sheep", "b")),
    ]
    several.request("GET", "/v1/models")
    asked = [seen.model for seen in triton.requests]
    assert asked.count("b.everbatch") <= 1, "an idle model is not woken by those who list"


def test_an_unknown_model_is_refused_with_those_that_there_are(several: Served) -> None:
    with several.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="b.everbatch", messages=HELLO)
    assert "served are: everbatch, a, doll, b, org/b, sheep" in caught.value.message


def test_an_adapter_is_loaded_for_the_model_that_is_named(several: Served, triton: FakeTriton) -> None:
    triton.adapters = ["sheep"]
    body = {"lora_name": "cow", "lora_path": "/x", "model": "b"}
    assert several.request("POST", "/v1/load_lora_adapter", body)[0] == 200
    assert [seen.model for seen in triton.requests] == ["b.everbatch"] * 2
    assert several.gateway.served_as("cow").triton_model == "b.everbatch"
    status, answer, _ = several.request("POST", "/v1/load_lora_adapter", {**body, "model": "a"})
    assert status == 400 and "is an adapter of another model" in answer["error"]["message"]
    assert several.request("POST", "/v1/load_lora_adapter", {**body, "model": "c"})[0] == 404
    assert several.request("POST", "/v1/unload_lora_adapter", {"lora_name": "cow"})[0] == 200
    assert triton.requests[-1].model == "b.everbatch", "the one that has it"
    triton.adapters = ["doll"]


def test_a_key_changes_adapters_of_its_own_models_only(triton: FakeTriton, tmp_path: Path) -> None:
    """Also where it names none, and the adapter or the first model says which one is meant."""
    keys = write(tmp_path / "keys", f"alice {ALICE} adapters models=a\nbob {BOB} adapters models=b\n")
    options: dict[str, Any] = {"model_names": ("a",), "adapters": ("doll",), "others": (OTHER,), "api_keys": keys}
    with serving(triton.url, **options) as served:
        served.wait_healthy()

        def ask(key: str, path: str, **body: str) -> int:
            return served.request("POST", f"/v1/{path}_lora_adapter", body, {"Authorization": f"Bearer {key}"})[0]

        assert ask(ALICE, "unload", lora_name="sheep") == 404, "it is the other model's"
        assert ask(BOB, "load", lora_name="cow", lora_path="x") == 404, "it would be the first model's"
        assert not triton.requests
        triton.adapters = ["sheep"]
        assert ask(BOB, "unload", lora_name="sheep") == 200
        triton.adapters = ["doll"]
        assert ask(ALICE, "load", lora_name="cow", lora_path="x") == 200
    triton.adapters = ["doll"]


def test_a_model_that_does_not_answer_delays_the_list_once_whatever_its_names(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(triton.url, adapters=tuple(f"doll{n}" for n in range(50))) as served:
        served.wait_healthy()
        asked: list[float] = []

        async def silent(model: Model) -> None:
            asked.append(time.monotonic())
            await asyncio.sleep(0.2)

        monkeypatch.setattr(served.gateway, "_ask_facts", silent)
        assert len(served.request("GET", "/v1/models")[1]["data"]) == 51
    assert len(asked) == 1


def test_the_load_is_that_of_the_models_present_engine() -> None:
    page = "".join(
        PAGE.replace('model="tensorrt_llm"', f'model="{model}"')
        .replace('version="1"', f'version="{version}"')
        .replace("} 11", f"}} {active}")
        for model, version, active in (("a", 1, 5), ("b", 9, 6), ("b", 10, 7), ("b", 2, 8))
    )
    found = [load_of(page, label) for label in ("a", "b", "c")]
    assert [load and load.num_running_reqs for load in found] == [5 - 3, 7 - 3, None]


def test_the_flag_of_a_further_model_is_read_strictly() -> None:
    assert (
        served_of('{"triton_model": "b.everbatch", "names": ["b", "org/b"], "adapters": ["sheep"], "label": "b"}')
        == OTHER
    )
    with pytest.raises(ValueError, match="unknown field"):
        served_of('{"triton_model": "b", "names": [], "nmae": 1}')


class Launcher:
    """Answers on a socket as the launcher does."""

    def __init__(self, path: Path) -> None:
        self.path, self.asked, self.answer = path, [], {"models": [STATE], "error": "", "is_request": False}
        launcher = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                launcher.asked.append(json.loads(self.rfile.readline()))
                if launcher.answer is not None:
                    self.wfile.write(json.dumps(launcher.answer).encode() + b"\n")

        self.server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path / "control.sock")
    yield launcher
    launcher.server.shutdown()
    launcher.server.server_close()


def test_operations_reach_the_launcher_and_its_errors_the_operator(triton: FakeTriton, launcher: Launcher) -> None:
    with serving(triton.url, control=launcher.path) as served:
        assert served.request("GET", "/v1/admin/models")[1] == {"models": [STATE]}
        for operation in ("load", "unload", "replace"):
            assert served.request("POST", f"/v1/admin/models/b/{operation}")[:2] == (200, {"models": [STATE]})
        launcher.answer = {"models": [], "error": "there is no model 'c'", "is_request": True}
        status, answer, _ = served.request("POST", "/v1/admin/models/c/load")
        assert (status, answer["error"]["message"]) == (400, "there is no model 'c'")
        launcher.answer = {"models": [], "error": "load of b.engine-2: no", "is_request": False}
        assert served.request("POST", "/v1/admin/models/b/replace")[0] == 503
        launcher.answer = None
        status, answer, _ = served.request("POST", "/v1/admin/models/b/replace")
        assert status == 503 and "the launcher does not answer" in answer["error"]["message"]
    operations = [(each["operation"], each["model"]) for each in launcher.asked[:4]]
    assert operations == [("list", ""), ("load", "b"), ("unload", "b"), ("replace", "b")]


def test_after_an_operation_a_model_is_asked_for_its_length_again(triton: FakeTriton, launcher: Launcher) -> None:
    """Also after one that failed, which may have done so when the new engine served."""
    with serving(triton.url, control=launcher.path) as served:
        served.wait_healthy()

        def times_asked() -> int:
            for _ in range(2):
                assert served.request("GET", "/v1/models/everbatch")[1]["max_model_len"] == 2048
            return sum("tokenize" in seen.body for seen in triton.requests)

        assert times_asked() == 1
        served.request("GET", "/v1/admin/models")
        assert times_asked() == 1, "a list changes nothing"
        for number, operation in enumerate(("load", "unload", "replace"), 2):
            served.request("POST", f"/v1/admin/models/everbatch/{operation}")
            assert times_asked() == number
        launcher.answer = {"models": [], "error": "the former engine does not end", "is_request": False}
        assert served.request("POST", "/v1/admin/models/everbatch/replace")[0] == 503
        assert times_asked() == 5


def test_only_a_key_with_the_word_admin_operates_models(triton: FakeTriton, launcher: Launcher, tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", f"alice {ALICE} admin\nbob {BOB} metrics adapters\n")
    with serving(triton.url, control=launcher.path, api_keys=keys) as served:

        def ask(key: str) -> tuple[int, Any, Any]:
            return served.request("POST", "/v1/admin/models/b/unload", headers={"Authorization": f"Bearer {key}"})

        assert ask(ALICE)[0] == 200
        status, answer, _ = ask(BOB)
        assert status == 403 and "has the word admin may" in answer["error"]["message"]
        assert served.request("GET", "/v1/admin/models", headers={"Authorization": f"Bearer {BOB}"})[0] == 403
    assert len(launcher.asked) == 1


def test_without_keys_only_programs_of_this_machine_operate_models(triton: FakeTriton, launcher: Launcher) -> None:
    with serving(triton.url, control=launcher.path) as served:
        headers = {"X-Forwarded-For": "192.0.2.1"}
        assert served.request("POST", "/v1/admin/models/b/unload", headers=headers)[0] == 403
    assert launcher.asked == []


def test_a_server_of_one_model_says_how_to_have_several(triton: FakeTriton) -> None:
    with serving(triton.url) as served:
        status, answer, _ = served.request("GET", "/v1/admin/models")
        assert status == 404 and "start it with --models FILE" in answer["error"]["message"]


def test_a_stream_is_read_to_its_end_when_its_reply_is_complete(triton: FakeTriton) -> None:
    """Triton keeps a request whose stream is cancelled after its last response, and its model can then not be unloaded."""
    with serving(triton.url) as served:
        served.wait_healthy()
        with served.client() as client:
            client.completions.create(model="everbatch", prompt="linger a")
        seen = triton.requests[-1]
        assert seen.ended.wait(60) and seen.was_cancelled is False


def test_a_reader_who_leaves_with_the_last_response_does_not_cancel_the_stream(triton: FakeTriton) -> None:
    async def ask() -> None:
        link = TritonLink(triton.url, "everbatch", 30, Turns())
        async with aclosing(link.stream(Job({"prompt": "linger a"}, "id", ""))) as source:
            assert (await anext(source)).finish_reason == "stop"
        while link._ending:
            await asyncio.sleep(0.01)
        await link.close()

    asyncio.run(ask())
    seen = triton.last()
    assert seen.ended.wait(60) and seen.was_cancelled is False


def test_a_stream_of_questions_is_ended_when_the_last_one_has_been_answered(triton: FakeTriton) -> None:
    triton.requests.clear()

    async def ask() -> None:
        link = TritonLink(triton.url, "everbatch", 30, Turns())
        for _ in range(3):
            async with link.asking() as question:
                await question(Job({"look": True}, "id", ""))
        while link._ending:
            await asyncio.sleep(0.01)
        await link.close()

    asyncio.run(ask())
    assert [seen.client_stayed for seen in triton.requests if seen.body.get("look")] == [True] * 3
