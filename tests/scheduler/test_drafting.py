"""Lookup, the cost of steps, and how many drafts pay. Expectations are worked out by hand."""

from __future__ import annotations

from random import Random

import pytest

from backend.api.config import SpeculationConfig
from backend.scheduler.acceptance import Acceptance
from backend.scheduler.drafting import MARGIN, Drafter
from backend.scheduler.lookup import Lookup, OtherOutputs
from backend.scheduler.step_cost import StepCost
from tests.engine.driver import Driver

LOOKUP = SpeculationConfig(mode="lookup")


def seen(ids: list[int], others: OtherOutputs | None = None, namespace: str = "") -> Lookup:
    lookup = Lookup(namespace, others)
    lookup.see(ids)
    return lookup


def test_what_followed_the_last_three_tokens_is_proposed() -> None:
    assert seen([1, 2, 3, 4, 9, 1, 2, 3]).propose(2) == [4, 9]


def test_two_tokens_are_no_match() -> None:
    assert seen([1, 2, 4, 9, 1, 2]).propose(2) == []


def test_of_two_places_the_longer_match_is_taken() -> None:
    """The six tokens 1-6 are followed by 7, and a later place of 4-6 alone by 8."""
    assert seen([1, 2, 3, 4, 5, 6, 7, 0, 4, 5, 6, 8, 0, 1, 2, 3, 4, 5, 6]).propose(1) == [7]


def test_a_repetition_copies_from_itself() -> None:
    """Of a, b, c, a, b, c only three tokens stand behind the place, the rest of the draft is made of the draft."""
    assert seen([1, 2, 3, 1, 2, 3]).propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_equal_hashes_prove_nothing() -> None:
    """In CPython hash(-1) == hash(-2), so these two runs of three have one hash."""
    assert hash((-1, 5, 6)) == hash((-2, 5, 6))
    assert seen([-1, 5, 6, 7, -2, 5, 6]).propose(1) == []


def test_the_place_is_kept_while_it_is_right() -> None:
    """[5, 6, 7, 1] and [5, 6, 7, 2] both stand in the text. Once the second has gone on as told, its successor is 8, though
    the latest place of (6, 7, 2) is another.
    """
    ids = [3, 4, 5, 6, 7, 2, 8, 0, 6, 7, 2, 9, 0, 3, 4, 5, 6, 7]
    lookup = seen(ids)
    assert lookup.propose(2) == [2, 8]
    lookup.see([*ids, 2])
    assert lookup.propose(1) == [8]


def proposed(prompt: list[int], output: list[int], others: OtherOutputs | None = None) -> list[int]:
    """The two tokens that are proposed behind an output."""
    lookup = seen(prompt, others, "a")
    lookup.see([*prompt, *output])
    return lookup.propose(2)


def test_behind_a_word_that_was_replaced_one_token_is_enough() -> None:
    """1-9 again, with 0 in place of 5: there the place is left, and found again by the 6 alone."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 77, 1, 2, 3]
    assert proposed(prompt, [4, 0]) == []
    assert proposed(prompt, [4, 0, 6]) == [7, 8]


def test_words_may_come_or_go_where_a_place_was_left() -> None:
    """1-9 again, first with 50 and 51 ahead of the 5, then without 5 and 6."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 77, 1, 2, 3]
    assert proposed(prompt, [4, 50, 51, 5]) == [6, 7]
    assert proposed(prompt, [4, 7]) == [8, 9]


def test_a_place_that_was_left_long_ago_is_far() -> None:
    """After 16 tokens without a match one token says nothing any more, nor does one that stands more than 16 behind there."""
    prompt, new = [*range(100, 140), 77, *range(100, 104)], list(range(200, 216))
    assert proposed(prompt, [*new[:15], 104]) == [105, 106]
    assert proposed(prompt, [*new, 104]) == []
    assert proposed(prompt, [119]) == [120, 121]
    assert proposed(prompt, [120]) == []


def test_a_match_of_one_token_is_no_place_to_come_back_to() -> None:
    """119 stands near where the place was left, by chance: 200 follows. 106 is still found from there."""
    prompt = [*range(100, 140), 77, *range(100, 104)]
    assert proposed(prompt, [119, 200, 106]) == [107, 108]


