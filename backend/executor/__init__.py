"""Executor: the public API object. Works in process or against the engine process; imports no torch by itself."""

from backend.executor.executor import Executor

__all__ = ["Executor"]
