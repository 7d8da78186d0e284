"""LoRA adapters on a real server: as tensors, by id, by the names of vLLM's and OpenAI's clients. PEFT is the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import tritonclient.grpc as grpcclient
from safetensors.torch import load_file, save_file
from tritonclient.utils import InferenceServerException

from backend.api import load_config
from backend.api.config.schema import EngineConfig
from backend.text.tokenizer import Tokenizer
from client import ClientError, EverbatchClient
from deploy import ROOT
from deploy.serve import with_adapters
from deploy.triton_server import TritonServer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.vllm_client import ask, request, text_of
from tests.e2e.wire import Stream, TokenClient, to_input
from tests.gateway.conftest import Served, serving
from tests.model.adapters import PeftOracle, as_rows, make_adapter
from tests.text.random_sequences import text_in_characters

MODEL = ROOT / "models" / "default"
PROMPT, NUM_TOKENS = "def main(", 24
NAMES = ("doll", "sheep")
IDS = {"doll": 1001, "sheep": 1002}
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


class Adapters(NamedTuple):
    directories: dict[str, Path]
    tokens: dict[str | None, list[int]]  # what PEFT generates with each, and without (None)
    texts: dict[str | None, str]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Two adapters whose weights are exact in float16, which the tensors of the wire have."""
    root = tmp_path_factory.mktemp("adapters")
    directories = {name: make_adapter(MODEL, root / name, seed, size=0.25) for seed, name in enumerate(NAMES, 1)}
    for directory in directories.values():
        path = directory / "adapter_model.safetensors"
        save_file({name: tensor.half().float() for name, tensor in load_file(path).items()}, path)
    tokenizer = Tokenizer.from_directory(MODEL)
    prompt = tokenizer.encode(PROMPT)
    named: dict[str | None, Path | None] = {None: None, **directories}
    tokens = {name: PeftOracle(MODEL, path).greedy(prompt, NUM_TOKENS) for name, path in named.items()}
    assert len({tuple(ids) for ids in tokens.values()}) == 3, "no adapter does the same as another one, or none"
    return Adapters(
        directories, tokens, {name: text_in_characters(tokenizer, [], ids, True) for name, ids in tokens.items()}
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, adapters: Adapters) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name in ("tensorrt_llm", "ensemble", "everbatch"):
        (repository / name).symlink_to(ROOT / "model_repository" / name)
    (repository / "vllm_model").symlink_to(ROOT / "deploy" / "profiles" / "vllm" / "vllm_model")
    allowed = adapters.directories["doll"].parent
    config: EngineConfig = load_config(overrides=[*EXACT, "lora.enabled=true", f"lora.allowed_dir={allowed}"])
    config = with_adapters(config, tuple(f"{name}={path}" for name, path in adapters.directories.items()))
    run_dir = tmp_path_factory.mktemp("lora")
    with TritonServer(config, run_dir=run_dir, model_repository=repository, exit_timeout_s=5) as server:
        wait_ready(server)
        yield server


def start(client: TokenClient, name: str | None, directory: Path | None = None) -> Stream:
    """A request of the tensors' model; with `directory` it brings the adapter's weights, else only its id."""
    prompt = Tokenizer.from_directory(MODEL).encode(PROMPT)
    arrays: dict[str, np.ndarray] = {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": np.array([[len(prompt)]], np.int32),
        "request_output_len": np.array([[NUM_TOKENS]], np.int32),
        "exclude_input_in_output": np.array([[True]]),
        "end_id": np.array([[-1]], np.int32),
    }
    if name is not None:
        arrays["lora_task_id"] = np.array([[IDS[name]]], np.uint64)
    if name is not None and directory is not None:
        rows = as_rows(directory, IDS[name])
        assert rows.weights is not None
        weights = np.frombuffer(rows.weights.data, np.float32).reshape(rows.weights.shape)
        arrays["lora_weights"] = weights.astype(np.float16)[None]
        arrays["lora_config"] = np.array([rows.config], np.int32)
    return client.send(arrays)


