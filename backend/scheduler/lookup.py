"""Lookup: guesses that a sequence goes on as it did when its latest tokens occurred before.

    ... the price of a ticket is 40 | and the price of a _       the last tokens match "the price of a": "ticket" may follow

It searches the sequence's own tokens, and the outputs of other conversations of its namespace (`OtherOutputs`). A place is found
by a hash of its last tokens, of NGRAMS lengths, and then compared token by token. While the sequence continues as the place did,
the place is kept and the match grows. When they differ, the sequence is likely to come back, because text behind a replaced word
is as before. So for the next NEAR tokens a match of a single token is enough, if it lies in the NEAR tokens behind that place.

    here   the price of a ticket was 40 and ...
    there  the price of a ticket is 40 and ...      left at "is"; "40" is found again at once

The share of right guesses is counted for each length of match, also while no drafts are asked for, so that their gain is known
without trying them.

The draft of a repetition copies from itself, as in LZ77: of "a b a b a b" it goes on for as long as one likes.

After prompt lookup decoding (Saxena 2023) and SuffixDecoding (arXiv 2411.04975), with hashes in place of a suffix tree.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from backend.scheduler.step_cost import LEARNING

NGRAMS = (6, 3)  # tokens that must match, the longer ones tried first
NEAR = 16  # tokens behind the end of a match, of the place and of the sequence
MAX_LENGTH = 32  # longest match that is counted; a longer one is no surer
# The probability that a match of 1, 2-3, 4-7, 8-15, 16-31 or more tokens is right, before any was verified.
_GUESSES = (0.0, 0.3, 0.3, 0.5, 0.7, 0.85, 0.9)


class Place(NamedTuple):
    """The token at `next_at` may come next, for the `length` tokens ahead of it are the sequence's latest."""

    output: Sequence[int] | None  # output of another conversation; None: the sequence's own tokens
    next_at: int
    length: int


class OtherOutputs:
    """The latest outputs of conversations, by namespace. Outputs of another namespace are never found."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._oldest_first: deque[tuple[str, array[int]]] = deque()
        self._places: dict[str, dict[int, tuple[array[int], int]]] = {}  # namespace -> hash -> output, next index

    def add(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Remember an output; the oldest ones are forgotten for it."""
        ids = array("i", token_ids[-self._max_tokens :] if self._max_tokens else ())
        if len(ids) <= NGRAMS[0]:
            return
        places = self._places.setdefault(namespace, {})
        places.update((key, (ids, index)) for index, key in enumerate(_hashes(ids[:-1], NGRAMS[0]), NGRAMS[0]))
        self._oldest_first.append((namespace, ids))
        self._num_tokens += len(ids)
        while self._num_tokens > self._max_tokens:
            self._forget(*self._oldest_first.popleft())

    def find(self, namespace: str, key: int) -> tuple[Sequence[int], int] | None:
        """An output with the tokens of this hash, and the index behind them."""
        return self._places.get(namespace, {}).get(key)

    def _forget(self, namespace: str, ids: array[int]) -> None:
        self._num_tokens -= len(ids)
        places = self._places[namespace]
        for key in _hashes(ids[:-1], NGRAMS[0]):
            if key in places and places[key][0] is ids:
                del places[key]
        if not places:
            del self._places[namespace]


