"""ReplicaFront: one engine in the eyes of its clients, several in fact. Each request goes to the replica that Placement chooses.

    clients -- EngineServer -- ReplicaFront -- one Executor for each replica -- the replica's own engine process

One thread owns all state; clients and replicas post into its inbox. As with a single engine, what clients see tells the truth:
while all replicas are silent the front sends no heartbeats, so that clients count as not ready and their streams wait. Where no
replica is even connected it hangs up on its clients, and listens again once there is one.

Request ids have three forms: a client's, the replica's (of the Executor there), and the serial number of this front, by which an
answer finds its request even when the client and its id are gone.
"""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from backend.api.errors import EngineUnavailable, ErrorCode, EverbatchError, Unsupported
from backend.api.request import Request, RequestId
from backend.api.response import Response
from backend.api.stats import IterationRequests, KvEvent, Records
from backend.core.messages import (
    CLIENT_SHIFT,
    Cancel,
    ClientGone,
    Command,
    Hello,
    Look,
    NameAdapter,
    Resume,
    StopSession,
    Submit,
)
from backend.executor.executor import Executor
from backend.executor.live import OnResponse
from backend.replicas.live import Door, Named, Naming, ReplicaAnswer, RunningRequest, are_alike, has_stopped, may_move
from backend.replicas.placement import Placement, ReplicaLoad
from backend.replicas.totals import total_stats
from backend.wire.engine_server import EngineServer

log = logging.getLogger("everbatch.replicas")
LOOK_S = 0.1  # how often the front looks whether replicas came or went, while nothing else wakes it
NOT_WATCHED = "the live view is of one engine, and this server has several replicas; read their metrics"
NONE_READY = "no replica is ready at the moment; try again in a few seconds"


