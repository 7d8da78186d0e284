"""Responses that take long to build, beside other streams."""

from __future__ import annotations

import threading
from typing import Any

from backend.api import FinishReason, Result
from backend.serving.stream import OutputRow
from tests.serving.test_pump import Harness


class SlowOutput:
    """Its only response takes until it may be built."""

    num_output_tokens, finish = 1, FinishReason.LENGTH

    def __init__(self) -> None:
        self.building, self.may_be_built = threading.Event(), threading.Event()

    def feed(self, result: Result) -> None:
        return None

    def render(self) -> list[Any]:
        self.building.set()
        assert self.may_be_built.wait(20), "other streams wait for this response"
        return [[]]


def test_a_response_that_takes_long_to_build_holds_up_no_other_stream() -> None:
    harness = Harness(num_lanes=1)
    slow, output = harness.open(num_rows=0), SlowOutput()
    assert harness.pump.begin(slow[0], [OutputRow(output, takes_long=True)])
    harness.tokens(slow[0], 1, final=True)
    assert output.building.wait(10)
    for n in range(3):
        stream, sender = harness.open()
        harness.tokens(stream, n, final=True)
        sender.wait()
    assert slow[0] in harness.pump.live_streams()
    output.may_be_built.set()
    slow[1].wait()
    harness.pump.close()
    assert harness.pump.live_streams() == []
