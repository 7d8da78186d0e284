from __future__ import annotations

import numpy as np
import pytest

from backend.api import EngineConfig, InvalidRequest, Request, SessionError, Unsupported
from backend.api.config.schema import TritonConfig
from backend.api.guide import Guide, GuideType
from backend.core.step import ModelInfo
from backend.serving.intake.batch import Batch
from backend.serving.intake.requests import Parameters, ServingContext, parse_parameters
from backend.serving.tensors import NUMPY_TYPES, Input
from backend.serving.wires.trtllm_tensors import TOKEN_MODEL
from backend.serving.wires.trtllm_tokens import parse_token_requests
from backend.serving.work import StopSession, Work
from tests.serving.fake_triton import Tensor
from tests.serving.helpers import bools, floats, ints, token_inputs, uint64

DEFAULTS = EngineConfig()
MODEL = ModelInfo("m", vocab_size=100, max_seq_len=16)


def works(
    inputs: dict[str, np.ndarray], decoupled: bool = True, max_rows: int = 64, config: EngineConfig = DEFAULTS
) -> list[Work]:
    batch = Batch.read(TOKEN_MODEL, [Tensor(name, array) for name, array in inputs.items()], max_rows)
    return parse_token_requests(batch, ServingContext(config, MODEL, decoupled), Parameters())


def parse(prompts: list[list[int]] | None = None, max_tokens: int = 4, **extra: np.ndarray) -> list[Request]:
    requests = [work.request for work in works(token_inputs(prompts or [[1, 2, 3]], max_tokens, **extra))]
    assert all(isinstance(request, Request) for request in requests)
    return requests


def without(name: str) -> dict[str, np.ndarray]:
    inputs = token_inputs([[1, 2, 3]])
    del inputs[name]
    return inputs


def test_defaults_are_greedy_without_an_end_id_and_without_a_session() -> None:
    request = parse()[0]
    assert request.input_token_ids == [1, 2, 3] and request.max_tokens == 4 and not request.streaming
    assert request.sampling_config.is_greedy and request.end_ids == () and request.session is None
    assert request.stop_words == [] and request.bad_words == [] and request.sampling_config.logit_bias is None


@pytest.mark.feature("001-04")
@pytest.mark.parametrize("name", ["input_ids", "request_output_len"])
def test_a_missing_mandatory_tensor_is_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"A value is required for {name}"):
        works(without(name))


def test_without_lengths_the_width_is_the_length() -> None:
    assert works(without("input_lengths"))[0].request.input_token_ids == [1, 2, 3]


def test_rows_of_a_batch_lose_their_padding_and_keep_their_own_values() -> None:
    rows = parse([[1, 2, 3], [4]], temperature=floats(0.5, 2.0), seed=uint64(7, 2**64 - 1))
    assert [row.input_token_ids for row in rows] == [[1, 2, 3], [4]]
    assert [row.sampling_config.temperature for row in rows] == [0.5, 2.0]
    assert [row.sampling_config.seed for row in rows] == [7, 2**64 - 1]


def test_a_new_name_wins_over_its_old_alias() -> None:
    both = parse(min_tokens=ints(3), min_length=ints(9), seed=uint64(1), random_seed=uint64(2))[0].sampling_config
    assert (both.min_tokens, both.seed) == (3, 1)
    old = parse(min_length=ints(9), random_seed=uint64(2), return_kv_cache_reuse_stats=bools(True))[0]
    assert (old.sampling_config.min_tokens, old.sampling_config.seed) == (
        9,
        2,
    ) and old.output_config.return_perf_metrics


def test_top_log_probs_are_asked_for_row_by_row() -> None:
    rows = parse([[1], [2]], top_log_probs=ints(3, 0))
    assert [row.output_config.top_log_probs for row in rows] == [3, 0]
    assert parse()[0].output_config.top_log_probs == 0


@pytest.mark.parametrize(("sent", "meant"), [(0.0, None), (-1.0, None), (0.5, 0.5)])
def test_a_top_p_that_is_not_positive_means_unset(sent: float, meant: float | None) -> None:
    assert parse(runtime_top_p=floats(sent))[0].sampling_config.top_p == meant


