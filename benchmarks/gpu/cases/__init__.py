"""The rows of the kernels' table. `small` keeps the names and shrinks the shapes, for Triton's interpreter."""

from __future__ import annotations

from benchmarks.gpu.case import Case
from benchmarks.gpu.cases import attention, context, experts, kv, linears, lora, norms, sampling, states


def all_cases(small: bool) -> list[Case]:
    """The rows in the order in which they are run: what matters most comes first."""
    modules = (attention, context, kv, norms, sampling, linears, experts, lora, states)
    cases = [case for module in modules for case in module.cases(small)]
    return sorted(cases, key=lambda case: case.importance)
