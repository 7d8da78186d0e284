"""PostprocWorker: turns the engine's responses into text, in the dispatching thread or in processes of its own.

Each request belongs to one worker, `client_id % n`, so its updates keep their order. An error in a worker ends its own
request, with an error. The processes read msgpack from a socket pair, and end when it is closed.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from backend.api import ConfigError, ErrorCode, EverbatchError, Response
from backend.text.tokenizer import Tokenizer
from compat.llm import updates
from compat.llm.errors import BackgroundError, ParameterError
from compat.llm.folding import RequestFold
from compat.llm.updates import TextParams

log = logging.getLogger("everbatch.llm")
ROOT = Path(__file__).resolve().parents[2]
PROCESS = "compat.llm.postproc_process"
MAX_WORKERS = 64
END_GRACE_S = 5.0
_LENGTH = struct.Struct("<I")


@dataclass
class PostprocWorkerConfig:
    """Number of processes that detokenise (0: the dispatching thread does it), and the directory of their tokenizer."""

    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.num_postprocess_workers <= MAX_WORKERS:
            raise ParameterError(
                f"num_postprocess_workers is {self.num_postprocess_workers}, allowed is 0 to {MAX_WORKERS}"
            )

    @property
    def enabled(self) -> bool:
        return self.num_postprocess_workers > 0


class PostprocInput(Struct, frozen=True, omit_defaults=True):
    """One response on its way to a worker. `sampling_params` come with the first one of a request."""

    rsp: Response
    client_id: int
    sampling_params: TextParams | None = None
    postproc_params: None = None
    streaming: bool = False


class PostprocWorker:
    """Keeps the state of the requests whose text it makes. One thread uses it."""

    Input = PostprocInput
    Output = updates.RequestUpdate

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._folds: dict[int, RequestFold] = {}

    @property
    def num_requests(self) -> int:
        return len(self._folds)

    def handle(self, given: PostprocInput) -> updates.RequestUpdate | None:
        """The update that a response gives; None without news. Never raises: an error ends the request."""
        client_id = given.client_id
        if given.rsp.has_error():
            self._folds.pop(client_id, None)
            return updates.RequestUpdate(client_id, [], True, given.rsp.error_msg, given.rsp.error_code)
        try:
            return self._fold(given)
        except EverbatchError as error:
            failed = updates.RequestUpdate(client_id, [], True, error.message, error.code, wants_cancel=True)
        except Exception:
            # An exception of a tokenizer ends this request only. The trace goes to the log.
            log.exception("the output of request %d could not be made into text", client_id)
            message = "the output could not be made into text; the log says why"
            failed = updates.RequestUpdate(client_id, [], True, message, ErrorCode.INTERNAL, wants_cancel=True)
        self._folds.pop(client_id, None)
        return failed

    def _fold(self, given: PostprocInput) -> updates.RequestUpdate | None:
        client_id = given.client_id
        if given.sampling_params is not None:
            self._folds[client_id] = RequestFold(given.sampling_params, self._tokenizer)
        fold = self._folds.get(client_id)
        if fold is None:  # The request has ended here, and the engine had not got its cancellation yet.
            return None
        fold.feed(given.rsp.result)
        sequences, is_final = fold.take(), fold.is_final
        if is_final:
            del self._folds[client_id]
        elif not sequences:
            return None
        return updates.RequestUpdate(client_id, sequences, is_final, wants_cancel=fold.wants_cancel)


class Pipe:
    """Frames of msgpack over a socket: a length of four bytes, and the body."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, value: Struct) -> None:
        """Send a body. Blocks while the socket is full. Raises OSError when the other side is gone."""
        body = self._encode(value)
        self._connection.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> bytes | None:
        """The next body; None at the end."""
        try:
            head = self._reader.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack(head)
            body = self._reader.read(length)
        except ConnectionError:  # The other side has ended without reading everything.
            return None
        return body if len(body) == length else None

    def close(self) -> None:
        """Wake the readers of both ends. The descriptor is closed once no thread uses it."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the other side of a pipe was gone already")


class Ready(Struct, frozen=True):
    """The first message of a process. A process that sends an error has ended."""

    error: str = ""


class PostprocProcess:
    """One worker process, and the thread that passes its messages on."""

    def __init__(
        self,
        tokenizer_dir: str,
        on_output: Callable[[updates.RequestUpdate], None],
        on_lost: Callable[[PostprocProcess], None],
        module: str = PROCESS,
    ) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--fd", str(theirs.fileno()), "--tokenizer", tokenizer_dir],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment,
            )
        self._pipe = Pipe(ours)
        self._on_output, self._on_lost = on_output, on_lost
        self._decode = msgspec.msgpack.Decoder(updates.RequestUpdate).decode
        self._why_not_ready = "a post-processing process has ended while it started; the log says why"
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="llm-postproc", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def was_ready(self) -> bool:
        return not self._why_not_ready

    def wait(self) -> None:
        """Block until the process has loaded its tokenizer. Raises ConfigError when it cannot."""
        self._has_begun.wait()
        if self._why_not_ready:
            raise ConfigError(self._why_not_ready)

    def send(self, given: PostprocInput) -> None:
        """Raises BackgroundError when the process has ended."""
        try:
            self._pipe.send(given)
        except OSError:
            raise BackgroundError(LOST) from None

    def hang_up(self) -> None:
        """Close the socket, so that the process ends. A thread that is sending to it gets an error."""
        self._pipe.close()

    def close(self) -> None:
        """End the process, by force if need be. No output arrives after this has returned."""
        self.hang_up()
        try:
            self._process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def _listen(self) -> None:
        try:
            first = self._pipe.receive()
            if first is not None:
                self._why_not_ready = msgspec.msgpack.decode(first, type=Ready).error
            self._has_begun.set()
            while (body := self._pipe.receive()) is not None:
                self._on_output(self._decode(body))
        finally:
            self._has_begun.set()
            self._on_lost(self)


LOST = "a post-processing process has ended, and its requests with it; make a new executor"


class PostprocPool:
    """All worker processes of one executor."""

    def __init__(
        self,
        config: PostprocWorkerConfig,
        tokenizer_dir: str,
        on_output: Callable[[updates.RequestUpdate], None],
        on_lost: Callable[[int], None],
        module: str = PROCESS,
    ) -> None:
        """Start the processes, and wait until they are ready. Raises ConfigError when their tokenizer cannot be read.

        `on_lost` is called with the number of a worker whose process has ended by itself.
        """
        self._is_closed = False
        self._on_lost = on_lost
        directory = str(Path(config.postprocess_tokenizer_dir or tokenizer_dir).absolute())
        self._workers: list[PostprocProcess] = []
        try:
            for _ in range(config.num_postprocess_workers):
                self._workers.append(PostprocProcess(directory, on_output, self._lost, module))
            for worker in self._workers:
                worker.wait()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def worker_of(self, client_id: int) -> int:
        return client_id % len(self._workers)

    def send(self, given: PostprocInput) -> None:
        """Raises BackgroundError when the process of this request has ended."""
        self._workers[self.worker_of(given.client_id)].send(given)

    def close(self) -> None:
        self._is_closed = True
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.close()

    def _lost(self, worker: PostprocProcess) -> None:
        if not self._is_closed and worker.was_ready:
            self._on_lost(self._workers.index(worker))
