"""The store of responses keeps its bounds."""

from __future__ import annotations

import gc
import tracemalloc

from gateway.items import message_item
from gateway.store import ITEM_BYTES, OVERHEAD_BYTES, Conversation, ResponseStore, Stored


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(name: str, parent: Stored | None = None, text: str = "x") -> Stored:
    return Stored(name, ({"type": "message", "content": text},), (), parent, b"")


def test_the_least_recently_used_response_goes_first() -> None:
    store = ResponseStore(2, 1 << 20, 60, Clock())
    for name in ("a", "b"):
        store.put("ns", stored(name))
    assert store.get("ns", "a") is not None
    store.put("ns", stored("c"))
    assert [store.get("ns", name) is not None for name in ("a", "b", "c")] == [True, False, True]


def test_a_response_is_forgotten_when_it_was_not_used_for_the_time_limit() -> None:
    clock = Clock()
    store = ResponseStore(9, 1 << 20, 60, clock)
    store.put("ns", stored("a"))
    clock.now = 50
    assert store.get("ns", "a") is not None
    clock.now = 105
    assert store.get("ns", "a") is not None
    clock.now = 166
    assert store.get("ns", "a") is None and store.held() == (0, 0)


def test_namespaces_neither_see_nor_displace_each_other() -> None:
    store = ResponseStore(1, 1 << 20, 60, Clock())
    store.put("alice", stored("a"))
    store.put("bob", stored("b"))
    assert store.get("alice", "a") is not None and store.get("bob", "a") is None
    assert not store.delete("bob", "a") and store.delete("alice", "a")


def test_the_bytes_of_turns_that_are_still_continued_stay_counted() -> None:
    """Else a conversation whose first responses were displaced would hold more than the limit."""
    store = ResponseStore(9, 4 * (OVERHEAD_BYTES + 1000), 60, Clock())
    parent = None
    for name in "abcdefgh":
        parent = stored(name, parent, "x" * 990)
        store.put("ns", parent)
    held = store.held()
    del parent
    gc.collect()
    assert held == (0, held[1]) and held[1] > 4 * OVERHEAD_BYTES, "the conversation outgrew its limit: it is gone"
    assert store.held() == (0, 0)


def test_a_response_larger_than_the_limit_is_not_kept() -> None:
    store = ResponseStore(9, 2000, 60, Clock())
    store.put("ns", stored("small"))
    store.put("ns", stored("large", text="x" * 2000))
    assert store.get("ns", "large") is None and store.held() == (0, 0)


def test_a_conversation_of_many_turns_is_told_in_order() -> None:
    store = ResponseStore(5000, 1 << 30, 60, Clock())
    parent = None
    for i in range(5000):
        parent = stored(str(i), parent, str(i))
        store.put("ns", parent)
    assert parent is not None and [turn["content"] for turn in parent.conversation()] == [str(i) for i in range(5000)]


def test_the_answer_and_the_turns_of_a_response_both_count() -> None:
    store = ResponseStore(9, 1 << 20, 60, Clock())
    store.put("ns", Stored("a", ({"content": "x" * 4},), ({"content": "x" * 6},), None, b"y" * 500))
    assert store.held() == (1, OVERHEAD_BYTES + 2 * ITEM_BYTES + 10 + 500)
    assert store.delete("ns", "a")
    gc.collect()
    assert store.held() == (0, 0)


def test_items_without_text_count_with_the_memory_that_they_take() -> None:
    """Else a client could fill many times the limit with empty messages."""
    store = ResponseStore(9, 1 << 30, 60, Clock())
    tracemalloc.start()
    try:
        for number in range(20):
            items = [message_item("user", "") for _ in range(100)]
            store.put("ns", Conversation(str(number), 0, {}).with_items(items))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert store.held()[0] == 9 and taken < 1.5 * store.held()[1]


def test_what_is_put_again_under_its_id_was_used_last() -> None:
    """A conversation that has grown is another one under the same id."""
    clock = Clock()
    store = ResponseStore(2, 1 << 20, 60, clock)
    store.put("ns", stored("a"))
    clock.now = 10
    store.put("ns", stored("b"))
    clock.now = 20
    grown = stored("a", text="longer")
    store.put("ns", grown)
    clock.now = 75  # for longer than the limit only b was not used
    assert store.held()[0] == 2 and store.get("ns", "b") is None and store.get("ns", "a") is grown
    store.put("ns", stored("c"))
    store.put("ns", stored("a"))
    store.put("ns", stored("d"))
    assert [store.get("ns", name) is not None for name in ("a", "c", "d")] == [True, False, True]
