"""A short run of `python -m tests.hostile` against a real server, and what its own judgement rests on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import answers, cycles, deaths, http_cases, report, served_numbers
from tests.hostile.campaign import Campaign, Settings
from tests.hostile.case import Case, GrpcCall, HttpExchange
from tests.hostile.grpc_cases import FATAL
from tests.hostile.http_cases import post
from tests.hostile.mix import KINDS, Mix
from tests.hostile.send import Reply, readable
from tests.hostile.served import FRONTS, GATEWAY, GENERATING
from tests.hostile.tally import Tally
from tests.hostile.target import Death, Target

CASES = 600
SWEPT = 200  # of the numbers that no field should hold


def test_hostile_requests_get_a_clear_answer_and_harm_nobody(tmp_path: Path) -> None:
    """Without the metadata triton_grpc_error, whose deaths are tritonserver's own (docs/reliability.md)."""
    target = Target(tmp_path)
    campaign = Campaign(target, Settings(chunk=CASES // 2))
    try:
        campaign.start()
        campaign.run(Mix(seed=7, grpc_error=0.0).case, range(CASES))
        swept = served_numbers.cases()
        campaign.run(swept.__getitem__, range(0, len(swept), len(swept) // SWEPT + 1))
    finally:
        target.stop()
    assert campaign.tally.num_cases > CASES + SWEPT // 2 and not campaign.tally.failures(), report.text(campaign.tally)


def test_a_run_is_decided_by_its_seed() -> None:
    first, second, other = Mix(3), Mix(3), Mix(4)
    assert [first.case(index) for index in range(300)] == [second.case(index) for index in range(300)]
    assert [first.case(index) for index in range(300)] != [other.case(index) for index in range(300)]


def test_a_run_has_every_class_of_request_each_named_one_and_every_front() -> None:
    mix = Mix(5)
    found = [mix.case(index) for index in range(1500)]
    assert {case.kind for case in found} >= {*KINDS, *(f"named-{number:02}" for number in (2, 4, 5, 10, 11, 12))}
    assert {case.model for case in found} == {*FRONTS, GATEWAY}


def test_streams_to_cancel_go_to_every_front_that_generates() -> None:
    assert {cycles.cancel_case(1, index).model for index in range(300)} == set(GENERATING)


def test_what_is_for_no_front_of_a_run_is_said() -> None:
    with pytest.raises(ValueError, match="gateway-left is for turbomind; choose others"):
        Mix(1, models=("turbomind",), kinds=("gateway-left",)).case(0)


def test_a_huge_shape_over_http_is_sent_only_when_asked_for() -> None:
    def sent(known_fatal: bool) -> bool:
        mix = Mix(1, known_fatal=known_fatal)
        return any(mix.case(index).kind == http_cases.FATAL for index in range(600))

    assert sent(True) and not sent(False)


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        ([{"cases": 0, "stub a": 50}, {"cases": 9, "stub a": 111}], ["stub a has grown by 61 since 0 cases"]),
        ([{"cases": 0, "stub a": 50}, {"cases": 9, "stub a": 109}], []),
        (
            [{"cases": 0, "descriptors of engine": 9}, {"cases": 5, "descriptors of engine": 90}],
            ["descriptors of engine"],
        ),
        ([{"cases": 0, "tritonserver": 50}, {"cases": 9, "tritonserver": 900}], []),
    ],
)
def test_a_process_of_ours_that_grows_fails_the_run(samples: list[dict[str, float]], named: list[str]) -> None:
    tally = Tally()
    for sample in samples:
        tally.watch_growth(sample)
    assert len(tally.canary_failures) == len(named) == len(tally.failures())
    assert all(found.startswith(name) for found, name in zip(tally.canary_failures, named))


def test_what_is_known_to_be_fatal_is_sent_without_the_metadata_unless_asked_for() -> None:
    def fatal(mix: Mix) -> list[Case]:
        found = (mix.case(index) for index in range(2000))
        return [c for c in found if isinstance(c.call, GrpcCall) and c.call.grpc_error and c.known_fatal]

    assert not fatal(Mix(1, grpc_error=1.0))
    assert fatal(Mix(1, grpc_error=1.0, known_fatal=True))


CASE = post("http-text", "anything", "ensemble", b'{"text_input": "import app.py"}')
LEAKS = {
    "a path": "cannot open /usr/lib/python3/x",
    "a Python file": "failed in server.py",
    "a traceback": "message: oops\n\nAt:\n  something",
    "a line number": "bad value, line 12",
    "an address": "object at 0x7f00deadbeef",
    "a shared memory region": "the key 'triton_python_backend_shm_region_ab12'",
    "a library's words": "unsupported operand for NoneType",
    "an exception's text": "UnicodeDecodeError: 'utf-8' codec",
}


@pytest.mark.parametrize("what", LEAKS)
def test_a_reply_that_tells_of_the_inside_is_a_leak(what: str) -> None:
    assert any(leak.startswith(what) for leak in answers.leaks(CASE, Reply("answered", "http", 400, LEAKS[what])))


def test_what_the_client_sent_itself_is_no_leak() -> None:
    assert answers.leaks(CASE, Reply("answered", "http", 400, "unknown input app.py; leave it out")) == []


def test_tritons_page_on_a_configuration_may_name_the_models_file() -> None:
    page = '{"name":"ensemble","backend":"python","default_model_filename":"model.py","parameters":{}}'
    assert answers.leaks(CASE, Reply("answered", "http", 200, page)) == []
    assert answers.leaks(CASE, Reply("answered", "http", 200, page + " model.py failed")) != []


def test_generated_text_is_no_leak_also_where_a_client_leaves_in_the_midst_of_an_event() -> None:
    """The default model writes Python, and so names of files."""
    whole = b'data: {"type":"content_block_delta","delta":{"text":"see app.py"}}\n\n'
    assert "app.py" not in "".join(readable(whole + whole[:60]))
    assert readable(b'data: {"error":"app.py failed"}\n')[0] == "app.py failed"
    assert "app.py" in readable(b"app.py failed")[1]


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (Reply("answered", "http", 400, "[INVALID_ARGUMENT] top_p is 2"), answers.INVALID),
        (Reply("answered", "http", 400, "[INTERNAL] the request could not be taken in"), answers.INTERNAL),
        (Reply("answered", "http", 500, "something new"), answers.INTERNAL),
        (Reply("answered", "http", 500, "failed to parse the request JSON buffer: x"), answers.INVALID),
        (Reply("answered", "http", 200), answers.OK),
        (Reply("answered", "grpc", 13, "something new"), answers.INTERNAL),
        (Reply("answered", "grpc", 0, "something new"), answers.UNEXPLAINED),
        (Reply("answered", "http", 500, "Error generating stream: it failed; see the server's log"), answers.INTERNAL),
        (Reply("answered", "http", 500, "Error generating stream: n is 2"), answers.INVALID),
        (Reply("answered", "http", 200, "invalid_request_error: n is 2"), answers.INVALID),
        (Reply("answered", "http", 503, "server_error: the model is not loaded; try again"), answers.UNAVAILABLE),
        (Reply("answered", "http", 500, "server_error: the gateway failed; its log says where"), answers.INTERNAL),
        (Reply("cut", "http"), answers.NO_END),
        (Reply("none", "grpc"), answers.NO_END),
    ],
)
def test_replies_are_classed_by_what_they_say(reply: Reply, found: str) -> None:
    assert answers.classify(CASE, reply) == found


