"""Database: files, batches and answers in one SQLite file. All calls come from one thread.

    lines.key  =  number of the file << LINE_BITS | number of the line, from 1

A file is stored as one row for each of its lines, with the line break, so that a line of an input file is found by its number
and an answer is one more row. A committed transaction outlives a kill of the process, and of the machine. An answer and the
counts of its batch are one transaction, and a key holds one answer: whatever is killed, a line is answered once.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from gateway.batches.records import KEPT_S, BatchRecord, FileRecord, Status, new_id

LINE_BITS = 20
MOST_LINES = (1 << LINE_BITS) - 1
_FILE, _LOCK = "batches.sqlite3", "lock"
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, ready INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, num_bytes INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS lines (key INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, ended_at INTEGER,
    record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS files_of ON files (namespace, number);
CREATE INDEX IF NOT EXISTS batches_of ON batches (namespace, number);
"""
_to_file, _to_batch = msgspec.json.Decoder(FileRecord).decode, msgspec.json.Decoder(BatchRecord).decode


class DatabaseError(Exception):
    """The directory cannot be used; the text says why and what to do."""


class Answered(NamedTuple):
    """A line's answer: a line of the output file, or of the error file."""

    batch_id: str
    number: int
    data: bytes
    is_success: bool
    usage: tuple[int, int, int, int] = (0, 0, 0, 0)  # as in records.Usage


