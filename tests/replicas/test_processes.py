"""Replicas as processes of this machine: the shares of one, and a real engine twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api import ConfigError, EngineConfig, OutputConfig, Request
from backend.api.config.schema import WorkersConfig
from backend.executor import Executor
from backend.executor.load import workers_of
from backend.replicas.processes import share_of_one
from backend.wire.client import wait_until
from tests.executor.helpers import drain, tokens_of
from tests.families.tiny import make
from tests.guided.processes import all_children, children_of
from tests.ranks.harness import PROMPTS, engine_config

OUTPUT = OutputConfig(exclude_input_from_output=True)


def descendants(program: bytes, others: Collection[int] = ()) -> list[int]:
    """Processes below this one that run such a program, without `others` and what these started."""
    found, waiting = [], children_of(os.getpid())
    while waiting:
        pid = waiting.pop()
        if pid in others:
            continue
        waiting += children_of(pid)
        with suppress(OSError):
            if program in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def of(replicas: int, **model: object) -> EngineConfig:
    config = EngineConfig(workers=WorkersConfig(replicas=replicas))
    return replace(config, model=replace(config.model, **model))


def test_a_replica_has_its_share_of_cores_and_memory() -> None:
    share = share_of_one(of(2), 8)
    assert (share.model.num_threads, share.kv_cache.free_memory_fraction) == (4, 0.125)
    assert not share.workers.has_replicas
    assert share_of_one(of(3, num_threads=7), 8).model.num_threads == 2


def test_what_cannot_be_shared_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"workers.replicas is 4, and this machine gives 2 threads .* use 2 or less"):
        share_of_one(of(4), 2)
    with pytest.raises(ConfigError, match=r"model.device is cuda:0.*workers.orchestrator=ray"):
        share_of_one(of(2, device="cuda:0"), 8)
    with pytest.raises(ConfigError, match="processes of their own"):
        workers_of(of(2))


@pytest.mark.slow("engine processes")
def test_two_engines_answer_as_one_does_and_one_may_be_killed(tmp_path: Path) -> None:
    others = all_children()  # a server that earlier tests have started and later ones use
    checkpoint = make(tmp_path / "model", "llama", "float32")
    alone = engine_config(checkpoint, 1)
    model = replace(alone.model, num_threads=2)  # one for each replica
    config = replace(alone, model=model, workers=WorkersConfig(replicas=2))
    requests = [Request(each, 12, streaming=True, output_config=OUTPUT) for each in PROMPTS]
    with Executor.from_directory(checkpoint, alone) as one:
        answers = drain(one, ids := one.enqueue_requests(requests))
        expected = [tokens_of(answers[each]) for each in ids]
    with Executor.launch(config, str(tmp_path / "front" / "engine.sock")) as front:
        answers = drain(front, ids := front.enqueue_requests(requests))
        assert [tokens_of(answers[each]) for each in ids] == expected
        engines = descendants(b"engine_process", others)
        assert len(engines) == 2
        streams = front.enqueue_requests([replace(each, max_tokens=60) for each in requests])
        assert wait_until(lambda: all(front.get_num_responses_ready(each) for each in streams), 30)
        os.kill(engines[0], signal.SIGKILL)
        assert wait_until(lambda: engines[0] not in descendants(b"engine_process", others), 10)
        assert front.is_ready()
        gone_on = drain(front, streams)
        assert [tokens_of(gone_on[each])[:12] for each in streams] == expected
        assert {len(tokens_of(each)) for each in gone_on.values()} == {60}
        answers = drain(front, ids := front.enqueue_requests(requests))
        assert [tokens_of(answers[each]) for each in ids] == expected, "by the other one"
        assert wait_until(lambda: len(descendants(b"engine_process", others)) == 2, 60), "it is started again"
    assert wait_until(lambda: not descendants(b"backend.", others), 10), "no process is left"
