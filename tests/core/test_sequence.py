"""The Sequence: its transitions are those of a table that is written out here, its progress is numbers."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.api import Request, SamplingConfig, SessionConfig
from backend.api.request import RequestId
from backend.core.sequence import BeamSequence, Event, IllegalTransition, Sequence, SessionKey, Status
from backend.core.step import SampledToken, SequenceId, SlotId

# The contract's life of a sequence, written out: (status, event) -> the status that follows. There are no other edges.
LEGAL = {
    ("waiting", "admit"): "running",
    ("waiting", "rest"): "idle",
    ("waiting", "retire"): "retired",
    ("running", "pause"): "paused",
    ("running", "rest"): "idle",
    ("running", "retire"): "retired",
    ("paused", "admit"): "running",
    ("paused", "rest"): "idle",
    ("paused", "retire"): "retired",
    ("idle", "return"): "waiting",
    ("idle", "retire"): "retired",
}


def make_sequence(prompt: list[int] | None = None, max_tokens: int = 5, seed: int | None = None) -> Sequence:
    request = Request(
        prompt or [1, 2, 3], max_tokens, sampling_config=SamplingConfig(seed=seed), session=SessionConfig(1)
    )
    return Sequence(1, 10, request, 1, 0)


def state_of(seq: Sequence) -> dict[str, object]:
    state = {name: getattr(seq, name) for name in Sequence.__slots__}
    return {name: list(value) if isinstance(value, list) else value for name, value in state.items()}


@pytest.mark.feature("003-02")
def test_a_new_sequence_holds_its_ids_its_prompt_and_no_output() -> None:
    seq = make_sequence([1, 2, 3], max_tokens=5)
    assert (seq.seq_id, seq.request_id, seq.session_key, seq.status) == (1, 10, SessionKey("", 1), Status.WAITING)
    assert (seq.token_ids, seq.num_prompt_tokens, seq.num_output_tokens) == ([1, 2, 3], 3, 0)
    assert (seq.slot, seq.num_computed_tokens, seq.log_probs, seq.cum_log_prob) == (None, 0, [], 0.0)
    assert seq.max_output_tokens == 5
    seq.token_ids.append(9)
    assert seq.request.input_token_ids == [1, 2, 3], "the request that it came from is not written to"


@pytest.mark.feature("003-05", "002-43")
@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("event", Event)
def test_an_event_moves_a_sequence_along_the_legal_edges_alone(status: Status, event: Event) -> None:
    seq = make_sequence()
    seq.status = status
    before = state_of(seq)
    if (target := LEGAL.get((status.value, event.value))) is not None:
        seq.apply(event)
        assert state_of(seq) == {**before, "status": Status(target)}
    else:
        with pytest.raises(IllegalTransition, match=event.value):
            seq.apply(event)
        assert state_of(seq) == before, "it changes nothing"


@pytest.mark.feature("003-05", "002-43")
@given(st.lists(st.sampled_from(Event)))
def test_whatever_happens_a_sequence_goes_a_legal_way(events: list[Event]) -> None:
    seq, way = make_sequence(), list[tuple[str, str, str]]()
    for event in events:
        before = seq.status.value
        with suppress(IllegalTransition):
            seq.apply(event)
            way.append((before, event.value, seq.status.value))
    assert all(LEGAL.get((before, event)) == after for before, event, after in way)
    assert [after for *_, after in way].count("retired") <= 1


def test_the_phase_follows_from_the_counters() -> None:
    seq = make_sequence([1, 2, 3])
    assert not seq.is_generating and seq.num_uncomputed_tokens == 3
    seq.num_computed_tokens = 3
    assert not seq.is_generating, "no output yet"
    seq.token_ids.append(9)
    assert seq.is_generating and seq.num_uncomputed_tokens == 1
    seq.num_computed_tokens = 1  # evicted in part
    assert not seq.is_generating and seq.num_uncomputed_tokens == 3
    seq.num_inflight_tokens = 2
    assert seq.is_generating and seq.num_uncomputed_tokens == 1


def test_a_turn_appends_its_prompt_and_resets_what_belongs_to_one_request() -> None:
    seq = make_sequence([1, 2, 3], seed=7)
    seq.token_ids += [8, 9]
    seq.log_probs, seq.num_pauses, seq.first_scheduled_ns = [0.5], 2, 99
    seq.end_turn()
    seq.begin_turn(11, Request([4], 6), [4], 2, 0)
    assert seq.token_ids == [1, 2, 3, 8, 9, 4]
    assert (seq.num_history_tokens, seq.num_prompt_tokens, seq.num_output_tokens, seq.max_output_tokens) == (5, 6, 0, 6)
    assert (seq.log_probs, seq.num_pauses, seq.first_scheduled_ns) == ([], 0, 0)
    assert (seq.seed, seq.num_sampled_before) == (7, 2), "the random stream goes on"


@pytest.mark.feature("004-32")
def test_a_turn_that_names_a_seed_starts_its_random_stream() -> None:
    seq = make_sequence(seed=7)
    seq.token_ids.append(9)
    seq.end_turn()
    seq.begin_turn(11, Request([4], 6, sampling_config=SamplingConfig(seed=3)), [4], 2, 0)
    assert (seq.seed, seq.num_sampled_before, seq.num_sampled_tokens) == (3, 0, 0)


@pytest.mark.feature("004-32")
@pytest.mark.parametrize("seed", [None, 3])
def test_an_undone_turn_leaves_no_trace(seed: int | None) -> None:
    seq = make_sequence([1, 2, 3], seed=7)
    seq.token_ids += [8, 9]
    seq.end_turn()
    before = (list(seq.token_ids), seq.seed, seq.num_sampled_before)
    seq.begin_turn(11, Request([4, 5], 6, sampling_config=SamplingConfig(seed=seed)), [4, 5], 2, 0)
    seq.token_ids.append(6)
    seq.undo_turn()
    seq.end_turn()
    assert (list(seq.token_ids), seq.seed, seq.num_sampled_before) == before


@given(st.integers(0, 12), st.integers(0, 12))
def test_truncation_takes_the_kv_counters_along(computed: int, num_tokens: int) -> None:
    seq = make_sequence(list(range(12)))
    seq.num_computed_tokens = seq.max_computed_tokens = computed
    seq.truncate(num_tokens)
    assert seq.token_ids == list(range(num_tokens))
    assert seq.num_computed_tokens == seq.max_computed_tokens == min(computed, num_tokens)


def test_a_row_of_beams_that_is_paused_forgets_its_candidates() -> None:
    """It will run its last token again, and be told them again: two answers for one place would be one too many."""
    beam = BeamSequence(SequenceId(1), RequestId(1), Request([1, 2], 3), 1, 0)
    beam.apply(Event.ADMIT)
    beam.candidates = SampledToken(SlotId(0), 5, None, [(5, -0.1)])
    beam.apply(Event.PAUSE)
    assert beam.candidates is None
