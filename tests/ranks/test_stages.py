"""Which layers each stage of a pipeline has, and which of a step's tokens each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backend.api import ConfigError
from backend.architectures.description import LayerConfig, ModelConfig, Shard
from backend.architectures.shards import check_ranks, layers_of, most_layers, of_rank, shards_of, vocabulary
from backend.models.config import read_model_config
from backend.worker.micro_batches import micro_batches


@pytest.fixture
def config(checkpoint: Callable[..., Path]) -> ModelConfig:
    return read_model_config(checkpoint("llama"))


def with_layers(config: ModelConfig, count: int, vocab_size: int = 131) -> ModelConfig:
    return replace(config, num_layers=count, layers=(LayerConfig(),) * count, vocab_size=vocab_size)


def sizes(config: ModelConfig, stages: int) -> list[int]:
    """The layers of each stage. They must be all layers, in order."""
    ranges = [layers_of(config, Shard(stage=stage, stages=stages)) for stage in range(stages)]
    assert [layer for first, end in ranges for layer in range(first, end)] == list(range(config.num_layers))
    return [end - first for first, end in ranges]


@pytest.mark.feature("002-38")
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [7, 8, 22, 61])
def test_every_layer_is_on_one_stage_and_every_stage_has_one(config: ModelConfig, count: int, stages: int) -> None:
    found = sizes(with_layers(config, count), stages)
    assert min(found) >= 1
    assert max(found[:-1], default=count) - min(found[:-1], default=count) <= 1


def test_the_last_stage_has_fewer_layers_for_its_output_head(config: ModelConfig) -> None:
    of_layer = 2 * (8 + 2) * config.head_dim * 64 + 3 * 128 * 64  # weights
    assert sizes(with_layers(config, 16, 32), 2) == [8, 8]
    assert sizes(with_layers(config, 16, 4 * of_layer // 64), 2) == [10, 6]  # a head as large as four layers
    assert sizes(with_layers(config, 16, 100 * of_layer // 64), 4) == [5, 5, 5, 1]
    assert most_layers(with_layers(config, 16, 4 * of_layer // 64), Shard(stages=2)) == 10


def test_rank_0_is_of_the_last_stage(config: ModelConfig) -> None:
    shards = shards_of(2, 3)
    assert [shard.number for shard in shards] == list(range(6))
    assert [(shard.stage, shard.rank) for shard in shards] == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert [shard.is_last for shard in shards] == [True] * 2 + [False] * 4
    assert [shard.is_first for shard in shards] == [False] * 4 + [True] * 2
    assert [vocabulary(config, shard) for shard in shards] == [(0, 64), (64, 131), *[(0, 0)] * 4]


def test_a_stage_s_description_still_has_all_layers(config: ModelConfig) -> None:
    """Blocks are let go when the widest window of all layers has left them."""
    windows = (16, 32, None)
    whole = replace(with_layers(config, 3), layers=tuple(LayerConfig(window=window) for window in windows))
    part = of_rank(whole, Shard(stage=0, stages=2))
    assert part.sliding_window is None and part.windows == windows
    assert [layer.window for layer in part.held_settings] == list(windows[: len(part.held)])
    assert 0 < len(part.held) < 3


def test_more_stages_than_layers_are_refused(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 4, more than the model's 3 layers; use 3 or less"):
        check_ranks(with_layers(config, 3), 1, 4)
    check_ranks(with_layers(config, 3), 1, 3)


rows_of_a_step = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 40), st.integers(0, 40)).map(
        lambda row: (row[0], row[1], min(row[1], row[2]))
    ),
    min_size=1,
    max_size=8,
)


@given(rows_of_a_step, st.integers(1, 6))
def test_micro_batches_are_the_step_s_tokens_in_order(rows: list[tuple[int, int, int]], count: int) -> None:
    numbers = np.array([(slot, *row) for slot, row in enumerate(rows)], dtype=np.int32)
    parts = micro_batches(numbers, count)
    assert len(parts) == min(count, numbers[:, 2].sum())
    assert tokens_of(np.concatenate([part.numbers for part in parts])) == tokens_of(numbers)
    ends = [0, 0]
    for part in parts:
        assert list(part.numbers[:, 0]) == list(numbers[part.rows, 0]) and (part.numbers[:, 2] > 0).all()
        assert [part.tokens.start, part.logits.start] == ends
        ends = [part.tokens.stop, part.logits.stop]
        assert part.tokens.stop - part.tokens.start == part.numbers[:, 2].sum()
        assert part.logits.stop - part.logits.start == part.numbers[:, 3].sum()
    sizes_of = [part.tokens.stop - part.tokens.start for part in parts]
    assert max(sizes_of) - min(sizes_of) <= 1


def tokens_of(numbers: np.ndarray) -> list[tuple[int, int, bool]]:
    """Slot and position of each token of the flat batch, and whether it yields logits."""
    return [
        (slot, computed + index, index >= count - logits)
        for slot, computed, count, logits in numbers.tolist()
        for index in range(count)
    ]
