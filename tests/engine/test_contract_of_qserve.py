"""Rows of the contract about QServe's sequences and queues as this engine has them: groups, statuses, inputs besides tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from backend.api import FinishReason, OutputConfig, Request, SamplingConfig
from backend.api.config.schema import RecordsConfig
from backend.api.request import RequestId
from backend.api.stats import BlocksStored
from backend.core.messages import Submit
from backend.core.sequence import Event, Sequence, Status
from backend.serving.wires.vllm import finish_name
from backend.wire.framing import decode_command, encode_frame
from tests.core.test_sequence import LEGAL
from tests.engine.driver import Driver
from tests.engine.test_beams import ask, check, oracle

QSERVE_FIELDS = {"run_vlm": b"\x01", "img_per_seq": b"\x02\x00", "pil_image": b"\x89PNG a cat"}


def under_pressure() -> tuple[Driver, list[tuple[int, list[int]]]]:
    """Four beam searches of three rows each, where the pool holds about one and a half of them."""
    driver = Driver(pool_tokens=72, policy="max_utilization", slots=9)
    prompts = [[1, 2, 3, 9, 9], [4, 5, 6, 7, 8], [9, 8, 7, 6, 5], [2, 2]]
    return driver, [(ask(driver, 3, 14, prompt), prompt) for prompt in prompts]


@pytest.mark.feature("003-50")
def test_groups_of_beams_lose_their_kv_as_a_whole_and_say_what_they_say_alone() -> None:
    driver, asked = under_pressure()
    paused_rows: dict[int, int] = {}
    while driver.core.has_work:
        driver.step()
        for seq in driver.core.scheduler.waiting:
            if seq.status is Status.PAUSED:
                paused_rows[seq.request_id] = paused_rows.get(seq.request_id, 0) + 1
    counters = driver.core.counters
    assert paused_rows and counters.pauses_total > 0, "somebody was paused"
    assert counters.sequences_evicted_total > 0 and counters.recomputed_tokens_total > 0, "and KV was lost"
    assert all(count % 3 == 0 for count in paused_rows.values()), "no row of a search goes without the others"
    for request_id, prompt in asked:
        check(driver, request_id, oracle(prompt, 14, 3))


@pytest.mark.feature("003-34")
def test_each_group_is_in_one_queue_at_any_time() -> None:
    """Waiting, running and paused; a search and a single sequence count as groups of three and of one."""
    driver, _ = under_pressure()
    for number in range(3):
        driver.ask([50 + number, 3, 4], 9)
    seen: set[str] = set()
    while driver.core.has_work:
        scheduler = driver.core.scheduler
        queues: dict[str, list[Sequence]] = {
            "running": list(scheduler.running),
            "waiting": [seq for seq in scheduler.waiting if seq.status is Status.WAITING],
            "swapped": [seq for seq in scheduler.waiting if seq.status is Status.PAUSED],
        }
        assert sum(map(len, queues.values())) == len(scheduler.running) + len(scheduler.waiting)
        places: dict[int, set[str]] = {}
        for name, sequences in queues.items():
            seen |= {name} if sequences else set()
            for seq in sequences:
                places.setdefault(seq.request_id, set()).add(name)
        assert all(len(names) == 1 for names in places.values()), places
        assert set(places) == set(driver.core.live_ids())
        driver.step()
    assert seen == {"running", "waiting", "swapped"}


# QServe's names of the states that a sequence passes through, and of those that it ends in.
PASSED = {Status.WAITING: "WAITING", Status.RUNNING: "RUNNING", Status.PAUSED: "SWAPPED"}
ENDED = {
    FinishReason.END_ID: "FINISHED_STOPPED",
    FinishReason.STOP_WORDS: "FINISHED_STOPPED",
    FinishReason.LENGTH: "FINISHED_LENGTH_CAPPED",
    FinishReason.CANCELLED: "FINISHED_ABORTED",
    FinishReason.TIMED_OUT: "FINISHED_ABORTED",
}


@pytest.mark.feature("003-06")
@pytest.mark.parametrize(
    ("status", "reason", "name"),
    [
        ("FINISHED_STOPPED", FinishReason.END_ID, "stop"),
        ("FINISHED_STOPPED", FinishReason.STOP_WORDS, "stop"),
        ("FINISHED_LENGTH_CAPPED", FinishReason.LENGTH, "length"),
        ("FINISHED_ABORTED", FinishReason.CANCELLED, "abort"),
        ("FINISHED_ABORTED", FinishReason.TIMED_OUT, "abort"),
    ],
)
def test_ends_have_the_names_that_qserve_gives_to_its_statuses(status: str, reason: FinishReason, name: str) -> None:
    """FINISHED_IGNORED, a prompt that is too long, is refused with an error here and never becomes a sequence."""
    assert ENDED[reason] == status and finish_name(reason) == name


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Status, Event, Status, Sequence]]:
    """Every change of a sequence's status, as it happens."""
    noted: list[tuple[Status, Event, Status, Sequence]] = []
    apply: Callable[[Sequence, Event], None] = Sequence.apply

    def noting(seq: Sequence, event: Event) -> None:
        before = seq.status
        apply(seq, event)
        noted.append((before, event, seq.status, seq))

    monkeypatch.setattr(Sequence, "apply", noting)
    return noted


