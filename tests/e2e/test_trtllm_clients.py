"""Clients of TensorRT-LLM's own backend as its examples write them, against one server of mixed transaction policies.

`ensemble` and `llmapi` are decoupled with unary twins here; `tensorrt_llm` and `ensemble_uint32` are unary.
"""

from __future__ import annotations

import json
import queue
import re
import shutil
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from backend.api import load_config
from backend.serving.model_config import MODEL_ENTRY, render
from backend.serving.wires.roles import MODELS
from deploy.triton_server import TritonServer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.wire import eventually, post, scrape, still, to_input

PROMPT = "def main("
UNARY = ("tensorrt_llm", "ensemble_uint32")
ROLES = ("tensorrt_llm", "preprocessing", "postprocessing", "ensemble", "ensemble_uint32", "llmapi")
UPSTREAM = """
dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 0 default_queue_policy { max_queue_size: 77 } }
parameters { key: "gpt_model_type" value: { string_value: "inflight_fused_batching" } }
parameters { key: "batch_scheduler_policy" value: { string_value: "${batch_scheduler_policy}" } }
parameters { key: "max_tokens_in_paged_kv_cache" value: { string_value: "4096" } }
parameters { key: "max_attention_window_size" value: { string_value: "" } }
parameters { key: "exclude_input_in_output" value: { string_value: "true" } }
parameters { key: "kv_cache_host_memory_bytes" value: { string_value: "67108864" } }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for role in ROLES:
        (root / role / "1").mkdir(parents=True)
        shutil.copyfile(MODEL_ENTRY, root / role / "1" / "model.py")
        text = render(MODELS[role], decoupled=role not in UNARY, name=role)
        (root / role / "config.pbtxt").write_text(text + (UPSTREAM if role == "tensorrt_llm" else ""))
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[TritonServer]:
    config = load_config(overrides=[*EXACT, "triton.text_threads=1", "triton.decoupled=both"])
    run_dir = tmp_path_factory.mktemp("trtllm")
    with TritonServer(config, run_dir=run_dir, model_repository=repository, exit_timeout_s=5) as server:
        wait_ready(server)
        yield server


@pytest.fixture(scope="module")
def client(server: TritonServer) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        yield client


def infer(client: grpcclient.InferenceServerClient, model: str, **arrays: np.ndarray) -> grpcclient.InferResult:
    return client.infer(model, [to_input(*item) for item in arrays.items()])


def streamed(client: grpcclient.InferenceServerClient, model: str, request_id: str = "", **arrays: Any) -> list[Any]:
    """All responses of one request on a stream, as llama-index and langchain end it: at the final flag."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    results = []
    try:
        client.async_stream_infer(model, [to_input(*item) for item in arrays.items()], request_id=request_id)
        while not results or not results[-1].get_response().parameters["triton_final_response"].bool_param:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise error
            results.append(result)
    finally:
        client.stop_stream()
    return results


def texts(*values: str) -> np.ndarray:
    return np.array([value.encode() for value in values], dtype=object)


def words(*values: str) -> np.ndarray:
    return texts(*values).reshape(1, -1)


def one(value: Any, dtype: type) -> np.ndarray:
    return np.array([[value]], dtype)


def query(text: str = PROMPT, max_tokens: int = 6) -> dict[str, np.ndarray]:
    return {"QUERY": words(text), "REQUEST_OUTPUT_LEN": one(max_tokens, np.int32)}