@pytest.mark.parametrize(
    ("ends", "found"), [(2, answers.OK), (1, answers.NO_END), (3, answers.TWICE), (None, answers.OK)]
)
def test_each_request_of_a_stream_ends_once(ends: int | None, found: str) -> None:
    assert answers.classify(_grpc_case(b"a", b"b"), Reply("answered", "grpc", ends=ends)) == found


def test_an_error_that_repeats_what_was_sent_at_length_is_a_leak() -> None:
    reply = Reply("answered", "http", 400, "[INVALID_ARGUMENT] it is " + "x" * answers.MAX_ERROR)
    assert any(leak.startswith("a text of") for leak in answers.leaks(CASE, reply))


def _grpc_case(*messages: bytes, string_length: bool = False) -> Case:
    return Case(
        "k", "n", "ensemble", GrpcCall("ModelStreamInfer", messages, grpc_error=True), string_length=string_length
    )


ANSWERING = (
    "Signal (11) received.\n"
    " 2# 0x000056327197B7BD in /x/tritonserver\n"
    " 3# 0x00007F0000048390 in /x/libtritonserver-1.so\n"
)
LONG = " 9# 0x000055E0AA3E088B in /x/tritonserver\n10# 0x00007F9B46ED44A3 in /x/libstdc++.so.6\n"
ALONE = " 3# 0x000055E0AA3E088B in /x/tritonserver\n 4# 0x00007F9B46ED44A3 in /x/libstdc++.so.6\n"


@pytest.mark.parametrize(
    ("status", "log", "alone"),
    [(-11, ALONE, True), (-6, ALONE, True), (-11, ANSWERING, False), (-11, "", False), (-9, ALONE, False)],
)
def test_a_death_of_the_front_alone_is_told_by_its_signal_and_frames(status: int, log: str, alone: bool) -> None:
    assert deaths.is_of_the_front_alone(status, log) == alone


@pytest.mark.parametrize(
    ("who", "status", "log", "suspects", "bug"),
    [
        ("tritonserver", -11, "", [_grpc_case(b"a", string_length=True)], deaths.STRING_LENGTH),
        ("tritonserver", -11, ANSWERING, [_grpc_case(b"a", b"b")], deaths.SHARED_STREAM),
        ("tritonserver", -11, "", [_grpc_case(b"a")], deaths.REFUSAL),
        ("tritonserver", -11, ANSWERING, [_grpc_case(b"a")], None),
        ("tritonserver", -11, "", [_grpc_case(b"a").with_grpc_error(False)], None),
        ("tritonserver", -11, ALONE, [_grpc_case(b"a").with_grpc_error(False)], deaths.FRONT),
        ("tritonserver", -6, LONG, [], deaths.FRONT),
        ("tritonserver", -8, "", [_grpc_case(b"a")], None),
        (
            "tritonserver",
            -8,
            "",
            [Case(FATAL, "n", "ensemble", GrpcCall("ModelStreamInfer", (b"a",)))],
            deaths.CLASSIFICATION,
        ),
        (
            "tritonserver",
            -6,
            "",
            [Case(http_cases.FATAL, "n", "postprocessing", HttpExchange((b"a",)))],
            deaths.SHAPE,
        ),
        ("tritonserver", -9, "", [_grpc_case(b"a")], None),
        ("tritonserver", -11, "", [post("k", "n", "ensemble", b"[" * deaths.DEEP)], deaths.STACK),
        ("engine", None, "", [_grpc_case(b"a", string_length=True)], None),
    ],
)
def test_only_documented_bugs_explain_a_death(
    who: str, status: int | None, log: str, suspects: list[Case], bug: deaths.Bug | None
) -> None:
    assert deaths.explanation(Death(who, status, log, Path("log")), suspects) == bug
