"""The passes of a step, and what its rows want besides tokens: rows of tensors for clients, and logits post-processors.

A step whose rows want nothing else is one plain pass. Tensors are gathered before post-processors change the logits.

A step runs in several passes when its prompts want more rows than MAX_ROWS, so that logits [rows, vocab] stay small:

    whole step    prompt A, 600 tokens | B, one token | prompt C, 90 tokens
    passes        A 0-255  A 256-511  A 512-598  C 0-88        and at last, where tokens are sampled,   A 599 | B | C 89
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.api.errors import ConfigError
from backend.api.tensor import TensorData
from backend.core.gathered import LOGITS, PROMPT_LOG_PROBS, PROMPT_LOGITS, SOURCES
from backend.core.step import Gather, GatheredRows, NewRow, Row, SlotId
from backend.models.decoder import Decoder
from backend.worker.debug_tensors import DebugFetch, FetchedTensors
from backend.worker.input_batch import InputBatch
from backend.worker.post_processors import Failure, Opted, PostProcessors
from kernels import sampling as kernel
from kernels.common.transfer import Fetched

if TYPE_CHECKING:
    from backend.hosted.model import HostedModel

Values = TypeVar("Values", NDArray[np.int64] | None, Tensor | None, Tensor)
MAX_ROWS = 256  # rows of logits for prompts in one pass


def check_outputs(names: Sequence[str], model: Decoder | HostedModel) -> None:
    """Raise ConfigError for an additional output that the model does not mark."""
    for name in names:
        if name not in model.outputs:
            raise ConfigError(
                f"model.additional_outputs has {name!r}, which the model does not mark as an output; it marks "
                f"{', '.join(sorted(model.outputs))}"
            )


def _source(asked: Gather) -> str:
    """The output of the model that a tensor is made of."""
    return SOURCES.get(asked.name, asked.name)


class SlotWants(NamedTuple):
    """The wishes of the sequence in a slot."""

    gather: list[Gather]
    num_prompt_tokens: int
    post_processor: str
    request_id: int
    client_id: int | None
    num_beams: int

    def context_rows(self, row: Row, asked: Gather) -> range:
        """The positions of a row whose context rows are wanted."""
        if asked.context_from is None:
            return range(0)
        start = max(asked.context_from, row.num_computed)
        end = self.num_prompt_tokens - (asked.name == PROMPT_LOG_PROBS)  # no token follows the last one yet
        return range(start, max(start, min(end, row.num_computed + row.num_tokens)))

    def num_logits(self, row: Row) -> int:
        """How many of the row's last tokens must yield logits."""
        end = row.num_computed + row.num_tokens
        wanted = [end - positions[0] for asked in self.gather if (positions := self.context_rows(row, asked))]
        return max([row.num_samples, *wanted])

    def concerns(self, row: Row) -> bool:
        """True if anything is to be done for this row of a step."""
        if row.samples and (self.post_processor or any(asked.generation for asked in self.gather)):
            return True
        return any(self.context_rows(row, asked) for asked in self.gather)


class RowPart(NamedTuple):
    """A row of a step, or a piece of it."""

    number: int  # index of the row in the step
    row: Row
    want: SlotWants | None

    @property
    def num_logits(self) -> int:
        return self.row.num_samples if self.want is None else self.want.num_logits(self.row)

    def cut(self) -> list[RowPart]:
        """All but the last token, in pieces, and then that token, which is what samples."""
        row, last = self.row, self.row.num_computed + self.row.num_tokens - 1
        pieces = [
            Row(row.slot, start, min(MAX_ROWS, last - start), False, saves=row.saves)
            for start in range(row.num_computed, last, MAX_ROWS)
        ]
        return [self._replace(row=piece) for piece in (*pieces, Row(row.slot, last, 1, row.samples, saves=row.saves))]


def passes(parts: list[RowPart]) -> list[list[RowPart]]:
    """The parts of a step that run together, one pass after the other."""
    is_small = sum(part.num_logits - part.row.num_samples for part in parts) <= MAX_ROWS
    if is_small:
        return [parts]
    cut = [part.cut() if part.num_logits > part.row.num_samples else [part] for part in parts]
    return [[piece] for pieces in cut for piece in pieces[:-1]] + [[pieces[-1] for pieces in cut]]


