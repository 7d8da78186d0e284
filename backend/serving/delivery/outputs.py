"""Turns the Results of one row of a request into the named arrays of Triton responses.

Only the row's sender thread uses a RowOutput. `feed` takes in the engine's Results in order. `render` returns the responses
that are to be sent now: none while there is nothing to say, at least one once the engine has ended the row, so that the end of
a row rides on a data response. What the arrays are called and how they are shaped is the front's: a function from OutputDeltas
to Arrays.

    SeparateOutput   each sequence of the row answers for itself, with responses of its own
    JointOutput      each response has the changes of all sequences
    BeamsOutput      each response has all beams from their beginnings
    Answer           the row needs no engine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend.api import FinishReason, Result
from backend.serving.delivery.sequence_output import SequenceOutput
from backend.serving.work import Arrays
from backend.text.accumulator import OutputDelta

Render = Callable[[Sequence[OutputDelta]], Arrays]  # the changes of each sequence in the response


class _Sequences:
    """The sequences of a row, by their index. They end one by one."""

    def __init__(self, sequences: Sequence[SequenceOutput], render: Render) -> None:
        self._sequences = sequences
        self._render = render
        self._newest = 0  # the sequence of the last Result

    def feed(self, result: Result) -> int | None:
        self._newest = result.sequence_index
        return self._sequences[result.sequence_index].append(result)

    def _take(self, index: int) -> OutputDelta:
        delta = self._sequences[index].take()
        return delta._replace(sequence=index) if index else delta

    @property
    def num_output_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self._sequences)

    @property
    def finish(self) -> FinishReason | None:
        """The finish reason of the sequence that ended last, which ends the row."""
        return self._sequences[self._newest].finish


class SeparateOutput(_Sequences):
    """Sequences that each have their own responses. Most rows have one sequence."""

    def render(self) -> list[Arrays]:
        due = [n for n, sequence in enumerate(self._sequences) if sequence.is_due]
        return [self._render([self._take(n)]) for n in due]


class JointOutput(_Sequences):
    """Sequences that share their responses: each response covers all of them, even those without changes.

    A row that does not stream has one response, when all have ended.
    """

    def __init__(self, sequences: Sequence[SequenceOutput], render: Render, *, streaming: bool) -> None:
        super().__init__(sequences, render)
        self._streaming = streaming

    def render(self) -> list[Arrays]:
        have_ended = all(sequence.has_ended for sequence in self._sequences)
        if not (have_ended or (self._streaming and any(sequence.is_due for sequence in self._sequences))):
            return []
        return [self._render([self._take(n) for n in range(len(self._sequences))])]


class BeamsOutput:
    """The beams of a row, the best first.

    Each Result holds them from their beginnings, because a beam may become the continuation of another one; so does each
    response. `new_sequence` makes an empty SequenceOutput.
    """

    def __init__(self, new_sequence: Callable[[], SequenceOutput], render: Render, *, streaming: bool) -> None:
        self._new_sequence = new_sequence
        self._render = render
        self._streaming = streaming
        self._latest: Result | None = None
        self._is_fresh = False

    @property
    def num_output_tokens(self) -> int:
        return 0 if self._latest is None else sum(map(len, self._latest.output_token_ids))

    @property
    def finish(self) -> FinishReason | None:
        return None

    def feed(self, result: Result) -> int | None:
        self._latest, self._is_fresh = result, True
        return None

    def render(self) -> list[Arrays]:
        result = self._latest
        if result is None or not self._is_fresh or not (self._streaming or result.is_final):
            return []
        self._is_fresh = False
        return [self._render([self._delta(result, beam) for beam in range(len(result.output_token_ids))])]

    def _delta(self, result: Result, beam: int) -> OutputDelta:
        sequence = self._new_sequence()
        sequence.append(result, beam)
        return sequence.take()._replace(sequence=beam)


class Answer:
    """The output of a row that needs no engine: its response is known."""

    num_output_tokens = 0
    finish = None

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def feed(self, result: Result) -> int | None:
        return None

    def render(self) -> list[Arrays]:
        return [self._arrays]


class Confirmation(Answer):
    """The known response to a command, once the engine has carried it out. A refused command has only its error."""

    _is_done = False

    def feed(self, result: Result) -> int | None:
        self._is_done = True
        return None

    def render(self) -> list[Arrays]:
        return super().render() if self._is_done else []


def text_array(texts: Sequence[str | bytes]) -> NDArray[Any]:
    """A STRING tensor in one dimension. A lone surrogate, which no UTF-8 can hold, becomes a question mark."""
    encoded = [text if isinstance(text, bytes) else text.encode("utf-8", "replace") for text in texts]
    return np.array(encoded, dtype=np.object_)
