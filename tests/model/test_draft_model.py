"""Draft models: tokens are those of plain decoding, and all guesses of the model at itself are right, as its KV always is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from backend.api import ConfigError, EngineConfig, OutputConfig, Request, Result, SessionConfig, TensorData
from backend.api.config.schema import KvCacheConfig, LoraSection, ModelConfigSection, SchedulerConfig, SpeculationConfig
from backend.api.lora import LoraConfig
from backend.core.step import Row
from backend.engine.core import EngineCore
from backend.worker.group import InProcessWorkerGroup
from backend.worker.input_batch import InputBatch
from tests.fakes.drafters import Asker, FixedPassCost
from tests.model.adapters import make_adapter
from tests.model.test_speculation import answers, check_same, make_core, one_of_each
from tools.make_draft_pair import make_draft_pair
from tools.make_random_model import make_random_model

OUTPUT = OutputConfig(return_log_probs=True, exclude_input_from_output=True)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model with the same vocabulary, of another shape."""
    directory = tmp_path_factory.mktemp("draft")
    return make_random_model(directory, "qwen3", seed=99, num_hidden_layers=1, hidden_size=32)


def drafting_core(
    model: Path, draft: Path, kernels: str, asks: bool = True, lora: bool = False, **pool: int
) -> EngineCore:
    config = EngineConfig(
        ModelConfigSection(path=str(model), dtype="float32", device="cpu", kernels=kernels, num_threads=1),
        KvCacheConfig(
            block_size=32, max_tokens=pool.get("pool_tokens", 32 * 60), chunk_blocks=pool.get("chunk_blocks", -1)
        ),
        SchedulerConfig(max_batch_size=8, max_num_tokens=pool.get("max_num_tokens", 256), policy="max_utilization"),
        lora=LoraSection(enabled=lora),
        speculation=SpeculationConfig(mode="draft_model", draft_model=str(draft)),
    )
    workers = InProcessWorkerGroup(
        config.model, config.scheduler, config.kv_cache, lora=config.lora, speculation=config.speculation
    )
    core = EngineCore(config, workers)
    if asks:
        core.scheduler._drafter = Asker()
    return core


def positions_of(core: EngineCore) -> list[int]:
    """Of the draft model: the position of each token that it runs from now on."""
    draft, positions = core.workers.runner.draft_model, list[int]()
    run = draft._tier.run

    def noting(batch: InputBatch, rows: list[Row], *arguments: Any) -> Any:
        positions.extend(at for row in rows for at in range(row.num_computed, row.num_computed + row.num_tokens))
        return run(batch, rows, *arguments)

    draft._tier = SimpleNamespace(run=noting)
    return positions


def finish(core: EngineCore, requests: dict[int, Request]) -> dict[int, Result]:
    """The results of requests whose adapters are read by other threads."""
    told: dict[int, Result] = {}
    for request_id, request in requests.items():
        core.enqueue(request_id, request)
    until = time.monotonic() + 20
    while len(told) < len(requests):
        core.begin_poll()
        for response in [*core.take_responses(), *core.step()]:
            assert not response.has_error(), response.error_msg
            told[response.request_id] = response.result
        assert time.monotonic() < until
    return told


def greedy_requests(count: int, num_tokens: int = 50) -> dict[int, Request]:
    """Prompts of different lengths that begin with the same 40 tokens, so that most share a block and copy a part of another."""
    start = [Random(0).randrange(64) for _ in range(40)]
    return {
        number: Request(
            [*start, *(Random(number).randrange(64) for _ in range(7 * number))], num_tokens, output_config=OUTPUT
        )
        for number in range(1, count + 1)
    }