@pytest.mark.feature("000-19", "001-48")
def test_tensors_of_two_adapters_and_none_run_side_by_side_and_later_by_id(
    server: TritonServer, adapters: Adapters
) -> None:
    """The tokens are PEFT's, which computes each request alone; so they are when nine run at once."""
    with TokenClient(server.grpc_url) as client:
        for name in (*NAMES, None):  # each alone, the first use
            directory = adapters.directories.get(name or "")
            assert start(client, name, directory).token_ids() == adapters.tokens[name]
        mixed = [*NAMES, None] * 3
        streams = [start(client, name) for name in mixed]
        assert [stream.token_ids() for stream in streams] == [adapters.tokens[name] for name in mixed]


@pytest.mark.feature("001-48")
def test_an_id_that_was_never_sent_is_named_in_the_error(server: TritonServer) -> None:
    with TokenClient(server.grpc_url) as client:
        arrays = {"input_ids": [[5]], "input_lengths": [[1]], "request_output_len": [[1]]}
        tensors = {name: np.array(value, np.int32) for name, value in arrays.items()}
        stream = client.send(tensors | {"lora_task_id": np.array([[77]], np.uint64)})
        message = client.error_of(stream)
    assert "LoRA task 77 not found in cache. Please send LoRA weights with request" in message


def test_the_text_model_takes_the_id_that_the_tensors_have_made_known(server: TritonServer, adapters: Adapters) -> None:
    """All models are clients of one engine: what one has sent, the others may name."""

    def generate(task_id: int) -> str:
        arrays = {
            "text_input": np.array([[PROMPT.encode()]], np.object_),
            "max_tokens": np.array([[NUM_TOKENS]], np.int32),
            "end_id": np.array([[-1]], np.int32),
            "exclude_input_in_output": np.array([[True]]),
            "lora_task_id": np.array([[task_id]], np.uint64),
        }
        stream = Stream(grpcclient.InferenceServerClient(server.grpc_url))
        stream.client.start_stream(lambda result, error: stream.responses.put((result, error)))
        stream.client.async_stream_infer("ensemble", [to_input(*item) for item in arrays.items()])
        try:
            return b"".join(part for result in stream for part in result.as_numpy("text_output").reshape(-1)).decode()
        finally:
            stream.close()

    with TokenClient(server.grpc_url) as client:
        for name in NAMES:
            start(client, name, adapters.directories[name]).token_ids()
    assert [generate(IDS[name]) for name in NAMES] == [adapters.texts[name] for name in NAMES]
    assert generate(0) == adapters.texts[None]


@pytest.mark.feature("W-07")
def test_vllms_clients_name_adapters(server: TritonServer, adapters: Adapters) -> None:
    mixed = [*NAMES, None] * 2
    named = [GREEDY | ({} if name is None else {"lora_name": name}) for name in mixed]
    got = ask(server, *(request("vllm_model", each, prompt=PROMPT, exclude_input_in_output=True) for each in named))
    assert [text_of(responses) for responses in got] == [adapters.texts[name] for name in mixed]
    ((error,),) = ask(server, request("vllm_model", GREEDY | {"lora_name": "cow"}))
    assert isinstance(error, InferenceServerException)
    assert error.message() == "LoRA cow is not supported, we currently support ['doll', 'sheep']"


@pytest.mark.parametrize("protocol", ["grpc_url", "http_url"])
def test_our_own_client_names_adapters(server: TritonServer, adapters: Adapters, protocol: str) -> None:
    with EverbatchClient(getattr(server, protocol)) as client:
        options: Any = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "end_id": -1}
        for name in (*NAMES, None):
            assert client.generate(PROMPT, lora_name=name, **options).text == adapters.texts[name]
        with pytest.raises(ClientError, match="lora_name is 'cow', there are"):
            client.generate(PROMPT, lora_name="cow", **options)
        talk = client.conversation(lora_name="doll", max_tokens=4)
        for _ in range(2):
            assert list(talk.say("hello"))[-1].final
        talk.end()


