"""The readers of checkpoints as the engine and the stub call them, and what became of a spoiled checkpoint."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from backend.api.config.schema import ModelConfigSection, SchedulerConfig
from backend.api.errors import ConfigError
from backend.text.chat import ChatTemplate
from backend.text.tokenizer import Tokenizer
from backend.worker.group import InProcessWorkerGroup
from tests.model.hostile.base import Reader

MAX_BYTES = 256 << 20
MAX_CHARS = 500
TOO_LONG_S = 20  # a reader that waits for ever is interrupted; a slow machine is not a defect


class Outcome(NamedTuple):
    error: BaseException | None  # None: the checkpoint was taken
    peak_bytes: int  # the highest memory in use, less what was in use before

    @property
    def fault(self) -> str | None:
        """What is wrong with how the checkpoint ended; None when it was refused in one sentence."""
        if self.error is None:
            return "was loaded"
        if not isinstance(self.error, ConfigError):
            return f"{type(self.error).__name__}: {str(self.error)[:80]}"
        if self.peak_bytes > MAX_BYTES:
            return f"took {self.peak_bytes >> 20} MiB"
        return fault_of_sentence(str(self.error))


def fault_of_sentence(sentence: str) -> str | None:
    if not sentence.isprintable():
        return "has control characters or several lines"
    if len(sentence) > MAX_CHARS:
        return f"has {len(sentence)} characters"
    if path := re.search(r"(?:^|[\s('\"])/(?:tmp|root|home|work|usr|proc|dev|etc)\b\S*", sentence):
        return f"tells the path {path[0].strip()}"
    if words := re.search(r"Traceback|Error\(|Expected `|object has no attribute|at `\$|serde|untagged", sentence):
        return f"has words of a library: {words[0]}"
    return None


def read(reader: Reader, directory: Path) -> None:
    if reader == "engine":
        model = ModelConfigSection(path=str(directory), num_threads=1, device="cpu", kernels="torch")
        InProcessWorkerGroup(model, SchedulerConfig(max_batch_size=8)).load()
    else:
        tokenizer = Tokenizer.from_directory(directory)
        ChatTemplate.from_directory(directory, tokenizer)


def outcome(reader: Reader, directory: Path) -> Outcome:
    """Read a checkpoint. What takes longer than TOO_LONG_S in Python or in a system call ends as a TimeoutError."""
    before = _reset_peak()
    error: BaseException | None = None
    try:
        with interrupted():
            read(reader, directory)
    except KeyboardInterrupt:
        raise
    except BaseException as caught:  # a panic of Rust is no Exception
        error = caught
    return Outcome(error, _memory("VmHWM") - before)


@contextmanager
def interrupted() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError(f"took more than {TOO_LONG_S} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(TOO_LONG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _reset_peak() -> int:
    """Start a new peak, and return the bytes in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
