"""PassCost: how long a step takes whose rows a draft model has guessed at, by the number of rows and of its passes.

    seconds(rows, passes) = what such steps have taken lately; where they are not known, on the line through the steps without
                            guesses and those of the nearest number of passes; else at what a pass has cost of any step

The first step with guesses behind one without is not counted: the draft model computes first what it has missed.
"""

from __future__ import annotations

from backend.scheduler.step_cost import group_of

_SHARE = 0.3  # of a step that a pass takes, before any is known
_LATEST = 8  # steps that a mean is of
_OUTLIER = 2.0  # a step that takes more than so many times the mean counts as if it took just that


class PassCost:
    def __init__(self) -> None:
        self._means: dict[int, dict[int, tuple[int, float]]] = {}  # group of rows -> passes -> steps, seconds
        self._share = _SHARE
        self._latest = 0  # passes of the latest step

    def note(self, num_rows: int, num_passes: int, seconds: float) -> None:
        """A step was measured."""
        is_first, self._latest = num_passes > 0 == self._latest, num_passes
        if is_first:
            return
        means = self._means.setdefault(group_of(num_rows), {})
        count, mean = means.get(num_passes, (0, seconds))
        count = min(count + 1, _LATEST)
        means[num_passes] = count, mean + (min(seconds, _OUTLIER * mean) - mean) / count
        plain = means[0][1] if 0 in means else 0.0
        if num_passes and plain:
            self._share = (means[num_passes][1] / plain - 1) / num_passes

    def forget(self) -> None:
        """What steps with passes have taken: the machine may be another one by now."""
        for means in self._means.values():
            for num_passes in [each for each in means if each]:
                del means[num_passes]

    def is_known(self, num_rows: int) -> bool:
        """True if a step without guesses was measured."""
        return 0 in self._means.get(group_of(num_rows), {})

    def seconds(self, num_rows: int, num_passes: int) -> float:
        """`is_known` must be true. Where steps take no time that the clock tells, only ratios have a meaning."""
        means = self._means[group_of(num_rows)]
        plain = means[0][1]
        if not plain:
            return 1 + self._share * num_passes
        if num_passes in means:
            return means[num_passes][1]
        near = min((each for each in means if each), key=lambda each: abs(each - num_passes), default=0)
        share = (means[near][1] / plain - 1) / near if near else self._share
        return plain * (1 + max(0.0, share) * num_passes)
