"""Logits post-processors: those of the configuration for the engine, and those that requests bring themselves."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from backend.trtllm.decoding import LogitsPostProcessorConfig

OF_REQUEST = "of the request itself"  # the name under which the engine knows all that requests bring themselves
PostProcessor = Callable[..., Any]


class OwnProcessors:
    """Post-processors of single requests, behind one name. The engine's thread calls it."""

    def __init__(self) -> None:
        self.adding = threading.Lock()  # held from before a request is sent until its function is known under its id
        self._functions: dict[int, PostProcessor] = {}

    def add(self, request_id: int, function: PostProcessor) -> None:
        """`function` takes (id, logits, tokens of each beam, stream, client id), or the first four of them."""
        self._functions[request_id] = function

    def forget(self, request_id: int) -> None:
        """The request has ended. Ids that are not known are ignored."""
        self._functions.pop(request_id, None)

    def __call__(self, request_id: int, logits: Any, tokens: Any, stream: int, client_id: int | None) -> Any:
        with self.adding:
            function = self._functions[request_id]
        arguments = (request_id, logits, tokens, stream, client_id)
        return function(*arguments[: 5 if _takes_five(function) else 4])


def named(config: LogitsPostProcessorConfig | None, own: OwnProcessors) -> dict[str, PostProcessor]:
    """All functions by the names that requests give, those that requests bring themselves under OF_REQUEST."""
    return {**((config and config.processor_map) or {}), OF_REQUEST: own}


def import_path(name: str, function: PostProcessor) -> str:
    """`module:function`, by which an engine process finds it. Raises RuntimeError for what no other process can import."""
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or not qualified.isidentifier():
        raise RuntimeError(
            f"logits post-processor {name!r} is to run in an engine process, which imports it: define it at the top of "
            f"a module, or use CommunicationMode.LEADER"
        )
    return f"{module}:{qualified}"


def _takes_five(function: PostProcessor) -> bool:
    try:
        inspect.signature(function).bind(*range(5))
    except TypeError:
        return False
    except ValueError:  # a builtin that tells no signature
        return True
    return True