class Database:
    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises DatabaseError."""
        self._clock = clock
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._sql = sqlite3.connect(directory / _FILE, check_same_thread=False, isolation_level=None)
            self._sql.execute("PRAGMA journal_mode=WAL")
            self._sql.execute("PRAGMA synchronous=FULL")
            self._sql.executescript(_TABLES)
        except BlockingIOError:
            raise DatabaseError("another server uses it; give each its own") from None
        except (OSError, sqlite3.Error) as error:
            raise DatabaseError(f"it cannot be used: {error}") from None
        with self._transaction():  # uploads and answers of a process that ended in their midst
            for (number,) in self._sql.execute("SELECT number FROM files WHERE ready = 0").fetchall():
                if not self._is_of_batch(number):
                    self._drop_file(number)

    def close(self) -> None:
        self._sql.close()
        os.close(self._lock)

    @property
    def now(self) -> int:
        return int(self._clock())

    # ---- files -------------------------------------------------------------------------------------------------------

    def begin_file(
        self, namespace: str, filename: str, purpose: str, kept_s: int = KEPT_S, prefix: str = "file-"
    ) -> FileRecord:
        """A file without lines, which clients do not see yet."""
        with self._transaction():
            return self._begin_file(namespace, filename, purpose, kept_s, prefix)

    def _begin_file(
        self, namespace: str, filename: str, purpose: str, kept_s: int, prefix: str = "file-"
    ) -> FileRecord:
        now = self.now
        record = FileRecord(
            id=new_id(prefix),
            namespace=namespace,
            filename=filename,
            purpose=purpose,
            created_at=now,
            expires_at=now + kept_s,
        )
        values = (record.id, namespace, record.expires_at)
        made = self._sql.execute("INSERT INTO files VALUES (NULL, ?, ?, 0, ?, 0, '')", values)
        record.number = made.lastrowid or 0
        self._write_file(record)
        return record

    def add_lines(self, record: FileRecord, lines: list[bytes]) -> None:
        """Behind those that the file has."""
        with self._transaction():
            first = (record.number << LINE_BITS) + record.num_lines + 1
            self._sql.executemany("INSERT INTO lines VALUES (?, ?)", enumerate(lines, first))
            record.num_lines += len(lines)
            record.num_bytes += sum(map(len, lines))
            self._write_file(record)

    def finish_file(self, record: FileRecord) -> None:
        record.ready = True
        with self._transaction():
            self._write_file(record)

    def file(self, namespace: str, file_id: str) -> FileRecord | None:
        query = "SELECT record FROM files WHERE id = ? AND namespace = ? AND ready AND expires_at > ?"
        found = self._sql.execute(query, (file_id, namespace, self.now)).fetchone()
        return None if found is None else _to_file(found[0])

    def files(self, namespace: str) -> list[FileRecord]:
        """The oldest first."""
        query = "SELECT record FROM files WHERE namespace = ? AND ready AND expires_at > ? ORDER BY number"
        return [_to_file(record) for (record,) in self._sql.execute(query, (namespace, self.now))]

    def use(self, namespace: str) -> tuple[int, int]:
        """Files of a namespace and their bytes, those that are being written included."""
        query = "SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE namespace = ?"
        count, size = self._sql.execute(query, (namespace,)).fetchone()
        return count, size

    def lines(self, record: FileRecord, after: int, most_bytes: int) -> list[tuple[int, bytes]]:
        """Lines behind number `after`, with their numbers: at least one if there is one, then so many bytes of them."""
        base, found, size = record.number << LINE_BITS, [], 0
        query = "SELECT key, data FROM lines WHERE key > ? AND key <= ? ORDER BY key"
        for key, data in self._sql.execute(query, (base + after, base + MOST_LINES)):
            found.append((key - base, data))
            size += len(data)
            if size >= most_bytes:
                break
        return found

    def line(self, record: FileRecord, number: int) -> bytes:
        query = "SELECT data FROM lines WHERE key = ?"
        (data,) = self._sql.execute(query, ((record.number << LINE_BITS) + number,)).fetchone()
        return bytes(data)

    def drop_file(self, record: FileRecord) -> str | None:
        """Delete a file, unless a batch that has not ended reads it: then nothing changes, and its id is returned."""
        with self._transaction():
            reader = self.reader_of(record.id)
            if reader is None:
                self._drop_file(record.number)
            return reader

    def reader_of(self, file_id: str) -> str | None:
        """The batch that still reads a file, or writes it."""
        query = "SELECT record FROM batches WHERE ended_at IS NULL"
        running = [_to_batch(record) for (record,) in self._sql.execute(query)]
        return next((one.id for one in running if file_id in (one.input_file_id, one.output, one.errors_in)), None)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> bool:
        """False if there is no such input file."""
        with self._transaction():
            if self.file(record.namespace, record.input_file_id) is None:
                return False
            values = (record.id, record.namespace, msgspec.json.encode(record))
            self._sql.execute("INSERT INTO batches VALUES (NULL, ?, ?, NULL, ?)", values)
            return True

    def batch(self, batch_id: str, namespace: str | None = None) -> BatchRecord | None:
        """`namespace`: the only one whose batches are found; None: any."""
        found = self._sql.execute("SELECT record, namespace FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return None if found is None or namespace not in (None, found[1]) else _to_batch(found[0])

    def batches(self, namespace: str) -> list[BatchRecord]:
        """The oldest first."""
        query = "SELECT record FROM batches WHERE namespace = ? ORDER BY number"
        return [_to_batch(record) for (record,) in self._sql.execute(query, (namespace,))]

    def open_batches(self) -> list[BatchRecord]:
        """All batches that have not ended, the oldest first."""
        query = "SELECT record FROM batches WHERE ended_at IS NULL ORDER BY number"
        return [_to_batch(record) for (record,) in self._sql.execute(query)]

    def move(self, batch_id: str, status: Status, only_from: tuple[Status, ...], **changes: object) -> BatchRecord:
        """Give a batch another status, if it has one of `only_from`. Returns the batch as it is now."""
        with self._transaction():
            record = self._batch(batch_id)
            if record.status in only_from:
                record.status = status
                record.times[status] = self.now
                for name, value in changes.items():
                    setattr(record, name, value)
                if record.has_ended:
                    self._publish(record)
                self._write_batch(record)
            return record

    def input_of(self, record: BatchRecord) -> FileRecord:
        """The file that a batch reads, which stays until it has ended."""
        (found,) = self._sql.execute("SELECT record FROM files WHERE id = ?", (record.input_file_id,)).fetchone()
        return _to_file(found)

    def begin_answers(self, batch_id: str, total: int, model: str | None) -> BatchRecord:
        """A batch whose lines are all well-formed gets its output files, and is in progress."""
        with self._transaction():
            record = self._batch(batch_id)
            if record.status == "validating":
                record.total, record.model = total, model
                names = f"{batch_id}_output.jsonl", f"{batch_id}_error.jsonl"
                files = [self._begin_file(record.namespace, name, "batch_output", KEPT_S) for name in names]
                record.output, record.errors_in = (file.id for file in files)
                record.status, record.times["in_progress"] = "in_progress", self.now
                self._write_batch(record)
            return record

    def answered(self, record: BatchRecord) -> set[int]:
        """Numbers of the lines that have an answer."""
        found: set[int] = set()
        for file in self._outputs(record):
            base = file.number << LINE_BITS
            keys = self._sql.execute("SELECT key FROM lines WHERE key > ? AND key <= ?", (base, base + MOST_LINES))
            found.update(key - base for (key,) in keys)
        return found

    def put_answers(self, answers: list[Answered]) -> None:
        """Keep answers and count them, in one transaction. A line that has an answer keeps it."""
        with self._transaction():
            records: dict[str, tuple[BatchRecord, FileRecord, FileRecord]] = {}
            for one in answers:
                if one.batch_id not in records:
                    record = self._batch(one.batch_id)
                    if record.has_ended:  # it was cancelled, and each of its lines has an answer
                        continue
                    output, errors = self._outputs(record)
                    records[one.batch_id] = record, output, errors
                self._put_answer(one, *records[one.batch_id])
            for record, *files in records.values():
                self._write_batch(record)
                for file in files:
                    self._write_file(file)

    def _put_answer(self, one: Answered, record: BatchRecord, output: FileRecord, errors: FileRecord) -> None:
        keys = [(file.number << LINE_BITS) + one.number for file in (output, errors)]
        if self._sql.execute("SELECT 1 FROM lines WHERE key IN (?, ?)", keys).fetchone() is not None:
            return
        file = output if one.is_success else errors
        self._sql.execute("INSERT INTO lines VALUES (?, ?)", (keys[not one.is_success], one.data))
        file.num_lines += 1
        file.num_bytes += len(one.data)
        record.completed += one.is_success
        record.failed += not one.is_success
        before = record.usage
        for name, count in zip(before.__struct_fields__, one.usage, strict=True):
            setattr(before, name, getattr(before, name) + count)

    def drop_expired(self) -> None:
        """Files whose time is over, and batches that ended so long ago."""
        with self._transaction():
            query = "SELECT number, id FROM files WHERE expires_at <= ? AND ready"
            for number, file_id in self._sql.execute(query, (self.now,)).fetchall():
                if self.reader_of(file_id) is None:
                    self._drop_file(number)
            self._sql.execute("DELETE FROM batches WHERE ended_at <= ?", (self.now - KEPT_S,))

    # ---- within a transaction ----------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._sql.execute("ROLLBACK")
            raise
        self._sql.execute("COMMIT")

    def _batch(self, batch_id: str) -> BatchRecord:
        record = self.batch(batch_id)
        assert record is not None, "a batch outlives its work"
        return record

    def _outputs(self, record: BatchRecord) -> list[FileRecord]:
        """The output file and the error file."""
        query = "SELECT record FROM files WHERE id = ?"
        return [_to_file(self._sql.execute(query, (each,)).fetchone()[0]) for each in (record.output, record.errors_in)]

    def _publish(self, record: BatchRecord) -> None:
        """A batch has ended: clients see its files that have lines."""
        if not record.output:
            return
        output, errors = self._outputs(record)
        record.has_output, record.has_errors = output.num_lines > 0, errors.num_lines > 0
        for file in (output, errors):
            file.ready = True
            file.created_at, file.expires_at = self.now, self.now + record.output_kept_s
            if file.num_lines:
                self._write_file(file)
            else:
                self._drop_file(file.number)

    def _is_of_batch(self, number: int) -> bool:
        (file_id,) = self._sql.execute("SELECT id FROM files WHERE number = ?", (number,)).fetchone()
        return self.reader_of(file_id) is not None

    def _write_file(self, record: FileRecord) -> None:
        values = (record.ready, record.expires_at, record.num_bytes, msgspec.json.encode(record), record.number)
        self._sql.execute(
            "UPDATE files SET ready = ?, expires_at = ?, num_bytes = ?, record = ? WHERE number = ?", values
        )

    def _write_batch(self, record: BatchRecord) -> None:
        ended_at = self.now if record.has_ended else None
        values = (ended_at, msgspec.json.encode(record), record.id)
        self._sql.execute("UPDATE batches SET ended_at = ?, record = ? WHERE id = ?", values)

    def _drop_file(self, number: int) -> None:
        base = number << LINE_BITS
        self._sql.execute("DELETE FROM lines WHERE key > ? AND key <= ?", (base, base + MOST_LINES))
        self._sql.execute("DELETE FROM files WHERE number = ?", (number,))
