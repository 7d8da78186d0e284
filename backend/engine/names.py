"""AdapterNames: the LoRA adapters that requests may name: of `lora.adapters`, and those that are loaded while the engine serves.

One thread reads and checks adapters, one after the other, while requests go on. All clients of the engine get the names. They are
not saved: an engine that is started again has only the names of its configuration.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from backend.api.checkpoint.adapter_files import allowed_directory, check_adapter_files, check_adapter_name
from backend.api.checkpoint.model_files import shown
from backend.api.config.schema import LoraSection
from backend.api.errors import EverbatchError, InvalidRequest, NotFound, Overloaded, Unsupported
from backend.api.lora import LoraConfig
from backend.api.request import RequestId
from backend.api.response import Response
from backend.core.step import PreparedAdapter
from backend.engine.publish import empty_response, error_response

MAX_NAMES = 1000
MAX_LOADING = 16
log = logging.getLogger("everbatch.engine")


@dataclass(slots=True, frozen=True)
class NamingOutcome:
    """The result of loading an adapter."""

    request_id: RequestId
    name: str
    directory: str
    error: EverbatchError | None


class AdapterNames:
    """All but `_load` runs on the engine's thread. `directories` is replaced, never changed, and is for any thread."""

    def __init__(
        self,
        lora: LoraSection,
        prepare: Callable[[LoraConfig], PreparedAdapter],
        check_fits: Callable[[PreparedAdapter], None],
        put: Callable[[Response], None],
    ) -> None:
        """prepare, check_fits: read an adapter, and refuse one that can never be held; for any thread
        put: takes the answers
        """
        self._lora, self._prepare, self._check_fits, self._put = lora, prepare, check_fits, put
        self.directories: Mapping[str, str] = dict(lora.directories)
        self._changed = False
        self._loading: set[RequestId] = set()
        self._outcomes: queue.SimpleQueue[NamingOutcome] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._thread: ThreadPoolExecutor | None = None

    def on_outcome(self, wake: Callable[[], None]) -> None:
        """`wake` is called from another thread, when `answer` has something to do."""
        self._wake = wake

    def change(self, request_id: RequestId, name: str, directory: str | None) -> None:
        """Let requests name the adapter in a directory, once it has been read; without one, let them not any more."""
        try:
            self._check_allowed()
            if directory is not None:
                self._begin(request_id, name, directory)
                return
            self._remove(name)
        except EverbatchError as error:
            self._put(error_response(request_id, None, error))
        else:
            self._put(empty_response(request_id))

    def answer(self) -> None:
        """Take over the adapters that have been read."""
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            if outcome.request_id in self._loading:
                self._loading.remove(outcome.request_id)
                error = outcome.error or self._add(outcome)
                request_id = outcome.request_id
                self._put(error_response(request_id, None, error) if error else empty_response(request_id))

    def take_change(self) -> Mapping[str, str] | None:
        """All names with their directories, when these have changed since the last call."""
        changed, self._changed = self._changed, False
        return self.directories if changed else None

    def close(self, error: EverbatchError) -> None:
        """Stop loading, and answer requests that wait for a load with `error`."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
        for request_id in self._loading:
            self._put(error_response(request_id, None, error))
        self._loading.clear()

    def _check_allowed(self) -> None:
        if not (self._lora.enabled and self._lora.allowed_dir):
            raise Unsupported(
                "LoRA adapters are not loaded or unloaded while this server runs; start it with lora.enabled and "
                "lora.allowed_dir, the directory that they may come from"
            )

    def _begin(self, request_id: RequestId, name: str, directory: str) -> None:
        check_adapter_name(name)
        if len(self._loading) >= MAX_LOADING:
            raise Overloaded(
                f"{len(self._loading)} LoRA adapters are being loaded, the limit is {MAX_LOADING}; try later"
            )
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="everbatch-named-adapters")
        self._loading.add(request_id)
        self._thread.submit(self._load, request_id, name, directory)

    def _remove(self, name: str) -> None:
        """Forget a name. Sequences that run with its adapter continue."""
        if name not in self.directories:
            raise NotFound(f"there is no LoRA adapter {shown(name)} to unload; name one that is served")
        self._replace({known: directory for known, directory in self.directories.items() if known != name})

    def _check_free(self, name: str, directory: str) -> None:
        known = self.directories.get(name)
        if known is not None and known != directory:
            raise InvalidRequest(
                f"LoRA adapter {shown(name)} has already been loaded; unload it first, or use another name"
            )
        if known is None and len(self.directories) >= MAX_NAMES:
            raise InvalidRequest(
                f"{len(self.directories)} LoRA adapters have names, the limit is {MAX_NAMES}; unload one"
            )

    def _add(self, outcome: NamingOutcome) -> EverbatchError | None:
        try:
            self._check_free(outcome.name, outcome.directory)
        except EverbatchError as error:
            return error
        self._replace({**self.directories, outcome.name: outcome.directory})
        return None

    def _replace(self, directories: Mapping[str, str]) -> None:
        self.directories, self._changed = directories, True

    def _load(self, request_id: RequestId, name: str, directory: str) -> None:
        """Read the adapter once, so that one that cannot be served is refused now and not at each request."""
        error: EverbatchError | None = None
        path = Path()
        try:
            path = allowed_directory(directory, self._lora.allowed_dir)
            check_adapter_files(path, self._lora.max_rank)
            self._check_fits(self._prepare(LoraConfig(0, path=str(path), name=name)))
        except EverbatchError as refusal:
            error = refusal
        except Exception as failure:  # whatever a file does: the client must be answered
            log.exception("LoRA adapter %s could not be loaded", shown(name))
            error = InvalidRequest(f"LoRA adapter {shown(name)} cannot be read ({type(failure).__name__})")
        self._outcomes.put(NamingOutcome(request_id, name, str(path), error))
        self._wake()
