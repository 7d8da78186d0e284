"""The answers to one prompt where there may be several: sequences that are sampled side by side, the best of them, or beams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backend.serving.fronts.named_sampling import NamedSampling
from backend.serving.news import News, Reporter
from backend.serving.outputs import BeamsOutput, JointOutput, Render, RowOutput, SeparateOutput


def choices_output(
    asked: NamedSampling, new_reporter: Callable[[], Reporter], render: Render, *, streaming: bool, joint: bool
) -> RowOutput:
    """The output of a row. `joint`: each response tells of all sequences; otherwise each sequence has its own."""
    if asked.use_beam_search:
        return BeamsOutput(new_reporter, render, streaming=streaming)
    reporters = [new_reporter() for _ in range(asked.num_generated)]
    if joint and len(reporters) > 1:
        return JointOutput(reporters, render, streaming=streaming)
    return SeparateOutput(reporters, render)


def chosen(asked: NamedSampling, told: Sequence[News]) -> Sequence[News]:
    """What the client is told of: of `best_of` sequences the n with the greatest log-probability, the best first."""
    if asked.num_generated == asked.n or asked.use_beam_search:  # of beams the engine tells no others
        return told
    best = sorted(told, key=lambda news: -(news.cum_log_prob or 0.0))[: asked.n]
    return [news._replace(sequence=place) for place, news in enumerate(best)]