@pytest.mark.feature("W-01", "W-02")
def test_the_end_to_end_client_goes_through_all_three_models_over_grpc(client: Any) -> None:
    extra = {"BAD_WORDS_DICT": words("")}, {"STOP_WORDS_DICT": words("")}
    ready = infer(client, "preprocessing", **query(), **extra[0], **extra[1])
    assert ready.as_numpy("BAD_WORDS_IDS").tolist() == ready.as_numpy("STOP_WORDS_IDS").tolist() == [[[0], [-1]]]
    assert ready.as_numpy("EMBEDDING_BIAS").shape == (1, 0)
    assert ready.as_numpy("DECODER_INPUT_ID").tolist() == ready.as_numpy("OUT_PAD_ID").tolist()
    generated = infer(
        client,
        "tensorrt_llm",
        input_ids=ready.as_numpy("INPUT_ID"),
        input_lengths=ready.as_numpy("REQUEST_INPUT_LEN"),
        decoder_input_ids=ready.as_numpy("DECODER_INPUT_ID"),
        decoder_input_lengths=ready.as_numpy("REQUEST_DECODER_INPUT_LEN"),
        request_output_len=ready.as_numpy("REQUEST_OUTPUT_LEN"),
        bad_words_list=ready.as_numpy("BAD_WORDS_IDS"),
        stop_words_list=ready.as_numpy("STOP_WORDS_IDS"),
        embedding_bias=ready.as_numpy("EMBEDDING_BIAS"),
        end_id=ready.as_numpy("OUT_END_ID"),
        pad_id=ready.as_numpy("OUT_PAD_ID"),
        beam_width=one(1, np.int32),
        runtime_top_k=one(1, np.int32),
        runtime_top_p=one(0.0, np.float32),
        temperature=one(1.0, np.float32),
        len_penalty=one(1.0, np.float32),
        repetition_penalty=one(1.0, np.float32),
        random_seed=one(0, np.uint64),
        return_log_probs=one(True, np.bool_),
    )
    ids, lengths = generated.as_numpy("output_ids"), generated.as_numpy("sequence_length")
    assert ids.shape == (1, 1, 6) and lengths.tolist() == [[6]], "its config.pbtxt excludes the prompt"
    told = infer(client, "postprocessing", TOKENS_BATCH=ids, SEQUENCE_LENGTH=lengths)
    (text,) = told.as_numpy("OUTPUT")
    whole = streamed(client, "ensemble", text_input=words(PROMPT), max_tokens=one(6, np.int32))
    assert whole[0].as_numpy("text_output").tolist() == [text]


def test_the_chain_goes_over_http_infer(server: TritonServer) -> None:
    def ask(model: str, **tensors: tuple[str, list[int], list[Any]]) -> dict[str, Any]:
        inputs = [
            {"name": name, "datatype": kind, "shape": shape, "data": data}
            for name, (kind, shape, data) in tensors.items()
        ]
        status, text = post(f"{server.http_url}/v2/models/{model}/infer", {"inputs": inputs})
        assert status == 200, text
        return {output["name"]: output for output in json.loads(text)["outputs"]}

    ready = ask("preprocessing", QUERY=("BYTES", [1, 1], [PROMPT]), REQUEST_OUTPUT_LEN=("INT32", [1, 1], [4]))

    def forward(name: str) -> tuple[str, list[int], list[Any]]:
        return "INT32", ready[name]["shape"], ready[name]["data"]

    generated = ask(
        "tensorrt_llm",
        input_ids=forward("INPUT_ID"),
        input_lengths=forward("REQUEST_INPUT_LEN"),
        request_output_len=forward("REQUEST_OUTPUT_LEN"),
    )
    ids, lengths = generated["output_ids"], generated["sequence_length"]
    told = ask(
        "postprocessing",
        TOKENS_BATCH=("INT32", ids["shape"], ids["data"]),
        SEQUENCE_LENGTH=("INT32", lengths["shape"], lengths["data"]),
    )
    assert told["OUTPUT"]["shape"] == [1] and told["OUTPUT"]["data"][0]


def test_a_batch_is_padded_on_the_right_and_its_texts_come_back_in_one_dimension(client: Any) -> None:
    long, short = "def read_lines(self, path):", "a"
    ready = infer(
        client,
        "preprocessing",
        QUERY=texts(long, short).reshape(2, 1),
        REQUEST_OUTPUT_LEN=np.array([[4], [5]], np.int32),
        STOP_WORDS_DICT=texts("\n", "x", "end", "").reshape(2, 2),
        PAD_ID=np.array([[7], [8]], np.int32),
    )
    ids, lengths = ready.as_numpy("INPUT_ID"), ready.as_numpy("REQUEST_INPUT_LEN")
    assert set(ids[1, lengths[1, 0] :].tolist()) == {8} and lengths[0, 0] == ids.shape[1] > lengths[1, 0]
    assert ready.as_numpy("REQUEST_OUTPUT_LEN").tolist() == [[4], [5]]
    assert ready.as_numpy("STOP_WORDS_IDS").shape[:2] == (2, 2)
    told = infer(client, "postprocessing", TOKENS_BATCH=ids[:, None], SEQUENCE_LENGTH=lengths)
    assert told.as_numpy("OUTPUT").tolist() == [long.encode(), short.encode()]


@pytest.mark.feature("W-06")
def test_triton_counts_what_each_of_the_three_models_served(server: TritonServer, client: Any) -> None:
    models = ("preprocessing", "tensorrt_llm", "postprocessing")
    before = [still(partial(successes, server, model)) for model in models]
    for _ in range(3):
        ready = infer(client, "preprocessing", **query(max_tokens=1))
        generated = infer(
            client,
            "tensorrt_llm",
            input_ids=ready.as_numpy("INPUT_ID"),
            input_lengths=ready.as_numpy("REQUEST_INPUT_LEN"),
            request_output_len=ready.as_numpy("REQUEST_OUTPUT_LEN"),
        )
        ids, lengths = generated.as_numpy("output_ids"), generated.as_numpy("sequence_length")
        infer(client, "postprocessing", TOKENS_BATCH=ids, SEQUENCE_LENGTH=lengths)
    assert eventually(lambda: [successes(server, model) - old for model, old in zip(models, before)] == [3, 3, 3], 30)


