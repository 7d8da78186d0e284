"""Guided rows: where the outputs of a step's rows stand within their guides, and the masks of what may follow.

    after the forward pass, before tokens are chosen     GuidedStep.mask: all logits but those of allowed tokens become -inf
    when the chosen tokens are known                     GuidedStep.accept: the matchers go on by them

A matcher is never stored: a row that is new to its slot brings the ids of its output so far, and they are replayed. So it is for
sequences that were paused or evicted, for beams that change their rows, and after a failed step.

The request's end ids are allowed where the guide is complete and nowhere else, so an output that ends by itself has the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.guide import Guide, InvalidGuide
from backend.core.step import NewRow, Row, SampledToken, SlotId
from backend.guided.protocol import Matcher
from kernels.common.transfer import place

NOT_ALLOWED = -9999.0  # the log-probability that is told of a token that the guide forbids, for JSON has no infinity
Failure = tuple[int, str]  # index of the step's row, a sentence for its client
_STUCK = "the guide and what else the request forbids (bad words, repeated n-grams) leave no token; forbid less"


class MatcherSource(Protocol):
    def matcher(self, guide: Guide) -> Matcher: ...


class GuidedRow:
    """One output."""

    __slots__ = ("_end_bits", "_end_ids", "_matcher", "error", "is_over")

    def __init__(self, matcher: Matcher, end_ids: Sequence[int], output: Sequence[int]) -> None:
        """`output`: its tokens so far."""
        self._matcher = matcher
        self._end_ids = frozenset(end_ids)
        self._end_bits = [(i >> 5, np.int32(np.uint32(1 << (i & 31)).astype(np.int32))) for i in end_ids]
        self.is_over = False
        self.error = ""
        for token_id in output:
            self.accept(token_id)

    def fill(self, masks: NDArray[np.int32], row: int) -> None:
        """Write the mask of what may follow to a row of masks [rows, words]."""
        if self.is_over or self.error:
            masks[row] = 0
        else:
            self._matcher.fill(masks, row)
        is_complete = self.is_over or self._matcher.is_complete
        for word, bit in self._end_bits:
            if is_complete:
                masks[row, word] |= bit
            else:
                masks[row, word] &= ~bit

    def accept(self, token_id: int) -> None:
        """Go on by a token; `error` says why that cannot be."""
        if self.error or self.is_over:
            return
        if token_id in self._end_ids and self._matcher.is_complete:
            self.is_over = True
        elif not self._matcher.accept(token_id):
            limit = self._matcher.error
            too_much = InvalidGuide(f"it cannot be followed any further: {limit}").message
            self.error = too_much if self.is_limit(limit) else _STUCK

    @staticmethod
    def is_limit(error: str) -> bool:
        """Whether a matcher's error is that its work has a limit, not that a token is forbidden."""
        return any(word in error.lower() for word in ("max is", "too complex", "fuel", "limit", "too large"))


# For each byte of a mask what is added to the logits of its eight tokens: 0, or -inf where a bit is not set.
_OF_BYTE = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
_ADDED = _OF_BYTE.astype(np.float32)


def _add(logits: NDArray[np.float32], places: list[int], masks: NDArray[np.int32]) -> None:
    """Set what the masks forbid to -inf, in the rows `places` of logits [rows, vocab].

    A table look-up and an addition for each row, in a buffer that stays in the cache, on this thread: several threads would take
    longer to wake than this takes, and a buffer for all rows would be new memory in every step.
    """
    buffer = np.empty((4 * masks.shape[1], 8), dtype=np.float32)
    added = buffer.reshape(-1)[: logits.shape[1]]
    for at, mask in zip(places, masks.view(np.uint8)):
        _ADDED.take(mask, axis=0, out=buffer, mode="clip")
        row = logits[at]
        np.add(row, added, out=row)


class GuidedRows:
    def __init__(self, source: MatcherSource | None, num_slots: int, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._masks = np.zeros((num_slots, -(-vocab_size // 32)), dtype=np.int32)
        self._slots: dict[SlotId, GuidedRow] = {}  # only of sequences with guides

    def set_row(self, row: NewRow) -> None:
        """Take note of the sequence that takes a slot."""
        self._slots.pop(row.slot, None)
        if row.guide is not None:
            assert self._source is not None  # the engine refuses guides without
            output = row.token_ids[row.num_prompt_tokens :]
            self._slots[row.slot] = GuidedRow(self._source.matcher(row.guide), row.end_ids, output)

    def of_step(self, rows: Sequence[Row]) -> GuidedStep | None:
        """The guided rows among those that sample; None when there are none."""
        if not self._slots:
            return None
        found: list[GuidedPlace] = []
        num_logits = num_sampling = 0
        for index, row in enumerate(rows):
            if row.samples and row.slot in self._slots:
                found.append(GuidedPlace(num_logits, num_sampling, index, self._slots[row.slot]))
            num_logits += row.num_samples
            num_sampling += row.samples
        return GuidedStep(found, self._masks, self._vocab_size) if found else None


class GuidedPlace(NamedTuple):
    """A guided row of a step. Rows with drafts have several logits and one sample, so that these are counted apart."""

    logits: int  # row of the step's logits
    sample: int  # among the rows that sample
    number: int  # among all rows
    row: GuidedRow


class GuidedStep:
    """The guided rows of one step. It outlives changes of slots, for the tokens of a step in flight come later."""

    def __init__(self, places: list[GuidedPlace], masks: NDArray[np.int32], vocab_size: int) -> None:
        """masks: room for one mask a slot."""
        self._places, self._masks, self._vocab_size = places, masks, vocab_size
        self._failed: list[Failure] | None = None

    @torch.inference_mode()
    def mask(self, logits: Tensor) -> Tensor:
        """logits [samples of the step, vocab] with -inf for what is forbidden: float32 ones on a CPU are changed in place."""
        for i, each in enumerate(self._places):
            each.row.fill(self._masks, i)
        masks = self._masks[: len(self._places)]
        places = [each.logits for each in self._places]
        if logits.device.type == "cpu":
            logits = logits.float()
            _add(logits.numpy(), places, masks)
            return logits
        words = place(np.invert(masks), logits.device)  # [rows, words]
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        hit = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, : self._vocab_size].bool()
        where = place(np.array(places), logits.device)
        return logits.float().index_copy(0, where, logits[where].float().masked_fill(hit, -torch.inf))

    def accept(self, samples: Sequence[SampledToken]) -> list[Failure]:
        """Go on by the tokens of the rows that sample. Returns the rows that cannot; a second call changes nothing."""
        if self._failed is None:
            self._failed = []
            for each in self._places:
                each.row.accept(samples[each.sample].token_id)
                if each.row.error:
                    self._failed.append((each.number, each.row.error))
        return self._failed

    def told(self, samples: list[SampledToken]) -> list[SampledToken]:
        """The samples as clients are told of them: log-probabilities that are not finite become NOT_ALLOWED."""
        for _, at, _, _ in self._places:
            sample = samples[at]
            if sample.log_prob is None and not sample.top_log_probs:
                continue
            own = None if sample.log_prob is None else max(sample.log_prob, NOT_ALLOWED)
            top = [(token_id, max(value, NOT_ALLOWED)) for token_id, value in sample.top_log_probs]
            samples[at] = SampledToken(sample.slot, sample.token_id, own, top)
        return samples
