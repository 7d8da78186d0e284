"""RoundRobin: serves namespaces one after the other, so that a namespace with much work does not delay the others."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Taken(NamedTuple, Generic[K]):
    """Work that has begun."""

    namespace: str
    key: K


class RoundRobin(Generic[K]):
    """Round robin over namespaces; within a namespace the oldest work comes first. Not thread-safe."""

    def __init__(self, share: int) -> None:
        """`share`: how much work of one namespace may be in progress at once."""
        self._share = share
        self._lines: OrderedDict[str, dict[K, None]] = OrderedDict()  # namespaces in the order in which they are served
        self._running: Counter[str] = Counter()

    def __bool__(self) -> bool:
        """True if any work waits."""
        return bool(self._lines)

    def num_waiting(self, namespace: str) -> int:
        return len(self._lines.get(namespace, ()))

    def put(self, namespace: str, key: K) -> None:
        """Queue work. A key may wait in several namespaces; it is taken once, for the namespace that is served first."""
        self._lines.setdefault(namespace, {})[key] = None

    def take(self, may: Callable[[str], bool] = lambda namespace: True) -> Taken[K] | None:
        """Take the next work of a namespace that `may` accepts; call `done` when it is finished. None if no such namespace may
        start more.
        """
        for namespace, line in self._lines.items():
            if self._running[namespace] < self._share and may(namespace):
                key = next(iter(line))
                self._running[namespace] += 1
                self.discard(key)
                if namespace in self._lines:
                    self._lines.move_to_end(namespace)
                return Taken(namespace, key)
        return None

    def done(self, namespace: str) -> None:
        """Work of this namespace is finished."""
        self._running[namespace] -= 1
        if not self._running[namespace]:
            del self._running[namespace]

    def discard(self, key: K) -> None:
        """Remove waiting work from every namespace."""
        for namespace, line in list(self._lines.items()):
            line.pop(key, None)
            if not line:
                del self._lines[namespace]

    def clear(self) -> None:
        """Remove all waiting work. Work in progress still counts."""
        self._lines.clear()
