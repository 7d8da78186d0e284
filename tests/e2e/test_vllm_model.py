"""Clients of Triton's vLLM backend: a server whose repository holds our model and one as upstream writes it."""

from __future__ import annotations

import itertools
import json
import queue
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from backend.api import OutputConfig, Request, Response, Result, SamplingConfig, load_config
from backend.executor import Executor
from backend.text.tokenizer import Tokenizer
from deploy import ROOT, probe
from deploy.invocation import ADMIN_HEADER
from deploy.triton_server import TritonServer
from tests.e2e.conftest import EXACT
from tests.e2e.starts import wait_ready
from tests.e2e.test_guides import GUIDES, MAX_TOKENS
from tests.e2e.test_page_examples import answers
from tests.e2e.vllm_client import PROMPT, ask, inputs_of, is_final, request, text_of, value_of, values_of
from tests.e2e.wire import events, eventually, post

pytestmark = pytest.mark.feature("W-07")
MODELS = ("vllm_model", "vllm_opt")
NAMES = {"json": "json_object", "json_schema": "json", "ebnf_grammar": "grammar"}  # other guides are called the same
GREEDY = {"temperature": "0", "top_p": "1", "max_tokens": "16"}
# As in upstream's samples: no name, no tensors, no transaction policy.
CONFIG = """
backend: "vllm"

# The usage of device is deferred to the vLLM engine
instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
"""
PARAMETERS = """
parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "true" } }
parameters: { key: "ENABLE_VLLM_HEALTH_CHECK" value: { string_value: "true" } }
"""
ENGINE_ARGS = {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.5, "enforce_eager": True}


def add_model(repository: Path, name: str, config: str = CONFIG, **engine_args: Any) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    (repository / name / "1" / "model.json").write_text(json.dumps(ENGINE_ARGS | engine_args))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("repository")
    for name in ("tensorrt_llm", "everbatch"):
        (directory / name).symlink_to(ROOT / "model_repository" / name)
    (directory / "vllm_model").symlink_to(ROOT / "deploy" / "profiles" / "vllm" / "vllm_model")
    add_model(directory, "vllm_opt")
    return directory


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    run_dir = tmp_path_factory.mktemp("vllm")
    config = load_config(overrides=list(EXACT))
    with TritonServer(
        config, run_dir=run_dir, model_repository=repository, probe_model="vllm_model", exit_timeout_s=5
    ) as server:
        wait_ready(server)
        yield server


def error_of(server: TritonServer, **fields: Any) -> str:
    ((error,),) = ask(server, request("vllm_model", **fields))
    assert isinstance(error, InferenceServerException)
    return str(error.message())


@pytest.mark.parametrize("model", MODELS)
def test_the_sample_client_gets_the_same_text_in_every_form_of_asking(server: TritonServer, model: str) -> None:
    prompts = [f"def f{n}(" for n in range(4)]
    forms = list(itertools.product((True, False), (True, False)))
    answers = ask(
        server,
        *(
            request(model, GREEDY, as_tensor=as_tensor, prompt=prompt, stream=stream, exclude_input_in_output=True)
            for prompt in prompts
            for as_tensor, stream in forms
        ),
    )
    for n in range(len(prompts)):
        of_prompt = answers[n * len(forms) : (n + 1) * len(forms)]
        assert len({text_of(responses) for responses in of_prompt}) == 1 and text_of(of_prompt[0])
        for (_, stream), responses in zip(forms, of_prompt):
            assert len(responses) == (16 if stream else 1)
            assert [is_final(response) for response in responses] == [False] * (len(responses) - 1) + [True]


def test_a_final_that_is_asked_for_is_no_response_of_its_own(server: TritonServer) -> None:
    one = {**request("vllm_opt", GREEDY, stream=True), "enable_empty_final_response": True}
    (responses,) = ask(server, one)
    assert len(responses) == 16 and is_final(responses[-1]) and value_of(responses[-1], "text_output") is not None


# ---- additional outputs ----------------------------------------------------------------------------------------------

CHOICES = {
    "stream": (True, False),
    "logprobs": (None, 0, 2),
    "return_finish_reason": (None, True, False),
    "return_cumulative_logprob": (None, True, False),
    "return_logprobs": (None, True, False),
    "return_num_input_tokens": (None, True, False),
    "return_num_output_tokens": (None, True, False),
}
ALL_CASES = [dict(zip(CHOICES, values)) for values in itertools.product(*CHOICES.values())]


