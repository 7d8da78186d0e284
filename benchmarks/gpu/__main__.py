"""Measures every kernel and the whole engine on a GPU, beside what bounds them and beside torch's own.

    python -m benchmarks.gpu                     on a GPU: measures, as far as the minutes go; elsewhere: prints what is known
    python -m benchmarks.gpu --missing           only rows without a result: repeat it until none is left

    --part kernels|engine|all      all: important kernels, the engine, other kernels
    --formats bf16,w4a8kv4         of the engine's weights and KV
    --minutes 9                    no row is begun later
    --only REGEX                   rows whose name has a match
    --missing                      leave alone rows that have a result, or failed
    --small                        tiny shapes on a CPU; kernels need TRITON_INTERPRET=1
    --results DIR                  directory of gpu.json, gpu.md, gpu.png

It needs Python 3.12, torch, triton, transformers and numpy, nothing else: hence no library for command lines.
Rows are run in the order of their importance, the file of results is written after each and merged with what is there,
so runs of ten minutes add up. On an H200 all kernels take about five minutes, the engine 35 seconds for each of --formats.
A row that fails says why; one that takes the device with it is noted, and a new process goes on behind it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_type_hints

try:
    import torch
except ModuleNotFoundError:
    sys.exit(
        "torch is missing in this Python; use .venv/bin/python -m benchmarks.gpu, or one that has torch and triton"
    )

from benchmarks.gpu import machine, report
from benchmarks.gpu.case import Case
from benchmarks.gpu.cases import all_cases
from benchmarks.gpu.engine import rows as engine_rows
from benchmarks.gpu.goals import Record
from benchmarks.gpu.results import FAILED, MEASURED, Results
from benchmarks.gpu.runner import Budget, DeviceLost, check_case, reason_of, run_cases

DIRECTORY = Path(__file__).parents[1] / "results"
PARTS = ("kernels", "engine", "all")


class Options(NamedTuple):
    """`started`, `resumed`: of a process that goes on where another one had to stop."""

    part: str = "all"
    formats: str = ",".join(engine_rows.FORMATS)
    minutes: float = 9.0
    only: str = ""
    missing: bool = False
    small: bool = False
    results: Path = DIRECTORY
    started: float = 0.0
    resumed: str = ""


def main(arguments: Sequence[str]) -> int:
    options = read(arguments)
    options = options._replace(started=options.started or time.time())
    cases = [case for case in all_cases(options.small) if re.search(options.only, case.name)]
    rows = [row for row in engine_rows.all_rows(options.formats) if re.search(options.only, row.name)]
    if options.small:
        return _small(cases if options.part != "engine" else [], rows if options.part != "kernels" else [])
    results = Results(options.results)
    try:
        if torch.cuda.is_available():
            _measure(options, cases, rows, results)
        else:
            say("There is no CUDA device here: nothing is measured.\n")
    except DeviceLost as lost:
        say(f"the device is lost: {lost}; a new process goes on")
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *_resumed(arguments, options.started)])
    _finish(options, results)
    return 0


def _measure(options: Options, cases: list[Case], rows: list[engine_rows.Row], results: Results) -> None:
    budget = Budget(options.started, options.minutes)
    device = torch.device("cuda")
    found = machine.measure(device)
    run = results.begin(found, time.time())
    say(
        f"{found['name']}: copy {found['copy_bytes_s'] / 1e12:.2f} TB/s, bf16 {found['bf16_flop_s'] / 1e12:.0f} TFLOP/s"
    )
    done = {name for name, record in results.rows.items() if _is_done(record, options)}
    cases = [case for case in cases if case.name not in done] if options.part != "engine" else []
    rows = [row for row in rows if row.name not in done] if options.part != "kernels" else []
    first = [case for case in cases if case.importance == 1] if rows else cases
    rest = [case for case in cases if case not in first]
    run_cases(first, results, run, found, device, budget, say)
    engine_rows.run_rows(rows, results, run, found, budget, say)
    run_cases(rest, results, run, found, device, budget, say)


def _is_done(record: Record, options: Options) -> bool:
    """Whether this run leaves the row as it is."""
    finished = record["status"] in (MEASURED, FAILED)
    return finished and (options.missing or (options.resumed and record["run"] >= options.resumed))


def _resumed(arguments: Sequence[str], started: float) -> list[str]:
    """This command for a process that goes on where this one had to stop."""
    kept = [text for text in arguments if not text.startswith(("--started=", "--resumed="))]
    name = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(started))
    return [*kept, f"--started={started}", f"--resumed={name}"]


def _finish(options: Options, results: Results) -> None:
    cases, rows = all_cases(False), engine_rows.all_rows(",".join(engine_rows.FORMATS))
    results.keep({case.name for case in cases} | {row.name for row in rows})
    results.save()
    text = tables(cases, rows, results)
    say(text)
    if not torch.cuda.is_available():
        say("\nThere is no CUDA device here: nothing was measured.")
    report.write(options.results, text, cases, results, say)


def tables(cases: list[Case], rows: list[engine_rows.Row], results: Results) -> str:
    return "\n\n".join(
        (
            "# Kernels and engine on a GPU\n\nMade by `python -m benchmarks.gpu`.",
            report.machines_told(results),
            "## Kernels\n\nThe floor is what the bytes take at the measured copy bandwidth, or the operations at the measured "
            "rate of bf16 products (int8: twice that).",
            report.kernels_table(cases, results),
            "## Engine: decoding, shape of Llama-3-8B, context 1k",
            engine_rows.decode_table(rows, results),
            "## Engine: 64 running rows while prompts of 512 to 4096 tokens keep arriving",
            engine_rows.mixed_table(rows, results),
        )
    )


def _small(cases: list[Case], rows: list[engine_rows.Row]) -> int:
    """Everything at tiny shapes on a CPU: right or wrong, no times."""
    failed = 0
    for case in cases:
        try:
            check = check_case(case, torch.device("cpu"))
            failed += not check["passed"]
            told = f"error {check['error']:.1e} (<= {check['limit']:.0e}){'' if check['passed'] else ' WRONG'}"
        except Exception as error:  # a row's failure is its result
            failed += 1
            told = f"FAILED: {reason_of(error)}"
        say(f"{case.name}: {report.UNMEASURED}; {told}")
    for row in rows:
        record = engine_rows.run_small(row)
        failed += record["status"] == FAILED
        say(f"{row.name}: {report.UNMEASURED}; {record.get('reason', 'ran')}")
    return 1 if failed else 0


def read(arguments: Sequence[str]) -> Options:
    """`--name=value` or `--name value`, and `--name` alone for what is off by default. SystemExit for what is no option."""
    known, found = get_type_hints(Options), {}
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        name = words.pop(0).removeprefix("--")
        kind = known.get(name)
        if name == "help":
            say(str(__doc__))
            sys.exit(0)
        if kind is None or (kind is not bool and not words):
            sys.exit(f"--{name} is no option, or lacks its value; --help lists the options")
        try:
            found[name] = True if kind is bool else kind(words.pop(0))
        except ValueError as error:
            sys.exit(f"--{name}: {error}")
    if found.get("part", "all") not in PARTS:
        sys.exit(f"--part is {found['part']!r}; choose from {', '.join(PARTS)}")
    return Options(**found)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
