"""Puts the stand-ins into the modules of the server, and takes them out again."""

from __future__ import annotations

import concurrent.futures
import ctypes as real_ctypes
import importlib
import inspect
import logging
import os
import pkgutil
import queue
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from backend.api.processes.liveness import CpuDemand
from backend.executor.served_engine import ServedEngine
from tests.simulation.server import machine, threads
from tests.simulation.server.disk import DiskFile
from tests.simulation.server.threads import here
from tests.simulation.server.tokens import TinyTools
from tests.simulation.server.world import World

ROOMS = ("backend.core", "backend.engine", "backend.wire", "backend.executor", "backend.serving")
BESIDES = ("backend.api.processes.liveness",)
# These run in processes that are not simulated, or make processes that are not.
LEFT_OUT = (
    "backend.executor.own_processors",
    "backend.wire.kv_publisher",
    "backend.storage.kv_store",
    "backend.serving.wires.lmdeploy",
)
WITH_FILES = ("backend.wire.address", "backend.executor.engine_supervisor")
STAND_INS: dict[int, Any] = {
    id(threading): threads.threading,
    id(queue): threads.queue,
    id(time): threads.time,
    id(socket): machine.socket,
    id(select): machine.select,
    id(subprocess): machine.subprocess,
    id(secrets): machine.secrets,
    id(signal): machine.signal,
    id(os): machine.os,
    id(concurrent.futures.Future): threads.Future,
}


DEFAULTS: dict[int, Any] = {
    id(time.monotonic): threads.time.monotonic,
    id(time.monotonic_ns): threads.time.monotonic_ns,
    id(time.time): threads.time.time,
    id(os.getppid): machine.os.getppid,
}  # functions that are defaults of arguments, and were so before a stand-in could take their place


def _stdout() -> Any:
    return here().current.process.stdout


def _interrupt(ident: Any, error: Any) -> int:
    """PyThreadState_SetAsyncExc of simulated threads."""
    for thread in here().threads:
        if thread.number == ident.value and thread.is_alive:
            thread.pending = error.value
            if thread.is_blocked:
                here().reached["interrupted thread"] += 1
    return 1


_SYS = SimpleNamespace(
    executable="python", setswitchinterval=lambda seconds: None, stderr=sys.stderr, exit=sys.exit, argv=sys.argv
)
_CTYPES = SimpleNamespace(
    pythonapi=SimpleNamespace(PyThreadState_SetAsyncExc=_interrupt),
    c_ulong=real_ctypes.c_ulong,
    py_object=real_ctypes.py_object,
)


def cpu_demand(pid: int) -> CpuDemand:
    """A process that is frozen or idle wants no processor; one whose loop works does."""
    process = next((each for each in here().processes if each.pid == pid), None)
    if process is None or not process.is_alive or process.is_frozen or not process.is_busy:
        return CpuDemand()
    return CpuDemand(here().now_ns, True)


def _modules() -> list[ModuleType]:
    found = [importlib.import_module(name) for name in BESIDES]
    for room in ROOMS:
        package = importlib.import_module(room)
        names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{room}.")]
        found += [importlib.import_module(name) for name in names if name not in LEFT_OUT]
    return found


def _functions(module: ModuleType) -> Iterator[Any]:
    """The functions and methods of a module."""
    for value in vars(module).values():
        if getattr(value, "__module__", "") == module.__name__:
            yield from filter(inspect.isfunction, [value, *(vars(value).values() if inspect.isclass(value) else ())])


def _with_defaults(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    for function in _functions(module):
        defaults = function.__defaults__ or ()
        if any(id(value) in DEFAULTS for value in defaults):
            yield function, "__defaults__", tuple(DEFAULTS.get(id(value), value) for value in defaults)


def _replacements() -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = []
    for module in _modules():
        for name, value in list(vars(module).items()):
            if id(value) in STAND_INS:
                found.append((module, name, STAND_INS[id(value)]))
            elif value is Path and module.__name__ in WITH_FILES:
                found.append((module, name, machine.FilePath))
        found += _with_defaults(module)
    from backend.api.processes import liveness
    from backend.engine import make_level
    from backend.executor import engine_process, served_engine
    from backend.serving import assembly, server
    from backend.serving.intake import text_pool
    from backend.serving.lifecycle import housekeeper

    standard = SimpleNamespace(stdout=SimpleNamespace(write=lambda text: _stdout().write(text), flush=lambda: None))
    return found + [
        (liveness, "cpu_demand", cpu_demand),
        (engine_process, "sys", standard),
        (server, "sys", _SYS),
        (housekeeper, "sys", _SYS),
        (text_pool, "ctypes", _CTYPES),
        (make_level, "BlockFile", DiskFile),
        (served_engine, "calm_garbage_collector", lambda: None),
        (served_engine, "workers_of", lambda *arguments, **others: here().new_workers()),
        (engine_process, "ServedEngine", _recorded),
        (assembly, "TextTools", TinyTools),
    ]


def _recorded(*arguments: Any) -> ServedEngine:
    """An engine that its process is asked for when the invariants are checked."""
    engine = here().current.process.engine = ServedEngine(*arguments)
    return engine


_found: list[tuple[Any, str, Any]] = []


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Within it the server's modules see the world in place of the machine."""
    if not _found:
        _found.extend(_replacements())
    before = [(module, name, getattr(module, name)) for module, name, _ in _found]
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    threads.enter(world)
    try:
        for module, name, value in _found:
            setattr(module, name, value)
        yield
    finally:
        try:
            world.close()
        finally:
            for module, name, value in before:
                setattr(module, name, value)
            threads.enter(None)
            logging.disable(disabled)
