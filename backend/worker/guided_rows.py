"""Guided rows: where the outputs of a step's rows stand within their guides, and the masks of what may follow.

    after the forward pass, before tokens are chosen     GuidedStep.mask: the logits of all forbidden tokens become -inf
    when the chosen tokens are known                     GuidedStep.accept: the matchers advance by them

A row with drafts has a mask for each position: its matcher advances by the drafts as far as the guide allows them, and is rolled
back. Behind a forbidden draft every token is allowed, because no token that is chosen there is kept.

A matcher is never stored: a row that is new to its slot brings the ids of its output so far, which are replayed. This covers
sequences that were paused or evicted, beams that change their rows, and failed steps.

The request's end ids are allowed only where the guide is complete, so an output that ends by itself has the form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.guide import Guide, InvalidGuide, Thinking, no_token_left
from backend.core.step import NewRow, Row, SampledToken, SlotId
from backend.guided.protocol import Matcher, bits_of
from backend.guided.thinking import ThinkingMatcher
from kernels.common.transfer import place

NOT_ALLOWED = -9999.0  # published log-probability of forbidden tokens: JSON has no infinity
Further = dict[SlotId, list[SampledToken]]  # StepOutput.further
Failure = tuple[int, str]  # index of the step's row, a sentence for its client


class MatcherSource(Protocol):
    def matcher(self, guide: Guide) -> Matcher: ...


class GuidedRow:
    """One output."""

    __slots__ = ("_begin", "_end_bits", "_end_ids", "_matcher", "_output", "_stuck", "error", "is_over")

    def __init__(self, begin: Callable[[], Matcher], end_ids: Sequence[int], output: Sequence[int], stuck: str) -> None:
        """begin: makes a matcher that has seen nothing; output: its tokens so far; stuck: the client's error message
        where no token is left.
        """
        self._stuck = stuck
        self._begin = begin
        self._end_ids = frozenset(end_ids)
        self._end_bits = bits_of(end_ids)
        self._matcher = begin()
        self._output: list[int] = []
        self.is_over = False
        self.error = ""
        for token_id in output:
            self.accept(token_id)

    def fill(self, masks: NDArray[np.int32], row: int) -> None:
        """Write the mask of the tokens that may follow to a row of masks [rows, words]."""
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

    def fill_ahead(self, masks: NDArray[np.int32], row: int, drafts: Sequence[int]) -> None:
        """Write the mask of the token behind the output to `row`, and those of the tokens behind each draft to the next rows."""
        self.fill(masks, row)
        num_taken = 0
        for token_id in drafts:
            is_allowed = masks[row + num_taken, token_id >> 5] >> (token_id & 31) & 1
            if not is_allowed or token_id in self._end_ids or not self._matcher.accept(token_id):
                break
            num_taken += 1
            self.fill(masks, row + num_taken)
        masks[row + num_taken + 1 : row + len(drafts) + 1] = -1
        if self._matcher.error:  # a limit that these drafts have reached, and that the output may never reach
            self._matcher = self._begin()
            for token_id in self._output:
                self._matcher.accept(token_id)
        elif num_taken:
            self._matcher.rollback(num_taken)

    def accept(self, token_id: int) -> None:
        """Advance by a token; `error` says why that is impossible."""
        if self.error or self.is_over:
            return
        if token_id in self._end_ids and self._matcher.is_complete:
            self.is_over = True
        elif not self._matcher.accept(token_id):
            limit = self._matcher.error
            too_much = InvalidGuide(f"it cannot be followed any further: {limit}").message
            self.error = too_much if self.is_limit(limit) else self._stuck
        else:
            self._output.append(token_id)

    @staticmethod
    def is_limit(error: str) -> bool:
        """True if a matcher's error is a limit of its work, not a forbidden token."""
        return any(word in error.lower() for word in ("max is", "too complex", "fuel", "limit", "too large"))


def _stuck(row: NewRow) -> str:
    sampling = row.sampling
    bans = {
        "bad_words": any(row.bad_words),
        "min_tokens": bool(sampling.min_tokens),
        "no_repeat_ngram_size": bool(sampling.no_repeat_ngram_size),
        "logits_post_processor": bool(row.post_processor),
    }
    sent = [name for name, is_sent in bans.items() if is_sent]
    return no_token_left(sent, row.guide, has_reasoning=row.thinking is not None).message


# For each byte of a mask what is added to the logits of its eight tokens: 0, or -inf where a bit is not set.
_OF_BYTE = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf)
_ADDED = _OF_BYTE.astype(np.float32)


