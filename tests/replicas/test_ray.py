"""Replicas as actors of a real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from backend.api import ConfigError, EngineConfig, EverbatchError, OutputConfig, Request
from backend.api.config.schema import WorkersConfig
from backend.executor import Executor
from backend.wire.client import wait_until
from backend.worker import ranked_group
from compat.llm import LLM, RequestError, SamplingParams
from tests.executor.helpers import drain, tokens_of
from tests.families.tiny import make
from tests.ranks.harness import PROMPTS, engine_config, run

pytest.importorskip("ray", reason="Ray is an extra: pip install -r requirements/ray.txt")
pytestmark = [pytest.mark.slow("a Ray cluster"), pytest.mark.timeout(900)]
OUTPUT = OutputConfig(exclude_input_from_output=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node without processors for replicas, and two with one each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
    made.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("ray") / "model", "llama", "float32")


def config_of(checkpoint: Path, replicas: int, placement: str = "SPREAD") -> EngineConfig:
    workers = WorkersConfig(replicas=replicas, orchestrator="ray", placement=placement)  # type: ignore[arg-type]
    return replace(engine_config(checkpoint, 1), workers=workers)


def of_ranks(checkpoint: Path, size: int, stages: int = 1) -> EngineConfig:
    return replace(
        config_of(checkpoint, 1), workers=WorkersConfig(size, stages, orchestrator="ray", placement="SPREAD")
    )


def test_more_than_the_cluster_has_is_one_sentence(cluster: Any, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workers.replicas is 3 with 1 CPUs each .* cluster has 2 of 2 CPUs free"):
        Executor.launch(config_of(checkpoint, 3), str(tmp_path / "front" / "engine.sock"))


def test_more_ranks_than_the_cluster_has_cpus(cluster: Any, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"replicas is 1 with 4 ranks of 1 CPUs each .* cluster has 2 of 2 CPUs free"):
        Executor.launch(of_ranks(checkpoint, 4), str(tmp_path / "front" / "engine.sock"))


def test_a_checkpoint_that_is_not_on_the_nodes_is_one_sentence(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="File does not exist"):
        Executor.launch(config_of(tmp_path / "nowhere", 1), str(tmp_path / "front" / "engine.sock"))


@pytest.mark.feature("002-54")
def test_streams_of_a_lost_node_go_on_elsewhere_and_a_new_node_takes_its_replica(
    cluster: Any, checkpoint: Path, tmp_path: Path
) -> None:
    requests = [Request(each, 12, streaming=True, output_config=OUTPUT) for each in PROMPTS]
    with Executor.from_directory(checkpoint, engine_config(checkpoint, 1)) as one:
        answers = drain(one, ids := one.enqueue_requests(requests))
        expected = [tokens_of(answers[each]) for each in ids]
    with Executor.launch(config_of(checkpoint, 2), str(tmp_path / "front" / "engine.sock")) as front:
        answers = drain(front, ids := front.enqueue_requests(requests))
        assert [tokens_of(answers[each]) for each in ids] == expected

        streams = [Request([each, 2, 3], 300, streaming=True, output_config=OUTPUT) for each in range(64)]
        ids = front.enqueue_requests(streams)
        assert wait_until(lambda: sum(front.get_num_responses_ready(each) > 0 for each in ids) > 8, 60)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        assert {len(tokens_of(got)) for got in drain(front, ids).values()} == {300}, "none lost, none twice"
        assert front.is_ready()

        cluster.add_node(num_cpus=1)
        answers = drain(front, ids := front.enqueue_requests(requests))
        assert [tokens_of(answers[each]) for each in ids] == expected
        until = time.monotonic() + 120
        while time.monotonic() < until:  # until both replicas take requests again
            before = front.latest_stats()
            ids = front.enqueue_requests(requests * 2)
            drain(front, ids)
            if before is not None and before.latest.max_num_active_requests == 16:
                break
        else:
            pytest.fail("the lost replica did not come back")


@pytest.mark.feature("002-35")
def test_ranks_on_two_nodes_have_the_tokens_of_ranks_on_one_and_come_again_when_a_node_is_lost(
    cluster: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked_group, "physical_cores", lambda: 2)
    expected = run(engine_config(checkpoint, 2)).tokens[:1]
    greedy = SamplingParams(max_tokens=10, end_id=-1)
    with LLM(
        checkpoint,
        tensor_parallel_size=2,
        orchestrator_type="ray",
        skip_tokenizer_init=True,
        engine_config=of_ranks(checkpoint, 1),
    ) as llm:
        assert [each.outputs[0].token_ids for each in llm.generate(PROMPTS[:1], greedy)] == expected
        assert llm.collective_rpc("rank") == [0, 1]
        nodes, pids = llm.collective_rpc("node_id"), llm.collective_rpc("pid")
        assert len(set(nodes)) == 2, "SPREAD"

        streams = [
            llm.generate_async([each, 2, 3], SamplingParams(max_tokens=400, end_id=-1), streaming=True)
            for each in range(8)
        ]
        next(iter(streams[0]))
        (node,) = [each for each in cluster.list_all_nodes() if each.node_id == nodes[1]]
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        assert {len(stream.result().outputs[0].token_ids) for stream in streams} == {400}, "they go on"

        def answers() -> bool:
            with suppress(RequestError, EverbatchError):
                return [each.outputs[0].token_ids for each in llm.generate(PROMPTS[:1], greedy)] == expected
            return False

        assert wait_until(answers, 120)
        assert not set(pids) & set(llm.collective_rpc("pid"))


@pytest.mark.feature("002-35")
def test_an_llm_whose_engines_are_actors_and_what_they_say(cluster: Any, checkpoint: Path) -> None:
    base = config_of(checkpoint, 2)
    with LLM(checkpoint, orchestrator_type="ray", skip_tokenizer_init=True, engine_config=base) as llm:
        (answer,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=4, end_id=-1))
        assert len(answer.outputs[0].token_ids) == 4
        assert llm.collective_rpc("rank") == [0, 1]
        assert len(set(llm.collective_rpc("node_id"))) == 2, "SPREAD"
        with pytest.raises(AttributeError, match="no_such_method"):
            llm.collective_rpc("no_such_method")
