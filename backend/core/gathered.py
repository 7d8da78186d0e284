"""Gathered: tensors that steps have computed for the client of a sequence, kept until a response takes them.

    context rows       one for each position of this turn's prompt that was run; positions found in the cache have none
    generation rows    one for each output token: the position from which it was sampled

Context rows end at the last position of the prompt and have no gap: n rows are those of its last n positions. A position that is
computed again (after a pause or an eviction) gives no second row. If other sequences computed more of the prompt while this one
was paused, the rows ahead of the resulting gap are dropped.

Three tensors are about the prompt alone (PROMPT_OUTPUTS). A client gets all of their rows, once: KV of a position whose row is
missing is not reused (`needed_from`).

    prompt_hidden_states    what the output head reads, of the last position or of all
    prompt_logits           logits of the tokens that the client named, behind the last position
    prompt_log_probs        of the prompt's own tokens: made from all positions but the last, behind which none follows

    row of position p    | rank | k token ids |   log-prob   | k log-probs |      prompt token p + 1, then the likeliest k
                              int32                   float32
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from backend.api.request import Request
from backend.api.response import PromptLogProb, TopLogProb
from backend.api.tensor import TensorData
from backend.core.step import Gather, GatheredRows

LOGITS = "logits"
PROMPT_LOG_PROBS = "prompt_log_probs"
PROMPT_HIDDEN = "prompt_hidden_states"
PROMPT_LOGITS = "prompt_logits"
PROMPT_OUTPUTS = (PROMPT_LOG_PROBS, PROMPT_HIDDEN, PROMPT_LOGITS)
HIDDEN_STATES = "hidden_states"
SOURCES = {
    PROMPT_LOG_PROBS: LOGITS,
    PROMPT_HIDDEN: HIDDEN_STATES,
    PROMPT_LOGITS: LOGITS,
}  # tensors that the model computes for them
FLOAT_BYTES = 4
NEVER = 1 << 62  # larger than any position


def wanted(request: Request) -> dict[str, tuple[bool, bool]]:
    """The tensors that a request asks for, by name: (whether context rows are wanted, whether generation rows are)."""
    output = request.output_config
    names = {asked.name: (asked.gather_context, True) for asked in output.additional_outputs}
    if output.return_context_logits or output.return_generation_logits:
        context, generation = names.get(LOGITS, (False, False))
        names[LOGITS] = context or output.return_context_logits, generation or output.return_generation_logits
    asked = output.prompt_log_probs is not None, output.prompt_hidden_states is not None, bool(output.prompt_logits_of)
    names.update({name: (True, False) for name, is_asked in zip(PROMPT_OUTPUTS, asked) if is_asked})
    return names


def _needs_last_only(name: str, request: Request) -> bool:
    """True if the only context row is that of the prompt's last position."""
    return name == PROMPT_LOGITS or (name == PROMPT_HIDDEN and request.output_config.prompt_hidden_states == "last")


def _row_width(name: str, request: Request, widths: dict[str, int]) -> int:
    """Numbers of 4 bytes that a row may take in a message."""
    if name == PROMPT_LOGITS:
        return len(request.output_config.prompt_logits_of)
    if name != PROMPT_LOG_PROBS:
        return widths[SOURCES.get(name, name)]
    return 5 + 4 * (request.output_config.prompt_log_probs or 0)  # msgpack: up to 18 bytes, and 15 for each alternative


def response_bytes(request: Request, widths: dict[str, int], num_context: int, num_output: int) -> tuple[int, int]:
    """An upper bound of the bytes of tensors: (in the largest response of a request, in all of its responses together)."""
    beams = request.sampling_config.beam_width  # their rows come with the final response, all together
    each = {name: _row_width(name, request, widths) for name in wanted(request)}
    num_rows = {name: 1 if _needs_last_only(name, request) else num_context for name in each}
    context = sum(num_rows[name] * each[name] for name, (is_wanted, _) in wanted(request).items() if is_wanted)
    row = sum(each[name] for name, (_, is_wanted) in wanted(request).items() if is_wanted)
    total = FLOAT_BYTES * (context + row * num_output * beams)
    return (FLOAT_BYTES * (context + row) if request.streaming and beams == 1 else total), total


