"""LevelRates: what is quicker for a prefix, to load its KV or to compute it, by what both have taken lately."""

from __future__ import annotations

from dataclasses import dataclass

KEPT_SHARE = 0.8  # with each measurement the earlier ones lose the rest of their weight
MARGIN = 0.8  # loading must be expected to take no more than this share of the time that computing takes
PROBE_S = 10.0  # after so long without a measurement the level is tried again
PROBE_BLOCKS = 4


@dataclass(slots=True)
class Pace:
    """Seconds for one unit, the latest measurements counting most."""

    units: float = 0.0
    seconds: float = 0.0

    def note(self, units: float, seconds: float) -> None:
        self.units = KEPT_SHARE * self.units + units
        self.seconds = KEPT_SHARE * self.seconds + seconds

    @property
    def per_unit(self) -> float | None:
        """None while nothing has been measured."""
        return self.seconds / self.units if self.units and self.seconds else None


class LevelRates:
    def __init__(self, block_tokens: int, block_bytes: int) -> None:
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        self.load, self.prefill = Pace(), Pace()  # units: bytes, tokens
        self._measured_ns = 0

    def note_load(self, num_bytes: int, seconds: float, now_ns: int) -> None:
        """A load has ended. `seconds`: from its request to its end, waits included."""
        self.load.note(num_bytes, seconds)
        self._measured_ns = now_ns

    def prefill_s(self, num_blocks: int) -> float | None:
        """Seconds that computing so many blocks takes under the present load; None while it is not known."""
        pace = self.prefill.per_unit
        return None if pace is None else num_blocks * self._block_tokens * pace

    def num_to_load(self, num_blocks: int, queued_bytes: int, queued_tokens: int, now_ns: int) -> int:
        """How many of `num_blocks` blocks to load; the others are computed behind them.

        queued_bytes: bytes of other loads that the reader finishes first
        queued_tokens: prompt tokens of other sequences that the steps compute first; loads in that time cost nothing
        """
        load, prefill = self.load.per_unit, self.prefill.per_unit
        if load is None or prefill is None:
            return num_blocks
        one, computed_one = load * self._block_bytes, prefill * self._block_tokens
        begins, wait = load * queued_bytes, prefill * queued_tokens
        all_computed = wait + num_blocks * computed_one

        def seconds(count: int) -> float:
            return max(begins + count * one, wait) + (num_blocks - count) * computed_one

        meanwhile = int(max(0.0, wait - begins) / one) if one else num_blocks
        best = min((num_blocks, min(meanwhile, num_blocks)), key=seconds)
        if seconds(best) <= MARGIN * all_computed:
            return best
        is_old = now_ns - self._measured_ns > PROBE_S * 1e9
        return min(num_blocks, PROBE_BLOCKS) if is_old and not queued_bytes else 0
