"""Embeddings and rerank before a real server: tiny Qwen3 checkpoints, with transformers as the oracle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from client import AsyncEverbatchClient, EverbatchClient, InvalidArgument
from deploy.triton_server import TritonServer
from tests.e2e.conftest import everything_is_answered, serve
from tests.e2e.embedding_models import QWEN_PROMPT, embedding_model
from tests.e2e.oracles import result_of
from tests.e2e.starts import wait_ready
from tests.e2e.wire import post
from tests.gateway.conftest import Served, serving

TEXTS = ["def read_lines(path):", "import os", "x", "for each in range(10):\n    print(each)", "x"]
MODEL = "everbatch"
Vectors = NDArray[np.float32]


class Oracle:
    """transformers' float32 hidden states and logits of the last token."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text).ids
        return found

    @torch.inference_mode()
    def run(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden state [hidden], and the logits behind it [vocabulary]."""
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        return out.hidden_states[-1][0, -1], out.logits[0, -1]

    def embedding(self, text: str, dimensions: int | None = None) -> Vectors:
        vector = torch.nn.functional.normalize(self.run(self.ids(text))[0][:dimensions], dim=0).numpy()
        return np.asarray(vector, np.float32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model(tmp_path_factory.mktemp("embedding"))


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


@pytest.fixture(scope="module")
def embedder(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    small = ("kv_cache.block_size=16", "kv_cache.max_tokens=1024", "scheduler.max_batch_size=8")
    with serve(tmp_path_factory.mktemp("run"), f"model.path={directory}", *small) as server:
        wait_ready(server)
        yield server
        everything_is_answered(server)


@pytest.fixture(scope="module")
def served(embedder: TritonServer) -> Iterator[Served]:
    with serving(embedder.grpc_url) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def vectors(answer: Any) -> Vectors:
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.array([entry.embedding for entry in answer.data], np.float32)


def test_openais_client_gets_transformers_hidden_states_of_texts_and_ids(client: openai.OpenAI, oracle: Oracle) -> None:
    expected = np.stack([oracle.embedding(text) for text in TEXTS])
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    np.testing.assert_allclose(vectors(answer), expected, atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(oracle.ids(text)) for text in TEXTS)
    as_ids = client.embeddings.create(model=MODEL, input=[oracle.ids(text) for text in TEXTS], encoding_format="float")
    assert np.array_equal(vectors(as_ids), vectors(answer))
    one = client.embeddings.create(model=MODEL, input=oracle.ids(TEXTS[0]), user="somebody")
    alone = client.embeddings.create(model=MODEL, input=TEXTS[0])
    assert np.array_equal(vectors(one), vectors(answer)[:1]) and np.array_equal(vectors(alone), vectors(one))


def test_dimensions_cut_and_normalise_again(client: openai.OpenAI, oracle: Oracle) -> None:
    for size in (1, 7, 48):
        found = vectors(client.embeddings.create(model=MODEL, input=TEXTS[3], dimensions=size))[0]
        np.testing.assert_allclose(found, oracle.embedding(TEXTS[3], size), atol=1e-5)
        assert found.shape == (size,) and np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


def test_bits_are_the_same_alone_in_a_crowd_and_after_evictions(client: openai.OpenAI) -> None:
    """The pool holds 1,024 tokens: most of the 64 texts, of 60 to 190 tokens each, lose their KV before they come again."""
    texts = [f"number = {n}\n" * (6 + n % 13) for n in range(64)]
    alone = [vectors(client.embeddings.create(model=MODEL, input=text))[0] for text in texts[:6]]
    together = vectors(client.embeddings.create(model=MODEL, input=texts))
    again = vectors(client.embeddings.create(model=MODEL, input=texts[::-1]))[::-1]
    assert np.array_equal(together[:6], np.stack(alone)) and np.array_equal(together, again)
    assert len({row.tobytes() for row in together}) == 64


def test_clients_at_the_same_time_get_their_own(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: vectors(client.embeddings.create(model=MODEL, input=text))[0], TEXTS * 4))
    expected = vectors(client.embeddings.create(model=MODEL, input=TEXTS))
    assert np.array_equal(np.stack(found), np.concatenate([expected] * 4))


def test_the_triton_model_answers_rows_together_over_grpc_and_http(
    embedder: TritonServer, client: openai.OpenAI, oracle: Oracle
) -> None:
    import tritonclient.grpc as grpc
    import tritonclient.http as http

    expected = vectors(client.embeddings.create(model=MODEL, input=TEXTS))
    for kind, url in ((grpc, embedder.grpc_url), (http, embedder.http_url.removeprefix("http://"))):
        with kind.InferenceServerClient(url) as triton:
            text = kind.InferInput("text_input", [len(TEXTS), 1], "BYTES")
            text.set_data_from_numpy(np.array([[one.encode()] for one in TEXTS], dtype=object))
            answer = triton.infer("embedding", [text])
            assert np.array_equal(answer.as_numpy("embedding"), expected)
            assert answer.as_numpy("num_input_tokens")[:, 0].tolist() == [len(oracle.ids(one)) for one in TEXTS]
            ids = kind.InferInput("input_ids", [1, len(oracle.ids(TEXTS[0]))], "INT32")
            ids.set_data_from_numpy(np.array([oracle.ids(TEXTS[0])], np.int32))
            size = kind.InferInput("dimensions", [1, 1], "INT32")
            size.set_data_from_numpy(np.array([[5]], np.int32))
            np.testing.assert_allclose(
                triton.infer("embedding", [ids, size]).as_numpy("embedding")[0],
                oracle.embedding(TEXTS[0], 5),
                atol=1e-5,
            )
    status, body = post(f"{embedder.http_url}/v2/models/embedding/generate", {"text_input": "x", "normalize": False})
    np.testing.assert_allclose(json.loads(body)["embedding"], oracle.run(oracle.ids("x"))[0].numpy(), atol=1e-5)
    status, body = post(f"{embedder.http_url}/v2/models/embedding/generate", {"text_input": ["x", ""]})
    assert status == 400 and "text_input is empty; give at least one character" in body


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_projects_own_client_embeds_any_number_of_texts(
    protocol: str, embedder: TritonServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = vectors(client.embeddings.create(model=MODEL, input=TEXTS, dimensions=9))
    url = embedder.http_url if protocol == "http" else f"grpc://{embedder.grpc_url}"
    with EverbatchClient(url, namespace="mine") as own:
        many = TEXTS * 20  # more than one request takes
        assert np.array_equal(own.embed(many, dimensions=9), np.concatenate([expected] * 20))
        with pytest.raises(InvalidArgument, match="dimensions is 49, allowed is 1 to 48"):
            own.embed(["a"], dimensions=49)
        for wrong, error in (([], ValueError), ("text", TypeError), ([5], TypeError)):
            with pytest.raises(error, match="texts"):
                own.embed(wrong)

    async def in_a_loop() -> Vectors:
        async with AsyncEverbatchClient(url) as own:
            return await own.embed(TEXTS, dimensions=9)

    assert np.array_equal(asyncio.run(in_a_loop()), expected)


# Refusals of a single text: tests/gateway/test_vectors.py and tests/serving/test_embedding_model.py have the tables.
HOSTILE: list[tuple[dict[str, Any], str, str]] = [
    ({"input": ["a", "", "b"]}, "input[1]", "input[1] is empty; give at least one character"),
    (
        {"input": [[5], [9999]]},
        "input[1]",
        "input[1] has token 9999, which is outside the vocabulary; allowed is 0 to 4095",
    ),
    (
        {"input": [5] * 513},
        "input",
        "input has 513 tokens, the limit is 512 (the model's own, or model.max_seq_len); shorten it",
    ),
]


@pytest.mark.parametrize(("fields", "param", "sentence"), HOSTILE)
def test_what_the_model_cannot_embed_is_one_sentence_with_its_parameter(
    fields: dict[str, Any], param: str, sentence: str, served: Served
) -> None:
    status, answer, _ = served.request("POST", "/v1/embeddings", {"model": MODEL, **fields})
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    assert error["message"].startswith(sentence) and error["message"].count("\n") == 0 and len(error["message"]) < 300
    assert error["param"] == param
    assert served.request("POST", "/v1/embeddings", {"model": MODEL, "input": [5] * 512})[0] == 200  # as long as fits


SENTENCE_TRANSFORMERS = """
import json, sys
from sentence_transformers import SentenceTransformer
given = json.loads(sys.argv[1])
model = SentenceTransformer(given["model"], device="cpu", model_kwargs={"dtype": "float32"})
print(json.dumps([model.encode([text], truncate_dim=given["dimensions"], normalize_embeddings=given["normalize"])[0].tolist()
                  for text in given["texts"]]))
"""


@pytest.mark.parametrize("dimensions", [48, 9])
def test_sentence_transformers_gives_the_same(dimensions: int, client: openai.OpenAI, directory: Path) -> None:
    asked = {"model": str(directory), "texts": TEXTS, "dimensions": dimensions, "normalize": True}
    expected = result_of(SENTENCE_TRANSFORMERS, "sentence_transformers", asked)
    found = vectors(client.embeddings.create(model=MODEL, input=TEXTS, dimensions=dimensions))
    np.testing.assert_allclose(found, np.array(expected), atol=1e-5)


def test_an_embedding_checkpoint_ranks_nothing_and_says_so(served: Served) -> None:
    status, body, _ = served.request("POST", "/rerank", {"model": MODEL, "query": "a", "documents": ["b"]})
    assert (status, body["error"]["message"]) == (
        400,
        "this model makes embeddings and ranks no documents; compare its embeddings",
    )


@pytest.fixture(scope="module")
def ranking_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model(tmp_path_factory.mktemp("reranker"), pooling=None)


@pytest.fixture(scope="module")
def reranker(ranking_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("run"), f"model.path={ranking_directory}") as server:
        wait_ready(server)
        with serving(server.grpc_url) as served:
            yield served
        everything_is_answered(server)


def test_scores_are_the_softmax_of_yes_and_no_behind_qwens_prompt(reranker: Served, ranking_directory: Path) -> None:
    oracle, query = Oracle(ranking_directory), "how are lines read?"
    documents = [*TEXTS[:3], {"text": TEXTS[3]}]
    answer = {}
    for route in ("/v1/rerank", "/rerank"):
        asked = {"model": MODEL, "query": query, "documents": documents, "return_documents": True}
        status, answer, _ = reranker.request("POST", route, asked)
        assert status == 200, answer
    words = [oracle.tokenizer.token_to_id(word) for word in ("no", "yes")]
    lengths = []
    for result in answer["results"]:
        text = TEXTS[result["index"]]
        assert result["document"] == {"text": text}
        parts = [part.format(query=query, document=text) for part in QWEN_PROMPT]
        ids = [token for part in parts for token in oracle.tokenizer.encode(part, add_special_tokens=False).ids]
        lengths.append(len(ids))
        expected = torch.softmax(oracle.run(ids)[1][words], 0)[1].item()
        assert result["relevance_score"] == pytest.approx(expected, abs=1e-5)
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4
    assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}


def test_a_decoder_without_the_files_embeds_by_its_last_token(reranker: Served, ranking_directory: Path) -> None:
    with reranker.client() as client:
        found = vectors(client.embeddings.create(model=MODEL, input=TEXTS))
    oracle = Oracle(ranking_directory)
    np.testing.assert_allclose(found, np.stack([oracle.embedding(text) for text in TEXTS]), atol=1e-5)


def test_a_checkpoint_of_the_layers_alone_embeds_and_generates_nothing(
    directory: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tensor names without `model.`, no output head, and the mean of all hidden states."""
    bare = embedding_model(tmp_path_factory.mktemp("bare"), pooling="mean", normalize=False, is_bare=True)
    with serve(tmp_path_factory.mktemp("run"), f"model.path={bare}") as server:
        wait_ready(server)
        with serving(server.grpc_url) as served, served.client() as client:
            found = vectors(client.embeddings.create(model=MODEL, input=TEXTS))
            again = vectors(
                client.embeddings.create(model=MODEL, input=TEXTS)
            )  # no KV is reused where all rows are needed
            with pytest.raises(
                openai.BadRequestError, match="this checkpoint has no output head and generates nothing"
            ):
                client.completions.create(model=MODEL, prompt="a")
        everything_is_answered(server)
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            states = oracle.model(torch.tensor([oracle.ids(text)]), output_hidden_states=True).hidden_states[-1][0]
        np.testing.assert_allclose(vector, states.mean(0).numpy(), atol=1e-5)
    assert np.array_equal(found, again)
