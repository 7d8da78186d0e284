"""DeviceChoice: chooses tokens on a GPU. They stay on the device; the host fetches them when it needs them.

The sampling parameters of a step's rows are one table [Number, rows], which a CUDA graph can read. Rows that need more
(Kind.SPECIAL) have their logits changed, and their log-probabilities computed, by operators outside the graph.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.core.step import SampledToken, SlotId
from backend.sampling.slots import SlotOptions, SlotParameters
from backend.sampling.torch_choice import add_sparse
from kernels.choose_tokens import Penalties, SamplingRows, choose_tokens
from kernels.common.transfer import Fetched, place
from kernels.common.triton_runtime import runs_on
from kernels.cpu.sampling import FloatColumn, IntColumn
from kernels.log_probs import LogProbs, log_probs


class Number(IntEnum):
    """Rows of the int64 table of a step's parameters. Those from TEMPERATURE on hold the bits of a float64."""

    SLOT = 0
    KNOWN = 1  # tokens before the one to choose; 0 marks a padding row, whose token is ignored
    TOP_K = 2
    SEED = 3
    COUNTER = 4
    NUM_PROMPT = 5
    TEMPERATURE = 6  # 0 = greedy
    TOP_P = 7
    MIN_P = 8
    REPETITION = 9
    PRESENCE = 10
    FREQUENCY = 11


_INTS = ((Number.TOP_K, IntColumn.TOP_K), (Number.SEED, IntColumn.SEED), (Number.NUM_PROMPT, IntColumn.NUM_PROMPT))
_FLOATS = slice(Number.TEMPERATURE, Number.FREQUENCY + 1)  # their order is that of FloatColumn


class Kind(Enum):
    """How much work the choice of a step's tokens takes."""

    GREEDY = "the greatest logit of each row"
    RANDOM = "random sampling with filters"
    SPECIAL = "sampling after changes to logits, or with log-probabilities"


class Chosen(NamedTuple):
    """The tokens of a step, on the device."""

    tokens: Tensor  # int64 [rows]
    log_probs: LogProbs | None  # only for the rows that ask for them


