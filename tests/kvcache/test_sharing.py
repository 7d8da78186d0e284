"""Who may find whose KV: `kv_cache.sharing`."""

from __future__ import annotations

import pytest

from tests.kvcache.harness import Cache, answer, make_sequence

PREFIX = list(range(10, 18))  # two blocks
THIRD = [1, 2, 3]  # the head of the third


def second_finds(sharing: str, namespace: str, prompt: list[int]) -> tuple[int, int]:
    """After somebody in `namespace` has computed PREFIX + THIRD + 4: (tokens that another finds there, those it is told of)."""
    cache = Cache(sharing=sharing)
    first = cache.start(make_sequence(1, [*PREFIX, *THIRD, 4], namespace=namespace))
    cache.run(first)
    cache.release(first)
    plan = cache.kv.plan()
    seq = make_sequence(2, prompt, namespace=namespace)
    plan.admit(seq, seq.num_tokens, 0)
    found = plan.grants[2].computed, plan.grants[2].own
    cache.start(seq)
    cache.assert_content(seq)
    assert cache.generate(seq, 3) == answer(prompt, 3, namespace=namespace)
    return found


@pytest.mark.parametrize(
    "sharing, namespace, found, told",
    [
        ("namespace", "", 8, 0),
        ("namespace", "team", 11, 11),
        ("all", "", 11, 11),
        ("all", "team", 11, 11),
        ("none", "", 0, 0),
        ("none", "team", 0, 0),
    ],
)
def test_whole_blocks_are_shared_with_strangers_and_tokens_within_a_namespace(
    sharing: str, namespace: str, found: int, told: int
) -> None:
    assert second_finds(sharing, namespace, [*PREFIX, *THIRD, 9, 9]) == (found, told)


def test_a_stranger_is_told_that_shared_blocks_are_new() -> None:
    cache = Cache(sharing="namespace")
    first = cache.start(make_sequence(1, [*PREFIX, 1]))
    cache.run(first)
    second = cache.start(make_sequence(2, [*PREFIX, 2]))
    assert cache.blocks(second)[:2] == cache.blocks(first)[:2], "they are shared all the same"
    assert (second.num_reused_blocks, second.num_new_blocks) == (0, 3)
    assert cache.kv.stats().reused_blocks_total == 2, "the operator's figures tell what happened"


def test_what_a_sequence_has_computed_itself_is_found_per_token_and_told() -> None:
    cache = Cache(sharing="namespace")
    seq = cache.start(make_sequence(1, [*PREFIX, 1, 2]))
    cache.run(seq)
    cache.pause(seq)
    plan = cache.kv.plan()
    plan.admit(seq, seq.num_tokens, 0)
    assert (plan.grants[1].computed, plan.grants[1].own) == (10, 10)


def test_a_returning_sequence_is_not_told_of_what_a_stranger_has_computed_meanwhile() -> None:
    """The stranger's request says the same and is three blocks long; the sequence's own KV holds two of them."""
    cache = Cache(num_blocks=12, sharing="namespace")
    seq = cache.start(make_sequence(1, [*PREFIX, 1, 2, 3, 4, 5]))
    cache.run(seq, 9)
    cache.pause(seq)
    stranger = cache.start(make_sequence(2, [*PREFIX, 1, 2, 3, 4, 6]))
    cache.run(stranger)
    plan = cache.kv.plan()
    plan.admit(seq, seq.num_tokens, 0)
    assert (plan.grants[1].computed, plan.grants[1].own) == (12, 9)