def test_ids_beyond_the_vocabulary_count_as_its_last_one_where_that_is_configured() -> None:
    """NVIDIA's load generators send random ids, whatever the model."""
    inputs = token_inputs([[1, 99, 100, 2**31 - 1]])
    clamping = EngineConfig(triton=TritonConfig(clamp_token_ids=True))
    (work,) = works(inputs, config=clamping)
    assert isinstance(work.request, Request) and work.request.input_token_ids == [1, 99, 99, 99]
    with pytest.raises(InvalidRequest, match="input_ids holds 100, allowed is 0 to 99"):
        works(inputs)
    with pytest.raises(InvalidRequest, match="input_ids holds -1"):
        works(token_inputs([[1, -1]]), config=clamping)


@pytest.mark.feature("W-01")
@pytest.mark.parametrize("filters", [{}, {"runtime_top_k": ints(0)}, {"runtime_top_p": floats(0.0)}])
def test_a_temperature_alone_decodes_greedily(filters: dict[str, np.ndarray]) -> None:
    assert parse(temperature=floats(1.0), **filters)[0].sampling_config.is_greedy
    assert not parse(temperature=floats(1.0), runtime_top_p=floats(1.0))[0].sampling_config.is_greedy


@pytest.mark.parametrize(("sent", "meant"), [(-1, ()), (7, (7,)), (0, (0,))])
def test_end_id_minus_one_means_none(sent: int, meant: tuple[int, ...]) -> None:
    assert parse(end_id=ints(sent))[0].end_ids == meant


@pytest.mark.feature("000-23")
def test_an_embedding_bias_of_the_wrong_length_is_refused_in_the_words_clients_look_for() -> None:
    with pytest.raises(InvalidRequest, match="embedding bias shape is not as expected"):
        parse(embedding_bias=np.zeros((1, 99), np.float32))


def test_an_embedding_bias_counts_by_its_entries_that_are_not_zero() -> None:
    bias = np.zeros((1, 100), np.float32)
    bias[0, [5, 70]] = [1.5, -100]
    assert parse(embedding_bias=bias)[0].sampling_config.logit_bias == {5: 1.5, 70: -100.0}
    assert parse(embedding_bias=np.zeros((1, 0), np.float32))[0].sampling_config.logit_bias is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": np.array([[1, 100, 3]], np.int32)}, "holds 100, allowed is 0 to 99"),
        ({"input_ids": np.array([[1, -1, 3]], np.int32)}, "holds -1"),
        ({"input_ids": np.array([1, 2, 3], np.int32)}, "Invalid format for input_ids"),
        ({"input_ids": np.zeros((1, 0), np.int32), "input_lengths": ints(0)}, "prompt is empty"),
        ({"input_lengths": ints(0)}, "prompt is empty"),
        ({"input_lengths": ints(-1)}, "input_lengths is -1, allowed is 0 to 3"),
        ({"input_lengths": ints(4)}, "input_lengths is 4, allowed is 0 to 3"),
        ({"input_ids": np.ones((1, 17), np.int32), "input_lengths": ints(17)}, "17 tokens, the limit is 15"),
        ({"input_ids": np.ones((1, 3), np.int64)}, "the type is int64, INT32 is expected"),
        ({"temperature": floats(float("nan"))}, "temperature holds a value that is not a finite number"),
        ({"temperature": floats(float("inf"))}, "temperature holds a value that is not a finite number"),
        ({"embedding_bias": np.full((1, 100), -np.inf, np.float32)}, "not a finite number"),
        ({"temperature": np.ones((1, 2), np.float32)}, "Invalid format for temperature"),
        ({"stop_words_list": np.zeros((1, 3, 4), np.int32)}, "Invalid format for stop_words_list"),
        ({"stop_words_list": np.array([[[1], [5]]], np.int32)}, "Invalid format for word list"),
        ({"seed": uint64(1, 2)}, "2 rows where other inputs have 1"),
        ({"unknown_input": ints(1)}, "Unexpected input 'unknown_input'"),
    ],
)
def test_bad_input_is_refused_naming_the_value_and_the_limit(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        works({**token_inputs([[1, 2, 3]]), **change})


def test_more_rows_than_the_limit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="3 rows, the limit is 2"):
        works(token_inputs([[1], [2], [3]]), max_rows=2)


