"""What the routes share: reading a request, the replies to it, and the conversations that are kept."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import Request

from gateway import translate
from gateway.answers import Answer, ErrorEvent, Outlet, Running, Work, error_event
from gateway.choices import joined, pieces
from gateway.chunks import DONE, Chunks
from gateway.counters import Counters
from gateway.errors import GatewayError, unavailable
from gateway.invalid import parse
from gateway.keys import Keys
from gateway.messages import Sampling
from gateway.response_events import ResponseWriter
from gateway.response_messages import ResponseRequest
from gateway.settings import Settings
from gateway.store import ResponseStore, Stored, Turn
from gateway.triton_client import Job, Piece, TritonLink
from gateway.visit import Visit, visit_of

MARGIN_S = 10.0  # the link and the model give up first: they know the reason
_Message = TypeVar("_Message", bound=Sampling)


class Gateway:
    """`link` is there within `linked`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keys = None if settings.api_keys is None else Keys(settings.api_keys)
        self.counters = Counters()
        self.running = Running(settings.max_choices)
        self.store = ResponseStore(settings.store_count, settings.store_bytes, settings.store_ttl_s)
        self.created = int(time.time())
        self.link: TritonLink

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[None]:
        """While the application runs: the link, which belongs to its event loop."""
        settings = self.settings
        self.link = TritonLink(settings.triton, settings.triton_model, settings.request_timeout_s)
        yield
        await self.link.close()

    def read(self, kind: type[_Message], request: Request) -> _Message:
        """The body of a request, for a model that is served here. Raises GatewayError."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise GatewayError(415, "the body's type is not JSON; send the header Content-Type: application/json")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise GatewayError(415, "a compressed body is not read; send it without Content-Encoding")
        message = parse(kind, visit_of(request.scope).take_body())
        self.check_model(message.model)
        return message

    def check_model(self, name: str) -> None:
        if name not in (*self.settings.model_names, *self.settings.adapters):
            text = f"there is no model {name[:80]!r}; /v1/models lists those that are served"
            raise GatewayError(404, text, "model", "model_not_found")

    def jobs(self, asked: list[translate.Asked], visit: Visit, model: str) -> list[Job]:
        """The replies to generate, by prompts, with the adapter that `model` names. Raises GatewayError for too many."""
        limit = min(self.settings.max_choices_per_request, self.settings.max_choices)
        generated = replies_generated([each.request for each in asked])
        if generated > limit:
            text = f"prompts times n, or best_of, is {generated}, the limit is {limit}; ask for fewer"
            raise GatewayError(400, text, "n", "invalid_value")
        adapter = {"lora_name": model} if model in self.settings.adapters else {}
        return [
            Job(request | adapter, f"{visit.request_id}-{i}", visit.namespace, request.get("n", 1), origin)
            for i, (request, origin) in enumerate(asked)
        ]

    def answer(self, work: Work, jobs: list[Job], on_error: ErrorEvent = error_event) -> Answer:
        places = replies_generated([job.request for job in jobs])
        return Answer(work, self.running, places, self.settings.request_timeout_s + MARGIN_S, on_error)

    def card(self, name: str) -> dict[str, Any]:
        """What /v1/models says. An adapter has the model that it belongs to as `parent`, as with vLLM."""
        card = {"id": name, "object": "model", "created": self.created, "owned_by": "everbatch"}
        return card if name in self.settings.model_names else card | {"parent": self.settings.model_names[0]}

    async def send_chunks(self, out: Outlet, jobs: list[Job], visit: Visit, chunks: Chunks) -> None:
        """The cheap path of a token: one event, one write. Clients that take each HTTP chunk for an event, as
        perf_analyzer and genai-perf do, cannot read two in one."""
        async with aclosing(pieces(self.link, jobs, visit)) as source:
            async for index, piece in source:
                for event in chunks.of(index, piece):
                    await out.event(event)
        for event in chunks.last():
            await out.event(event)
        await out.end_of_events(DONE)

    async def respond(
        self,
        out: Outlet,
        message: ResponseRequest,
        job: Job,
        earlier: Stored | None,
        visit: Visit,
        writer: ResponseWriter,
    ) -> None:
        """A reply of /v1/responses, kept for later turns unless `store` is false."""
        reply: Piece | None = None
        async with aclosing(pieces(self.link, [job], visit)) as source:
            async for _, piece in source:
                opening = writer.opening() if reply is None and message.stream else b""
                reply = joined(reply, piece)
                if message.stream and (data := opening + writer.delta(piece)):
                    await out.event(data)
        if reply is None:
            raise unavailable("the server ended this reply early; try again")
        body = writer.finished(reply)
        if message.store is not False:
            self._keep(message, body, reply.text, earlier, visit.namespace)
        if message.stream:
            await out.end_of_events(writer.closing(body))
        else:
            await out.json(body)

    def earlier(self, message: ResponseRequest, namespace: str) -> Stored | None:
        """What previous_response_id stands for. Raises GatewayError."""
        if message.previous_response_id is None:
            return None
        found = self.store.get(namespace, message.previous_response_id)
        if found is None:
            text = "previous_response_id names no response that is kept here; send the earlier turns as input"
            raise GatewayError(400, text, "previous_response_id", "previous_response_not_found")
        return found

    def _keep(
        self, message: ResponseRequest, body: dict[str, Any], text: str, earlier: Stored | None, namespace: str
    ) -> None:
        turns: tuple[Turn, ...] = (*translate.input_turns(message), {"role": "assistant", "content": text})
        self.store.put(namespace, Stored(body["id"], turns, earlier, msgspec.json.encode(body)))


def replies_generated(requests: list[dict[str, Any]]) -> int:
    """How many sequences the model generates, those that best_of leaves out included."""
    return sum(max(request.get("n", 1), request.get("best_of", 1)) for request in requests)
