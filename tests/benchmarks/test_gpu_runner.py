"""`python -m benchmarks.gpu`: what becomes of a row that is right, wrong, broken or late; the device's clock is a fake."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Never, Self

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import report, runner, timing
from benchmarks.gpu.case import Case, Peer, near
from benchmarks.gpu.engine import rows as engine_rows
from benchmarks.gpu.goals import Goal, Record, at_most_us, of_floor, than_peer, than_row, times_floor, verdict
from benchmarks.gpu.results import Results
from benchmarks.gpu.timing import Timing

CPU = torch.device("cpu")
MACHINE = {"name": "a fake", "copy_bytes_s": 1e12, "bf16_flop_s": 1e14}


def double(x: Tensor) -> Tensor:
    return 2 * x


def raises(x: Tensor) -> Never:
    raise ValueError("it cannot be had\nfor a reason")


def make_case(name: str = "row", run: Callable[[Tensor], object] = double, **fields: Any) -> Case:
    given = dict(number=1, make=lambda random: random.normal(100), check=lambda x, out: near(out, 2 * x), bytes=10**6)
    return Case(name=name, run=run, **given | fields)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "wake", lambda device: None)
    monkeypatch.setattr(runner, "time_calls", lambda run, copies: Timing(3.0 if run is double else 6.0, "graph"))
    monkeypatch.setattr(runner, "_let_go", lambda name, device: None)


def run(tmp_path: Path, *cases: Case, minutes: float = 5.0) -> dict[str, Record]:
    results = Results(tmp_path)
    name = results.begin(MACHINE, time.time())
    runner.run_cases(cases, results, name, MACHINE, CPU, runner.Budget(time.time(), minutes), lambda text: None)
    return Results(tmp_path).rows


def test_a_right_row_has_its_time_its_floor_and_its_peers(tmp_path: Path) -> None:
    peers = (Peer("slow", lambda x: x + x), Peer("broken", raises), Peer("unmade", double, raises))
    row = run(tmp_path, make_case(peers=peers))["row"]
    assert (row["status"], row["us"], row["floor_us"], row["copies"]) == ("measured", 3.0, 1.0, 64)
    assert row["check"]["passed"] and row["check"]["limit"] == 1e-2
    reason = {"reason": "ValueError: it cannot be had"}
    assert row["peers"] == {"slow": {"us": 6.0, "how": "graph"}, "broken": reason, "unmade": reason}


def test_a_wrong_row_is_not_timed_and_a_broken_one_ends_nothing(tmp_path: Path) -> None:
    rows = run(tmp_path, make_case("wrong", run=lambda x: 3 * x), make_case("broken", run=raises), make_case("right"))
    assert rows["wrong"]["status"] == "failed" and "us" not in rows["wrong"]
    assert rows["wrong"]["reason"].startswith("wrong: error 5.0e-01, limit 1.0e-02")
    assert rows["broken"]["reason"] == "ValueError: it cannot be had"
    assert rows["right"]["status"] == "measured"


def test_rows_behind_the_budget_are_not_run_and_replace_nothing(tmp_path: Path) -> None:
    run(tmp_path, make_case("old"))
    rows = run(tmp_path, make_case("old"), make_case("new"), minutes=0.0)
    assert rows["old"]["status"] == "measured"
    assert rows["new"]["status"] == "not run" and rows["new"]["reason"] == "time"


def test_peers_are_left_out_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter((60.0, 0.5))
    monkeypatch.setattr(runner.Budget, "left", lambda self: next(left))
    row = run(tmp_path, make_case(peers=(Peer("slow", double),)))["row"]
    assert row["status"] == "measured" and row["peers"] == {"slow": {"reason": "time"}}


def test_the_file_is_written_before_the_next_row_and_names_a_row_that_was_killed(tmp_path: Path) -> None:
    def killed(x: Tensor) -> Never:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, make_case("first"), make_case("second", run=killed))
    rows = Results(tmp_path).rows
    assert rows["first"]["status"] == "measured"
    assert rows["second"]["status"] == "failed" and "was ended" in rows["second"]["reason"]


def test_rows_and_runs_that_are_no_more_are_forgotten(tmp_path: Path) -> None:
    run(tmp_path, make_case("kept"), make_case("gone"))
    results = Results(tmp_path)
    results.begin(MACHINE, 0.0)
    results.keep({"kept"})
    assert set(results.rows) == {"kept"} and len(results.runs) == 1


@pytest.mark.parametrize(
    "goal, us, expected",
    [
        (of_floor(0.5, 0.8), 10, "stretch"),
        (of_floor(0.5, 0.8), 16, "pass"),
        (of_floor(0.5), 16, "pass"),
        (of_floor(0.5), 16.1, "miss"),
        (times_floor(1.5), 12, "pass"),
        (times_floor(1.5), 12.1, "miss"),
        (at_most_us(2.5), 2.5, "pass"),
        (at_most_us(2.5), 2.6, "miss"),
        (than_peer("slow", 2), 50, "pass"),
        (than_peer("slow", 2), 51, "miss"),
        (than_peer("absent", 2), 1, "unknown"),
        (than_row("other", 0.9), 22, "pass"),
        (than_row("other", 0.9), 23, "miss"),
        (than_row("nothing", 1), 1, "unknown"),
    ],
)
def test_goals_are_judged(goal: Goal, us: float, expected: str) -> None:
    record = {"us": us, "floor_us": 8.0, "peers": {"slow": {"us": 100.0}, "absent": {"reason": "no"}}}
    assert verdict((goal,), record, {"other": {"us": 20.0}}) == expected


def test_of_several_goals_the_worst_counts() -> None:
    record = {"us": 10, "floor_us": 8.0, "peers": {}}
    assert verdict((of_floor(0.5, 0.8), at_most_us(9)), record, {}) == "miss"
    assert verdict((of_floor(0.5, 0.8), at_most_us(11)), record, {}) == "pass"
    assert verdict((), record, {}) == ""


def test_copies_are_enough_to_leave_the_cache_and_fit_the_device() -> None:
    assert timing.copies_for(1 << 20, is_warm=False) == 64
    assert timing.copies_for(100 << 20, is_warm=False) == 4
    assert timing.copies_for(10 << 30, is_warm=False) == 2
    assert timing.copies_for(1 << 20, is_warm=True) == 4


def test_bytes_of_inputs_count_a_memory_once() -> None:
    x = torch.zeros(10)
    assert runner.num_bytes((x, [x.view(2, 5), x[:3]], 7, None, (torch.zeros(1),))) == 44


def test_a_limit_in_time_ends_what_is_longer() -> None:
    with pytest.raises(TimeoutError, match="0.05 s"), timing.limited(0.05):
        time.sleep(5)
    with timing.limited(5):
        pass


def test_without_a_device_the_command_prints_the_tables_and_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    results = Results(tmp_path)
    name = results.begin(MACHINE, 0.0)
    peers = {"argmax": {"us": 160.0, "how": "launches"}}
    good = {"status": "measured", "us": 80.0, "how": "graph", "floor_us": 65.7, "peers": peers, "run": name}
    results.put("greedy B256 bf16", good)
    results.put("greedy B64 bf16", {"status": "failed", "reason": "ValueError: a | b", "run": name})
    assert command.main(["--results", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert (
        "There is no CUDA device here" in told and (tmp_path / "gpu.md").read_text() in told.partition("\n\n")[2] + "\n"
    )
    lines = {line.split(" | ")[1]: line for line in told.splitlines() if line.startswith("| ")}
    assert (
        "| 80 | 65.7 | 82% | <= 1.5 x floor | pass |" in lines["greedy B256 bf16"]
        and "argmax 160 (2.00x, launches)" in lines["greedy B256 bf16"]
    )
    assert "FAILED: ValueError: a / b" in lines["greedy B64 bf16"]
    assert lines["greedy B1 bf16"].count(report.UNMEASURED) == 2
    assert "1970-01-01 00:00:00 UTC, a fake" in told and (tmp_path / "gpu.png").is_file()
    assert set(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == {"greedy B256 bf16", "greedy B64 bf16"}


def test_a_run_measures_what_is_asked_for_and_the_next_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU that passes for a GPU, with two rows of the kernels and an engine that is a fake."""
    cases = [make_case("kernel one", importance=2), make_case("kernel two", importance=1)]
    order = []
    monkeypatch.setattr(command, "all_cases", lambda small: cases)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "device", lambda name: CPU)
    monkeypatch.setattr(command.machine, "measure", lambda device: MACHINE)

    def run_rows(
        rows: list[engine_rows.Row],
        results: Results,
        run: str,
        machine: Record,
        budget: runner.Budget,
        say: Callable[[str], None],
    ) -> None:
        for row in rows:
            order.append(row.name)
            results.put(row.name, {"status": "failed", "reason": "a fake", "run": run})

    monkeypatch.setattr(command.engine_rows, "run_rows", run_rows)
    arguments = ["--results", str(tmp_path), "--formats", "bf16"]
    assert command.main([*arguments, "--only", "one|B64"]) == 0
    assert order == ["engine bf16 B64"] and set(Results(tmp_path).rows) == {"kernel one", "engine bf16 B64"}
    assert command.main([*arguments, "--missing"]) == 0
    assert order[1:] == ["engine bf16 B1", "engine bf16 B256", "engine bf16 mixed"]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernel ")]
    assert told == ["kernel one: 3.0 us, 33% of floor", "kernel two: 3.0 us, 33% of floor"]
    assert command.main([*arguments, "--part", "kernels"]) == 0
    assert len(order) == 4 and capsys.readouterr().out.index("kernel two:") > 0


