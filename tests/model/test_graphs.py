"""Graphs without a GPU: what is run, captured and replayed, and what becomes of it when there are too many."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backend.worker.graphs import MAX_GRAPHS, Captured, Graphs, Step


class Recorder:
    """Stands for CUDA; counts."""

    def __init__(self) -> None:
        self.makers, self.captures, self.replays = 0, 0, 0

    def capture(self, step: Step) -> Captured:
        self.captures += 1
        result = step().clone()

        def replay() -> None:
            self.replays += 1
            result.copy_(step())

        return Captured(replay, result)


def graphs_of(recorder: Recorder) -> Graphs:
    def make() -> Callable[[Step], Captured]:
        recorder.makers += 1
        return recorder.capture

    return Graphs(make)


def constant(value: int) -> Step:
    def step() -> Tensor:
        return torch.tensor([value])

    return step


@pytest.mark.feature("003-60")
def test_the_first_run_is_eager_the_second_captured_all_others_replayed() -> None:
    recorder = Recorder()
    graphs = graphs_of(recorder)
    assert [graphs.run("a", constant(3)).item() for _ in range(5)] == [3] * 5
    assert (recorder.captures, recorder.replays, len(graphs)) == (1, 4, 1)


def test_without_a_capture_everything_is_eager() -> None:
    graphs = Graphs(None)
    assert [graphs.run("a", constant(3)).item() for _ in range(3)] == [3] * 3 and len(graphs) == 0


def test_more_shapes_than_fit_cost_the_least_recently_used() -> None:
    recorder = Recorder()
    graphs = graphs_of(recorder)
    for key in [*range(MAX_GRAPHS), *range(MAX_GRAPHS), MAX_GRAPHS, MAX_GRAPHS]:
        assert graphs.run(key, constant(key)).item() == key
    assert recorder.captures == MAX_GRAPHS + 1 and len(graphs) == MAX_GRAPHS
    graphs.run(1, constant(1))
    assert recorder.captures == MAX_GRAPHS + 1, "1 is still there"
    for _ in range(2):
        assert graphs.run(0, constant(0)).item() == 0
    assert recorder.captures == MAX_GRAPHS + 2, "0 was the one to go"


def test_what_is_forgotten_is_captured_anew_into_a_pool_of_its_own() -> None:
    recorder = Recorder()
    graphs = graphs_of(recorder)
    graphs.run("a", constant(3))
    graphs.run("a", constant(3))
    graphs.clear()
    assert [graphs.run("a", constant(4)).item() for _ in range(3)] == [4] * 3
    assert (recorder.makers, recorder.captures) == (2, 2)


def test_a_capture_that_fails_turns_graphs_off_and_names_the_first_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="everbatch.worker")

    def capture(step: Step) -> Captured:
        try:
            raise RuntimeError("operation not permitted\nmore")
        finally:
            raise RuntimeError("operation failed due to a previous error")

    graphs = Graphs(lambda: capture)
    assert [graphs.run("a", constant(3)).item() for _ in range(3)] == [3] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "CUDA graphs: off, because capturing a step of a failed: operation not permitted"
