"""Gathered: tensors that steps have computed for the client of a sequence, kept until a response takes them.

    context rows       one for each position of this turn's prompt that was run; positions found in the cache have none
    generation rows    one for each output token: the position from which it was sampled

Context rows end at the last position of the prompt and have no gap: n rows are those of its last n positions. A position that is
computed again (after a pause or an eviction) gives no second row. If other sequences computed more of the prompt while this one
was paused, the rows ahead of the resulting gap are dropped.

The workers make log-probabilities of the prompt from context rows, except from the last position, behind which no prompt token
follows. A client gets them for the whole prompt: KV of a position whose row is missing is not reused (`needed_from`).

    row of position p    | rank | k token ids |   log-prob   | k log-probs |      prompt token p + 1, then the likeliest k
                              int32                   float32
"""

from __future__ import annotations

from typing import Any

from backend.api.request import Request
from backend.api.response import PromptLogProb, TopLogProb
from backend.api.tensor import TensorData
from backend.core.step import Gather, GatheredRows

LOGITS = "logits"
PROMPT_LOG_PROBS = "prompt_log_probs"
FLOAT_BYTES = 4
NEVER = 1 << 62  # larger than any position


def wanted(request: Request) -> dict[str, tuple[bool, bool]]:
    """The tensors that a request asks for, by name: (whether context rows are wanted, whether generation rows are)."""
    output = request.output_config
    names = {asked.name: (asked.gather_context, True) for asked in output.additional_outputs}
    if output.return_context_logits or output.return_generation_logits:
        context, generation = names.get(LOGITS, (False, False))
        names[LOGITS] = context or output.return_context_logits, generation or output.return_generation_logits
    if output.prompt_log_probs is not None:
        names[PROMPT_LOG_PROBS] = True, False
    return names


def _row_width(name: str, request: Request, widths: dict[str, int]) -> int:
    """Numbers of 4 bytes that a row may take in a message."""
    if name != PROMPT_LOG_PROBS:
        return widths[name]
    return 5 + 4 * (request.output_config.prompt_log_probs or 0)  # msgpack: up to 18 bytes, and 15 for each alternative


def response_bytes(request: Request, widths: dict[str, int], num_context: int, num_output: int) -> tuple[int, int]:
    """An upper bound of the bytes of tensors: (in the largest response of a request, in all of its responses together)."""
    each = {name: _row_width(name, request, widths) for name in wanted(request)}
    context = sum(num_context * each[name] for name, (is_wanted, _) in wanted(request).items() if is_wanted)
    row = sum(each[name] for name, (_, is_wanted) in wanted(request).items() if is_wanted)
    total = FLOAT_BYTES * (context + row * num_output)
    return (FLOAT_BYTES * (context + row) if request.streaming else total), total


