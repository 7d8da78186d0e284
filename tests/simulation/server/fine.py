"""Lets threads switch between any two statements of the server's modules, not only where they touch a lock, a queue or a file.

The code of each function is compiled a second time, with a call of `pause` ahead of each statement, and exchanged for the time of
a run. What a thread does without a lock can then be interrupted where the interpreter might interrupt it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tests.simulation.server.threads import here

PACKAGES = ("backend.executor", "backend.serving", "backend.wire")
FIRST = ("backend.engine.loop",)
# These run in one thread, or in processes that are not simulated.
WITHOUT = (
    *("backend.executor.load", "backend.executor.own_processors", "backend.serving.assembly", "backend.serving.wires"),
    *("backend.serving.observe.tracing", "backend.serving.intake.rendering", "backend.serving.intake.render_process"),
    *(
        "backend.serving.observe.families",
        "backend.serving.observe.metrics",
        "backend.serving.intake.batch",
        "backend.serving.tensors",
    ),
    *("backend.serving.upstream_parameters", "backend.serving.pb", "backend.serving.string_tensors"),
    *("backend.wire.framing", "backend.wire.kv_event_format", "backend.wire.kv_publisher"),
)
_WITHOUT = tuple(f"{name}." for name in WITHOUT)
NAME = "_pause_of_the_simulation"


class _Pausing(ast.NodeTransformer):
    """Puts a pause ahead of each statement of each function. Line numbers stay."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        for block in ast.walk(node):
            for field in ("body", "orelse", "finalbody"):
                statements = getattr(block, field, None)
                if isinstance(statements, list) and not isinstance(block, ast.ClassDef | ast.Module):
                    setattr(block, field, [part for each in statements for part in _with_pause(each)])
        return node


def _with_pause(statement: ast.stmt) -> list[ast.stmt]:
    is_pause = isinstance(statement, ast.Expr) and getattr(getattr(statement.value, "func", None), "id", "") == NAME
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if (
        is_pause
        or is_docstring
        or isinstance(statement, ast.Global | ast.Nonlocal)
        or getattr(statement, "paused", False)
    ):
        return [statement]
    statement.paused = True  # type: ignore[attr-defined]
    call = ast.Expr(ast.Call(ast.Name(NAME, ast.Load()), [], []))
    for node in ast.walk(call):
        ast.copy_location(node, statement)
    return [call, statement]


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a module and the methods of its classes, properties included."""
    owners = [module, *(value for value in vars(module).values() if inspect.isclass(value))]
    for value in [value for owner in owners for value in list(vars(owner).values())]:
        function = value
        if isinstance(value, property):
            function = value.fget
        elif isinstance(value, staticmethod | classmethod):
            function = value.__func__
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            yield function


@cache
def _modules() -> list[ModuleType]:
    found = [importlib.import_module(name) for name in FIRST]
    for package in map(importlib.import_module, PACKAGES):
        names = [
            info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.") if not info.ispkg
        ]
        found += [importlib.import_module(name) for name in names if not f"{name}.".startswith(_WITHOUT)]
    return found


@cache
def _fine_codes() -> list[tuple[str, str, int, CodeType]]:
    """(module, qualified name, first line, code with pauses) of each function."""
    found = []
    for module in _modules():
        tree = _Pausing().visit(ast.parse(inspect.getsource(module)))
        code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True)
        found += [(module.__name__, each.co_qualname, each.co_firstlineno, each) for each in _codes(code)]
    return found


def _pause() -> None:
    world = here()
    if world is not None and world.in_thread:
        world.pause()


@contextmanager
def fine_switches() -> Iterator[None]:
    """Planted bugs that have taken a function's place keep their own code."""
    codes = {(module, name, line): code for module, name, line, code in _fine_codes()}
    changed: list[tuple[Any, CodeType]] = []
    try:
        for module in _modules():
            setattr(module, NAME, _pause)
            for function in _functions(module):
                old = function.__code__
                new = codes.get((module.__name__, old.co_qualname, old.co_firstlineno))
                if new is not None and new.co_freevars == old.co_freevars:
                    changed.append((function, old))
                    function.__code__ = new
        yield
    finally:
        for function, old in changed:
            function.__code__ = old
