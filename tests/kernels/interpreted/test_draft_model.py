"""Draft models on the runner of a GPU: they guess eagerly, look-ahead or not, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from backend.api import Request
from backend.api.config.schema import SpeculationConfig
from backend.engine.core import EngineCore
from tests.fakes.drafters import Asker
from tests.kernels.interpreted.test_device_runner import (  # noqa: F401 (fixture)
    ASKED,
    Replays,
    directory,
    finish,
    make_core,
    request,
)
from tools.make_random_model import make_random_model

NUM_TOKENS = 10


def drafting_core(path: Path, draft: Path, **options: object) -> EngineCore:
    core = make_core(path, "triton", Replays(), speculation=SpeculationConfig("draft_model", str(draft)), **options)
    core.scheduler._drafter = Asker()
    return core


def check(path: Path, requests: list[Request], **options: object) -> EngineCore:
    """Tokens are those without guesses, and all guesses of the model at itself are right. The torch tier has no narrow KV."""
    kv = options.get("kv", "auto")
    plain = finish(make_core(path, "torch" if kv == "auto" else "triton", Replays(), kv=kv), requests)
    core = drafting_core(path, path, **options)
    drafted = finish(core, requests)
    assert [result.output_token_ids for result in drafted] == [result.output_token_ids for result in plain]
    assert core.counters.accepted_draft_tokens_total == core.counters.draft_tokens_total > 10
    return core


@pytest.mark.parametrize(("kv", "look_ahead"), [("auto", True), ("int4", False)])
def test_all_guesses_of_the_model_at_itself_are_right(directory: Path, kv: str, look_ahead: bool) -> None:  # noqa: F811
    """Greedy rows that guess, and one that does not. Steps of 24 tokens cut prompts."""
    requests = [request(9 + 7 * n, NUM_TOKENS, n) for n in range(3)]
    check(directory, [replace(requests[0], speculation=False), *requests[1:]], kv=kv, look_ahead=look_ahead)


def test_who_was_paused_is_computed_again_by_both_models(directory: Path) -> None:  # noqa: F811
    """Two sequences of up to 34 tokens need three blocks of 16 each, and the pool has four."""
    core = check(directory, [request(16, 18, n) for n in (1, 2)], blocks=4)
    assert core.counters.pauses_total > 0 < core.counters.recomputed_tokens_total


def test_guesses_of_another_model_change_no_token(directory: Path, tmp_path: Path) -> None:  # noqa: F811
    """Rows that sample in every way; the draft model has another shape. Of random models few guesses are right."""
    other = make_random_model(tmp_path, "qwen3", seed=99, num_hidden_layers=1, hidden_size=32)
    requests = [request(9 + 8 * n, 6, n, **ASKED[n]) for n in range(4)]
    plain = finish(make_core(directory, "torch"), requests)
    core = drafting_core(directory, other, look_ahead=True)
    drafted = finish(core, requests)
    assert [result.output_token_ids for result in drafted] == [result.output_token_ids for result in plain]
    assert core.counters.draft_tokens_total > 8 > 4 * core.counters.accepted_draft_tokens_total
