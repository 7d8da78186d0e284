"""What the database of batches keeps, and who gets the next place."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.batches.database import Answered, Database
from gateway.batches.places import FairPlaces
from gateway.batches.records import KEPT_S, BatchRecord


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def begun(database: Database, lines: int = 3) -> BatchRecord:
    """A batch of the namespace n that is in progress."""
    file = database.begin_file("n", "in.jsonl", "batch")
    database.add_lines(file, [b"x\n"] * lines)
    database.finish_file(file)
    made = {"namespace": "n", "client": "", "endpoint": "/v1/completions", "completion_window": "24h", "is_local": True}
    record = BatchRecord(id="batch_1", input_file_id=file.id, created_at=0, expires_at=0, **made)
    assert database.add_batch(record)
    return database.begin_answers("batch_1", lines, "m")


def answer(number: int, is_success: bool, text: bytes = b"a\n") -> Answered:
    return Answered("batch_1", number, text, is_success, (1, 0, 2, 0))


def test_a_line_is_answered_once_and_counted_once(tmp_path: Path) -> None:
    database = Database(tmp_path)
    record = begun(database)
    database.put_answers([answer(1, True), answer(1, False), answer(2, False)])
    database.put_answers([answer(2, True, b"late\n"), answer(1, True, b"late\n")])
    assert database.answered(record) == {1, 2}
    found = database.batch("batch_1", "n")
    assert found is not None and (found.completed, found.failed, found.usage.output_tokens) == (1, 1, 4)
    assert len(database.files("n")) == 1, "what is still written is not shown"
    found = database.move("batch_1", "completed", ("in_progress",))
    database.put_answers([answer(3, True)])
    kept = database.batch("batch_1")
    assert kept is not None and (kept.completed, kept.failed) == (1, 1), "it has ended"
    output = database.file("n", found.shown()["output_file_id"])
    assert output is not None and database.lines(output, 0, 100) == [(1, b"a\n")] and output.num_bytes == 2


def test_what_was_committed_is_there_again_and_half_an_upload_is_not(tmp_path: Path) -> None:
    database = Database(tmp_path)
    record = begun(database)
    database.put_answers([answer(2, True)])
    database.add_lines(database.begin_file("n", "half", "batch"), [b"y\n"])
    database.close()
    database = Database(tmp_path)
    assert [open_one.id for open_one in database.open_batches()] == ["batch_1"]
    assert database.answered(record) == {2} and len(database.files("n")) == 1
    assert database.use("n")[0] == 3, "the input and two outputs"
    assert database.drop_file(database.input_of(record)) == "batch_1", "it is still read"
    database.move("batch_1", "failed", ("in_progress",))
    assert database.drop_file(database.input_of(record)) is None


def test_files_and_batches_go_after_their_time(tmp_path: Path) -> None:
    clock = Clock()
    database = Database(tmp_path, clock)
    record = begun(database)
    clock.now += KEPT_S + 1
    database.drop_expired()
    assert database.files("n") == [] and database.lines(database.input_of(record), 0, 9), "it is still read"
    database.move("batch_1", "cancelled", ("in_progress",))
    database.drop_expired()
    assert database.use("n") == (0, 0) and database.batch("batch_1") is not None
    clock.now += KEPT_S + 1
    database.drop_expired()
    assert database.batch("batch_1") is None


def test_namespaces_take_turns_and_a_place_that_was_given_up_is_not_lost() -> None:
    async def run() -> list[str]:
        places, order = FairPlaces(1), []
        await places.take("long")

        async def line(namespace: str) -> None:
            await places.take(namespace)
            order.append(namespace)
            places.give_back()

        tasks = [asyncio.ensure_future(line(name)) for name in ("long", "long", "long", "short", "gone")]
        await asyncio.sleep(0)
        tasks.pop().cancel()
        places.give_back()
        await asyncio.gather(*tasks)
        assert places.taken == 0
        return order

    assert asyncio.run(run()) == ["long", "short", "long", "long"]
