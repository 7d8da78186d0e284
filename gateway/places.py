"""How much may be under way at once, and how much of it may be one client's."""

from __future__ import annotations

from collections import Counter

SHARE = 3  # so many places a client may hold for each that is left free: three quarters, when it is alone


class Places:
    """A number of places for requests. With keys a client that holds some gets no more than its share: however many requests
    it sends, places are left for clients that hold none.
    """

    def __init__(self, total: int, with_shares: bool) -> None:
        self.total, self._with_shares = total, with_shares
        self._held: Counter[str] = Counter()
        self.taken = 0

    def held(self, namespace: str) -> int:
        return self._held[namespace]

    def take(self, namespace: str, count: int = 1) -> bool:
        """False where there are not as many for this client."""
        free, held = self.total - self.taken - count, self._held[namespace]
        if free < 0 or (self._with_shares and held and held + count > SHARE * free):
            return False
        self._held[namespace] += count
        self.taken += count
        return True

    def give_back(self, namespace: str, count: int = 1) -> None:
        self.taken -= count
        self._held[namespace] -= count
        if not self._held[namespace]:
            del self._held[namespace]
