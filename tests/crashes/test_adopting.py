"""A held command goes from one Executor to another, with all that is known and counted of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from backend.api import OutputConfig, TensorData
from backend.api.config.schema import LimitsConfig
from backend.api.lora import LoraConfig
from backend.api.request import RequestId
from backend.api.response import Response
from backend.core.messages import CLIENT_SHIFT, Cancel, Delivered, Resume, Submit
from backend.executor import replay
from backend.executor.live import Live
from tests.crashes.test_rules import CONFIG, Kept, hello, logits, part, stream

NUM_BYTES = 80
WEIGHTS = TensorData("float16", (1, 40), bytes(NUM_BYTES))


def handed_over(kept: Kept, other: Kept, *commands: object, now_s: float = 0.0) -> list[object]:
    """Give all held commands of one to the other. Returns what its engine is told."""
    told: list[object] = []
    kept.replay.hold(now_s)
    for number, request_id in enumerate(kept.replay.ids()):
        live = kept.replay.release(request_id)
        assert isinstance(live, Live)
        told += other.replay.adopt(live, RequestId(1 << CLIENT_SHIFT | 100 + number), other.heard.append, now_s)
    return told


def test_only_what_is_held_is_released() -> None:
    kept = Kept()
    request_id = kept.add(stream([1]))
    assert kept.replay.release(request_id) is None and request_id in kept.replay
    kept.replay.hold(0.0)
    assert kept.replay.release(request_id) is not None
    assert kept.replay.release(request_id) is None and kept.replay.num_held == 0


def test_it_goes_on_under_its_new_id_and_is_counted_there() -> None:
    kept, other = Kept(), Kept()
    kept.add(stream([1], timeout_s=10.0))
    kept.hear(part(1 << CLIENT_SHIFT | 1, [4, 5]))
    (command,) = handed_over(kept, other, now_s=3.0)
    assert isinstance(command, Submit) and command.request_id == 1 << CLIENT_SHIFT | 100
    assert command.request.timeout_s == 7.0
    assert command.resume == Resume([Delivered([4, 5])], first_token_ns=7, is_again=True)
    assert (kept.replay.counts.resumed_requests, other.replay.counts.resumed_requests) == (0, 1)
    other.hear(part(command.request_id, [6]))
    assert [each.request_id for each in other.heard] == [command.request_id] and len(kept.heard) == 1
    cancel = Cancel(command.request_id)
    assert other.replay.cancel(cancel) == cancel, "it is not held any more"


def test_the_second_engine_of_the_adopter_goes_on_with_it_as_well() -> None:
    kept, other = Kept(), Kept()
    kept.add(stream([1]))
    kept.hear(part(1 << CLIENT_SHIFT | 1, [4]))
    (command,) = handed_over(kept, other)
    other.hear(part(command.request_id, [5]))
    (again,) = other.lose(2)
    assert again.resume.delivered == [Delivered([4, 5])] and other.replay.counts.resumed_requests == 2


def test_a_request_that_had_not_run_and_moves_is_not_blamed_twice() -> None:
    """It comes new to an engine that is away, and moves: the end of the adopter's engine is its first."""
    kept, other = Kept(), Kept()
    request_id = RequestId(1 << CLIENT_SHIFT | 9)
    kept.replay.add(request_id, kept.heard.append, Submit(request_id, stream([1])), 0.0, is_held=True)
    (command,) = handed_over(kept, other)
    assert command.resume is not None and not command.resume.is_again, "no engine has accepted it"
    for number, trial in ((2, None), (3, replay.TRIAL_MARGIN)):
        (again,) = other.lose(number)
        other.replay.let_go(0.0)
        assert again.resume.trial_tokens == trial and again.resume.is_again


def test_an_engine_that_ended_before_a_request_came_is_not_its_fault() -> None:
    kept = Kept()
    kept.replay.hold(0.0)
    request_id = RequestId(1 << CLIENT_SHIFT | 9)
    kept.replay.add(request_id, kept.heard.append, Submit(request_id, stream([1])), 0.0, is_held=True)
    trials = []
    for number in (2, 3, 4):
        (again,) = kept.lose(number)
        kept.replay.let_go(0.0)
        trials.append(again.resume.trial_tokens)
    assert trials == [None, None, replay.TRIAL_MARGIN] and kept.replay.counts.resumed_requests == 2