class ReplicaFront:
    def __init__(
        self,
        replicas: Sequence[Executor],
        placement: Placement,
        open_door: Callable[[ReplicaFront], Door],
        stats_period_s: float = 1.0,
    ) -> None:
        """`open_door` makes the server that clients reach; it posts their commands here, and greets them with `hello`."""
        self._replicas = replicas
        self._placement = placement
        self._open_door = open_door
        self._door: Door | None = None
        self._inbox: queue.SimpleQueue[Command | ClientGone | ReplicaAnswer | Named | None] = queue.SimpleQueue()
        self._live: dict[int, RunningRequest] = {}  # by serial number
        self._serials: dict[RequestId, int] = {}  # serial numbers of live requests, by the client's ids
        self._counter = itertools.count(1)
        self._loads = [ReplicaLoad() for _ in replicas]
        self._greetings: list[Hello | None] = [None] * len(replicas)  # the Hello of each replica's present engine
        self._adapters: dict[str, str] = {}  # that clients have named
        self._answers: list[Response] = []  # to be delivered at the end of this turn
        self._num_events = 0
        self._life = secrets.token_hex(8)  # the name of this front's life
        self._stats_period_s = stats_period_s
        self._next_stats_s = 0.0
        self._stopping = False
        self.is_serving = False  # True while a replica is ready; any thread may read it

    def post(self, command: Command | ClientGone) -> None:
        """From any thread."""
        self._inbox.put(command)

    def stop(self) -> None:
        """Make `run` return soon. From any thread, or a signal handler."""
        self._stopping = True
        self._inbox.put(None)

    def hello(self, client_index: int) -> Hello:
        """The Hello of the first replica, with what all replicas have in common."""
        known = [each for each in self._greetings if each is not None]
        adapters = {**known[0].adapters, **self._adapters}
        least = min(each.max_kv_tokens for each in known)
        workers = replace(known[0].config.workers, replicas=len(self._replicas))
        config = replace(known[0].config, workers=workers)
        own = replace(known[0], client_index=client_index, config=config, engine=self._life, trial=None)
        return replace(own, max_kv_tokens=least, adapters=adapters)

    def run(self) -> None:
        """Serve until `stop`. Raises EngineUnavailable once all replicas have been given up."""
        try:
            while not self._stopping:
                self._look()
                self._turn()
                self._report()
        finally:
            if self._door is not None:
                self._door.close()

    def _turn(self) -> None:
        """Wait for something in the inbox, take in everything, and deliver the answers.

        The records of a step reach this process ahead of its answers, which end the requests that the records name.
        """
        items = self._waiting()
        self._publish_records()
        for item in items:
            self._apply(item)
        if self._answers and self._door is not None:
            self._door.deliver(self._answers)
        self._answers = []

    def _waiting(self) -> list[Command | ClientGone | ReplicaAnswer | Named]:
        """Everything in the inbox, after LOOK_S at most."""
        items = []
        with suppress(queue.Empty):
            items.append(self._inbox.get(timeout=LOOK_S))
            while True:
                items.append(self._inbox.get_nowait())
        return [item for item in items if item is not None]

    def _apply(self, item: Command | ClientGone | ReplicaAnswer | Named) -> None:
        match item:
            case ReplicaAnswer(serial, response):
                self._take_answer(serial, response)
            case Named():
                self._take_named(item.naming, item.response)
            case Submit(request_id, request, resume):
                self._submit(request_id, request, resume)
            case Cancel(request_id, keep_output_tokens, sequence_index):
                live = self._live.get(self._serials.get(request_id, 0))
                if live is not None:
                    live.is_cancelled = True
                    replica = self._replicas[live.replica]
                    replica.cancel_request(live.local_id, keep_output_tokens, sequence_index)
            case StopSession():
                self._stop_session(item)
            case NameAdapter():
                self._name(item)
            case Look(request_id):
                self._refuse(request_id, Unsupported(NOT_WATCHED))
            case ClientGone(client_index):
                self._cancel_all([each for each in self._serials if each >> CLIENT_SHIFT == client_index])

    # Requests

    def _submit(
        self, request_id: RequestId, request: Request, resume: Resume | None = None, lost_by: tuple[int, ...] = ()
    ) -> None:
        ready = [each for each in self._ready() if each not in lost_by]
        at = None if request.session is None else self._placement.holder(request.cache_salt, request.session.id)
        must_wait = request.session is not None and not request.session.start and at is not None and at not in ready
        if not ready or must_wait:
            self._refuse(request_id, EngineUnavailable(NONE_READY))
            return
        place = self._placement.place(request, ready, self._loads)
        movable = request if may_move(request) else None
        live = RunningRequest(request_id, place.replica, place.num_new_tokens, request, lost_by, resume, movable)
        self._send(live, lambda replica, tell: replica.submit(request, tell, resume))
        if request.session is not None and request.session.end:
            self._placement.end(request.cache_salt, request.session.id)

    def _send(self, live: RunningRequest, send: Callable[[Executor, OnResponse], RequestId]) -> None:
        """Send a request to its replica with `send`; refuse it if that fails."""
        serial = next(self._counter)
        try:
            live.local_id = send(self._replicas[live.replica], self._teller(serial))
        except EverbatchError as error:
            self._refuse(live.request_id, error)
            return
        self._live[serial] = live
        self._serials[live.request_id] = serial
        load = self._loads[live.replica]
        load.num_live += 1
        load.waiting_tokens += live.num_new_tokens

    def _move_held(self) -> None:
        """Requests of lost replicas go on at others of the same model; turns of sessions wait for their own."""
        for serial, live in list(self._live.items()):
            lost = self._replicas[live.replica]
            if lost.is_connected or live.is_cancelled or live.movable is None:
                continue
            ready = [each for each in self._ready() if are_alike(self._replicas[each], lost)]
            if ready:
                self._move(serial, live, live.movable, ready)

    def _move(self, serial: int, live: RunningRequest, request: Request, ready: list[int]) -> None:
        place, lost = self._placement.place(request, ready, self._loads), self._replicas[live.replica]
        try:
            local_id = self._replicas[place.replica].take_over(lost, live.local_id, self._teller(serial))
        except EverbatchError:
            return  # it is lost as well; the next look finds another one
        if local_id is None:
            return
        before, after = self._loads[live.replica], self._loads[place.replica]
        before.num_live, after.num_live = before.num_live - 1, after.num_live + 1
        if live.request is not None:
            before.waiting_tokens -= live.num_new_tokens
            after.waiting_tokens += place.num_new_tokens
        live.local_id, live.replica, live.num_new_tokens = local_id, place.replica, place.num_new_tokens

    def _teller(self, serial: int) -> OnResponse:
        return lambda response: self._inbox.put(ReplicaAnswer(serial, response))

    def _stop_session(self, command: StopSession) -> None:
        """The replica that holds the session answers; where none is known, any one says that there is no such session."""
        at = self._placement.holder(command.namespace, command.session_id)
        ready = self._ready()
        if not ready or (at is not None and at not in ready):
            self._refuse(command.request_id, EngineUnavailable(NONE_READY))
            return
        live = RunningRequest(command.request_id, ready[0] if at is None else at, 0)
        session, end, namespace = command.session_id, command.end, command.namespace
        self._send(live, lambda replica, tell: replica.stop_session(session, end, tell, namespace))
        if command.end:
            self._placement.end(command.namespace, command.session_id)

    def _take_answer(self, serial: int, response: Response) -> None:
        live = self._live.get(serial)
        if live is None:
            return
        is_wanted = self._serials.get(live.request_id) == serial  # false once its client is gone
        request, live.request = live.request, None
        if request is not None:
            self._loads[live.replica].waiting_tokens -= live.num_new_tokens
        if response.is_final:
            self._loads[live.replica].num_live -= 1
            del self._live[serial]
            if is_wanted:
                del self._serials[live.request_id]
        if not is_wanted:
            return
        is_lost = response.error_code is ErrorCode.UNAVAILABLE and not live.is_cancelled
        if request is not None and is_lost and may_move(request):
            self._submit(live.request_id, request, live.resume, (*live.lost_by, live.replica))
        else:
            self._answers.append(replace(response, request_id=live.request_id))

    def _refuse(self, request_id: RequestId, error: EverbatchError) -> None:
        self._answers.append(Response(request_id, error_or_none=error.message, error_code=error.code))

    def _cancel_all(self, request_ids: list[RequestId]) -> None:
        """Cancel requests whose client is gone. They stay in the load of their replica until it has answered."""
        for live in [self._live[self._serials.pop(request_id)] for request_id in request_ids]:
            self._replicas[live.replica].cancel_request(live.local_id)

    # Adapters: all replicas know the same names

    def _name(self, command: NameAdapter) -> None:
        ready = self._ready()
        if not ready:
            self._refuse(command.request_id, EngineUnavailable(NONE_READY))
            return
        naming = Naming(command, len(ready))
        for each in ready:
            self._name_at(each, naming)

    def _name_at(self, replica: int, naming: Naming) -> None:
        command = naming.command

        def tell(response: Response) -> None:
            self._inbox.put(Named(naming, response))

        try:
            self._replicas[replica].name_adapter(command.name, command.directory, tell)
        except EverbatchError as error:
            tell(Response(command.request_id, error_or_none=error.message, error_code=error.code))

    def _take_named(self, naming: Naming, response: Response) -> None:
        """The last answer is the client's; an error of any replica is."""
        naming.num_open -= 1
        naming.error = naming.error or (response if response.has_error() else None)
        if naming.num_open:
            return
        command = naming.command
        if naming.error is None:
            if command.directory is None:
                self._adapters.pop(command.name, None)
            else:
                self._adapters[command.name] = command.directory
            if self._door is not None:
                self._door.publish_adapters(self.hello(0).adapters)
        self._answers.append(replace(naming.error or response, request_id=command.request_id))

    # Replicas that come and go

    def _ready(self) -> list[int]:
        return [
            index
            for index, each in enumerate(self._replicas)
            if each.is_ready() and each.hello is self._greetings[index]
        ]

    def _look(self) -> None:
        """Notice replicas that have started again, and open or close the door. Raises EngineUnavailable if all are given up."""
        for index, each in enumerate(self._replicas):
            if each.is_ready() and each.hello is not self._greetings[index]:
                self._greet(index, each)
        self._leave_stopped()
        self._move_held()
        self.is_serving = bool(self._ready())
        if self.is_serving and self._door is None:
            self._door = self._open_door(self)
        elif self._door is not None and not any(each.is_connected for each in self._replicas):
            log.error("%s", NONE_READY)
            self._door.close()
            self._door = None
            self._cancel_all(list(self._serials))
        if all(each.has_given_up for each in self._replicas):
            raise EngineUnavailable("all replicas ended too often, and none of them is started again")

    def _leave_stopped(self) -> None:
        """Hang up on replicas that have been silent for so long that they count as ended, so that their requests can move. One
        whose process is stopped, or whose node is, keeps its connection and cannot always be ended.
        """
        if not self._ready():
            return
        for index, each in enumerate(self._replicas):
            if has_stopped(each):
                log.warning("replica %d has given no sign of life for %.1f s; its requests move", index, each.silent_s)
                each.leave_engine()

    def _greet(self, index: int, replica: Executor) -> None:
        """Take in a replica that has connected, the first time or again. Adapters are named there before any request."""
        if self._greetings[index] is not None:
            log.warning("replica %d has started again: its KV cache is empty", index)
            self._placement.forget(index)
        self._greetings[index] = replica.hello
        for name, directory in self._adapters.items():
            command = NameAdapter(RequestId(0), name, directory)
            self._name_at(index, Naming(command, 2))  # Two answers are counted and one comes, because no client waits.

    # Statistics

    def _report(self) -> None:
        now = time.monotonic()
        if now < self._next_stats_s or self._door is None:
            return
        self._next_stats_s = now + self._stats_period_s
        told = [stats for each in self._replicas if (stats := each.latest_stats()) is not None]
        if told:
            self._door.publish_stats(total_stats(told))

    def _publish_records(self) -> None:
        """Hand on the replicas' records, ahead of the answers of the same steps. Events are numbered anew."""
        if self._door is None:
            return
        for index, each in enumerate(self._replicas):
            records = Records(
                each.take_iteration_stats(),
                self._renamed(index, each.take_request_stats()),
                [self._numbered(event) for event in each.take_kv_events()],
                each.take_debug_tensors(),
            )
            if records != Records():
                self._door.publish_records(records)

    def _renamed(self, replica: int, steps: list[IterationRequests]) -> list[IterationRequests]:
        """Requests in steps of a replica, with their clients' ids; without those that have ended for their client."""
        if not steps:
            return []
        ids = {each.local_id: each.request_id for each in self._live.values() if each.replica == replica}
        return [
            replace(
                step,
                requests=[
                    replace(each, request_id=ids[each.request_id]) for each in step.requests if each.request_id in ids
                ],
            )
            for step in steps
        ]

    def _numbered(self, event: KvEvent) -> KvEvent:
        self._num_events += 1
        return replace(event, event_id=self._num_events - 1)


def listen(socket_path: str) -> Callable[[ReplicaFront], EngineServer]:
    """A door at a socket."""
    return lambda front: EngineServer(socket_path, front.post, front.hello, is_alive=lambda: front.is_serving)
