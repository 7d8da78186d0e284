"""Runner: answers the lines of batches, in the rows of the persistent batch that other clients leave free.

    validate all lines -> lines in flight, as many as the engine has slots -> answers, committed -> output files

Each line goes to its route with priority 0 (docs/batches.md). A server that is full or away makes the runner wait, never a line
fail. An answer counts once it is committed: after a kill the lines without one are asked again. A few batches of a namespace run
at once, the others in the order in which they came. Namespaces take turns line by line, and so do the batches of one.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from starlette.types import ASGIApp

from gateway.batches.database import Answered, Database
from gateway.batches.inner import ask
from gateway.batches.lines import BatchLine, Checker, answer_line, error_line, usage_in
from gateway.batches.places import FairPlaces
from gateway.batches.records import BatchRecord, FileRecord, Status
from gateway.errors import GatewayError, ServerLost, unavailable
from gateway.keys import EVERYBODY, Client
from gateway.live import slots_of
from gateway.request_context import RequestContext

if TYPE_CHECKING:
    from gateway.core import Gateway

BATCHES_AT_ONCE = 4  # for one namespace
USUAL_SLOTS = 8  # where the engine does not say how many it has
SLICE_BYTES = 1 << 18  # bytes of lines that are checked without a pause for what others ask of the database
SLICE_ANSWERS = 1000
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # until a full server is asked again
MOST_LOSSES = 3  # times that the server ended twice under a line, until the line is the suspect
LONGEST_LINE_S = 24 * 3600.0  # limits.max_timeout_s, as it is unless configured
PERIOD_S = 3600.0  # between two looks for what has expired
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
_ENDS: dict[Status, tuple[str, str]] = {
    "expired": ("batch_expired", "this request could not be executed before the completion window expired"),
    "cancelled": ("batch_cancelled", "this request was not executed: the batch was cancelled"),
}
_FULL = "answers of batches cannot be kept: %s; they are tried again"
_log = logging.getLogger("everbatch.gateway")
_Result = TypeVar("_Result")


class _Work(NamedTuple):
    """A batch that runs."""

    record: BatchRecord
    input: FileRecord
    client: Client | None  # None: its key is gone
    stopped: asyncio.Event  # a client has cancelled it
    losses: defaultdict[int, int]  # by lines


class Batches:
    """The files and batches of a server, and the runner. `link` and routes are the gateway's."""

    def __init__(self, gateway: Gateway, database: Database) -> None:
        self.gateway = gateway
        self._database = database
        self._thread = ThreadPoolExecutor(1, "batches")
        self._app: ASGIApp
        self._places = FairPlaces(USUAL_SLOTS)
        self._queues: defaultdict[str, deque[str]] = defaultdict(deque)  # ids of batches that wait, by namespaces
        self._running: Counter[str] = Counter()  # batches with lines that are not sent yet, by namespaces
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped: dict[str, asyncio.Event] = {}
        self._answers: asyncio.Queue[tuple[Answered, asyncio.Future[None]]] = asyncio.Queue()
        self._full_until = 0.0  # the server was full, and is not asked before
        self._wait_s = FIRST_WAIT_S

    async def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """A method of the database, in its thread. Raises GatewayError(503) where the disk fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        except sqlite3.Error as error:
            _log.error("the database of batches: %s", error)
            raise unavailable(f"the database of batches cannot be used: {error}") from None

    @property
    def database(self) -> Database:
        """Its methods are for `call`."""
        return self._database

    # ---- the runner's life -------------------------------------------------------------------------------------------

    async def start(self, app: ASGIApp) -> None:
        """Go on with what had not ended. `app`: the routes."""
        self._app = app
        self._spawn(self._commit())
        self._spawn(self._clean_up())
        for record in await self.call(self._database.open_batches):
            self.enter(record)

    async def stop(self) -> None:
        """Lines in flight end without an answer, and are asked again when the server is back."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        self._thread.shutdown()

    def enter(self, record: BatchRecord) -> None:
        """A batch that has not ended is to run."""
        self._stopped[record.id] = asyncio.Event()
        if record.status == "cancelling":
            self._stopped[record.id].set()
        self._queues[record.namespace].append(record.id)
        self._fill(record.namespace)

    async def cancel(self, record: BatchRecord) -> BatchRecord:
        """Its lines end; the batch has ended some moments later."""
        record = await self.call(self._database.move, record.id, "cancelling", ("validating", "in_progress"))
        if record.status == "cancelling" and (event := self._stopped.get(record.id)) is not None:
            event.set()
            if record.id in self._queues[record.namespace]:  # it need not wait for its turn
                self._queues[record.namespace].remove(record.id)
                self._spawn(self._guarded(record.id, nothing))
        return record

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _clean_up(self) -> None:
        while True:
            await self.call(self._database.drop_expired)
            await asyncio.sleep(PERIOD_S)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def _fill(self, namespace: str) -> None:
        """Start the batches of a namespace that wait, up to BATCHES_AT_ONCE."""
        queue = self._queues[namespace]
        while queue and self._running[namespace] < BATCHES_AT_ONCE:
            self._running[namespace] += 1
            self._spawn(self._guarded(queue.popleft(), once(partial(self._leave, namespace))))
        if not queue:
            del self._queues[namespace]

    def _leave(self, namespace: str) -> None:
        """All lines of a batch have been sent, or it has ended: the next one may begin."""
        self._running[namespace] -= 1
        if not self._running[namespace]:
            del self._running[namespace]
        self._fill(namespace)

    async def _guarded(self, batch_id: str, all_sent: Callable[[], None]) -> None:
        """Run a batch, again and again while the disk fails. After a failure of this program it goes on at the next start."""
        try:
            while True:
                try:
                    await self._run(batch_id, all_sent)
                    return
                except GatewayError:  # `call` has logged it
                    await asyncio.sleep(LONGEST_WAIT_S)
        except Exception as error:
            _log.exception("%s waits for the next start of the endpoint: %s", batch_id, type(error).__name__)
        finally:
            self._stopped.pop(batch_id, None)
            all_sent()

    async def _run(self, batch_id: str, all_sent: Callable[[], None]) -> None:
        record, stopped = await self.call(self._database.batch, batch_id), self._stopped[batch_id]
        assert record is not None, "it was open"
        if record.has_ended:
            return
        if record.status == "validating" and not await self._is_valid(record):
            return
        record = await self.call(self._database.batch, batch_id)
        assert record is not None and not record.has_ended
        if not record.output:  # it was cancelled before it had begun
            await self.call(self._database.move, batch_id, "cancelled", OPEN)
            return
        file = await self.call(self._database.input_of, record)
        left = await self._unanswered(record, file)
        work = _Work(record, file, self._client(record), stopped, defaultdict(int))
        end = await self._answer_all(work, left, all_sent)
        left = await self._unanswered(record, file)
        if end != "completed":
            await self._answer_rest(record, left, file, *_ENDS[end])
        else:
            assert not left, f"lines {left[:9]} have no answer"
            await self.call(self._database.move, batch_id, "finalizing", ("in_progress",))
        record = await self.call(self._database.move, batch_id, end, OPEN)
        counts = record.completed, record.failed, record.total
        _log.info("%s %s: %d of its lines were answered, %d failed, of %d", batch_id, end, *counts)

    async def _is_valid(self, record: BatchRecord) -> bool:
        """Check all lines. False if the batch has failed."""
        file = await self.call(self._database.input_of, record)
        checker, last = Checker(record.endpoint), 0
        while not checker.is_over:
            if not (lines := await self.call(self._check_slice, checker, file, last)):
                break
            last = lines
        checker.end()
        if checker.faults:
            await self.call(self._failed, record.id, checker)
            return False
        await self.call(self._database.begin_answers, record.id, checker.total, checker.model)
        return True

    def _check_slice(self, checker: Checker, file: FileRecord, after: int) -> int:
        """Check some lines; returns the number of the last one, 0 behind the last of the file."""
        lines = self._database.lines(file, after, SLICE_BYTES)
        for number, data in lines:
            checker.check(number, data)
        return lines[-1][0] if lines else 0

    def _failed(self, batch_id: str, checker: Checker) -> None:
        self._database.move(
            batch_id, "failed", ("validating", "cancelling"), faults=checker.faults, model=checker.model
        )

    async def _unanswered(self, record: BatchRecord, file: FileRecord) -> list[int]:
        """The numbers of lines without an answer."""
        answered = await self.call(self._database.answered, record)
        left, last = [], 0
        while lines := await self.call(self._database.lines, file, last, SLICE_BYTES):
            left += [number for number, data in lines if number not in answered and data.strip()]
            last = lines[-1][0]
        return left

    def _client(self, record: BatchRecord) -> Client | None:
        keys = self.gateway.keys
        if keys is None:
            return EVERYBODY if not record.client else None
        return keys.client_named(record.client)

    async def _answer_all(self, work: _Work, numbers: list[int], all_sent: Callable[[], None]) -> Status:
        """Answer lines until all are, or the batch is cancelled, or its time is over. Returns the status to end with."""
        record = work.record
        sending = asyncio.ensure_future(self._send_all(work, numbers, all_sent))
        stopping = asyncio.ensure_future(work.stopped.wait())
        try:
            left_s = max(0.0, record.expires_at - time.time())
            await asyncio.wait({sending, stopping}, timeout=left_s, return_when="FIRST_COMPLETED")
            if work.stopped.is_set():
                return "cancelled"
            if not sending.done():
                return "expired"
            sending.result()
            return "completed"
        finally:
            for task in (sending, stopping):
                task.cancel()
            await asyncio.gather(sending, stopping, return_exceptions=True)

    async def _send_all(self, work: _Work, numbers: list[int], all_sent: Callable[[], None]) -> None:
        lines: set[asyncio.Task[None]] = set()
        try:
            self._places.total = await self._most_in_flight()
            for number in numbers:
                await self._places.take(work.record.namespace)
                line = asyncio.ensure_future(self._answer(work, number))
                lines.add(line)
                done, lines = await asyncio.wait(lines, timeout=0)
                for each in done:
                    each.result()
            all_sent()
            await asyncio.gather(*lines)
        finally:
            for line in list(lines):
                line.cancel()
            await asyncio.gather(*lines, return_exceptions=True)

    async def _most_in_flight(self) -> int:
        """The slots of the engine, and as many more as keep a line waiting for each slot that becomes free."""
        slots = await slots_of(self.gateway.link) or USUAL_SLOTS
        return slots + -(-slots // 8)

    async def _answer_rest(
        self, record: BatchRecord, numbers: list[int], file: FileRecord, code: str, text: str
    ) -> None:
        """Lines that are not executed get an error each."""
        for start in range(0, len(numbers), SLICE_ANSWERS):
            await self.call(self._put_errors, record.id, numbers[start : start + SLICE_ANSWERS], file, code, text)

    def _put_errors(self, batch_id: str, numbers: list[int], file: FileRecord, code: str, text: str) -> None:
        lines = [(number, self._database.line(file, number)) for number in numbers]
        answers = [
            Answered(batch_id, number, error_line(_line(data).custom_id, code, text), False) for number, data in lines
        ]
        self._database.put_answers(answers)

    # ---- lines -------------------------------------------------------------------------------------------------------

    async def _answer(self, work: _Work, number: int) -> None:
        """Answer a line, and give its place back once the answer is kept."""
        try:
            line = _line(await self.call(self._database.line, work.input, number))
            answer = await self._answered(work, number, line)
            kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._answers.put_nowait((answer, kept))
            await kept
        finally:
            self._places.give_back()

    async def _answered(self, work: _Work, number: int, line: BatchLine) -> Answered:
        record = work.record
        if work.client is None:
            text = "the key that made this batch is no longer in the server's file of API keys"
            return Answered(record.id, number, error_line(line.custom_id, "key_removed", text), False)
        if (full := await self._full(record.namespace)) is not None:
            return Answered(record.id, number, error_line(line.custom_id, "storage_full", full), False)
        while True:
            context = RequestContext(client=work.client, body=bytes(line.body), is_background=True)
            context.is_forwarded = not record.is_local
            context.timeout_s = min(max(1.0, record.expires_at - time.time()), LONGEST_LINE_S)
            status, body = await ask(self._app, line.url, context)
            error = context.error
            if isinstance(error, ServerLost):
                work.losses[number] += 1
            if status not in (429, 503) or work.losses[number] >= MOST_LOSSES:
                break
            await self._wait_for_server()
        self._wait_s = FIRST_WAIT_S
        counters = self.gateway.counters
        counters.prompt_tokens += context.prompt_tokens
        counters.completion_tokens += context.completion_tokens
        data = answer_line(line.custom_id, status, context.request_id, body)
        return Answered(record.id, number, data, status == 200, usage_in(body) if status == 200 else (0, 0, 0, 0))

    async def _full(self, namespace: str) -> str | None:
        """Why no more answers of a namespace are kept; None: they are."""
        most = self.gateway.settings.files_bytes
        _, size = await self.call(self._database.use, namespace)
        return f"the files of this key have {size} bytes, the limit is {most}; delete some" if size >= most else None

    async def _wait_for_server(self) -> None:
        """The server is full, or away. All lines that are sent wait as long, each time twice as long as before."""
        now = time.monotonic()
        if now >= self._full_until:
            self._full_until = now + self._wait_s
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        await asyncio.sleep(self._full_until - now)
        while not await self.gateway.link.is_ready():
            await asyncio.sleep(FIRST_WAIT_S)

    async def _commit(self) -> None:
        """Keep the answers that have come, those of a moment in one transaction."""
        while True:
            batch = [await self._answers.get()]
            while not self._answers.empty():
                batch.append(self._answers.get_nowait())
            while True:
                try:
                    await self.call(self._database.put_answers, [answer for answer, _ in batch])
                    break
                except GatewayError as error:
                    _log.error(_FULL, error.message)
                    await asyncio.sleep(LONGEST_WAIT_S)
                except Exception as error:
                    _log.exception("answers of batches are lost until the next start: %s", type(error).__name__)
                    break
            for _, kept in batch:
                if not kept.done():
                    kept.set_result(None)


def _line(data: bytes) -> BatchLine:
    """A line that has been checked."""
    return msgspec.json.decode(data, type=BatchLine)


def once(function: Callable[[], None]) -> Callable[[], None]:
    """A function that calls this one the first time."""
    left = [function]

    def call() -> None:
        if left:
            left.pop()()

    return call


def nothing() -> None:
    """For a batch that has no turn to give up."""