@pytest.mark.feature("003-05", "002-43")
@pytest.mark.parametrize("seed", range(5))
def test_an_engine_under_pressure_moves_sequences_along_legal_edges_only(
    seed: int, moves: list[tuple[Status, Event, Status, Sequence]]
) -> None:
    """Requests that end by a token, by length, by cancelling and by their deadline, with pauses in between."""
    draw, driver = random.Random(seed), Driver(pool_tokens=40, policy="max_utilization", slots=4)
    asked = []
    for number in range(14):
        end_ids = tuple(draw.sample(range(1000), 120)) if number % 3 == 0 else ()
        timeout_s = 4.0 if number == 5 else None
        asked.append(driver.ask([number, 1, 2], draw.randint(5, 25), end_ids=end_ids, timeout_s=timeout_s))
    refused = driver.ask([7] * 60, 4)
    assert "KV" in driver.error(refused), "QServe calls it FINISHED_IGNORED: it never becomes a sequence here"
    while driver.core.has_work:
        driver.step()
        driver.clock.advance(0.3)
        if draw.random() < 0.1:
            driver.core.cancel(RequestId(draw.choice(asked)))
    assert all(LEGAL[before.value, event.value] == after.value for before, event, after, _ in moves)
    by_sequence: dict[int, list[Status]] = {}
    for before, _, after, seq in moves:
        assert by_sequence.setdefault(seq.seq_id, [Status.WAITING])[-1] is before, "nothing moves it behind our back"
        by_sequence[seq.seq_id].append(after)
    assert all(path[-1] is Status.RETIRED and path.count(Status.RETIRED) == 1 for path in by_sequence.values())
    passed = {PASSED[before] for before, *_ in moves}
    assert passed | {ENDED[seq.finish_reason] for *_, seq in moves} == {*PASSED.values(), *ENDED.values()}


@pytest.mark.feature("003-12")
def test_qserve_s_image_fields_reach_the_model_s_worker_unchanged_from_another_process_too() -> None:
    """Through a frame, the queue, and again after each pause: `NewRow.extra_inputs` is the hook."""
    frame = encode_frame(Submit(RequestId(1), Request([1, 2, 3, 4], 12, extra_inputs=QSERVE_FIELDS, streaming=True)))
    command = decode_command(frame[4:])
    assert isinstance(command, Submit)
    driver = Driver(pool_tokens=24, policy="max_utilization", slots=2, takes_extra_inputs=True)
    driver.ask([5, 6, 7, 8, 9], 12)
    driver.core.enqueue(command.request_id + 9, command.request)
    driver.run()
    rows = [row for step in driver.workers.trace for row in step.new_rows]
    with_image = [row for row in rows if row.token_ids[:4] == [1, 2, 3, 4]]
    assert driver.core.counters.pauses_total > 0 and len(with_image) > 1
    assert all(row.extra_inputs == QSERVE_FIELDS for row in with_image)
    assert all(not row.extra_inputs for row in rows if row not in with_image)


@pytest.mark.feature("002-48", "003-12")
def test_the_key_of_a_block_holds_what_came_with_its_tokens() -> None:
    """The same text with another image, with another number of images, and without any: no block is another one's."""
    driver = Driver(pool_tokens=400, takes_extra_inputs=True, records=RecordsConfig(max_kv_events=1000))
    kinds: list[dict[str, bytes]] = [
        {"image": b"one"},
        {"image": b"two"},
        {"image": b"one", "img_per_seq": b"\x01"},
        {"imag": b"eone"},  # the same bytes, cut elsewhere
        {},
    ]
    hashes: list[set[int]] = []
    found: list[int] = []
    for extra_inputs in [*kinds, kinds[0]]:
        before = driver.core.counters.cached_tokens_total
        driver.ask(list(range(16)), 2, extra_inputs=extra_inputs, cache_salt="mine")
        driver.run()
        found.append(driver.core.counters.cached_tokens_total - before)
        records = driver.core.take_records()
        stored = [event.data for event in records.kv_events] if records is not None else []
        hashes.append({block.block_hash for data in stored if isinstance(data, BlocksStored) for block in data.blocks})
    assert found[:-1] == [0] * len(kinds) and found[-1] > 0
    assert all(hashes[:-1]) and len(set().union(*hashes[:-1])) == sum(map(len, hashes[:-1])), "no hash occurs twice"


def test_the_first_of_a_group_of_sequences_decides_nothing_for_the_others_queue() -> None:
    """The rows of `num_return_sequences` are queued one by one, unlike beams: some may run while others wait."""
    driver = Driver(pool_tokens=400, slots=3)
    sampling = SamplingConfig(num_return_sequences=5, seed=1, top_k=5)
    driver.ask([1, 2, 3], 9, sampling_config=sampling, output_config=OutputConfig(exclude_input_from_output=True))
    driver.step(2)
    assert 0 < len(driver.core.scheduler.running) < 5 and len(driver.core.scheduler.waiting) > 0
    driver.run()
