"""Planted bugs of the states of recurrent layers, which the simulator must notice."""

from __future__ import annotations

from collections.abc import Callable

from backend.core.sequence import Sequence
from backend.engine import update
from backend.kvcache.block import BlockHandle
from backend.kvcache.states import Snapshot, StatePool

SetAttribute = Callable[[object, str, object], None]


def the_state_moves_over_accepted_drafts(set_attribute: SetAttribute) -> None:
    original = update.append_run
    set_attribute(update, "append_run", lambda *given: original(*given[:5], False))


def snapshots_outlive_their_blocks(set_attribute: SetAttribute) -> None:
    set_attribute(StatePool, "forget", lambda self, block_id: None)


def a_forked_beam_keeps_its_state(set_attribute: SetAttribute) -> None:
    set_attribute(StatePool, "fork", lambda self, parent, child: None)


def two_rows_of_a_step_write_one_snapshot(set_attribute: SetAttribute) -> None:
    original = StatePool._save

    def save(self: StatePool, handle: BlockHandle, is_passing: bool) -> Snapshot | None:
        self._saved.clear()
        return original(self, handle, is_passing)

    set_attribute(StatePool, "_save", save)


def a_snapshot_is_taken_a_token_late(set_attribute: SetAttribute) -> None:
    original = StatePool.saves

    def saves(self: StatePool, seq: Sequence, start: int, num_tokens: int) -> list[tuple[int, int]]:
        return [(min(at + 1, start + num_tokens), number) for at, number in original(self, seq, start, num_tokens)]

    set_attribute(StatePool, "saves", saves)


MUTANTS: dict[str, Callable[[SetAttribute], None]] = {
    name: value
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and callable(value)
}
