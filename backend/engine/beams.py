"""Beam search: selects the hypotheses that go on and those that end, after the rules of Hugging Face's generate.

In each step every hypothesis has its most likely next tokens (candidates). All of them are ranked by the sum of the
log-probabilities of the whole output:

    candidates of all hypotheses, best first     1 2 3 4 | 5 6 7 8 ...      k = 4
        those that go on                         the first k that do not end
        those that end                           of the first k only; ranked by sum / length ** length_penalty, k are kept

A row returns max(2, 1 + ends) * k candidates, where `ends` is the number of end ids and stop words, so that k candidates remain
whichever of them end. Forbidden tokens (bad words, end ids before min_tokens) are removed, and as many more candidates requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from backend.api.request import Request
from backend.api.response import FinishReason
from backend.core.gathered import Gathered
from backend.core.group import BeamGroup
from backend.core.sequence import BeamSequence, Sequence
from backend.kvcache.manager import KVCacheManager
from backend.scheduler.scheduler import Scheduler

FORBIDDEN = -9999.0  # log-probability that workers return for a token that a guide forbids


@dataclass(slots=True)
class Hypothesis:
    """An output that has ended. `score` ranks it."""

    token_ids: list[int]
    cum_log_prob: float
    log_probs: list[float]
    score: float
    reason: FinishReason
    gathered: Gathered | None = None  # its tensors, where the client asked for some


@dataclass(slots=True)
class _Candidate:
    parent: BeamSequence
    token_id: int
    log_prob: float
    cum_log_prob: float
    rank: float  # by which candidates are compared


class BeamSearch(BeamGroup):
    """A group with the hypotheses that have ended. Those that go on are its `beams`."""

    __slots__ = ("ended", "rows")

    def __init__(self, beam_width: int, num_candidates: int) -> None:
        super().__init__(beam_width, num_candidates)
        self.rows: list[BeamSequence] = []  # all rows of the search, dormant ones included
        self.ended: list[Hypothesis] = []  # best first, at most beam_width

    def result(self, reason: FinishReason) -> list[Hypothesis]:
        """The hypotheses to return, best first. Those that have not ended count as ended with `reason`."""
        config = self.rows[0].request.sampling_config
        open_ones = [_as_ended(beam, reason) for beam in self.beams if beam.num_output_tokens]
        ranked = sorted([*self.ended, *open_ones], key=lambda hypothesis: -hypothesis.score)
        return ranked[: config.num_return_sequences or self.beam_width]


def make_beams(make: Callable[[], BeamSequence], request: Request) -> list[Sequence]:
    """Make the rows of a search. Until the prompt is computed the first row is the only hypothesis."""
    config = request.sampling_config
    ends = len(set(request.end_ids)) + len(request.stop_words)
    masked = (len(set(request.end_ids)) if config.min_tokens else 0) + len(request.bad_words)
    search = BeamSearch(config.beam_width, max(2, 1 + ends) * config.beam_width + masked)
    search.rows = [make() for _ in range(config.beam_width)]
    search.rows[0].is_dormant = False
    search.beams = search.rows[:1]
    for row in search.rows:
        row.group = search
    search.members = list(search.rows)
    return list(search.rows)


def search_of(seq: Sequence) -> BeamSearch:
    """The search to which a row belongs."""
    assert isinstance(seq.group, BeamSearch)
    return seq.group


def advance(search: BeamSearch, kv: KVCacheManager, scheduler: Scheduler, now_ns: int) -> bool:
    """Advance the search by one token, from the candidates of all hypotheses. Returns True if it is over."""
    request = search.members[0].request
    ranked = _candidates(search, request)
    width = search.beam_width
    num_output = search.beams[0].num_output_tokens + 1
    going_on: list[_Candidate] = []
    for place, candidate in enumerate(ranked):
        reason = _end_of(candidate, num_output)
        if reason is FinishReason.NOT_FINISHED:
            going_on.append(candidate)
        elif place < width:
            search.ended.append(_hypothesis(candidate, reason))
    search.ended.sort(key=lambda ended: -ended.score)
    del search.ended[width:], going_on[width:]
    if not going_on or _is_over(search, going_on[0].cum_log_prob, num_output):
        search.beams = []
        return True
    _go_on(search, going_on, kv, scheduler, now_ns)
    return False


def _candidates(search: BeamSearch, request: Request) -> list[_Candidate]:
    """All allowed candidates, best first; among equals that of the better hypothesis, then the lower token id."""
    config = request.sampling_config
    rate = config.beam_search_diversity_rate or 0.0
    is_short = search.beams[0].num_output_tokens < (config.min_tokens or 0)
    found = []
    for beam in search.beams:
        assert beam.candidates is not None  # the search is ready, so every hypothesis has them
        forbidden = {word[-1] for word in request.bad_words if _ends_with(beam, word[:-1])}
        if is_short:
            forbidden.update(request.end_ids)
        pairs = beam.candidates.top_log_probs
        allowed = (pair for pair in pairs if pair[0] not in forbidden and pair[1] > FORBIDDEN)
        for index, (token_id, log_prob) in enumerate(allowed):
            total = beam.cum_log_prob + log_prob
            found.append(_Candidate(beam, token_id, log_prob, total, total + rate * index))
    found.sort(key=lambda candidate: -candidate.rank)
    return found


def _ends_with(seq: Sequence, word: list[int]) -> bool:
    """True if prompt and output together end with these tokens."""
    return not word or seq.token_ids[-len(word) :] == word


def _end_of(candidate: _Candidate, num_output: int) -> FinishReason:
    """The finish reason of a hypothesis whose `num_output`-th token is the candidate; NOT_FINISHED if it goes on."""
    parent, request = candidate.parent, candidate.parent.request
    if num_output >= (request.sampling_config.min_tokens or 0):
        if candidate.token_id in request.end_ids:
            return FinishReason.END_ID
        if any(_completes(candidate, word) for word in request.stop_words):
            return FinishReason.STOP_WORDS
    return FinishReason.LENGTH if num_output >= parent.max_output_tokens else FinishReason.NOT_FINISHED


def _completes(candidate: _Candidate, word: list[int]) -> bool:
    """True if the output ends with the stop word once the candidate is appended."""
    parent, rest = candidate.parent, word[:-1]
    is_there = len(rest) <= parent.num_output_tokens and _ends_with(parent, rest)
    return is_there and word[-1] == candidate.token_id


def _hypothesis(candidate: _Candidate, reason: FinishReason) -> Hypothesis:
    parent = candidate.parent
    token_ids = [*parent.token_ids[parent.num_prompt_tokens :], candidate.token_id]
    score = _score(parent, candidate.cum_log_prob, len(token_ids))
    log_probs = [*parent.log_probs, candidate.log_prob]
    return Hypothesis(token_ids, candidate.cum_log_prob, log_probs, score, reason, _forked(parent, len(token_ids)))


def _as_ended(beam: BeamSequence, reason: FinishReason) -> Hypothesis:
    token_ids = beam.token_ids[beam.num_prompt_tokens :]
    score, gathered = _score(beam, beam.cum_log_prob, len(token_ids)), _forked(beam, len(token_ids))
    return Hypothesis(token_ids, beam.cum_log_prob, list(beam.log_probs), score, reason, gathered)


def _forked(row: BeamSequence, num_tokens: int) -> Gathered | None:
    """The tensors of the first `num_tokens` output tokens of a row."""
    if row.gathered is None:
        return None
    gathered = row.gathered.fork()
    gathered.keep_generation(num_tokens)
    return gathered


def _score(seq: Sequence, cum_log_prob: float, length: int) -> float:
    return cum_log_prob / math.pow(length, seq.request.sampling_config.length_penalty or 0.0)


def _is_over(search: BeamSearch, best: float, num_output: int) -> bool:
    """True if no hypothesis that goes on can overtake those that have ended. `best`: the greatest log-probability of those."""
    first = search.members[0]
    config = first.request.sampling_config
    if len(search.ended) < search.beam_width:
        return False
    if config.early_stopping in (None, 1):
        return True
    is_never = config.early_stopping != 0 and (config.length_penalty or 0.0) > 0
    return _score(first, best, first.max_output_tokens if is_never else num_output) <= search.ended[-1].score


def _go_on(
    search: BeamSearch, going_on: list[_Candidate], kv: KVCacheManager, scheduler: Scheduler, now_ns: int
) -> None:
    """Give each candidate a row. The first of a hypothesis takes its row; further ones fork into rows that became free."""
    stay: dict[int, _Candidate] = {}
    for candidate in going_on:
        stay.setdefault(candidate.parent.seq_id, candidate)
    free = [row for row in search.rows if row.seq_id not in stay]
    beams: list[BeamSequence] = []
    for candidate in going_on:
        row = candidate.parent
        if stay[row.seq_id] is not candidate:
            child = free.pop(0)
            kv.fork(child, row)
            child.become(row)
            scheduler.renew(child)
            row = child
        beams.append(row)
    for row in free:  # fewer hypotheses go on than before
        if not row.is_dormant:
            kv.vacate(row)
            row.clear()
    for row, candidate in zip(beams, going_on, strict=True):
        _append(row, candidate, scheduler, now_ns)
    search.beams = beams


def _append(row: BeamSequence, candidate: _Candidate, scheduler: Scheduler, now_ns: int) -> None:
    sampled = candidate.parent.candidates
    if row is not candidate.parent or sampled is None or sampled.token_id != candidate.token_id:
        scheduler.renew(row)  # the worker has appended another token, or has never had this hypothesis
    row.token_ids.append(candidate.token_id)
    row.cum_log_prob = candidate.cum_log_prob
    row.log_probs.append(candidate.log_prob)
    row.candidates = None
    row.first_token_ns = row.first_token_ns or now_ns
    row.last_token_ns = now_ns
