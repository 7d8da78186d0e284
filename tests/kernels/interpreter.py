"""Triton's interpreter without its greatest costs. Importable only where TRITON_INTERPRET is 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter


def save_time() -> None:
    """Leave out of this process what the interpreter does for nothing: three quarters of the tests' time."""
    _prepare_language_once()
    # Triton 3.6 computes for each integer operation if it overflowed, and looks at the result with debug=True only.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # Triton 3.6 makes these anew, with all their texts, for each value that an operation gives.
    core.block_type.__init__ = _block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = _tensor
    interpreter._get_np_dtype = _numpy_type(interpreter._get_np_dtype)


def _prepare_language_once() -> None:
    """Replace the functions of triton.language once for each module of kernels, and leave them replaced.

    Triton 3.6 searches all of triton.language for functions to replace before each launch, and again before each call of one
    device function by another. In a process that only interprets, there is nothing left to replace after the first search.
    """
    replace: Callable[[Any], object] = interpreter._patch_lang
    prepared: set[str] = set()  # names of modules

    def replace_once(function: Any) -> interpreter._LangPatchScope:
        """Takes the place of interpreter._patch_lang; the empty scope that it returns restores nothing."""
        module = function.__globals__["__name__"]
        if module not in prepared:
            prepared.add(module)
            replace(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once


def _block_type(self: Any, element_type: Any, shape: Any) -> None:
    """Takes the place of block_type.__init__, and of what checks the shape."""
    self.element_ty = element_type
    self.shape, self.numel = _checked(*(_plain(size) for size in _plain(shape)))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, core.constexpr) else value


@cache
def _checked(*sizes: int) -> tuple[Any, int]:
    """A block's `shape` and `numel`."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(sizes), validate_block_shape(sizes)


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """Takes the place of tensor.__init__."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of(*type.shape.values) if type.is_block() else _shape_of()


@cache
def _shape_of(*sizes: int) -> tuple[Any, Any]:
    """A tensor's `shape` and `numel`."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _numpy_type(find: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """Takes the place of a function that writes its table at each call."""
    known: dict[str, np.dtype[Any]] = {}

    def numpy_type(type: Any) -> np.dtype[Any]:
        scalar = type.element_ty if isinstance(type, core.block_type) else type
        if (found := known.get(scalar.name)) is None:
            found = known[scalar.name] = find(scalar)
        return found

    return numpy_type
