"""What rows of a step want besides tokens: rows of tensors for their clients, and a post-processor for their logits.

Rows that want nothing of it are not touched, and a step without such rows pays for a look into an empty dictionary.
Tensors are taken before post-processors change the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from backend.api.errors import ConfigError
from backend.core.gathered import LOGITS
from backend.core.step import Gather, GatheredRows, NewRow, Row, SlotId
from backend.models.llama import Llama
from backend.worker.post_processors import Failure, Opted, PostProcessors
from kernels.common.transfer import Fetched


def check_outputs(names: Sequence[str], model: Llama) -> None:
    """Raise ConfigError for an additional output that the model does not mark."""
    for name in names:
        if name not in model.outputs:
            raise ConfigError(
                f"model.additional_outputs has {name!r}, which the model does not mark as an output; it marks "
                f"{', '.join(sorted(model.outputs))}"
            )


class SlotWants(NamedTuple):
    """What the sequence in a slot wants."""

    gather: list[Gather]
    num_prompt_tokens: int
    post_processor: str
    request_id: int
    client_id: int | None

    def context_rows(self, row: Row, asked: Gather) -> range:
        """The positions of a step's row whose context rows are wanted."""
        if asked.context_from is None:
            return range(0)
        start = max(asked.context_from, row.num_computed)
        return range(start, max(start, min(self.num_prompt_tokens, row.num_computed + row.num_tokens)))

    def num_logits(self, row: Row) -> int:
        """How many of the row's last tokens must yield logits."""
        end = row.num_computed + row.num_tokens
        wanted = [end - positions[0] for asked in self.gather if (positions := self.context_rows(row, asked))]
        return max([int(row.samples), *wanted])


class Extras:
    def __init__(self, processors: PostProcessors | None = None) -> None:
        self._processors = processors or PostProcessors()
        self._slots: dict[SlotId, SlotWants] = {}  # only of sequences that want something

    def set_row(self, row: NewRow) -> None:
        """Take note of the sequence that takes a slot."""
        if row.gather or row.post_processor:
            self._slots[row.slot] = SlotWants(
                row.gather, row.num_prompt_tokens, row.post_processor, row.request_id, row.client_id
            )
        else:
            self._slots.pop(row.slot, None)

    def of_step(self, rows: list[Row]) -> ExtraWork | None:
        """What is to be done for these rows; None when they want tokens only."""
        if not self._slots:
            return None
        wants = [self._slots.get(row.slot) for row in rows]
        return ExtraWork(rows, wants, self._processors) if any(wants) else None


class ExtraWork:
    """Of one step. Rows of logits lie one after the other: for each row of the step its last `num_logits` tokens."""

    def __init__(self, rows: list[Row], wants: list[SlotWants | None], processors: PostProcessors) -> None:
        self._rows, self._wants, self._processors = rows, wants, processors
        self.num_logits = [
            int(row.samples) if want is None else want.num_logits(row) for row, want in zip(rows, wants, strict=True)
        ]
        ends = torch.tensor(self.num_logits).cumsum(0).tolist()
        self._ends: list[int] = ends
        self.sampling_rows = [end - 1 for end, row in zip(ends, rows) if row.samples]  # rows of logits that are sampled
        names = {asked.name for want in wants if want is not None for asked in want.gather}
        self.outputs = sorted(names - {LOGITS})
        self.wants_logits = LOGITS in names
        self.processed = {
            row.slot for row, want in zip(rows, wants) if want is not None and want.post_processor and row.samples
        }

    def gather(self, logits: Tensor | None, outputs: Mapping[str, Tensor]) -> FetchedRows:
        """Begin to fetch the rows that clients want. Tensors are [sum of num_logits, width]."""
        heads: list[tuple[int, str, bool, int, int]] = []  # a GatheredRows without its data
        parts: list[Tensor] = []
        for index, (row, want) in enumerate(zip(self._rows, self._wants)):
            last = row.num_computed + row.num_tokens - 1  # its row is self._ends[index] - 1
            if want is None:
                continue
            for asked in want.gather:
                tensor = logits if asked.name == LOGITS else outputs[asked.name]
                assert tensor is not None  # wants_logits said that they are needed
                positions = want.context_rows(row, asked)
                if positions:
                    start = self._ends[index] - 1 - (last - positions[0])
                    heads.append((index, asked.name, True, positions[0], len(positions)))
                    parts.append(tensor[start : start + len(positions)].float())
                if asked.generation and row.samples:
                    heads.append((index, asked.name, False, last, 1))
                    parts.append(tensor[self._ends[index] - 1 : self._ends[index]].float())
        return FetchedRows(heads, Fetched(*parts) if parts else None)

    def process(self, logits: Tensor, token_ids: Tensor, num_tokens: Sequence[int]) -> list[Failure]:
        """Let post-processors change logits [rows that sample, vocab] in place. Returns the rows for which one failed.

        token_ids [slots, max_seq_len] and num_tokens [slots] are what is known of each slot.
        """
        if not self.processed:
            return []
        opted: list[Opted] = []
        sampling = [(index, row) for index, row in enumerate(self._rows) if row.samples]
        for place, (index, row) in enumerate(sampling):
            want = self._wants[index]
            if want is not None and want.post_processor:
                ids = token_ids[row.slot, : num_tokens[row.slot]].tolist()
                view = logits[place : place + 1][None]  # [1, beams, vocab]
                opted.append(Opted(index, want.post_processor, want.request_id, view, [ids], want.client_id))
        return self._processors.run(opted)


class FetchedRows:
    """Rows of tensors on their way to the host."""

    def __init__(self, heads: list[tuple[int, str, bool, int, int]], fetched: Fetched | None) -> None:
        self._heads, self._fetched = heads, fetched

    def wait(self) -> list[GatheredRows]:
        if self._fetched is None:
            return []
        parts = self._fetched.wait()
        return [
            GatheredRows(*head, part.contiguous().numpy().tobytes())
            for head, part in zip(self._heads, parts, strict=True)
        ]
