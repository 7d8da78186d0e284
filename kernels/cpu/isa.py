"""Detects this machine's instruction sets and the variants of the native kernels that they allow, best first.

A variant's compiler flags are made from the same features that are looked up in /proc/cpuinfo, so that a compiler cannot use
one that was not checked. The sources choose by the macros that those flags predefine (`__AVX512BF16__`, `__AMX_INT8__`, ...).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Set
from pathlib import Path

ISA_VARIABLE = "EVERBATCH_ISA"
AMX_EMULATED = "amx_emulated"  # for tests: the AMX code path on machines without AMX, with loops for its instructions

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
_AMX = (*_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8")

# variant -> the features that it needs, as /proc/cpuinfo names them
LADDER: dict[str, tuple[str, ...]] = {
    "amx": _AMX,
    "avx512bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": (),
}
_USED_WHEN_THERE = {
    "amx": ("avx512vbmi",),
    "avx512bf16": ("avx512vbmi",),
    "avx512": ("avx512_vnni", "avx512vbmi"),
}

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


@functools.cache
def cpu_features() -> frozenset[str]:
    """The flags in /proc/cpuinfo, without those of AMX if Linux does not let this process use it; empty except on x86-64."""
    if not _is_x86_64():
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    features = frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())
    if "amx_tile" in features and not _amx_permitted():
        return frozenset(feature for feature in features if not feature.startswith("amx_"))
    return features


def supported_isas(features: Set[str] | None = None) -> tuple[str, ...]:
    """The variants of LADDER that run on a CPU with `features` (None: this one), best first; `generic` always."""
    have = cpu_features() if features is None else features
    return tuple(name for name, needed in LADDER.items() if have >= set(needed))


def chosen_isas() -> tuple[str, ...]:
    """The variants to use, best first: EVERBATCH_ISA where set, else all that this machine can run.

    Raises ValueError if EVERBATCH_ISA names no variant that this machine can run.
    """
    forced = os.environ.get(ISA_VARIABLE)
    if forced:
        _check(forced, ISA_VARIABLE, cpu_features())
    return (forced,) if forced else supported_isas()


def best_isa() -> str:
    """The first of `chosen_isas`."""
    return chosen_isas()[0]


def compiler_flags(isa: str, features: Set[str] | None = None) -> list[str]:
    """The flags that choose the instructions of variant `isa` for a CPU with `features` (None: this one).

    Raises ValueError if such a CPU cannot run it.
    """
    have = cpu_features() if features is None else features
    _check(isa, "isa", have)
    if isa == AMX_EMULATED:
        base = next(name for name in supported_isas(have) if name != "amx")
        return [*compiler_flags(base, have), "-DEVERBATCH_EMULATE_AMX"]
    if not _is_x86_64():
        return []
    optional = [feature for feature in _USED_WHEN_THERE.get(isa, ()) if feature in have]
    return ["-march=x86-64", "-mtune=native", *(_flag(feature) for feature in (*LADDER[isa], *optional))]


def _check(isa: str, origin: str, features: Set[str]) -> None:
    possible = (*supported_isas(features), AMX_EMULATED)
    if isa not in possible:
        remedy = f"unset {ISA_VARIABLE} or name" if origin == ISA_VARIABLE else "name"
        raise ValueError(f"{origin} is {isa!r}, this machine can run {', '.join(possible)}; {remedy} one of these")


def _flag(feature: str) -> str:
    return "-m" + feature.replace("avx512_", "avx512").replace("amx_", "amx-")


def _is_x86_64() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _amx_permitted() -> bool:
    """Ask Linux for the AMX tile registers; they stay granted for the whole process."""
    libc = ctypes.CDLL(None)
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)
    return bool(libc.syscall(*(ctypes.c_long(argument) for argument in arguments)) == 0)
