"""Numbers that no field should hold, in every field of the Executor, GptManager, the LLM API, the bindings, the configuration.

A sample of them is sent. EVERBATCH_EVERY=1 sends all, `python -m tests.hostile numbers` those of the wires to a real server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec

from backend.api import ConfigError, EngineConfig, ErrorCode, EverbatchError, Request, Response, load_config
from backend.engine.core import EngineCore
from backend.executor import Executor
from backend.serving.upstream_parameters import PARAMETERS, apply_parameters
from compat import trtllm
from compat.llm import LLM, SamplingParams
from compat.trtllm.callback_loop import CallbackLoop, load_engine
from tests.fakes.hash_worker import HashWorkerGroup
from tests.hostile import numbers
from tests.hostile.numbers import VALUES, Probe, sweep
from tests.trtllm.helpers import make_config, make_executor

EVERY = int(os.environ.get("EVERBATCH_EVERY", "29"))
DEFAULT = Path(__file__).parents[2] / "models" / "default"
OVERRIDES = ("kv_cache.max_tokens=8192", "lora.enabled=true", "guided.compile_timeout_s=1", "model.num_threads=1")
GOOD = Request([5, 6, 7], 3)
PATIENCE_S = 30.0
CLIENTS_OWN = (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED)


def judged(response: Response | None) -> str:
    """What is wrong with the last response to a probe."""
    if response is None:
        return f"no answer within {PATIENCE_S:g} s"
    if not response.has_error():
        return ""
    if response.error_code not in CLIENTS_OWN:
        return f"{response.error_code}: {response.error_msg[:300]}"
    return judged_text(response.error_msg)


def tokens(response: Response | None) -> list[list[int]]:
    return [] if response is None else response.result.output_token_ids


def judged_text(message: str) -> str:
    return f"an error of {len(message)} characters" if len(message) > numbers.MAX_ERROR else ""


def test_no_field_of_a_request_harms_the_executor_whatever_its_number() -> None:
    with Executor.from_directory(DEFAULT, load_config(overrides=list(OVERRIDES))) as executor:

        def last_of(request: Request) -> Response | None:
            responses: list[Response] = []
            request_id = executor.enqueue_request(request)
            while not (responses and responses[-1].is_final):
                new = executor.await_responses(request_id, PATIENCE_S)
                if not new:
                    return None
                responses += new
            return responses[-1]

        def send(request: Request) -> str:
            try:
                return judged(last_of(request))
            except EverbatchError as error:
                return judged_text(str(error))

        expected = last_of(GOOD)
        assert expected is not None and not expected.has_error()

        def canary() -> str:
            found = last_of(GOOD)
            is_same = found is not None and found.result.output_token_ids == expected.result.output_token_ids
            return "" if is_same else f"an honest request got {found}"

        probes = (Probe(name, partial(send, request)) for name, request in numbers.requests())
        assert sweep(probes, canary, EVERY) == []


def test_no_field_of_a_request_harms_gpt_manager_whatever_its_number() -> None:
    todo: list[tuple[int, Request]] = []
    told: dict[int, tuple[Response | None, str]] = {}
    arrived = threading.Condition()

    def get(most: int) -> list[tuple[int, Request]]:
        taken = todo[:most]
        del todo[: len(taken)]
        return taken

    def take(request_id: int, response: Response | None, is_final: bool, error: str) -> None:
        if is_final:
            with arrived:
                told[request_id] = (response, error)
                arrived.notify()

    ids = iter(range(1, 1 << 30))

    def last_of(request: Request) -> tuple[Response | None, str] | None:
        request_id = next(ids)
        todo.append((request_id, request))
        with arrived:
            arrived.wait_for(lambda: request_id in told, PATIENCE_S)
        return told.get(request_id)

    def send(request: Request) -> str:
        found = last_of(request)
        if found is None:
            return f"no answer within {PATIENCE_S:g} s"
        return judged_text(found[1]) or ("the engine failed" if "the engine failed" in found[1] else "")

    with CallbackLoop(load_engine(str(DEFAULT), load_config(overrides=list(OVERRIDES))), get, take):
        expected = last_of(GOOD)
        assert expected is not None and expected[0] is not None

        def canary() -> str:
            found = last_of(GOOD)
            is_same = found is not None and found[0] is not None and tokens(found[0]) == tokens(expected[0])
            return "" if is_same else f"an honest request got {found}"

        probes = (Probe(name, partial(send, request)) for name, request in numbers.requests())
        assert sweep(probes, canary, EVERY) == []


def test_no_sampling_parameter_harms_the_llm_api_whatever_its_number() -> None:
    """What is wrong raises in the caller's own thread: an EverbatchError, or a TypeError as any call of Python does."""
    plain = SamplingParams(max_tokens=3)
    with LLM(DEFAULT) as llm:

        def send(field: str, name: str) -> str:
            try:
                asked = SamplingParams(**{"max_tokens": 3, field: VALUES[name]})
                if asked.max_tokens is None:
                    return ""  # as many as fit: a good request, but a long one
                llm.generate_async([5, 6, 7], asked).result(timeout=PATIENCE_S)
            except (EverbatchError, TypeError) as error:
                return judged_text(str(error)) or ("the engine failed" if "the engine failed" in str(error) else "")
            return ""

        expected = llm.generate([[5, 6, 7]], plain)[0].outputs[0].token_ids

        def canary() -> str:
            found = llm.generate([[5, 6, 7]], plain)[0].outputs[0].token_ids
            return "" if found == expected else f"an honest request got {found}"

        names = [(field.name, name) for field in fields(SamplingParams) for name in VALUES]
        assert sweep((Probe(" = ".join(each), partial(send, *each)) for each in names), canary, EVERY) == []


