"""Requests that a program of the same process has made: a field of a wrong type is refused by name, and the engine lives on."""

from __future__ import annotations

import re

import pytest

from backend.api import InvalidRequest, Request, SamplingConfig
from backend.api.field_types import check_field_types


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_config": SamplingConfig(temperature="x")}, "sampling_config.temperature: expected float | None, got str"),
        ({"sampling_config": SamplingConfig(seed=1.5)}, "sampling_config.seed: expected int | None, got float"),
        ({"sampling_config": SamplingConfig(top_k=True)}, "sampling_config.top_k: expected int | None, got bool"),
        ({"input_token_ids": [1, "a"]}, "input_token_ids[1]: expected int, got str"),
        ({"stop_words": [["a"]]}, "stop_words[0][0]: expected int, got str"),
        ({"timeout_s": object()}, "the request holds a value that is no plain number, text or list"),
        ({"sampling_config": None}, "sampling_config: expected object, got None"),
    ],
)  # fmt: skip
def test_a_field_of_a_wrong_type_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_field_types(Request(**{"input_token_ids": [1], "max_tokens": 1, **fields}))


def test_what_a_program_may_say_passes() -> None:
    whole_numbers = SamplingConfig(temperature=1, top_p=1, logit_bias={3: 1})
    check_field_types(Request([1, 2], 3, sampling_config=whole_numbers, extra_inputs={"pixels": object()}))
