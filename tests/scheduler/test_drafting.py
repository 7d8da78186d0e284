"""Which rows get drafts, and how many pay. Expectations are worked out by hand."""

from __future__ import annotations

import pytest

from backend.api.config.schema import SpeculationConfig
from backend.core.sequence import Sequence
from backend.scheduler.drafting import Drafter
from backend.scheduler.lookup import Lookup
from backend.scheduler.step_cost import MARGIN
from tests.engine.driver import Driver, answer

LOOKUP = SpeculationConfig(mode="lookup")


class Sure(Lookup):
    """Is right with the same probability at any place."""

    def __init__(self, probability: float) -> None:
        super().__init__("", None)
        self._probability = probability

    def confidence(self, num_drafts: int) -> float:
        return self._probability

    def propose(self, limit: int) -> list[int]:
        return [0] * limit


def count_of(probability: float, num_rows: int, base: float, per_token: float) -> int:
    drafter = Drafter(LOOKUP)
    for step in range(300):
        tokens = num_rows + step % 8
        drafter.cost.note(tokens, base + per_token * tokens)
    return drafter._worth(Sure(probability), LOOKUP.max_draft_tokens, num_rows, float(num_rows))[0]


def test_drafts_are_as_long_as_they_pay() -> None:
    """One row, a step of 100 ms and 1 ms a token. The i-th draft pays if 0.6^i / 1.25 is above the 1 + e / 1.25 tokens so far
    times what it costs of the step: the seventh, 0.0224 > 2.14 / 107, but not the eighth, 0.0134 < 2.17 / 108. A draft that is
    hardly ever right is not tried, one that always is goes up to the limit.
    """
    assert MARGIN == 1.25
    assert count_of(0.6, 1, 0.1, 0.001) == 7
    assert count_of(0.011, 1, 0.1, 0.001) == 0
    assert count_of(1.0, 1, 0.1, 0.001) == LOOKUP.max_draft_tokens == 32


def test_where_time_goes_to_computing_nobody_guesses() -> None:
    """32 rows at 1 ms a token and 1 ms besides: a token more takes a 33rd of a step and brings at most a 32nd of its tokens."""
    assert count_of(1.0, 32, 0.001, 0.001) == 0
    assert count_of(0.9, 32, 0.001, 0.001) == 0
    assert count_of(0.9, 32, 1.0, 0.001) > 0


def test_a_step_that_is_hardly_faster_goes_without() -> None:
    """Two rows, a step of 100 ms, a draft is right half of the time. Where a token more takes 16 ms, one draft brings 2.4 tokens
    in 116 ms, 1.034 times what plain steps bring, so nobody guesses; with 12 ms it is 1.071.
    """
    rows = generating(Driver(pool_tokens=1024, speculation=LOOKUP), 2)
    for each_ms, count in ((16, 0), (12, 1)):
        drafter = Drafter(LOOKUP)
        for _ in range(20):
            for tokens in (2, 3, 4, 5):
                drafter.cost.note(tokens, 0.1 + 0.001 * each_ms * (tokens - 2))
        drafter._known = {rows[0].seq_id: Sure(0.5), rows[1].seq_id: None}
        drafts = drafter.propose(list(rows), 100)
        assert [draft.num_tokens for draft in drafts.values()] == [count] * (count > 0)


def generating(driver: Driver, count: int) -> list[Sequence]:
    for row in range(count):
        driver.ask(list(range(100 * row, 100 * row + 32)), 40, cache_salt="a")
    while len(driver.core.scheduler.running) < count or not all(s.is_generating for s in driver.core.scheduler.running):
        driver.core.step()
    return list(driver.core.scheduler.running)


def test_planning_ahead_ends_where_guesses_are_likely_to_pay() -> None:
    """One row, whose guesses are right nine times of ten. A step that had none to guess at, where a quoted text was left, tells
    nothing of the next one. Where guesses are too dear, they are thought about in every eighth step, and before a trial never.
    """
    rows = generating(Driver(pool_tokens=1024, speculation=LOOKUP), 1)

    def waits(drafter: Drafter, confidence: float) -> bool:
        drafter._known = {rows[0].seq_id: Sure(confidence)}
        answer = drafter.waits(rows)
        drafter.propose(rows, 100)
        return answer

    for each_ms, pays in ((1, True), (95, False)):
        drafter = Drafter(LOOKUP)
        for number in range(1, 201):
            tokens = number % 5
            drafter.cost.note(1 + tokens, 0.1 + 0.001 * each_ms * tokens)
            is_trial = drafter.cost.is_trial(drafter._speed)
            expected = (pays or number % 8 == 0) and not is_trial
            assert waits(drafter, 0.9) == expected or number <= 100
        drafter.cost.note(1, 0.1)
        assert not waits(drafter, 0.0)
        assert waits(drafter, 0.9) == pays


