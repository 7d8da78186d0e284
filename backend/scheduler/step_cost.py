"""StepCost: how long a step takes by its tokens and by the passes of a draft model, learnt from the steps that only generate.

    seconds(tokens)           the mean of the latest steps of about this size, or of all steps where no such step is known,
                              + per_token for each token more than these had
    seconds(tokens, passes)   the mean of the latest such steps; where there are none, on the line through the steps without
                              passes and those of the nearest number of passes; else at the share of a step that passes had last

Each group of sizes has a mean of its own: a kernel that works in tiles takes as long for one row more than a tile as for nearly
two tiles. A mean is forgotten when no such step has run for long, because the machine may have changed since. What a token costs
is the slope of a least-squares fit over the latest steps, in which older ones count less and less. It starts from an assumption,
which a few steps outweigh, because steps of one size have no slope.

Now and then a step is a trial without drafts, to measure again the time that drafts are compared with.

These are the constants of all decisions about drafts:
"""

from __future__ import annotations

from typing import NamedTuple

# Assumed cost of a token, and the least gain that counts, as shares of a step: times vary about as much.
SHARE = 0.05
PASS_SHARE = 0.3  # assumed cost of a pass of a draft model, as a share of a step
MARGIN = 1.25  # a draft must be worth so much more than it costs
ASSUMED = 0.7  # share of a draft model's guesses that are right, for a sequence that nothing is known about
LEARNING = 0.1  # weight of the newest outcome in the probability that a guess is right
LATEST = 8  # steps in a mean; estimates are computed again after so many
PERIOD = 64  # steps from one trial to the next
RESTS = 100  # steps without drafts where guessing costs more than it wins
MAX_DRAFTS = 256  # drafts of one step: each may need a row of logits, as long as the vocabulary
TILE = 8  # sizes above it form groups of so many


class _Mean(NamedTuple):
    """Steps of one group of sizes, with the same number of passes."""

    num_steps: int
    tokens: float
    seconds: float
    latest: int  # number of its latest step


class StepCost:
    def __init__(self) -> None:
        self._weight = 0.0  # sum of the weights of all steps without passes
        self._tokens = 0.0  # mean
        self._seconds = 0.0  # mean
        self._variance = 0.0  # variance of tokens, times the weight
        self._covariance = 0.0  # covariance of tokens and seconds, times the weight
        self._means: dict[int, dict[int, _Mean]] = {}  # group of sizes -> passes -> its steps
        self._pass_share = PASS_SHARE
        self._num_steps = 0
        self._latest_passes = 0
        self._estimates: dict[tuple[int, int], float] = {}  # results of `seconds` and `least_share`, for LATEST steps
        self._least: dict[tuple[int, int], float] = {}

    def note(self, num_tokens: int, seconds: float, num_passes: int = 0) -> None:
        """A step was measured. The first one with passes does not count: the draft model first computes what it has missed."""
        is_first, self._latest_passes = num_passes > 0 == self._latest_passes, num_passes
        if is_first:
            return
        means = self._means.setdefault(group_of(num_tokens), {})
        known = self._known(num_tokens, num_passes) or _Mean(0, 0.0, 0.0, 0)
        if self._weight and not num_passes:
            seconds = min(seconds, 2 * self._expected(num_tokens))  # an outlier counts as twice what was expected
        elif known.num_steps:
            seconds = min(seconds, 2 * known.seconds)
        self._num_steps += 1
        if not num_passes:
            self._fit(num_tokens, seconds)
        if self.is_refreshed:
            self._estimates.clear()
            self._least.clear()
        count = min(known.num_steps + 1, LATEST)
        tokens = known.tokens + (num_tokens - known.tokens) / count
        mean = known.seconds + (seconds - known.seconds) / count
        means[num_passes] = _Mean(count, tokens, mean, self._num_steps)
        plain = means[0].seconds if 0 in means else 0.0
        if num_passes and plain:
            self._pass_share = (mean / plain - 1) / num_passes

    def forget_passes(self) -> None:
        """Forget what steps with passes have taken: the machine may have changed since."""
        for means in self._means.values():
            for num_passes in [each for each in means if each]:
                del means[num_passes]
        self._estimates.clear()

    def is_known(self, num_tokens: int) -> bool:
        """True if a step of about this size was measured without passes."""
        return self._known(num_tokens) is not None

    @property
    def is_refreshed(self) -> bool:
        """True if estimates are computed again after the latest step: after each one at first, then after every LATEST-th."""
        return self._num_steps <= PERIOD or self._num_steps % LATEST == 0

    def is_trial(self, speed: float) -> bool:
        """True if the next step is to have no drafts. `speed`: tokens/s with drafts divided by those without. Where that is about
        1, trials cost little and decide much.
        """
        between = PERIOD if speed >= MARGIN else PERIOD // 4
        return self._num_steps % between == between - 1

    @property
    def per_token(self) -> float:
        """Seconds on the line, at least 0."""
        assumed = SHARE * self._seconds / (1 + SHARE * self._tokens)
        return max(0.0, (self._covariance + 2 * assumed) / (self._variance + 2))

    def seconds(self, num_tokens: int, num_passes: int = 0) -> float:
        """Seconds of a step of this size. Before any step was measured, only ratios have a meaning."""
        key = num_tokens, num_passes
        if key not in self._estimates:
            self._estimates[key] = self._expected(num_tokens, num_passes)
        return self._estimates[key]

    def least_share(self, num_tokens: int, most: int) -> float:
        """The smallest share of a step of this size that one more token takes, of up to `most` more."""
        key = num_tokens, most
        if key not in self._least:
            base = self.seconds(num_tokens)
            shares = ((self.seconds(num_tokens + more) / base - 1) / more for more in range(1, most + 1))
            self._least[key] = min(shares)
        return self._least[key]

    def _fit(self, num_tokens: int, seconds: float) -> None:
        keeping = 1 - 1 / PERIOD
        self._weight = keeping * self._weight + 1
        more_tokens, more_seconds = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += more_tokens / self._weight
        self._seconds += more_seconds / self._weight
        self._variance = keeping * self._variance + more_tokens * (num_tokens - self._tokens)
        self._covariance = keeping * self._covariance + more_tokens * (seconds - self._seconds)

    def _expected(self, num_tokens: int, num_passes: int = 0) -> float:
        if num_passes:
            return self._expected_with(num_passes, num_tokens)
        if not self._seconds:
            return 1 + SHARE * num_tokens
        known = self._known(num_tokens) or _Mean(0, self._tokens, self._seconds, 0)
        return max(known.seconds / 10, known.seconds + self.per_token * (num_tokens - known.tokens))

    def _expected_with(self, num_passes: int, num_tokens: int) -> float:
        plain, share = self._expected(num_tokens), self._pass_share
        passes = [each for each in self._means.get(group_of(num_tokens), {}) if each]
        near = min(passes, key=lambda each: abs(each - num_passes), default=0)
        known = self._known(num_tokens, near) if near and self._seconds else None
        if known is not None and near == num_passes:
            return known.seconds
        if known is not None:
            share = (known.seconds / plain - 1) / near
        return plain * (1 + max(0.0, share) * num_passes)

    def _known(self, num_tokens: int, num_passes: int = 0) -> _Mean | None:
        mean = self._means.get(group_of(num_tokens), {}).get(num_passes)
        return None if mean is None or self._num_steps - mean.latest > 5 * PERIOD else mean


def group_of(num_tokens: int) -> int:
    """The group of a size: its steps share a mean."""
    return num_tokens if num_tokens <= TILE else TILE + (num_tokens - 1) // TILE
