"""The GPU tests without pytest: `python -m tests.gpu [PART OF A NAME]`.

--first runs only the first case of each test, --slice=2/4 every fourth from the second on: most of the time is compilation, so
several processes end sooner.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

try:
    import torch
except ModuleNotFoundError:
    sys.exit("torch is missing in this Python; use .venv/bin/python -m tests.gpu, or one that has torch and triton")

from tests.gpu.harness import DEVICE, REASON


def main(arguments: list[str]) -> int:
    if REASON:
        print(f"skipped: {REASON}")
        return 0
    part, of = _slice(arguments)
    wanted = [argument for argument in arguments if not argument.startswith("--")]
    passed = failed = 0
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.gpu.{path.stem}")
        for name, function in vars(module).items():
            if not name.startswith("test_") or not all(part in f"{path.stem}::{name}" for part in wanted):
                continue
            began, before = time.monotonic(), failed
            for given in islice(_cases(function, "--first" in arguments), part - 1, None, of):
                ok = _passes(function, given, f"{path.stem}::{name}")
                passed, failed = passed + ok, failed + (not ok)
            told = "ok" if failed == before else "FAILED"
            print(f"{told:6} {time.monotonic() - began:6.1f} s  {path.stem}::{name}", flush=True)
    print(f"{passed} passed, {failed} failed on {DEVICE}")
    return 1 if failed else 0


def _slice(arguments: list[str]) -> tuple[int, int]:
    given = next((argument for argument in arguments if argument.startswith("--slice=")), "--slice=1/1")
    part, of = given.removeprefix("--slice=").split("/")
    return int(part), int(of)


def _cases(function: Callable[..., None], first_only: bool) -> Iterator[dict[str, Any]]:
    """What `each` has given the function: every combination."""
    axes = []
    for names, values in getattr(function, "given", []):
        keys = [name.strip() for name in names.split(",")]
        rows = [dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values]
        axes.append(rows[:1] if first_only else rows)
    for combination in product(*axes):
        yield {key: value for part in combination for key, value in part.items()}


def _passes(function: Callable[..., None], given: dict[str, Any], name: str) -> bool:
    try:
        function(**given)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    except Exception:  # AssertionError is one
        print(f"\n{name} {given}\n{traceback.format_exc(limit=-3)}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
