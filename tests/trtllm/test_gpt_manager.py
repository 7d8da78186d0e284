"""GptManager of TensorRT-LLM's bindings over a tiny checkpoint: named tensors in, callbacks out."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.engine.groups import stream_seed
from compat.trtllm import bindings
from tests.trtllm.helpers import ENGINE

names = bindings.tensor_names
FUSED = bindings.TrtGptModelType.InflightFusedBatching
TERMINATE = 10_000


def request(request_id: int, prompt: list[int], max_tokens: int, **tensors: Any) -> bindings.InferenceRequest:
    made = bindings.InferenceRequest(request_id)
    made.input_ids = torch.tensor([prompt], dtype=torch.int32)
    made.request_output_len = torch.tensor([[max_tokens]], dtype=torch.int32)
    for name, value in tensors.items():
        setattr(made, name, torch.tensor(value) if name != "is_streaming" else value)
    return made


def parameters(**options: Any) -> bindings.TrtGptModelOptionalParams:
    made = bindings.TrtGptModelOptionalParams(bindings.KvCacheConfig(2048), **options)
    made.engine_config = ENGINE
    return made


class Client:
    """Hands out requests, and keeps what is sent, with all events in order."""

    def __init__(self, *requests: bindings.InferenceRequest) -> None:
        self.todo = list(requests)
        self.events: list[str] = []
        self.sent: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.errors: dict[int, list[str]] = {}
        self.finals: list[int] = []
        self.stats: list[dict[str, Any]] = []
        self.threads: set[int | None] = set()
        self.stop: Callable[[], set[int]] = set
        self.expected = len(requests)
        self.done = threading.Event()

    def get(self, max_count: int) -> list[bindings.InferenceRequest]:
        self.events.append("get")
        self.threads.add(threading.get_ident())
        taken, self.todo = self.todo[:max_count], self.todo[max_count:]
        return taken

    def send(self, request_id: int, tensors: list[bindings.NamedTensor], is_final: bool, error: str) -> None:
        self.events.append("send")
        if error:
            assert is_final and tensors == []
            self.errors.setdefault(request_id, []).append(error)
        else:
            self.sent.setdefault(request_id, []).append({each.name: each.tensor for each in tensors})
        if is_final:
            self.finals.append(request_id)
        if len(self.finals) >= self.expected:
            self.done.set()

    def poll(self) -> set[int]:
        self.events.append("poll")
        return self.stop()

    def told(self, text: str) -> None:
        self.events.append("stats")
        self.stats.append(json.loads(text))

    def run(self, path: Path, model_type: bindings.TrtGptModelType = FUSED, **options: Any) -> bindings.GptManager:
        callbacks = (self.get, self.send, self.poll, self.told)
        with bindings.GptManager(path, model_type, *callbacks, parameters(**options), TERMINATE) as manager:
            assert self.done.wait(60), (self.sent, self.errors)
        return manager


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[int]:
    """Eight greedy tokens after [1, 2, 3, 4]."""
    client = Client(request(1, [1, 2, 3, 4], 8))
    client.run(model_path)
    return client.sent[1][0][names.OUTPUT_IDS][0, 0, 4:].tolist()


@pytest.mark.feature("001-03", "001-05", "001-49", "001-50")
def test_a_response_holds_tensors_of_the_documented_shapes(model_path: Path, expected: list[int]) -> None:
    biggest = 2**64 - 1
    client = Client(request(biggest, [1, 2, 3, 4], 8, end_id=[expected[2]], pad_id=[9], return_log_probs=[True]))
    client.run(model_path)
    (tensors,) = client.sent[biggest]
    length = expected.index(expected[2]) + 1
    output = tensors[names.OUTPUT_IDS]
    assert output.dtype is torch.int32 and list(output.shape) == [1, 1, 12], (
        "the prompt, and room for all that was asked"
    )
    assert output.tolist() == [[[1, 2, 3, 4, *expected[:length], *[9] * (8 - length)]]]
    assert tensors[names.SEQUENCE_LENGTH].tolist() == [[4 + length]]
    log_probs, cumulative = tensors[names.OUTPUT_LOG_PROBS], tensors[names.CUM_LOG_PROBS]
    assert list(log_probs.shape) == [1, 1, length] and cumulative.tolist() == [[pytest.approx(log_probs.sum().item())]]


@pytest.mark.feature("001-51", "001-52", "001-55")
def test_without_the_engine_s_flag_logits_are_dummies_asked_for_or_not(model_path: Path) -> None:
    client = Client(request(1, [1], 1), request(2, [1], 1, return_context_logits=[True], return_generation_logits=[1]))
    client.run(model_path)
    for request_id in (1, 2):
        (tensors,) = client.sent[request_id]
        assert list(tensors[names.CONTEXT_LOGITS].shape) == [1, 1, 1]
        assert list(tensors[names.GENERATION_LOGITS].shape) == [1, 1, 1, 1]


@pytest.mark.feature("001-57")
def test_a_stream_gets_one_token_per_response_and_the_length_so_far(model_path: Path, expected: list[int]) -> None:
    client = Client(request(3, [1, 2, 3, 4], 8, is_streaming=True))
    client.run(model_path)
    assert [each[names.OUTPUT_IDS].tolist() for each in client.sent[3]] == [[[[token]]] for token in expected]
    assert [each[names.SEQUENCE_LENGTH].item() for each in client.sent[3]] == list(range(5, 13))


@pytest.mark.parametrize("missing", ["input_ids", "request_output_len"])
@pytest.mark.feature("001-04")
def test_a_request_without_a_mandatory_tensor_gets_a_final_error(model_path: Path, missing: str) -> None:
    wrong, right = request(1, [1, 2], 3), request(2, [1, 2], 3)
    setattr(wrong, missing, None)
    client = Client(wrong, right)
    client.run(model_path)
    assert client.errors == {1: [f"A value is required for {missing}"]}
    assert sorted(client.finals) == [1, 2] and len(client.sent[2]) == 1


@pytest.mark.feature("001-04")
def test_words_that_stop_and_words_that_are_banned_come_as_tokens_and_ends(
    model_path: Path, expected: list[int]
) -> None:
    first, second, third = expected[:3]
    stopped = request(1, [1, 2, 3, 4], 8, stop_words_list=[[[95, second, third], [1, 3, -1]]])
    banned = request(2, [1, 2, 3, 4], 8, bad_words_list=[[first], [1]])
    wrong = request(3, [1, 2, 3, 4], 8, bad_words_list=[[first], [7]])
    client = Client(stopped, banned, wrong)
    client.run(model_path)
    assert client.sent[1][0][names.SEQUENCE_LENGTH].item() == 7
    assert first not in client.sent[2][0][names.OUTPUT_IDS][0, 0, 4:].tolist()
    assert "bad_words_list holds the ends [7]" in client.errors[3][0]


@pytest.mark.feature("001-07", "001-06")
def test_a_duplicate_id_is_refused_once_and_the_first_request_finishes(model_path: Path, expected: list[int]) -> None:
    client = Client(request(7, [1, 2, 3, 4], 8, is_streaming=True), request(7, [5], 8))
    client.run(model_path)
    assert len(client.errors[7]) == 1 and "in use" in client.errors[7][0]
    assert client.finals == [7, 7]
    assert [each[names.OUTPUT_IDS].item() for each in client.sent[7]] == expected


@pytest.mark.feature("001-08")
def test_an_id_may_be_used_again_from_inside_its_final_callback(model_path: Path) -> None:
    client = Client(request(1, [1], 1))
    client.expected = 100
    send = client.send

    def send_and_ask_again(request_id: int, *answer: Any) -> None:
        client.todo.append(request(1, [1], 1))
        send(request_id, *answer)

    client.send = send_and_ask_again
    client.run(model_path)
    assert client.errors == {} and len(client.sent[1]) >= 100


@pytest.mark.feature("001-05", "001-10")
def test_each_iteration_calls_get_send_poll_and_stats_in_this_order(model_path: Path) -> None:
    client = Client(request(1, [1, 2], 5, is_streaming=True))
    client.run(model_path)
    text = " ".join(client.events)
    busy = text.index("get send")
    assert text[busy:].startswith(" ".join(["get send poll stats"] * 5))
    assert client.events.count("stats") == 5, "none while nothing was active"
    assert len(client.threads) == 1 and threading.get_ident() not in client.threads


@pytest.mark.feature("001-11", "001-12", "001-13", "001-14", "001-15", "001-16")
def test_statistics_of_requests_in_flight(model_path: Path) -> None:
    client = Client(request(1, [1, 2, 3], 4), request(2, [4, 5], 2))
    client.run(model_path, max_batch_size=5)
    for each in client.stats:
        datetime.strptime(each["Timestamp"], "%m-%d-%Y %H:%M:%S")
        assert each["Used KV cache blocks"] + each["Free KV cache blocks"] == each["Max KV cache blocks"] == 64
        assert each["Scheduled Requests"] == each["Context Requests"] + each["Generation Requests"]
        assert (each["Tokens per KV cache block"], each["Max Request Count"]) == (32, 5)
    counters = [each["Iteration Counter"] for each in client.stats]
    assert counters == sorted(set(counters))
    assert sum(each["Total Context Tokens"] for each in client.stats) == 5
    assert [each["Active Request Count"] for each in client.stats] == [2, 1, 1, 0]
    assert {each["MicroBatch ID"] for each in client.stats} == {0}


@pytest.mark.feature("001-15", "001-16")
def test_used_blocks_are_those_that_the_tokens_of_all_running_requests_fill(model_path: Path) -> None:
    """Prompts of 30, 40 and 70 tokens and outputs of 6: the first block of the first request is full after two tokens more."""
    lengths = {1: 30, 2: 40, 3: 70}
    client = Client(*(request(n, [n * 7 + i % 5 for i in range(length)], 6) for n, length in lengths.items()))
    client.run(model_path, max_batch_size=5)
    counts = [(each["Context Requests"], each["Generation Requests"]) for each in client.stats]
    assert counts[0] == (3, 0) and set(counts[1:-1]) == {(0, 3)}
    assert [each["Total Context Tokens"] for each in client.stats] == [140, *[0] * (len(client.stats) - 1)]
    for step, each in enumerate(client.stats[:-1]):  # with the last step all blocks are let go
        assert each["Used KV cache blocks"] == sum(-(-(length + step) // 32) for length in lengths.values())
    assert client.stats[-1]["Used KV cache blocks"] == 0


@pytest.mark.feature("001-11")
def test_the_form_of_the_time_stamp_can_be_chosen(model_path: Path) -> None:
    client = Client(request(1, [1], 1))
    client.run(model_path, stats_timestamp_format="%m-%d-%Y %H:%M:%S.%f")
    datetime.strptime(client.stats[0]["Timestamp"], "%m-%d-%Y %H:%M:%S.%f")


@pytest.mark.feature("001-17")
def test_statistics_of_v1_count_the_rows_that_have_ended_before_their_batch(model_path: Path) -> None:
    """Outputs of 3 and 7 in lockstep: after step 3 one row is empty, for the four steps that the other one goes on."""
    client = Client(request(1, [1, 2], 3), request(2, [4, 5, 6], 7))
    client.run(model_path, bindings.TrtGptModelType.V1)
    assert [each["Empty Generation Slots"] for each in client.stats] == [0, 0, 0, 1, 1, 1, 1]
    assert sum(each["Total Context Tokens"] for each in client.stats) == 5
    assert sum(each["Total Generation Tokens"] for each in client.stats) == 2 + 6
    assert all("MicroBatch ID" not in each and "Generation Requests" not in each for each in client.stats)


@pytest.mark.feature("001-22")
def test_separate_batching_never_mixes_prompts_and_generation(model_path: Path) -> None:
    late = Client(request(1, [1, 2], 12))
    late.expected = 2

    def stop() -> set[int]:
        if len(late.stats) == 3:
            late.todo.append(request(2, [3], 3))
        return set()

    late.stop = stop
    late.run(model_path, bindings.TrtGptModelType.InflightBatching)
    assert all(min(each["Context Requests"], each["Generation Requests"]) == 0 for each in late.stats)
    assert late.finals == [2, 1]


@pytest.mark.feature("001-09")
def test_a_stop_signal_ends_a_request(model_path: Path) -> None:
    client = Client(request(1, [1, 2], 400, is_streaming=True))
    client.stop = lambda: {1, 99} if len(client.sent.get(1, ())) >= 5 else set()
    client.run(model_path)
    assert 5 <= len(client.sent[1]) <= 6 and client.finals == [1]


@pytest.mark.feature("001-59")
def test_leaving_the_context_finishes_what_runs_and_frees_the_memory(model_path: Path) -> None:
    counters = bindings.MemoryCounters.instance()
    before = counters.gpu
    client = Client(*(request(i, [i], 20) for i in (1, 2, 3)))
    callbacks = (client.get, client.send, client.poll, client.told)
    with bindings.GptManager(model_path, FUSED, *callbacks, parameters()) as manager:
        assert manager.is_alive and counters.gpu > before
        while client.todo:
            assert manager.is_alive
    assert sorted(client.finals) == [1, 2, 3] and not manager.is_alive
    assert counters.gpu == before and counters is bindings.MemoryCounters.instance()


@pytest.mark.feature("001-59")
def test_a_request_with_the_terminating_id_ends_the_thread_after_what_runs(model_path: Path) -> None:
    client = Client(request(1, [1], 9), request(TERMINATE, [1], 1))
    callbacks = (client.get, client.send, client.poll, client.told)
    manager = bindings.GptManager(model_path, FUSED, *callbacks, parameters(), TERMINATE)
    manager._loop.worker_thread.join(60)
    assert not manager.is_alive and client.finals == [1] and client.errors == {}
    manager.shutdown()


@pytest.mark.feature("001-20")
def test_a_missing_directory_and_parameters_that_are_not_served_raise(model_path: Path) -> None:
    client = Client()
    with pytest.raises(RuntimeError, match="File does not exist"):
        bindings.GptManager("Bla", FUSED, client.get, client.send)
    with pytest.raises(RuntimeError, match="device_ids"):
        bindings.GptManager(model_path, FUSED, client.get, client.send, None, None, parameters(device_ids=[0, 1]))


@pytest.mark.feature("001-34", "W-03")
def test_with_overlap_two_micro_batches_are_in_flight_and_alternate(model_path: Path) -> None:
    found = []
    for overlap in (False, True):
        client = Client(request(1, [1, 2, 3], 9), request(2, [4, 5], 6))
        client.run(model_path, enable_trt_overlap=overlap)
        assert not client.errors
        found.append(client)
    plain, overlapped = found
    for request_id in (1, 2):
        (of_plain,), (of_overlapped,) = plain.sent[request_id], overlapped.sent[request_id]
        assert torch.equal(of_overlapped[names.OUTPUT_IDS], of_plain[names.OUTPUT_IDS])
    assert {each["MicroBatch ID"] for each in plain.stats} == {0}
    assert [each["MicroBatch ID"] for each in overlapped.stats] == [
        each["Iteration Counter"] % 2 for each in overlapped.stats
    ]
    assert {each["MicroBatch ID"] for each in overlapped.stats} == {0, 1}


@pytest.mark.feature("001-24")
def test_more_beams_than_the_manager_allows_and_adapters_are_errors(model_path: Path) -> None:
    several = request(3, [1], 2, num_return_sequences=[0])
    client = Client(request(1, [1], 2, beam_width=[2]), request(2, [1], 2, lora_task_id=[7]), several)
    client.run(model_path)
    assert "beam_width is 2" in client.errors[1][0] and "num_return_sequences is 0" in client.errors[3][0]
    assert "LoRA task 7 not found in cache" in client.errors[2][0]


@pytest.mark.feature("001-49", "001-52", "001-53", "001-54")
def test_tensors_of_beams_have_a_row_for_each(model_path: Path) -> None:
    client = Client(request(1, [1, 2], 3, beam_width=[2], return_log_probs=[True], return_generation_logits=[True]))
    client.run(model_path, max_beam_width=2, gather_generation_logits=True)
    (tensors,) = client.sent[1]
    output = tensors[names.OUTPUT_IDS]
    assert list(output.shape) == [1, 2, 5] and output[0, :, :2].tolist() == [[1, 2], [1, 2]]
    assert list(tensors[names.OUTPUT_LOG_PROBS].shape) == [1, 2, 3]
    assert list(tensors[names.CUM_LOG_PROBS].shape) == [1, 2]
    own = tensors[names.GENERATION_LOGITS]
    assert list(own.shape[:3]) == [1, 2, 3]
    own = own.log_softmax(-1).gather(-1, output[:, :, 2:, None].long())[..., 0]
    torch.testing.assert_close(own, tensors[names.OUTPUT_LOG_PROBS], atol=1e-4, rtol=1e-4)


@pytest.mark.feature("001-05", "001-49", "001-50", "000-28")
@pytest.mark.parametrize("streaming", [False, True])
def test_each_answer_of_several_sequences_says_which_one_it_tells_of(model_path: Path, streaming: bool) -> None:
    """Sequence i is what a request of its own says with the seed that is derived for i. The last answer alone is final."""

    def ask(request_id: int, seed: int, **more: Any) -> bindings.InferenceRequest:
        made = request(request_id, [1, 2], 5, runtime_top_k=[50], is_streaming=streaming, **more)
        made.random_seed = torch.tensor([seed], dtype=torch.uint64)
        return made

    single = Client(*(ask(i, stream_seed(7, i)) for i in range(3)))
    several = Client(ask(9, 7, num_return_sequences=[3], return_log_probs=[True]))
    single.run(model_path)
    several.run(model_path)
    assert several.finals == [9] and several.errors == {}
    found: dict[int, list[dict[str, torch.Tensor]]] = {0: [], 1: [], 2: []}
    for tensors in several.sent[9]:
        index = tensors[names.SEQUENCE_INDEX]
        assert index.dtype is torch.int32 and list(index.shape) == [1, 1]
        found[index.item()].append(tensors)
    for index, answers in found.items():
        alone = single.sent[index]
        assert [each[names.OUTPUT_IDS].tolist() for each in answers] == [t[names.OUTPUT_IDS].tolist() for t in alone]
        lengths = [each[names.SEQUENCE_LENGTH].tolist() for each in answers]
        assert lengths == ([[[n]] for n in range(3, 8)] if streaming else [[[7]]])
        assert answers[-1][names.CUM_LOG_PROBS].shape == (1, 1)
        assert names.SEQUENCE_INDEX not in alone[0], "a request for one sequence has no index"
    assert len({str(answers[-1][names.CUM_LOG_PROBS]) for answers in found.values()}) > 1, "they differ"


@pytest.mark.feature("001-49", "001-50", "000-32")
def test_beams_of_a_stream_are_sent_as_they_are_so_far(model_path: Path) -> None:
    """A beam may become the continuation of another, so that nothing that was sent of it can be added to."""
    client = Client(request(1, [1, 2], 4, beam_width=[2], is_streaming=True), request(2, [1, 2], 4, beam_width=[2]))
    client.run(model_path, max_beam_width=2)
    *_, last = client.sent[1]
    assert [list(each[names.OUTPUT_IDS].shape) for each in client.sent[1]][-2:] == [[1, 2, 3], [1, 2, 4]]
    assert [each[names.SEQUENCE_LENGTH].item() for each in client.sent[1]][-2:] == [5, 6]
    assert torch.equal(last[names.OUTPUT_IDS], client.sent[2][0][names.OUTPUT_IDS][:, :, 2:])


@pytest.mark.feature("001-03")
def test_a_request_keeps_each_named_tensor_and_pickles() -> None:
    made = bindings.InferenceRequest(42, print)
    assert made.request_id == 42 and made.logits_post_processor is print and made.is_streaming is False
    for i, name in enumerate(names.INPUTS):
        assert getattr(made, name) is None
        setattr(made, name, torch.full((1, 2), i))
    made.is_streaming = True
    twin = pickle.loads(pickle.dumps(made))
    assert twin == made and list(twin.tensors()) == list(names.INPUTS)
    assert made.max_new_tokens is made.request_output_len
    made.max_new_tokens = torch.tensor([3])
    assert made.request_output_len.item() == 3
    for wrong in (-1, 2**64, "x"):
        with pytest.raises(TypeError):
            bindings.InferenceRequest(wrong)
    with pytest.raises(TypeError):
        made.end_id = 3
    with pytest.raises(AttributeError):
        made.no_such_tensor = torch.ones(1)
