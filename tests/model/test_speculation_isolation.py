"""Whether a client can tell from its own steps what another one's conversation said: counted, not timed.

A victim's answer holds the attacker's phrase in one world and does not in the other; the attacker asks for an answer that is the
phrase and counts the steps and drafts that it took. The area under the ROC curve is the probability that of two such counts the
better one comes from the world with the phrase: 0.5 is blind, 1 is certain.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from backend.api import OutputConfig, Request
from backend.api.config.schema import SpeculationConfig
from backend.engine.core import EngineCore
from tests.fakes.drafters import FixedStepCost
from tests.model.test_speculation import answers, make_core

NUM_TRIALS = 100  # in each world
NUM_TOKENS = 24
OUTPUT = OutputConfig(exclude_input_from_output=True)
Counts = tuple[int, int, int]  # steps, drafts that were tried, drafts that were right


def prompt(name: str) -> list[int]:
    rng = Random(name)
    return [rng.randrange(131) for _ in range(9)]


def make_world(directory: Path) -> EngineCore:
    """What steps cost is fixed, so that nothing depends on the machine's time."""
    core = make_core(directory, "native", SpeculationConfig(mode="lookup"))
    core.scheduler._drafter.cost = FixedStepCost()
    return core


def converse(core: EngineCore, of: str, namespace: str) -> None:
    requests = {
        1 + trial: Request(prompt(f"{of} {trial}"), NUM_TOKENS, output_config=OUTPUT, cache_salt=namespace)
        for trial in range(NUM_TRIALS)
    }
    answers(core, requests)


def probe(core: EngineCore, trial: int, namespace: str) -> Counts:
    counters = core.counters
    before = counters.steps_total, counters.draft_tokens_total, counters.accepted_draft_tokens_total
    answers(core, {1: Request(prompt(f"phrase {trial}"), NUM_TOKENS, output_config=OUTPUT, cache_salt=namespace)})
    after = counters.steps_total, counters.draft_tokens_total, counters.accepted_draft_tokens_total
    return tuple(new - old for new, old in zip(after, before))


def counts(directory: Path, victim: str, attacker: str) -> tuple[list[Counts], list[Counts]]:
    """Of all trials in the world with the phrases, and in the one without."""
    told = []
    for of in ("phrase", "something else"):
        core = make_world(directory)
        converse(core, of, victim)
        told.append([probe(core, trial, attacker) for trial in range(NUM_TRIALS)])
    return told[0], told[1]


def area(with_phrase: list[Counts], without: list[Counts]) -> float:
    """By the number of steps: fewer tell of the phrase."""
    pairs = [(one[0], other[0]) for one in with_phrase for other in without]
    return sum((one < other) + (one == other) / 2 for one, other in pairs) / len(pairs)


@pytest.mark.parametrize(("victim", "attacker"), [("alice", "mallory"), ("alice", ""), ("", "mallory"), ("", "")])
def test_nobody_learns_of_another_namespace(
    checkpoint: Callable[[str], Path], native_kernels: None, victim: str, attacker: str
) -> None:
    """Clients without a namespace are strangers to each other, too."""
    with_phrase, without = counts(checkpoint("llama2"), victim, attacker)
    assert with_phrase == without
    assert area(with_phrase, without) <= 0.55


def test_within_a_namespace_the_probe_sees(checkpoint: Callable[[str], Path], native_kernels: None) -> None:
    with_phrase, without = counts(checkpoint("llama2"), "alice", "alice")
    assert area(with_phrase, without) > 0.9
