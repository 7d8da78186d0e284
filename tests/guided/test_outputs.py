"""Outputs of the default model under guides, judged by other parsers, in every tier, evicted, as beams, beside others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import jsonschema
import lark
import pytest

from backend.api import EngineConfig, OutputConfig, Request, Response, SamplingConfig
from backend.api.config.schema import GuidedConfig, KvCacheConfig, ModelConfigSection, SchedulerConfig
from backend.api.guide import Guide, GuideType
from backend.api.response import FinishReason, Result
from backend.core.step import NewRow, Row, SlotId
from backend.executor import Executor
from backend.guided.protocol import Matcher
from backend.worker.guided_rows import GuidedRows
from tests.executor.helpers import drain
from tests.guided.test_grammars import ARITHMETIC, ARITHMETIC_IN_LARK
from tests.guided.tools import MODEL, VOCAB, backend, tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
JSON_SCHEMA = Guide(GuideType.JSON_SCHEMA, json.dumps(SCHEMA))
CODE = Guide(GuideType.REGEX, "[A-Z]{2}-[0-9]{3}( again)?")
LONG = Guide(GuideType.REGEX, "([A-Z][a-z]{2,9} ){20,40}")
EXCLUDED = OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)


def config(
    kernels: str = "auto", max_tokens: int = 4096, slots: int = 8, policy: str = "guaranteed_no_evict"
) -> EngineConfig:
    return EngineConfig(
        ModelConfigSection(kernels=kernels, device="cpu", num_threads=1, path=str(MODEL)),
        KvCacheConfig(block_size=32, max_tokens=max_tokens, watermark=0.0),
        SchedulerConfig(max_batch_size=slots, max_num_tokens=128, policy=policy),
    )


@pytest.fixture(scope="module", params=["native", "torch"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with Executor.from_directory(MODEL, config(request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def native() -> Iterator[Executor]:
    with Executor.from_directory(MODEL, config()) as made:
        yield made


def request(guide: Guide | None, seed: int = 0, max_tokens: int = 120, **fields: object) -> Request:
    sampling = fields.pop("sampling_config", SamplingConfig(temperature=1.0, seed=seed))
    prompt = tokenizer().encode(f"Answer {seed}: ")
    return Request(
        prompt,
        max_tokens,
        sampling_config=sampling,
        output_config=EXCLUDED,
        guide=guide,
        **fields,  # type: ignore[arg-type]
    )


def wild(guide: Guide, seed: int, max_tokens: int) -> Request:
    """At a temperature at which all tokens that are allowed are about as likely."""
    return request(guide, seed, max_tokens, sampling_config=SamplingConfig(temperature=30.0, seed=seed))


def answers(executor: Executor, requests: list[Request]) -> list[Result]:
    """The last results, in the order of the requests."""
    ids = executor.enqueue_requests(requests)
    found = drain(executor, ids)
    return [_result(found[request_id]) for request_id in ids]


def _result(responses: list[Response]) -> Result:
    last = responses[-1]
    assert last.result_or_none is not None, last.error_or_none
    return last.result_or_none


def texts(results: list[Result]) -> list[str]:
    """Of the outputs that ended by themselves."""
    return [
        tokenizer().decode(ids)
        for result in results
        for ids, reason in zip(result.output_token_ids, result.finish_reasons)
        if reason is FinishReason.END_ID
    ]


@pytest.mark.feature("000-44")
def test_json_is_an_object(native: Executor) -> None:
    """Fifty runs at a temperature at which the model's own choice hardly counts."""
    finished = texts(answers(native, [wild(Guide(GuideType.JSON), seed, 200) for seed in range(50)]))
    assert len(finished) >= 10
    assert all(isinstance(json.loads(text), dict) for text in finished)


@pytest.mark.feature("000-45")
def test_outputs_satisfy_their_schema(executor: Executor) -> None:
    finished = texts(answers(executor, [request(JSON_SCHEMA, seed) for seed in range(24)]))
    assert len(finished) >= 20
    for text in finished:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.feature("000-46")
def test_outputs_match_their_regex(executor: Executor) -> None:
    finished = texts(answers(executor, [wild(CODE, seed, 40) for seed in range(24)]))
    assert len(finished) == 24
    assert all(re.fullmatch(CODE.text, text) for text in finished)
    assert {text.endswith("again") for text in finished} == {True, False}


