"""`bench scheduling` runs: its device without a model is a WorkerGroup like any other."""

from __future__ import annotations

import inspect

from backend.core.step import WorkerGroup
from benchmarks.scheduling import NullDevice, run_core


def test_the_device_has_all_that_a_worker_group_has() -> None:
    wanted = {name for name, value in inspect.getmembers(WorkerGroup, callable) if not name.startswith("_")}
    assert wanted and wanted <= set(dir(NullDevice))


def test_steps_are_measured() -> None:
    assert len(run_core(2, 3, 2, is_cold=False).per_step_ms(0)) == 1
