"""A table: what becomes of each hostile checkpoint, each in a process of its own.

.venv/bin/python -m tests.model.hostile
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

import transformers  # noqa: F401  # slow, and not what is measured

from tests.model.hostile import CASES
from tests.model.hostile.base import Case, write
from tests.model.hostile.readers import outcome

MAX_ADDRESS_SPACE = 8 << 30  # a defect may take no more of the machine than this
MAX_S = 10.0


def main() -> None:
    """Prints a line for each that does not end in one sentence, and how many do."""
    context = multiprocessing.get_context("fork")
    counts: Counter[str] = Counter()
    for case in CASES:
        receiver, sender = context.Pipe(duplex=False)
        started = time.monotonic()
        process = context.Process(target=_run, args=(case, sender))
        process.start()
        sender.close()
        fault = _answer(receiver)
        process.kill()
        process.join()
        seconds = time.monotonic() - started
        fault = f"took {seconds:.1f} s" if fault is None and seconds > 2 else fault
        counts["one sentence" if fault is None else "not"] += 1
        if fault is not None:
            print(f"{case.reader:6}  {case.name:50}  {fault}", flush=True)
    print(f"{counts['one sentence']} of {len(CASES)} end in one sentence")


def _answer(receiver: Connection) -> str | None:
    if not receiver.poll(MAX_S):
        return f"did not end within {MAX_S:.0f} s"
    try:
        return receiver.recv()
    except EOFError:
        return "killed the process"


def _run(case: Case, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    with tempfile.TemporaryDirectory() as name:
        directory = write(Path(name) / "model")
        case.spoil(directory)
        result = outcome(case.reader, directory)
        fault = result.fault
        if fault is None:
            sentence = str(result.error)
            missing = [word for word in case.tells if word not in sentence]
            fault = f"does not name {missing[0]}: {sentence}" if missing else None
        sender.send(fault)


if __name__ == "__main__":
    main()