def test_a_row_whose_token_is_not_known_yet_gets_no_guesses() -> None:
    """Guesses stand behind the latest token. Of two rows one has a token in flight."""
    rows = generating(Driver(pool_tokens=1024, speculation=LOOKUP), 2)
    drafter = Drafter(LOOKUP)
    drafter._known = {seq.seq_id: Sure(0.9) for seq in rows}
    rows[0].num_inflight_samples = 1
    assert list(drafter.propose(rows, 100)) == [rows[1].seq_id]
    rows[1].num_inflight_samples = 1
    assert not drafter.propose(rows, 100)


def test_draft_tokens_of_requests_share_the_room_of_a_step() -> None:
    """Nine draft tokens each, of which eight are left after the first token."""
    driver = Driver(pool_tokens=1024, slots=3)
    for row in range(3):
        prompt = [10 * row, 1, 2]
        driver.ask(prompt, 40, draft_tokens=answer(prompt, 9))
    driver.step()  # of the prompts, which gives each its first token
    rows = list(driver.core.scheduler.running)
    assert [seq.is_generating for seq in rows] == [True] * 3
    for room, expected in ((100, [8, 8, 8]), (11, [8, 3]), (8, [8]), (0, [])):
        drafts = Drafter(SpeculationConfig()).propose(rows, room)
        assert [draft.num_tokens for draft in drafts.values()] == expected


def test_nothing_is_remembered_of_sequences_that_have_ended() -> None:
    driver = Driver(pool_tokens=1024, speculation=LOOKUP)
    for number in range(3):
        driver.ask([number, 1, 2, 3] * 4, 8, cache_salt="a")
    driver.run()
    drafter = driver.core.scheduler._drafter
    assert drafter is not None and drafter._known == {}


class Sluggish:
    """A clock of a host on which each look at the time takes some more."""

    def __init__(self, seconds: float) -> None:
        self.now_ns, self.more_ns = 0, int(seconds * 1e9)

    def monotonic_ns(self) -> int:
        self.now_ns += self.more_ns
        return self.now_ns

    def time_ns(self) -> int:
        return self.now_ns


@pytest.mark.parametrize(
    ("own_s", "has_quotes", "rests"), [(0.005, False, True), (0.005, True, False), (0.0005, False, False)]
)
def test_guessing_that_takes_more_than_it_wins_rests(own_s: float, has_quotes: bool, rests: bool) -> None:
    """One row, a step of 100 ms, nearly the same with drafts. Looking takes 5 or 0.5 ms of each: a loss of 5 % sums up to 20 %
    of a step in the fifth step (4.75 / 0.05 * (1 - 0.95^5) = 22.6), one of 0.5 % never does (at most 10 %). Then it looks at
    nothing for 100 steps. A text of quotes wins more.
    """
    drafter = Drafter(LOOKUP, clock=Sluggish(own_s))
    for step in range(100):
        drafter.cost.note(1 + step % 8, 0.1 + 0.0001 * (1 + step % 8))
    driver = Driver(pool_tokens=1024, speculation=LOOKUP)
    driver.ask(list(range(64)), 40, cache_salt="a")
    driver.core.step()
    (seq,) = driver.core.scheduler.running
    drafter._known[seq.seq_id] = Sure(0.9 if has_quotes else 0.0)
    at_rest = []
    for _ in range(104):
        drafter.propose([seq], 100)
        at_rest.append(drafter._num_resting)
    assert at_rest == ([0] * 4 + list(range(100, 0, -1)) if rests else [0] * 104)


PROMPT = list(range(30, 45))


@pytest.mark.parametrize(
    ("salts", "sharing", "learns"),
    [
        (("a", "a"), "namespace", True),
        (("a", "b"), "namespace", False),
        (("", ""), "namespace", False),
        (("", ""), "all", True),
        (("a", "a"), "none", False),
    ],
)
def test_who_learns_from_whom(salts: tuple[str, str], sharing: str, learns: bool) -> None:
    """The same request twice. The second finds the first one's output in 6 tokens, but in the namespaces that share only."""
    driver = Driver(pool_tokens=256, speculation=LOOKUP, sharing=sharing)
    outputs = []
    for salt in salts:
        request = driver.ask(PROMPT, 40, cache_salt=salt)
        driver.run()
        outputs.append(driver.tokens(request))
    assert (outputs[0] == outputs[1]) == (salts[0] == salts[1])
    assert (driver.core.counters.accepted_draft_tokens_total > 20) == learns
