"""A KVCacheManager driven by hand, with the hash worker behind it: answers depend on the cells in its blocks.

cache = Cache(num_blocks=8)
seq = cache.start(make_sequence(1, [1, 2, 3]))     # admit
cache.run(seq)                                      # compute what is known, append one sampled token
cache.assert_content(seq)                           # every KV cell that counts as computed is the right one
"""

from __future__ import annotations

from backend.api import Request, SamplingConfig
from backend.api.config.schema import KvCacheConfig
from backend.core.sequence import Event, Sequence
from backend.core.step import NewRow, Row, StepInput, StepOutput
from backend.kvcache.block import DROPPED
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.plan import Admission, KVCommit
from tests.fakes.hash_worker import HashWorkerGroup, cell_of, oracle, seed_of

VOCAB = 1000


def make_sequence(
    seq_id: int, token_ids: list[int], max_tokens: int = 16, namespace: str = "", seed: int = 0
) -> Sequence:
    request = Request(list(token_ids), max_tokens, sampling_config=SamplingConfig(seed=seed), cache_salt=namespace)
    return Sequence(seq_id, seq_id, request, seq_id, 0)


def answer(prompt: list[int], num_outputs: int, **options: object) -> list[int]:
    return oracle(list(prompt), num_outputs, VOCAB, **options)


class Cache:
    def __init__(
        self,
        num_blocks: int = 8,
        block_size: int = 4,
        slots: int = 4,
        window: int | None = None,
        max_chunk_tokens: int = 64,
        watermark: float = 0.0,
        vocab_size: int = VOCAB,
        max_events: int = 0,
        **config: object,
    ) -> None:
        config = KvCacheConfig(block_size=block_size, watermark=watermark, **{"sharing": "all", **config})
        self.kv = KVCacheManager(config, num_blocks, slots, window, max_chunk_tokens, max_events)
        self.workers = HashWorkerGroup(vocab_size=vocab_size, window=window, sink_tokens=config.sink_tokens)
        self.workers.initialize_kv_cache(num_blocks, block_size, self.kv.num_backed_blocks)
        self.copies: list[tuple[int, int]] = []  # the copies of the last step
        self._step_id = 0

    def judge(self, seq: Sequence, headroom: int = 0) -> Admission:
        """The answer to an admission that is not carried out."""
        return self.kv.plan().admit(seq, seq.num_tokens, headroom)

    def start(self, seq: Sequence) -> Sequence:
        """Admit: a slot, and blocks for all known tokens (under a window: for a chunk of them)."""
        self.start_together(seq)
        return seq

    def start_together(self, *sequences: Sequence) -> None:
        """Admit several in one plan."""
        plan = self.kv.plan()
        for seq in sequences:
            assert plan.admit(seq, seq.num_tokens, 0) is Admission.NOW
        commit = self.kv.commit(plan)
        for seq in sequences:
            seq.apply(Event.ADMIT)
        self._send(commit.copies, list(sequences), [])

    def can_extend(self, seq: Sequence, num_tokens: int = 1) -> bool:
        return self.kv.plan().extend(seq, seq.num_computed_tokens + num_tokens)

    def run(self, seq: Sequence, num_tokens: int | None = None) -> KVCommit:
        """Compute `num_tokens` known tokens (default: all); behind the last one, append the token that is sampled."""
        num_tokens = seq.num_uncomputed_tokens if num_tokens is None else num_tokens
        plan = self.kv.plan()
        end = seq.num_computed_tokens + num_tokens
        assert plan.extend(seq, end)
        assert end > seq.num_writable_cells or not plan.grants, f"{seq!r} was told that it needs no plan"
        commit = self.kv.commit(plan)
        samples = num_tokens == seq.num_uncomputed_tokens
        change = commit.changes.get(seq.seq_id)
        new_ids = change.new_block_ids if change and not change.is_new else []
        row = Row(seq.slot, seq.num_computed_tokens, num_tokens, samples, new_ids)
        output = self._send(commit.copies, [seq] if change and change.is_new else [], [row])
        seq.num_computed_tokens += num_tokens
        if seq.num_computed_tokens >= seq.kv_due_at:
            self.kv.advance(seq)
        seq.token_ids += [sample.token_id for sample in output.sampled]
        return commit

    def generate(self, seq: Sequence, num_outputs: int) -> list[int]:
        for _ in range(num_outputs):
            self.run(seq)
        return seq.token_ids[-num_outputs:]

    def pause(self, seq: Sequence) -> None:
        plan = self.kv.plan()
        plan.pause(seq)
        self.kv.commit(plan)
        seq.apply(Event.PAUSE)

    def release(self, seq: Sequence, keep: bool = False) -> None:
        self.kv.release(seq, keep)
        seq.apply(Event.PAUSE if keep else Event.RETIRE)

    def fork(self, parent: Sequence, seq_id: int, seed: int) -> Sequence:
        """A child that knows the parent's tokens as its prompt and samples with another seed."""
        child = make_sequence(seq_id, parent.token_ids, namespace=parent.namespace, seed=seed)
        plan = self.kv.plan()
        assert plan.reserve_slot(child) is Admission.NOW
        self.kv.commit(plan)
        self.kv.fork(child, parent)
        child.apply(Event.ADMIT)
        self._send([], [child], [])
        return child

    def blocks(self, seq: Sequence) -> list[int]:
        return self.kv.block_ids(seq)

    def ref_counts(self, seq: Sequence) -> list[int]:
        return [self.kv.state.blocks.blocks[block_id].ref_count for block_id in self.blocks(seq) if block_id >= 0]

    def assert_content(self, seq: Sequence) -> None:
        """Each cell that counts as computed holds the chain of its tokens, wherever the table says it lies."""
        size, before = self.kv.block_size, 0
        handles = self.kv.state.tables[seq.seq_id].handles
        for position, token_id in enumerate(seq.token_ids[: seq.num_computed_tokens]):
            before = cell_of(before, token_id, position, seed_of(seq.namespace))
            handle = handles[position // size]
            if handle is not DROPPED:
                cell = self.workers.cells[handle.block_id][position % size]
                assert cell == before, f"{seq!r}: position {position} in block {handle.block_id} holds foreign KV"

    def scramble_free_blocks(self) -> None:
        """What holds nothing may be overwritten at any time: do it now, so that whoever reads it is found out."""
        for block in self.kv.state.blocks.blocks:
            if not block.unique_id:
                self.workers.cells[block.block_id] = [-1 - i for i in range(self.kv.block_size)]

    def _send(self, copies: list[tuple[int, int]], new: list[Sequence], rows: list[Row]) -> StepOutput:
        self.copies = copies
        self._step_id += 1
        new_rows = [self._new_row(seq) for seq in new]
        return self.workers.execute(StepInput(self._step_id, rows, new_rows, copies, self.kv.num_backed_blocks))

    def _new_row(self, seq: Sequence) -> NewRow:
        sampling = seq.request.sampling_config
        table = self.blocks(seq)
        return NewRow(
            seq.slot, list(seq.token_ids), seq.num_prompt_tokens, 0, table, sampling, cache_namespace=seq.namespace
        )
