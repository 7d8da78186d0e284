"""Several answers to one prompt: sequences that are sampled side by side, the best of them, or beams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backend.serving.delivery.outputs import BeamsOutput, JointOutput, Render, SeparateOutput
from backend.serving.delivery.sequence_output import SequenceOutput
from backend.serving.wires.named_sampling import NamedSampling
from backend.serving.work import RowOutput
from backend.text.accumulator import OutputDelta


def choices_output(
    asked: NamedSampling, new_sequence: Callable[[], SequenceOutput], render: Render, *, streaming: bool, joint: bool
) -> RowOutput:
    """The output of a row. `joint`: each response covers all sequences; otherwise each sequence has its own responses."""
    if asked.use_beam_search:
        return BeamsOutput(new_sequence, render, streaming=streaming)
    sequences = [new_sequence() for _ in range(asked.num_generated)]
    if joint and len(sequences) > 1:
        return JointOutput(sequences, render, streaming=streaming)
    return SeparateOutput(sequences, render)


def chosen(asked: NamedSampling, deltas: Sequence[OutputDelta]) -> Sequence[OutputDelta]:
    """The client gets `n` of `best_of` sequences: those with the greatest log-probability, the best first."""
    if asked.num_generated == asked.n or asked.use_beam_search:  # The engine returns only the n best beams.
        return deltas
    best = sorted(deltas, key=lambda delta: -(delta.cum_log_prob or 0.0))[: asked.n]
    return [delta._replace(sequence=place) for place, delta in enumerate(best)]
