"""StepCost: how long a step of so many tokens takes, learnt from the steps that only generate.

    seconds = (base + per_token * tokens) * (what steps of about this size take, by that measure)

The line is a least-squares fit over the latest steps, older ones counting less and less. Without steps of different sizes its
slope cannot be told, so a guess is mixed in that a few steps outweigh. The factor is a mean for each group of sizes: a kernel
that works in tiles takes as long for one row more than a tile as for nearly two tiles.
"""

from __future__ import annotations

_FORGETTING = 0.98  # what a step counts when the next one is seen
_GUESS = 0.05  # of a token, as a share of the time that a step takes without any
_WEIGHT = 2.0  # of the guess, in squared tokens
_OUTLIER = 2.0  # a step that takes more than so many times what was expected counts as if it took just that
_TILE = 8  # sizes beyond it are told apart in groups of so many
_LATEST = 20  # steps that a factor is the mean of


class StepCost:
    def __init__(self) -> None:
        self._weight = 0.0  # of all steps
        self._tokens = 0.0  # mean
        self._seconds = 0.0  # mean
        self._variance = 0.0  # of tokens, times the weight
        self._covariance = 0.0  # of tokens and seconds, times the weight
        self._factors: dict[int, tuple[int, float]] = {}  # group of sizes -> (steps, mean factor)

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step was measured."""
        if self._weight:
            seconds = min(seconds, _OUTLIER * self.seconds(num_tokens))
        self._weight = _FORGETTING * self._weight + 1
        more_tokens, more_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += more_tokens / self._weight
        self._seconds += more_seconds / self._weight
        self._variance = _FORGETTING * self._variance + more_tokens * (num_tokens - self._tokens)
        self._covariance = _FORGETTING * self._covariance + more_tokens * (seconds - self._seconds)
        line = self._on_line(num_tokens)
        if line:
            count, factor = self._factors.get(_group(num_tokens), (0, 1.0))
            count = min(count + 1, _LATEST)
            self._factors[_group(num_tokens)] = count, factor + (seconds / line - factor) / count

    @property
    def per_token(self) -> float:
        """Seconds on the line, at least 0."""
        guess = _GUESS * self._seconds / (1 + _GUESS * self._tokens)
        return max(0.0, (self._covariance + _WEIGHT * guess) / (self._variance + _WEIGHT))

    def seconds(self, num_tokens: int) -> float:
        """Of a step with so many tokens. Before any step was measured, only ratios have a meaning."""
        if not self._seconds:
            return 1 + _GUESS * num_tokens
        return self._on_line(num_tokens) * self._factors.get(_group(num_tokens), (0, 1.0))[1]

    def _on_line(self, num_tokens: int) -> float:
        return max(self._seconds / 10, self._seconds + self.per_token * (num_tokens - self._tokens))


def _group(num_tokens: int) -> int:
    return num_tokens if num_tokens <= _TILE else _TILE + (num_tokens - 1) // _TILE
