"""Every field of a request has limits, and an error names the value and the limit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import (
    ErrorCode,
    InvalidRequest,
    OutputConfig,
    Request,
    SamplingConfig,
    SessionConfig,
    SessionError,
    Unsupported,
)
from backend.api.config.schema import LimitsConfig
from backend.api.limits import RequestLimits, check_request
from backend.api.request import RetentionConfig, TokenRangeRetention

LIMITS = RequestLimits(100, 20, LimitsConfig(max_words=3, max_word_tokens=4, max_logit_bias=2, max_timeout_s=60.0))


def request(
    prompt: list[int] | None = None, max_tokens: int = 5, sampling: dict[str, object] | None = None, **fields: object
) -> Request:
    sampling_config = SamplingConfig(**(sampling or {}))
    return Request([1, 2] if prompt is None else prompt, max_tokens, sampling_config=sampling_config, **fields)


@pytest.mark.feature("000-11")
def test_a_request_needs_its_ids_and_its_length_and_is_read_only() -> None:
    made = Request([1, 2], 5)
    assert (made.input_token_ids, made.max_tokens) == ([1, 2], 5)
    with pytest.raises(TypeError, match="Missing required argument"):
        Request([1, 2])
    with pytest.raises(AttributeError):
        made.max_tokens = 6


@pytest.mark.feature("000-11")
def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        check_request(request([]), LIMITS)


@pytest.mark.feature("001-64", "003-40")
@pytest.mark.parametrize(
    ("length", "max_tokens", "is_accepted"), [(19, 5, True), (20, 5, False), (20, 0, True), (21, 0, False)]
)
def test_the_longest_prompt_leaves_room_for_one_output_token(length: int, max_tokens: int, is_accepted: bool) -> None:
    if is_accepted:
        check_request(request([1] * length, max_tokens), LIMITS)
    else:
        with pytest.raises(
            InvalidRequest, match=f"the prompt has {length} tokens, the limit is {19 + (max_tokens == 0)}"
        ):
            check_request(request([1] * length, max_tokens), LIMITS)


BAD = [
    (request([1, 100]), "input token 100 is outside the vocabulary; allowed is 0 to 99"),
    (request([-1]), "input token -1 is outside"),
    (request(max_tokens=-1), "max_tokens is -1, allowed is 0"),
    (request(end_ids=(100,)), "end id 100 is outside"),
    (request(stop_words=[[1]] * 4), "4 stop words, the limit is 3"),
    (request(bad_words=[[]]), "a bad word has 0 tokens, allowed is 1 to 4"),
    (request(stop_words=[[1] * 5]), "a stop word has 5 tokens"),
    (request(bad_words=[[1, 100]]), "bad word token 100 is outside"),
    (request(sampling={"temperature": -0.1}), "temperature is -0.1, allowed is 0"),
    (request(sampling={"temperature": math.nan}), "temperature is nan"),
    (request(sampling={"top_k": -1}), "top_k is -1"),
    (request(sampling={"top_p": 1.1}), "top_p is 1.1"),
    (request(sampling={"top_p": 0.0}), "top_p is 0.0, allowed is more than 0.0 to 1.0"),
    (request(sampling={"min_p": math.inf}), "min_p is inf"),
    (request(sampling={"top_p": -1.0}), "top_p is -1.0, allowed is more than 0.0 to 1.0"),
    (request(sampling={"top_p_decay": 0.0}), "top_p_decay is 0.0, allowed is more than 0.0 to 1.0"),
    (request(sampling={"top_p_min": 1.5}), "top_p_min is 1.5"),
    (request(sampling={"top_p_reset_ids": 100}), "top_p_reset_ids is 100, allowed is 0 to 99"),
    (request(sampling={"no_repeat_ngram_size": -1}), "no_repeat_ngram_size is -1"),
    (request(sampling={"seed": -1}), "seed is -1"),
    (request(sampling={"seed": 1 << 64}), "seed is 18446744073709551616"),
    (request(sampling={"repetition_penalty": 0.0}), "repetition_penalty is 0"),
    (request(sampling={"presence_penalty": -101.0}), "presence_penalty is -101"),
    (request(sampling={"frequency_penalty": math.nan}), "frequency_penalty is nan"),
    (request(sampling={"min_tokens": -1}), "min_tokens is -1"),
    (request(sampling={"num_return_sequences": 0}), "num_return_sequences is 0, allowed is 1 to 2048"),
    (request(sampling={"num_return_sequences": 2049}), "num_return_sequences is 2049, allowed is 1 to 2048"),
    (request(sampling={"length_penalty": math.inf}), "length_penalty is inf, allowed is -50 to 50"),
    (request(sampling={"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0}}), "logit_bias has 3 entries, the limit is 2"),
    (request(sampling={"logit_bias": {100: 1.0}}), "logit_bias token 100 is outside"),
    (request(sampling={"logit_bias": {1: math.inf}}), "logit_bias holds a value that is not finite"),
    (request(output_config=OutputConfig(top_log_probs=21)), "top_log_probs is 21, allowed is 0 to 20"),
    (request(client_id=1 << 64), "client_id is"),
    (request(timeout_s=0.0), "timeout is 0.0 s"),
    (request(timeout_s=61.0), "timeout is 61.0 s, allowed is more than 0 to 60 s"),
    (request(timeout_s=math.nan), "timeout is nan"),
    (request(cache_salt="x" * 257), "cache_salt has 257 characters, the limit is 256"),
]


@pytest.mark.feature("001-64")
@pytest.mark.parametrize(("bad", "message"), BAD, ids=[message for _, message in BAD])
def test_a_field_out_of_its_limits_is_named_with_its_value(bad: Request, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(bad, LIMITS)
    assert message in str(caught.value) and caught.value.code is ErrorCode.INVALID_ARGUMENT


BEAMS = RequestLimits(100, 20, LIMITS.caps, max_beam_width=4)


@pytest.mark.feature("000-33")
@pytest.mark.parametrize("width", [-1, 0, 5])
def test_beams_are_limited_in_number(width: int) -> None:
    with pytest.raises(InvalidRequest, match=f"beam_width is {width}, allowed is 1 to 4"):
        check_request(request(sampling={"beam_width": width}), BEAMS)


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"top_p": 0.9}, {"presence_penalty": 1.0}])
def test_what_cannot_be_had_with_beams_is_refused_as_unsupported(sampling: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match=f"{next(iter(sampling))} is .*beams are not sampled") as caught:
        check_request(request(sampling={"beam_width": 2, **sampling}), BEAMS)
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_beams_take_what_changes_nothing_of_the_distribution() -> None:
    neutral = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    check_request(
        request(sampling={"beam_width": 4, "num_return_sequences": 4, "length_penalty": 1.0, **neutral}), BEAMS
    )


@pytest.mark.parametrize(
    "session", [SessionConfig(-1), SessionConfig(1 << 64), SessionConfig(1, step=-1), SessionConfig(1, session_len=0)]
)
def test_a_session_out_of_its_limits_is_a_session_error(session: SessionConfig) -> None:
    with pytest.raises(SessionError, match="session error 1"):
        check_request(request(session=session), LIMITS)


def test_the_edges_of_every_limit_are_accepted() -> None:
    check_request(
        request(
            [0, 99],
            0,
            end_ids=(0, 99),
            stop_words=[[1] * 4] * 3,
            timeout_s=60.0,
            client_id=(1 << 64) - 1,
            cache_salt="x" * 256,
            session=SessionConfig((1 << 64) - 1, step=0, session_len=1),
            output_config=OutputConfig(top_log_probs=20),
            sampling={
                "temperature": 0.0,
                "top_k": 0,
                "top_p": 1.0,
                "min_p": 1.0,
                "seed": (1 << 64) - 1,
                "logit_bias": {99: -100.0},
                "num_return_sequences": 1,
            },
        ),
        LIMITS,
    )


@given(st.floats(), st.floats(), st.integers(), st.lists(st.integers()))
def test_no_value_of_any_field_raises_anything_but_an_invalid_request(
    p: float, penalty: float, number: int, ids: list[int]
) -> None:
    sampling = {
        "top_p": p,
        "min_p": p,
        "temperature": penalty,
        "repetition_penalty": penalty,
        "top_k": number,
        "seed": number,
        "logit_bias": {number: p},
    }
    try:
        check_request(request(ids, number, sampling, stop_words=[ids], end_ids=tuple(ids), timeout_s=p), LIMITS)
    except InvalidRequest as error:
        assert str(error)


def test_extra_ids_are_part_of_the_namespace_but_for_zeros_at_their_end() -> None:
    namespaces = [Request([1] * len(ids), 1, extra_ids=ids).namespace for ids in ([4, 0], [4, 0, 0], [4, 1], [0, 4])]
    assert namespaces[0] == namespaces[1] and len(set(namespaces)) == 3
    assert Request([1, 1], 1, extra_ids=[0, 0]).namespace == Request([1, 1], 1).namespace == ""


@pytest.mark.parametrize(("extra_ids", "session"), [([1], None), ([1, -1], None), ([1, 1 << 64], None), ([1, 2], 3)])
def test_extra_ids_are_one_number_for_each_token(extra_ids: list[int], session: int | None) -> None:
    request = Request([1, 2], 1, extra_ids=extra_ids, session=None if session is None else SessionConfig(session, True))
    with pytest.raises(InvalidRequest, match="extra_ids"):
        check_request(request, RequestLimits(100, 50))


def test_lists_that_every_step_walks_through_are_short() -> None:
    limits = RequestLimits(1000, 1000)
    check_request(Request([1], 1, end_ids=(5,) * 256), limits)
    with pytest.raises(InvalidRequest, match="the request has 257 end ids, the limit is 256; leave some out"):
        check_request(Request([1], 1, end_ids=(5,) * 257), limits)
    ranges = tuple(TokenRangeRetention(i, i + 1) for i in range(257))
    check_request(Request([1], 1, retention=RetentionConfig(ranges[:256])), limits)
    with pytest.raises(InvalidRequest, match="the request has 257 retention ranges, the limit is 256; join some"):
        check_request(Request([1], 1, retention=RetentionConfig(ranges)), limits)


@pytest.mark.parametrize(
    ("end_ids", "stop_words", "beam_width", "number"),
    [
        ([3] * 64, [], 2, None),
        ([3] * 65, [[1]] * 3, 2, None),  # an id that is given twice is one end
        (list(range(62)), [[1]] * 2, 2, None),
        (list(range(63)), [[1]] * 2, 2, 65),
        (list(range(65)), [], 2, 65),
        (list(range(65)), [], 1, None),
    ],
)
def test_with_beams_the_ends_of_a_request_are_bounded_together(
    end_ids: list[int], stop_words: list[list[int]], beam_width: int, number: int | None
) -> None:
    asked = request(sampling={"beam_width": beam_width}, end_ids=end_ids, stop_words=stop_words)
    limits = RequestLimits(100, 100, LimitsConfig(max_words=3), max_beam_width=4)
    if number is None:
        return check_request(asked, limits)
    with pytest.raises(InvalidRequest, match=f"has {number} end ids and stop words, the limit with beams is 64"):
        check_request(asked, limits)
