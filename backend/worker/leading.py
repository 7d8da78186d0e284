"""The tier and the runner of rank 0, which tell the other ranks of each change and of each call of the native step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from backend.architectures.description import ModelConfig, Shard
from backend.core.step import PreparedAdapter, StepInput
from backend.models.cut import adapter_of_rank
from backend.models.lora import Layers
from backend.worker.adapters import DeviceAdapters
from backend.worker.model_runner import ModelRunner
from backend.worker.native_tier import NativeCall, NativeTier
from backend.worker.rank_followers import RankFollowers
from backend.worker.rank_messages import Adapter, Prepare, RunRows, SlotContents
from kernels.cpu.lora import PackedAdapter
from kernels.cpu.ranks import LostRank


class LeadingTier(NativeTier):
    def __init__(self, followers: RankFollowers, *arguments: Any) -> None:
        """arguments: those of NativeTier."""
        super().__init__(*arguments)
        self._followers = followers
        self.adapters = DeviceAdapters(_own_part)

    def step(self, call: NativeCall) -> tuple[NDArray[np.int64], Tensor | None]:
        """Also raises WorkersLost. Other ranks get only rows that can run, because each would find out at another time."""
        self.check(call)
        slots = None
        if not self._followers.share_memory:
            slots = SlotContents.of(call.rows.numbers, call.token_ids, call.block_tables, self.block_size)
        self._followers.tell(RunRows.of(call.rows, call.wants_logits, slots))
        try:
            return super().step(call)
        except LostRank as lost:
            raise self._followers.lost(lost.rank) from None


class SharedAdapter:
    """An adapter of all ranks: rank 0's part packed, and all of it for the others, whose parts are cut when they need it."""

    def __init__(self, own: PackedAdapter, whole: Layers) -> None:
        self.own, self.whole = own, whole


class LeadingRunner(ModelRunner):
    """Tells the other ranks what changes before a step, then changes it here."""

    def __init__(self, followers: RankFollowers, whole: ModelConfig, others: Sequence[Shard], *arguments: Any) -> None:
        """whole: the model. others: what each of the other ranks has of it. arguments: those of ModelRunner."""
        super().__init__(*arguments)
        self._followers, self._whole, self._others = followers, whole, others
        self._told: set[str] = set()  # the adapters that the other ranks hold

    def prepare(self, step: StepInput) -> StepInput:
        going = [content for content in step.adapters_out if content in self._told]
        self._told.difference_update(going)
        coming = {each.content: each for each in step.adapters_in if each.content not in self._told}
        self._told.update(coming)
        has_moves = step.copies or step.swap_out or step.swap_in
        if coming or going or has_moves or step.num_blocks > self.storage.num_blocks:
            self._followers.tell_each(
                [
                    Prepare(
                        *(going, [self._part_of(each, rank) for each in coming.values()], step.num_blocks),
                        *(step.copies, step.swap_out, step.swap_in),
                    )
                    for rank in self._others
                ]
            )
        return super().prepare(step)

    def _part_of(self, adapter: PreparedAdapter, rank: Shard) -> Adapter:
        assert isinstance(adapter.weights, SharedAdapter), "the adapter was not prepared for several ranks"
        return Adapter.of(adapter.content, adapter_of_rank(adapter.weights.whole, self._whole, rank))


def _own_part(adapter: PreparedAdapter) -> PackedAdapter:
    assert isinstance(adapter.weights, SharedAdapter), "the adapter was not prepared for several ranks"
    return adapter.weights.own
