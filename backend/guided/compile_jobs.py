"""CompileProcess: guides that are compiled under limits, in a process of their own (compile_process.py)."""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import Struct

from backend.api.guide import Guide
from backend.core.limited_messages import Limits, Outcome
from backend.core.limited_process import Job, LimitedProcess
from backend.guided.materials import Materials

encode_guide = msgspec.msgpack.Encoder().encode
decode_guide = msgspec.msgpack.Decoder(Guide).decode


class Setup(Struct, frozen=True, forbid_unknown_fields=True):
    """The first message to the process."""

    materials: Materials
    limits: Limits  # for each guide


class Jobs(Protocol):
    """Compiles guides under limits. Several threads may call it."""

    def start(self) -> None:
        """Start the process in advance. Raises OSError if it cannot be started."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until the process has started, or has failed to."""
        ...

    def run(self, job: Job, guide: Guide) -> Outcome:
        """Run a job and wait for its outcome, which comes within milliseconds after `drop`. Raises OSError if no process can be
        started.
        """
        ...

    def close(self) -> None:
        """End the process. Running jobs are lost."""
        ...


class CompileProcess:
    """Implements Jobs. The process starts with the first job, and again after its death."""

    def __init__(self, setup: Setup) -> None:
        self.process = LimitedProcess("backend.guided.compile_process", setup)

    def start(self) -> None:
        self.process.start()

    def wait_until_ready(self) -> None:
        self.process.wait_until_ready()

    def run(self, job: Job, guide: Guide) -> Outcome:
        return self.process.run(job, encode_guide(guide))

    def close(self) -> None:
        self.process.close()
