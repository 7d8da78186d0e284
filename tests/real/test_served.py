"""A published model behind a real tritonserver and the endpoint: every wire answers the same question."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from backend.text.chat import ChatTemplate
from backend.text.tokenizer import Tokenizer
from client.client import EverbatchClient
from tests.e2e.launched import Launched, launched
from tests.e2e.wire import TokenClient, events, post
from tests.real.conftest import RealModel

pytestmark = pytest.mark.real
# Asked "What is the capital of France?", SmolLM2 has two first tokens whose log-probabilities differ by 0.05, so that
# the rounding of a kernel decides which answer comes; for this question it does not.
QUESTION = "Name the capital of France."
EXPECTED = "Paris"
MESSAGES = [{"role": "user", "content": QUESTION}]
NEW = 12
BASE_MODELS = {"gemma3"}


class Served(NamedTuple):
    server: Launched
    prompt: str  # the question in the model's chat template
    ids: list[int]  # its tokens
    tokenizer: Tokenizer

    def generate(self, model: str, **fields: Any) -> dict[str, Any]:
        """Triton's /generate of a model."""
        url = f"http://127.0.0.1:{self.server.ports.http}/v2/models/{model}/generate"
        status, text = post(url, fields)
        assert status == 200, text
        return json.loads(text)


@pytest.fixture(scope="module")
def served(model: RealModel) -> Iterator[Served]:
    if model.name in BASE_MODELS:
        pytest.skip(f"{model.name} is a base model, which answers no questions")
    tokenizer = Tokenizer.from_directory(model.path)
    prompt = ChatTemplate.from_directory(model.path, tokenizer).render(MESSAGES)
    with launched("--model", str(model.path), "--profile", "all") as server:
        yield Served(server, prompt, tokenizer.encode(prompt, add_special_tokens=False), tokenizer)


def by_ensemble(served: Served) -> str:
    return served.generate("ensemble", text_input=served.prompt, max_tokens=NEW, temperature=0.0)["text_output"]


def by_ensemble_in_a_stream(served: Served) -> str:
    url = f"http://127.0.0.1:{served.server.ports.http}/v2/models/ensemble/generate_stream"
    fields = {"text_input": served.prompt, "max_tokens": NEW, "stream": True, "temperature": 0.0}
    found = events(post(url, fields)[1])
    assert len(found) > 1
    return "".join(event["text_output"] for event in found)


def by_bls(served: Served) -> str:
    return served.generate("tensorrt_llm_bls", text_input=served.prompt, max_tokens=NEW, temperature=0.0)["text_output"]


def by_tokens(served: Served) -> str:
    """The engine's own model over gRPC: token ids in and out."""
    with TokenClient(served.server.grpc_url) as client:
        return served.tokenizer.decode(client.generate(served.ids, NEW, runtime_top_k=1))


def by_everbatch(served: Served) -> str:
    with EverbatchClient(served.server.grpc_url) as client:
        return client.chat(MESSAGES, max_tokens=NEW, temperature=0.0).text


def by_vllm(served: Served) -> str:
    sampling = json.dumps({"max_tokens": NEW, "temperature": 0})
    return served.generate("vllm_model", text_input=served.prompt, sampling_parameters=sampling)["text_output"]


def by_lmdeploy(served: Served) -> str:
    return served.generate(
        "lmdeploy_model", prompt=served.prompt, max_tokens=NEW, top_k=1, ignore_eos=False, stream=False
    )["response"]


def by_openai_chat(served: Served) -> str:
    with openai.OpenAI(base_url=served.server.url, api_key="none") as client:
        chunks = client.chat.completions.create(
            model="everbatch", messages=MESSAGES, max_tokens=NEW, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def by_openai_completions(served: Served) -> str:
    with openai.OpenAI(base_url=served.server.url, api_key="none") as client:
        done = client.completions.create(model="everbatch", prompt=served.prompt, max_tokens=NEW, temperature=0)
        return done.choices[0].text


def by_openai_responses(served: Served) -> str:
    with openai.OpenAI(base_url=served.server.url, api_key="none") as client:
        return client.responses.create(
            model="everbatch", input=QUESTION, max_output_tokens=NEW, temperature=0
        ).output_text


def by_anthropic(served: Served) -> str:
    with anthropic.Anthropic(base_url=served.server.url.removesuffix("/v1"), api_key="none") as client:
        done = client.messages.create(
            model="everbatch", max_tokens=NEW, messages=MESSAGES, extra_body={"temperature": 0}
        )
        return "".join(block.text for block in done.content if block.type == "text")


WIRES: list[Callable[[Served], str]] = [
    *(by_ensemble, by_ensemble_in_a_stream, by_bls, by_tokens, by_everbatch, by_vllm, by_lmdeploy),
    *(by_openai_chat, by_openai_completions, by_openai_responses, by_anthropic),
]


@pytest.mark.parametrize("ask", WIRES, ids=lambda ask: ask.__name__)
def test_a_published_model_answers_on_every_wire(served: Served, ask: Callable[[Served], str]) -> None:
    assert EXPECTED in ask(served)
