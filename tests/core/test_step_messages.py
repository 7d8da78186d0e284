"""Step messages cross process boundaries: they must survive the wire and be frozen."""

from __future__ import annotations

import msgspec
import pytest

from backend.api import SamplingConfig
from backend.core.step import NewRow, Row, SampledToken, StepInput, StepOutput


def test_a_step_survives_the_wire() -> None:
    new_row = NewRow(
        0, [1, 2], 2, 0, [3, -1], SamplingConfig(temperature=0.5, logit_bias={3: 1.5}), (7,), [[1, 2]], True, 2, "salt"
    )
    step = StepInput(4, [Row(0, 0, 2, True, [5])], [new_row], [(1, 2)], 8)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=StepInput) == step


def test_an_output_survives_the_wire() -> None:
    output = StepOutput(4, [SampledToken(0, 17, -0.5, [(17, -0.5), (3, -2.0)]), SampledToken(1, 2)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput) == output


def test_step_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Row(0, 0, 1, True).num_tokens = 2
