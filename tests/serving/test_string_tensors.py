"""STRING inputs are read as Triton's own loop reads them, up to a bound."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import InvalidRequest
from backend.serving import pb
from backend.serving.intake import batch as reading
from backend.serving.intake.batch import Batch
from backend.serving.string_tensors import MAX_STRINGS, deserialize
from backend.serving.wires.trtllm_tensors import ENSEMBLE
from tests.serving.fake_triton import Tensor


def encoded(strings: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(struct.pack("<I", len(s)) + s for s in strings), np.uint8)


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_strings_come_back_from_their_encoding(strings: list[bytes]) -> None:
    array = deserialize(encoded(strings)).reshape([1, len(strings)])
    assert array.dtype == np.object_ and array.tolist() == [strings]


def test_as_many_as_allowed_are_read_and_more_are_not() -> None:
    whole = deserialize(np.zeros(4 * MAX_STRINGS, np.uint8))
    assert whole.shape == (MAX_STRINGS,)
    too_many = deserialize(np.zeros(4 * (MAX_STRINGS + 1), np.uint8)).reshape([1, MAX_STRINGS + 1])
    assert too_many.shape == (1, MAX_STRINGS + 1) and too_many.strides == (0, 0), "it takes no memory"


def test_a_tensor_that_was_not_read_is_refused_by_its_number() -> None:
    array = deserialize(np.zeros(4 * (MAX_STRINGS + 1), np.uint8)).reshape([1, MAX_STRINGS + 1])
    with pytest.raises(InvalidRequest, match=f"bad_words holds {MAX_STRINGS + 1} strings, the limit is {MAX_STRINGS}"):
        Batch.read(ENSEMBLE, [Tensor("bad_words", array)], 64)


def test_the_bounded_loop_takes_the_place_of_tritons() -> None:
    assert pb.pb_utils.deserialize_bytes_tensor is deserialize


def test_a_truncated_buffer_raises_as_tritons_loop_does() -> None:
    with pytest.raises(struct.error):
        deserialize(np.zeros(6, np.uint8))


@pytest.mark.parametrize(("size", "refused"), [(100, False), (101, True)])
def test_all_inputs_of_a_request_together_are_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch, size: int, refused: bool
) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", 104)
    text = np.array([[b"x" * size]], np.object_)
    tensors = [Tensor("text_input", text), Tensor("max_tokens", np.ones((1, 1), np.int32))]
    if refused:
        with pytest.raises(InvalidRequest, match="inputs hold 105 bytes, the limit is 104; split it"):
            Batch.read(ENSEMBLE, tensors, 64)
    else:
        assert Batch.read(ENSEMBLE, tensors, 64).num_bytes == 104