@pytest.mark.feature("000-47")
def test_outputs_are_derived_by_their_grammar(executor: Executor) -> None:
    guide = Guide(GuideType.EBNF_GRAMMAR, ARITHMETIC)
    finished = texts(answers(executor, [wild(guide, seed, 80) for seed in range(40)]))
    assert len(finished) >= 3 and len(set(finished)) > 1
    parser = lark.Lark(ARITHMETIC_IN_LARK, parser="earley")
    for text in finished:
        parser.parse(text)


def test_the_tiers_give_the_same_greedy_outputs(executor: Executor, native: Executor) -> None:
    greedy = [request(guide, sampling_config=SamplingConfig()) for guide in (JSON_SCHEMA, CODE)]
    assert texts(answers(executor, greedy)) == texts(answers(native, greedy))


def test_rows_without_a_guide_are_untouched_by_those_beside_them(executor: Executor) -> None:
    free = [request(None, seed, 24) for seed in range(3)]
    alone = [result.output_token_ids for result in answers(executor, free)]
    mixed = answers(executor, [free[0], request(JSON_SCHEMA, 7), free[1], request(CODE, 8), free[2]])
    assert [mixed[i].output_token_ids for i in (0, 2, 4)] == alone


@pytest.mark.parametrize("guide", [JSON_SCHEMA, LONG], ids=lambda guide: guide.type.value)
def test_eviction_does_not_change_a_guided_output(guide: Guide) -> None:
    """160 cells of KV hold one or two of eight requests of up to 100 tokens, so that they are paused and their KV is lost."""
    requests = [
        request(guide, seed, 90, sampling_config=SamplingConfig(temperature=1.5, seed=seed)) for seed in range(8)
    ]
    with Executor.from_directory(MODEL, config()) as roomy:
        expected = [(each.output_token_ids, each.finish_reasons) for each in answers(roomy, requests)]
    with Executor.from_directory(MODEL, config(max_tokens=160, policy="max_utilization")) as tight:
        results = answers(tight, requests)
    found = [(each.output_token_ids, each.finish_reasons) for each in results]
    lost = sum(each.perf_metrics.num_recomputed_tokens for each in results if each.perf_metrics is not None)
    assert found == expected
    assert lost > 0, "nobody was evicted"


def test_all_beams_satisfy_the_schema_and_differ(executor: Executor) -> None:
    result = answers(executor, [request(JSON_SCHEMA, sampling_config=SamplingConfig(beam_width=4))])[0]
    finished = texts([result])
    assert len(set(finished)) == len(finished) == 4
    for text in finished:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert result.finish_reasons == (FinishReason.END_ID,) * 4


def test_several_sequences_have_a_matcher_each(executor: Executor) -> None:
    several = SamplingConfig(temperature=1.0, seed=3, num_return_sequences=3)
    ids = executor.enqueue_requests([request(CODE, sampling_config=several, max_tokens=40)])
    results = [each.result_or_none for each in drain(executor, ids)[ids[0]]]
    finished = texts([result for result in results if result is not None])
    assert len(finished) == 3 and len(set(finished)) > 1
    assert all(re.fullmatch(CODE.text, text) for text in finished)


def test_the_model_s_end_ids_serve_a_request_without(native: Executor) -> None:
    assert texts(answers(native, [request(CODE, end_ids=())])) != []


def test_log_probabilities_are_of_what_the_guide_leaves_and_finite(executor: Executor) -> None:
    """Where only one token may follow its log-probability is 0, and that of all others is told as -9999."""
    output = OutputConfig(exclude_input_from_output=True, return_log_probs=True, top_log_probs=2)
    asked = Request(
        tokenizer().encode("A"), 20, output_config=output, guide=Guide(GuideType.REGEX, "x-y"), end_ids=(0,)
    )
    ids = executor.enqueue_requests([asked])
    result = _result(drain(executor, ids)[ids[0]])
    assert result.log_probs is not None and result.top_log_probs is not None
    assert all(value > -20 for value in result.log_probs[0])
    told = [each.log_prob for position in result.top_log_probs for each in position]
    assert all(-9999.0 <= value <= 0.0 for value in told), "nothing infinite"
    assert -9999.0 in told and 0.0 in told, "somewhere only one token may follow"


