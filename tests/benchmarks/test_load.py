"""`bench load`: the table of loads, and the lane that sends requests to an engine without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from backend.api import EngineConfig
from backend.api.config.schema import KvCacheConfig, LimitsConfig, SchedulerConfig
from backend.executor import Executor
from benchmarks.harness.answers import Limits, figures_of
from benchmarks.harness.engine import EngineLane
from benchmarks.harness.measure import Effort, Outcome, alternate
from benchmarks.harness.work import Cell, asks_of
from benchmarks.load import flood
from benchmarks.load.__main__ import NAMES, main
from benchmarks.load.scenarios import SCENARIOS, Size, room_for
from benchmarks.overhead.null_engine import NullWorkerGroup
from deploy.progress import SteppedProgress

app = typer.Typer()
app.command()(main)
VOCAB = 32_000
CONFIG = EngineConfig(
    kv_cache=KvCacheConfig(max_tokens=256, block_size=32, watermark=0.0),
    scheduler=SchedulerConfig(max_batch_size=2),
    limits=LimitsConfig(max_queue_size=4),
)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor.in_process(CONFIG, NullWorkerGroup(step_s=0.001)) as made:
        yield made


def test_a_closed_loop_gets_every_token_of_every_request(executor: Executor) -> None:
    asks = asks_of(Cell(8, 5, users=2, others=(20,)), VOCAB, repeat=0, per_user=3)
    assert [len(ask.prompt) for ask in asks] == [8, 20] * 3
    answers = EngineLane("engine", [executor]).send(asks, users=2, seconds=60)
    assert [(answer.tokens, answer.error, len(answer.gaps_s)) for answer in answers] == [(5, "", 4)] * 6
    assert figures_of(answers, Limits())["output_tokens"] == 30


def test_no_request_is_sent_after_the_time(executor: Executor) -> None:
    asks = asks_of(Cell(8, 20, users=1), VOCAB, repeat=0, per_user=100)
    assert 1 <= len(EngineLane("engine", [executor]).send(asks, users=1, seconds=0.1)) < 100


def test_a_flood_is_refused_and_every_request_is_accounted_for(executor: Executor) -> None:
    asks = asks_of(Cell(8, 50, users=1), VOCAB, repeat=0, per_user=100)
    answers = EngineLane("engine", [executor]).send_at_rate(asks, 1e6, lambda: False)
    refused = [answer for answer in answers if answer.error]
    assert len(answers) == 100 and 0 < len(refused) < 100
    assert all("Maximum queue size of 4" in answer.error for answer in refused)


def test_sessions_over_too_small_a_pool_are_computed_again_and_others_are_not(executor: Executor) -> None:
    lane, outcome = EngineLane("engine", [executor], sessions=True), Outcome()
    cells = [Cell(16, 8, 1, conversations=number, turns=3, history=80) for number in (1, 3)]
    alternate(cells, [lane], Effort(2, 1, 60.0, Limits()), VOCAB, outcome, SteppedProgress())
    warm, evicted = outcome.rows.values()
    assert warm.failures == evicted.failures == []
    assert [figures["recomputed_per_turn"] for figures in warm.repeats] == [0, 0]
    assert all(figures["recomputed_per_turn"] >= 80 for figures in evicted.repeats)


def test_a_turn_of_a_conversation_has_the_turns_before_it_and_its_own_tokens_last() -> None:
    asks = asks_of(Cell(4, 2, 1, conversations=2, turns=3, history=10), VOCAB, repeat=0, per_user=1)
    assert [(ask.conversation, ask.turn) for ask in asks] == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]
    assert [(len(ask.prompt), ask.fresh) for ask in asks[::2]] == [(14, 14), (20, 4), (26, 4)]
    assert asks[4].prompt[:20] == asks[2].prompt


def test_the_pool_of_a_scenario_holds_as_many_conversations_as_it_says() -> None:
    cells = SCENARIOS["crowd"].cells(Size((4,), (64,), 32))
    assert [cell.conversations for cell in cells] == [4, 16, 64]
    assert room_for(4)(cells) == 4 * 416  # 4 turns of 64 + 32 tokens, and the next one, in blocks of 32


def test_rates_of_the_flood_are_made_of_whole_requests() -> None:
    cell = flood.cell_of(flood.SIZE)
    assert len(flood._asks_for(cell, VOCAB, 0, 0.3)) == 1
    assert len(flood._asks_for(cell, VOCAB, 0, 37.9)) == 37


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], f"SCENARIO has 'nothing'; choose from {', '.join(NAMES)}"),
        (["serving", "--users", "0"], "--users is '0'; give 1 to 8 numbers"),
        (["serving", "--prompt", "a"], "--prompt is 'a'; give numbers from 1 to 131,072"),
        (["serving", "--seconds", "nan"], "--seconds is nan, allowed is 1 to 3600"),
        (["serving", "--weights", "fp1"], "--weights has 'fp1'; choose from bf16"),
        (["flood", "--repeats", "0"], "--repeats is 0, allowed is 1 to 20"),
        (["mixed", "--model", "", "--prompt", "100000"], "the model takes 2,048; give a smaller --prompt"),
        (["flood", "--model", "", "--setting", "scheduler.nope=1"], "nope"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence_before_anything_is_loaded(
    words: list[str], sentence: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert done.exit_code and sentence in done.output and len(done.output.strip().splitlines()) == 1, done.output
