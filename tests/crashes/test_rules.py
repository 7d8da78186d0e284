"""The rules by which commands outlive an engine, one by one, without a process and without waiting."""

from __future__ import annotations

import math
import struct

import pytest
from msgspec.structs import replace

from backend.api import (
    EngineConfig,
    ErrorCode,
    InvalidRequest,
    OutputConfig,
    Request,
    Response,
    SamplingConfig,
    SessionConfig,
    Unsupported,
)
from backend.api.config.schema import KvCacheConfig, LimitsConfig, SchedulerConfig
from backend.api.guide import Guide, GuideType
from backend.api.lora import LoraConfig
from backend.api.response import FinishReason, Result
from backend.api.tensor import TensorData
from backend.core.messages import (
    CLIENT_SHIFT,
    Cancel,
    Delivered,
    Former,
    Hello,
    NameAdapter,
    Resume,
    StopSession,
    Submit,
)
from backend.core.step import ModelInfo
from backend.engine.core import EngineCore
from backend.engine.resume import check_resume
from backend.executor import replay
from tests.crashes.lives import Lives
from tests.engine.test_preparation_guides import FakeGuides
from tests.fakes.hash_worker import HashWorkerGroup, oracle

CONFIG = EngineConfig(
    kv_cache=KvCacheConfig(block_size=4, max_tokens=4096), scheduler=SchedulerConfig(max_batch_size=8)
)
MODEL = ModelInfo("hash", 1000, 1000)


def make() -> EngineCore:
    return EngineCore(CONFIG, HashWorkerGroup())


def stream(prompt: list[int], max_tokens: int = 20, **fields: object) -> Request:
    return Request(prompt, max_tokens, streaming=True, **fields)


def hello(number: int, trial: int | None = None, former: Former = Former()) -> Hello:  # noqa: B008 (immutable)
    return Hello(number, MODEL, "", CONFIG, engine=f"engine {number}", trial=trial, former=former)


class Kept:
    """A Replay with commands of client 1 at engine 1."""

    def __init__(self) -> None:
        self.replay, self.heard = replay.Replay(), []
        self.replay.greet(hello(1))
        self._count = 0

    def add(self, command: object, now_s: float = 0.0) -> int:
        self._count += 1
        request_id = 1 << CLIENT_SHIFT | self._count
        made = Submit(request_id, command) if isinstance(command, Request) else command(request_id)
        self.replay.add(request_id, self.heard.append, made, now_s)
        return request_id

    def hear(self, response: Response) -> None:
        told = self.replay.take(response, 7)
        if told is not None:
            told[0](told[1])

    def lose(self, number: int, now_s: float = 0.0, **about: object) -> list[object]:
        """The commands for the next engine."""
        self.replay.hold(now_s)
        self.refused = self.replay.greet(hello(number, **about))
        for request_id, _ in self.refused:
            self.replay.pop(request_id)
        return list(self.replay.again(now_s))


def part(request_id: int, tokens: list[int], **fields: object) -> Response:
    return Response(request_id, result_or_none=Result([tokens], **fields))


def test_commands_go_on_in_the_order_of_acceptance_with_the_ids_of_the_new_connection() -> None:
    kept = Kept()
    for command in (stream([1]), lambda i: StopSession(i, 7), lambda i: NameAdapter(i, "a", "b"), stream([2])):
        kept.add(command)
    again = kept.lose(5)
    assert [type(each) for each in again] == [Submit, StopSession, NameAdapter, Submit]
    assert [each.request_id for each in again] == [5 << CLIENT_SHIFT | number for number in (1, 2, 3, 4)]


def test_what_was_heard_is_what_is_resumed_and_the_caller_keeps_its_id() -> None:
    kept = Kept()
    request_id = kept.add(stream([1], output_config=OutputConfig(return_log_probs=True)))
    for tokens, total in (([4, 5], -1.5), ([6], -2.25)):
        kept.hear(part(request_id, tokens, cum_log_probs=[total]))
    (again,) = kept.lose(2)
    assert again.resume == Resume([Delivered([4, 5, 6], -2.25)], first_token_ns=7, is_again=True)
    kept.replay.let_go(1.0)
    kept.hear(part(again.request_id, [8]))
    assert {each.request_id for each in kept.heard} == {request_id}


def test_the_time_that_is_left_is_granted() -> None:
    kept = Kept()
    kept.add(stream([1], timeout_s=10.0), now_s=100.0)
    kept.add(stream([2]), now_s=100.0)
    kept.add(stream([3], timeout_s=2.0), now_s=100.0)
    left = [each.request.timeout_s for each in kept.lose(2, now_s=103.0)]
    assert left == [7.0, CONFIG.limits.default_timeout_s - 3.0, replay.LEAST_TIMEOUT_S]


