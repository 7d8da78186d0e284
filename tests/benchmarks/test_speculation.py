"""The bench of speculation turns the draft model on and off between runs of one engine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.speculation import DRAFT_MODEL, Bench
from tests.fakes.drafters import Asker
from tools.make_draft_pair import make_draft_pair


def test_the_draft_model_is_right_though_runs_without_it_use_its_blocks(tmp_path: Path) -> None:
    """The two agree always. A run without guesses leaves the draft model's KV as it was before."""
    bench = Bench(*make_bench(tmp_path))
    truth, _, _ = bench.run(3, False, None)
    counters = bench.core.counters
    for rows in (3, 2, 3):
        texts, _, num_steps = bench.run(rows, False, Asker())
        assert texts == truth[:rows] and num_steps < 39
        assert counters.draft_tokens_total == counters.accepted_draft_tokens_total > 0
        tried = counters.draft_tokens_total
        _, _, num_steps = bench.run(2, True, None)
        assert counters.draft_tokens_total == tried and num_steps == 39
        assert bench.core.workers.runner.draft_model is None


def test_figures_of_a_pair_say_what_was_right(tmp_path: Path) -> None:
    """How much is guessed follows from times; what is guessed is right."""
    figures = Bench(*make_bench(tmp_path)).measure(DRAFT_MODEL, 2, False, 2)
    assert figures.is_equal and figures.accepted in (0.0, 1.0) and figures.per_step >= 1


def make_bench(directory: Path) -> tuple[Path, str, str, int, int, Path]:
    """What Bench takes: a model of three layers, and its draft model of one."""
    model, draft = make_draft_pair(directory, 1, 0.0)
    return model, "float32", "none", 3, 40, draft