def test_cancels_go_with_it_once() -> None:
    kept, other = Kept(), Kept()
    request_id = kept.add(stream([1]))
    kept.replay.cancel(Cancel(request_id, 3))
    kept.replay.hold(0.0)
    kept.replay.cancel(Cancel(request_id, 2))
    submit, *cancels = handed_over(kept, other)
    assert cancels == [Cancel(submit.request_id, 3), Cancel(submit.request_id, 2)]
    assert other.replay.let_go(0.0) == [], "nothing came meanwhile"


def test_its_tensors_count_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_HELD_BYTES", NUM_BYTES)

    def large(number: int) -> object:
        return stream([1], lora=LoraConfig(number, WEIGHTS, ((1, 0, 1),)))

    kept, other = Kept(), Kept()
    kept.add(large(1))
    (command,) = handed_over(kept, other)
    kept.add(large(2))
    assert kept.replay.hold(0.0) == [], "there is room again"
    second = other.add(large(3))
    assert other.replay.hold(0.0) == [second], "there is none here"
    for request_id in (command.request_id, second):
        other.replay.pop(request_id)
    other.add(large(4))
    assert other.replay.hold(0.0) == []


def test_an_adapter_that_is_replaced_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_ADAPTER_BYTES", 2 * NUM_BYTES)
    kept = Kept()
    for number in (1, 2, 1, 1, 2):
        kept.add(stream([1], lora=LoraConfig(number, WEIGHTS, ((1, 0, 1),))))
    kept.add(stream([1], lora=LoraConfig(1)))
    kept.add(stream([1], lora=LoraConfig(2)))
    lora = [each.request.lora for each in kept.lose(2)[-2:]]
    assert [each.weights for each in lora] == [WEIGHTS, WEIGHTS]


def test_pauses_are_counted_each_with_its_own_length() -> None:
    kept = Kept()
    kept.add(stream([1]))
    for number, (begin_s, end_s) in enumerate(((10.0, 12.0), (20.0, 23.0)), start=2):
        kept.replay.hold(begin_s)
        kept.replay.hold(begin_s + 1.0)  # the connection broke once more before an engine was there
        kept.replay.greet(hello(number))
        assert kept.replay.held_s(end_s) == end_s - begin_s and kept.replay.num_held == 1
        list(kept.replay.again(end_s))
        kept.replay.let_go(end_s)
        assert kept.replay.held_s(end_s) == kept.replay.num_held == 0
    counts = kept.replay.counts
    assert (counts.pauses, counts.paused_s, counts.resumed_requests) == (2, 5.0, 2)


def test_a_stream_that_began_anew_twice_is_cut_at_what_its_client_has_had() -> None:
    """It cannot go on from its middle, and the second engine died before it came to anything new."""
    kept = Kept()
    kept.add(stream([1], output_config=OutputConfig(return_generation_logits=True)))

    def hear(request_id: int, *tokens: int) -> None:
        kept.hear(part(request_id, list(tokens), generation_logits=logits(*map(float, tokens))))

    hear(1 << CLIENT_SHIFT | 1, 11, 12, 13)
    for number, tokens in ((2, (11, 12)), (3, (11, 12, 13, 14))):
        (again,) = kept.lose(number)
        kept.replay.let_go(0.0)
        hear(again.request_id, *tokens)
    told = [(each.result.output_token_ids, each.result.generation_logits) for each in kept.heard]
    assert told == [([[11, 12, 13]], logits(11, 12, 13)), ([[14]], logits(14))]


def test_the_limits_of_the_present_engine_hold() -> None:
    kept = Kept()
    kept.add(stream([1]))
    limits = LimitsConfig(default_timeout_s=50.0)
    kept.replay.hold(0.0)
    kept.replay.greet(replace(hello(2), config=replace(CONFIG, limits=limits)))
    (again,) = kept.replay.again(4.0)
    assert again.request.timeout_s == 46.0


def test_an_answer_to_a_command_that_moved_away_reaches_nobody() -> None:
    kept, other = Kept(), Kept()
    request_id = kept.add(stream([1]))
    handed_over(kept, other)
    kept.hear(Response(request_id, error_or_none="late"))
    assert kept.heard == other.heard == []
