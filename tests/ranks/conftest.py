"""Tiny checkpoints that four ranks can share, and ranks that are threads of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backend.api.processes.launched import KEY_VARIABLE
from backend.worker import joined_group, joined_rank, rank_followers, ranked_group
from tests.families.tiny import make
from tests.model.tiers import native_kernels  # noqa: F401 (a fixture)
from tests.ranks.harness import ThreadFollower
from tests.ranks.joined import KEY

SIZES = dict(num_attention_heads=8, num_key_value_heads=2, intermediate_size=128, hidden_size=64)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(name of a family, dtype, further keys of config.json) -> its directory."""
    made: dict[str, Path] = {}

    def of(name: str, dtype: str = "float32", **keys: object) -> Path:
        key = repr((name, dtype, keys))
        if key not in made:
            made[key] = make(tmp_path_factory.mktemp("tiny"), name, dtype, **(SIZES | keys))
        return made[key]

    return of


@pytest.fixture
def ranks_in_threads(monkeypatch: pytest.MonkeyPatch, native_kernels: None) -> None:  # noqa: F811
    """Ranks besides rank 0 are threads, which start at once, and this machine has as many cores as they need."""
    monkeypatch.setattr(rank_followers, "RankFollower", ThreadFollower)
    monkeypatch.setattr(ranked_group, "physical_cores", lambda: 8)


@pytest.fixture
def joined_ranks(monkeypatch: pytest.MonkeyPatch, ranks_in_threads: None) -> None:
    """The same of ranks that join (joined.py), which have a key."""
    for module in (joined_group, joined_rank):
        monkeypatch.setattr(module, "physical_cores", lambda: 8)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