class ExtraOutputs:
    def __init__(
        self, processors: PostProcessors | None = None, debug: DebugFetch | None = None, cuts_prompts: bool = True
    ) -> None:
        """`debug`: the tensors to keep of every step, which then gathers even if no row asks for anything. `cuts_prompts`: False
        for a model that reads whole texts, whose steps are one pass. It has no logits that could be large.
        """
        self._cuts_prompts = cuts_prompts
        self._processors = processors or PostProcessors()
        self._debug = debug
        self._slots: dict[SlotId, SlotWants] = {}  # only of sequences that want something

    def set_row(self, row: NewRow) -> None:
        """Remember what the sequence that takes a slot wants."""
        if row.gather or row.post_processor:
            self._slots[row.slot] = SlotWants(
                row.gather, row.num_prompt_tokens, row.post_processor, row.request_id, row.client_id, row.num_beams
            )
        else:
            self._slots.pop(row.slot, None)

    def of_step(self, rows: list[Row]) -> Sequence[Pass]:
        """The passes of a step with these rows; the last one has the rows that sample."""
        if not (rows and (self._slots or self._debug)):
            return [Pass(rows)]
        parts = [RowPart(index, row, self._wants(row)) for index, row in enumerate(rows)]
        if not (self._debug or any(part.want for part in parts)):
            return [Pass(rows)]
        *before, last = passes(parts) if self._cuts_prompts else [parts]
        debug = None if self._debug is None else StepDebug(self._debug, rows)
        return [
            *(GatheringPass(each, self._processors) for each in before),
            GatheringPass(last, self._processors, debug),
        ]

    def _wants(self, row: Row) -> SlotWants | None:
        want = self._slots.get(row.slot)
        return want if want is not None and want.concerns(row) else None


class StepDebug(NamedTuple):
    """The tensors to keep of a step."""

    fetch: DebugFetch
    rows: list[Row]  # all rows of the step


class Pass:
    """Rows that run together; this one gathers nothing and has no post-processor.

    Its logits lie one after the other: those of the last `num_logits` tokens of each row.
    """

    is_plain = True
    outputs: Sequence[str] = ()  # further outputs of the model that are gathered
    wants_logits = False  # True if logits are gathered

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.num_logits = [row.num_samples for row in rows]

    def needed(self, slots: list[SlotId], needed: list[bool]) -> list[bool]:
        """For each sample, whether its logits are needed. `needed`: those that the sampler needs."""
        return needed

    def sampled(self, values: Values) -> Values:
        """The rows of values [sum of num_logits, ...] that are sampled."""
        return values

    def gather(self, logits: Tensor | None, outputs: Mapping[str, Tensor], batch: InputBatch) -> Sequence[FetchedRows]:
        """Begin to fetch the rows that clients want, and debug tensors. logits and outputs are [sum of num_logits, width]."""
        return ()

    def process(self, logits: Tensor, token_ids: Tensor, num_tokens: Sequence[int]) -> list[Failure]:
        """Let post-processors change logits [rows that sample, vocab] in place. Returns the rows for which one failed.

        token_ids [slots, max_seq_len] and num_tokens [slots] are what is known of each slot.
        """
        return []


