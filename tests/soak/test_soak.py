"""The soak finds what grows, and runs for a moment with one kill. `python -m tests.soak --minutes 60` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.clients import Heard, Pauses
from tests.soak.flatness import Sample, growth, what_grew
from tests.soak.soak import Result, soak


def rests(**series: list[float]) -> list[Sample]:
    return [dict(zip(series, values)) for values in zip(*series.values())]


def test_what_grows_from_the_first_third_of_the_rests_to_the_last_is_told() -> None:
    steady, leak = [300.0] * 10, [500.0] + [300.0 + 10 * n for n in range(9)]
    samples = rests(engine=leak, gateway=steady)
    assert growth(samples) == {"engine": (310.0, 370.0), "gateway": (300.0, 300.0)}
    assert what_grew(samples) == ["engine grew from 310.0 to 370.0; up to 16.0 more are allowed"]


def test_the_first_rest_does_not_count_and_a_twentieth_more_is_allowed() -> None:
    assert what_grew(rests(engine=[10.0, *[1000.0] * 5, 1049.0, 1049.0, 1049.0])) == []
    assert len(what_grew(rests(engine=[10.0, *[1000.0] * 5, 1051.0, 1051.0, 1051.0]))) == 1


def test_open_files_and_shared_memory_have_limits_of_their_own() -> None:
    samples = rests(**{"descriptors of engine": [20.0, 20.0, 22.0, 25.0], "shared memory": [3.0, 3.0, 4.0, 5.0]})
    assert [text.split(" grew")[0] for text in what_grew(samples)] == ["descriptors of engine", "shared memory"]


def test_one_rest_says_nothing() -> None:
    assert what_grew(rests(engine=[1.0, 999.0])) == [] == what_grew([])


def test_a_refusal_counts_as_one_only_while_the_engine_was_away() -> None:
    pauses = Pauses([(10.0, 12.0)])
    assert pauses.touch(11.0, 11.5) and pauses.touch(5.0, 10.5) and pauses.touch(11.9, 30.0)
    assert not pauses.touch(5.0, 9.9) and not pauses.touch(12.1, 30.0)
    pauses.begin()
    assert pauses.touch(*([pauses.spans[-1][0] + 100] * 2))


def test_a_problem_of_a_client_fails_the_soak() -> None:
    heard = Heard()
    heard.problem("greedy: other bytes than on an undisturbed server")
    assert Result(heard=heard).failures() == heard.problems


@pytest.mark.slow("a real tritonserver under everything at once")
@pytest.mark.timeout(600)
def test_a_short_soak_with_a_kill_finds_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    result = soak(tmp_path, seconds=12, rest_every_s=12, seed=1, tell=told.append, kill_every_s=(2.0, 3.0))
    assert result.failures() == [] and result.num_kills >= 1, (result.failures(), result.num_kills)
    assert sum(number for name, number in result.heard.counts.items() if name.startswith("honest: ")) > 5
    assert len(result.samples) == len(told) == 2 and {"tritonserver", "engine", "gateway"} <= set(result.samples[-1])