def successes(server: TritonServer, model: str) -> int:
    """Triton's own count of the requests of a model that it has answered without an error."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        text = response.read().decode()
    counts = re.findall(rf'^nv_inference_request_success{{.*model="{model}".*}} (\d+)$', text, re.MULTILINE)
    return sum(map(int, counts))


@pytest.mark.feature("W-01")
@pytest.mark.parametrize(
    "left_out", ["DECODER_QUERY", "BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS", "END_ID", "PAD_ID"]
)
def test_each_optional_input_of_preprocessing_may_be_left_out(client: Any, left_out: str) -> None:
    optional = {
        "DECODER_QUERY": words("x"),
        "BAD_WORDS_DICT": words("if", "else"),
        "STOP_WORDS_DICT": words("\n"),
        "EMBEDDING_BIAS_WORDS": words("self"),
        "EMBEDDING_BIAS_WEIGHTS": one(2.5, np.float32),
        "END_ID": one(2, np.int32),
        "PAD_ID": one(5, np.int32),
    }
    given = {name: array for name, array in optional.items() if not name.startswith(left_out)}
    ready = infer(client, "preprocessing", **query(), **given)
    assert (ready.as_numpy("EMBEDDING_BIAS").size > 0) == (left_out != "EMBEDDING_BIAS")
    assert (ready.as_numpy("BAD_WORDS_IDS").shape[2] > 0) == (left_out != "BAD_WORDS_DICT")
    assert (ready.as_numpy("OUT_END_ID").item() == 2) == (left_out != "END_ID")
    assert (ready.as_numpy("OUT_PAD_ID").item() == 5) == (left_out != "PAD_ID")
    for name in ("QUERY", "REQUEST_OUTPUT_LEN"):
        with pytest.raises(InferenceServerException, match="expected"):
            infer(client, "preprocessing", **{key: value for key, value in query().items() if key != name})


@pytest.mark.feature("W-04")
@pytest.mark.parametrize(
    ("model", "arrays", "message"),
    [
        ("preprocessing", {**query(), "REQUEST_OUTPUT_LEN": one(3, np.uint32)}, "TYPE_INT32|INT32"),
        ("preprocessing", {**query(), "QUERY": texts(PROMPT)}, "shape"),
        (
            "postprocessing",
            {"TOKENS_BATCH": np.ones((1, 1, 3), np.int32), "SEQUENCE_LENGTH": one(4, np.int32)},
            "SEQUENCE_LENGTH holds 4, allowed is 0 to 3",
        ),
    ],
)
def test_what_is_wrong_is_named(client: Any, model: str, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InferenceServerException, match=message):
        infer(client, model, **arrays)


@pytest.mark.feature("W-02")
@pytest.mark.parametrize("stream", [True, False])
def test_llama_index_reads_the_first_element_as_text(client: Any, stream: bool) -> None:
    results = streamed(
        client,
        "ensemble",
        text_input=words(PROMPT),
        max_tokens=one(8, np.int32),
        bad_words=words(""),
        stop_words=words("</s>"),
        top_k=one(1, np.int32),
        top_p=one(0.0, np.float32),
        temperature=one(1.0, np.float32),
        length_penalty=one(1.0, np.float32),
        repetition_penalty=one(1.0, np.float32),
        random_seed=one(0, np.uint64),
        beam_width=one(1, np.int32),
        stream=one(stream, np.bool_),
    )
    text = "".join(result.as_numpy("text_output")[0].decode() for result in results)
    assert text and (len(results) > 1) == stream and not text.startswith(PROMPT)


def test_langchains_unsigned_integers_are_what_ensemble_uint32_takes(client: Any) -> None:
    arrays = {
        "text_input": words(PROMPT),
        "max_tokens": one(6, np.uint32),
        "beam_width": one(1, np.uint32),
        "top_k": one(1, np.uint32),
        "top_p": one(0.0, np.float32),
        "end_id": one(2, np.uint32),
        "pad_id": one(2, np.uint32),
    }
    plain = streamed(client, "ensemble", text_input=words(PROMPT), max_tokens=one(6, np.int32), end_id=one(2, np.int32))
    told = infer(client, "ensemble_uint32", **arrays).as_numpy("text_output")
    assert told.tolist() == plain[0].as_numpy("text_output").tolist()
    with pytest.raises(InferenceServerException, match="UINT32"):
        infer(client, "ensemble_uint32", **{**arrays, "max_tokens": one(6, np.int32)})


@pytest.mark.feature("W-03")
def test_the_owners_parameters_reach_the_engine_and_all_models(server: TritonServer) -> None:
    num_blocks = 4096 / server.config.kv_cache.block_size
    assert eventually(lambda: scrape(server.metrics_url).get("everbatch_kv_blocks{state=max}") == num_blocks, 30)
    log = server.log_path.read_text()
    assert "kv_cache.max_tokens is 4096, from max_tokens_in_paged_kv_cache of config.pbtxt" in log
    assert "limits.max_queue_size is 77" in log and "kv_cache.host_cache_bytes is 67108864, from kv_cache_host_" in log
    assert eventually(lambda: scrape(server.metrics_url).get("everbatch_second_level_blocks{state=max}", 0) > 0, 30)
    assert "batch_scheduler_policy of" not in log, "what a template leaves behind is unset"


@pytest.mark.feature("W-10")
@pytest.mark.parametrize("stream", [True, False])
def test_the_llmapi_form_answers_with_what_its_flags_ask_for(client: Any, stream: bool) -> None:
    flags = ("return_finish_reason", "return_stop_reason", "return_cumulative_logprob")
    results = streamed(
        client,
        "llmapi",
        text_input=texts(PROMPT),
        streaming=np.array([stream]),
        sampling_param_max_tokens=np.array([6], np.int32),
        sampling_param_return_perf_metrics=np.array([True]),
        **{flag: np.array([True]) for flag in flags},
    )
    reasons = [result.as_numpy("finish_reason").tolist() for result in results]
    assert reasons[-1] == [b"length"] and set(map(tuple, reasons[:-1])) <= {(b"None",)}
    assert (len(results) > 1) == stream
    last = results[-1]
    assert last.as_numpy("stop_reason").tolist() == [b"None"] and last.as_numpy("cumulative_logprob").shape == (1,)
    assert last.as_numpy("kv_cache_hit_rate").dtype == np.float32 and last.as_numpy("arrival_time_ns").item() > 0
    # the same model for clients without streams
    plain = infer(client, "llmapi_unary", text_input=texts(PROMPT), sampling_param_max_tokens=np.array([6], np.int32))
    assert (
        "".join(result.as_numpy("text_output")[0].decode() for result in results)
        == plain.as_numpy("text_output")[0].decode()
    )
    assert plain.as_numpy("finish_reason") is None


@pytest.mark.feature("W-10", "W-05")
def test_the_llmapi_form_answers_a_stop_request_with_cancelled(client: Any, server: TritonServer) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    running = grpcclient.InferenceServerClient(server.grpc_url)
    running.start_stream(lambda result, error: answers.put((result, error)))
    arrays = {
        "text_input": texts(PROMPT),
        "streaming": np.array([True]),
        "sampling_param_max_tokens": np.array([1500], np.int32),
        "sampling_param_frequency_penalty": np.array([-2.0], np.float32),  # what was said is said again: it never ends
        "return_finish_reason": np.array([True]),
    }
    inputs = [to_input(*item) for item in arrays.items()]
    running.async_stream_infer("llmapi", inputs, request_id="to-be-stopped")
    assert answers.get(timeout=60)[1] is None
    with pytest.raises(InferenceServerException) as caught:
        streamed(client, "llmapi", "to-be-stopped", text_input=texts(""), stop=np.array([True]))
    assert caught.value.message().endswith("Request cancelled by client")
    assert "Error generating" not in caught.value.message()
    finish = [b"None"]
    while finish == [b"None"]:
        result, error = answers.get(timeout=60)
        assert error is None
        finish = result.as_numpy("finish_reason").tolist()
    assert finish == [b"cancelled"]
    running.stop_stream()
    running.close()


@pytest.mark.feature("W-10", "W-04")
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"text_input": texts("")}, "Error generating request: text_input is empty"),
        ({"text_input": texts("a", "b")}, "text_input holds 2 entries"),
        (
            {"text_input": texts("a"), "image_url": texts("x")},
            "Error generating request: image_url has 'x', and nothing is fetched",
        ),
        ({"text_input": texts("a"), "lora_name": texts("x")}, "with --lora x=DIRECTORY"),
        ({"text_input": texts("a"), "sampling_param_best_of": np.array([2], np.int32)}, "decoding is greedy"),
        ({"text_input": texts("a"), "sampling_param_max_tokens": np.array([0], np.int32)}, "at least 1 is needed"),
    ],
)
def test_the_llmapi_form_says_what_is_wrong(client: Any, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InferenceServerException, match=message):
        streamed(client, "llmapi", **arrays)
