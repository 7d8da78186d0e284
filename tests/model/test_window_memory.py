"""How many blocks a model with windows for each layer uses, step by step through the engine, and that nobody sees it.

Blocks of 4, windows (8, 16), 4 sink tokens, a prompt of 6, 40 output tokens, one sequence, blocks not shared.

    step 1 runs the prompt, step s the token at position 4 + s: c = 5 + s cells are computed after it
    entries of the table           ceil(c / 4)
    block 0                        holds the sink tokens, and stays
    block b >= 1, its last cell 4b + 3, is read by the layer with the window of 16 up to position 4b + 18; once c >= 4b + 19 no
    later token reads it           the first one, block 1, is let go at c = 23

    let go     max(0, floor((c - 15) / 4) - 1)
    c          6..8  9..12  13..16  17..20  21..22  23..24  25..26  27..28  29..30  31..32 ...
    entries      2     3       4       5       6       6       7       7       8       8
    let go       0     0       0       0       0       1       1       2       2       3
    used         2     3       4       5       6       5       6       5       6       5   and so on: a plateau
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backend.api import EngineConfig, OutputConfig, Request
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.engine.core import EngineCore
from backend.worker.group import InProcessWorkerGroup
from tests.model.test_attention_window import masked
from tests.model.test_parity import prompt

NUM_TOKENS = 40
USED = [2] * 3 + [3] * 4 + [4] * 4 + [5] * 4 + [6] * 2 + [5, 5, 6, 6] * 5 + [5, 5]  # after steps 1 to 39


def make_core(directory: Path, num_blocks: int, **kv_cache: object) -> EngineCore:
    config = EngineConfig(
        ModelConfigSection(path=str(directory), dtype="float32", kernels="torch", num_threads=1, device="cpu"),
        KvCacheConfig(4, 4 * num_blocks, enable_block_reuse=False, watermark=0.0, **kv_cache),
        SchedulerConfig(max_batch_size=4, max_num_tokens=8),
    )
    return EngineCore(config, InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache))


def run(core: EngineCore, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Returns the tokens of each request, and the blocks in use after each step but the last."""
    for number, ids in enumerate(prompts):
        core.enqueue(number, Request(ids, NUM_TOKENS, output_config=OutputConfig(exclude_input_from_output=True)))
    tokens: list[list[int]] = [[] for _ in prompts]
    used = []
    while core.has_work:
        for response in core.step():
            assert not response.has_error(), response.error_msg
            tokens[response.request_id] += response.result.output_token_ids[0]
        core.check_integrity()
        used.append(core.kv.stats().used_num_blocks)
    return tokens, used[:-1]


@pytest.mark.feature("001-29", "001-30", "003-22")
def test_used_blocks_reach_a_plateau_and_the_tokens_are_those_of_the_masked_reference(
    checkpoint: Callable[[str], Path],
) -> None:
    directory = checkpoint("llama2")
    core = make_core(directory, 64, max_attention_window=(8, 16), sink_tokens=4)
    ids = prompt(6)
    (tokens,), used = run(core, [ids])
    assert used == USED
    oracle = masked(directory, [8, 16, 8], sink_tokens=4)
    assert tokens == oracle.logits([*ids, *tokens[:-1]])[5:].argmax(1).tolist()


@pytest.mark.feature("003-22")
@pytest.mark.parametrize("options", [dict(), dict(sink_tokens=4)])
def test_a_layer_that_attends_to_all_keeps_every_block(
    checkpoint: Callable[[str], Path], options: dict[str, int]
) -> None:
    """The first layer of this model has no window, the others have one of 13."""
    core = make_core(checkpoint("qwen2_window_from_second_layer"), 64, **options)
    _, used = run(core, [prompt(6)])
    assert used == [-(-(5 + step) // 4) for step in range(1, NUM_TOKENS)]


@pytest.mark.feature("001-30", "003-22")
def test_a_pool_too_small_for_whole_sequences_runs_several_that_are_never_paused(
    checkpoint: Callable[[str], Path],
) -> None:
    """A sequence of 45 cells has 12 blocks; with windows at most 1 + ceil((16 + 8) / 4) + 2 = 9 are promised to one.

    So a pool of 18 runs two together, where whole sequences (2 * 12 > 18) would run one after the other. The first ends in step
    40; the third then takes its place, with its prompt in step 41, and ends in step 80.
    """
    core = make_core(checkpoint("llama2"), 18, max_attention_window=(8, 16), sink_tokens=4)
    prompts = [prompt(6, seed) for seed in range(3)]
    tokens, used = run(core, prompts)
    assert core.counters.pauses_total == 0
    assert len(used) + 1 == 2 * NUM_TOKENS
    alone = make_core(checkpoint("llama2"), 64, max_attention_window=(8, 16), sink_tokens=4)
    assert [run(alone, [ids])[0][0] for ids in prompts] == tokens
