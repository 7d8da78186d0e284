"""StepCost: how long a step of so many tokens takes, learnt from the steps that only generate.

    seconds = what steps of about this size have taken lately, or all steps where those are not known,
              + per_token for each token more than these had

Each group of sizes has a mean of its own: a kernel that works in tiles takes as long for one row more than a tile as for nearly
two tiles. It is forgotten when no such step has run for long, for the machine may be another one by then. What a
token costs is the slope of a least-squares fit over the latest steps, older ones counting less and less. Without steps of
different sizes that cannot be told, so a guess is mixed in that a few steps outweigh.

Now and then a step is to be a trial, without guesses, so that the time that guesses are compared with is not an old one.
"""

from __future__ import annotations

from typing import NamedTuple

_FORGETTING = 0.98  # what a step counts when the next one is seen
_GUESS = 0.05  # of a token, as a share of the time that a step takes without any
_WEIGHT = 2.0  # of the guess, in squared tokens
_OUTLIER = 2.0  # a step that takes more than so many times what was expected counts as if it took just that
_TILE = 8  # sizes beyond it are told apart in groups of so many
_LATEST = 8  # steps that a group's mean is of
_REMEMBERED = 300  # steps without one of a group, after which nothing is known of it
_BETWEEN_TRIALS = 64, 16  # steps; the second where it is not clear that guesses pay
_CLEAR = 1.25
_BETWEEN_LOOKS = 8  # steps after which what is told of any size is worked out anew; in the first ones after each
_EARLY = 64


class _Group(NamedTuple):
    """Steps of sizes that are not told apart."""

    num_steps: int
    tokens: float  # mean
    seconds: float  # mean
    latest: int  # number of its latest step


class StepCost:
    def __init__(self) -> None:
        self._weight = 0.0  # of all steps
        self._tokens = 0.0  # mean
        self._seconds = 0.0  # mean
        self._variance = 0.0  # of tokens, times the weight
        self._covariance = 0.0  # of tokens and seconds, times the weight
        self._groups: dict[int, _Group] = {}
        self._num_steps = 0
        self._told: dict[int, float] = {}  # what `seconds` and `least_share` have said lately
        self._least: dict[tuple[int, int], float] = {}

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step was measured."""
        if self._weight:
            seconds = min(seconds, _OUTLIER * self._expected(num_tokens))
        self._weight = _FORGETTING * self._weight + 1
        more_tokens, more_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += more_tokens / self._weight
        self._seconds += more_seconds / self._weight
        self._variance = _FORGETTING * self._variance + more_tokens * (num_tokens - self._tokens)
        self._covariance = _FORGETTING * self._covariance + more_tokens * (seconds - self._seconds)
        self._num_steps += 1
        if self.looks_anew:
            self._told.clear()
            self._least.clear()
        known = self._known(num_tokens) or _Group(0, 0.0, 0.0, 0)
        count = min(known.num_steps + 1, _LATEST)
        tokens = known.tokens + (num_tokens - known.tokens) / count
        mean = known.seconds + (seconds - known.seconds) / count
        self._groups[group_of(num_tokens)] = _Group(count, tokens, mean, self._num_steps)

    @property
    def looks_anew(self) -> bool:
        """True if the step that was measured last is one after which all is worked out anew."""
        return self._num_steps <= _EARLY or self._num_steps % _BETWEEN_LOOKS == 0

    def is_trial(self, speed: float) -> bool:
        """True if the next step is to have no guesses. `speed`: of steps with guesses, that of plain ones being 1. Where it is
        about the same, trials cost little and decide much.
        """
        between = _BETWEEN_TRIALS[speed < _CLEAR]
        return self._num_steps % between == between - 1

    @property
    def per_token(self) -> float:
        """Seconds on the line, at least 0."""
        guess = _GUESS * self._seconds / (1 + _GUESS * self._tokens)
        return max(0.0, (self._covariance + _WEIGHT * guess) / (self._variance + _WEIGHT))

    def seconds(self, num_tokens: int) -> float:
        """Of a step with so many tokens. Before any step was measured, only ratios have a meaning."""
        if num_tokens not in self._told:
            self._told[num_tokens] = self._expected(num_tokens)
        return self._told[num_tokens]

    def least_share(self, num_tokens: int, most: int) -> float:
        """The smallest share of a step with so many tokens that one more takes, of up to `most` more."""
        key = num_tokens, most
        if key not in self._least:
            base = self.seconds(num_tokens)
            shares = ((self.seconds(num_tokens + more) / base - 1) / more for more in range(1, most + 1))
            self._least[key] = min(shares)
        return self._least[key]

    def _expected(self, num_tokens: int) -> float:
        if not self._seconds:
            return 1 + _GUESS * num_tokens
        known = self._known(num_tokens)
        if known is None:
            known = _Group(0, self._tokens, self._seconds, 0)
        return max(known.seconds / 10, known.seconds + self.per_token * (num_tokens - known.tokens))

    def _known(self, num_tokens: int) -> _Group | None:
        group = self._groups.get(group_of(num_tokens))
        return None if group is None or self._num_steps - group.latest > _REMEMBERED else group


def group_of(num_tokens: int) -> int:
    """Sizes of one number are not told apart."""
    return num_tokens if num_tokens <= _TILE else _TILE + (num_tokens - 1) // _TILE
