"""The bars of batches, on standard error."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from client.errors import ClientError
from client.messages import Completion


class _Bar:
    """A bar with a note behind it, which is drawn while the object is entered. Nothing unless `shown`."""

    def __init__(self, what: str, total: int | None, shown: bool) -> None:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)
        self._task = self._progress.add_task(what, total=total, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class BatchProgress(_Bar):
    """Answers so far of all, output tokens and their speed, errors, and the time that is left. Nothing unless `shown`."""

    def __init__(self, total: int, *, shown: bool) -> None:
        super().__init__("answers", total, shown)
        self._began = time.monotonic()
        self._tokens = self._errors = 0

    def add(self, answer: Completion | ClientError) -> None:
        """Count one more answer."""
        if isinstance(answer, ClientError):
            self._errors += 1
        else:
            self._tokens += answer.num_output_tokens
        speed = self._tokens / max(time.monotonic() - self._began, 1e-9)
        note = f"{self._tokens} tokens, {speed:.0f} tokens/s" + f", {self._errors} errors" * bool(self._errors)
        self._progress.update(self._task, advance=1, note=note)


class FileProgress(_Bar):
    """The bar of a file of requests that a server answers by itself."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__("lines", None, shown)

    def show(self, counts: dict[str, int], tokens: int, status: str) -> None:
        """`counts`: of a batch; `tokens`: that its answers have."""
        failed = f", {counts['failed']} failed" * bool(counts["failed"])
        note = f"{tokens} tokens{failed}" if status == "in_progress" else status
        done = counts["completed"] + counts["failed"]
        self._progress.update(self._task, total=counts["total"] or None, completed=done, note=note)

    def note(self, text: str) -> None:
        self._progress.update(self._task, note=text)