def test_a_device_that_is_lost_is_left_to_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> Never:
        raise runner.DeviceLost("kernel one: illegal address")

    started = []
    monkeypatch.setattr(command, "_measure", lost)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.os, "execv", lambda path, arguments: started.append(arguments))
    command.main(["--results", str(tmp_path), "--minutes", "2"])
    assert started[0][1:6] == ["-m", "benchmarks.gpu", "--results", str(tmp_path), "--minutes"]
    assert started[0][-1].startswith("--resumed=") and started[0][-2].startswith("--started=")


def test_a_new_process_goes_on_behind_the_rows_of_its_run() -> None:
    arguments = command._resumed(["--part", "kernels", "--started=1.0"], 60.0)
    assert arguments == ["--part", "kernels", "--started=60.0", "--resumed=1970-01-01 00:01:00"]
    options = command.read(arguments)
    assert command._is_done({"status": "failed", "run": "1970-01-01 00:01:05"}, options)
    assert not command._is_done({"status": "measured", "run": "1969-12-31 00:00:00"}, options)
    assert not command._is_done({"status": "not run", "run": "1970-01-01 00:01:05"}, options)
    missing = command.read(["--missing"])
    assert command._is_done({"status": "measured", "run": "1969-12-31 00:00:00"}, missing)


