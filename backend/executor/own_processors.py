"""Logits post-processors that requests bring themselves, as callables. The engine knows them all by one name, OF_REQUEST.

For engines in this process. One in a process of its own imports what its configuration names (`import_path`).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from backend.api.errors import ConfigError

OF_REQUEST = "of the request itself"  # name in Request.logits_post_processor if the request brings its own callable
PostProcessor = Callable[..., Any]
_NUM_ARGUMENTS = 5


class OwnProcessors:
    """Post-processors of single requests, behind one name. The engine's thread calls it."""

    def __init__(self) -> None:
        self.adding = threading.Lock()  # held from before a request is sent until its function is known under its id
        self._functions: dict[int, tuple[PostProcessor, int]] = {}  # with how many arguments each takes

    def __len__(self) -> int:
        return len(self._functions)

    def add(self, request_id: int, function: PostProcessor) -> None:
        """`function` takes (id, logits, tokens of each beam, stream, client id), or the first four of them."""
        self._functions[request_id] = function, _num_arguments(function)

    def forget(self, request_id: int) -> None:
        """The request has ended. Ids that are not known are ignored."""
        with self.adding:
            self._functions.pop(request_id, None)

    def __call__(self, request_id: int, logits: Any, tokens: Any, stream: int, client_id: int | None) -> Any:
        with self.adding:
            function, count = self._functions[request_id]
        return function(*(request_id, logits, tokens, stream, client_id)[:count])


def import_path(name: str, function: PostProcessor) -> str:
    """`module:function`, by which an engine process finds it. Raises ConfigError for what no other process can import."""
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not qualified.isidentifier():
        raise ConfigError(
            f"logits post-processor {name!r} is to run in an engine process, which imports it: define it at the top of "
            f"a module, or let the engine run in this process"
        )
    return f"{module}:{qualified}"


def _num_arguments(function: PostProcessor) -> int:
    try:
        inspect.signature(function).bind(*range(_NUM_ARGUMENTS))
    except TypeError:
        return _NUM_ARGUMENTS - 1
    except ValueError:  # a builtin that tells no signature
        return _NUM_ARGUMENTS
    return _NUM_ARGUMENTS