def test_a_request_of_no_rows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no rows"):
        works({name: array[:0] for name, array in token_inputs([[1]]).items()})


def test_as_many_rows_as_the_limit_are_served() -> None:
    assert len(works(token_inputs([[1], [2]]), max_rows=2)) == 2


REFUSED = [spec for spec in TOKEN_MODEL.inputs if spec.target == "refused"]
# What clients of tensorrtllm_backend send without asking for anything, written down apart from the table.
NEUTRAL = {
    "draft_acceptance_threshold": [0.0],
    "encoder_output_lengths": [0],
    "mrope_position_deltas": [0],
    "skip_cross_attn_blocks": [False],
}


def filled(spec: Input, value: object) -> np.ndarray:
    shape = [1, *(1 if size == -1 else size for size in spec.dims)]
    return np.full(shape, value, NUMPY_TYPES[spec.dtype])


@pytest.mark.parametrize("spec", REFUSED, ids=lambda spec: spec.name)
def test_what_is_not_built_is_refused_when_used(spec: Input) -> None:
    value = b"json" if spec.dtype == "STRING" else True if spec.dtype == "BOOL" else 2
    with pytest.raises(Unsupported, match=f"{spec.name} asks for {spec.feature}, which this version does not have"):
        parse(**{spec.name: filled(spec, value)})


@pytest.mark.parametrize("spec", REFUSED, ids=lambda spec: spec.name)
def test_what_is_not_built_may_be_sent_empty_or_neutral(spec: Input) -> None:
    empty = np.zeros([1, *(0 if size == -1 else size for size in spec.dims)], NUMPY_TYPES[spec.dtype])
    neutral = [filled(spec, value) for value in NEUTRAL.get(spec.name, [])]
    for array in [*neutral, *([empty] if empty.size == 0 else [])]:
        assert parse(**{spec.name: array})[0] == parse()[0]


@pytest.mark.feature("000-20")
def test_sizes_of_lookahead_bound_the_guesses_of_a_step() -> None:
    """An n-gram of 5 begins with a token that is known, so 4 are guesses. All sizes 0 are none at all."""
    names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    sizes = {name: np.array([[size]], np.int32) for name, size in zip(names, (7, 5, 3))}
    assert parse(**sizes)[0].max_draft_tokens == 4
    assert parse(**{name: np.zeros((1, 1), np.int32) for name in names})[0] == parse()[0]
    with pytest.raises(InvalidRequest, match="some are missing; give all three, or none"):
        parse(lookahead_ngram_size=sizes["lookahead_ngram_size"])
    with pytest.raises(InvalidRequest, match="window size -1, n-gram size 5 .* the least are 1, 1 and 0"):
        parse(**sizes | {"lookahead_window_size": np.array([[-1]], np.int32)})


def test_only_the_known_neutral_values_ask_for_nothing() -> None:
    table = {
        spec.name: [value.encode() if isinstance(value, str) else value for value in spec.neutral] for spec in REFUSED
    }
    assert {name: values for name, values in table.items() if values} == NEUTRAL


def test_what_has_no_meaning_here_is_accepted_and_changes_nothing() -> None:
    ignored = [spec for spec in TOKEN_MODEL.inputs if spec.target == "ignored"]
    names = {"decoder_input_ids", "decoder_input_lengths", "pad_id", "prompt_vocab_size", "prompt_table_extra_ids"}
    assert names <= {spec.name for spec in ignored}
    for spec in ignored:
        assert parse(**{spec.name: filled(spec, 1)})[0] == parse()[0]


def test_a_model_that_is_not_decoupled_refuses_streaming_and_batches() -> None:
    with pytest.raises(InvalidRequest, match=r"^Streaming is only supported in decoupled mode\.$"):
        works(token_inputs([[1]], streaming=bools(True)), decoupled=False)
    with pytest.raises(InvalidRequest, match="Batch size > 1 requires"):
        works(token_inputs([[1], [2]]), decoupled=False)
    assert works(token_inputs([[1]], streaming=bools(False)), decoupled=False)


