"""Times kernels with other tiles, to choose those of the tables in `kernels/`:

    python -m benchmarks.gpu.tune [REGEX]        cases whose name has a match; a line for each choice, the fastest first

Every choice is compiled and checked in processes beside each other first (Triton keeps what it compiled), then timed alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.gpu.case import Case, Random
from benchmarks.gpu.cases import all_cases
from benchmarks.gpu.machine import wake
from benchmarks.gpu.runner import check_case, num_bytes, reason_of
from benchmarks.gpu.timing import copies_for, time_calls
from kernels import decode_attention, merge_splits, w4a8, w4a16, w8a8
from kernels.common import attention_tiles, gemm_tiles

ARCHITECTURE = 90


class Choice(NamedTuple):
    name: str
    changes: tuple[tuple[Any, Any, Any], ...]  # (module or table, attribute or key, value)

    def applied(self) -> ExitStack:
        """A context in which the choice is in force."""
        stack = ExitStack()
        for owner, key, value in self.changes:
            made = patch.dict(owner, {key: value}) if isinstance(owner, dict) else patch.object(owner, key, value)
            stack.enter_context(made)
        return stack


def _product_choices(name: str) -> Iterator[Choice]:
    """Tiles, and with up to 256 rows the number of programs below which k is split."""
    m = int(name.rpartition("=")[2])
    table = (w4a16 if name.startswith("W4A16") else w4a8 if name.startswith("W4A8") else w8a8).TILES[ARCHITECTURE]
    bucket = next(each for each in table if each is None or m <= each)
    now = table[bucket]
    for block_m in sorted({now.block_m, 64, 128} if m > 64 else {now.block_m}):
        for block_n, num_warps, num_stages in (
            (64, 4, 3),
            (64, 4, 5),
            (64, 4, 8),
            (128, 4, 3),
            (128, 4, 5),
            (128, 8, 3),
            (128, 8, 5),
            (256, 8, 3),
        ):
            for programs in (1, 132, 264, 528) if m <= 256 else (1,):
                tiles = now._replace(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
                yield Choice(
                    f"{tuple(tiles)} programs {programs}", ((table, bucket, tiles), (gemm_tiles, "PROGRAMS", programs))
                )


def _context_choices() -> Iterator[Choice]:
    for block_m, block_n, num_warps, num_stages in (
        (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 2),
        (256, 64, 8, 3),
    ):  # fmt: skip
        tiles = attention_tiles.AttentionTiles(block_m, block_n, num_warps, num_stages)
        yield Choice(str(tuple(tiles)), ((attention_tiles.TILES, (ARCHITECTURE, False), tiles),))


def _decode_choices() -> Iterator[Choice]:
    for split in (128, 256, 512, 1024):
        for num_warps in (1, 2, 4):
            widths = (32, 128) if num_warps == 1 else (32,)
            config = partial(_with_warps, decode_attention._config, num_warps)
            changes = ((decode_attention, "split_for", partial(_always, split)), (decode_attention, "_config", config))
            for width in widths:
                of_merge = ((merge_splits, "NARROW", width), (merge_splits, "SHORT", 4096))
                yield Choice(f"split {split}, {num_warps} warps, merged by {width}", (*changes, *of_merge))


def _with_warps(config: Callable[[int, int, int], dict[str, int]], num_warps: int, *given: int) -> dict[str, int]:
    return config(*given) | {"num_warps": num_warps}


def _always(split: int, rows: int, kv_heads: int) -> int:
    return split


def choices_of(name: str) -> list[Choice]:
    """Choices for a case of benchmarks.gpu; none where nothing is to be chosen."""
    if name.startswith(("W4A16", "W4A8", "W8A8")):
        return list(_product_choices(name))
    if name.startswith("context attention bf16"):
        return list(_context_choices())
    return list(_decode_choices()) if name.startswith("decode attention") else []


def _compiled(name: str, index: int) -> str:
    """Compiles and checks one choice, in a process of its own; returns what is wrong with it."""
    case = next(case for case in all_cases(False) if case.name == name)
    try:
        with choices_of(name)[index].applied():
            check = check_case(case, torch.device("cuda"))
    except Exception as error:  # it may need more shared memory than there is
        return reason_of(error)
    return "" if check["passed"] else f"wrong: error {check['error']:.1e}, limit {check['limit']:.1e}"


def _timed(case: Case, choices: list[Choice], wrong: list[str]) -> list[tuple[float, str]]:
    device = torch.device("cuda")
    first = case.make(Random(device, 0))
    copies = [
        first,
        *(case.make(Random(device, seed)) for seed in range(1, copies_for(num_bytes(first), case.is_warm))),
    ]
    found = []
    for choice, reason in zip(choices, wrong, strict=True):
        if not reason:
            with choice.applied():
                case.run(first)
                wake(device)
                found.append((time_calls(case.run, copies).us, choice.name))
    return sorted(found)


def main(arguments: list[str]) -> int:
    cases = [case for case in all_cases(False) if choices_of(case.name) and re.search("|".join(arguments), case.name)]
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here")
    todo = [(case.name, index) for case in cases for index in range(len(choices_of(case.name)))]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        reasons = dict(zip(todo, pool.map(_compiled, *zip(*todo, strict=True)), strict=True))
    for case in cases:
        choices = choices_of(case.name)
        wrong = [reasons[case.name, index] for index in range(len(choices))]
        print(f"\n{case.name}", flush=True)
        for us, name in _timed(case, choices, wrong):
            print(f"{us:9.1f} us  {name}", flush=True)
        for choice, reason in zip(choices, wrong, strict=True):
            if reason:
                print(f"           -  {choice.name}: {reason}")
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
