"""Which part of a model each rank holds: of every weight all of it, each part once, and what cannot be cut is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api import ConfigError
from backend.architectures.description import ModelConfig, Shard
from backend.architectures.shards import Cut, check_ranks, cuts, linears, of_rank, sinks, vocabulary
from backend.models.config import read_model_config

HEADS, KV, HEAD, INTER, HIDDEN, VOCAB = 8, 2, 8, 128, 64, 131


@pytest.fixture
def config(checkpoint: Callable[..., Path]) -> ModelConfig:
    return read_model_config(checkpoint("llama"))


def rows_of(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [row for first, end in ranges for row in range(first, end)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_hold_their_heads_and_those_that_these_attend_to(config: ModelConfig, size: int) -> None:
    for rank in range(size):
        rows = rows_of(cuts(config, Shard(rank, size))["qkv"].rows)
        heads = range(rank * HEADS // size, (rank + 1) * HEADS // size)
        of_kv = sorted({head * KV // HEADS for head in heads})
        first_k, first_v = HEADS * HEAD, (HEADS + KV) * HEAD
        assert rows == [
            *(head * HEAD + i for head in heads for i in range(HEAD)),
            *(first_k + head * HEAD + i for head in of_kv for i in range(HEAD)),
            *(first_v + head * HEAD + i for head in of_kv for i in range(HEAD)),
        ]
        local = of_rank(config, Shard(rank, size))
        assert (local.num_heads, local.num_kv_heads, local.intermediate_size) == (
            HEADS // size,
            len(of_kv),
            INTER // size,
        )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_row_and_column_is_on_one_rank(config: ModelConfig, size: int) -> None:
    of = [cuts(config, Shard(rank, size)) for rank in range(size)]
    assert sorted(row for each in of for row in rows_of(each["gate_up"].rows)) == list(range(2 * INTER))
    for name, width in (("out", HEADS * HEAD), ("down", INTER)):
        columns = [each[name].columns for each in of]
        assert rows_of(tuple(part for part in columns if part)) == list(range(width))
        assert [each[name].has_bias for each in of] == [True] + [False] * (size - 1)
        assert all(each[name].rows == ((0, HIDDEN),) for each in of)
    assert rows_of(tuple(sinks(config, Shard(rank, size)) for rank in range(size))) == list(range(HEADS))


def test_an_mlp_s_gate_and_up_meet_on_their_rank(config: ModelConfig) -> None:
    assert cuts(config, Shard(1, 2))["gate_up"].rows == ((64, 128), (192, 256))
    plain = replace(config, block=replace(config.block, gated=False))
    assert cuts(plain, Shard(1, 2))["gate_up"].rows == ((64, 128),)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_the_vocabulary_is_cut_between_panels(config: ModelConfig, size: int) -> None:
    parts = [vocabulary(config, Shard(rank, size)) for rank in range(size)]
    assert rows_of(tuple(parts)) == list(range(VOCAB))
    assert all(first % 32 == 0 and first < end for first, end in parts)


def test_every_layer_s_linear_layers_are_found_by_their_first_tensor(config: ModelConfig) -> None:
    found = linears(config, Shard(1, 2))
    assert len(found) == 4 * config.num_layers
    qkv = found["model.layers.2.self_attn.q_proj"]
    assert list(qkv.rows.values()) == [HEADS * HEAD, KV * HEAD, KV * HEAD] and qkv.columns == HIDDEN
    assert found["model.layers.0.mlp.down_proj"].columns == INTER


def test_the_rows_of_a_stacked_tensor_are_counted_from_its_own_first() -> None:
    cut = Cut(((2, 6), (9, 10)))
    assert list(cut.within(0, 4)) == [(2, 4)]
    assert list(cut.within(4, 4)) == [(0, 2)]
    assert list(cut.within(8, 4)) == [(1, 2)]
    assert list(cut.within(6, 2)) == []


@pytest.mark.parametrize(
    "keys, size, said",
    [
        ({}, 3, "does not divide the model's 8 attention heads; use 1 or 2 or 4"),
        ({"intermediate_size": 98}, 4, "does not divide the model's 98 rows of each MLP; use 1 or 2"),
        ({"num_heads": 12, "num_kv_heads": 6, "intermediate_size": 96}, 4, "divides the model's 6 KV heads"),
        ({"vocab_size": 64}, 4, "too many for a vocabulary of 64 tokens; use 1 or 2"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused_with_those_that_do(
    config: ModelConfig, keys: dict[str, int], size: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"workers.tensor_parallel_size is {size}, .*{said}"):
        check_ranks(replace(config, **keys), size)
    check_ranks(replace(config, **keys), 1)


def test_norms_over_all_heads_are_refused_by_name(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="Olmo2ForCausalLM normalises all query heads .* use 1$"):
        check_ranks(read_model_config(checkpoint("olmo 2")), 2)
