"""Gathered: the tensors that a sequence's steps have computed for its client, until they leave in a response.

    context rows       positions of this turn's prompt that were run; those whose KV was found in the cache are absent
    generation rows    for each output token, the position that it was chosen from

Context rows end at the prompt's last position and have no gap: n of them are the prompt's last n. A position that is computed
again (after a pause, an eviction) is not taken twice. Where others have computed more of the prompt while this sequence was
paused, the rows ahead of that gap are dropped.
"""

from __future__ import annotations

from typing import Any

from backend.api.request import Request
from backend.api.tensor import TensorData
from backend.core.step import Gather, GatheredRows

LOGITS = "logits"
FLOAT_BYTES = 4


def wanted(request: Request) -> dict[str, tuple[bool, bool]]:
    """For each tensor that a request asks for, by name: whether for context rows, and whether for generation rows."""
    output = request.output_config
    names = {asked.name: (asked.gather_context, True) for asked in output.additional_outputs}
    if output.return_context_logits or output.return_generation_logits:
        context, generation = names.get(LOGITS, (False, False))
        names[LOGITS] = context or output.return_context_logits, generation or output.return_generation_logits
    return names


def response_bytes(request: Request, widths: dict[str, int], num_context: int, num_output: int) -> tuple[int, int]:
    """Bytes of tensors in the largest response of a request, and of all of them together, at most."""
    context = sum(num_context * widths[name] for name, (is_wanted, _) in wanted(request).items() if is_wanted)
    row = sum(widths[name] for name, (_, is_wanted) in wanted(request).items() if is_wanted)
    total = FLOAT_BYTES * (context + row * num_output)
    return (FLOAT_BYTES * (context + row) if request.streaming else total), total


class Gathered:
    def __init__(self, names: dict[str, tuple[bool, bool]], first_position: int, num_prompt_tokens: int) -> None:
        """`first_position`: of this turn's prompt."""
        self._names = names
        self._end = num_prompt_tokens
        self._next = dict.fromkeys(names, first_position)  # position of the next context row
        self._context: dict[str, list[bytes]] = {name: [] for name in names}
        self._generation: dict[str, list[bytes]] = {name: [] for name in names}
        self._row_bytes: dict[str, int] = {}
        self.num_promised_bytes = 0  # written by the intake

    @classmethod
    def of(cls, request: Request, first_position: int, num_prompt_tokens: int) -> Gathered | None:
        """None for a request that asks for no tensors."""
        output = request.output_config
        if not (output.return_context_logits or output.return_generation_logits or output.additional_outputs):
            return None
        return cls(wanted(request), first_position, num_prompt_tokens)

    def asked(self) -> list[Gather]:
        """What a worker is to collect from now on."""
        return [
            Gather(name, self._next[name] if context and self._next[name] < self._end else None, generation)
            for name, (context, generation) in self._names.items()
        ]

    def add(self, part: GatheredRows) -> None:
        """Take rows that a step has computed; of context rows only those that have not been seen."""
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
        """Hand over what has come since the last call, as fields of a Result."""
        output = request.output_config
        context = {name: self._tensor(name, self._context, is_context=True) for name in self._names}
        generation = {name: self._tensor(name, self._generation, is_context=False) for name in self._names}
        asked = output.additional_outputs
        fields: dict[str, Any] = {
            "context_logits": context[LOGITS] if output.return_context_logits else None,
            "generation_logits": generation[LOGITS] if output.return_generation_logits else None,
        }
        if asked:
            own = {one.name: generation[one.name] for one in asked}
            of_context = {one.name: context[one.name] for one in asked if one.gather_context}
            fields["additional_outputs"] = {name: tensor for name, tensor in own.items() if tensor is not None}
            fields["additional_context_outputs"] = {
                name: tensor for name, tensor in of_context.items() if tensor is not None
            }
        return fields

    def _tensor(self, name: str, parts: dict[str, list[bytes]], is_context: bool) -> TensorData | None:
        chunks, parts[name] = parts[name], []
        if not chunks:
            return None
        data = b"".join(chunks)
        shape = (len(data) // self._row_bytes[name], self._row_bytes[name] // FLOAT_BYTES)
        return TensorData("float32", shape if is_context else (1, *shape), data)
