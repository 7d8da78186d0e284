"""LoRA adapters by the name of a model: as vLLM serves them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.__main__ import settings_of
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import FakeTriton
from tests.gateway.test_keys import ALICE, BOB, write

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def adapted(shared_triton: FakeTriton) -> Iterator[Served]:
    with serving(shared_triton.url, model_names=("everbatch", "own"), adapters=("doll", "team/sheep")) as served:
        served.wait_healthy()
        yield served


@pytest.mark.parametrize(("model", "asked"), [("everbatch", None), ("own", None), ("doll", "doll")])
def test_the_name_of_an_adapter_as_model_is_the_adapter_of_the_request(
    model: str, asked: str | None, adapted: Served, triton: FakeTriton
) -> None:
    with adapted.client() as client:
        chat = client.chat.completions.create(model=model, messages=HELLO)
        completion = client.completions.create(model=model, prompt=["a", "b"])
        response = client.responses.create(model=model, input="hello")
        chunks = list(client.chat.completions.create(model=model, messages=HELLO, stream=True))
    assert {chat.model, completion.model, response.model, *(chunk.model for chunk in chunks)} == {model}
    assert [seen.body.get("lora_name") for seen in triton.requests] == [asked] * 5


def test_models_lists_adapters_with_the_model_that_they_belong_to(adapted: Served) -> None:
    """A model has no parent: the key is absent, as the SDK's other models have it."""
    _, listed, _ = adapted.request("GET", "/v1/models")
    assert [(card["id"], card.get("parent")) for card in listed["data"]] == [
        ("everbatch", None),
        ("own", None),
        ("doll", "everbatch"),
        ("team/sheep", "everbatch"),
    ]
    assert {card["max_model_len"] for card in listed["data"]} == {2048}
    status, card, _ = adapted.request("GET", "/v1/models/team/sheep")
    assert status == 200 and card == listed["data"][3] and card["object"] == "model"
    assert "parent" not in listed["data"][0]


def test_a_name_that_is_neither_is_refused_before_triton_hears_of_it(adapted: Served, triton: FakeTriton) -> None:
    with adapted.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="cow", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert "there is no model 'cow'; served are: everbatch, own, doll, team/sheep" in caught.value.message
    assert not triton.requests


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def test_an_adapter_comes_and_goes_while_the_server_runs(triton: FakeTriton) -> None:
    """As vLLM's clients do it."""
    triton.adapters = ["doll"]
    with serving(triton.url, adapters=("doll",)) as served, served.client() as client:
        served.wait_healthy()
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="sheep", messages=HELLO)
        status, text, _ = served.request("POST", LOAD, {"lora_name": "sheep", "lora_path": "farm/sheep"})
        assert (status, text) == (200, "Success: LoRA adapter 'sheep' added successfully.")
        assert triton.requests[0].body["load_adapter"] == {"name": "sheep", "directory": "farm/sheep"}
        client.chat.completions.create(model="sheep", messages=HELLO)
        assert triton.last().body["lora_name"] == "sheep"
        assert [card.id for card in client.models.list()] == ["everbatch", "doll", "sheep"]
        status, text, _ = served.request("POST", UNLOAD, {"lora_name": "doll"})
        assert (status, text) == (200, "Success: LoRA adapter 'doll' removed successfully.")
        assert [card.id for card in client.models.list()] == ["everbatch", "sheep"]
        with pytest.raises(openai.NotFoundError, match="served are: everbatch, sheep"):
            client.chat.completions.create(model="doll", messages=HELLO)


