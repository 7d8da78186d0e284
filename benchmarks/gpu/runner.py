"""Runs rows of the kernels' table: the result against the reference, the time, the peers' time. A failure is a row's result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Peer, Random
from benchmarks.gpu.goals import Record
from benchmarks.gpu.machine import floor_us, wake
from benchmarks.gpu.results import FAILED, MEASURED, NOT_RUN, Results
from benchmarks.gpu.timing import copies_for, limited, time_calls

PEER_LIMIT_S, COMPILED_PEER_LIMIT_S = 20.0, 60.0
MIN_LEFT_S = 10.0  # no row is begun with less


class DeviceLost(Exception):
    """The device answers no more, as after an illegal address: this process can measure nothing else."""


class Budget:
    """Seconds that a run may take, counted from a moment."""

    def __init__(self, started: float, minutes: float) -> None:
        self._end = started + 60 * minutes

    def left(self) -> float:
        return self._end - time.time()


def run_cases(
    cases: Iterable[Case],
    results: Results,
    run: str,
    machine: Record,
    device: torch.device,
    budget: Budget,
    say: Callable[[str], None],
) -> None:
    """Raises DeviceLost after the row that it happened in."""
    for case in cases:
        if budget.left() < MIN_LEFT_S:
            results.put(case.name, {"run": run, "status": NOT_RUN, "reason": "time"})
            continue
        results.enter([case.name], run)
        record = _measured(case, machine, device, budget)
        results.put(case.name, {"run": run} | record)
        say(f"{case.name}: {_told(record)}")
        _let_go(case.name, device)


def check_case(case: Case, device: torch.device) -> Record:
    """One copy, run once and compared: no times."""
    inputs = case.make(Random(device, 0))
    check = case.check(inputs, case.run(inputs))
    return {"error": check.error, "limit": check.limit, "passed": check.passed}


def _measured(case: Case, machine: Record, device: torch.device, budget: Budget) -> Record:
    record: Record = {"status": FAILED, "floor_us": floor_us(machine, case.bytes, case.flops, case.rate), "peers": {}}
    try:
        first = case.make(Random(device, 0))
        check = case.check(first, case.run(first))
        record["check"] = {"error": check.error, "limit": check.limit, "passed": check.passed}
        if not check.passed:
            return record | {"reason": f"wrong: error {check.error:.1e}, limit {check.limit:.1e}"}
        count = copies_for(num_bytes(first), case.is_warm)
        copies = [first, *(case.make(Random(device, seed)) for seed in range(1, count))]
        for copy in copies[1:]:
            case.run(copy)
        wake(device)
        record["us"], record["how"] = time_calls(case.run, copies)
        record["copies"] = count
        record["status"] = MEASURED
    except Exception as error:  # whatever it is, the next row may do
        return record | {"reason": reason_of(error)}
    for peer in case.peers:
        limit = min(budget.left(), COMPILED_PEER_LIMIT_S if peer.compiles else PEER_LIMIT_S)
        record["peers"][peer.name] = _peer(peer, copies, device, limit) if limit > 1 else {"reason": "time"}
    return record


def _peer(peer: Peer, copies: list[Any], device: torch.device, limit_s: float) -> Record:
    try:
        with limited(limit_s):
            given = [peer.make(copy) for copy in copies]
            for each in given:
                peer.run(each)
            wake(device)
            timing = time_calls(peer.run, given)
        return {"us": timing.us, "how": timing.how}
    except Exception as error:
        return {"reason": reason_of(error)}


def _let_go(name: str, device: torch.device) -> None:
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLost(f"{name}: {reason_of(error)}") from None


def reason_of(error: BaseException) -> str:
    """The kind of an error, and its first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def num_bytes(inputs: Any) -> int:
    """Bytes of all tensors within tuples and lists; memory that several share counts once."""
    return sum(
        {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(inputs)}.values()
    )


def _tensors(inputs: Any) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    return [tensor for part in inputs for tensor in _tensors(part)] if isinstance(inputs, (tuple, list)) else []


def _told(record: Record) -> str:
    if record["status"] != MEASURED:
        return f"failed, {record['reason']}"
    return f"{record['us']:.1f} us, {record['floor_us'] / record['us']:.0%} of floor"
