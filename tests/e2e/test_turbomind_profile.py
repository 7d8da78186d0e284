"""Profile `turbomind`, with a client that works as LMDeploy's chatbot and its profile_serving.py do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from deploy.triton_server import TritonServer
from tests.e2e.chatbot import Chatbot, Piece
from tests.e2e.wire import TokenClient, events, eventually, post, reaches, scrape, settled, to_input

PROMPTS = ("def read(path):\n", "\n\ndef write(path, text):\n", "\n\nclass File:\n")
pytestmark = pytest.mark.feature("W-09")


@pytest.fixture(scope="module")
def server(lmdeploy_server: TritonServer) -> TritonServer:
    return lmdeploy_server


@pytest.fixture
def bot(server: TritonServer) -> Chatbot:
    return Chatbot(server.grpc_url, 41)


def stateless(server: TritonServer, history: list[int], max_tokens: int) -> list[int]:
    with TokenClient(server.grpc_url) as client:
        return client.generate(history, max_tokens)


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def error_of(pieces: Iterator[object]) -> str:
    with pytest.raises(InferenceServerException) as caught:
        list(pieces)
    return str(caught.value.message())


@pytest.mark.feature("004-29")
def test_a_conversation_of_three_turns(server: TritonServer, bot: Chatbot) -> None:
    assert bot.model_name == "qwen-7b"
    for turn, prompt in enumerate(PROMPTS):
        before = bot.history + bot.preprocess(prompt)[0].tolist()
        pieces = bot.say(prompt, 12, start=turn == 0)
        assert pieces[-1].ids == stateless(server, before, 12), "what a stateless request with the whole history gets"
        assert text_of(pieces) == bot.postprocess(np.array([[pieces[-1].ids]], np.uint32), 0)
        assert [piece.is_final for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert bot.sequence_length == len(bot.history) == len(before) + 12
    bot.end()
    assert "TurboMind execute failure: 1" in error_of(bot.stream("x", 4))


def test_a_stop_word_ends_the_output_and_is_its_last_token(server: TritonServer, bot: Chatbot) -> None:
    free = bot.say(PROMPTS[0], 12, start=True, end=True)[-1].ids
    stopped = Chatbot(server.grpc_url, 42, stop_ids=[free[6], 4095]).say(PROMPTS[0], 12, start=True, end=True)
    assert stopped[-1].ids == free[: free.index(free[6]) + 1]


def test_stop_interrupts_a_turn_and_the_session_goes_on(server: TritonServer, bot: Chatbot) -> None:
    running = bot.stream(PROMPTS[0], 900, start=True)
    first = next(running)
    assert len(first.ids) < 900
    bot.stop()
    rest = list(running)
    assert rest[-1].is_final and len(first.ids) <= len(rest[-1].ids) < 900
    expected = stateless(server, [*bot.history, *bot.preprocess(PROMPTS[1])[0].tolist()], 8)
    assert bot.say(PROMPTS[1], 8)[-1].ids == expected
    with pytest.raises(InferenceServerException, match="TurboMind execute failure: 4"):
        bot.stop()
    bot.end()


def test_a_session_resumes_from_its_history(server: TritonServer, bot: Chatbot) -> None:
    bot.say(PROMPTS[0], 12, start=True)
    bot.end()
    bot.history = bot.history[:-1]  # the end of a session sends one token of its own
    history = list(bot.history)
    bot.resume()
    assert bot.sequence_length == len(history)
    expected = stateless(server, [*history, *bot.preprocess(PROMPTS[1])[0].tolist()], 12)
    assert bot.say(PROMPTS[1], 12)[-1].ids == expected
    bot.end()


@pytest.mark.feature("004-14", "004-15")
def test_a_session_that_was_evicted_between_turns_answers_as_an_unbroken_one(server: TritonServer) -> None:
    others = [Chatbot(server.grpc_url, 900 + number) for number in range(4)]

    def fill_the_pool() -> None:
        for number, other in enumerate(others):
            prompt = np.array([[20 + number] * 255], np.uint32)
            list(other.infer(prompt, 0, START=True, END=False, step=0))

    def talk(session: int, is_broken: bool) -> list[list[int]]:
        bot = Chatbot(server.grpc_url, session)
        replies = []
        for turn, prompt in enumerate(PROMPTS):
            replies.append(bot.say(prompt, 16, start=turn == 0)[-1].ids)
            if is_broken:
                fill_the_pool()
        bot.end()
        return replies

    unbroken = talk(51, is_broken=False)
    recomputed = lambda: scrape(server.metrics_url)["everbatch_tokens_total{kind=recomputed}"]
    before = settled(server.metrics_url)["everbatch_tokens_total{kind=recomputed}"]
    assert talk(52, is_broken=True) == unbroken
    assert eventually(lambda: recomputed() > before, 30)
    for other in others:
        other.stop(end=True)


@pytest.mark.feature("004-32")
def test_a_seed_is_sent_once_and_the_session_goes_on_with_it(server: TritonServer) -> None:
    def sampled(session: int, seed: int) -> list[list[int]]:
        bot = Chatbot(server.grpc_url, session, runtime_top_k=40, runtime_top_p=0.9)
        ids = bot.preprocess(PROMPTS[0])
        (*_, last) = bot.infer(ids, 8, START=True, END=False, step=0, random_seed=seed)
        first = last.as_numpy("output_ids").reshape(-1)[ids.shape[-1] :].tolist()
        bot.sequence_length = int(last.as_numpy("sequence_length").item())
        replies = [first, bot.say(PROMPTS[1], 8)[-1].ids]
        bot.end()
        return replies

    assert sampled(61, 5) == sampled(62, 5) != sampled(63, 6)


def test_requests_that_begin_and_end_their_session_leave_nothing(server: TritonServer) -> None:
    """As profile_serving.py: each thread sends one prompt after the other under a session id of its own."""

    def loop(session: int) -> list[int]:
        bot = Chatbot(server.grpc_url, session)
        return [len(bot.say(prompt, 10, start=True, end=True)[-1].ids) for prompt in PROMPTS]

    name = "everbatch_requests_accepted_total"
    before = settled(server.metrics_url)[name]
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(loop, range(71, 75)))
    assert counts == [[10] * len(PROMPTS)] * 4
    assert reaches(server.metrics_url, name, before + 4 * len(PROMPTS))
    assert eventually(lambda: scrape(server.metrics_url)["everbatch_sessions"] == 0, 30)


def test_a_request_with_required_inputs_alone_is_a_session_of_its_own(server: TritonServer) -> None:
    inputs = {
        "input_ids": np.array([[10, 11, 12]], np.uint32),
        "input_lengths": np.array([[3]], np.uint32),
        "request_output_len": np.array([[5]], np.uint32),
    }
    with TokenClient(server.grpc_url, "turbomind") as client:
        streams = [client.send(inputs) for _ in range(4)]
        answers = [list(stream)[-1].as_numpy("output_ids").reshape(-1).tolist() for stream in streams]
    assert answers == [[10, 11, 12, *stateless(server, [10, 11, 12], 5)]] * 4


@pytest.mark.feature("004-30", "004-31")
def test_errors_are_numbered_and_session_len_cuts(server: TritonServer, bot: Chatbot) -> None:
    def refused(**inputs: int) -> str:
        return error_of(bot.infer(np.array([[10, 11]], np.uint32), 4, **{"START": 1, "END": 1, "step": 0, **inputs}))

    assert "TurboMind execute failure: 1" in refused(STOP=1)
    assert "beam_width asks for beam search" in refused(beam_width=2)
    assert "TurboMind execute failure: 6" in refused(session_len=3)
    (*_, last) = bot.infer(np.array([[10, 11]], np.uint32), 50, START=1, END=1, step=0, session_len=10)
    assert last.as_numpy("sequence_length").item() == 9
    full = Chatbot(server.grpc_url, 43, session_len=16)
    full.say(PROMPTS[0], 50, start=True)
    assert full.sequence_length == 15
    assert "TurboMind execute failure: 6" in error_of(full.stream("x", 4))
    full.end()
    assert "TurboMind execute failure: 1" in error_of(full.stream("x", 4))
    running = bot.stream(PROMPTS[0], 900, start=True)
    next(running)
    assert "TurboMind execute failure: 3" in refused()
    bot.stop(end=True)
    list(running)
    assert "TurboMind execute failure: 1" in refused(START=0)


def test_a_step_beyond_the_session_goes_on_at_its_end_with_a_warning(server: TritonServer, bot: Chatbot) -> None:
    bot.say(PROMPTS[0], 4, start=True)
    length = bot.sequence_length
    ids = bot.preprocess(PROMPTS[1])
    (*_, last) = bot.infer(ids, 4, START=0, END=1, step=length + 100)
    assert last.as_numpy("sequence_length").item() == length + ids.shape[-1] + 4
    warning = f"session 41: step is {length + 100}, the session has {length} tokens"
    assert eventually(lambda: warning in server.log_path.read_text(errors="replace"), 30)


@pytest.mark.parametrize("empty_final", [False, True])
def test_the_end_rides_on_the_last_data(server: TritonServer, empty_final: bool) -> None:
    got: list[grpcclient.InferResult] = []
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: got.append(result))
        values = {"input_ids": [[10, 11]], "input_lengths": [[2]], "request_output_len": [[4]]}
        tensors = [to_input(name, np.array(value, np.uint32)) for name, value in values.items()]
        client.async_stream_infer("turbomind", tensors, enable_empty_final_response=empty_final)
    assert got[-1].as_numpy("sequence_length").item() == 6
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result in got]
    assert finals == [False] * (len(got) - 1) + [True]


def test_the_models_over_http_and_with_wrong_types(server: TritonServer, bot: Chatbot) -> None:
    status, text = post(f"{server.http_url}/v2/models/preprocessing/generate", {"QUERY": "def main("})
    ids = bot.preprocess("def main(")[0].tolist()
    assert status == 200 and str(ids).replace(" ", "") in text
    body = {"input_ids": [10, 11, 12], "input_lengths": 3, "request_output_len": 5}
    status, text = post(f"{server.http_url}/v2/models/turbomind/generate_stream", body)
    assert status == 200 and events(text)[-1]["output_ids"] == [10, 11, 12, *stateless(server, [10, 11, 12], 5)]
    with pytest.raises(InferenceServerException, match="unexpected datatype|data-type"):
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            client.infer("preprocessing", [to_input("QUERY", np.array([[1]], np.int32))])
