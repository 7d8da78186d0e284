"""What a run leaves out, and its slowest files, told at its end. Registered by tests/conftest.py.

A test is slow when its id begins with a line of SLOW or it carries the mark itself; a quick run leaves it out. Its limit is
3 minutes on two idle cores: measure with `./everbatch test --quick` after adding to it. What NIGHT names neither a quick run
nor a full one has. Of tests with many cases every run has a sample (tests/samples.py).
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.real.weights import NO_REGISTRY
from tests.samples import EVERY, left_of_samples, sampled, wants_all

SLOW = {
    "tests/e2e/": "real tritonservers",
    "tests/hostile/": "real tritonservers under fire",
    "tests/mutants/": "planted bugs, a run of pytest each",
    "tests/benchmarks/": "the benchmarks' own tests",
    "tests/engine/test_session_memory.py": "thousands of sessions",
    "tests/executor/test_watchdog.py": "waits for limits of silence",
    "tests/gateway/test_leaving.py": "a gateway process, and clients that leave it",
    "tests/gateway/test_limits.py": "waits for time limits",
    "tests/gateway/test_page_batch.py": "a browser",
    "tests/gateway/test_page_browser.py": "a browser",
    "tests/gateway/test_openapi.py": "requests made from the gateway's own page",
    "tests/gpu/": "whole models on a GPU",
    "tests/kernels/interpreted/": "GPU kernels in Triton's interpreter",
    "tests/kernels/compiled/": "GPU kernels, compiled offline",
    "tests/kernels/test_triton_compiled.py": "GPU kernels, compiled offline",
    "tests/kernels/test_triton_engines.py": "whole models on GPU kernels in Triton's interpreter",
    "tests/kernels/test_triton_interpreted.py": "GPU kernels in Triton's interpreter",
    "tests/llm/test_docs.py": "whole models, a process each",
    "tests/llm/test_engine_process.py": "engine processes",
    "tests/model/test_session_memory.py": "thousands of sessions of a real engine process",
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
    "tests/ranks/test_formats.py": "whole models, quantised",
    "tests/real/": "published weights",
    "tests/sampling/test_native_invariance.py": "native kernels in many batches",
    "tests/simulation/server/": "lives of a whole server",
    "tests/simulation/test_mutants.py": "planted bugs, thousands of schedules each",
    "tests/text/test_text_detokenizer.py": "thousands of random sequences",
    "tests/tooling/test_checkers.py::test_mypy": "mypy over every room",
    "tests/trtllm/test_engine_process.py": "engine processes",
    "tests/trtllm/test_examples.py": "programs that load torch",
    "tests/weight_formats/test_four_bit_models.py": "whole models, quantised",
    "tests/weight_formats/test_quality.py": "whole models, quantised",
}  # beginning of a test's id: why it is slow
NIGHT = {
    "tests/kernels/test_triton_compiled.py": "GPU kernels, compiled offline for five architectures",
    "tests/native/test_sanitized.py": "native kernels under AddressSanitizer",
}  # place: why only a run with EVERBATCH_EVERY=1 has it, or one that names it
SHOWN = 15  # files
MEASURED = "everbatch/seconds"  # in pytest's cache: the seconds of each file in the latest run


def why_slow(item: pytest.Item) -> str | None:
    """The reason that a quick run leaves a test out, or None."""
    for beginning, reason in SLOW.items():
        if item.nodeid.startswith(beginning):
            return reason
    mark = item.get_closest_marker("slow")
    return None if mark is None else str(mark.args[0] if mark.args else "marked slow")


class Quick:
    """Marks what is slow and runs it first, or in a quick run leaves it out; samples cases; says at the end what was left out."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.left_out: dict[str, int] = defaultdict(int)  # number of tests by "directory or file (reason)"

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """What a run leaves out is not imported, unless it is asked for by name."""
        if not collection_path.is_relative_to(config.rootpath):
            return None
        left = (NIGHT if EVERY not in os.environ else {}) | (SLOW if self.quick else {})
        path = collection_path.relative_to(config.rootpath).as_posix()
        place = next((name for name in left if path in (name, name.rstrip("/"))), None)
        if place is None or any(argument.startswith(place.rstrip("/")) for argument in config.args):
            return None
        self.left_out[f"{place} ({left[place]})"] = 0
        return True

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        slow: list[pytest.Item] = []
        for item in items:
            if (reason := why_slow(item)) is not None:
                slow.append(item)
                item.add_marker(pytest.mark.slow(reason))
                if self.quick:
                    self.left_out[f"{_place(item.nodeid)} ({reason})"] += 1
        kept = [item for item in items if item.get_closest_marker("slow") is None]
        run = (
            kept if self.quick else slow + kept
        )  # what is slow first: with several workers no long file is left for the end
        left = set() if wants_all(config) else set(left_of_samples(run, self.quick))
        for item in left:
            self.left_out[f"cases of {sampled(item.nodeid)}"] += 1
        items[:] = [item for item in run if item not in left]
        config.hook.pytest_deselected(items=[*(slow if self.quick else ()), *left])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # this is a worker of pytest-xdist, and another process tells
            session.config.workeroutput["left_out"] = dict(self.left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Each worker has collected all tests, so that each says the same."""
        self.left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        if without := sum(NO_REGISTRY in str(report.longrepr) for report in skipped):
            self.left_out[f"tests/real/ ({NO_REGISTRY})"] = without
        if not self.left_out:
            return
        terminalreporter.section("left out")
        for place, number in self.left_out.items():
            terminalreporter.write_line(f"left out: {place}" + (f", {number} tests" if number else ""))
        terminalreporter.write_line(f"{EVERY}=1 ./everbatch test runs all")


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
        if (cache := getattr(terminalreporter.config, "cache", None)) is not None:
            cache.set(MEASURED, {name: round(seconds, 1) for name, seconds in slowest(self.seconds, len(self.seconds))})
        total = sum(self.seconds.values())
        terminalreporter.section(f"slowest files, of {len(self.seconds)} with {total:.0f} s")
        for name, seconds in slowest(self.seconds):
            terminalreporter.write_line(f"{seconds:8.1f} s  {name}")


def slowest(seconds: dict[str, float], most: int = SHOWN) -> list[tuple[str, float]]:
    """The files with the most seconds, the slowest first."""
    return sorted(seconds.items(), key=lambda entry: -entry[1])[:most]