def test_no_field_of_a_record_harms_the_bindings_whatever_its_number(tmp_path: Path) -> None:
    from tools.make_random_model import make_random_model

    path = make_random_model(tmp_path, seed=1, family="llama", vocab_size=96)
    with make_executor(path, make_config()) as executor:

        def last_of(request: trtllm.Request) -> trtllm.Response | None:
            responses: list[trtllm.Response] = []
            request_id = executor.enqueue_request(request)
            while not (responses and (responses[-1].has_error() or responses[-1].result.is_final)):
                new = executor.await_responses(request_id, timedelta(seconds=PATIENCE_S))
                if not new:
                    return None
                responses += new
            return responses[-1]

        def send(make: Callable[[], trtllm.Request]) -> str:
            try:
                request = make()
            except (TypeError, RuntimeError) as error:  # pybind's classes of errors for a wrong type or value
                return "" if len(str(error)) < 10_000 else f"an error of {len(str(error))} characters"
            found = last_of(request)
            if found is None:
                return f"no answer within {PATIENCE_S:g} s"
            message = found.error_msg if found.has_error() else ""
            return judged_text(message) or ("the engine failed" if "the engine failed" in message else "")

        expected = last_of(trtllm.Request([5, 6, 7], 3))
        assert expected is not None and not expected.has_error()

        def canary() -> str:
            found = last_of(trtllm.Request([5, 6, 7], 3))
            is_same = found is not None and found.result.output_token_ids == expected.result.output_token_ids
            return "" if is_same else f"an honest request got {found}"

        assert sweep((Probe(name, partial(send, make)) for name, make in numbers.records()), canary, EVERY) == []


def test_no_key_of_the_configuration_ends_in_anything_but_an_error_that_names_it() -> None:
    def send(key: str, override: str) -> str:
        try:
            config = load_config(overrides=[override])
            assert crossed(config) == config
            core = EngineCore(config, HashWorkerGroup(free_bytes=1 << 20))
            core.enqueue(1, GOOD)
            core.step()
        except ConfigError as error:
            names_it = key in str(error) or "at start" in str(error)
            return judged_text(str(error)) or ("" if names_it else f"{key} is not named: {str(error)[:200]}")
        return ""

    probes = (Probe(name, partial(send, name.partition(" ")[0], each)) for name, each in numbers.settings())
    assert sweep(probes, lambda: "", EVERY) == []


def test_no_parameter_of_a_config_pbtxt_ends_in_anything_but_an_error_that_names_it() -> None:
    def send(role: str, key: str, text: str) -> str:
        try:
            settings = apply_parameters(role, {"parameters": {key: {"string_value": text}}}, EngineConfig())
        except ConfigError as error:
            return judged_text(str(error)) or ("" if key in str(error) else f"{key} is not named: {str(error)[:200]}")
        return "" if crossed(settings.config) == settings.config else "the configuration changes on its way"

    probes = (
        Probe(f"{role}.{parameter.key} = {name}", partial(send, role, parameter.key, numbers.as_json(value).strip('"')))
        for role, parameters in PARAMETERS.items()
        for parameter in parameters
        for name, value in VALUES.items()
    )
    assert sweep(probes, lambda: "", EVERY) == []


def crossed(config: EngineConfig) -> EngineConfig:
    """As it arrives at the engine's clients."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig)


def test_every_nested_field_of_a_request_is_swept() -> None:
    paths = {".".join(path) for path in numbers.field_paths(Request)}
    assert {
        "timeout_s",
        "sampling_config.top_p",
        "session.session_len",
        "retention.token_ranges.duration_s",
        "lora.weights.shape",
        "output_config.additional_outputs.name",
    } <= paths


def test_a_sweep_tells_of_a_probe_and_of_a_canary_that_fail() -> None:
    probes = [Probe("good", lambda: ""), Probe("bad", lambda: "it hurts")]
    states: Iterator[str] = iter(["", "it is dead"])
    assert sweep(probes, lambda: next(states)) == ["bad: it hurts", "after bad: it is dead"]
