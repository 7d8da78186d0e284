"""The runner of a GPU in the interpreter: whole engines, looking ahead, with graphs that are recorded and replayed by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from backend.api import AdditionalOutput, EngineConfig, OutputConfig, Request, Result, SamplingConfig
from backend.api.config.kv_bits import named
from backend.api.config.schema import (
    DEBUG_INPUTS,
    KvCacheConfig,
    ModelConfigSection,
    RecordsConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from backend.engine.core import EngineCore
from backend.worker.debug_tensors import DebugFetch
from backend.worker.device_runner import ladder_size
from backend.worker.graphs import Captured, Graphs, Step
from backend.worker.group import InProcessWorkerGroup
from backend.worker.post_processors import PostProcessors
from compat.tensorrt_llm import as_tensor
from tools.make_random_model import make_random_model

BLOCK_SIZE = 16
ASKED = [
    dict(),
    dict(temperature=0.9, seed=3),
    dict(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01, seed=4),
    dict(repetition_penalty=1.3, presence_penalty=0.2, logit_bias={5: 4.0, 7: -3.0}),
    dict(no_repeat_ngram_size=2),
    dict(temperature=1.1, top_p=0.9, top_p_decay=0.7, top_p_min=0.2, top_p_reset_ids=7, seed=5),
]
SPECIAL = dict(bad_words=[[3], [9, 4]], end_ids=(1, 2))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1
    )
    return make_random_model(tmp_path_factory.mktemp("model"), "llama3", head_dim=32, **sizes)


class Replays:
    """Stands for CUDA: what a graph returns lies where its capture put it, and is overwritten by each replay."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Step) -> Captured:
        result = step().clone()

        def replay() -> None:
            self.count += 1
            result.copy_(step())

        return Captured(replay, result)


def make_core(
    directory: Path,
    kernels: str,
    capture: Callable[[Step], Captured] | None = None,
    processors: PostProcessors | None = None,
    kv: str = "auto",
    blocks: int = 60,
    attention: Mapping[str, object] = MappingProxyType({}),
    records: RecordsConfig = RecordsConfig(),  # noqa: B008 (immutable)
    speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008 (immutable)
    **scheduler: object,
) -> EngineCore:
    config = EngineConfig(
        ModelConfigSection(
            path=str(directory),
            dtype="float32",
            device="cpu",
            kernels=kernels,
            gather_context_logits=True,
            gather_generation_logits=True,
            additional_outputs=("hidden_states",),
        ),
        KvCacheConfig(block_size=BLOCK_SIZE, max_tokens=blocks * BLOCK_SIZE, **named(kv), watermark=0.0, **attention),
        SchedulerConfig(max_batch_size=4, max_num_tokens=24, policy="max_utilization", **scheduler),
        records=records,
        speculation=speculation,
    )
    workers = InProcessWorkerGroup(
        config.model,
        config.scheduler,
        config.kv_cache,
        processors=processors,
        debug=DebugFetch.of(config),
        speculation=speculation,
    )
    workers._graphs = lambda: Graphs(capture and (lambda: capture))
    return EngineCore(config, workers)


def finish(core: EngineCore, requests: list[Request]) -> list[Result]:
    """The final result of each."""
    for number, request in enumerate(requests):
        core.enqueue(number, request)
    results = {}
    for _ in range(300):
        if not core.has_work:
            break
        for response in core.step():
            assert not response.has_error(), response.error_msg
            results[response.request_id] = response.result
        core.check_integrity()
    assert not core.has_work
    return [results[number] for number in range(len(requests))]


def tokens_of(result: Result) -> list[list[int]]:
    return [[entry.token_id for entry in step] for step in result.top_log_probs]


def request(length: int, num_tokens: int, variety: int = 0, top: int | None = None, **fields: object) -> Request:
    prompt = [(11 * i + 5 * variety) % 131 for i in range(length)]
    output = OutputConfig(exclude_input_from_output=True, return_log_probs=top is not None, top_log_probs=top or 0)
    more = {name: fields.pop(name) for name in ("bad_words", "end_ids") if name in fields}
    return Request(prompt, num_tokens, sampling_config=SamplingConfig(**fields), output_config=output, **more)