@pytest.mark.parametrize(("evict_every", "chunk_blocks"), [(None, -1), (4, -1), (None, 1)])
def test_all_guesses_of_the_model_at_itself_are_right(
    checkpoint: Callable[[str], Path], kernels: str, evict_every: int | None, chunk_blocks: int
) -> None:
    """Eight at once, greedy. A wrong one would mean that the draft model has read KV of other tokens than the model has, or none:
    after an eviction, behind a common prefix, in a block that was copied, behind steps without guesses, in a pool that grows.
    """
    model, requests = checkpoint("llama2"), greedy_requests(8)
    plain = answers(make_core(model, kernels), requests)
    core = drafting_core(model, model, kernels, chunk_blocks=chunk_blocks)
    check_same(answers(core, requests, evict_every), plain, kernels)
    assert core.counters.draft_tokens_total > 100
    assert core.counters.accepted_draft_tokens_total == core.counters.draft_tokens_total
    assert (core.counters.recomputed_tokens_total > 0) == (evict_every is not None)


@pytest.mark.parametrize("max_num_tokens", [256, 20])
def test_the_draft_model_runs_no_token_twice_while_it_is_right(
    checkpoint: Callable[[str], Path], kernels: str, max_num_tokens: int
) -> None:
    """A prompt of 47 tokens, which runs along with the model's, in one step or in three. Of the 50 tokens of output the last one
    is never run, and the last guess of a step only when it is asked again; so what has run is each position up to some one, once.
    """
    core = drafting_core(checkpoint("llama2"), checkpoint("llama2"), kernels, max_num_tokens=max_num_tokens)
    positions = positions_of(core)
    core.enqueue(1, greedy_requests(1)[1])
    for end in (47,) if max_num_tokens == 256 else (20, 40, 47):
        core.step()
        assert positions == list(range(end))
    answers(core, {})
    assert core.counters.accepted_draft_tokens_total == core.counters.draft_tokens_total > 10
    assert positions == list(range(len(positions))) and 47 + 30 < len(positions) < 47 + 50


def test_what_is_copied_has_the_kv_of_both(checkpoint: Callable[[str], Path], kernels: str) -> None:
    """Within a namespace the second request takes over 40 tokens of the first one: a block, and a copy of 8 cells of the next."""
    model = checkpoint("llama2")
    core = drafting_core(model, model, kernels)
    first, second = (msgspec.structs.replace(each, cache_salt="a") for each in greedy_requests(2).values())
    answers(core, {1: first})
    positions = positions_of(core)
    output = OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)
    core.enqueue(2, msgspec.structs.replace(second, output_config=output))
    while core.has_work:
        responses = core.step()
    metrics = responses[-1].result.perf_metrics
    assert metrics.num_cached_tokens == 40
    assert positions == list(range(40, 40 + len(positions)))
    assert metrics.num_accepted_draft_tokens == metrics.num_draft_tokens > 10


@pytest.mark.parametrize("evict_every", [None, 5])
def test_guesses_of_another_model_change_no_token(
    checkpoint: Callable[[str], Path], other: Path, kernels: str, evict_every: int | None
) -> None:
    """Rows that sample in every way, beside each other: of random models one guess in a hundred is right."""
    model = checkpoint("llama2")
    plain = answers(make_core(model, kernels), one_of_each())
    core = drafting_core(model, other, kernels)
    check_same(answers(core, one_of_each(), evict_every), plain, kernels)
    counters = core.counters
    assert counters.draft_tokens_total > 200 > 4 * counters.accepted_draft_tokens_total


def test_sampled_guesses_of_the_model_at_itself(checkpoint: Callable[[str], Path], kernels: str) -> None:
    """The draft model guesses the likeliest token, so that of sampled rows some guesses are right and some are wrong."""
    model = checkpoint("llama2")
    plain = answers(make_core(model, kernels), one_of_each())
    core = drafting_core(model, model, kernels)
    check_same(answers(core, one_of_each()), plain, kernels)
    assert 20 < core.counters.accepted_draft_tokens_total < core.counters.draft_tokens_total