def _add(logits: NDArray[np.float32], places: list[int], masks: NDArray[np.int32]) -> None:
    """Set the logits that the masks forbid to -inf, in the rows `places` of logits [rows, vocab].

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
        self._slots: dict[SlotId, GuidedRow] = {}  # only of sequences with guides or reasoning

    def set_row(self, row: NewRow) -> None:
        """Take note of the sequence that takes a slot."""
        self._slots.pop(row.slot, None)
        if row.is_guided:
            output = row.token_ids[row.num_prompt_tokens :]
            self._slots[row.slot] = GuidedRow(
                partial(self._matcher, row.guide, row.thinking), row.end_ids, output, _stuck(row)
            )

    def _matcher(self, guide: Guide | None, thinking: Thinking | None) -> Matcher:
        matcher = None
        if guide is not None:
            assert self._source is not None  # the engine refuses guides without
            matcher = self._source.matcher(guide)
        if thinking is not None:
            return ThinkingMatcher(thinking, matcher)
        assert matcher is not None  # it is guided
        return matcher

    def of_step(self, rows: Sequence[Row]) -> GuidedStep:
        """The guided rows among those that sample."""
        if not self._slots:
            return NOT_GUIDED
        found: list[GuidedPlace] = []
        num_logits = num_sampling = num_masks = 0
        for index, row in enumerate(rows):
            if row.samples and row.slot in self._slots:
                found.append(GuidedPlace(num_logits, num_sampling, index, self._slots[row.slot], row.drafts))
                num_masks += row.num_samples
            num_logits += row.num_samples
            num_sampling += row.samples
        if num_masks > len(self._masks):
            self._masks = np.zeros((num_masks, self._masks.shape[1]), dtype=np.int32)
        return GuidedStep(found, self._masks[:num_masks], self._vocab_size) if found else NOT_GUIDED


class GuidedPlace(NamedTuple):
    """A guided row of a step. Rows with drafts have several logits and one sample, so that these are counted apart."""

    logits: int  # row of the step's logits; those of its drafts follow
    sample: int  # among the rows that sample
    number: int  # among all rows
    row: GuidedRow
    drafts: Sequence[int]


class GuidedStep:
    """The guided rows of one step; false if there are none. It outlives changes of slots, because the tokens of a step in
    flight come later.
    """

    def __init__(self, places: list[GuidedPlace], masks: NDArray[np.int32], vocab_size: int) -> None:
        """masks: room for one mask a row and draft."""
        self._places, self._masks, self._vocab_size = places, masks, vocab_size
        self._failed: list[Failure] | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    def mask(self, logits: Tensor) -> Tensor:
        """logits [samples of the step, vocab] with -inf for forbidden tokens: float32 ones on a CPU are changed in place."""
        return self._masked(logits) if self._places else logits

    @torch.inference_mode()
    def _masked(self, logits: Tensor) -> Tensor:
        masks, places = self._masks, list[int]()
        for each in self._places:
            if each.drafts:
                each.row.fill_ahead(masks, len(places), each.drafts)
            else:
                each.row.fill(masks, len(places))
            places += range(each.logits, each.logits + 1 + len(each.drafts))
        if logits.device.type == "cpu":
            logits = logits.float()
            _add(logits.numpy(), places, masks)
            return logits
        words = place(np.invert(masks), logits.device)  # [rows, words]
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        hit = ((words[:, :, None] >> shifts) & 1).flatten(1)[:, : self._vocab_size].bool()
        where = place(np.array(places), logits.device)
        return logits.float().index_copy(0, where, logits[where].float().masked_fill(hit, -torch.inf))

    def accept(self, samples: Sequence[SampledToken], further: Further | None = None) -> list[Failure]:
        """Advance by the tokens of the rows that sample, and by those behind accepted drafts. Returns the rows whose guide
        refuses them. A second call changes nothing.
        """
        if self._failed is None:
            self._failed = []
            for each in self._places:
                sample = samples[each.sample]
                each.row.accept(sample.token_id)
                for another in (further or {}).get(sample.slot, ()):
                    each.row.accept(another.token_id)
                if each.row.error:
                    self._failed.append((each.number, each.row.error))
        return self._failed

    def published(self, samples: list[SampledToken], further: Further | None = None) -> list[SampledToken]:
        """The samples as clients see them: infinite log-probabilities become NOT_ALLOWED, also in `further` itself."""
        for each in self._places:
            run = (further or {}).get(samples[each.sample].slot, [])
            run[:] = map(_published, run)
            samples[each.sample] = _published(samples[each.sample])
        return samples


NOT_GUIDED = GuidedStep([], np.empty((0, 0), dtype=np.int32), 0)


def _published(sample: SampledToken) -> SampledToken:
    if sample.log_prob is None and not sample.top_log_probs:
        return sample
    own = None if sample.log_prob is None else max(sample.log_prob, NOT_ALLOWED)
    top = [(token_id, max(value, NOT_ALLOWED)) for token_id, value in sample.top_log_probs]
    return SampledToken(sample.slot, sample.token_id, own, top)
