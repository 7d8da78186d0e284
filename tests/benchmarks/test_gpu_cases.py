"""`python -m benchmarks.gpu`: every row of the kernels' table is run at a tiny shape, so that none can rot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.case import Case, Check, Random, int8_rows, near, same, within_ties, worst
from benchmarks.gpu.cases import all_cases
from benchmarks.gpu.machine import NOMINAL, floor_us
from kernels.int8_rows import Int8Rows, reference

ROOT = Path(__file__).parents[2]
FULL = {case.name: case for case in all_cases(False)}
TIMEOUT_S = 300  # 20 s on an idle machine


def test_the_tiny_rows_are_the_same_rows() -> None:
    assert [case.name for case in all_cases(True)] == list(FULL)


def test_every_numbered_kernel_has_a_row_and_important_rows_come_first() -> None:
    assert {case.number for case in FULL.values()} == {1, 2, 3, 4, *range(6, 16)}  # 5 is part of 3
    importance = [case.importance for case in FULL.values()]
    assert importance == sorted(importance) and importance[0] == 1


def leaves(out: Tensor | Sequence[Any]) -> list[tuple[Tensor, Callable[[Tensor], object]]]:
    """Every tensor of a result, and the result with another in its place."""
    if isinstance(out, Tensor):
        return [(out, lambda other: other)]
    found = []
    for index, part in enumerate(out):
        for tensor, within in leaves(part):

            def put(other: Tensor, index: int = index, within: Callable[[Tensor], object] = within) -> object:
                parts = [*out[:index], within(other), *out[index + 1 :]]
                return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)

            found.append((tensor, put))
    return found


@pytest.mark.parametrize("case", all_cases(True), ids=str)
def test_no_check_is_blind_to_a_part_of_the_result(case: Case) -> None:
    """Every tensor that a row returns, and the pool that it writes, is made wrong in turn."""
    inputs = case.make(Random(torch.device("cpu"), 0))
    out = case.run(inputs)
    assert case.check(inputs, out).passed and leaves(out)
    for tensor, put in leaves(out):
        wrong = tensor * 1.1 if tensor.is_floating_point() else tensor + 1
        assert not case.check(inputs, put(wrong)).passed
    if case.number == 3:
        for part in (part for part in inputs.pool[:3] if part is not None):
            before = part.clone()
            part.copy_(part * 1.1 if part.is_floating_point() else part + 1)
            assert not case.check(inputs, out).passed
            part.copy_(before)


# GPU only: row-wise scales; the packing of tinygemm. By shapes alone they were tried in torch's fake tensors.
GPU_PEERS = {"_scaled_mm fp8", "tinygemm int4"}


@pytest.mark.parametrize("case", all_cases(True), ids=str)
def test_peers_run_and_return_what_the_row_returns(case: Case) -> None:
    inputs = case.make(Random(torch.device("cpu"), 0))
    shapes = [tensor.shape for tensor, _ in leaves(case.run(inputs))]
    for peer in case.peers:
        if not peer.compiles and peer.name not in GPU_PEERS:
            out = peer.run(peer.make(inputs))
            if case.number in (8, 9, 10):
                assert out.shape == shapes[0]


@pytest.mark.timeout(TIMEOUT_S)
def test_every_row_is_right_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--part", "kernels"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = {line.partition(": not measured; error ")[0] for line in done.stdout.splitlines()}
    assert told == set(FULL)


@pytest.mark.parametrize(
    "name, microseconds",
    [
        ("decode attention bf16 B64 ctx 4k", 250),
        ("decode attention int8 B64 ctx 4k", 129),
        ("decode attention int4 B64 ctx 4k", 66),
        ("add + RMSNorm 8192 x 4096", 62),
        ("add + RMSNorm 256 x 4096", 2),
        ("SiLU gate 8192 x 14336", 164),
        ("SiLU gate 256 x 14336", 5.1),
        ("greedy B256 bf16", 15),
        ("greedy B256 fp32", 31),
        ("W4A16 gate_up M=1", 14.5),
        ("W8A8 gate_up M=1", 27.3),
        ("W8A8 gate_up M=256", 38),
        ("W4A8 g128 gate_up M=256", 38),
    ],
)
def test_floors_are_those_that_the_goals_were_made_with(name: str, microseconds: float) -> None:
    case = FULL[name]
    assert floor_us(NOMINAL, case.bytes, case.flops, case.rate) == pytest.approx(microseconds, rel=0.04)


def test_64_adapters_are_read_once_on_each_of_seven_projections() -> None:
    inputs_and_outputs = {"q": 8192, "k": 5120, "v": 5120, "o": 8192, "gate": 18432, "up": 18432, "down": 18432}
    adapters = 64 * 2 * 16 * sum(inputs_and_outputs.values())
    assert adapters < FULL["LoRA r16, a layer, B64, 64 adapters"].bytes < 1.1 * adapters
    assert FULL["LoRA r16, a layer, B64, no adapter"].bytes == 0


def test_8k_causal_tokens_are_half_a_teraflop() -> None:
    assert FULL["context attention bf16 8k causal, paged"].flops == pytest.approx(0.55e12, rel=0.01)


def test_near_is_relative_to_the_whole_and_refuses_nan_and_other_shapes() -> None:
    expected = torch.ones(100)
    measured = expected.bfloat16()
    measured[0] += 0.5
    assert near(measured, expected).error == pytest.approx(0.05)
    assert not near(measured, expected).passed and near(expected.bfloat16(), expected).passed
    assert not near(torch.full((100,), torch.nan), expected).passed
    assert not near(expected[:50], expected).passed
    assert near(torch.zeros(3), torch.zeros(3)).passed


def test_integers_may_differ_by_a_tie_where_that_is_said() -> None:
    expected = torch.arange(1000)
    measured = expected.clone()
    measured[7] += 1
    assert not same(measured, expected).passed and within_ties(measured, expected).passed
    measured[8] += 2
    assert not within_ties(measured, expected).passed
    assert not within_ties(expected + 1, expected).passed


def test_int8_rows_are_wrong_when_their_sums_are_of_other_integers() -> None:
    rows = reference(torch.randn(4, 300, generator=torch.Generator().manual_seed(0)))
    assert int8_rows(rows, rows).passed
    assert not int8_rows(Int8Rows(rows.q, rows.scale, rows.sums + 1), rows).passed
    assert not int8_rows(Int8Rows(rows.q, rows.scale * 1.1, rows.sums), rows).passed


def test_the_worst_check_is_the_one_that_fails() -> None:
    good, bad = Check(1e-3, 1e-2), Check(1e-3, 1e-4)
    assert worst(good, bad) is bad and worst(good, Check(0.0, 0.0)) is good
