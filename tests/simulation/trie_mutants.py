"""Planted bugs of what a prefix finds, which the simulator must notice."""

from __future__ import annotations

from collections.abc import Callable

from backend.kvcache import prefix_trie
from backend.kvcache.block import BlockHandle
from backend.kvcache.prefix_trie import PrefixTrie, TrieNode

SetAttribute = Callable[[object, str, object], None]


def trie_compares_a_hash_only(set_attribute: SetAttribute) -> None:
    original_match, original_insert = PrefixTrie.match, PrefixTrie.insert

    def hashed(token_ids: list[int], size: int) -> list[int]:
        blocks = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]
        return [token for block in blocks for token in sorted(block)]  # a hash that does not know the order

    def match(
        self: PrefixTrie, namespace: str, token_ids: list[int], *rest: object
    ) -> tuple[list[BlockHandle], BlockHandle | None, int]:
        return original_match(self, namespace, hashed(token_ids, self._block_size), *rest)

    def insert(
        self: PrefixTrie,
        namespace: str,
        node: TrieNode | None,
        depth: int,
        token_ids: list[int],
        handles: list[BlockHandle],
        *rest: object,
    ) -> tuple[TrieNode | None, int]:
        return original_insert(self, namespace, node, depth, hashed(token_ids, self._block_size), handles, *rest)

    set_attribute(PrefixTrie, "match", match)
    set_attribute(PrefixTrie, "insert", insert)


def namespace_ignored(set_attribute: SetAttribute) -> None:
    match, insert = PrefixTrie.match, PrefixTrie.insert
    set_attribute(PrefixTrie, "match", lambda self, namespace, *rest: match(self, "", *rest))
    set_attribute(PrefixTrie, "insert", lambda self, namespace, *rest: insert(self, "", *rest))


def eviction_not_told_to_the_trie(set_attribute: SetAttribute) -> None:
    set_attribute(PrefixTrie, "forget", lambda self, block_id: None)


def a_last_block_is_entered_with_a_token_too_many(set_attribute: SetAttribute) -> None:
    original = PrefixTrie.insert_tail

    def insert_tail(self: PrefixTrie, *rest: object) -> None:
        *others, num_tokens, lora_id = rest
        original(self, *others, num_tokens + ((num_tokens + 1) % self._block_size > 0), lora_id)

    set_attribute(PrefixTrie, "insert_tail", insert_tail)


def a_last_block_is_taken_for_full(set_attribute: SetAttribute) -> None:
    def common(key: tuple[int, ...], tail: tuple[int, ...]) -> int:
        return next((i for i, (a, b) in enumerate(zip(key, tail)) if a != b), len(tail))

    set_attribute(prefix_trie, "_num_common", common)


MUTANTS: dict[str, Callable[[SetAttribute], None]] = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and callable(value)
}
