"""NVIDIA's AIPerf as the driver of OpenAI's wire: a process in an environment of its own for each measurement.

It gets the requests as a file and sends them in that order. The figures are made here from its records of single requests, with
the same code as those of the other driver. The tokenizer that it wants is read from the checkpoint's directory; tokens are those
that the servers count.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.answers import Answer, DriverFailed
from benchmarks.harness.work import Ask, warm_asks
from benchmarks.peers import commands
from benchmarks.peers.environments import BENCH
from benchmarks.served.drive_python import REQUEST_S, completion
from benchmarks.served.servers import Start
from deploy import ROOT
from deploy.progress import SteppedProgress

ENVIRONMENT = BENCH / "env-aiperf"
REQUIREMENTS = ROOT / "requirements" / "aiperf.txt"
WARM_REQUESTS = 2  # a user, for AIPerf itself: its first ones are slow
WARM_IDS = 64  # their prompts are of small ids, which every vocabulary has
_STAMP = ENVIRONMENT / "everbatch.json"


def pinned() -> str:
    """`aiperf==0.13.0`."""
    lines = REQUIREMENTS.read_text().splitlines()
    return next(line for line in lines if line.startswith("aiperf=="))


def is_installed() -> bool:
    """Whether the pinned AIPerf lies in its environment."""
    return _STAMP.is_file() and json.loads(_STAMP.read_text()) == {"pinned": pinned()}


def install(progress: SteppedProgress) -> None:
    """Make the environment. Raises CommandFailed."""
    python = ENVIRONMENT / "bin" / "python"
    BENCH.mkdir(parents=True, exist_ok=True)
    commands.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], progress, "making AIPerf's environment")
    pip = [str(python), "-I", "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    log = BENCH / "install-aiperf.log"
    commands.run([*pip, "-r", str(REQUIREMENTS)], progress, f"installing {pinned()} (once)", log=log)
    _STAMP.write_text(json.dumps({"pinned": pinned()}) + "\n")


class AIPerf:
    """`tokenizer`: the checkpoint's directory."""

    def __init__(self, tokenizer: Path, tick: Callable[[], None]) -> None:
        self._tokenizer = tokenizer
        self._progress = _Quiet(tick)

    def run(self, start: Start, wire: str, asks: Sequence[Ask], users: int, seconds: float) -> list[Answer]:
        """As drive_python.run. Raises DriverFailed when AIPerf ends with an error or writes no record."""
        assert wire == "openai", "AIPerf has no Triton wire"
        with tempfile.TemporaryDirectory() as scratch:
            requests, artifacts = Path(scratch) / "requests.jsonl", Path(scratch) / "artifacts"
            warm = warm_asks(WARM_REQUESTS * users, WARM_IDS, f"{start.name} {asks[0].name}")
            requests.write_text("".join(json.dumps(row_of(ask)) + "\n" for ask in (*warm, *asks)))
            command = self._command(start, requests, artifacts, len(asks), users, seconds)
            try:
                commands.run(command, self._progress, "AIPerf", environment={"PYTHONUNBUFFERED": "1"})
            except commands.CommandFailed as failure:
                raise DriverFailed(f"AIPerf failed: {reason_of(failure.output)}") from None
            records = artifacts / "profile_export.jsonl"
            if not records.is_file():
                raise DriverFailed("AIPerf wrote no records")
            turns = {ask.name: ask.turn for ask in asks}
            found = [json.loads(line) for line in records.read_text().splitlines()]
            counted = [record for record in found if record["metadata"]["benchmark_phase"] == "profiling"]
            return [answer_of(record, turns) for record in counted]

    def _command(
        self, start: Start, requests: Path, artifacts: Path, number: int, users: int, seconds: float
    ) -> list[str]:
        flags: dict[str, Any] = {
            "--model": start.model,
            "--url": start.url,
            "--endpoint-type": "completions",
            "--input-file": requests,
            "--custom-dataset-type": "single_turn",
            "--dataset-sampling-strategy": "sequential",
            "--concurrency": min(users, number),
            "--warmup-request-count": WARM_REQUESTS * users,  # it goes on in the file after them
            "--request-count": number,
            "--benchmark-duration": f"{seconds:g}",
            "--benchmark-grace-period": f"{REQUEST_S:g}",
            "--request-timeout-seconds": f"{REQUEST_S:g}",
            "--connection-reuse-strategy": "never",  # as the other driver has it
            "--tokenizer": self._tokenizer,
            "--output-artifact-dir": artifacts,
            "--export-level": "records",
            "--ui-type": "none",
        }
        switches = ["--streaming", "--use-server-token-count", "--use-legacy-max-tokens"]
        quiet = ["--no-gpu-telemetry", "--no-server-metrics"]
        words = [str(word) for pair in flags.items() for word in pair]
        return [str(ENVIRONMENT / "bin" / "aiperf"), "profile", *words, *switches, *quiet]


class _Quiet(SteppedProgress):
    """Ticks of a command without its title: one line a measurement is enough."""

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self._tick = tick

    def step(self, title: str) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def tick(self) -> None:
        """Tell the one who shows that time goes on."""
        self._tick()


def row_of(ask: Ask) -> dict[str, Any]:
    """A line of AIPerf's file. Its `text` is replaced by the token ids of `extra` before the request is sent."""
    return {
        "type": "single_turn",
        "session_id": ask.name,
        "text": "ids",
        "output_length": ask.new,
        "extra": completion(ask),
    }


def answer_of(record: dict[str, Any], turns: dict[str, int]) -> Answer:
    """A line of AIPerf's records. `turns`: by the name of a request."""
    about, metrics = record["metadata"], record.get("metrics") or {}
    value = lambda name: metrics[name]["value"] if name in metrics else None
    started, ended = about["request_start_ns"] / 1e9, about["request_end_ns"] / 1e9
    turn = turns.get(about.get("conversation_id", ""), 0)
    first = value("time_to_first_token")
    if first is None or record.get("error"):
        return Answer(started, started, ended, 0, turn=turn, error=str(record.get("error") or "no token came")[:300])
    first_s = started + first / 1e3
    last_s = started + float(value("request_latency") or 0) / 1e3
    gaps = [gap / 1e3 for gap in value("inter_chunk_latency") or ()]
    return Answer(started, first_s, max(first_s, last_s), int(value("output_sequence_length") or 0), gaps, turn)


def reason_of(output: Sequence[str]) -> str:
    """The last line that says ERROR, or the last of all."""
    errors = [line for line in output if " ERROR " in line]
    return (errors or list(output) or ["it said nothing"])[-1].strip()[:300]
