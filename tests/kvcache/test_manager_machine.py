"""KVCacheManager: sequences start, run, pause, fork, rest, return, are cut and erased, while the pool changes its size.

What holds nothing is scrambled after every event, so a stale or foreign cell shows in the content of whoever reads it.
EVERBATCH_EXAMPLES says how many runs there are, ten times over.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.core.sequence import Event, Sequence, Status
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.plan import Admission
from tests.kvcache.harness import Cache, make_sequence

RUNS = max(1, int(os.environ.get("EVERBATCH_EXAMPLES", "2000")) // 10)
INDEX = st.integers(0, 1000)
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=13)


def state_of(kv: KVCacheManager, sequences: list[Sequence]) -> object:
    """All that a plan could spoil, the order of use included."""
    return (
        [(block.ref_count, block.unique_id) for block in kv.state.blocks.blocks],
        list(kv.state.blocks._cached),
        list(kv.state.blocks._free),
        sorted(kv.state.trie._nodes),
        kv.stats(),
        {seq_id: (list(record.handles), record.is_locked, record.depth) for seq_id, record in kv.state.tables.items()},
        kv.state.slots.num_free,
        [(seq.slot, seq.status, seq.num_computed_tokens, list(seq.token_ids)) for seq in sequences],
    )


class Manager(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 10),
        block_size=st.sampled_from([1, 2, 4]),
        chunk=st.sampled_from([-1, 0, 1, 3]),
        window=st.sampled_from([None, None, 3, 6]),
        sink_tokens=st.sampled_from([0, 0, 1, 4, 5]),
        reuse=st.booleans(),
        partial=st.booleans(),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        chunk: int,
        window: int | None,
        sink_tokens: int,
        reuse: bool,
        partial: bool,
    ) -> None:
        self.cache = Cache(
            num_blocks,
            block_size,
            4,
            window,
            max_chunk_tokens=6,
            vocab_size=2,
            chunk_blocks=chunk,
            enable_block_reuse=reuse,
            enable_partial_reuse=partial,
            sink_tokens=sink_tokens,
        )
        self.kv = self.cache.kv
        self.num_blocks = num_blocks
        self.live: list[Sequence] = []
        self._related: set[int] = set()  # sequences that were forked, and those that came of it
        self._ids = iter(range(1, 10_000))

    def _those(self, *states: Status) -> list[Sequence]:
        return [seq for seq in self.live if seq.status in states]

    @rule(prompt=PROMPT, namespace=st.sampled_from(["", "", "salt"]))
    def arrive(self, prompt: list[int], namespace: str) -> None:
        seq = make_sequence(next(self._ids), prompt, namespace=namespace)
        if self.cache.judge(seq) is Admission.NOW:
            self.live.append(self.cache.start(seq))

    @precondition(lambda self: self._those(Status.RUNNING))
    @rule(chunks=st.lists(st.tuples(INDEX, st.integers(1, 6)), min_size=1, max_size=12))
    def run(self, chunks: list[tuple[int, int]]) -> None:
        for index, num_tokens in chunks:
            running = self._those(Status.RUNNING)
            if not running:
                return
            seq = running[index % len(running)]
            num_tokens = min(num_tokens, seq.num_uncomputed_tokens)
            if self.cache.can_extend(seq, num_tokens):
                self.cache.run(seq, num_tokens)
            else:
                self.cache.pause(seq)
            self.everything_adds_up()

    @precondition(lambda self: self._those(Status.RUNNING) and self.kv.state.slots.num_free)
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        running = self._those(Status.RUNNING)
        used = self.kv.stats().used_num_blocks
        parent, child_id = running[index % len(running)], next(self._ids)
        self.live.append(self.cache.fork(parent, child_id, seed=index))
        self._related |= {parent.seq_id, child_id}
        assert self.kv.stats().used_num_blocks == used

    @precondition(lambda self: self._those(Status.RUNNING))
    @rule(index=INDEX, how=st.sampled_from(["pause", "keep", "erase"]))
    def leave(self, index: int, how: str) -> None:
        running = self._those(Status.RUNNING)
        seq = running[index % len(running)]
        if how == "pause":
            self.cache.pause(seq)
        else:
            self.cache.release(seq, keep=how == "keep")
            self.live = [other for other in self.live if other.status is not Status.RETIRED]

    @precondition(lambda self: self._those(Status.PAUSED))
    @rule(index=INDEX, partner=INDEX, cut=st.integers(0, 5), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def come_back(self, index: int, partner: int, cut: int, more: list[int]) -> None:
        """Two sequences, one of them cut and continued otherwise, return in one plan.

        Only sessions are cut, and a session's turn has one sequence (api/limits.py), so none that was forked is.
        """
        paused = self._those(Status.PAUSED)
        seq, other = paused[index % len(paused)], paused[partner % len(paused)]
        if cut and seq.seq_id not in self._related:
            keep = max(0, seq.num_tokens - cut)
            self.kv.truncate(seq, keep)
            seq.truncate(keep)
            seq.token_ids += more
        plan = self.kv.plan()
        if plan.admit(seq, seq.num_tokens, 0) is not Admission.NOW:
            return
        if other is seq or plan.admit(other, other.num_tokens, 0) is not Admission.NOW:
            self.cache.start(seq)
        else:
            self.cache.start_together(seq, other)

    @precondition(lambda self: self._those(Status.PAUSED))
    @rule(index=INDEX)
    def erase(self, index: int) -> None:
        paused = self._those(Status.PAUSED)
        seq = paused[index % len(paused)]
        self.kv.release(seq, keep=False)
        seq.apply(Event.RETIRE)
        self.live.remove(seq)

    @rule(prompt=PROMPT, choices=st.lists(st.tuples(st.sampled_from(["admit", "extend", "pause"]), INDEX), max_size=6))
    def drop_a_plan(self, prompt: list[int], choices: list[tuple[str, int]]) -> None:
        """Whatever is planned: as long as it is not committed, nothing has happened."""
        newcomer = make_sequence(10_000, prompt)
        before = state_of(self.kv, [*self.live, newcomer])
        plan = self.kv.plan()
        touched: set[int] = set()
        for verb, index in choices:
            ready = [*self._those(Status.PAUSED), newcomer] if verb == "admit" else self._those(Status.RUNNING)
            ready = [seq for seq in ready if seq.seq_id not in touched]
            if ready:
                seq = ready[index % len(ready)]
                touched.add(seq.seq_id)
                if verb == "admit":
                    plan.admit(seq, seq.num_tokens, index % 2)
                elif verb == "extend":
                    plan.extend(seq, seq.num_computed_tokens + min(3, seq.num_uncomputed_tokens))
                else:
                    plan.pause(seq)
        assert state_of(self.kv, [*self.live, newcomer]) == before

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.cache.scramble_free_blocks()
        running = self._those(Status.RUNNING)
        self.kv.check_integrity(running)
        for seq in running:
            self.cache.assert_content(seq)
            assert seq.num_uncomputed_tokens > 0, f"{seq!r} has nothing left to sample from"
        stats = self.kv.stats()
        assert stats.free_num_blocks + stats.cached_num_blocks + stats.used_num_blocks == stats.max_num_blocks
        assert stats.max_num_blocks == self.num_blocks

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for seq in self.live:
            self.kv.release(seq, keep=False)
        self.kv.check_integrity()
        assert not self.kv.state.tables and self.kv.state.slots.num_free == 4
        self.kv.lose_everything()
        self.kv.check_integrity()
        assert len(self.kv.state.trie) == 0
        assert self.kv.stats().free_num_blocks == self.kv.stats().max_num_blocks == self.num_blocks


TestManager = pytest.mark.feature("003-16", "003-26", "003-27", "003-28")(Manager.TestCase)
TestManager.settings = settings(max_examples=RUNS, stateful_step_count=40, deadline=None, report_multiple_bugs=False)