class Gathered:
    def __init__(
        self, names: dict[str, tuple[bool, bool]], first_position: int, num_prompt_tokens: int, num_top: int = 0
    ) -> None:
        """`first_position`: where this turn's prompt begins. `num_top`: alternatives to return for each token of the prompt."""
        self._names = names
        self._ends = {name: num_prompt_tokens - (name == PROMPT_LOG_PROBS) for name in names}
        self._next = dict.fromkeys(names, first_position)  # position of the next context row
        self._context: dict[str, list[bytes]] = {name: [] for name in names}
        self._generation: dict[str, list[bytes]] = {name: [] for name in names}
        self._row_bytes: dict[str, int] = {}
        self._num_top = num_top
        self.num_promised_bytes = 0  # upper bound of what responses will carry; written by the intake

    @classmethod
    def of(cls, request: Request, first_position: int, num_prompt_tokens: int) -> Gathered | None:
        """None for a request that asks for no tensors."""
        output = request.output_config
        asks = output.return_context_logits or output.return_generation_logits or output.additional_outputs
        if not asks and output.prompt_log_probs is None:
            return None
        return cls(wanted(request), first_position, num_prompt_tokens, output.prompt_log_probs or 0)

    @property
    def needed_from(self) -> int:
        """The first position that has to be computed even if its KV is in the cache."""
        return self._next[PROMPT_LOG_PROBS] if self._misses(PROMPT_LOG_PROBS) else NEVER

    def leave_prompt_log_probs(self) -> None:
        """Collect no log-probabilities of the prompt: another sequence of the request returns them."""
        self._names.pop(PROMPT_LOG_PROBS, None)

    def inherit(self, other: Gathered) -> None:
        """Take over the context rows of the sequence that has computed the prompt of both."""
        self._row_bytes |= other._row_bytes
        for name in self._names:
            self._context[name] = list(other._context[name])
            self._next[name] = other._next[name]

    def asked(self) -> list[Gather]:
        """The rows that a worker has to collect from now on."""
        return [
            Gather(
                name,
                self._next[name] if context and self._misses(name) else None,
                generation,
                self._num_top if name == PROMPT_LOG_PROBS else 0,
            )
            for name, (context, generation) in self._names.items()
        ]

    def add(self, part: GatheredRows) -> None:
        """Take the rows that a step has computed, without context rows that are known already."""
        row_bytes = self._row_bytes[part.name] = len(part.data) // part.num_rows
        if not part.is_context:
            self._generation[part.name].append(part.data)
            return
        known = self._next[part.name]
        end = part.position + part.num_rows
        if end <= known:
            return
        if part.position > known:
            self._context[part.name].clear()
        self._context[part.name].append(part.data[max(0, known - part.position) * row_bytes :])
        self._next[part.name] = end

    def take(self, request: Request) -> dict[str, Any]:
        """Hand over the rows that were added since the last call, as fields of a Result."""
        output = request.output_config
        context = {name: self._tensor(name, self._context, is_context=True) for name in self._names}
        generation = {name: self._tensor(name, self._generation, is_context=False) for name in self._names}
        asked = output.additional_outputs
        prompt = context.pop(PROMPT_LOG_PROBS, None)
        fields: dict[str, Any] = {
            "context_logits": context[LOGITS] if output.return_context_logits else None,
            "generation_logits": generation[LOGITS] if output.return_generation_logits else None,
            "prompt_log_probs": None if prompt is None else _prompt_log_probs(prompt),
        }
        if asked:
            own = {one.name: generation[one.name] for one in asked}
            of_context = {one.name: context[one.name] for one in asked if one.gather_context}
            fields["additional_outputs"] = {name: tensor for name, tensor in own.items() if tensor is not None}
            fields["additional_context_outputs"] = {
                name: tensor for name, tensor in of_context.items() if tensor is not None
            }
        return fields

    def _misses(self, name: str) -> bool:
        """True if context rows of this name are still to come."""
        return name in self._names and self._next[name] < self._ends[name]

    def _tensor(self, name: str, parts: dict[str, list[bytes]], is_context: bool) -> TensorData | None:
        chunks, parts[name] = parts[name], []
        if not chunks:
            return None
        data = b"".join(chunks)
        shape = (len(data) // self._row_bytes[name], self._row_bytes[name] // FLOAT_BYTES)
        return TensorData("float32", shape if is_context else (1, *shape), data)


def _prompt_log_probs(rows: TensorData) -> list[PromptLogProb]:
    """Decode the rows of PROMPT_LOG_PROBS; the module's docstring gives their layout."""
    num_rows, width = rows.shape
    ints, floats = memoryview(rows.data).cast("i").tolist(), memoryview(rows.data).cast("f").tolist()
    half = width // 2
    decoded = []
    for start in range(0, num_rows * width, width):
        top = zip(ints[start + 1 : start + half], floats[start + half + 1 : start + width])
        decoded.append(PromptLogProb(floats[start + half], ints[start], [TopLogProb(*each) for each in top]))
    return decoded