class DeviceChoice:
    def __init__(self, parameters: SlotParameters) -> None:
        self._slots = parameters
        self._device = parameters.device

    def kind(self, slots: list[SlotId], num_tokens: list[int]) -> Kind:
        """The kind of a step with these rows. `num_tokens` are their known tokens, parallel to `slots`."""
        plain_from, special_until = self._slots.plain_from, self._slots.special_until
        if all(plain_from[slot] <= known for slot, known in zip(slots, num_tokens)):
            return Kind.GREEDY
        is_special = any(special_until[slot] > known for slot, known in zip(slots, num_tokens))
        return Kind.SPECIAL if is_special else Kind.RANDOM

    def fill(self, numbers: NDArray[np.int64], slots: list[SlotId], num_tokens: list[int], pad_slot: int) -> None:
        """Write a step's parameters to `numbers` [Number, at least len(slots)]; columns after len(slots) become padding."""
        count = len(slots)
        ints, floats = self._slots.ints.numpy()[slots], self._slots.floats.numpy()[slots]
        numbers[Number.SLOT, :count], numbers[Number.KNOWN, :count] = slots, num_tokens
        for number, column in _INTS:
            numbers[number, :count] = ints[:, column]
        numbers[Number.COUNTER, :count] = ints[:, IntColumn.COUNTER_BASE] + numbers[Number.KNOWN, :count]
        values = numbers[_FLOATS].view(np.float64)
        values[:, :count] = floats.T
        values[FloatColumn.TEMPERATURE, :count] *= ~self._slots.is_greedy[slots]
        numbers[Number.SLOT, count:] = pad_slot
        numbers[Number.KNOWN : Number.TEMPERATURE, count:] = 0
        values[:, count:] = 0

    def choose(self, kind: Kind, logits: Tensor, numbers: Tensor) -> Tensor:
        """logits [rows, vocab], numbers int64 [Number, rows] -> tokens int64 [rows]. `kind` is GREEDY or RANDOM."""
        if kind is Kind.GREEDY and not runs_on(logits):  # the kernel takes a third of argmax's time
            return logits.argmax(dim=-1)
        return choose_tokens(logits, _rows(numbers))

    def choose_special(
        self, logits: Tensor, numbers: Tensor, slots: list[SlotId], num_tokens: list[int], token_ids: Tensor
    ) -> Chosen:
        """logits [rows, vocab] in any float dtype. Log-probabilities are computed from the unchanged logits."""
        options = [self._slots.options[slot] for slot in slots]
        asking = [i for i, row in enumerate(options) if row.wants_log_probs]
        changed = add_sparse(
            logits.float(), options, slots, token_ids, num_tokens, is_own=logits.dtype != torch.float32
        )
        penalties = None
        if any(row.has_penalties for row in options):
            factors = [
                numbers[n].view(torch.float64).float() for n in (Number.REPETITION, Number.PRESENCE, Number.FREQUENCY)
            ]
            rows = numbers[Number.SLOT], numbers[Number.NUM_PROMPT], numbers[Number.KNOWN]
            penalties = Penalties(token_ids, *rows, *factors)
        parameters = _decayed(_rows(numbers), options, slots, token_ids, num_tokens)
        tokens = choose_tokens(changed, parameters, penalties)
        if not asking:
            return Chosen(tokens, None)
        where = place(np.array(asking), self._device)
        width = max(options[i].top_log_probs for i in asking)
        return Chosen(tokens, log_probs(logits[where], tokens[where], width))

    def begin_fetch(self, slots: list[SlotId], chosen: Chosen) -> FetchedSamples:
        """Start copying the tokens of the first len(slots) rows to the host."""
        tokens = chosen.tokens[: len(slots)]
        fetched = Fetched(tokens) if chosen.log_probs is None else Fetched(tokens, *chosen.log_probs)
        return FetchedSamples(slots, [self._slots.options[slot] for slot in slots], fetched)


class FetchedSamples:
    """A step's tokens on their way to the host."""

    def __init__(self, slots: list[SlotId], options: list[SlotOptions], fetched: Fetched) -> None:
        self.slots, self._options, self._fetched = slots, options, fetched

    def wait(self) -> list[SampledToken]:
        tokens, *details = self._fetched.wait()
        samples = list(map(SampledToken, self.slots, tokens.tolist()))
        if details:
            own, ids, values = (part.tolist() for part in details)
            asking = [i for i, row in enumerate(self._options) if row.wants_log_probs]
            for j, i in enumerate(asking):
                row = self._options[i]
                pairs = list(zip(ids[j], values[j]))[: row.top_log_probs]
                value = own[j] if row.return_log_probs else None
                samples[i] = SampledToken(samples[i].slot, samples[i].token_id, value, pairs)
        return samples


def _rows(numbers: Tensor) -> SamplingRows:
    """The parameters of choose_tokens in a table [Number, rows] on the device."""
    values = numbers.view(torch.float64)
    return SamplingRows(
        values[Number.TEMPERATURE].float(),
        numbers[Number.TOP_K],
        values[Number.TOP_P],
        values[Number.MIN_P],
        numbers[Number.SEED],
        numbers[Number.COUNTER],
    )


def _decayed(
    rows: SamplingRows, options: list[SlotOptions], slots: list[SlotId], token_ids: Tensor, num_tokens: list[int]
) -> SamplingRows:
    """The sampling parameters with top_p brought up to date where it decays. Nothing waits for the device."""
    changing = [i for i, row in enumerate(options) if row.decay is not None]
    if not changing:
        return rows
    top_p = rows.top_p.clone()
    for i in changing:
        top_p[i] = options[i].top_p_after(token_ids[slots[i], : num_tokens[i]])
    return rows._replace(top_p=top_p)
