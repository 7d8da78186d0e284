"""What several ranks cannot run is refused at the start, in one sentence with the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api import ConfigError, EngineConfig, load_config
from backend.api.config.schema import WorkersConfig
from backend.executor.load import workers_of, workers_of_buffers
from backend.worker import rank_followers, ranked_group
from tests.ranks.harness import engine_config

Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a process is started for what is refused")

    monkeypatch.setattr(rank_followers, "RankFollower", refuse)
    monkeypatch.setattr(ranked_group, "physical_cores", lambda: 4)


def refused(config: EngineConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        workers_of(config).load()
    assert "\n" not in error.value.message


def test_heads_that_are_not_divided(checkpoint: Checkpoint) -> None:
    refused(engine_config(checkpoint("llama"), 3), "tensor_parallel_size is 3, .* 8 attention heads; use 1 or 2 or 4")


def test_norms_over_all_heads(checkpoint: Checkpoint) -> None:
    refused(engine_config(checkpoint("olmo 2"), 2), "Olmo2ForCausalLM normalises all query heads .* use 1")


def test_more_ranks_than_cores(checkpoint: Checkpoint) -> None:
    refused(engine_config(checkpoint("llama"), 8), "tensor_parallel_size is 8, .* may use 4 cores; use 4 ranks or less")


@pytest.mark.parametrize("size, stages", [(4, 2), (1, 5)])
def test_more_ranks_of_all_stages_than_cores(checkpoint: Checkpoint, size: int, stages: int) -> None:
    refused(engine_config(checkpoint("llama"), size, stages=stages), f"{stages}.* may use 4 cores; use 4 ranks or less")


def test_more_stages_than_layers(checkpoint: Checkpoint) -> None:
    said = "pipeline_parallel_size is 4, more than the model's 3 layers; use 3 or less"
    refused(engine_config(checkpoint("llama"), 1, stages=4), said)


@pytest.mark.parametrize("key", ["pipeline_parallel_size", "micro_batches"])
@pytest.mark.parametrize("value", ["0", "-1", "2.5", "many", str(1 << 70)])
def test_numbers_that_are_none(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"workers.{key}"):
        load_config(overrides=[f"workers.{key}={value}"])


def test_stages_of_a_model_that_transformers_runs(checkpoint: Checkpoint) -> None:
    config = engine_config(checkpoint("llama"), 1, stages=2)
    hosted = replace(config, model=replace(config.model, implementation="transformers"))
    refused(hosted, "is run by transformers, in one process only; use --set workers.pipeline_parallel_size=1$")


def test_other_kernels(checkpoint: Checkpoint) -> None:
    config = engine_config(checkpoint("llama"), 2)
    refused(
        replace(config, model=replace(config.model, kernels="torch")), "model.kernels is torch, .* model.kernels=native"
    )


def test_models_that_transformers_runs(checkpoint: Checkpoint) -> None:
    config = engine_config(checkpoint("llama"), 2)
    hosted = replace(config, model=replace(config.model, implementation="transformers"))
    refused(hosted, "LlamaForCausalLM is run by transformers, in one process only; use --set workers")


def test_tensors_in_memory() -> None:
    with pytest.raises(ConfigError, match="tensors of the model are in this process.* save a checkpoint"):
        workers_of_buffers({}, "{}", EngineConfig(workers=WorkersConfig(2)))