@pytest.mark.parametrize("model", MODELS)
def test_the_additional_outputs_are_what_upstreams_1458_cases_look_for(server: TritonServer, model: str) -> None:
    assert len(ALL_CASES) == 1458
    cases = [dict.fromkeys(CHOICES, True) | {"logprobs": 2, "stream": stream} for stream in (True, False)]
    cases += random.Random(7).sample(ALL_CASES, 80)
    answers = ask(server, *(_case_request(model, case) for case in cases))
    for case, responses in zip(cases, answers):
        assert len(responses) == (16 if case["stream"] else 1)
        _check_finish_and_counts(case, responses)
        _check_cumulative_log_prob(case, responses)
        for response in responses:
            _check_log_probs(case, response)


def _case_request(model: str, case: dict[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
    if case["logprobs"] is not None:
        sampling["logprobs"] = case["logprobs"]
    flags = {name: value for name, value in case.items() if name != "logprobs"}
    return {**request(model, sampling, **flags), "parameters": None}


def _check_finish_and_counts(case: dict[str, Any], responses: list[Any]) -> None:
    reasons = [value_of(response, "finish_reason") for response in responses]
    inputs = [value_of(response, "num_input_tokens") for response in responses]
    outputs = [value_of(response, "num_output_tokens") for response in responses]
    nothing = [None] * len(responses)
    assert reasons == (["None"] * (len(responses) - 1) + ["length"] if case["return_finish_reason"] else nothing)
    if case["return_num_input_tokens"]:
        assert all(0 < count <= len(PROMPT) for count in inputs)
    else:
        assert inputs == nothing
    if case["return_num_output_tokens"]:
        assert all(count > 0 for count in outputs) and sum(outputs) == 16
    else:
        assert outputs == nothing


def _check_cumulative_log_prob(case: dict[str, Any], responses: list[Any]) -> None:
    values = [value_of(response, "cumulative_logprob") for response in responses]
    if case["return_cumulative_logprob"]:
        assert all(later < sooner for sooner, later in itertools.pairwise([0.0, *values]))
    else:
        assert values == [None] * len(responses)


def _check_log_probs(case: dict[str, Any], response: Any) -> None:
    if not case["return_logprobs"]:
        assert response.as_numpy("logprobs") is None
        return
    positions = json.loads(value_of(response, "logprobs"))
    if case["logprobs"] is None:
        assert positions is None
        return
    best = ""
    for position in positions:
        assert 1 <= len(position) <= case["logprobs"] + 1
        (first,) = [entry for entry in position.values() if entry["rank"] == 1]
        assert set(first) == {"logprob", "rank", "decoded_token"} and isinstance(first["logprob"], float)
        best += first["decoded_token"]
    assert len(positions) == (1 if case["stream"] else 16)
    assert ("" if case["stream"] else PROMPT) + best == value_of(response, "text_output")


# ---- several sequences -----------------------------------------------------------------------------------------------

SEVERAL = {"max_tokens": "8", "ignore_eos": "true", "seed": "7"}
TOLD = {"exclude_input_in_output": True, "return_cumulative_logprob": True, "return_num_output_tokens": True}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(str(ROOT / "models" / "default"))


@pytest.fixture
def executor(server: TritonServer) -> Iterator[Executor]:
    """A client of the server's engine beside its models."""
    executor = Executor.attach(str(server.run_dir / "engine.sock"), 10)
    yield executor
    executor.shutdown()


def of_the_executor(executor: Executor, tokenizer: Tokenizer, **sampling: Any) -> list[Result]:
    request = Request(
        tokenizer.encode(PROMPT),
        8,
        sampling_config=SamplingConfig(**sampling),
        output_config=OutputConfig(return_log_probs=True, exclude_input_from_output=True),
    )
    request_id = executor.enqueue_request(request)
    responses: list[Response] = []
    while not (responses and responses[-1].is_final):
        responses += executor.await_responses(request_id, 30.0)
    return sorted((response.result for response in responses), key=lambda result: result.sequence_index)


def test_the_beams_are_the_executors(server: TritonServer, executor: Executor, tokenizer: Tokenizer) -> None:
    asked = SEVERAL | {"use_beam_search": "true", "n": "2", "best_of": "4", "length_penalty": "0.5"}
    ((response,),) = ask(server, request("vllm_model", asked, **TOLD))
    (expected,) = of_the_executor(
        executor, tokenizer, beam_width=4, num_return_sequences=2, length_penalty=0.5, early_stopping=0
    )
    assert values_of(response, "text_output") == [tokenizer.decode(ids) for ids in expected.output_token_ids]
    assert values_of(response, "cumulative_logprob") == pytest.approx(expected.cum_log_probs, rel=1e-5)
    assert values_of(response, "num_output_tokens") == [8, 8]


def test_the_sequences_and_the_best_of_them_are_the_executors(
    server: TritonServer, executor: Executor, tokenizer: Tokenizer
) -> None:
    """All four, streamed and not; and the two with the greatest sums of log-probabilities among them."""
    expected = of_the_executor(executor, tokenizer, num_return_sequences=4, temperature=1.0, seed=7)
    texts = [tokenizer.decode(result.output_token_ids[0]) for result in expected]
    sums = [result.cum_log_probs[0] for result in expected if result.cum_log_probs is not None]
    assert len(set(texts)) == len(sums) == 4
    (whole,), stream, (best,) = ask(
        server,
        request("vllm_opt", SEVERAL | {"n": "4"}, **TOLD),
        request("vllm_opt", SEVERAL | {"n": "4"}, stream=True, **TOLD),
        request("vllm_opt", SEVERAL | {"n": "2", "best_of": "4"}, **TOLD),
    )
    assert values_of(whole, "text_output") == texts and values_of(whole, "num_output_tokens") == [8] * 4
    assert values_of(whole, "cumulative_logprob") == pytest.approx(sums, rel=1e-5)
    pieces = zip(*(values_of(response, "text_output") for response in stream))
    assert ["".join(each) for each in pieces] == texts
    assert sum(sum(values_of(response, "num_output_tokens")) for response in stream) == 32
    order = sorted(range(4), key=lambda i: -sums[i])[:2]
    assert values_of(best, "text_output") == [texts[i] for i in order]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_the_prompt_is_excluded_as_asked_and_never_told_to_a_stream(server: TritonServer) -> None:
    forms = [None, False, True]
    plain = ask(server, *(request("vllm_model", GREEDY, exclude_input_in_output=exclude) for exclude in forms))
    texts = [text_of(responses) for responses in plain]
    assert texts[0] == texts[1] == PROMPT + texts[2]
    streams = ask(
        server, *(request("vllm_model", GREEDY, stream=True, exclude_input_in_output=x) for x in (None, True))
    )
    assert [text_of(responses) for responses in streams] == [texts[2]] * 2
    assert error_of(server, sampling=GREEDY, stream=True, exclude_input_in_output=False) == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


def test_what_is_wrong_is_an_error_and_the_next_request_is_served(server: TritonServer) -> None:
    assert error_of(server, sampling={"lora_name": "doll"}) == "LoRA feature is not enabled."
    assert error_of(server, sampling={"n": "2", "best_of": "1"}).startswith("Error generating stream: best_of is 1")
    assert "'tempersture'" in error_of(server, sampling={"tempersture": 0}, as_tensor=False)
    for guide, sentence in (({"json": {"not": {}}}, "not"), ({"xml": "a"}, "'xml', allowed")):
        assert sentence in error_of(server, sampling={"structured_outputs": json.dumps(guide)})
    assert "the model reads text only, and the request has images" in error_of(server, image="aGk=")
    beams = GREEDY | {"use_beam_search": "true", "n": "99"}
    assert error_of(server, sampling=beams).startswith("Error generating stream: beam_width is 99, allowed is 1 to")
    one = request("vllm_model", GREEDY)
    ((error,),) = ask(server, {**one, "inputs": [tensor for tensor in one["inputs"] if tensor.name() != "text_input"]})
    assert "text_input" in str(error)
    assert text_of(ask(server, one)[0]).startswith(PROMPT)


def test_the_curl_lines_of_the_page_do_what_it_says(server: TritonServer) -> None:
    (whole,), pieces = answers(server, "vllm.md")
    assert whole["text_output"] == "def main(" + "".join(piece["text_output"] for piece in pieces) and len(pieces) > 5


def test_unary_calls_are_told_that_the_model_is_decoupled(server: TritonServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="doesn't support models with decoupled transaction policy"):
            client.infer("vllm_opt", inputs_of())


# ---- cancellation ----------------------------------------------------------------------------------------------------


def executions(client: grpcclient.InferenceServerClient) -> int:
    """How often Triton has called the model."""
    (model,) = client.get_inference_statistics("vllm_opt").model_stats
    return int(model.execution_count)


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_request_ends_in_the_engine_and_the_log_says_so(server: TritonServer, stream: bool) -> None:
    def count(line: str) -> int:
        return server.log_path.read_text(errors="replace").count(line)

    lines = ("[vllm] Cancelling the request", "[vllm] Successfully cancelled the request")
    before = [count(line) for line in lines]
    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sampling = {"temperature": "0", "max_tokens": "1500", "ignore_eos": "true"}
    client = grpcclient.InferenceServerClient(server.grpc_url)
    executed = executions(client)
    client.start_stream(lambda result, error: responses.put(error or result))
    client.async_stream_infer("vllm_opt", inputs_of(stream=stream, sampling_parameters=json.dumps(sampling)))
    if stream:
        assert not isinstance(responses.get(timeout=30), Exception)
    else:
        # Triton counts an execution when the model has taken the request over; the engine's own count is told later.
        assert eventually(lambda: executions(client) == executed + 1, 30)
        assert responses.empty()
    client.stop_stream(cancel_requests=True)
    while not isinstance(last := responses.get(timeout=30), Exception):
        assert stream
    assert isinstance(last, InferenceServerException) and last.status() == "StatusCode.CANCELLED"
    client.close()
    assert eventually(lambda: [count(line) for line in lines] == [number + 1 for number in before], 30)


# ---- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_generate_takes_sampling_parameters_in_three_places(server: TritonServer, model: str) -> None:
    url = f"{server.http_url}/v2/models/{model}/generate"
    flat = {"temperature": 0, "max_tokens": 12}
    bodies = [flat, {"parameters": flat}, {"sampling_parameters": json.dumps(flat)}]
    answers = [post(url, {"text_input": PROMPT, **body, "return_num_output_tokens": True}) for body in bodies]
    assert [status for status, _ in answers] == [200] * 3
    said = [json.loads(text) for _, text in answers]
    assert {answer["text_output"] for answer in said} == {said[0]["text_output"]}
    assert said[0]["text_output"].startswith(PROMPT) and said[0]["num_output_tokens"] == 12
    status, text = post(url + "_stream", {"text_input": PROMPT, **flat, "stream": True, "return_finish_reason": True})
    pieces = events(text)
    assert status == 200 and len(pieces) == 12
    assert PROMPT + "".join(piece["text_output"] for piece in pieces) == said[0]["text_output"]
    assert [piece["finish_reason"] for piece in pieces] == ["None"] * 11 + ["length"]


@pytest.mark.parametrize("model", MODELS)
def test_structured_outputs_are_obeyed_streamed_and_whole(server: TritonServer, model: str) -> None:
    """The guides of tests/e2e/test_guides.py under vLLM's names; each is judged by another parser."""
    judges = {NAMES.get(kind, kind): (text or True, judge) for kind, (text, judge) in GUIDES.items()}
    judges["choice"] = (["red", "dark (blue)"], lambda said: said in ("red", "dark (blue)"))
    samplings = [
        {"max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 0.95, "seed": 3, "structured_outputs": {name: text}}
        for name, (text, _) in judges.items()
    ]
    fields = {"prompt": "def main(", "exclude_input_in_output": True}
    bodies = [fields | {"sampling_parameters": json.dumps(sampling)} for sampling in samplings]
    streamed = ask(server, *(request(model, stream=True, **body) for body in bodies))
    whole = ask(server, *(request(model, **body) for body in bodies))
    for one, other, (_, judge) in zip(streamed, whole, judges.values()):
        assert text_of(one) == text_of(other) and judge(text_of(one))


# ---- loading ---------------------------------------------------------------------------------------------------------


def load(server: TritonServer, model: str, action: str = "load") -> tuple[int, str]:
    path, headers = f"/v2/repository/models/{model}/{action}", {ADMIN_HEADER: server.admin_key}
    return probe.request(server.http_url, "POST", path, {}, 60, headers)


def test_an_unknown_engine_argument_fails_the_load_by_name_and_a_copy_under_any_name_serves(
    server: TritonServer, repository: Path
) -> None:
    add_model(repository, "vllm_mistyped", gpu_memory_utilisation=0.5)
    add_model(repository, "any_other_name", CONFIG + PARAMETERS)
    status, text = load(server, "vllm_mistyped")
    assert (
        status == 400
        and "gpu_memory_utilisation of model.json is no known parameter; did you mean gpu_memory_ut" in text
    )
    assert load(server, "any_other_name")[0] == 200
    assert text_of(ask(server, request("any_other_name", GREEDY))[0]).startswith(PROMPT)
    assert load(server, "any_other_name", "unload")[0] == 200
    assert load(server, "vllm_mistyped", "unload")[0] == 200
    log = server.log_path.read_text(errors="replace")
    assert "model.json of vllm_opt: model is facebook/opt-125m, but the default model is served" in log