def test_a_pool_that_is_too_small_and_steps_that_cut_prompts(checkpoint: Callable[[str], Path], kernels: str) -> None:
    """Eight sequences of up to 150 tokens need 40 blocks of 32; the pool has 18, so some are paused and come back. A step takes
    24 tokens, so that prompts are cut, and the draft model's passes too.
    """
    model, requests = checkpoint("llama2"), greedy_requests(8)
    plain = answers(make_core(model, kernels), requests)
    core = drafting_core(model, model, kernels, pool_tokens=18 * 32, max_num_tokens=24)
    check_same(answers(core, requests), plain, kernels)
    assert core.counters.recomputed_tokens_total > 0
    assert core.counters.accepted_draft_tokens_total == core.counters.draft_tokens_total > 50


def test_rows_with_adapters_say_what_they_say_without_guesses(
    checkpoint: Callable[[str], Path], kernels: str, tmp_path: Path
) -> None:
    """The draft model is the model without adapters: of rows that have none all guesses are right, of the others some are not.
    Two adapters, of two and three rows, beside two plain ones; all begin alike, which is other KV for each adapter.
    """
    model, requests = checkpoint("llama2"), greedy_requests(7)
    paths = [make_adapter(model, tmp_path / str(seed), seed) for seed in (1, 2)]
    output = OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)
    for number, request in requests.items():
        lora = LoraConfig(number % 3, path=str(paths[number % 3])) if number % 3 < 2 else None
        requests[number] = msgspec.structs.replace(request, lora=lora, output_config=output, cache_salt="one client")
    plain, core = (drafting_core(model, model, kernels, asks, lora=True) for asks in (False, True))
    plain.scheduler._drafter = None
    expected, told = finish(plain, requests), finish(core, requests)
    for number, result in told.items():
        assert result.output_token_ids == expected[number].output_token_ids
        metrics = result.perf_metrics
        assert (metrics.num_accepted_draft_tokens == metrics.num_draft_tokens) == (number % 3 == 2)
        assert metrics.num_draft_tokens > 10
    assert len({tuple(result.output_token_ids[0]) for result in told.values()}) == 7


def test_the_draft_model_lets_embeddings_pass_and_runs_what_takes_their_slot(
    checkpoint: Callable[[str], Path], other: Path
) -> None:
    """The embeddings of the model are 48 wide, those of the draft model 32, which therefore cannot run such a prompt."""
    model, given = checkpoint("llama2"), TensorData("float32", (2, 48), np.full(96, 0.1, np.float32).tobytes())
    embedded = Request([131, 132, 5, 6], 20, output_config=OUTPUT, prompt_embeddings=given, speculation=False)
    core, plain = drafting_core(model, other, "torch"), make_core(model, "torch")
    positions = positions_of(core)
    check_same(answers(core, {1: embedded}), answers(plain, {1: embedded}), "torch")
    assert not positions and not core.counters.draft_tokens_total
    requests = greedy_requests(1)
    check_same(answers(core, requests), answers(plain, requests), "torch")
    assert positions and core.counters.draft_tokens_total > 20


def test_who_begins_to_guess_late_is_right_as_well(checkpoint: Callable[[str], Path], kernels: str) -> None:
    """The first turn of a session runs without guesses, so that the draft model has not seen its output; the second one asks."""
    model = checkpoint("llama2")
    core, plain = drafting_core(model, model, kernels), make_core(model, kernels)
    told = []
    for each in (core, plain):
        first = Request([3, 4, 5], 60, output_config=OUTPUT, session=SessionConfig(1, start=True), speculation=False)
        answers(each, {1: first})
        assert not each.counters.draft_tokens_total
        each.begin_poll()
        told.append(answers(each, {2: Request([6, 7], 40, output_config=OUTPUT, session=SessionConfig(1))})[2])
    assert told[0][0] == told[1][0]
    assert core.counters.accepted_draft_tokens_total == core.counters.draft_tokens_total > 10


