"""SessionLog: what the sessions of an engine consist of, in files that outlive its process.

    two files, of which one is in use      | header 64 bytes | record | record | ...
    header     magic, generation, whose (model, boot), checksum. The valid header of the greatest generation is that in use
    record     length (4 bytes), checksum (8), msgpack of Turn or Erased

A record is written when a turn ends, ahead of its final response: what a client knows is in the file. A process that is killed
within a write leaves half a record at the end, which counts as not there; its client has the turn run again. Nothing waits for a
disk, so after the end of the machine only a log that was closed is used. Any other damage makes the whole log useless, because
it cannot be known which turns are missing: then no session is restored.

When much of a file is out of date, all sessions are written to the other one, whose header comes last.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from backend.api.request import KvOrigin
from backend.core.sequence import Sequence, SessionKey, Status
from backend.core.step import ModelInfo

log = logging.getLogger("everbatch.engine")
MAGIC = b"EVBSESS1"
_HEADER = struct.Struct("<8sQ16s16s?")  # and behind it 8 bytes of checksum
_RECORD = struct.Struct("<I8s")
HEADER_BYTES = 64
SPARE_BYTES = 1 << 20  # a file may have so many besides twice what is needed
MAX_RECORD_BYTES = 1 << 30
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Turn(Struct, frozen=True, tag="turn", array_like=True):
    """A session after a turn: the first `keep` tokens of what it was before, and `token_ids` (int32)."""

    namespace: str
    session_id: int
    keep: int
    token_ids: bytes
    seed: int
    num_sampled: int
    seed_before: int  # before this turn, which may be run again
    num_sampled_before: int
    turn: str  # its name, see core.messages.Resume
    adapter: str
    origin: KvOrigin
    used_s: float  # wall clock, for the idle time

    @property
    def key(self) -> SessionKey:
        return SessionKey(self.namespace, self.session_id)  # type: ignore[arg-type]


class Erased(Struct, frozen=True, tag="erased", array_like=True):
    namespace: str
    session_id: int


class Damaged(Exception):
    """The text completes a sentence about the log."""


def _encode(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _decode(data: bytes) -> Turn | Erased:
    """Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=Turn | Erased)


def fingerprint_of(model: ModelInfo, checkpoint: str = "") -> bytes:
    """16 bytes by which a log is known to be of the same model."""
    facts = msgspec.structs.replace(model, remarks=()), checkpoint
    return hashlib.blake2b(_encode(facts), digest_size=16).digest()