class Lookup:
    """The matches of one sequence. They follow from the tokens that it has seen, not from the moments at which it is asked."""

    def __init__(self, namespace: str, others: OtherOutputs | None) -> None:
        """`others`: outputs that the sequence may learn from."""
        self._namespace, self._others = namespace, others
        self._ids: list[int] = []
        self._num_seen = 0
        self._next: list[dict[int, int]] = [{} for _ in NGRAMS]  # hash of the n-gram -> index behind its latest one
        self._place: Place | None = None
        self._left: Place | None = None  # the latest match of several tokens that has ended
        self._num_since_left = 0
        self._right = list(_GUESSES)
        self._num_unmatched = 0  # latest tokens without a match

    def see(self, ids: list[int]) -> None:
        """Learn all tokens so far. `ids` only grows from call to call."""
        self._ids = ids
        if len(ids) - self._num_seen > (2 * MAX_LENGTH if self._num_seen else 1):
            self._skip_to(len(ids) - 1)
            self._place = self._left = None
        while self._num_seen < len(ids):
            if self._num_unmatched >= MAX_LENGTH:  # so many tokens without a match: look at some of them only
                if len(ids) - self._num_seen < NEAR // 2:
                    return
                self._skip_to(self._num_seen + NEAR // 2 - 1)
            self._see_next(ids[self._num_seen])

    def confidence(self, num_drafts: int) -> float:
        """The probability that the next draft is right, if `num_drafts` before it are."""
        return 0.0 if self._place is None else self._right[_rank(self._place.length + num_drafts)]

    def propose(self, limit: int) -> list[int]:
        """Up to `limit` tokens that may come next."""
        if self._place is None:
            return []
        output, start, _ = self._place
        ids = self._ids if output is None else output
        drafts = list(ids[start : start + limit])
        if output is None:
            while len(drafts) < limit:
                drafts.append(drafts[start + len(drafts) - len(ids)])
        return drafts

    def _skip_to(self, end: int) -> None:
        """Learn the tokens up to `end` without searching for a match."""
        for size, known in zip(NGRAMS, self._next):
            first = max(size, self._num_seen + 1)  # the end of the first n-gram that is new
            known.update(zip(_hashes(self._ids[first - size : end], size), range(first, end + 1)))
        self._num_seen = end

    def _see_next(self, token_id: int) -> None:
        place, self._place = self._place, None
        self._num_seen += 1
        end = self._num_seen
        if place is not None:
            ids = self._ids if place.output is None else place.output
            is_right = ids[place.next_at] == token_id
            rank = _rank(place.length)
            self._right[rank] += LEARNING * (is_right - self._right[rank])
            if is_right and place.next_at + 1 < len(ids):
                self._place = Place(place.output, place.next_at + 1, place.length + 1)
            elif place.length >= NGRAMS[-1]:
                self._left, self._num_since_left = place, 0
        for size, known in zip(NGRAMS, self._next):
            if end < size:
                continue
            key = hash(tuple(self._ids[end - size : end]))
            index = known.get(key)
            known[key] = end
            if self._place is None:
                self._place = self._compared(None, index, size)
                if self._place is None and size == NGRAMS[0] and self._others is not None:
                    found = self._others.find(self._namespace, key)
                    self._place = None if found is None else self._compared(*found, size)
        if self._place is None and self._left is not None:
            self._place = self._near(self._left, token_id)
        self._num_unmatched = 0 if self._place is not None else self._num_unmatched + 1

    def _near(self, left: Place, token_id: int) -> Place | None:
        """The token's next occurrence behind the place that was left, if both are near."""
        self._num_since_left += 1
        if self._num_since_left > NEAR:
            self._left = None
            return None
        ids, end = (self._ids, self._num_seen - 1) if left.output is None else (left.output, len(left.output) - 1)
        try:
            index = ids.index(token_id, left.next_at, min(end, left.next_at + NEAR))
        except ValueError:
            return None
        return Place(left.output, index + 1, 1)

    def _compared(self, output: Sequence[int] | None, index: int | None, size: int) -> Place | None:
        """The place, if its tokens are those of the sequence; equal hashes prove nothing."""
        if index is None:
            return None
        ids = self._ids if output is None else output
        length, most = 0, min(index, self._num_seen, MAX_LENGTH)
        while length < most and ids[index - 1 - length] == self._ids[self._num_seen - 1 - length]:
            length += 1
        return Place(output, index, length) if length >= size else None


def _rank(length: int) -> int:
    return min(length, MAX_LENGTH).bit_length()


def _hashes(ids: Sequence[int], size: int) -> Iterator[int]:
    """The hash of each run of `size` tokens, in order."""
    runs: Iterable[tuple[int, ...]] = zip(*(ids[start:] for start in range(size)))
    return map(hash, runs)
