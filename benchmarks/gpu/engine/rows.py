"""The engine's rows: a format at a batch size, or under a mixed load. One engine serves all rows of a format."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from benchmarks.gpu import report, stand_in
from benchmarks.gpu.engine import roofline
from benchmarks.gpu.engine.weights import FORMATS, LLAMA_3_8B, SMALL, Shape
from benchmarks.gpu.goals import Record
from benchmarks.gpu.machine import NOMINAL
from benchmarks.gpu.results import FAILED, MEASURED, NOT_RUN, Results
from benchmarks.gpu.runner import Budget, DeviceLost, reason_of

if TYPE_CHECKING:
    from benchmarks.gpu.engine.drive import Engine

BATCHES = (64, 1, 256)  # batch sizes in the order in which they are run
CONTEXT = 1024
ENGINE_S, ROW_S = 60.0, 25.0  # expected times of loading and of a row; neither is begun with less time left

MAX_SMALL = 6  # rows of the tiny engine


class Row(NamedTuple):
    format: str
    batch: int  # 0: the mixed load

    @property
    def name(self) -> str:
        return f"engine {self.format} " + (f"B{self.batch}" if self.batch else "mixed")


def all_rows(formats: str) -> list[Row]:
    """The rows of formats separated by commas. Raises SystemExit for one that is not known."""
    names = [name for name in formats.split(",") if name]
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise SystemExit(f"--formats has {unknown[0]!r}; choose from {', '.join(FORMATS)}, separated by commas")
    return [Row(name, batch) for name in names for batch in (*BATCHES, 0)]


def run_rows(
    rows: list[Row], results: Results, run: str, machine: Record, budget: Budget, say: Callable[[str], None]
) -> None:
    """Raises DeviceLost after the row that it happened in."""
    for name, group in groupby(rows, lambda row: row.format):
        todo = list(group)
        if budget.left() < ENGINE_S:
            _put_all(todo, results, {"run": run, "status": NOT_RUN, "reason": "time"})
            continue
        results.enter([row.name for row in todo], run)
        say(f"engine {name}: loading")
        try:
            engine = _drive().Engine(LLAMA_3_8B, FORMATS[name], _drive().FULL, torch.device("cuda"))
        except Exception as error:  # a format that cannot be served is a result of its rows
            _put_all(todo, results, {"run": run, "status": FAILED, "reason": reason_of(error)})
            say(f"engine {name}: {reason_of(error)}")
        else:
            _run_format(engine, todo, results, run, machine, budget, say)
            engine.close()
            del engine
        gc.collect()
        _check_alive(name)
        torch.cuda.empty_cache()


def _run_format(
    engine: Engine,
    rows: list[Row],
    results: Results,
    run: str,
    machine: Record,
    budget: Budget,
    say: Callable[[str], None],
) -> None:
    for row in rows:
        if budget.left() < ROW_S:
            results.put(row.name, {"run": run, "status": NOT_RUN, "reason": "time"})
            continue
        results.enter([row.name], run)
        record = _measured(engine, row, machine, LLAMA_3_8B)
        results.put(row.name, {"run": run, "kernels": engine.core.model.kernels} | record)
        say(f"{row.name}: {_told(record)}")
        _check_alive(row.name)


def run_small(row: Row) -> Record:
    """Run a row's code with a tiny model on a CPU: no times. A format that is not served is not run, with the reason."""
    try:
        drive = _drive()
        engine = drive.Engine(SMALL, FORMATS[row.format], drive.SMALL, torch.device("cpu"), kernels="torch")
    except Exception as error:
        status = NOT_RUN if type(error).__name__ == "ConfigError" else FAILED
        return {"status": status, "reason": reason_of(error)}
    try:
        return _measured(engine, row._replace(batch=min(row.batch, MAX_SMALL)), NOMINAL, SMALL)
    finally:
        engine.close()