def test_a_default_that_no_request_may_ask_for_stays_the_default() -> None:
    kept = Kept()
    limits = LimitsConfig(default_timeout_s=1e9)
    kept.replay.greet(replace(hello(1), config=replace(CONFIG, limits=limits)))
    kept.add(stream([1]))
    kept.replay.hold(5.0)
    (again,) = kept.replay.again(5.0)
    assert again.request.timeout_s is None


def test_cancels_come_behind_their_request_whenever_they_were_made() -> None:
    kept = Kept()
    request_id = kept.add(stream([1]))
    assert kept.replay.cancel(Cancel(request_id, 3)) == Cancel(request_id, 3)
    again = kept.lose(2)
    there = again[0].request_id
    assert again[1:] == [Cancel(there, 3)]
    assert kept.replay.cancel(Cancel(request_id)) is None, "until all has been sent"
    assert kept.replay.let_go(0.0) == [Cancel(there)]
    assert kept.replay.cancel(Cancel(request_id, sequence_index=1)) == Cancel(there, sequence_index=1)


def test_the_second_death_in_a_row_makes_a_suspect_and_one_in_its_own_trial_ends_it() -> None:
    kept = Kept()
    first, second = kept.add(stream([1])), kept.add(Request([2], 9))
    for tokens in ([4], [5], [6]):
        kept.hear(part(first, tokens))
    assert [each.resume.trial_tokens for each in kept.lose(2)] == [None, None]
    kept.replay.let_go(0.0)
    kept.hear(part(2 << CLIENT_SHIFT | 1, [7, 8]))
    again = kept.lose(3)
    assert [each.resume.trial_tokens for each in again] == [2 + replay.TRIAL_MARGIN, 0], "to its end without streaming"
    kept.replay.let_go(0.0)
    kept.replay.note_trial(9 << CLIENT_SHIFT | 1)  # another client's
    kept.lose(4)
    assert kept.refused == []
    kept.replay.let_go(0.0)
    kept.replay.note_trial(4 << CLIENT_SHIFT | 2)
    kept.lose(5)
    ((request_id, why),) = kept.refused
    assert request_id == second and "ended 3 times while this request ran, the last time alone" in why


def test_a_broken_connection_to_the_same_engine_is_no_death() -> None:
    kept = Kept()
    kept.add(stream([1]))
    for _ in range(4):
        (again,) = kept.lose(1)
        kept.replay.let_go(0.0)
        assert again.resume.trial_tokens is None


def test_who_learns_of_a_trial_by_the_hello_blames_nobody_else() -> None:
    kept = Kept()
    kept.add(stream([1]))
    kept.lose(2, trial=9 << CLIENT_SHIFT | 1)
    kept.replay.let_go(0.0)
    (again,) = kept.lose(3)
    assert again.resume.trial_tokens is None


def logits(*rows: float) -> TensorData:
    """One number for each token."""
    return TensorData("float32", (1, len(rows), 1), struct.pack(f"<{len(rows)}f", *rows))


def test_of_a_stream_that_is_run_again_only_what_is_new_is_told_wherever_its_responses_are_cut() -> None:
    kept = Kept()
    output = OutputConfig(return_generation_logits=True, return_context_logits=True, return_log_probs=True)
    kept.add(stream([1], output_config=output))
    context = TensorData("float32", (1, 1), bytes(4))

    def hear(request_id: int, *tokens: int, **fields: object) -> None:
        values = [float(token) for token in tokens]
        kept.hear(part(request_id, list(tokens), log_probs=[values], generation_logits=logits(*values), **fields))

    hear(1 << CLIENT_SHIFT | 1, 11, 12, 13, context_logits=context)
    (again,) = kept.lose(2)
    assert again.resume.delivered == []
    kept.replay.let_go(0.0)
    hear(again.request_id, 11, 12, context_logits=context)
    hear(again.request_id, 13, 14, context_logits=context)
    hear(again.request_id, 15, is_final=True, is_sequence_final=True)
    found = [
        (r.output_token_ids, r.log_probs, r.generation_logits, r.context_logits)
        for r in (each.result for each in kept.heard)
    ]
    assert found == [
        ([[11, 12, 13]], [[11.0, 12.0, 13.0]], logits(11, 12, 13), context),
        ([[14]], [[14.0]], logits(14), None),
        ([[15]], [[15.0]], logits(15), None),
    ]


