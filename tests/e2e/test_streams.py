"""Streaming, concurrency and the HTTP forms of the text models, over a real tritonserver."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from client.client import EverbatchClient
from deploy.triton_server import TritonServer
from tests.e2e.wire import TYPES, Stream, TokenClient, events, ids_of, post, reaches, settled, to_input

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")


@pytest.mark.feature("000-59", "001-65", "004-25")
def test_tokens_stream_one_by_one_and_the_final_flag_rides_on_the_last_data(tokens: TokenClient) -> None:
    prompt = [10, 20, 30]
    results = list(tokens.start(prompt, 12, streaming=True))
    streamed = [token for result in results for token in ids_of(result)]
    assert len(streamed) == 12
    assert all(ids_of(result) for result in results), "no response is without data"
    assert streamed == tokens.generate(prompt, 12)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_most_likely_tokens_of_each_position_can_be_asked_for(tokens: TokenClient, streaming: bool) -> None:
    stream = tokens.start(
        [10, 20, 30], 6, streaming=streaming, top_log_probs=4, return_log_probs=True, exclude_input_in_output=True
    )
    results = list(stream)
    ids = [token for result in results for token in ids_of(result)]
    top_ids = np.concatenate([result.as_numpy("top_log_probs_ids") for result in results], axis=1)
    top = np.concatenate([result.as_numpy("top_log_probs") for result in results], axis=1)
    chosen = results[-1].as_numpy("output_log_probs")  # of all tokens so far
    assert [result.as_numpy("output_log_probs").shape[2] for result in results] == (
        [1, 2, 3, 4, 5, 6] if streaming else [6]
    )
    assert top_ids.shape == top.shape == (1, 6, 4) and (top_ids.dtype, top.dtype) == (np.int32, np.float32)
    assert top_ids[0, :, 0].tolist() == ids, "greedy takes the most likely"
    assert top[0, :, 0].tolist() == chosen[0, 0].tolist()
    assert (np.diff(top[0], axis=1) <= 0).all() and (np.exp(top[0]).sum(axis=1) < 1 + 1e-5).all()


def test_top_log_probs_need_no_other_log_probs_and_come_over_http_too(server: TritonServer) -> None:
    url = f"{server.http_url}/v2/models/ensemble/generate"
    status, text = post(url, {"text_input": "def main(", "max_tokens": 5, "top_log_probs": 3})
    (answer,) = events("data: " + text)
    assert status == 200 and len(answer["top_log_probs"]) == len(answer["top_log_probs_ids"]) == 5 * 3
    assert "output_log_probs" not in answer


def test_without_streaming_there_is_one_response_and_the_prompt_comes_first(tokens: TokenClient) -> None:
    (result,) = list(tokens.start([10, 20, 30], 5))
    assert ids_of(result)[:3] == [10, 20, 30]
    assert len(ids_of(result)) == 8


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_generate_stream_sends_text_in_pieces_that_add_up(server: TritonServer, model: str) -> None:
    url = f"{server.http_url}/v2/models/{model}/generate"
    body = {"text_input": "def main(", "max_tokens": 24}
    status, text = post(url + "_stream", {**body, "stream": True})
    pieces = [event["text_output"] for event in events(text)]
    assert status == 200 and len(pieces) > 5
    status, whole = post(url, {**body, "exclude_input_in_output": True})
    assert status == 200
    assert "".join(pieces) == events("data: " + whole)[0]["text_output"]


def test_64_concurrent_streams_all_get_their_own_tokens(server: TritonServer, tokens: TokenClient) -> None:
    prompts = [[5 + i, 7 + i, 11 + 2 * i] for i in range(64)]
    alone = [tokens.generate(prompt, 16) for prompt in prompts[:8]]
    streams = [tokens.start(prompt, 16, streaming=True) for prompt in prompts]
    together = [stream.token_ids() for stream in streams]
    assert together[:8] == alone
    assert all(len(ids) == 16 for ids in together)
    assert len({tuple(ids) for ids in together}) > 32, "different prompts get different answers"


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(tokens: TokenClient) -> None:
    def ask() -> Stream:
        return tokens.start([10, 20, 30], 20, streaming=True, temperature=1.5, runtime_top_k=50, seed=2**63 + 11)

    alone = ask().token_ids()
    crowd = [tokens.start([i + 4], 20, streaming=True, temperature=1.0, runtime_top_p=1.0, seed=i) for i in range(12)]
    assert ask().token_ids() == alone
    assert all(len(stream.token_ids()) == 20 for stream in crowd)
    assert tokens.generate([10, 20, 30], 20, temperature=1.5, runtime_top_k=50, seed=12) != alone


@pytest.mark.feature("W-01", "W-02")
def test_a_temperature_alone_decodes_greedily_in_every_model_of_tensorrt_llm(
    server: TritonServer, tokens: TokenClient
) -> None:
    hot = {"temperature": 5.0, "seed": 3}
    greedy = tokens.generate([10, 20, 30], 20)
    assert (
        tokens.generate([10, 20, 30], 20, **hot)
        == greedy
        != tokens.generate([10, 20, 30], 20, **hot, runtime_top_p=1.0)
    )
    for model in TEXT_MODELS:

        def text(model: str = model, **sampling: float) -> str:
            body = {"text_input": "def main(", "max_tokens": 20, **sampling}
            status, answer = post(f"{server.http_url}/v2/models/{model}/generate", body)
            assert status == 200
            return str(json.loads(answer)["text_output"])

        assert text(**hot) == text() != text(**hot, top_p=1.0)


def test_a_stop_string_across_token_borders_ends_the_text_and_frees_the_request(server: TritonServer) -> None:
    with EverbatchClient(server.grpc_url) as client:
        text = client.generate("def main(", max_tokens=60).text
        stop = text[9:14]  # anywhere: it need not begin or end with a token
        first = text.index(stop)
        chunks = list(client.stream("def main(", max_tokens=60, stop_words=[stop]))
        assert "".join(chunk.text for chunk in chunks) == text[: first + len(stop)]
        assert chunks[-1].finish_reason == "stop"


def test_a_batch_of_rows_becomes_independent_requests(server: TritonServer) -> None:
    with TokenClient(server.grpc_url) as client:
        rows = np.array([[10, 20, 30, 0], [40, 50, 60, 70]], dtype=np.int32)
        column = lambda *values, dtype=np.int32: np.array(values, dtype=dtype).reshape(-1, 1)
        stream = client.send(
            {
                "input_ids": rows,
                "input_lengths": column(3, 4),
                "request_output_len": column(6, 9),
                "streaming": column(True, True, dtype=bool),
            }
        )
        by_row: dict[int, list[int]] = {0: [], 1: []}
        for result in stream:
            by_row[int(result.as_numpy("batch_index").reshape(-1)[0])] += ids_of(result)
        assert by_row == {0: client.generate([10, 20, 30], 6), 1: client.generate([40, 50, 60, 70], 9)}


def test_the_metrics_count_what_the_clients_saw(server: TritonServer, tokens: TokenClient) -> None:
    name = "everbatch_tokens_total{kind=generated}"
    before = settled(server.metrics_url)[name]
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda i: len(tokens.generate([i + 1, i + 2], 5 + i)), range(8)))
    assert sum(counts) == sum(range(5, 13))
    assert reaches(server.metrics_url, name, before + sum(counts))
    assert settled(server.metrics_url)[name] == before + sum(counts)


def test_one_grpc_stream_may_carry_many_requests(server: TritonServer) -> None:
    client = grpcclient.InferenceServerClient(server.grpc_url)
    done, finals = threading.Event(), []

    def on_response(result: grpcclient.InferResult | None, error: Exception | None) -> None:
        assert error is None
        response = result.get_response()
        if response.parameters["triton_final_response"].bool_param:
            finals.append(response.id)
            if len(finals) == 8:
                done.set()

    client.start_stream(on_response)
    for i in range(8):
        values = {"input_ids": [i + 1, 9], "input_lengths": 2, "request_output_len": 4 + i, "streaming": True}
        tensors = [to_input(k, np.array(v, dtype=TYPES[k]).reshape(1, -1)) for k, v in values.items()]
        client.async_stream_infer("tensorrt_llm", tensors, request_id=f"r{i}")
    assert done.wait(60)
    assert sorted(finals) == [f"r{i}" for i in range(8)]
    client.stop_stream()
    client.close()
