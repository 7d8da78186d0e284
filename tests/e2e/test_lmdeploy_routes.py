"""LMDeploy's own routes and prompt adapters, from a client through the endpoint and Triton to the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from compat.lmdeploy import APIClient
from deploy import probe
from deploy.model_source import DEFAULT_MODEL
from tests.e2e.launched import Launched, launched

TEXT = "def main(path):\n"
GREEDY = {"top_k": 1, "request_output_len": 12}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    adapter = tmp_path_factory.mktemp("adapter") / "soft"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    width = json.loads((DEFAULT_MODEL / "config.json").read_text())["hidden_size"]
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(3))
    save_file({"prompt_embeddings": rows}, adapter / "adapter_model.safetensors")
    with launched(f'--set=prompt_adapters.adapters=["soft={adapter}"]') as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Launched) -> APIClient:
    return APIClient(served.url.removesuffix("/v1"), timeout_s=120)


def test_encode_gives_the_ids_of_the_models_tokenizer(client: APIClient) -> None:
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    ids, lengths = client.encode([TEXT, "é\0"])
    assert ids == [tokenizer.encode(text).ids for text in (TEXT, "é\0")]
    assert lengths == [len(each) for each in ids]


def test_a_turn_of_a_session_goes_on_from_the_turn_before(client: APIClient) -> None:
    """Its answer is that of the whole conversation in one request, and what it went on from was in the KV cache."""
    first = next(client.chat_interactive_v1(TEXT, session_id=5, interactive_mode=True, **GREEDY))
    second = next(client.chat_interactive_v1("and then?", session_id=5, interactive_mode=True, **GREEDY))
    assert second["history_tokens"] == first["input_tokens"] + first["tokens"]
    said = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "and then?"},
    ]
    whole = next(client.chat_interactive_v1(said, session_id=-1, **GREEDY))
    assert (
        whole["text"] == second["text"] and whole["input_tokens"] == second["history_tokens"] + second["input_tokens"]
    )
    client.end_session(5)
    again = next(client.chat_interactive_v1(TEXT, session_id=5, interactive_mode=True, **GREEDY))
    assert (again["text"], again["history_tokens"]) == (first["text"], 0)


def test_a_prompt_adapter_is_a_model_of_openais_clients(served: Launched) -> None:
    asked = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=120) as client:
        cards = list(client.models.list())
        assert {card.id: card.model_dump().get("parent") for card in cards}["soft"] == cards[0].id
        plain = client.completions.create(model="everbatch", **asked)
        soft = client.completions.create(model="soft", **asked)
        assert soft.usage.prompt_tokens == plain.usage.prompt_tokens, "virtual tokens have no text"
        assert soft.choices[0].logprobs.token_logprobs != plain.choices[0].logprobs.token_logprobs
        assert client.completions.create(model="soft", **asked).choices == soft.choices
    status, text = probe.request(
        served.url.removesuffix("/v1"), "POST", "/v1/completions", asked | {"model": "none"}, 60
    )
    assert status == 404, text
