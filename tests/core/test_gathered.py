"""Which rows of a tensor reach the client: each once, and the prompt's last ones without a gap."""

from __future__ import annotations

import struct

import pytest

from backend.api import AdditionalOutput, OutputConfig, PromptLogProb, Request, TensorData, TopLogProb
from backend.core.gathered import Gathered, response_bytes
from backend.core.step import Gather, GatheredRows

CONTEXT = OutputConfig(return_context_logits=True)


def make(output: OutputConfig = CONTEXT, prompt: int = 8, first: int = 0) -> tuple[Gathered, Request]:
    request = Request([1] * prompt, 2, output_config=output)
    gathered = Gathered.of(request, first, prompt)
    assert gathered is not None
    return gathered, request


def rows(start: int, end: int, name: str = "logits", is_context: bool = True) -> GatheredRows:
    """Rows of width 1 that hold their position."""
    data = struct.pack(f"<{end - start}f", *range(start, end))
    return GatheredRows(0, name, is_context, start, end - start, data)


def positions(tensor: TensorData | None) -> list[float]:
    assert tensor is not None
    return list(struct.unpack(f"<{len(tensor.data) // 4}f", tensor.data))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0, 3), (3, 8)], range(8)),
        ([(0, 5), (2, 8)], range(8)),  # evicted, and computed again from position 2
        ([(0, 5), (0, 3), (3, 8)], range(8)),
        ([(3, 8)], range(3, 8)),  # the KV of three tokens was found
        ([(0, 3), (5, 8)], range(5, 8)),  # others have computed 3 and 4 while it was paused
    ],
)
def test_context_rows_come_once_and_have_no_gap(parts: list[tuple[int, int]], expected: range) -> None:
    gathered, request = make()
    for part in parts:
        gathered.add(rows(*part))
    tensor = gathered.take(request)["context_logits"]
    assert positions(tensor) == list(expected)
    assert tensor.shape == (len(expected), 1)
    assert gathered.take(request)["context_logits"] is None, "it has left"


def test_a_worker_is_asked_for_what_is_still_missing() -> None:
    gathered, _ = make(OutputConfig(return_context_logits=True, return_generation_logits=True), first=2)
    assert gathered.asked() == [Gather("logits", 2, True)]
    gathered.add(rows(2, 6))
    assert gathered.asked() == [Gather("logits", 6, True)]
    gathered.add(rows(6, 8))
    assert gathered.asked() == [Gather("logits", None, True)]


def test_log_probs_of_the_prompt_end_ahead_of_its_last_position_and_need_all_before() -> None:
    gathered, request = make(OutputConfig(prompt_log_probs=1), prompt=4, first=1)
    assert gathered.asked() == [Gather("prompt_log_probs", 1, False, 1)] and gathered.needed_from == 1
    row = struct.pack("=2i2f", 7, 5, -2.0, -0.5)
    gathered.add(GatheredRows(0, "prompt_log_probs", True, 1, 1, row))
    assert gathered.needed_from == 2
    gathered.add(GatheredRows(0, "prompt_log_probs", True, 1, 2, row + struct.pack("=2i2f", 1, 9, -0.25, -0.25)))
    assert gathered.asked() == [Gather("prompt_log_probs", None, False, 1)] and gathered.needed_from > 4
    first, second = gathered.take(request)["prompt_log_probs"]
    assert (first, second) == (
        PromptLogProb(-2.0, 7, [TopLogProb(5, -0.5)]),
        PromptLogProb(-0.25, 1, [TopLogProb(9, -0.25)]),
    )
    assert gathered.take(request)["prompt_log_probs"] is None


def test_a_request_without_tensors_has_nothing_to_gather() -> None:
    assert Gathered.of(Request([1], 2), 0, 1) is None


@pytest.mark.feature("001-67")
def test_the_bytes_of_a_response_count_every_row_that_may_come() -> None:
    output = OutputConfig(
        return_context_logits=True,
        return_generation_logits=True,
        additional_outputs=(AdditionalOutput("hidden_states"), AdditionalOutput("logits")),
    )
    widths = {"logits": 100, "hidden_states": 10, "unasked": 7}
    whole = 4 * (100 * 5 + (100 + 10) * 3)
    assert response_bytes(Request([1], 3, output_config=output), widths, 5, 3) == (whole, whole)
    streaming = Request([1], 3, streaming=True, output_config=output)
    assert response_bytes(streaming, widths, 5, 3) == (4 * (100 * 5 + 110), whole)
