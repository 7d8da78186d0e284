"""Hybrids under pauses, evictions, drafts and few snapshots: not a bit differs from what they say undisturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.families.conftest import checkpoint  # noqa: F401 (a fixture)
from tests.parity.fidelity import FORMATS, MODELS, differing
from tests.simulation.state_mutants import the_state_moves_over_accepted_drafts

pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.mark.parametrize("number", range(len(FORMATS)))
@pytest.mark.parametrize("name", MODELS)
def test_no_bit_differs(name: str, number: int, checkpoint: Callable[..., Path]) -> None:  # noqa: F811
    seen: Counter[str] = Counter()
    seeds = range(4 * number, 4 * number + 4)
    found = [differing(checkpoint(name, "bfloat16"), FORMATS[number], seed, seen) for seed in seeds]
    assert found == [0, 0, 0, 0]
    assert seen["restored"] or name == "deepseek v3", "no sequence went on from a snapshot"
    assert seen["drafts_accepted"] and seen["tokens_recomputed"], "the lives were too quiet"


def test_a_planted_bug_is_noticed(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    the_state_moves_over_accepted_drafts(monkeypatch.setattr)
    assert any(differing(checkpoint("qwen3.5", "bfloat16"), FORMATS[0], seed, Counter()) for seed in range(6))