def test_an_end_with_nothing_new_is_told() -> None:
    kept = Kept()
    kept.add(stream([1], output_config=OutputConfig(return_generation_logits=True)))
    kept.hear(part(1 << CLIENT_SHIFT | 1, [11, 12]))
    (again,) = kept.lose(2)
    kept.replay.let_go(0.0)
    kept.hear(part(again.request_id, [11, 12], is_final=True, is_sequence_final=True))
    assert [each.result.output_token_ids for each in kept.heard] == [[[11, 12]], [[]]] and kept.heard[-1].is_final


def test_a_stop_that_finds_its_session_gone_was_carried_out_before() -> None:
    refusal = "session error 1 (invalid): session 7 is not known; there is nothing to stop"
    kept = Kept()
    for _ in range(2):
        kept.add(lambda i: StopSession(i, 7, True))
    error = Response(1 << CLIENT_SHIFT | 1, error_or_none=refusal, error_code=ErrorCode.INVALID_ARGUMENT)
    kept.hear(error)
    assert kept.heard[0].error_msg == refusal, "in its first life"
    (again,) = kept.lose(2)
    kept.replay.let_go(0.0)
    kept.hear(Response(again.request_id, error_or_none=refusal, error_code=ErrorCode.INVALID_ARGUMENT))
    assert kept.heard[1].result.finish_reasons == (FinishReason.CANCELLED,)


def test_an_adapter_that_a_task_id_names_comes_with_its_request() -> None:
    kept = Kept()
    kept.hear(part(kept.add(stream([1], lora=LoraConfig(3, path="/adapters/a"))), [2], is_final=True))
    kept.add(stream([1], lora=LoraConfig(3)))
    kept.add(stream([1], lora=LoraConfig(3), cache_salt="another"))
    assert [each.request.lora for each in kept.lose(2)] == [LoraConfig(3, path="/adapters/a"), LoraConfig(3)]


def test_adapters_and_tensors_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_ADAPTER_BYTES", 100)
    monkeypatch.setattr(replay, "MAX_HELD_BYTES", 150)
    kept = Kept()
    weights = TensorData("float16", (1, 40), bytes(80))
    large = [kept.add(stream([1], lora=LoraConfig(number, weights, ((1, 0, 1),)))) for number in range(2)]
    kept.add(stream([1], lora=LoraConfig(0)))
    assert kept.replay.hold(0.0) == [large[1]]
    assert list(kept.replay._adapters) == [("", 1)]
    kept.replay.pop(large[0])
    assert kept.replay._num_held_bytes == 0


@pytest.mark.parametrize(
    ("resume", "fields", "why"),
    [
        (Resume([Delivered([1])]), dict(streaming=False), "cannot go on from its middle"),
        (Resume([Delivered([1])]), dict(sampling_config=SamplingConfig(beam_width=2)), "cannot go on from its middle"),
        (Resume([Delivered([1]), Delivered([1])]), {}, "has 2 entries, expected is one for each of the 1 sequences"),
        (Resume([Delivered([1], has_ended=True)]), {}, "the answer is complete"),
        (Resume([Delivered([1000])]), {}, "output token 1000 is outside the vocabulary"),
        (Resume([Delivered([-1])]), {}, "output token -1 is outside the vocabulary"),
        (Resume([Delivered([1] * 10)]), {}, "has 10 output tokens of a sequence, and the request allows 9"),
        (Resume([Delivered([1] * 31)]), dict(max_tokens=10**6), "has 31 output tokens .* allows 30"),
        (Resume([Delivered([1], math.inf)]), {}, "no finite number"),
        (Resume(turn="x" * 65), dict(session=SessionConfig(1)), "has 65 characters"),
        (Resume(turn="x"), {}, "name a turn of a session"),
        (Resume(trial_tokens=-1), {}, "trial_tokens is -1"),
    ],
)
def test_a_state_that_cannot_be_is_refused(resume: Resume, fields: dict[str, object], why: str) -> None:
    with pytest.raises((InvalidRequest, Unsupported), match=why):
        check_resume(
            resume, Request(**{"input_token_ids": [1, 2], "max_tokens": 9, "streaming": True} | fields), 1000, 32
        )


def test_a_sequence_that_has_had_all_its_tokens_does_not_go_on() -> None:
    lives = Lives(make)
    lives.core.enqueue(1, stream([1], 3), None, Resume([Delivered([5, 6, 7])]))
    (response,) = lives.core.take_responses()
    assert "3 output tokens of a sequence that goes on" in response.error_msg