def test_tokens_and_log_probabilities_are_those_of_the_torch_tier_whatever_is_asked(directory: Path) -> None:
    requests = [request(9 + 8 * n, 5, n, **asked) for n, asked in enumerate(ASKED)]
    requests.append(request(6, 6, 9, top=3, temperature=0.8, min_tokens=3, seed=1, **SPECIAL))
    capture = Replays()
    expected = finish(make_core(directory, "torch"), requests)
    core = make_core(directory, "triton", capture, look_ahead=True)
    core.workers.runner.warm_up()
    assert len(core.workers.runner.graphs) == 6, "of three kinds, the smallest and the largest"
    measured = finish(core, requests)
    for mine, theirs in zip(measured, expected, strict=True):
        assert mine.output_token_ids == theirs.output_token_ids and mine.finish_reasons == theirs.finish_reasons
    own, theirs = (torch.tensor(results[-1].log_probs) for results in (measured, expected))
    assert torch.allclose(own, theirs, atol=1e-4)
    assert tokens_of(measured[-1]) == tokens_of(expected[-1])
    assert capture.count > 3


def test_steps_of_greedy_rows_and_of_random_ones_have_the_torch_tier_s_tokens(directory: Path) -> None:
    """Without a row that needs more, tokens are chosen and appended within the graph. The random rows end first."""
    requests = [request(9, 9), *(request(5 + 4 * n, 6, n, **ASKED[n]) for n in (1, 2))]
    capture = Replays()
    measured = finish(make_core(directory, "triton", capture, look_ahead=True), requests)
    expected = finish(make_core(directory, "torch"), requests)
    assert [result.output_token_ids for result in measured] == [result.output_token_ids for result in expected]
    assert capture.count > 3


@pytest.mark.parametrize("kv", ["auto", "k8v4"])
def test_a_pool_that_is_too_small_pauses_and_recomputes_without_a_trace(directory: Path, kv: str) -> None:
    requests = [request(16, 18, n) for n in (1, 2)]
    kernels = "torch" if kv == "auto" else "triton"  # the torch tier has no narrow KV
    roomy = finish(make_core(directory, kernels, Replays(), kv=kv, look_ahead=True), requests)
    core = make_core(directory, "triton", Replays(), kv=kv, blocks=4, look_ahead=True, max_chunk_tokens=7)
    cramped = finish(core, requests)
    assert core.counters.pauses_total > 0
    assert [result.output_token_ids for result in cramped] == [result.output_token_ids for result in roomy]


def test_a_window_and_sink_tokens_reach_every_step_of_the_runner(directory: Path) -> None:
    """Prompts in two chunks, then steps that only generate. Where the sink tokens were lost in either, tokens would differ."""
    attention = dict(max_attention_window=(10,), sink_tokens=3)
    requests = [request(30, 6, n) for n in (1, 2)]
    expected = finish(make_core(directory, "torch", attention=attention), requests)
    measured = finish(make_core(directory, "triton", Replays(), attention=attention, look_ahead=True), requests)
    without = finish(make_core(directory, "torch", attention=dict(max_attention_window=10)), requests)
    ids = [[result.output_token_ids for result in results] for results in (measured, expected, without)]
    assert ids[0] == ids[1] != ids[2]