def test_a_cancelled_neighbour_leaves_the_others_alone(checkpoint: Callable[[str], Path], kernels: str) -> None:
    """Requests 1 to 4 are cancelled after some steps; their blocks go to those that come then."""
    model, requests = checkpoint("llama2"), greedy_requests(8)
    plain = answers(make_core(model, kernels), requests)
    core = drafting_core(model, model, kernels, pool_tokens=20 * 32)
    for request_id in range(1, 5):
        core.enqueue(request_id, requests[request_id])
    for _ in range(6):
        core.step()
    for request_id in range(1, 5):
        core.cancel(request_id)
    core.take_responses()
    told = answers(core, {request_id: requests[request_id] for request_id in range(5, 9)})
    check_same(told, {request_id: plain[request_id] for request_id in range(5, 9)}, kernels)
    assert core.counters.accepted_draft_tokens_total == core.counters.draft_tokens_total > 50
    assert core.kv.stats().used_num_blocks == 0


def test_the_engine_asks_for_what_pays(checkpoint: Callable[[str], Path], other: Path, native_kernels: None) -> None:
    """Guesses that are always right are asked for in nearly each step, those that never are a few times."""
    model, requests = checkpoint("llama2"), {1: Request([1, 2, 3], 300, output_config=OUTPUT)}
    tried = []
    for draft in (model, other):
        core = drafting_core(model, draft, "native", asks=False)
        core.scheduler._drafter.cost = FixedPassCost()
        assert answers(core, requests) == answers(make_core(model, "native"), requests)
        tried.append(core.counters.draft_tokens_total)
    assert tried[0] > 200
    assert tried[1] < 50


def test_a_pair_of_the_benchmark_agrees_as_much_as_its_epsilon_has_it(tmp_path: Path, native_kernels: None) -> None:
    """With 0 the layers that the draft model lacks add nothing, so each guess is right; with 1 it is hardly ever."""
    shares = []
    for epsilon in (0.0, 0.05, 1.0):
        model, draft = make_draft_pair(tmp_path / str(epsilon), 1, epsilon)
        core = drafting_core(model, draft, "native")
        requests = greedy_requests(4)
        assert answers(core, requests) == answers(make_core(model, "native"), requests)
        shares.append(core.counters.accepted_draft_tokens_total / core.counters.draft_tokens_total)
    assert shares[0] == 1.0 > shares[1] > 0.3 > shares[2]
    with pytest.raises(ValueError, match="is to have 3 layers; use 1 to 2, for the model has 3"):
        make_draft_pair(tmp_path, 3, 0.5)


def test_the_pool_counts_the_kv_of_both(checkpoint: Callable[[str], Path], other: Path, kernels: str) -> None:
    """A token has as many bytes as in pools of their own; of the other model 1 layer, 2 heads, 16 numbers, keys and values."""
    alone = [make_core(each, kernels).model.kv_bytes_per_token for each in (checkpoint("llama2"), other)]
    if kernels == "torch":  # the native kernels pad heads
        assert alone[1] == 1 * 2 * 16 * 2 * 4
    core = drafting_core(checkpoint("llama2"), other, kernels)
    assert core.model.kv_bytes_per_token == sum(alone)
    draft = core.workers.runner.draft_model
    assert draft._storage.num_blocks == core.workers.runner.storage.num_blocks


def test_models_that_do_not_go_together_are_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, native_kernels: None
) -> None:
    model = checkpoint("llama2")
    small = make_random_model(tmp_path / "small", "llama", vocab_size=130)
    with pytest.raises(
        ConfigError, match="has a vocabulary of 130 tokens, the model one of 131: .* give a draft model of"
    ):
        drafting_core(model, small, "native")
    short = make_random_model(tmp_path / "short", "llama", max_position_embeddings=64)
    with pytest.raises(ConfigError, match="takes 64 tokens, model.max_seq_len is 512; use --set model.max_seq_len=64"):
        drafting_core(model, short, "native")
    with pytest.raises(ConfigError, match="sliding window of 24 tokens .* use --set speculation.mode=lookup"):
        drafting_core(checkpoint("mistral"), model, "native")
    with pytest.raises(ConfigError, match="speculation.draft_model: model nowhere: File does not exist"):
        drafting_core(model, Path("nowhere"), "native")
