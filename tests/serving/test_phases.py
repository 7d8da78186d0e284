"""A prompt on one server and its output on another, over Triton's tensors: the answer of one server, and no harm from a state
that a client makes up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from backend.api import EngineConfig, InvalidRequest
from backend.api.config.schema import KvTransferConfig
from backend.core import kv_state
from backend.serving.intake.requests import parse_parameters
from backend.serving.served_model import ServedModel
from backend.serving.server import ModelServer
from backend.serving.wires.trtllm_tensors import ENSEMBLE, TOKEN_MODEL
from backend.serving.wires.trtllm_tokens import parse_token_requests
from tests.executor.helpers import CONFIG, make_executor
from tests.serving.fake_triton import InferenceRequest
from tests.serving.helpers import bools, token_inputs, uint64

pytestmark = pytest.mark.feature("002-49")
PROMPT = list(range(100, 110))  # two blocks of 4, and half of one
ON = msgspec.structs.replace(CONFIG, kv_transfer=KvTransferConfig(enabled=True))


class Server:
    """A stub over an engine of its own. `ask` sends a request and returns all values of each output."""

    def __init__(self, config: EngineConfig = ON) -> None:
        self.executor = make_executor(config)
        self.stub = ModelServer(ServedModel(TOKEN_MODEL, parse_token_requests), self.executor, config)

    def send(
        self, prompts: list[list[int]] | None = None, kind: object = None, **inputs: np.ndarray
    ) -> InferenceRequest:
        parameters = {} if kind is None else {"request_type": kind}
        found = {"exclude_input_in_output": bools(*[True] * len(prompts or [PROMPT])), **inputs}
        request = InferenceRequest(token_inputs(prompts or [PROMPT], 8, **found), parameters=parameters)
        self.stub.execute([request])
        return request

    def tokens(self, kind: object = None, **inputs: np.ndarray) -> list[Any]:
        return self.send(None, kind, **inputs).sender.column("output_ids")

    def state(self, **inputs: np.ndarray) -> np.ndarray:
        """The state of the prompt, [1, bytes], as the answer has it."""
        (answer,) = self.send(None, "context_only", **inputs).sender.wait()
        return answer.outputs()["context_phase_params"]

    def error(self, kind: object = None, **inputs: np.ndarray) -> str:
        return self.send(None, kind, **inputs).sender.error()


@pytest.fixture
def make() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(config: EngineConfig = ON) -> Server:
        made.append(Server(config))
        return made[-1]

    yield start
    for server in made:
        server.stub.finalize()


@pytest.mark.parametrize(
    "inputs", [{}, {"streaming": bools(True)}, {"seed": uint64(7)}], ids=["", "streams", "samples"]
)
def test_the_second_server_goes_on_with_the_tokens_of_one(
    make: Callable[..., Server], inputs: dict[str, np.ndarray]
) -> None:
    first, second = make(), make()
    alone = first.tokens(**inputs)
    (context,) = first.send(None, "context_only", **inputs).sender.wait()
    found = context.outputs()
    assert found["output_ids"].reshape(-1).tolist() == alone[:1], "the first token"
    state = found["context_phase_params"]
    assert state.dtype == np.uint8 and state.ndim == 2 and len(state) == 1
    given = {"context_phase_params": state, "return_perf_metrics": bools(True), **inputs}
    sender = second.send(None, "generation_only", **given).sender
    assert sender.column("output_ids") == alone and len(alone) == 8
    assert sender.column("num_context_tokens")[-1] == 1, "the KV came with the state"


def test_rows_of_a_request_have_a_state_each(make: Callable[..., Server]) -> None:
    first, second = make(), make()
    prompts = [PROMPT, [7, 8, 9]]
    answers = [answer.outputs() for answer in first.send(prompts, "context_only").sender.wait()]
    states = {int(answer["batch_index"][0, 0]): answer["context_phase_params"] for answer in answers}
    for row, prompt in enumerate(prompts):
        alone = first.send([prompt]).sender.column("output_ids")
        again = second.send([prompt], "generation_only", context_phase_params=states[row]).sender.column("output_ids")
        assert again == alone


@pytest.mark.parametrize("kind", [None, "context_and_generation"])
def test_an_answer_of_both_phases_has_no_state(make: Callable[..., Server], kind: str | None) -> None:
    (answer,) = make().send(None, kind).sender.wait()
    assert "context_phase_params" not in answer.outputs()


@pytest.mark.parametrize("kind", ["context_only", "context_and_generation", None])
def test_a_state_without_its_request_type_is_refused(make: Callable[..., Server], kind: str | None) -> None:
    server = make()
    error = server.error(kind, context_phase_params=np.ones((1, 3), np.uint8))
    assert error == (
        f"[INVALID_ARGUMENT] request_type is {kind or 'context_and_generation'} and context_phase_params is given; it goes with "
        f"generation_only alone"
    )


def test_generation_alone_needs_a_state(make: Callable[..., Server]) -> None:
    server, wanted = make(), "request_type is generation_only and context_phase_params is not given"
    assert wanted in server.error("generation_only")
    assert wanted in server.error("generation_only", context_phase_params=np.empty((1, 0), np.uint8))


@pytest.mark.parametrize(
    "value", ["", "prefill", "CONTEXT_ONLY", 1, True, 1e308, 10**400, ["context_only"], {}, "\ud800", "x" * 60_000]
)
def test_another_request_type_is_refused_in_one_sentence(value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_parameters(0, json.dumps({"request_type": value}))
    told = refused.value.message
    assert told.endswith(", allowed are context_and_generation, context_only, generation_only") and len(told) < 150


def changed(state: np.ndarray, **fields: Any) -> bytes:
    """A state with other fields and a right checksum, as somebody who knows the format can make it."""
    return kv_state.encode(msgspec.structs.replace(kv_state.decode(state.tobytes(), 1 << 20), **fields))


@pytest.mark.parametrize(
    "forge, told",
    [
        (lambda state: b"\0", "none of this version's"),
        (lambda state: bytes(1 << 20), "none of this version's"),
        (lambda state: state.tobytes()[:-1], "damaged"),
        (lambda state: state.tobytes() + b"\0", "damaged"),
        (lambda state: kv_state.MAGIC, "damaged"),
        (lambda state: changed(state, blocks=b"\0"), "not what 10 tokens need"),
        (lambda state: changed(state, block_size=1 << 40), "not what 10 tokens need"),
        (lambda state: changed(state, block_bytes=-32), "not what 10 tokens need"),
        (lambda state: changed(state, token_ids=[]), "not what 0 tokens need"),
        (lambda state: changed(state, token_ids=[1] * 10), "another prompt, of 10 tokens"),
        (lambda state: changed(state, fingerprint="another model"), "fingerprint 'another mode'"),
        (lambda state: changed(state, digest="x"), "another adapter"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_the_next_request_is_served(
    make: Callable[..., Server], forge: Callable[[np.ndarray], bytes], told: str
) -> None:
    server = make()
    forged = np.frombuffer(forge(server.state()), np.uint8)[np.newaxis]
    error = server.error("generation_only", context_phase_params=forged)
    assert error.startswith("[INVALID_ARGUMENT] the opaque state") and told in error and len(error) < 350
    assert len(server.tokens()) == 8


@pytest.mark.parametrize("kind", ["context_only", "generation_only"])
def test_it_is_off_unless_the_operator_turns_it_on(make: Callable[..., Server], kind: str) -> None:
    given = {"context_phase_params": np.ones((1, 3), np.uint8)} if kind == "generation_only" else {}
    assert "kv_transfer.enabled is false" in make(CONFIG).error(kind, **given)


@pytest.mark.parametrize("kind", ["context_only", "generation_only"])
def test_a_model_without_the_tensor_says_so(make_server: Callable[..., ModelServer], kind: str) -> None:
    request = InferenceRequest({}, parameters={"request_type": kind})
    make_server(ENSEMBLE).execute([request])
    assert request.sender.error() == (
        f"[UNSUPPORTED] request_type is {kind}, and ensemble has no tensor for the state (context_phase_params); send token ids "
        f"to tensorrt_llm, or leave request_type out"
    )