@pytest.fixture(scope="module")
def served(server: TritonServer) -> Iterator[Served]:
    with serving(server.grpc_url, adapters=NAMES) as served:
        yield served


@pytest.mark.feature("W-11")
def test_openais_clients_name_adapters_as_models(served: Served, adapters: Adapters) -> None:
    with served.client() as client:
        assert [card.id for card in client.models.list()] == ["everbatch", *NAMES]
        values: Any = {"prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
        for name in (*NAMES, None, *NAMES):
            reply = client.completions.create(model=name or "everbatch", **values)
            assert reply.choices[0].text == adapters.texts[name]
        with pytest.raises(openai.NotFoundError, match="there is no model 'cow'"):
            client.completions.create(model="cow", **values)


def test_vllms_routes_load_and_unload_adapters_and_pass_refusals_on(served: Served, adapters: Adapters) -> None:
    def post(route: str, **body: str) -> tuple[int, str]:
        status, answer, _ = served.request("POST", f"/v1/{route}_lora_adapter", body)
        return status, answer if isinstance(answer, str) else answer["error"]["message"]

    for directory in (str(MODEL), "../outside", "missing"):
        status, text = post("load", lora_name="lamb", lora_path=directory)
        assert status == 400 and "is not one of those that LoRA adapters may be loaded from" in text
    status, text = post("unload", lora_name="lamb")
    assert status == 404 and "there is no LoRA adapter lamb to unload" in text
    assert post("load", lora_name="lamb", lora_path="doll")[0] == 200
    values: Any = {"prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
    with served.client() as client:
        assert client.completions.create(model="lamb", **values).choices[0].text == adapters.texts["doll"]
        assert post("unload", lora_name="lamb")[0] == 200
        with pytest.raises(openai.NotFoundError, match="there is no model 'lamb'"):
            client.completions.create(model="lamb", **values)


def test_a_gateway_whose_server_does_not_know_the_adapter_passes_its_words_on(server: TritonServer) -> None:
    with serving(server.grpc_url, adapters=("cow",)) as served, served.client() as client:
        with pytest.raises(openai.BadRequestError, match=r"lora_name is 'cow', there are doll, sheep;") as caught:
            client.completions.create(model="cow", prompt=PROMPT)
    assert caught.value.param == "model", "which is how this client names an adapter"


def test_names_come_and_go_while_the_server_runs(server: TritonServer, adapters: Adapters) -> None:
    def tell(body: dict[str, Any]) -> str:
        """The text that model `everbatch` answers, or its error."""
        stream = Stream(grpcclient.InferenceServerClient(server.grpc_url))
        stream.client.start_stream(lambda result, error: stream.responses.put((result, error)))
        tensor = np.array([json.dumps(body).encode()], np.object_)
        stream.client.async_stream_infer("everbatch", [to_input("request", tensor)])
        try:
            answers = [each.as_numpy("response") for each in stream]
            return "".join(json.loads(part)["text"] for each in answers if each is not None for part in each)
        except InferenceServerException as error:
            return str(error)
        finally:
            stream.close()

    lamb = GREEDY | {"prompt": PROMPT, "lora_name": "lamb"}
    assert "lora_name is 'lamb', there are doll, sheep" in tell(lamb)
    assert "is not one of those that" in tell({"load_adapter": {"name": "lamb", "directory": str(MODEL)}})
    assert tell({"load_adapter": {"name": "lamb", "directory": "doll"}}) == ""
    assert json.loads(tell({"list_adapters": True})) == ["doll", "sheep", "lamb"]
    assert tell(lamb) == adapters.texts["doll"]
    assert tell({"unload_adapter": "lamb"}) == ""
    assert "lora_name is 'lamb', there are doll, sheep" in tell(lamb)