def test_requests_that_an_engine_had_accepted_are_not_refused_by_the_next_one_for_its_full_queue() -> None:
    """All of them wait there at once, also those that were running."""
    config = replace(CONFIG, limits=LimitsConfig(max_queue_size=3))
    lives = Lives(lambda: EngineCore(config, HashWorkerGroup()))
    clients = []
    for number in range(1, 12):
        clients.append(lives.ask(stream([number, 2], 30)))
        lives.step()
    assert not any(each.responses and each.responses[-1].has_error() for each in clients), "8 run, 3 wait"
    lives.crash()
    lives.run(lambda: all(each.has_ended for each in clients))
    for number, client in enumerate(clients, start=1):
        tokens = [token for each in client.responses for token in each.result.output_token_ids[0]]
        assert tokens == oracle([number, 2], 30, 1000)


def test_a_turn_that_still_runs_for_a_lost_connection_is_run_again_for_the_new_one() -> None:
    lives = Lives(make)
    request = stream([1, 2], 30, session=SessionConfig(7, start=True))
    lost = lives.ask(request, Resume(turn="t"))
    lives.run(lambda: len(lost.responses) >= 4)
    again = lives.ask(
        Request([1, 2], 30, streaming=True, session=SessionConfig(7, start=True)), Resume(turn="t", is_again=True)
    )
    lives.run(lambda: again.has_ended)
    assert [token for each in again.responses for token in each.result.output_token_ids[0]] == oracle([1, 2], 30, 1000)
    second = lives.ask(stream([3], 5, session=SessionConfig(7)), Resume(turn="u"))
    lives.run(lambda: second.has_ended)
    repeated = lives.ask(stream([3], 5, session=SessionConfig(7)), Resume(turn="u", is_again=True))
    lives.run(lambda: repeated.has_ended)
    assert [each.result.output_token_ids for each in repeated.responses] == [
        each.result.output_token_ids for each in second.responses
    ], "its end was lost, and the session has it once"
    assert lives.core.sessions.get(("", 7)).num_tokens == 2 + 30 + 1 + 5


def test_a_turn_that_comes_twice_at_the_same_moment_is_no_conflict_and_another_turn_is() -> None:
    """Its connection broke as soon as it was sent, and the engine reads what came over both of them at once."""
    lives = Lives(make)
    request = stream([1, 2], 6, session=SessionConfig(7, start=True))
    lives.ask(request, Resume(turn="t"))
    again = lives.ask(
        Request([1, 2], 6, streaming=True, session=SessionConfig(7, start=True)), Resume(turn="t", is_again=True)
    )
    other = lives.ask(stream([5], 2, session=SessionConfig(7)), Resume(turn="u"))
    lives.run(lambda: again.has_ended and other.has_ended)
    assert [token for each in again.responses for token in each.result.output_token_ids[0]] == oracle([1, 2], 6, 1000)
    assert "two requests at the same moment" in other.responses[-1].error_msg


def test_a_cancel_of_a_turn_that_waits_for_its_guide_keeps_what_the_client_has_had() -> None:
    guides = FakeGuides()
    lives = Lives(lambda: EngineCore(CONFIG, HashWorkerGroup(guides=guides, eos_ids=(999,))))
    request = stream([1], 30, session=SessionConfig(7, start=True), guide=Guide(GuideType.REGEX, "a"))
    client = lives.ask(request, Resume([Delivered([4, 5, 6])], turn="t"))
    request_id = lives.index << CLIENT_SHIFT | 1
    lives.tell(Cancel(request_id, keep_output_tokens=2))
    lives.step()
    assert not client.has_ended and lives.core.preparation.goes_on(request_id)
    guides.tell(request_id)
    lives.run(lambda: client.has_ended)
    assert list(lives.core.sessions.get(("", 7)).token_ids) == [1, 4, 5]


def test_output_that_a_client_brings_back_takes_its_place_in_the_queue() -> None:
    config = replace(CONFIG, limits=LimitsConfig(max_queued_tokens=16))
    lives = Lives(lambda: EngineCore(config, HashWorkerGroup()))
    output = oracle([1, 2], 15, 1000)
    refused = lives.ask(stream([1, 2]), Resume([Delivered(output)]))
    fits = lives.ask(stream([1, 2]), Resume([Delivered(output[:14])]))
    lives.run(lambda: refused.has_ended and fits.has_ended)
    assert "the limit is 16 (limits.max_queued_tokens)" in refused.responses[-1].error_msg
    tokens = [token for each in fits.responses for token in each.result.output_token_ids[0]]
    assert output[:14] + tokens == oracle([1, 2], 20, 1000)
