"""The format of the log lines of models and engine."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from backend.api.processes.setup import VARIABLE, JsonLines
from deploy.server_log import plain

PROGRAM = """
import logging
from backend.api.processes.setup import set_up_logging
set_up_logging("some_model")
log = logging.getLogger("everbatch.serving")
log.warning("it took %d s", 3, extra={"fields": {"tokens": 7}})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("over\\ntwo lines")
"""


def said(log_format: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env={VARIABLE: log_format}
    )
    assert not done.stdout
    return done.stderr.splitlines()


def test_a_json_line_is_one_object_with_the_fields_of_its_caller() -> None:
    first, second = map(json.loads, said("json"))
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "WARNING",
        "process": "some_model",
        "logger": "everbatch.serving",
        "message": "it took 3 s",
        "tokens": 7,
    }
    assert second["message"] == "over\ntwo lines" and "ZeroDivisionError" in second["exception"]


@pytest.mark.parametrize("log_format", ["text", ""])
def test_a_text_line_names_process_level_and_logger(log_format: str) -> None:
    assert said(log_format)[0].endswith(" some_model WARNING everbatch.serving: it took 3 s")


def test_what_the_launcher_reads_in_a_log_is_the_same_in_both_formats() -> None:
    record = logging.LogRecord("everbatch.supervisor", logging.INFO, "", 0, "engine: loading torch", None, None)
    line = plain(JsonLines("tensorrt_llm").format(record))
    assert line.endswith(" tensorrt_llm INFO everbatch.supervisor: engine: loading torch")
    for other in ("I1122 text of Triton's", '{"time": "cut', '{"time": "no fields"}'):
        assert plain(other) == other