def _drive() -> ModuleType:
    """benchmarks.gpu.engine.drive, and with it the engine: imported when it is needed."""
    stand_in.install_where_missing()
    from benchmarks.gpu.engine import drive

    return drive


def _measured(engine: Engine, row: Row, machine: Record, shape: Shape) -> Record:
    try:
        if not row.batch:
            return {"status": MEASURED} | engine.mixed()._asdict()
        decoded = engine.decode(row.batch)
    except Exception as error:  # whatever it is, the next row may do
        return {"status": FAILED, "reason": reason_of(error)}
    floor = roofline.step_ms(machine, shape, FORMATS[row.format], row.batch, decoded.context)
    return {"status": MEASURED, "floor_ms": floor, "share": floor / decoded.step_ms} | decoded._asdict()


def _put_all(rows: list[Row], results: Results, record: Record) -> None:
    for row in rows:
        results.put(row.name, record)


def _check_alive(name: str) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(f"{name}: {reason_of(error)}") from None


def _told(record: Record) -> str:
    if record["status"] != MEASURED:
        return f"failed, {record['reason']}"
    if "share" in record:
        return (
            f"{record['tokens_s']:.0f} tokens/s, {record['share']:.0%} of the roofline, host {record['host_ms']:.2f} ms"
        )
    return f"p50 {record['p50_ms']:.1f} ms, p99 {record['p99_ms']:.1f} ms, prefill {record['prefill_tokens_s']:.0f} tokens/s"


def decode_table(rows: list[Row], results: Results) -> str:
    head = ("format", "batch", "floor ms", "roof tokens/s", "step ms", "tokens/s", "of roof", "goal", "result",
            "host ms", "host goal", "result")  # fmt: skip
    ordered = sorted((row for row in rows if row.batch), key=lambda row: (list(FORMATS).index(row.format), row.batch))
    return report.table(head, [_decode_row(row, results) for row in ordered])


def _decode_row(row: Row, results: Results) -> list[str]:
    record = results.rows.get(row.name, {})
    floor = roofline.step_ms(
        results.machine_of(row.name), LLAMA_3_8B, FORMATS[row.format], row.batch, record.get("context", CONTEXT)
    )
    least = roofline.ACCEPTED.get(row.format, {}).get(row.batch)
    goal = f">= {least:.0%} / {roofline.STRETCH:.0%}" if least else "-"
    start = [row.format, str(row.batch), f"{floor:.2f}", f"{1000 * row.batch / floor:.0f}"]
    host_goal = roofline.host_goal_ms(row.batch)
    asked = f"<= {host_goal:.2f}"
    if record.get("status") != MEASURED:
        return [
            *start,
            report.UNMEASURED,
            report.UNMEASURED,
            "",
            goal,
            report.why(record),
            report.UNMEASURED,
            asked,
            report.UNMEASURED,
        ]
    share = floor / record["step_ms"]
    return [
        *start, f"{record['step_ms']:.2f}", f"{record['tokens_s']:.0f}", f"{share:.0%}", goal,
        roofline.judge(row.format, row.batch, share), f"{record['host_ms']:.2f}", asked,
        "pass" if record["host_ms"] <= host_goal else "miss",
    ]  # fmt: skip


def mixed_table(rows: list[Row], results: Results) -> str:
    head = ("format", "between tokens p50 ms", "p99 ms", "prompt tokens/s", "generated tokens/s", "")
    return report.table(head, [_mixed_row(row, results) for row in rows if not row.batch])


def _mixed_row(row: Row, results: Results) -> list[str]:
    record = results.rows.get(row.name, {})
    if record.get("status") != MEASURED:
        return [row.format, *[report.UNMEASURED] * 4, "" if not record else report.why(record)]
    numbers = (
        f"{record['p50_ms']:.2f}",
        f"{record['p99_ms']:.2f}",
        f"{record['prefill_tokens_s']:.0f}",
        f"{record['decode_tokens_s']:.0f}",
    )
    return [row.format, *numbers, ""]
