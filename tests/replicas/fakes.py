"""A ReplicaFront over replicas that do what the test says. Its door keeps what clients would get. No engine, no socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend.api import EngineConfig, ErrorCode, Request, Response
from backend.api.request import RequestId
from backend.api.response import Result
from backend.api.stats import IterationRequests, Records
from backend.core.messages import CLIENT_SHIFT, Cancel, Hello, Submit
from backend.core.step import ModelInfo
from backend.replicas.front import ReplicaFront
from backend.replicas.placement import Placement

MODEL = ModelInfo("hash", 1000, 1 << 20)
LOST = "the engine process ended while the request ran"


class Replica:
    """An Executor whose engine answers when the test says so. Its ids are those of other replicas as well."""

    has_given_up, silent_s = False, 0.0

    def __init__(self, number: int, max_kv_tokens: int = 1000, checkpoint: str = "") -> None:
        self.number, self.checkpoint, self.max_kv_tokens = number, checkpoint, max_kv_tokens
        self.tellers: dict[int, Callable[[Response], None]] = {}
        self.told: list[object] = []
        self.steps: list[IterationRequests] = []
        self._next_id = 0
        self.start()

    def start(self) -> None:
        self.hello = Hello(
            1, MODEL, "", EngineConfig(), self.max_kv_tokens, {"builtin": "/a"}, checkpoint=self.checkpoint
        )
        self.is_connected = True

    def is_ready(self) -> bool:
        return self.is_connected

    def _new(self, what: object, tell: Callable[[Response], None]) -> RequestId:
        self._next_id += 1
        self.told.append(what)
        self.tellers[self._next_id] = tell
        return RequestId(self._next_id)

    def submit(self, request: Request, tell: Callable[[Response], None], resume: object) -> RequestId:
        return self._new(request, tell)

    def stop_session(self, session: int, end: bool, tell: Callable[[Response], None], namespace: str) -> RequestId:
        return self._new((session, end, namespace), tell)

    def name_adapter(self, name: str, directory: str | None, tell: Callable[[Response], None]) -> RequestId:
        return self._new((name, directory), tell)

    def take_over(self, lost: Replica, local_id: int, tell: Callable[[Response], None]) -> RequestId | None:
        return self._new((lost.number, local_id), tell) if lost.tellers.pop(local_id, None) else None

    def cancel_request(self, local_id: int, *which: object) -> None:
        self.told.append(("cancel", local_id, *which))

    def say(self, local_id: int, *tokens: int, is_final: bool = False, error: str = "") -> None:
        code = ErrorCode.UNAVAILABLE if error == LOST else ErrorCode.INVALID_ARGUMENT
        result = Result([list(tokens)], is_final=is_final, is_sequence_final=is_final)
        request_id = RequestId(local_id)
        failed = Response(request_id, error_or_none=error, error_code=code)
        self.tellers[local_id](failed if error else Response(request_id, result_or_none=result))

    def take_request_stats(self) -> list[IterationRequests]:
        steps, self.steps = self.steps, []
        return steps

    def take_iteration_stats(self) -> list[object]:
        return []

    take_kv_events = take_debug_tensors = take_iteration_stats

    def latest_stats(self) -> None:
        return None


class Door:
    """The way to clients: what they would get."""

    def __init__(self) -> None:
        self.answers: list[Response] = []
        self.adapters: list[dict[str, str]] = []
        self.records: list[Records] = []
        self.num_closed = 0

    def deliver(self, responses: list[Response]) -> None:
        self.answers += responses

    def publish_adapters(self, adapters: dict[str, str]) -> None:
        self.adapters.append(dict(adapters))

    def publish_records(self, records: Records) -> None:
        self.records.append(records)

    def close(self) -> None:
        self.num_closed += 1


class Served:
    def __init__(self, *replicas: Replica) -> None:
        self.replicas, self.door, self._number = replicas, Door(), 0
        self.front = ReplicaFront(replicas, Placement(), lambda front: self.door)  # type: ignore[arg-type]
        self.turn()

    def turn(self) -> None:
        """One turn of the front's loop."""
        self.front.post(Cancel(RequestId(0)))  # of nothing, so that it does not wait
        self.front._look()
        self.front._turn()

    def tell(self, command: Callable[[RequestId], Any], client: int = 1) -> RequestId:
        self._number += 1
        request_id = RequestId(client << CLIENT_SHIFT | self._number)
        self.front.post(command(request_id))
        self.turn()
        return request_id

    def ask(self, num_tokens: int = 1, first: int = 0, client: int = 1, **fields: Any) -> RequestId:
        request = Request([first] * num_tokens, 9, streaming=True, **fields)
        return self.tell(lambda request_id: Submit(request_id, request), client)

    def loads(self) -> list[tuple[int, int]]:
        return [(load.num_live, load.waiting_tokens) for load in self.front._loads]

    def errors(self) -> list[str]:
        return [each.error_msg for each in self.door.answers if each.has_error()]