def boot_of_machine() -> bytes:
    """16 bytes that differ after each start of the machine; empty where the kernel does not say."""
    try:
        return bytes.fromhex(BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return b""


class SessionLog:
    def __init__(
        self,
        files: tuple[int, int],
        fingerprint: bytes,
        boot: bytes | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`files`: descriptors of the two files, which this log alone uses. `now`: the wall clock."""
        self._files, self._fingerprint, self._now = files, fingerprint, now
        self._boot = boot_of_machine() if boot is None else boot
        self._generation, self._active = 0, 0
        self._num_bytes = self._limit = 0  # bytes of the file in use; beyond the limit the other one is begun
        self._pending: dict[SessionKey, Turn | Erased] = {}
        self._erased: dict[SessionKey, Erased] = {}  # written a turn of the loop later than what ends with it
        self._used_s: dict[SessionKey, float] = {}  # the end of each session's latest turn
        self._is_broken = False
        self.num_skipped = 0  # logs that could not be used

    # ---- while the engine runs

    def note(self, seq: Sequence) -> None:
        """The turn of a session is over. Call it once the sequence is between two turns."""
        key = seq.session_key
        assert key is not None  # it is a session's
        self._erased.pop(key, None)
        self._used_s[key] = self._now()
        before = self._pending.get(key)
        keep = seq.num_history_tokens if not isinstance(before, Turn) else min(seq.num_history_tokens, before.keep)
        self._pending[key] = self._turn(seq, keep)

    def forget(self, key: SessionKey) -> None:
        """A session is erased."""
        self._erased[key] = Erased(key.namespace, key.id)
        self._used_s.pop(key, None)

    def flush(self, sessions: Callable[[], Iterator[Sequence]]) -> None:
        """Write what has been noted. `sessions`: all of them, for a new file. The end of a session is written one call later
        than a turn's, so that a turn that ends its session can be run again until its client has its end.
        """
        if not (self._pending or self._erased) or self._is_broken:
            return
        records = b"".join(_framed(record) for record in self._pending.values())
        self._pending = dict(self._erased)
        self._erased = {}
        try:
            if self._num_bytes + len(records) > self._limit:
                self._begin(b"".join(_framed(record) for record in self._all(sessions())))
            elif records:
                _write(self._files[self._active], records, self._num_bytes)
                self._num_bytes += len(records)
        except OSError as error:
            self._break(f"cannot be written ({error.strerror})")

    def close(self, sessions: Callable[[], Iterator[Sequence]]) -> None:
        """The engine ends in good order: the log holds also when the machine ends."""
        if self._is_broken or not self._generation:
            return
        self.flush(sessions)
        self.flush(sessions)
        try:
            os.fsync(self._files[self._active])
            self._put_header(is_closed=True)
            os.fsync(self._files[self._active])
        except OSError as error:
            self._break(f"cannot be closed ({error.strerror})")

    def idle_s(self, turn: Turn) -> float:
        """The seconds since a turn."""
        return max(0.0, self._now() - turn.used_s)

    def _turn(self, seq: Sequence, keep: int) -> Turn:
        assert seq.session_key is not None  # it is a session's
        is_idle = seq.status is Status.IDLE
        end = seq.num_tokens if is_idle else seq.num_history_tokens
        seed_before, num_sampled_before = seq.random_state_before
        state = (seq.seed, seq.num_sampled_before) if is_idle else (seed_before, num_sampled_before)
        return Turn(
            seq.session_key.namespace,
            seq.session_key.id,
            keep,
            array("i", seq.token_ids[keep:end]).tobytes(),
            *state,
            seed_before,
            num_sampled_before,
            seq.turn if is_idle else "",
            seq.adapter,
            seq.kv_origin,
            self._used_s.get(seq.session_key, 0.0),
        )

    def _all(self, sessions: Iterator[Sequence]) -> Iterator[Turn]:
        """All sessions as they are now; one that runs a turn as it was before it."""
        for seq in sessions:
            if seq.status is Status.IDLE or seq.num_history_tokens:
                # Two records, so that the latest turn can be undone.
                keep = seq.num_history_tokens if seq.status is Status.IDLE else 0
                if keep:
                    yield msgspec.structs.replace(
                        self._turn(seq, 0), token_ids=array("i", seq.token_ids[:keep]).tobytes()
                    )
                yield self._turn(seq, keep)

    def _begin(self, records: bytes) -> None:
        """Write the other file, and use it from then on."""
        before = self._active
        self._active, self._generation = 1 - before, self._generation + 1
        file = self._files[self._active]
        os.ftruncate(file, 0)
        _write(file, records, HEADER_BYTES)
        self._num_bytes = HEADER_BYTES + len(records)
        self._limit = 2 * self._num_bytes + SPARE_BYTES
        self._put_header(is_closed=False)
        os.ftruncate(self._files[before], 0)

    def _put_header(self, is_closed: bool) -> None:
        boot = self._boot.ljust(16, b"\0")
        header = _HEADER.pack(MAGIC, self._generation, self._fingerprint, boot, is_closed)
        _write(self._files[self._active], (header + _checksum(header)).ljust(HEADER_BYTES, b"\0"), 0)

    def _break(self, why: str) -> None:
        """Give the log up: from now on sessions end with the engine, and none is restored as it was before."""
        log.error("the log of sessions %s; sessions end with the engine from now on", why)
        self._is_broken = True
        for file in self._files:
            try:
                os.ftruncate(file, 0)
            except OSError as error:
                log.error("the log of sessions cannot be emptied (%s)", error.strerror)

    # ---- when the engine starts

    def begin(self, sessions: Iterator[Sequence]) -> None:
        """Begin with what has been restored, in a file of its own."""
        try:
            self._begin(b"".join(_framed(record) for record in self._all(sessions)))
        except OSError as error:
            self._break(f"cannot be written ({error.strerror})")

    def restore(self) -> list[tuple[Turn, array[int], int]]:
        """The sessions of the engine before: (its latest turn, all its token ids, how many of them are older than that turn), the
        least recently used first. Empty where the log cannot be used, which is logged and counted.
        """
        found: list[tuple[Turn, array[int], int]] = []
        try:
            found = list(self._read())
        except Damaged as damage:
            self.num_skipped += 1
            log.warning("the log of sessions %s; no session is restored", damage)
        except OSError as error:
            self.num_skipped += 1
            log.warning("the log of sessions cannot be read (%s); no session is restored", error.strerror)
        return found

    def _read(self) -> Iterator[tuple[Turn, array[int], int]]:
        headers = [(header, place) for place, file in enumerate(self._files) if (header := _header(file)) is not None]
        if not headers:
            if any(os.fstat(file).st_size for file in self._files):
                raise Damaged("has no valid header")
            return
        (_, self._generation, fingerprint, boot, is_closed), self._active = max(headers)
        if fingerprint != self._fingerprint:
            raise Damaged("is of another model, or of other settings")
        if not is_closed and (not self._boot or boot != self._boot):
            raise Damaged("was not closed before the machine ended")
        states: dict[SessionKey, tuple[Turn, array[int], int]] = {}
        for record in _records(self._files[self._active]):
            if isinstance(record, Erased):
                states.pop(SessionKey(record.namespace, record.session_id), None)  # type: ignore[arg-type]
                continue
            token_ids = states.pop(record.key, (record, array("i"), 0))[1]
            if record.keep > len(token_ids):
                raise Damaged("lacks a turn")
            del token_ids[record.keep :]
            token_ids.frombytes(record.token_ids)
            states[record.key] = record, token_ids, record.keep
        self._used_s = {key: state[0].used_s for key, state in states.items()}
        yield from states.values()


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _framed(record: Turn | Erased) -> bytes:
    body = _encode(record)
    return _RECORD.pack(len(body), _checksum(body)) + body


def _write(file: int, data: bytes, at: int) -> None:
    """All of it; raises OSError."""
    view = memoryview(data)
    while view:
        num_written = os.pwrite(file, view, at)
        view, at = view[num_written:], at + num_written


def _header(file: int) -> tuple[bytes, int, bytes, bytes, bool] | None:
    """(magic, generation, fingerprint, boot, whether it was closed); None where there is no valid one."""
    data = os.pread(file, HEADER_BYTES, 0)
    if len(data) < HEADER_BYTES or data[_HEADER.size : _HEADER.size + 8] != _checksum(data[: _HEADER.size]):
        return None
    header: tuple[bytes, int, bytes, bytes, bool] = _HEADER.unpack(data[: _HEADER.size])
    return header if header[0] == MAGIC else None


def _records(file: int) -> Iterator[Turn | Erased]:
    """All whole records. Raises Damaged for one that is whole and wrong."""
    at, size = HEADER_BYTES, os.fstat(file).st_size
    while at < size:
        head = os.pread(file, _RECORD.size, at)
        if len(head) < _RECORD.size:
            return
        length, checksum = _RECORD.unpack(head)
        if length > MAX_RECORD_BYTES:
            raise Damaged(f"has a record of {length} bytes, the limit is {MAX_RECORD_BYTES}")
        if at + _RECORD.size + length > size:
            return  # half a record, at whose writing the engine was killed
        body = os.pread(file, length, at + _RECORD.size)
        if len(body) < length or _checksum(body) != checksum:
            raise Damaged(f"is damaged at byte {at}")
        try:
            record = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Damaged(f"has a record at byte {at} that cannot be read") from None
        if isinstance(record, Turn) and len(record.token_ids) % 4:
            raise Damaged(f"has a record at byte {at} with part of a token id")
        yield record
        at += _RECORD.size + length
