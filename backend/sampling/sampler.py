"""Sampler: takes the logits of the rows that sample and returns one token per row.

Between calls it keeps only what `set_row` stored. Penalties and bad words are read off the token buffer, and random numbers
are a function of (seed, number of tokens sampled), so a sequence that was evicted and returns continues unchanged.

Rows that take the greatest logit, and ask for nothing else, need no logits if the model's step has found it already (`greedy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.core.step import NewRow, SampledToken, SlotId
from backend.sampling.native_choice import NativeChoice
from backend.sampling.slots import UNKNOWN, SlotParameters
from backend.sampling.torch_choice import TorchChoice
from kernels import sampling as kernel


class Sampler:
    """Chooses tokens for the rows of the persistent batch. See SamplingConfig for the meaning of the parameters."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, library: CDLL | None = None) -> None:
        """library: the native kernels (kernels.cpu.build.load) for a CPU; without it torch operators do the work."""
        if not 1 <= vocab_size <= kernel.MAX_VOCAB:
            raise ValueError(f"vocab_size is {vocab_size}, allowed is 1 to {kernel.MAX_VOCAB}; use a smaller one")
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self._slots = SlotParameters(num_slots, vocab_size, self.device)
        self._choice: NativeChoice | TorchChoice = TorchChoice(self._slots)
        if library is not None and self.device.type == "cpu":
            self._choice = NativeChoice(self._slots, library)

    def set_row(self, new_row: NewRow) -> None:
        """Remember the parameters of the sequence that takes `new_row.slot`; they hold until the slot's next NewRow."""
        self._slots.set_row(new_row)

    def needs_logits(self, slots: Sequence[int], num_tokens: Sequence[int] | None = None) -> list[bool]:
        """For each slot, whether `sample` needs its logits, not only the id of the greatest one.

        num_tokens (known tokens, parallel to slots) decides whether min_tokens has been reached; without it, assume not.
        Raises ValueError when a slot has no row.
        """
        plain_from = [self._slots.plain_from[slot] for slot in slots]
        if UNKNOWN in plain_from:
            slot = slots[plain_from.index(UNKNOWN)]
            raise ValueError(f"slot {slot} has no sampling parameters; call set_row with its NewRow first")
        known_tokens = [0] * len(slots) if num_tokens is None else num_tokens
        return [start > known for start, known in zip(plain_from, known_tokens, strict=True)]

    def sample(
        self,
        logits: Tensor | None,
        slots: list[SlotId],
        token_ids: Tensor,
        num_tokens: list[int],
        greedy: Sequence[int] | NDArray[np.int64] | Tensor | None = None,
        needed: Sequence[bool] | None = None,
    ) -> list[SampledToken]:
        """Choose the next token of each row; one SampledToken per row, in row order.

        logits [num_rows, vocab] float32 may be overwritten; slots and num_tokens (known tokens) are parallel to its rows;
        token_ids [num_slots, max_seq_len] int64 is the token buffer, only read. greedy [num_rows] is the lowest id among the
        greatest logits of each row, if the caller has it; it is used where `needs_logits` is false, and if that is so for all
        rows, logits may be None. needed is the result of `needs_logits`, if the caller has it. Raises ValueError when shapes
        disagree, a slot has no row, or logits are missing.
        """
        self._check_shapes(logits, len(slots), len(num_tokens), greedy)
        if needed is None:
            needed = self.needs_logits(slots, num_tokens)
        if logits is None and (any(needed) if greedy is not None else len(slots)):
            raise ValueError(
                "logits are None, but a row needs them; pass them unless needs_logits is false, and greedy"
            )
        if not slots:
            return []
        if any(needed):
            self._slots.decay_top_p(slots, token_ids, num_tokens)
        if greedy is None:
            assert logits is not None  # checked above
            return self._choice.choose(logits, list(range(len(slots))), slots, token_ids, num_tokens)
        result = list(map(SampledToken, slots, np.asarray(greedy).tolist()))
        rows = [row for row, is_needed in enumerate(needed) if is_needed]
        if rows:
            assert logits is not None  # checked above: a row needs them
            known = [num_tokens[row] for row in rows]
            tokens = self._choice.choose(logits, rows, [slots[row] for row in rows], token_ids, known)
            for row, token in zip(rows, tokens):
                result[row] = token
        return result

    def _check_shapes(
        self,
        logits: Tensor | None,
        num_rows: int,
        num_lengths: int,
        greedy: Sequence[int] | NDArray[np.int64] | Tensor | None,
    ) -> None:
        shape = [num_rows, self.vocab_size]
        given = shape if logits is None else list(logits.shape)
        if given != shape or num_lengths != num_rows:
            raise ValueError(
                f"logits have shape {given} for {num_rows} slots and {num_lengths} lengths, expected is {shape}; "
                f"pass one row and one length per slot"
            )
        if greedy is not None and len(greedy) != num_rows:
            raise ValueError(f"greedy has {len(greedy)} tokens for {num_rows} slots; pass one token per slot")
