"""Logits post-processors: named, batched, in place or returned; nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend.api import ConfigError, EngineConfig, ErrorCode, OutputConfig, Request, SamplingConfig
from backend.executor import Executor
from backend.worker.post_processors import PostProcessors
from tests.executor.helpers import drain, tokens_of
from tests.model.gathering import Engine, engine_config, tensor_of
from tests.model.processors import force_42
from tests.model.tiers import TORCH, TierCase

PROMPT = [5, 6, 7, 8, 9]
PLAIN = OutputConfig()
Checkpoint = Callable[[str], Path]


def returns_42(request_id: int, logits: Tensor, token_ids: Any, stream: int) -> Tensor:
    """Four arguments, and nothing in place."""
    other = torch.full_like(logits, -1e9)
    other[..., 42] = 0.0
    return other


def make(checkpoint: Checkpoint, tier: TierCase, batched: Any = None, **named: Any) -> Engine:
    return Engine(engine_config(checkpoint("llama2"), tier), PostProcessors(named, batched))


@pytest.mark.feature("000-36", "000-37", "001-18")
@pytest.mark.parametrize("function", [force_42, returns_42])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}])
def test_only_the_request_that_names_it_is_touched(
    checkpoint: Checkpoint, tier: TierCase, function: Any, sampling: dict[str, float]
) -> None:
    engine = make(checkpoint, tier, mine=function)
    config = SamplingConfig(**sampling)
    expected = engine.answer(PROMPT, 6, PLAIN, sampling_config=config).result.output_token_ids[0]
    forced = engine.ask(PROMPT, 6, PLAIN, sampling_config=config, logits_post_processor="mine")
    other = engine.ask(PROMPT, 6, PLAIN, sampling_config=config)
    engine.run()
    assert engine.tokens(forced, PROMPT) == [42] * 6
    assert engine.tokens(other, PROMPT) == expected[5:] != [42] * 6


def test_the_slot_of_a_request_with_one_goes_to_a_request_without(checkpoint: Checkpoint, tier: TierCase) -> None:
    engine = make(checkpoint, tier, mine=force_42)
    expected = engine.answer(PROMPT, 4, PLAIN).result.output_token_ids
    engine.answer(PROMPT, 4, PLAIN, logits_post_processor="mine")
    assert engine.answer(PROMPT, 4, PLAIN).result.output_token_ids == expected


@pytest.mark.feature("000-36", "000-38")
def test_a_processor_is_told_the_request_its_tokens_the_stream_and_the_client(
    checkpoint: Checkpoint, tier: TierCase
) -> None:
    calls: list[tuple[Any, ...]] = []

    def note(request_id: int, logits: Tensor, token_ids: Any, stream: int, client_id: int | None) -> None:
        calls.append((request_id, tuple(logits.shape), token_ids, stream, client_id))

    engine = make(checkpoint, tier, note=note)
    request_id = engine.ask(PROMPT, 3, PLAIN, logits_post_processor="note", client_id=77)
    engine.run()
    tokens = engine.responses[request_id][-1].result.output_token_ids[0]
    shape = (1, 1, engine.core.model.vocab_size)
    assert calls == [(request_id, shape, [tokens[: 5 + n]], 0, 77) for n in range(3)]


def test_it_sees_raw_logits_ahead_of_penalties_and_log_probs_are_of_what_it_leaves(
    checkpoint: Checkpoint, tier: TierCase
) -> None:
    seen: list[Tensor] = []

    def halve(request_id: int, logits: Tensor, token_ids: Any, stream: int) -> None:
        seen.append(logits[0, 0].clone())
        logits *= 0.5

    engine = make(checkpoint, tier, halve=halve)
    output = OutputConfig(return_generation_logits=True, return_log_probs=True)
    config = SamplingConfig(repetition_penalty=1.5, logit_bias={3: 5.0})
    result = engine.answer(PROMPT, 4, output, sampling_config=config, logits_post_processor="halve").result
    raw = tensor_of(result.generation_logits)[0]
    torch.testing.assert_close(torch.stack(seen), raw, atol=0, rtol=0)
    chosen = torch.tensor(result.output_token_ids[0][5:])
    expected = torch.log_softmax(raw * 0.5, dim=-1).gather(1, chosen[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(result.log_probs[0]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.feature("000-39")
def test_the_batched_one_is_called_once_a_step_for_all_that_opted_in(checkpoint: Checkpoint, tier: TierCase) -> None:
    calls: list[tuple[list[int], list[Any], list[Any]]] = []

    def batched(ids: list[int], logits: list[Tensor], tokens: list[Any], stream: int, clients: list[Any]) -> None:
        calls.append((ids, [len(beams[0]) for beams in tokens], clients))
        for of_one in logits:
            force_42(0, of_one, None, stream, None)

    engine = make(checkpoint, tier, batched)
    name = Request.BATCHED_POST_PROCESSOR_NAME
    ids = [engine.ask(PROMPT, 5, PLAIN, logits_post_processor=name, client_id=n) for n in range(4)]
    engine.run()
    assert [engine.tokens(request_id, PROMPT) for request_id in ids] == [[42] * 5] * 4
    assert calls == [(ids, [5 + n] * 4, [0, 1, 2, 3]) for n in range(5)]


def test_the_batched_one_may_return_tensors(checkpoint: Checkpoint, tier: TierCase) -> None:
    engine = make(checkpoint, tier, lambda ids, logits, tokens, stream: [returns_42(0, x, None, 0) for x in logits])
    ids = [engine.ask(PROMPT, 2, PLAIN, logits_post_processor="batched") for _ in range(2)]
    engine.run()
    assert [engine.tokens(request_id, PROMPT) for request_id in ids] == [[42] * 2] * 2


def test_an_unknown_name_is_refused_with_those_that_there_are(checkpoint: Checkpoint) -> None:
    error = make(checkpoint, TORCH, force_42, mine=force_42).answer(PROMPT, 2, PLAIN, logits_post_processor="yours")
    assert error.error_code is ErrorCode.INVALID_ARGUMENT
    assert error.error_msg == (
        "logits post-processor 'yours' is not known, there are: mine, batched (model.logits_post_processors)"
    )
    none = make(checkpoint, TORCH).answer(PROMPT, 2, PLAIN, logits_post_processor="batched")
    assert "there are: none" in none.error_msg


@pytest.mark.feature("000-40", "001-19")
@pytest.mark.parametrize("name", ["mine", "batched"])
def test_static_batches_refuse_it_and_the_others_of_the_batch_finish(checkpoint: Checkpoint, name: str) -> None:
    config = engine_config(checkpoint("llama2"), TORCH, scheduler={"batching": "static"})
    engine = Engine(config, PostProcessors({"mine": force_42}, force_42))
    mate = engine.ask(PROMPT, 3, PLAIN)
    refused = engine.ask(PROMPT, 3, PLAIN, logits_post_processor=name)
    engine.run()
    (error,) = engine.responses[refused]
    assert error.error_code is ErrorCode.UNSUPPORTED
    assert error.error_msg == (
        "logits post-processors do not run with static batches; leave logits_post_processor out, or serve with "
        "scheduler.batching=fused"
    )
    assert len(engine.tokens(mate, PROMPT)) == 3


def test_a_batched_one_that_returns_too_few_tensors_fails_for_all(checkpoint: Checkpoint) -> None:
    engine = make(checkpoint, TORCH, lambda ids, logits, tokens, stream: logits[:-1])
    ids = [engine.ask(PROMPT, 2, PLAIN, logits_post_processor="batched") for _ in range(2)]
    engine.run()
    assert ["failed (ValueError)" in engine.responses[request_id][-1].error_msg for request_id in ids] == [True, True]


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("raised", [KeyError, SystemExit])
def test_one_that_raises_ends_its_requests_and_nobody_else(
    checkpoint: Checkpoint, tier: TierCase, is_batched: bool, raised: type[BaseException]
) -> None:
    def fails(*arguments: Any) -> None:
        tokens = arguments[2][0] if is_batched else arguments[2]
        if len(tokens[0]) == 7:
            raise raised("secret")

    engine = make(checkpoint, tier, fails, mine=fails)
    expected = engine.answer(PROMPT, 6, PLAIN).result.output_token_ids
    name = "batched" if is_batched else "mine"
    wrong = engine.ask(PROMPT, 6, PLAIN, logits_post_processor=name, streaming=True)
    right = engine.ask(PROMPT, 6, PLAIN)
    engine.run()
    *parts, error = engine.responses[wrong]
    assert len(parts) == 2, "of what it had left alone"
    assert error.error_code is ErrorCode.INTERNAL
    assert error.error_msg == f"logits post-processor {name!r} failed ({raised.__name__}); the engine's log says why"
    assert engine.responses[right][-1].result.output_token_ids == expected
    assert engine.core.kv.stats().used_num_blocks == 0


def test_a_tensor_of_another_shape_is_a_failure(checkpoint: Checkpoint) -> None:
    engine = make(checkpoint, TORCH, mine=lambda request_id, logits, token_ids, stream: logits[0])
    assert "failed (ValueError)" in engine.answer(PROMPT, 2, PLAIN, logits_post_processor="mine").error_msg


@pytest.mark.parametrize("bad", [{"": force_42}, {"batched": force_42}, {"mine": 3}])
def test_names_and_callables_are_checked_at_once(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="logits post-processor"):
        PostProcessors(bad)


@pytest.mark.parametrize("path", ["nothing", "no.such.module:f", "tests.model.processors:no_such", ":f", "m:"])
def test_an_import_path_is_checked_at_the_start(checkpoint: Checkpoint, path: str) -> None:
    config = engine_config(checkpoint("llama2"), TORCH, model={"logits_post_processors": (f"mine={path}",)})
    with pytest.raises(ConfigError, match=r"model.logits_post_processors has 'mine="):
        Engine(config)


@pytest.mark.feature("000-36", "000-39")
def test_an_engine_process_imports_them_and_logits_cross_its_socket(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = {
        "logits_post_processors": ("mine=tests.model.processors:force_42",),
        "batched_logits_post_processor": "tests.model.processors:force_42_of_all",
    }
    config: EngineConfig = engine_config(checkpoint("llama2"), TORCH, reuse=False, model=model)
    output = OutputConfig(return_context_logits=True, return_generation_logits=True, exclude_input_from_output=True)
    here = Engine(config).answer(PROMPT, 3).result
    with Executor.launch(config, str(tmp_path / "s" / "engine.sock")) as executor:
        ids = [
            executor.enqueue_request(Request(PROMPT, 3, output_config=output, logits_post_processor=name))
            for name in ("mine", "batched", "")
        ]
        got = drain(executor, ids)
        assert [tokens_of(got[request_id]) for request_id in ids[:2]] == [[42] * 3] * 2
        plain = got[ids[2]][-1].result
        for name in ("context_logits", "generation_logits"):
            crossed, kept = tensor_of(getattr(plain, name)), tensor_of(getattr(here, name))
            torch.testing.assert_close(crossed, kept, atol=1e-5, rtol=1e-5)


def test_from_directory_takes_callables(checkpoint: Checkpoint) -> None:
    config = engine_config(checkpoint("llama2"), TORCH)
    output = OutputConfig(exclude_input_from_output=True)
    with Executor.from_directory(checkpoint("llama2"), config, {"mine": force_42}) as executor:
        request_id = executor.enqueue_request(Request(PROMPT, 2, output_config=output, logits_post_processor="mine"))
        assert tokens_of(drain(executor, [request_id])[request_id]) == [42, 42]
