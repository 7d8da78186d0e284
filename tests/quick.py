"""What `--quick` leaves out, and the slowest files of a run, told at its end. Registered by tests/conftest.py.

A test is slow when its id begins with a line of SLOW or it carries the mark itself. The limit of a quick run is 4 minutes
on two idle cores: measure with `./everbatch test --quick` after adding to it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

SLOW = {
    "tests/e2e/": "real tritonservers",
    "tests/hostile/": "real tritonservers under fire",
    "tests/mutants/": "planted bugs, a pytest process each",
    "tests/benchmarks/": "the benchmarks' own tests",
    "tests/engine/test_session_memory.py": "thousands of sessions",
    "tests/executor/test_watchdog.py": "waits for limits of silence",
    "tests/gateway/test_leaving.py": "a gateway process, and clients that leave it",
    "tests/gateway/test_limits.py": "waits for time limits",
    "tests/gateway/test_openapi.py": "requests made from the gateway's own page",
    "tests/gpu/": "whole models on a GPU",
    "tests/kernels/interpreted/": "GPU kernels in Triton's interpreter",
    "tests/kernels/compiled/": "GPU kernels, compiled offline",
    "tests/kernels/test_triton_compiled.py": "GPU kernels, compiled offline",
    "tests/kernels/test_triton_engines.py": "whole models on GPU kernels in Triton's interpreter",
    "tests/kernels/test_triton_interpreted.py": "GPU kernels in Triton's interpreter",
    "tests/llm/test_docs.py": "whole models, a process each",
    "tests/llm/test_engine_process.py": "engine processes",
    "tests/model/test_graphs.py": "GPU kernels in Triton's interpreter",
    "tests/native/test_build.py": "native kernels, compiled again and again",
    "tests/native/test_decoder.py": "native steps in every variant (parity keeps the usual one)",
    "tests/native/test_engine_invariance.py": "native kernels through the engine, in many batches",
    "tests/native/test_invariance.py": "native kernels in many batches",
    "tests/native/test_sanitized.py": "native kernels under AddressSanitizer",
    "tests/native/test_team.py": "native threads under ThreadSanitizer",
    "tests/parity/test_beams.py": "whole models, searches beside transformers'",
    "tests/parity/test_quantised_kv.py": "whole models, with and without eviction",
    "tests/quant/test_command.py": "whole models, quantised",
    "tests/quant/test_run.py": "whole models, quantised",
    "tests/quant/test_quality.py": "whole models, quantised",
    "tests/sampling/test_native_invariance.py": "native kernels in many batches",
    "tests/simulation/test_mutants.py": "planted bugs, thousands of schedules each",
    "tests/text/test_text_detokenizer.py": "thousands of random sequences",
    "tests/tooling/test_checkers.py::test_mypy": "mypy over every room",
    "tests/trtllm/test_engine_process.py": "engine processes",
    "tests/trtllm/test_examples.py": "programs that load torch",
    "tests/weight_formats/test_four_bit_models.py": "whole models, quantised",
    "tests/weight_formats/test_quality.py": "whole models, quantised",
}  # beginning of a test's id: why it is slow
SHOWN = 15  # files


def why_slow(item: pytest.Item) -> str | None:
    """The reason that a quick run leaves a test out, or None."""
    for beginning, reason in SLOW.items():
        if item.nodeid.startswith(beginning):
            return reason
    mark = item.get_closest_marker("slow")
    return None if mark is None else str(mark.args[0] if mark.args else "marked slow")


class Quick:
    """Marks what is slow and runs it first; in a quick run leaves it out, and says at the end what that was."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.left_out: dict[str, int] = defaultdict(int)  # number of tests by "directory or file (reason)"

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept: list[pytest.Item] = []
        slow: list[pytest.Item] = []
        for item in items:
            reason = why_slow(item)
            (kept if reason is None else slow).append(item)
            if reason is not None:
                item.add_marker(pytest.mark.slow(reason))
                self.left_out[f"{_place(item.nodeid)} ({reason})"] += 1
        if self.quick and slow:
            items[:] = kept
            config.hook.pytest_deselected(items=slow)
        else:
            items[:] = slow + kept  # with several workers no long file is left for the end

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # this is a worker of pytest-xdist, and another process tells
            session.config.workeroutput["left_out"] = dict(self.left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Each worker has collected all tests, so that each says the same."""
        self.left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.quick or not self.left_out:
            return
        terminalreporter.section("left out by --quick")
        for place, number in self.left_out.items():
            terminalreporter.write_line(f"left out: {place}, {number} tests")


def _place(nodeid: str) -> str:
    """The place that SLOW names, or the file."""
    return next((name for name in SLOW if nodeid.startswith(name)), nodeid.split("::", 1)[0])


class Slowest:
    """Adds up the seconds of each file's tests, set-up and tear-down included, and shows the greatest sums."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.split("::", 1)[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.seconds) < 2:
            return
        total = sum(self.seconds.values())
        terminalreporter.section(f"slowest files, of {len(self.seconds)} with {total:.0f} s")
        for name, seconds in slowest(self.seconds):
            terminalreporter.write_line(f"{seconds:8.1f} s  {name}")


def slowest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """The SHOWN files with the most seconds, the slowest first."""
    return sorted(seconds.items(), key=lambda entry: -entry[1])[:SHOWN]
