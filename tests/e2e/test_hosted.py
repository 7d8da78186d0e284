"""Models that transformers runs, behind a real tritonserver: experts, and an encoder, with transformers as the oracle."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import tritonclient.grpc as grpcclient
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from backend.api.output_limits import NO_HEAD
from backend.models.loader import DEFAULT_MODEL
from backend.text.tokenizer import Tokenizer as TextTokenizer
from deploy.triton_server import TritonServer
from tests.e2e.conftest import everything_is_answered, serve
from tests.e2e.embedding_models import write_modules
from tests.e2e.starts import wait_ready
from tests.e2e.wire import TokenClient, ids_of, reaches, settled
from tests.gateway.conftest import Served, serving
from tests.hosted.encoders import hidden_states, save_encoder, tiny_encoder
from tests.hosted.test_sentence_encoders import write_tokenizer
from tests.hosted.tiny import save, tiny_model
from tests.text.random_sequences import text_in_characters

MODEL = "everbatch"
SESSION = 1 << 40
RECOMPUTED = "everbatch_tokens_total{kind=recomputed}"
PROMPT = list(range(100, 180))
SMALL = ("kv_cache.block_size=32", "kv_cache.max_tokens=384", "scheduler.max_batch_size=4", "kv_cache.watermark=0")
TEXTS = ["How are lines read?", "def read_lines(path):", "x"]


@pytest.fixture(scope="module")
def mixtral() -> PreTrainedModel:
    return tiny_model("mixtral", vocab_size=4096, eos_token_id=None)


@pytest.fixture(scope="module")
def mixture_server(mixtral: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """With the default model's tokenizer, and a pool that holds the KV of three requests of this file."""
    directory = save(mixtral, tmp_path_factory.mktemp("mixtral"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEFAULT_MODEL / name, directory)
    with serve(tmp_path_factory.mktemp("run"), f"model.path={directory}", *SMALL) as server:
        wait_ready(server)
        yield server
        everything_is_answered(server)


@pytest.fixture(scope="module")
def client(mixture_server: TritonServer) -> Iterator[openai.OpenAI]:
    with serving(mixture_server.grpc_url) as served, served.client() as client:
        yield client


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that transformers chooses behind `prompt`."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def crowd(server: TritonServer) -> list[list[int]]:
    """Eight requests of 110 tokens at the same time: three times what the pool holds."""
    with TokenClient(server.grpc_url) as tokens:
        streams = [tokens.start([n + 1, *PROMPT], 30, streaming=True, exclude_input_in_output=True) for n in range(8)]
        return [stream.token_ids() for stream in streams]


def test_a_stream_has_the_tokens_of_transformers(mixture_server: TritonServer, mixtral: PreTrainedModel) -> None:
    with TokenClient(mixture_server.grpc_url) as tokens:
        pieces = list(map(ids_of, tokens.start(PROMPT, 20, streaming=True, exclude_input_in_output=True)))
    assert len(pieces) > 1 and sum(pieces, []) == greedy(mixtral, PROMPT, 20)


def test_a_session_that_was_evicted_goes_on_as_if_it_had_not_been(
    mixture_server: TritonServer, mixtral: PreTrainedModel
) -> None:
    more = [7, 8, 9]
    first = greedy(mixtral, PROMPT, 20)
    second = greedy(mixtral, [*PROMPT, *first, *more], 20)
    with TokenClient(mixture_server.grpc_url) as tokens:
        assert tokens.generate(PROMPT, 20, CORRID=SESSION, START=1) == first
        before = settled(mixture_server.metrics_url)[RECOMPUTED]
        crowd(mixture_server)
        assert tokens.generate(more, 20, CORRID=SESSION, END=1) == second
    assert reaches(mixture_server.metrics_url, RECOMPUTED, before + len(PROMPT))


def test_requests_in_a_crowd_have_the_tokens_that_they_have_alone(
    mixture_server: TritonServer, mixtral: PreTrainedModel
) -> None:
    assert crowd(mixture_server) == [greedy(mixtral, [n + 1, *PROMPT], 30) for n in range(8)]


def test_openais_client_gets_the_same_text_before_and_after_an_eviction(
    mixture_server: TritonServer, mixtral: PreTrainedModel, client: openai.OpenAI
) -> None:
    tokenizer = TextTokenizer.from_directory(DEFAULT_MODEL)
    expected = text_in_characters(tokenizer, [], greedy(mixtral, PROMPT, 16), True)

    def whole() -> str:
        return client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0).choices[0].text

    assert whole() == expected
    crowd(mixture_server)
    assert whole() == expected
    stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=9)
    assert chat.usage is not None and chat.usage.completion_tokens == 9


@pytest.fixture(scope="module")
def bert() -> PreTrainedModel:
    return tiny_encoder("BertModel")


@pytest.fixture(scope="module")
def encoder_directory(bert: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vectors are the means of the hidden states, of length 1."""
    directory = save_encoder(bert, tmp_path_factory.mktemp("bert"))
    write_tokenizer(directory)
    write_modules(directory, "mean", normalize=True, dimensions=64)
    return directory


@pytest.fixture(scope="module")
def encoder_server(encoder_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with serve(tmp_path_factory.mktemp("run"), f"model.path={encoder_directory}") as server:
        wait_ready(server)
        yield server
        everything_is_answered(server)


@pytest.fixture(scope="module")
def encoder_endpoint(encoder_server: TritonServer) -> Iterator[Served]:
    with serving(encoder_server.grpc_url) as served:
        yield served


@pytest.fixture(scope="module")
def expected(bert: PreTrainedModel, encoder_directory: Path) -> np.ndarray:
    """The vectors of TEXTS by transformers, float32 [texts, 64]."""
    tokenizer = Tokenizer.from_file(str(encoder_directory / "tokenizer.json"))
    tokenizer.no_padding()
    states = hidden_states(bert, [tokenizer.encode(text).ids for text in TEXTS])
    vectors: np.ndarray = torch.nn.functional.normalize(torch.stack([rows.mean(0) for rows in states])).numpy()
    return vectors


def test_an_encoder_makes_transformers_vectors_over_triton(encoder_server: TritonServer, expected: np.ndarray) -> None:
    def embed(texts: list[str]) -> np.ndarray:
        with grpcclient.InferenceServerClient(encoder_server.grpc_url) as triton:
            given = grpcclient.InferInput("text_input", [len(texts), 1], "BYTES")
            given.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=object))
            found: np.ndarray = triton.infer("embedding", [given]).as_numpy("embedding")
            return found

    together = embed(TEXTS)
    np.testing.assert_allclose(together, expected, atol=1e-5)
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        alone = list(pool.map(lambda text: embed([text])[0], TEXTS))
    assert np.array_equal(together, np.stack(alone))


def test_an_encoder_makes_the_same_vectors_for_openais_client(encoder_endpoint: Served, expected: np.ndarray) -> None:
    with encoder_endpoint.client() as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS)
    np.testing.assert_allclose(np.array([entry.embedding for entry in answer.data]), expected, atol=1e-5)


def test_an_encoder_generates_nothing_and_says_so(encoder_endpoint: Served) -> None:
    asked = {"completions": {"prompt": "x"}, "chat/completions": {"messages": [{"role": "user", "content": "x"}]}}
    for route, body in asked.items():
        status, answer, _ = encoder_endpoint.request("POST", f"/v1/{route}", {"model": MODEL, **body})
        assert (status, answer["error"]["message"]) == (400, NO_HEAD)