class Gathered:
    def __init__(self, request: Request, first_position: int, num_prompt_tokens: int) -> None:
        """`first_position`: where this turn's prompt begins."""
        names = self._names = wanted(request)
        self._ends = {name: num_prompt_tokens - (name == PROMPT_LOG_PROBS) for name in names}
        # position of the next context row
        self._next = {
            name: num_prompt_tokens - 1 if _needs_last_only(name, request) else first_position for name in names
        }
        self._context: dict[str, list[bytes]] = {name: [] for name in names}
        self._generation: dict[str, list[bytes]] = {name: [] for name in names}
        self._row_bytes: dict[str, int] = {}
        self._num_top = request.output_config.prompt_log_probs or 0
        self._tokens = request.output_config.prompt_logits_of
        self.num_promised_bytes = 0  # upper bound of what responses will carry; written by the intake

    @classmethod
    def of(cls, request: Request, first_position: int, num_prompt_tokens: int) -> Gathered | None:
        """None for a request that asks for no tensors."""
        return cls(request, first_position, num_prompt_tokens) if wanted(request) else None

    @property
    def needed_from(self) -> int:
        """The first position that has to be computed even if its KV is in the cache."""
        return min((self._next[name] for name in PROMPT_OUTPUTS if self._misses(name)), default=NEVER)

    def leave_prompt_outputs(self) -> None:
        """Collect nothing about the prompt alone: another sequence of the request returns it."""
        for name in PROMPT_OUTPUTS:
            self._names.pop(name, None)

    def inherit(self, other: Gathered) -> None:
        """Take over the context rows of the sequence that has computed the prompt of both."""
        self._row_bytes |= other._row_bytes
        for name in self._names:
            self._context[name] = list(other._context[name])
            self._next[name] = other._next[name]

    def fork(self) -> Gathered:
        """A copy for another hypothesis of the same beam search. Rows so far are shared, not copied."""
        child = copy.copy(self)
        child._next = dict(self._next)
        child._context = {name: list(rows) for name, rows in self._context.items()}
        child._generation = {name: list(rows) for name, rows in self._generation.items()}
        return child

    def keep_generation(self, num_tokens: int) -> None:
        """Drop the generation rows behind those of so many output tokens: what they were computed for was not chosen."""
        for rows in self._generation.values():
            del rows[num_tokens:]

    def asked(self) -> list[Gather]:
        """The rows that a worker has to collect from now on."""
        return [
            Gather(
                name,
                self._next[name] if context and self._misses(name) else None,
                generation,
                self._num_top if name == PROMPT_LOG_PROBS else 0,
                self._tokens if name == PROMPT_LOGITS else (),
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
            "prompt_hidden_states": context.get(PROMPT_HIDDEN),
            "prompt_logits": context.get(PROMPT_LOGITS),
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


def of_beams(beams: Sequence[Gathered], request: Request) -> dict[str, Any]:
    """The fields of a Result for the hypotheses of a beam search: generation rows are [beams, longest output, width], with zeros
    behind the end of shorter ones; context rows are those of the prompt that all share.
    """
    taken = [beam.take(request) for beam in beams]
    fields = taken[0]
    fields["generation_logits"] = _stacked([each["generation_logits"] for each in taken])
    if "additional_outputs" in fields:
        parts = {name: [each["additional_outputs"].get(name) for each in taken] for name in beams[0]._names}
        stacked = {name: _stacked(tensors) for name, tensors in parts.items()}
        asked = [one.name for one in request.output_config.additional_outputs]
        fields["additional_outputs"] = {name: stacked[name] for name in asked if stacked[name] is not None}
    return fields


def _stacked(parts: Sequence[TensorData | None]) -> TensorData | None:
    """Tensors [1, length, width] as one [parts, longest, width]; None where all are None."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    length, width = max(part.shape[1] for part in given), given[0].shape[2]
    data = b"".join((b"" if part is None else part.data).ljust(length * width * FLOAT_BYTES, b"\0") for part in parts)
    return TensorData("float32", (len(parts), length, width), data)


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