def test_options_are_read_without_a_library_and_wrong_ones_are_named(tmp_path: Path) -> None:
    options = command.read(["--results", str(tmp_path), "--minutes=2.5", "--small", "--only", "a=b"])
    assert (options.results, options.minutes, options.small, options.only) == (tmp_path, 2.5, True, "a=b")
    assert (options.part, options.missing, options.resumed) == ("all", False, "")
    for words, named in (
        (["--minuets", "2"], "--minuets is no option"),
        (["--minutes"], "--minutes is no option, or lacks its value"),
        (["--minutes", "soon"], "--minutes: could not convert"),
        (["--part", "some"], "--part is 'some'; choose from kernels, engine, all"),
    ):
        with pytest.raises(SystemExit, match=re.escape(named)):
            command.read(words)
    with pytest.raises(SystemExit) as ended:
        command.read(["--help"])
    assert ended.value.code == 0


class FakeDevice:
    """Stands in for torch.cuda: a call takes 10 microseconds."""

    def __init__(self, captures: bool = True) -> None:
        self.calls = 0
        self.captures = captures
        self.captured: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                pass

            def record(self) -> None:
                self.at = device.calls

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return 0.01 * (end.at - self.at)

        class Graph:
            def replay(self) -> None:
                device.calls += len(device.captured)

        class Context:
            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> Literal[False]:
                return False

        class Capture(Context):
            def __init__(self, graph: object, stream: object) -> None:
                pass

            def __enter__(self) -> Self:
                device.captured.clear()
                if not device.captures:
                    raise RuntimeError("operation not permitted when stream is capturing")

        class Stream:
            def wait_stream(self, other: object) -> None:
                pass

        for name, fake in dict(
            Event=Event, CUDAGraph=Graph, graph=Capture, Stream=Stream, current_stream=Stream,
            stream=lambda stream: Context(), synchronize=lambda: None,
        ).items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, fake)

    def run(self, copy: int) -> None:
        self.calls += 1
        self.captured.append(copy)


def test_a_graph_holds_every_copy_in_turn_and_its_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    device.install(monkeypatch)
    measured = timing.time_calls(device.run, [1, 2, 3, 4])
    assert measured.us == pytest.approx(10.0) and measured.how == "graph"
    assert device.captured == [1, 2, 3, 4] * 50  # 2 ms


def test_what_cannot_be_captured_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    device, released = FakeDevice(captures=False), []
    device.install(monkeypatch)
    monkeypatch.setattr(timing, "_release_generator", lambda: released.append(True))
    measured = timing.time_calls(device.run, [1, 2])
    assert measured.us == pytest.approx(10.0) and measured.how == "launches" and released == [True]
