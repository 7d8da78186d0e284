"""Logits post-processors: callables of the engine's owner that change the logits of requests that name them.

    one request    f(request_id, logits, token_ids, stream, client_id)         logits [1, beams, vocab], ids a list for each beam
    batched        f(request_ids, logits, token_ids, stream, client_ids)       lists of these, once a step for all that opted in

A callable with four parameters is called without the last argument. It changes the logits in place, or returns new ones of the
same shape. They are the model's own, before penalties and temperature; log-probabilities are computed from the changed ones.
`stream` is 0 on a CPU, else the CUDA stream of the logits. A callable that raises, or calls sys.exit, ends only the requests for
which it was called.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backend.api.config.schema import ModelConfigSection
from backend.api.errors import ConfigError
from backend.api.request import Request

log = logging.getLogger("everbatch.worker")
BATCHED = Request.BATCHED_POST_PROCESSOR_NAME
Failure = tuple[int, str]  # index of the step's row, a sentence for its client
_NUM_ARGUMENTS = 5


class Opted(NamedTuple):
    """A row whose request names a post-processor, or all rows of its beam search in the step."""

    row: int  # the first one
    name: str
    request_id: int
    logits: Tensor  # [1, beams, vocab]
    token_ids: list[list[int]]  # prompt and output of each beam
    client_id: int | None


class PostProcessors:
    def __init__(
        self, named: Mapping[str, Callable[..., Any]] | None = None, batched: Callable[..., Any] | None = None
    ) -> None:
        """Raises ConfigError for a name that is empty or means the batched one, and for what cannot be called."""
        self._named = {name: _checked(name, callable_) for name, callable_ in (named or {}).items()}
        self._batched = None if batched is None else _checked(None, batched)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may give."""
        return (*self._named, *(() if self._batched is None else (BATCHED,)))

    def with_configured(self, section: ModelConfigSection) -> PostProcessors:
        """These post-processors and the ones that the configuration names by import path. Raises ConfigError if one cannot be
        imported."""
        both = PostProcessors()
        both._named = dict(self._named)
        for entry in section.logits_post_processors:
            name, _, path = entry.rpartition("=")
            both._named[name] = _checked(name, _imported("model.logits_post_processors", path, entry))
        both._batched = self._batched
        batched = section.batched_logits_post_processor
        if batched is not None:
            both._batched = _checked(None, _imported("model.batched_logits_post_processor", batched, batched))
        return both

    @torch.inference_mode()
    def run(self, opted: list[Opted]) -> list[Failure]:
        """Change the logits of all rows in place. Returns the rows for which a callable raised, or returned something else."""
        failures: list[Failure] = []
        batch = [row for row in opted if row.name == BATCHED]
        for row in opted:
            if row.name != BATCHED:
                failures += self._run_one(row)
        return failures + (self._run_batch(batch) if batch else [])

    def _run_one(self, row: Opted) -> list[Failure]:
        function, count = self._named[row.name]
        arguments = row.request_id, row.logits, row.token_ids, _stream(row.logits), row.client_id
        try:
            _take_over(row.logits, function(*arguments[:count]))
        except (Exception, SystemExit) as error:
            return [_failure(row, error)]
        return []

    def _run_batch(self, rows: list[Opted]) -> list[Failure]:
        assert self._batched is not None  # the engine refuses the name if there is none
        function, count = self._batched
        logits = [row.logits for row in rows]
        ids, clients = [row.request_id for row in rows], [row.client_id for row in rows]
        arguments = ids, logits, [row.token_ids for row in rows], _stream(logits[0]), clients
        try:
            returned = function(*arguments[:count])
            if returned is not None:
                for row, result in zip(rows, returned, strict=True):
                    _take_over(row.logits, result)
        except (Exception, SystemExit) as error:
            return [_failure(row, error) for row in rows]
        return []


def _failure(row: Opted, error: BaseException) -> Failure:
    """Whatever the owner's code raises, a call of sys.exit included, ends the request and not the engine. The log has the
    traceback, the client the name of the exception's class.
    """
    log.error("logits post-processor %s failed for request %d", row.name, row.request_id, exc_info=error)
    return row.row, f"logits post-processor {row.name!r} failed ({type(error).__name__}); the engine's log says why"


def _take_over(logits: Tensor, returned: Tensor | None) -> None:
    """Raises ValueError for a tensor of another shape."""
    if returned is None or returned is logits:
        return
    if returned.shape != logits.shape:
        raise ValueError(f"it returned shape {tuple(returned.shape)}, expected is {tuple(logits.shape)}")
    logits.copy_(returned)


def _stream(logits: Tensor) -> int:
    return torch.cuda.current_stream(logits.device).cuda_stream if logits.is_cuda else 0


def _checked(name: str | None, function: Callable[..., Any]) -> tuple[Callable[..., Any], int]:
    """The callable and how many arguments it takes, 4 or 5."""
    if name is not None and (not name or name == BATCHED):
        raise ConfigError(f"a logits post-processor is named {name!r}; choose another name")
    if not callable(function):
        raise ConfigError(f"logits post-processor {name or BATCHED!r} cannot be called; give a function")
    try:
        inspect.signature(function).bind(*range(_NUM_ARGUMENTS))
    except TypeError:
        return function, _NUM_ARGUMENTS - 1
    except ValueError:  # a builtin that tells no signature
        return function, _NUM_ARGUMENTS
    return function, _NUM_ARGUMENTS


def _imported(key: str, path: str, entry: str) -> Callable[..., Any]:
    """Import the object at a path. `entry`: the value of the configuration that holds the path, for errors."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{key} has {entry!r}; write it as [name=]module:function")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{key} has {entry!r}, which cannot be imported ({type(error).__name__}); check PYTHONPATH"
        ) from None
