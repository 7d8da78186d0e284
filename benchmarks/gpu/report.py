"""The tables of results, as Markdown; a picture where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.gpu.case import Case
from benchmarks.gpu.goals import Record, verdict
from benchmarks.gpu.machine import NOMINAL, floor_us
from benchmarks.gpu.results import FAILED, MEASURED, NOT_RUN, Results

UNMEASURED = "not measured"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kernels_table(cases: Sequence[Case], results: Results) -> str:
    head = (
        "#",
        "kernel and shape",
        "time us",
        "floor us",
        "of floor",
        "goal (/ stretch)",
        "result",
        "error",
        "peers, us (their time / ours)",
    )
    ordered = sorted(cases, key=lambda case: case.number or 99)
    return table(head, [_kernel_row(case, results) for case in ordered])


def _kernel_row(case: Case, results: Results) -> list[str]:
    record = results.rows.get(case.name, {})
    floor = floor_us(results.machine_of(case.name), case.bytes, case.flops, case.rate)
    goal = ", ".join(goal.text for goal in case.goals) or "-"
    start = [str(case.number or "-"), case.name]
    if record.get("status") != MEASURED:
        return [
            *start,
            UNMEASURED,
            us(floor),
            "",
            goal,
            why(record),
            _error(record),
            ", ".join(peer.name for peer in case.peers),
        ]
    time = us(record["us"]) + ("" if record["how"] == "graph" else " (launches)")
    result = verdict(case.goals, record | {"floor_us": floor}, results.rows) or "-"
    return [*start, time, us(floor), f"{floor / record['us']:.0%}", goal, result, _error(record), _peers(record)]


def why(record: Record) -> str:
    """What stands in the place of a result."""
    if record.get("status") == FAILED:
        return f"FAILED: {record['reason']}".replace("|", "/")
    return f"not run: {record['reason']}".replace("|", "/") if record.get("status") == NOT_RUN else UNMEASURED


def _error(record: Record) -> str:
    check = record.get("check")
    return f"{check['error']:.1e} (<= {check['limit']:.0e})" if check else ""


def _peers(record: Record) -> str:
    told = []
    for name, peer in record["peers"].items():
        if "us" in peer:
            how = "" if peer["how"] == "graph" else ", launches"
            told.append(f"{name} {us(peer['us'])} ({peer['us'] / record['us']:.2f}x{how})")
        else:
            told.append(f"{name} n/a: {peer['reason']}".replace("|", "/"))
    return "; ".join(told)


def us(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def machines_told(results: Results) -> str:
    if not results.runs:
        return (
            f"Nothing has been measured yet. Floors are those of one H200 as planned: "
            f"copy {NOMINAL['copy_bytes_s'] / 1e12:.1f} TB/s, bf16 {NOMINAL['bf16_flop_s'] / 1e12:.0f} TFLOP/s."
        )
    return "\n".join(_machine_told(name, machine) for name, machine in sorted(results.runs.items()))


def _machine_told(name: str, machine: Record) -> str:
    versions = ", ".join(
        f"{key} {machine[key]}" for key in ("python", "torch", "cuda", "triton", "msgspec") if key in machine
    )
    return (
        f"- {name} UTC, {machine['name']}: copy {machine['copy_bytes_s'] / 1e12:.2f} TB/s, "
        f"bf16 products {machine['bf16_flop_s'] / 1e12:.0f} TFLOP/s; {versions}"
    )


def write(directory: Path, text: str, cases: Sequence[Case], results: Results, say: Callable[[str], None]) -> None:
    """gpu.md, and gpu.png where there is something to draw and matplotlib to draw it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "gpu.md").write_text(text + "\n")
    measured = [case for case in cases if results.status(case.name) == MEASURED]
    if not measured:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(10, 2 + 0.17 * len(measured)), layout="tight")
    axes = figure.add_subplot()
    rows = [results.rows[case.name] for case in measured]
    axes.barh([case.name for case in measured], [100 * row["floor_us"] / row["us"] for row in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("% of the floor: measured copy bandwidth or bf16 rate")
    figure.savefig(directory / "gpu.png", dpi=110)
