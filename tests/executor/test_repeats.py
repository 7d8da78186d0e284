"""A stream that begins anew on another engine: its client gets each token and each row that goes with it once."""

from __future__ import annotations

import struct

from backend.api import OutputConfig, Request, Response, Result
from backend.api.response import TopLogProb
from backend.api.tensor import TensorData
from backend.core.messages import Submit
from backend.executor.live import Live, ReceivedOutput
from backend.executor.repeats import without_repeats

NUM_HAD = 3
OUTPUT = OutputConfig(return_log_probs=True, top_log_probs=1, return_generation_logits=True)


def floats(*values: float) -> TensorData:
    return TensorData("FP32", (1, len(values), 1), struct.pack(f"<{len(values)}f", *values))


def result_of(*tokens: int) -> Response:
    """A response whose values of each token are the token itself."""
    result = Result(
        [list(tokens)],
        is_final=False,
        log_probs=[[-float(each) for each in tokens]],
        top_log_probs=[[TopLogProb(each, -float(each))] for each in tokens],
        generation_logits=floats(*map(float, tokens)),
        additional_outputs={"hidden": floats(*map(float, tokens))},
    )
    return Response(1, None, result)


def test_all_values_of_a_token_are_cut_with_it() -> None:
    live = Live(1, lambda response: None, Submit(1, Request([1], 9, streaming=True, output_config=OUTPUT)), 0.0)
    live.outputs[0] = ReceivedOutput(num_tokens=NUM_HAD, num_before=NUM_HAD)
    assert without_repeats(live, result_of(5, 6)) is None, "the client has had both"
    told = without_repeats(live, result_of(7, 8))
    assert told is not None and told.result.output_token_ids == [[8]]
    assert told.result.log_probs == [[-8.0]]
    assert told.result.top_log_probs == [[TopLogProb(8, -8.0)]]
    assert told.result.generation_logits == floats(8.0)
    assert told.result.additional_outputs == {"hidden": floats(8.0)}
    after = without_repeats(live, result_of(9))
    assert after is not None and after.result == result_of(9).result
