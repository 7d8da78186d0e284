"""The worker group with a step in flight: failures, and pools that do not grow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Never

import pytest
import torch

from backend.api import EngineConfig, OutputConfig, Request, SamplingConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.core.step import NewRow, SampledToken, StepInput, StepOutput, WorkersLost
from backend.engine.core import EngineCore
from backend.scheduler.plan import StepPlan
from backend.worker.group import InProcessWorkerGroup
from backend.worker.input_batch import InputBatch
from backend.worker.kv_storage import KVStorage
from backend.worker.pipeline import Pending

PATIENCE_S = 20.0  # of a thread that waits for another


def make_core(directory: Path, look_ahead: bool = True) -> EngineCore:
    config = EngineConfig(
        ModelConfigSection(path=str(directory), dtype="float32", device="cpu", kernels="torch", num_threads=1),
        KvCacheConfig(block_size=4, max_tokens=400),
        SchedulerConfig(max_batch_size=4, look_ahead=look_ahead),
    )
    return EngineCore(config, InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache))


def ask(core: EngineCore, request_id: int, prompt: list[int]) -> None:
    core.enqueue(request_id, Request(prompt, 6, output_config=OutputConfig(exclude_input_from_output=True)))


def finish(core: EngineCore) -> dict[int, object]:
    responses = {}
    while core.has_work:
        responses |= {response.request_id: response for response in core.step()}
    return responses


@pytest.mark.feature("001-34")
def test_a_step_is_planned_and_submitted_while_the_one_ahead_of_it_computes(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step computes until the second one is planned. If it were computed where it is submitted, none would be."""
    core, expected = make_core(checkpoint("llama2")), make_core(checkpoint("llama2"), look_ahead=False)
    order: list[tuple[str, int]] = []
    second_is_planned = threading.Event()
    execute, commit = core.workers.runner.execute, core.scheduler.commit

    def computing(step: StepInput) -> StepOutput:
        order.append(("computes", step.step_id))
        assert second_is_planned.wait(PATIENCE_S), "no step was planned meanwhile"
        output = execute(step)
        order.append(("computed", step.step_id))
        return output

    def planning(plan: StepPlan, step_id: int, started_ns: int) -> StepInput:
        order.append(("planned", step_id))
        if step_id == 1:
            second_is_planned.set()
        return commit(plan, step_id, started_ns)

    monkeypatch.setattr(core.workers.runner, "execute", computing)
    monkeypatch.setattr(core.scheduler, "commit", planning)
    for each in (core, expected):
        ask(each, 1, [1, 2, 3])
        ask(each, 2, [4, 5])
    answers, those_expected = finish(core), finish(expected)
    for request_id in (1, 2):
        assert answers[request_id].result.output_token_ids == those_expected[request_id].result.output_token_ids
    assert order.index(("planned", 1)) < order.index(("computed", 0))
    steps = [step_id for event, step_id in order if event == "computes"]
    assert steps == sorted(steps), "steps are computed in the order of submission"
    core.close()


def test_blocks_are_read_behind_the_steps_in_flight(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads KV between two steps sees what the step in flight writes."""
    core, read_begins = make_core(checkpoint("llama2")), threading.Event()
    execute, storage = core.workers.runner.execute, core.workers.runner.storage
    order: list[str] = []

    def computing(step: StepInput) -> StepOutput:
        assert read_begins.wait(PATIENCE_S)
        order.append("computed")
        return execute(step)

    def reading(block_ids: list[int]) -> bytes:
        order.append("read")
        return b""

    monkeypatch.setattr(core.workers.runner, "execute", computing)
    monkeypatch.setattr(storage, "read", reading)
    ask(core, 1, [1, 2, 3])
    core.step()
    reader = threading.Thread(target=core.workers.read_blocks, args=([0],))
    reader.start()
    read_begins.set()
    reader.join(PATIENCE_S)
    core.close()
    assert order == ["computed", "read"]


@pytest.mark.parametrize("place", ["launch", "wait"])
def test_after_a_failed_step_nobody_gets_the_answer_of_another(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    caplog.set_level(logging.CRITICAL, logger="everbatch.engine")
    expected = make_core(checkpoint("llama2"), look_ahead=False)
    ask(expected, 2, [5, 6, 7])
    core = make_core(checkpoint("llama2"))
    runner, calls = core.workers.runner, []

    def launch(step: StepInput) -> Pending:
        calls.append(step.step_id)
        pending = original(step)
        if len(calls) == 4 and place == "launch":
            raise RuntimeError("out of memory")
        if len(calls) == 4:
            monkeypatch.setattr(type(pending), "wait", fail_once(type(pending).wait))
        return pending

    def fail_once(wait: Callable[[Pending], StepOutput]) -> Callable[[Pending], Never]:
        def failing(self: Pending) -> Never:
            monkeypatch.setattr(type(self), "wait", wait)
            raise RuntimeError("out of memory")

        return failing

    original = runner.launch
    monkeypatch.setattr(runner, "launch", launch)
    ask(core, 1, [1, 2, 3])
    assert "the model step failed" in finish(core)[1].error_msg
    ask(core, 2, [5, 6, 7])
    assert finish(core)[2].result.output_token_ids == finish(expected)[2].result.output_token_ids


def test_workers_that_are_lost_end_the_engine(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(checkpoint("llama2"))

    def launch(step: StepInput) -> Never:
        raise WorkersLost("the device is lost")

    monkeypatch.setattr(core.workers.runner, "launch", launch)
    ask(core, 1, [1, 2, 3])
    with pytest.raises(WorkersLost):
        finish(core)


def test_a_pool_whose_growth_failed_half_way_grows_later(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = KVStorage(3, (2,), torch.float32, torch.device("cpu"))
    storage.grow(4)
    for pool in storage.pools:
        pool.fill_(7)
    allocate = storage._allocate
    monkeypatch.setattr(storage, "_allocate", lambda count: allocate(count) if len(storage.pools[0]) == 4 else fail())
    with pytest.raises(MemoryError):
        storage.grow(8)
    monkeypatch.setattr(storage, "_allocate", allocate)
    storage.grow(8)
    assert storage.num_blocks == 8 and all(len(pool) == 8 and (pool[:4] == 7).all() for pool in storage.pools)


def fail() -> Never:
    raise MemoryError


def test_tokens_of_a_device_are_written_as_those_of_a_host_are() -> None:
    """Without the array that is the CPU's own memory, everything is sent."""
    batches = [InputBatch(3, 8, 4, torch.device("cpu")) for _ in range(2)]
    batches[1]._host_ids = None
    for batch in batches:
        batch.take_in([NewRow(slot, [slot + 1] * (5 - slot), 2, 0, [0, 1], SamplingConfig()) for slot in (2, 0)])
        batch.append_tokens([SampledToken(0, 50), SampledToken(2, 52)])
    assert torch.equal(batches[0].token_ids, batches[1].token_ids) and batches[0].num_tokens == batches[1].num_tokens
    assert batches[0].token_ids[0].tolist() == [1, 1, 1, 1, 1, 50, 0, 0]
