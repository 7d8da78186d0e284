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


ONE_PROCESS = "is run by transformers, in one process only; use --set workers"


@pytest.mark.parametrize(
    ("family", "size", "stages", "model", "said"),
    [
        ("llama", 3, 1, {}, "tensor_parallel_size is 3, .* 8 attention heads; use 1 or 2 or 4"),
        ("olmo 2", 2, 1, {}, "Olmo2ForCausalLM normalises all query heads .* use 1"),
        ("llama", 8, 1, {}, "tensor_parallel_size is 8, .* may use 4 cores; use 4 ranks or less"),
        ("llama", 4, 2, {}, "2.* may use 4 cores; use 4 ranks or less"),
        ("llama", 1, 5, {}, "5.* may use 4 cores; use 4 ranks or less"),
        ("llama", 1, 4, {}, "pipeline_parallel_size is 4, more than the model's 3 layers; use 3 or less"),
        ("llama", 1, 2, {"implementation": "transformers"}, f"{ONE_PROCESS}.pipeline_parallel_size=1$"),
        ("llama", 2, 1, {"implementation": "transformers"}, f"LlamaForCausalLM {ONE_PROCESS}"),
        ("llama", 2, 1, {"kernels": "torch"}, "model.kernels is torch, .* model.kernels=native"),
    ],
)
def test_what_ranks_cannot_run(
    checkpoint: Checkpoint, family: str, size: int, stages: int, model: dict[str, str], said: str
) -> None:
    config = engine_config(checkpoint(family), size, stages=stages)
    with pytest.raises(ConfigError, match=said) as error:
        workers_of(replace(config, model=replace(config.model, **model))).load()
    assert "\n" not in error.value.message


@pytest.mark.parametrize("key", ["pipeline_parallel_size", "micro_batches"])
@pytest.mark.parametrize("value", ["0", "-1", "2.5", "many", str(1 << 70)])
def test_numbers_that_are_none(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"workers.{key}"):
        load_config(overrides=[f"workers.{key}={value}"])


def test_tensors_in_memory() -> None:
    with pytest.raises(ConfigError, match="tensors of the model are in this process.* save a checkpoint"):
        workers_of_buffers({}, "{}", EngineConfig(workers=WorkersConfig(2)))