@pytest.mark.feature("004-29")
def test_session_inputs_make_a_turn_and_default_to_turbominds_values() -> None:
    alone = parse(CORRID=uint64(2**64 - 1))[0].session
    assert (alone.id, alone.start, alone.end, alone.step, alone.session_len) == (2**64 - 1, True, True, None, None)
    turn = parse(CORRID=uint64(5), START=ints(0), END=ints(0), step=ints(12), session_len=ints(64))[0].session
    assert (turn.id, turn.start, turn.end, turn.step, turn.session_len) == (5, False, False, 12, 64)
    assert parse(CORRID=uint64(5), session_len=ints(0))[0].session.session_len is None
    assert parse(CORRID=uint64(5), session_full_history=bools(True))[0].session.full_history


@pytest.mark.feature("004-29")
def test_stop_interrupts_a_session_and_end_beside_it_erases_it() -> None:
    stop = works(token_inputs([[1]], CORRID=uint64(5), STOP=ints(1)))[0].request
    assert stop == StopSession(5, end=False)
    stop = works(token_inputs([[1]], 0, CORRID=uint64(5), STOP=ints(1), END=ints(1), START=ints(0)))[0].request
    assert stop == StopSession(5, end=True)


@pytest.mark.feature("004-30")
@pytest.mark.parametrize("extra", [{"START": ints(1), "CORRID": uint64(5)}, {}])
def test_start_with_stop_and_stop_without_a_session_are_invalid(extra: dict[str, np.ndarray]) -> None:
    with pytest.raises(SessionError) as raised:
        works(token_inputs([[1]], STOP=ints(1), **extra))
    assert raised.value.status == 1


def test_session_inputs_without_a_session_are_refused() -> None:
    with pytest.raises(SessionError, match="step of a session needs its CORRID"):
        parse(step=ints(3))


def test_parameters_carry_a_timeout_in_microseconds_from_either_transport() -> None:
    assert parse_parameters(2_500_000, "{}").timeout_s == 2.5
    assert parse_parameters(0, '{"timeout": 100000}').timeout_s == 0.1
    assert parse_parameters(0, "").timeout_s is None
    assert parse_parameters(0, '{"cache_salt": "x"}').namespace == "x"
    for wrong in ('{"timeout": -1}', '{"timeout": "soon"}', '{"timeout": true}', '{"cache_salt": 3}'):
        with pytest.raises(InvalidRequest):
            parse_parameters(0, wrong)


def test_values_read_from_a_request_do_not_keep_its_memory() -> None:
    inputs = token_inputs([[1, 2, 3]], embedding_bias=np.ones((1, 100), np.float32))
    request = works(inputs)[0].request
    inputs["input_ids"][:] = 0
    inputs["embedding_bias"][:] = 0
    assert request.input_token_ids == [1, 2, 3] and request.sampling_config.logit_bias[3] == 1.0


@pytest.mark.parametrize(
    ("kind", "text", "guide"),
    [
        (b"", b"", None),
        (b"json", None, Guide(GuideType.JSON)),
        (b"json_schema", b"{}", Guide(GuideType.JSON_SCHEMA, "{}")),
        (b"regex", b"a+", Guide(GuideType.REGEX, "a+")),
        (b"ebnf_grammar", b'root ::= "a"', Guide(GuideType.EBNF_GRAMMAR, 'root ::= "a"')),
    ],
)
def test_a_guide_is_its_type_and_its_text(kind: bytes, text: bytes | None, guide: Guide | None) -> None:
    given = {"guided_decoding_guide_type": kind} | ({} if text is None else {"guided_decoding_guide": text})
    (request,) = parse(**{name: np.full([1, 1], value, object) for name, value in given.items()})
    assert request.guide == guide


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"guided_decoding_guide_type": b"xml"}, "guided_decoding_guide_type is 'xml', allowed are json, json_schema"),
        (
            {"guided_decoding_guide_type": b"choice"},
            r"structural_tag; a choice is a regex red\|green, or a json_schema with ",
        ),
        ({"guided_decoding_guide": b"a"}, "without guided_decoding_guide_type"),
    ],
)
def test_a_guide_of_an_unknown_type_is_refused(given: dict[str, bytes], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(**{name: np.full([1, 1], value, object) for name, value in given.items()})