def test_a_step_that_cannot_be_captured_runs_eagerly_and_the_log_says_why(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(step: Step) -> Captured:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    caplog.set_level(logging.WARNING, logger="everbatch.worker")
    requests = [request(5, 4)]
    measured = finish(make_core(directory, "triton", fail), requests)
    assert measured[0].output_token_ids == finish(make_core(directory, "torch"), requests)[0].output_token_ids
    (line,) = [text for record in caplog.records if "CUDA graphs" in (text := record.getMessage())]
    assert line.startswith("CUDA graphs: off, because capturing a step of ") and line.endswith("is capturing")


def test_logits_other_outputs_and_post_processors_are_those_of_the_torch_tier(directory: Path) -> None:
    def reverse(request_id: int, logits: torch.Tensor, token_ids: list[list[int]], stream: int) -> torch.Tensor:
        return -logits

    def results(kernels: str, **scheduler: object) -> list[Result]:
        core = make_core(
            directory,
            kernels,
            Replays(),
            PostProcessors({"reverse": reverse}),
            blocks=12,
            max_chunk_tokens=7,
            **scheduler,
        )
        return finish(core, requests)

    asked = OutputConfig(
        exclude_input_from_output=True,
        return_context_logits=True,
        return_generation_logits=True,
        additional_outputs=(AdditionalOutput("hidden_states", True),),
        prompt_log_probs=2,
        prompt_hidden_states="all",
        prompt_logits_of=(7, 130),
    )
    requests = [
        Request([(7 * i) % 131 for i in range(20)], 5, output_config=asked),
        Request([(5 * i) % 131 for i in range(9)], 5, output_config=asked, logits_post_processor="reverse"),
        request(6, 9, 4),
    ]
    for mine, theirs in zip(results("triton", look_ahead=True), results("torch"), strict=True):
        assert mine.output_token_ids == theirs.output_token_ids
        assert (mine.context_logits is None) == (theirs.context_logits is None) == (mine.additional_outputs is None)
        if mine.context_logits is None:
            continue
        of_prompt = list(zip(mine.prompt_log_probs, theirs.prompt_log_probs, strict=True))
        assert all(own.top[0].token_id == other.top[0].token_id for own, other in of_prompt)
        assert all(own.log_prob == pytest.approx(other.log_prob, abs=1e-4) for own, other in of_prompt)
        for own, other in (
            (mine.context_logits, theirs.context_logits),
            (mine.generation_logits, theirs.generation_logits),
            (mine.prompt_hidden_states, theirs.prompt_hidden_states),
            (mine.prompt_logits, theirs.prompt_logits),
            (mine.additional_outputs["hidden_states"], theirs.additional_outputs["hidden_states"]),
            (mine.additional_context_outputs["hidden_states"], theirs.additional_context_outputs["hidden_states"]),
        ):
            assert own.shape == other.shape
            values = [torch.frombuffer(bytearray(tensor.data), dtype=torch.float32) for tensor in (own, other)]
            assert torch.allclose(*values, atol=1e-4)


def test_debug_tensors_are_those_of_the_torch_tier(directory: Path) -> None:
    """Ids of blocks and slots are the engine's, which plans both the same. Prompts of 30 tokens need two steps of 24."""
    records = RecordsConfig(
        max_debug_iterations=50, debug_tensors=(*DEBUG_INPUTS, "logits", "hidden_states"), max_iterations=50
    )
    told = []
    for kernels in ("torch", "triton"):
        core = make_core(directory, kernels, records=records, look_ahead=False)
        finish(core, [request(30, 3), request(5, 4, 1)])
        told.append(core.take_records())
    theirs, mine = told
    assert [step.iter for step in mine.debug_tensors] == [step.iter for step in mine.iterations]
    for own, other in zip(mine.debug_tensors, theirs.debug_tensors, strict=True):
        assert list(own.tensors) == list(other.tensors)
        for name, data in own.tensors.items():
            torch.testing.assert_close(as_tensor(data), as_tensor(other.tensors[name]), atol=1e-4, rtol=1e-4)
    assert "logits" not in mine.debug_tensors[0].tensors and "hidden_states" in mine.debug_tensors[1].tensors


def test_generation_logits_of_a_prompt_in_chunks_are_there_for_each_token(directory: Path) -> None:
    output = OutputConfig(exclude_input_from_output=True, return_generation_logits=True)
    core = make_core(directory, "triton", Replays(), max_chunk_tokens=4)
    (result,) = finish(core, [Request([(7 * i) % 131 for i in range(6)], 2, output_config=output)])
    logits = torch.frombuffer(bytearray(result.generation_logits.data), dtype=torch.float32).view(2, -1)
    assert logits.argmax(dim=-1).tolist() == result.output_token_ids[0]


def test_the_ladder_has_a_size_for_every_batch_and_pads_little() -> None:
    sizes = [ladder_size(rows) for rows in range(1, 1100)]
    assert all(rows <= size < max(rows + 8, 1.5 * rows + 1) for rows, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 60