class GatheringPass(Pass):
    """A pass with rows that want more than tokens."""

    is_plain = False

    def __init__(self, parts: list[RowPart], processors: PostProcessors, debug: StepDebug | None = None) -> None:
        """`debug`: the debug tensors to keep, given to the last pass of a step."""
        self._parts, self._processors, self._debug = parts, processors, debug
        self.rows = [part.row for part in parts]
        self.num_logits = [part.num_logits for part in parts]
        ends = torch.tensor(self.num_logits).cumsum(0).tolist()
        self._ends: list[int] = ends
        self.sampling_rows = [
            index for end, row in zip(ends, self.rows) for index in range(end - row.num_samples, end)
        ]  # rows of logits that are sampled
        names = {_source(asked) for part in parts if part.want is not None for asked in part.want.gather}
        if debug is not None and self.sampling_rows:
            names.update(debug.fetch.outputs)
        self.outputs = sorted(names - {LOGITS})
        self.wants_logits = LOGITS in names
        self.processed = {
            part.row.slot for part in parts if part.want is not None and part.want.post_processor and part.row.samples
        }

    def needed(self, slots: list[SlotId], needed: list[bool]) -> list[bool]:
        return [is_needed or slot in self.processed for slot, is_needed in zip(slots, needed)]

    def sampled(self, values: Values) -> Values:
        return None if values is None else values[self.sampling_rows]

    def gather(self, logits: Tensor | None, outputs: Mapping[str, Tensor], batch: InputBatch) -> Sequence[FetchedRows]:
        heads: list[tuple[int, str, bool, int, int]] = []  # a GatheredRows without its data
        tensors: list[Tensor] = []
        for part, end in zip(self._parts, self._ends):
            last = part.row.num_computed + part.row.num_tokens - 1  # its row is end - 1
            if part.want is None:
                continue
            for asked in part.want.gather:
                tensor = outputs.get(_source(asked), logits)
                assert tensor is not None  # wants_logits said that they are needed
                positions = part.want.context_rows(part.row, asked)
                if positions:
                    start = end - 1 - (last - positions[0])
                    rows = tensor[start : start + len(positions)]
                    heads.append((part.number, asked.name, True, positions[0], len(positions)))
                    if asked.name == PROMPT_LOG_PROBS:
                        following = batch.token_ids[part.row.slot, positions[0] + 1 : positions[-1] + 2]
                        tensors.append(packed_rows(rows, following, asked.top))
                    elif asked.name == PROMPT_LOGITS:
                        tensors.append(rows[:, list(asked.columns)].float())
                    else:
                        tensors.append(rows.float())
                if asked.generation and part.row.samples:
                    heads.append((part.number, asked.name, False, last, 1))
                    tensors.append(tensor[end - 1 : end].float())
        debug = self._fetch_debug(logits, outputs, batch)
        return [FetchedRows(heads, Fetched(*tensors) if tensors else None, debug)]

    def _fetch_debug(
        self, logits: Tensor | None, outputs: Mapping[str, Tensor], batch: InputBatch
    ) -> FetchedTensors | None:
        if self._debug is None:
            return None
        given = outputs if logits is None else {**outputs, LOGITS: logits}
        names = self._debug.fetch.outputs if self.sampling_rows else []
        own = {name: given[name][self.sampling_rows] for name in names}
        return self._debug.fetch.begin(self._debug.rows, batch, own)

    def process(self, logits: Tensor, token_ids: Tensor, num_tokens: Sequence[int]) -> list[Failure]:
        if not self.processed:
            return []
        calls: dict[
            tuple[int, int], list[tuple[RowPart, int]]
        ] = {}  # the parts of each call, with their rows of logits
        end = 0
        for part in self._parts:
            end += part.row.num_samples
            if part.row.samples and part.want is not None and part.want.post_processor:
                of_search = -1 if part.want.num_beams > 1 else part.number
                calls.setdefault((part.want.request_id, of_search), []).append((part, end - 1))
        opted: list[Opted] = []
        for call in calls.values():
            first, want = call[0][0], call[0][0].want
            assert want is not None  # the loop above takes only parts that want something
            at = [index for _, index in call]
            own = logits[at[0] : at[0] + 1] if len(at) == 1 else logits[at]  # a view, or else copied back below
            ids = [token_ids[part.row.slot, : num_tokens[part.row.slot]].tolist() for part, _ in call]
            opted.append(Opted(first.number, want.post_processor, want.request_id, own[None], ids, want.client_id))
        failures = self._processors.run(opted)
        for call, each in zip(calls.values(), opted, strict=True):
            if len(call) > 1:
                logits[[index for _, index in call]] = each.logits[0]
        return failures


class FetchedRows:
    """Rows of tensors on their way to the host."""

    def __init__(
        self,
        heads: list[tuple[int, str, bool, int, int]],
        fetched: Fetched | None,
        debug: FetchedTensors | None = None,
    ) -> None:
        self._heads, self._fetched, self._debug = heads, fetched, debug

    def wait(self) -> list[GatheredRows]:
        if self._fetched is None:
            return []
        parts = self._fetched.wait()
        return [
            GatheredRows(*head, part.contiguous().numpy().tobytes())
            for head, part in zip(self._heads, parts, strict=True)
        ]

    def wait_for_debug(self) -> dict[str, TensorData]:
        return {} if self._debug is None else self._debug.wait()


def fetch_all(passes: Sequence[FetchedRows]) -> list[GatheredRows]:
    """The rows of all passes, in their order."""
    return [rows for each in passes for rows in each.wait()]


def packed_rows(logits: Tensor, following: Tensor, num_top: int) -> Tensor:
    """Rank and log-probability of the token that follows each row, and the `num_top` most likely tokens with theirs, in the form
    in which a step reports them (core/gathered.py).

    logits [rows, vocab] in any float type; following [rows] int64. Returns [rows, 2 + 2 * num_top] int32: rank, token ids, then
    the bits of float32 log-probabilities. Equal ones are in the order of token ids; all of them have the best rank of theirs.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    own = log_probs.gather(1, following[:, None])  # [rows, 1]
    rank = (log_probs > own).sum(dim=1, keepdim=True) + 1
    top, ids = kernel.top_log_probs(log_probs, num_top) if num_top else (own[:, :0], rank[:, :0])
    values = torch.cat([own, top], dim=1).view(torch.int32)
    return torch.cat([rank.int(), ids.int(), values], dim=1)