def test_a_list_that_comes_late_does_not_replace_a_newer_one(triton: FakeTriton) -> None:
    """The list behind the first load is made before the second load, and would arrive after that one's list."""
    triton.adapters, triton.list_delays_s = [], [0.5]
    with serving(triton.url) as served, ThreadPoolExecutor(1) as pool:
        served.wait_healthy()
        first = pool.submit(served.request, "POST", LOAD, {"lora_name": "a", "lora_path": "a"})
        triton.wait_for(2)
        assert served.request("POST", LOAD, {"lora_name": "b", "lora_path": "b"})[0] == 200
        assert first.result(10)[0] == 200
        listed = [card["id"] for card in served.request("GET", "/v1/models")[1]["data"]]
    assert listed == ["everbatch", "a", "b"]


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        (
            LOAD,
            {"lora_name": "x", "lora_path": "missing"},
            404,
            "there is no adapter in 'missing' below lora.allowed_dir",
        ),
        (UNLOAD, {"lora_name": "cow"}, 404, "there is no adapter 'cow'"),
        (LOAD, {"lora_name": "everbatch", "lora_path": "x"}, 400, "'everbatch' is the name of a model"),
        (LOAD, {"lora_name": "x"}, 400, "lora_path"),
        (LOAD, {"lora_name": "x" * 257, "lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "x", "lora_path": "x" * 4097}, 400, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": 7}, 400, "lora_path"),
    ],
)
def test_what_cannot_be_loaded_is_said_and_changes_nothing(
    path: str, body: dict[str, Any], status: int, sentence: str, triton: FakeTriton
) -> None:
    triton.adapters = ["doll"]
    with serving(triton.url, adapters=("doll",)) as served:
        served.wait_healthy()
        got, answer, _ = served.request("POST", path, body)
        assert got == status and sentence in answer["error"]["message"]
        assert [card["id"] for card in served.request("GET", "/v1/models")[1]["data"]] == ["everbatch", "doll"]


def test_only_keys_with_the_right_change_adapters(triton: FakeTriton, tmp_path: Path) -> None:
    triton.adapters = []
    keys = write(tmp_path / "keys", f"alice {ALICE} adapters metrics\nbob {BOB}\n")
    body = {"lora_name": "sheep", "lora_path": "sheep"}
    with serving(triton.url, api_keys=keys) as served:
        served.wait_healthy()
        for path in (LOAD, UNLOAD):
            status, answer, _ = served.request("POST", path, body, headers={"Authorization": f"Bearer {BOB}"})
            assert status == 403 and "the word adapters may" in answer["error"]["message"]
        assert not triton.requests
        assert served.request("POST", LOAD, body, headers={"Authorization": f"Bearer {ALICE}"})[0] == 200


def test_without_keys_only_this_machine_changes_adapters(triton: FakeTriton) -> None:
    with serving(triton.url) as served:
        served.wait_healthy()
        status, answer, _ = served.request("POST", UNLOAD, {"lora_name": "x"}, headers={"X-Forwarded-For": "10.1.2.3"})
        assert status == 403 and "from this machine only" in answer["error"]["message"]
        assert not triton.requests


def test_the_flag_is_given_once_for_each_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings_of([]).adapters == ()
    assert settings_of(["--lora", "doll", "--lora", "sheep"]).adapters == ("doll", "sheep")
    with pytest.raises(SystemExit):
        settings_of(["--model-name", "own", "--lora", "own"])
    assert "own is the name of a model and of a LoRA adapter; give one of them another name" in capsys.readouterr().err


def test_the_length_of_the_model_is_asked_for_once_and_again_only_while_it_is_not_known(triton: FakeTriton) -> None:
    with serving(triton.url) as served:
        served.wait_healthy()
        triton.stop()
        try:
            assert "max_model_len" not in served.request("GET", "/v1/models")[1]["data"][0]
        finally:
            triton.start()
        served.wait_healthy()
        for _ in range(3):
            assert served.request("GET", "/v1/models/everbatch")[1]["max_model_len"] == 2048
    assert [seen.body.get("tokenize") for seen in triton.requests] == [True]


def test_a_prompt_adapter_is_named_like_a_lora_adapter(shared_triton: FakeTriton) -> None:
    with serving(shared_triton.url, adapters=("doll",), prompt_adapters=("soft",)) as served:
        served.wait_healthy()
        with served.client() as client:
            client.chat.completions.create(model="soft", messages=HELLO)
            body = shared_triton.last().body
            assert body["prompt_adapter_name"] == "soft" and "lora_name" not in body
            client.chat.completions.create(model="doll", messages=HELLO)
            assert "prompt_adapter_name" not in shared_triton.last().body
            cards = {card.id: card for card in client.models.list()}
    assert list(cards) == ["everbatch", "doll", "soft"] and cards["soft"].model_dump()["parent"] == "everbatch"
    assert settings_of(["--prompt-adapter", "soft"]).prompt_adapters == ("soft",)
    with pytest.raises(SystemExit):
        settings_of(["--model-name", "soft", "--prompt-adapter", "soft"])
