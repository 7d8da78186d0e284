"""LoRA adapters by the name of a model: as vLLM serves them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateway.__main__ import settings_of
from tests.gateway.conftest import Served, serving
from tests.gateway.fake_triton import FakeTriton

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
    status, card, _ = adapted.request("GET", "/v1/models/team/sheep")
    assert status == 200 and card == listed["data"][3] and card["object"] == "model"
    assert "parent" not in listed["data"][0]


def test_a_name_that_is_neither_is_refused_before_triton_hears_of_it(adapted: Served, triton: FakeTriton) -> None:
    with adapted.client() as client, pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="cow", messages=HELLO)
    assert caught.value.code == "model_not_found" and "there is no model 'cow'" in caught.value.message
    assert not triton.requests


def test_the_flag_is_given_once_for_each_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings_of([]).adapters == ()
    assert settings_of(["--lora", "doll", "--lora", "sheep"]).adapters == ("doll", "sheep")
    with pytest.raises(SystemExit):
        settings_of(["--model-name", "own", "--lora", "own"])
    assert "own is the name of a model and of a LoRA adapter; give one of them another name" in capsys.readouterr().err
