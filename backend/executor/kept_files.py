"""KeptFiles: memory that the supervisor holds, and that outlives the engine process. Each engine gets the same descriptors."""

from __future__ import annotations

import os
import struct
import zlib
from typing import NamedTuple

from msgspec import Struct

from backend.api.config.schema import EngineConfig
from backend.api.request import RequestId
from backend.core.messages import Former
from backend.engine.session_files import in_memory

POOL, TRIAL = "kv-pool", "engine-trial"  # names of the memory, as /proc shows them
# The engine's name, the id of the request on trial plus one (0: none is), and the CRC of both.
_TRIAL, _CRC = struct.Struct("<16sQ"), struct.Struct("<I")


class KeptArguments(Struct):
    """The arguments that name the descriptors of KeptFiles."""

    session_files: tuple[int, ...] = ()
    kv_pool: int | None = None
    trial_file: int | None = None


class KeptFiles(NamedTuple):
    sessions: tuple[int, ...] = ()  # two descriptors of the log of sessions, or none
    pool: int | None = None  # the KV pool's (storage/pool_file.py)
    trial: int | None = None  # it names the request on trial

    @staticmethod
    def make(config: EngineConfig) -> KeptFiles:
        """Make the memory that the engine of this configuration needs: none where several engines stand behind one address."""
        if config.workers.has_replicas:
            return KeptFiles()
        keeps_pool = config.kv_cache.keeps_pool and config.workers.num_ranks == 1
        return KeptFiles(
            () if config.sessions.directory else in_memory(),
            os.memfd_create(POOL) if keeps_pool else None,
            os.memfd_create(TRIAL),
        )

    @staticmethod
    def of(given: KeptArguments) -> KeptFiles:
        """The inverse of `arguments`, in the process that has inherited the descriptors."""
        return KeptFiles(given.session_files, given.kv_pool, given.trial_file)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (*self.sessions, *(each for each in (self.pool, self.trial) if each is not None))

    @property
    def arguments(self) -> list[str]:
        """The part of a command line that names these descriptors, which the process must inherit."""
        named = ["--session-files", *map(str, self.sessions)] if self.sessions else []
        for option, descriptor in (("--kv-pool", self.pool), ("--trial-file", self.trial)):
            named += [] if descriptor is None else [option, str(descriptor)]
        return named

    def former(self) -> Former:
        """Return the name of the engine before this one, and the request that was on trial when it ended."""
        data = b"" if self.trial is None else os.pread(self.trial, _TRIAL.size + _CRC.size, 0)
        body, crc = data[: _TRIAL.size], data[_TRIAL.size :]
        if not body or crc != _CRC.pack(zlib.crc32(body)):  # the first engine, or one that ended while it wrote
            return Former()
        name, number = _TRIAL.unpack(body)
        return Former(name.rstrip(b"\0").decode("ascii", "replace"), RequestId(number - 1) if number else None)

    def note_trial(self, engine: str, request_id: RequestId | None) -> None:
        """The engine of this name runs only this request from now on; None: all of them."""
        if self.trial is None:
            return
        body = _TRIAL.pack(engine.encode(), 0 if request_id is None else request_id + 1)
        data, done = body + _CRC.pack(zlib.crc32(body)), 0
        while done < len(data):
            done += os.pwrite(self.trial, data[done:], done)

    def empty_pool(self) -> None:
        """Forget all KV, and give its memory back. No engine may have it mapped."""
        if self.pool is not None:
            os.ftruncate(self.pool, 0)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
