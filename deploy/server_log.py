"""Reads a server's log: the reason of a failure, and how far the engine has got while it loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

from deploy.readiness import SENTINEL

TAIL_BYTES = 64 << 10
_NOISE = (  # lines of no interest: normal without a GPU, Triton's tables and progress, the switch of readiness
    re.compile(r"^I\d{4} "),
    re.compile(r"^[+|]"),
    re.compile(
        r"CudaDriverHelper has not been initialized|Unable to allocate pinned system memory|DCGM unable to start"
    ),
    re.compile(r"^Error: Failed to initialize NVML|everbatch: Python environment"),
    re.compile(SENTINEL),
)
_REASON = re.compile(r"(?:ConfigError|EngineUnavailable): (.+)$")
_UNLOADING = "All models are stopped, unloading models"
# It was seen once, between a stub and Triton at their first message.
_BY_CHANCE = "boost::interprocess::lock_exception"
_ENGINE_PHASE = re.compile(r"everbatch\.supervisor: engine: (.+)$")
_ENGINE_READY = re.compile(r"everbatch\.engine: ready in ")
_REMARK = re.compile(r"everbatch\.supervisor: remark: (.+)$")


def tail(path: Path) -> list[str]:
    """The last lines of the log; empty when there is none yet."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return [plain(line) for line in file.read().decode(errors="replace").splitlines()]


def plain(line: str) -> str:
    """A line as it is with --log-format text."""
    if not line.startswith('{"time"'):
        return line
    try:
        fields = json.loads(line)
        return f"{fields['time']} {fields['process']} {fields['level']} {fields['logger']}: {fields['message']}"
    except (ValueError, KeyError, TypeError):  # It is none of ours, or was cut.
        return line


def telling_lines(lines: list[str], limit: int = 30) -> list[str]:
    """The last `limit` lines that are no noise; escaped line breaks of Triton's messages are cut off."""
    kept = [line for line in lines if line.strip() and not any(pattern.search(line) for pattern in _NOISE)]
    return [line.split("\\n\\nAt:")[0][:400] for line in kept][-limit:]


def is_unloading(lines: list[str]) -> bool:
    """True if the server has said that all its requests are over and it only unloads its models now."""
    return any(_UNLOADING in line for line in lines)


def reason(lines: list[str]) -> str | None:
    """The one sentence with which the engine refused to start, if it did."""
    found = (match.group(1).strip() for line in lines if (match := _REASON.search(line.split("\\n\\nAt:")[0])))
    return next(found, None)


def died_by_chance(lines: list[str]) -> bool:
    """True if the server died of something that does not come again when it is started again."""
    return any(_BY_CHANCE in line for line in lines)


def engine_is_ready(lines: list[str]) -> bool:
    """True if the engine process has said that it serves."""
    return any(_ENGINE_READY.search(plain(line)) for line in lines)


def engine_phase(lines: list[str]) -> str | None:
    """The engine process's last status line about its start, for example `loading torch`."""
    found = (match.group(1).strip() for line in reversed(lines) if (match := _ENGINE_PHASE.search(line)))
    return next(found, None)


def remarks(lines: list[str]) -> list[str]:
    """Remarks of the engine process about how the model runs."""
    return list(dict.fromkeys(match.group(1).strip() for line in lines if (match := _REMARK.search(line))))
