"""The programs of the simulated machine, made of the server's own parts: engine process, stubs, a client program, a stranger."""

from __future__ import annotations

import errno
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from backend.api import ConfigError, EngineConfig, EngineUnavailable, Request, Response, SamplingConfig
from backend.api.errors import EverbatchError
from backend.api.processes.arguments import arguments_of
from backend.core.step import WorkersLost
from backend.executor import Executor, engine_process
from backend.executor.kept_files import KeptFiles
from backend.serving.assembly import ToolsLoader, text_arguments
from backend.serving.served_model import ServedModel
from backend.serving.server import ModelServer
from backend.serving.wires.trtllm_tensors import TOKEN_MODEL
from backend.serving.wires.trtllm_text import ENSEMBLE
from backend.serving.wires.trtllm_tokens import parse_token_requests
from tests.simulation.model import Turn, reference_output
from tests.simulation.server import threads
from tests.simulation.server.sockets import Socket
from tests.simulation.server.threads import here
from tests.simulation.server.world import Process, Violation
from tests.simulation.setups import Setup

SOCKET = "/run/engine.sock"
LAST_S = 4.0  # in which all threads must have ended, those that are held back included
LONG_TEXT_S = 5.0  # for which the tokenizer hangs over a text that is to show it


def engine_program(arguments: list[str]) -> Callable[[], int]:
    """What `python -m backend.executor.engine_process` runs, without its reading of the command line."""
    given = arguments_of(engine_process.EngineArguments, arguments)
    kept, config_path, socket_path = KeptFiles.of(given), given.config, given.socket

    def main() -> int:
        config = msgspec.json.decode(here().written[config_path], type=EngineConfig)
        threads.Thread(target=engine_process._die_with_parent, args=(None,), name="engine-parent-watch").start()
        try:
            engine_process.serve_engine(config, socket_path, kept)
        except EverbatchError as error:
            engine_process.tell({"error": error.message})
            return 1
        except WorkersLost:
            return 1
        return 0

    return main


class Stub:
    """A Triton model and the process that serves it. Triton hands requests over on its main thread, one call at a time."""

    def __init__(self, model: str, config: EngineConfig, report: Callable[[Stub, str], None]) -> None:
        self.model = model
        self.is_owner = model == TOKEN_MODEL.model
        self._config = config
        self._report = report
        self.process: Process | None = None
        self.server: ModelServer | None = None  # while the model is loaded
        self.executor: Executor | None = None
        self.incarnation = 0
        self.inbox: Any = None
        self.left: list[str] = []  # what was left over when it had been finalized
        self.is_closing = False
        self.state = ""  # as it has last reported

    @property
    def is_loaded(self) -> bool:
        return self.server is not None and self.process is not None and self.process.is_alive

    def main(self) -> int:
        """One life of the process."""
        self.inbox = threads.SimpleQueue()
        try:
            executor = Executor.launch(self._config, SOCKET) if self.is_owner else Executor.attach(SOCKET)
        except (ConfigError, EngineUnavailable):
            return 1
        self.executor = executor
        self.server = ModelServer(self._served(executor), executor, self._config)
        while (orders := self.inbox.get()) is not None:
            for order in orders:
                order.received_ns = here().now_ns
            self.server.execute(orders)
        self.server.finalize()
        threads.sleep(LAST_S)
        process = here().current.process
        self.left = [thread.name for thread in process.threads if thread.is_alive and thread is not here().current]
        pipes = 2 * self.is_owner  # of the engine process that has ended; they are closed with the object
        self.left += [f"file {number}" for number in list(process.files)[pipes:]]
        return 0

    def _served(self, executor: Executor) -> ServedModel:
        shared: dict[str, Any] = dict(
            labels={"model": self.model, "version": "1"},
            drain_grace_s=3.0,
            report_health=lambda state, num_live, why: self._report(self, state),
        )
        if self.is_owner:
            return ServedModel(TOKEN_MODEL, parse_token_requests, owner=True, **shared)
        arguments = text_arguments(ENSEMBLE, ToolsLoader(executor))
        parse = arguments.pop("parse")

        def slow_parse(batch: Any, context: Any, parameters: Any) -> Any:
            if parameters.namespace == "slow":
                threads.sleep(LONG_TEXT_S)
            return parse(batch, context, parameters)

        return ServedModel(ENSEMBLE.tensors, slow_parse, **arguments, **shared)


