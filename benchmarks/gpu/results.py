"""The file of results: rows by name, each with the run that it comes from. Written after every row: a killed run loses one."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.goals import Record
from benchmarks.gpu.machine import NOMINAL

MEASURED, FAILED, NOT_RUN = "measured", "failed", "not run"


class Results:
    def __init__(self, directory: Path | None) -> None:
        """`directory` None keeps nothing. What an earlier run left there is read."""
        self._path = directory / "gpu.json" if directory else None
        self.runs: dict[str, Record] = {}
        self.rows: dict[str, Record] = {}
        self._running: Record = {}
        if self._path is not None and self._path.is_file():
            known = json.loads(self._path.read_text())
            self.runs, self.rows = known["runs"], known["rows"]
            self._note_killed(known.get("running", {}))

    def _note_killed(self, running: Record) -> None:
        for name in running.get("names", ()):
            if self.status(name) != MEASURED:
                reason = "the process was ended while it ran"
                self.rows[name] = {"status": FAILED, "reason": reason, "run": running["run"]}

    def begin(self, machine: Record, started: float) -> str:
        """A run on a machine; its name is its date."""
        name = datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M:%S")
        self.runs[name] = machine
        return name

    def enter(self, names: list[str], run: str) -> None:
        """Write down which rows a run is about to measure, so that the file of a killed process says where it had come to."""
        self._running = {"names": names, "run": run}
        self.save()

    def put(self, name: str, record: Record) -> None:
        """A row that was not run replaces nothing that was."""
        self._running = {}
        if record["status"] != NOT_RUN or self.status(name) not in (MEASURED, FAILED):
            self.rows[name] = record
        self.save()

    def status(self, name: str) -> str:
        return self.rows.get(name, {}).get("status", "not measured")

    def machine_of(self, name: str) -> Record:
        """The one that a row was measured on; the planned one without a measurement."""
        return self.runs.get(self.rows.get(name, {}).get("run", ""), NOMINAL)

    def keep(self, names: set[str]) -> None:
        """Forget rows that are no more, and runs that no row comes from."""
        self.rows = {name: row for name, row in self.rows.items() if name in names}
        used = {row.get("run") for row in self.rows.values()}
        self.runs = {name: machine for name, machine in self.runs.items() if name in used}

    def save(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_suffix(".part")
        scratch.write_text(
            json.dumps({"runs": self.runs, "running": self._running, "rows": self.rows}, indent=1) + "\n"
        )
        os.replace(scratch, self._path)
