"""Executor is the public API object. Its engine runs in this process or in an engine process. Importing it loads no torch."""

from backend.executor.executor import Executor

__all__ = ["Executor"]