class Program:
    """A client without Triton: an attached Executor and its mailboxes."""

    def __init__(self, rng: Random, setup: Setup, was_troubled: Callable[[int], bool], num_requests: int) -> None:
        self._rng, self._setup, self._was_troubled = rng, setup, was_troubled
        self._num_requests = num_requests
        self.executor: Executor | None = None
        self.process: Process | None = None
        self.left: list[str] = []

    def main(self) -> int:
        executor = self.executor = Executor.attach(SOCKET, wait_s=60.0)
        workers = [threads.Thread(target=self._work, args=(executor, n), name=f"program-{n}") for n in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self._check_empty(executor)
        executor.shutdown()
        threads.sleep(LAST_S)
        process = here().current.process
        self.left = [thread.name for thread in process.threads if thread.is_alive and thread is not here().current]
        self.left += [f"file {number}" for number in process.files]
        return 0

    def _work(self, executor: Executor, number: int) -> None:
        for _ in range(self._num_requests):
            rng = self._rng
            request = Request(
                [rng.randrange(3, 900) for _ in range(rng.randint(1, 8))],
                rng.randint(1, 10),
                streaming=rng.random() < 0.6,
                sampling_config=SamplingConfig(seed=rng.randrange(100)),
            )
            began_ns = here().now_ns
            try:
                request_id = executor.enqueue_request(request)
            except EngineUnavailable as error:
                self._excuse(str(error), began_ns)
                threads.sleep(0.5)
                continue
            if rng.random() < 0.2:
                executor.cancel_request(request_id)
            self._check(request, self._fetch(executor, request_id), began_ns)
            again = executor.await_responses(request_id, 1.0)
            if len(again) != 1 or "has already been processed" not in again[0].error_msg:
                raise Violation(f"a mailbox that has been emptied gives {again}")

    def _fetch(self, executor: Executor, request_id: Any) -> list[Response]:
        responses: list[Response] = []
        end_ns = here().now_ns + int(300e9)
        while not (responses and responses[-1].is_final):
            if here().now_ns > end_ns:
                raise Violation(f"a request of the program does not end\n{here().stacks()}")
            (some,) = executor.await_responses([request_id], self._rng.choice((0.0, 0.05, 5.0, None)))
            responses += some
            if any(response.request_id != request_id for response in some):
                raise Violation(f"responses of others in the mailbox of {request_id}: {some}")
            if any(response.is_final for response in responses[:-1]):
                raise Violation(f"two ends: {responses}")
            if not some:
                threads.sleep(0.01)
        return responses

    def _check(self, request: Request, responses: list[Response], began_ns: int) -> None:
        prompt = request.input_token_ids
        turn = Turn(request, [], prompt, request.max_tokens, request.sampling_config.seed or 0, 0, "", 0)
        due, reason = reference_output(turn, self._setup)
        came = [token for each in responses if not each.has_error() for token in each.result.output_token_ids[0]]
        last = responses[-1]
        if not request.streaming and not last.has_error():
            came = came[len(prompt) :]
        if came != due[: len(came)]:
            raise Violation(f"the program's {request}: {due} was expected, {came} came")
        if last.has_error():
            self._excuse(last.error_msg, began_ns)
        elif last.result.finish_reasons[0] is reason and came != due:
            raise Violation(f"the program's {request}: {due} was expected, {came} came")

    def _excuse(self, message: str, began_ns: int) -> None:
        here().reached["error of the program"] += 1
        is_full = "queue size" in message and self._setup.config.limits.max_queue_size < 10
        has_failed = "step failed" in message and here().reached["failed step"]
        if not (is_full or has_failed or self._was_troubled(began_ns)):
            raise Violation(f"the program is refused without a reason: {message}")

    def _check_empty(self, executor: Executor) -> None:
        if executor._mailboxes._boxes:
            raise Violation(f"left over: {executor._mailboxes._boxes}")


def stranger(rng: Random) -> Callable[[], int]:
    """A process that connects to the engine, sends what is no command, and goes."""

    def main() -> int:
        sock = Socket()
        try:
            sock.connect(SOCKET)
            for _ in range(rng.randint(1, 3)):
                size = rng.choice((0, 1, 7, 100))
                body = bytes(rng.randrange(256) for _ in range(size))
                sock.sendall(rng.choice((size.to_bytes(4, "little") + body, body)))
                if rng.random() < 0.5:
                    sock.recv(100)
            if rng.random() < 0.5:
                threads.sleep(rng.choice((0.1, 5.0)))
        except OSError as error:
            assert error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EPIPE, errno.ECONNRESET), error
        sock.close()
        return 0

    return main