def test_a_place_in_an_output_of_others_is_found_again_too() -> None:
    others = OtherOutputs(100)
    others.add("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    prompt = [9, 1, 2, 3, 4, 5, 6]
    assert proposed(prompt, [0], others) == []
    assert proposed(prompt, [0, 8], others) == [9, 10]
    assert proposed(prompt, [0, 10], others) == proposed(prompt, [0, 10, 11], others) == [], (
        "nothing follows the last one"
    )


def test_a_long_text_without_matches_is_looked_at_now_and_then() -> None:
    """100 tokens that never occurred, then the first 16 again. After 32 without a match every eighth token is looked at, so the
    repetition is found by the eleventh of them at the latest: three must match, and seven may pass before.
    """
    ids = [*range(100), *range(16)]
    lookup = seen(ids[:1])
    found = []
    for end in range(2, len(ids) + 1):
        lookup.see(ids[:end])
        found.append(bool(lookup.propose(1)))
    assert not any(found[:100])
    assert all(found[110:])
    assert lookup.propose(2) == [16, 17]


def test_it_knows_the_same_however_often_it_is_asked() -> None:
    rng = Random(3)
    ids = [rng.randrange(3) for _ in range(300)]
    often = seen(ids[:50])
    for end in range(51, 301):
        often.see(ids[:end])
        often.propose(4)
    at_last = seen(ids[:50])
    for end in range(100, 301, 50):
        at_last.see(ids[:end])
    assert at_last.propose(20) == often.propose(20) != []
    assert [at_last.confidence(n) for n in range(20)] == [often.confidence(n) for n in range(20)]


def test_many_tokens_at_once_are_not_looked_at_one_by_one() -> None:
    """After a rest of 65 tokens what stands in them is found, though how often matches were right is not known."""
    start, rest = [1, 2, 3] * 3, [*range(100, 162), 5, 6, 7]
    lookup = seen(start)
    lookup.see(start + rest)
    assert lookup.propose(2) == [] and lookup.confidence(0) == 0
    lookup.see([*start, *rest, 100, 101, 102])
    assert lookup.propose(2) == [103, 104]


def test_confidence_is_what_came_of_it() -> None:
    """Matches in a text of two random symbols are right half of the time, those of a repetition nearly always."""
    rng = Random(5)
    coin = seen([rng.randrange(2) for _ in range(20)])
    for _ in range(20):
        coin.see(coin._ids + [rng.randrange(2) for _ in range(30)])
    assert 0.2 < coin.confidence(0) < 0.8
    loop = seen([1, 2, 3] * 3)
    for count in range(20, 61, 20):
        loop.see([1, 2, 3] * count)
    assert loop.confidence(0) > 0.98


def test_outputs_of_others_are_found_in_their_namespace_only() -> None:
    others = OtherOutputs(100)
    others.add("a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert seen([9, 1, 2, 3, 4, 5, 6], others, "a").propose(5) == [7, 8]
    assert seen([9, 1, 2, 3, 4, 5, 6], others, "b").propose(5) == []
    assert seen([9, 9, 2, 3, 4, 5, 6], others, "a").propose(5) == [], "five tokens are too few"


def test_old_outputs_are_forgotten() -> None:
    """Three outputs of 10 tokens, room for 25: the first one goes, and what the second says besides stays."""
    others = OtherOutputs(25)
    for start in (0, 100, 200):
        others.add("a", list(range(start, start + 10)))
    assert not seen(list(range(6)), others, "a").propose(1)
    assert seen(list(range(100, 106)), others, "a").propose(1) == [106]
    for _ in range(50):
        others.add("b", list(range(10)))
    assert list(others._places) == ["b"] and others._num_tokens <= 25
    assert len(others._places["b"]) == 4, "positions 6 to 9 of one output"


def test_step_cost_finds_base_and_slope() -> None:
    """Steps of 10 ms + 1 ms for each token."""
    cost = StepCost()
    for step in range(200):
        tokens = 1 + step % 8
        cost.note(tokens, 0.010 + 0.001 * tokens)
    assert cost.per_token == pytest.approx(0.001, rel=0.05)
    assert cost.seconds(10) == pytest.approx(0.020, rel=0.05)


def test_step_cost_knows_of_tiles() -> None:
    """Up to 32 rows take 10 ms, up to 64 take 14 ms, which no line tells of 33 rows."""
    cost = StepCost()
    for step in range(200):
        tokens = (20, 32, 33, 40, 60)[step % 5]
        cost.note(tokens, 0.010 if tokens <= 32 else 0.014)
    for tokens, expected in ((32, 0.010), (33, 0.014), (40, 0.014)):
        assert cost.seconds(tokens) == pytest.approx(expected, rel=0.06)


def test_a_size_is_known_by_its_own_steps_not_by_others() -> None:
    """32 rows take 27 ms. Then 500 steps of 33 take 33 ms, every 64th is a trial: what 32 take stays known."""
    cost, trials = StepCost(), 0
    for _ in range(20):
        cost.note(32, 0.027)
    for _ in range(500):
        trials += cost.is_trial(2.0)
        cost.note(*((32, 0.027) if cost.is_trial(2.0) else (33, 0.033)))
    assert cost.seconds(32) == pytest.approx(0.027, rel=0.01) and cost.seconds(33) == pytest.approx(0.033, rel=0.01)
    assert trials in (7, 8)
    unclear = 0
    for _ in range(64):
        unclear += cost.is_trial(1.1)
        cost.note(33, 0.033)
    assert unclear == 4


def test_a_size_that_has_not_run_for_long_is_forgotten() -> None:
    """40 tokens took 50 ms when 32 took 20; 300 steps of 32 later, at 10 ms, they are taken to cost what a slope of 5 % says."""
    cost = StepCost()
    cost.note(32, 0.020)
    cost.note(40, 0.050)
    for _ in range(299):
        cost.note(32, 0.010)
    assert cost.seconds(40) > 0.030
    for _ in range(200):
        cost.note(32, 0.010)
    assert cost.seconds(40) < 0.013


class Told:
    """Of a sequence, what Acceptance looks at."""

    def __init__(self) -> None:
        self.num_tokens, self.num_guessed_tokens, self.num_right_guesses = 10, 0, 0

    def step(self, num_guessed: int, num_right: int) -> Told:
        self.num_tokens += num_right + 1
        self.num_guessed_tokens += num_guessed
        self.num_right_guesses += num_right
        return self


def test_acceptance_is_the_share_of_guesses_that_count() -> None:
    """Of four guesses two are right, one is wrong, one counts for nothing: two of three. Each counts a tenth when it comes, so
    in the long run it goes round between steps: behind the wrong one x, behind two right ones 1 - 0.81 (1 - x), and x is 0.9
    of that: x = 0.171 / 0.271.
    """
    seq = Told()
    acceptance = Acceptance(seq)
    for _ in range(100):
        acceptance.see(seq.step(4, 2))
        before = acceptance.share
        acceptance.see(seq)  # asking again changes nothing
        assert acceptance.share == before
    assert before == pytest.approx(0.171 / 0.271, rel=1e-6)


def test_what_is_known_of_guesses_fades_while_there_are_none() -> None:
    """Always wrong: 0.7 * 0.9^50. Then 100 tokens without guesses go the share 1 - 0.995^100 of the way back to 0.7."""
    seq = Told()
    acceptance = Acceptance(seq)
    for _ in range(50):
        acceptance.see(seq.step(3, 0))
    bad = 0.7 * 0.9**50
    assert acceptance.share == pytest.approx(bad)
    for _ in range(100):
        acceptance.see(seq.step(0, 0))
    assert acceptance.share == pytest.approx(0.7 - (0.7 - bad) * 0.995**100)


def test_what_was_seen_of_former_requests_is_not_of_this_one() -> None:
    """A session's turn before has had 50 guesses, all wrong. Of this one 3 are right: 1 - 0.3 * 0.9^3. None of them is wrong."""
    seq = Told().step(50, 0)
    acceptance = Acceptance(seq)
    assert acceptance.share == 0.7
    acceptance.see(seq.step(3, 3))
    assert acceptance.share == pytest.approx(1 - 0.3 * 0.9**3)


def test_tokens_without_guesses_fade_alike_however_often_it_looks() -> None:
    """One step of three wrong guesses, then ten tokens without any, in one look and in ten."""
    seqs = Told(), Told()
    once, often = map(Acceptance, seqs)
    for seq, acceptance in zip(seqs, (once, often)):
        acceptance.see(seq.step(3, 0))
    seqs[0].num_tokens += 10
    once.see(seqs[0])
    for _ in range(10):
        often.see(seqs[1].step(0, 0))
    assert once.share == pytest.approx(often.share) == pytest.approx(0.7 - 0.07 * 0.995**10)


def test_before_any_step_a_token_is_a_twentieth_of_a_step() -> None:
    assert StepCost().seconds(20) == 2 * StepCost().seconds(0)


def test_an_outlier_moves_little() -> None:
    cost = StepCost()
    for step in range(100):
        cost.note(1 + step % 8, 0.010)
    cost.note(4, 10.0)  # counts as 20 ms, one of 8
    assert 0.010 < cost.seconds(4) < 0.012


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
    driver = Driver(pool_tokens=1024, speculation=LOOKUP)
    rows = []
    for start in (0, 100):
        driver.ask(list(range(start, start + 32)), 40, cache_salt="a")
    while len(rows) < 2 or not all(seq.is_generating for seq in rows):
        driver.core.step()
        rows = driver.core.scheduler.running
    for each_ms, count in ((16, 0), (12, 1)):
        drafter = Drafter(LOOKUP)
        for _ in range(20):
            for tokens in (2, 3, 4, 5):
                drafter.cost.note(tokens, 0.1 + 0.001 * each_ms * (tokens - 2))
        drafter._known = {rows[0].seq_id: Sure(0.5), rows[1].seq_id: None}
        drafts = drafter.propose(list(rows), 100)
        assert [draft.num_tokens for draft in drafts.values()] == [count] * (count > 0)


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