def error_of(executor: Executor, asked: Request) -> str:
    ids = executor.enqueue_requests([asked])
    return drain(executor, ids)[ids[0]][-1].error_or_none or ""


@pytest.mark.parametrize(
    ("guide", "fields", "sentence"),
    [
        (Guide(GuideType.JSON_SCHEMA, '{"not": {}}'), {}, "not"),
        (Guide(GuideType.REGEX, "(?=a)"), {}, "look-around|cannot be compiled"),
        (Guide(GuideType.REGEX, "("), {}, "cannot be compiled"),
        (Guide(GuideType.EBNF_GRAMMAR, "start: foo"), {}, "cannot be compiled"),
        (Guide(GuideType.JSON_SCHEMA, "x" * 70_000), {}, "70000 bytes, the limit is 65536"),
        (CODE, {"sampling_config": SamplingConfig(min_tokens=3)}, "min_tokens is 3"),
    ],
)  # fmt: skip
def test_a_bad_guide_ends_its_own_request(
    native: Executor, guide: Guide, fields: dict[str, object], sentence: str
) -> None:
    assert re.search(sentence, error_of(native, request(guide, **fields)))
    assert texts(answers(native, [request(CODE)])) != []


def test_a_least_of_one_token_leaves_out_the_empty_output(executor: Executor) -> None:
    """`x?` is the empty output or x; where both are about as likely, only min_tokens can say which."""
    guide = Guide(GuideType.REGEX, "x?")
    free, least = (
        [
            request(guide, sampling_config=SamplingConfig(temperature=30.0, seed=seed, min_tokens=count))
            for seed in range(16)
        ]
        for count in (None, 1)
    )
    assert set(texts(answers(executor, free))) == {"", "x"}
    assert texts(answers(executor, least)) == ["x"] * 16


@pytest.mark.parametrize(
    ("guide", "banned", "beams"), [("x-y", ("-", "x-"), 1), ("x", ("x",), 2)], ids=["masks", "beams"]
)
def test_a_guide_and_bans_that_leave_no_token_end_the_request(
    guide: str, banned: tuple[str, ...], beams: int, executor: Executor
) -> None:
    """All that may follow is a bad word, in whatever token: the request ends, and its neighbour goes on.

    Bans of beams are kept by the engine, not by the workers' masks: both together must not leave it without a candidate.
    """
    shown = [(i, tokenizer().visible_token(i, True) or "") for i in range(4096)]
    words = [[i] for i, text in shown if (text == guide if beams > 1 else text.startswith(banned))]
    sampling = SamplingConfig(beam_width=beams)
    stuck = request(Guide(GuideType.REGEX, guide), bad_words=words[:500], sampling_config=sampling)
    ids = executor.enqueue_requests([stuck, request(CODE, 3)])
    found = drain(executor, ids)
    error = found[ids[0]][-1]
    assert error.error_msg.startswith("bad_words ") and "leave no token together" in error.error_msg
    assert error.error_code == "INVALID_ARGUMENT"
    assert re.fullmatch(CODE.text, texts([_result(found[ids[1]])])[0])


def test_an_engine_without_guided_decoding_says_so() -> None:
    off = EngineConfig(config().model, config().kv_cache, config().scheduler, guided=GuidedConfig(backend="none"))
    with Executor.from_directory(MODEL, off) as made:
        assert error_of(made, request(CODE)).startswith("GuidedDecoder is not setup")


def test_who_takes_a_slot_without_a_guide_has_none() -> None:
    """The sequence that had the slot before has left its matcher there."""

    class Source:
        def matcher(self, guide: Guide) -> Matcher:
            return backend().compile(guide).matcher()

    rows = GuidedRows(Source(), num_slots=1, vocab_size=VOCAB)
    slot, step = SlotId(0), [Row(SlotId(0), 0, 1, True)]
    taken = NewRow(slot, [1], 1, 0, [], SamplingConfig(), guide=Guide(GuideType.REGEX, "a"))
    rows.set_row(taken)
    assert rows.of_step(step)
    rows.set_row(NewRow(slot, [1], 1, 0, [], SamplingConfig()))
    assert not rows.of_step(step)
