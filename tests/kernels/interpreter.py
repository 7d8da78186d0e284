"""Triton's interpreter without its two greatest costs. Importable only where TRITON_INTERPRET is 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def save_time() -> None:
    """Leave out of this process what the interpreter does for nothing: three quarters of the tests' time."""
    _prepare_language_once()
    # Triton 3.6 computes for each integer operation if it overflowed, and looks at the result with debug=True only.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


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
