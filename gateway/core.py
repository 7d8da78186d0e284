"""Shared by the routes: reading a request, the replies to it, and the conversations that are kept."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from copy import copy
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request

from gateway import translate
from gateway.answers import EVENTS, Answer, ErrorEvent, Outlet, Running, StreamForm, Work, error_event
from gateway.batches.database import Database
from gateway.batches.runner import Batches
from gateway.bodies import LARGE_BODY
from gateway.choices import pieces, whole
from gateway.chunks import DONE, Chunks
from gateway.counters import Counters
from gateway.dialect import Dialect
from gateway.errors import GatewayError
from gateway.image_intake import ImageIntake
from gateway.invalid import parse
from gateway.items import Item
from gateway.keys import THIS_MACHINE, Client, Keys, Right
from gateway.live import LiveFeed
from gateway.messages import Completing, ModelRequest, Wire
from gateway.places import Places
from gateway.request_context import RequestContext, visit_of
from gateway.response_events import ResponseWriter
from gateway.response_messages import Asking, ResponseRequest
from gateway.served import Served
from gateway.settings import Settings, is_loopback
from gateway.store import Conversation, ResponseStore, Stored
from gateway.triton_client import Job, Piece, TritonLink
from gateway.turns import Turns
from gateway.without_effect import IGNORED

FACTS_TIMEOUT_S = 2.0
MOST_NAMED = 20  # models that an error lists
MOST_VIEWERS = 32  # streams of /everbatch/live at once
NO_FIM = (
    "{param} is not served by the model {model!r}: its tokenizer has no tokens for filling in the middle; send the prompt"
    " alone, or name a model whose capabilities in /v1/models have fim, such as a Qwen2.5-Coder or a StarCoder2"
)
MARGIN_S = 10.0  # the link and the model give up first: they know the reason
_log = logging.getLogger("everbatch.gateway")
_Body = TypeVar("_Body", bound=Wire)
_Message = TypeVar("_Message", bound=ModelRequest)
_Result = TypeVar("_Result")


class Facts(NamedTuple):
    """A model's facts, told by itself. `max_model_len`: tokens of prompt and answer together. `capabilities`: see
    backend/serving/wires/capabilities.py.
    """

    max_model_len: int | None
    takes_images: bool
    capabilities: tuple[str, ...] = ()


class Before(NamedTuple):
    """The beginning of a response: the items before it, the response that holds them, and the conversation that it adds to."""

    items: list[Item]
    earlier: Stored | None
    conversation: str | None


class Responding(NamedTuple):
    """A request of /v1/responses, the items of its input, and what it goes on from."""

    message: ResponseRequest
    items: list[Item]
    before: Before


class Gateway:
    """`link` is there within `linked`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # Their adapters change while the server runs (gateway/adapters.py).
        first = Served(
            *(settings.triton_model, settings.model_names, settings.adapters, settings.metrics_label),
            *(settings.tool_format, settings.reasoning_format, settings.prompt_adapters),
        )
        self.served = (first, *map(copy, settings.others))
        self._dialects = {each.triton_model: Dialect.of(each) for each in self.served}
        self.changing_adapters = asyncio.Lock()  # held from a change until its list of names has come
        self.keys = None if settings.api_keys is None else Keys(settings.api_keys, self.names)
        self.counters = Counters()
        self.requests = Places(settings.max_requests, with_shares=self.keys is not None)
        self.running = Running(Places(settings.max_choices, with_shares=self.keys is not None))
        self.live = LiveFeed()
        self.viewers = Running(Places(MOST_VIEWERS, with_shares=self.keys is not None), "viewers", "watch")
        self.store = ResponseStore(settings.store_count, settings.store_bytes, settings.store_ttl_s)
        self.batches = None if settings.batches is None else Batches(self, Database(settings.batches))
        self.created = int(time.time())
        self._told: set[str] = set()  # keys without effect that the log has named
        self._is_private = is_loopback(settings.host)
        self.turns = Turns()
        self._facts: dict[str, asyncio.Task[Facts | None]] = {}  # by Triton models
        self.images = ImageIntake(settings)
        self._thread = ThreadPoolExecutor(1, "large-bodies")
        self.link: TritonLink

    @property
    def names(self) -> tuple[str, ...]:
        """The models, LoRA adapters and prompt adapters that requests may name."""
        return tuple(name for each in self.served for name in each.all_names)

    def dialect(self, model: str) -> Dialect:
        return self._dialects[self.served_as(model).triton_model]

    def served_as(self, name: str) -> Served:
        """The model that a name is of; the first one for a name of none."""
        return next((each for each in self.served if name in each.all_names), self.served[0])

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[None]:
        """While the application runs: the link, which belongs to its event loop."""
        settings = self.settings
        timeout_s, patience_s = settings.request_timeout_s, settings.resume_timeout_s
        self.link = TritonLink(settings.triton, settings.triton_model, timeout_s, self.turns, patience_s)
        yield
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self.images.close()
        await self.link.close()

    async def read(self, kind: type[_Message], request: Request) -> _Message:
        """The body of a request, for a model that is served here. Raises GatewayError."""
        message = await self.read_body(kind, request)
        self.check_model(message.model, visit_of(request.scope).client)
        return message

    async def read_for_any(self, kind: type[_Message], request: Request) -> _Message:
        """As `read`, of a wire whose clients need not name a model: the first one that the key may use is theirs."""
        message, client = await self.read_body(kind, request), visit_of(request.scope).client
        message.model = message.model or next(iter(self.models(client)), "")
        self.check_model(message.model, client)
        return message

    async def read_body(self, kind: type[_Body], request: Request) -> _Body:
        """Raises GatewayError."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise GatewayError(415, "the body's type is not JSON; send the header Content-Type: application/json")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise GatewayError(415, "a compressed body is not read; send it without Content-Encoding")
        context = visit_of(request.scope)
        message: _Body
        message, context.ignored = await self.aside(context, parse, kind, context.take_body())
        for key in context.ignored:
            if key.path not in self._told:
                self._told.add(key.path)
                _log.info(
                    "%s of %s has no effect here; answers name it in the header %s", key.path, key.client, IGNORED
                )
        return message

    async def aside(self, context: RequestContext, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """The function's result. For a request with a large body it runs in the one thread that is there for this: the event
        loop serves the others meanwhile.
        """
        if context.body_bytes <= LARGE_BODY:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def translated(
        self, context: RequestContext, model: str, function: Callable[..., translate.Asked], *arguments: Any
    ) -> translate.Asked:
        """The request that the function makes for the model, with the bytes of its images. Raises GatewayError."""
        asked = await self.aside(context, function, *arguments)

        async def takes_images() -> bool | None:
            facts = await self.facts(self.served_as(model))
            return None if facts is None else facts.takes_images

        aside = partial(self.aside, context)
        return asked._replace(request=await self.images.filled(asked.request, model, takes_images, aside))

    async def body_limit(self, size: int) -> int:
        """The most bytes of a body, of which so many have come or are announced: more where a model takes images. The models
        are asked only where that makes a difference.
        """
        settings = self.settings
        if size <= settings.max_body_bytes or settings.max_image_body_bytes <= settings.max_body_bytes:
            return settings.max_body_bytes
        found = await asyncio.gather(*map(self.facts, self.served))
        takes_images = any(facts is not None and facts.takes_images for facts in found)
        return settings.max_image_body_bytes if takes_images else settings.max_body_bytes

    def check_right(self, right: Right, context: RequestContext) -> None:
        """Raise GatewayError(403) for a client that does not have it."""
        if self.keys is not None and not right.is_of(context.client):
            text = f"this key may not {right.forbidden}; one whose line in the file of API keys has the word {right.word} may"
            raise GatewayError(403, text, code="permission_denied")
        if self.keys is None and right.without_keys and not self.is_of_this_machine(context):
            text = f"{right.without_keys} from this machine only; start the server with --api-keys FILE for others"
            raise GatewayError(403, text, code="permission_denied")

    def models(self, client: Client) -> list[str]:
        """The names that a client may give as `model`."""
        return [name for name in self.names if client.may_use(name)]

    def check_model(self, name: str, client: Client) -> None:
        served = self.models(client)
        if name not in served:
            shown = (
                ", ".join(served[:MOST_NAMED]) + (", ..." if len(served) > MOST_NAMED else "") or "none for this key"
            )
            text = f"there is no model {name[:80]!r}; served are: {shown}"
            raise GatewayError(404, text, "model", "model_not_found")

    def places(self, message: Completing) -> int:
        """How many replies are generated for a request. Raises GatewayError for too many."""
        limit = min(self.settings.max_choices_per_request, self.settings.max_choices)
        generated = translate.replies_generated(message)
        if generated > limit:
            text = f"prompts times n, or best_of, is {generated}, the limit is {limit}; ask for fewer"
            raise GatewayError(400, text, "n", "invalid_value")
        return generated

    def jobs(self, asked: list[translate.Asked], context: RequestContext, model: str) -> list[Job]:
        """The replies to generate, by prompts, with the adapter that `model` names."""
        served, party = self.served_as(model), self._party(context)
        adapter = {"lora_name": model} if model in served.adapters else {}
        if model in served.prompt_adapters:
            adapter = {"prompt_adapter_name": model}
        more: dict[str, Any] = adapter | ({"priority": 0} if context.is_background else {})
        return [
            Job(
                *(request | more, f"{context.request_id}-{i}", party, request.get("n", 1), origin),
                caller=context.caller,
                triton_model=served.triton_model,
                timeout_s=context.timeout_s,
            )
            for i, (request, origin) in enumerate(asked)
        ]

    def _party(self, context: RequestContext) -> str:
        """The namespace in which a request shares KV and may see how much was reused: that of its key; without keys one for
        all if only local programs can ask, else none is shared.
        """
        return THIS_MACHINE if self.keys is None and self.is_of_this_machine(context) else context.namespace

    def is_of_this_machine(self, context: RequestContext) -> bool:
        """True if only a program of this machine can have sent the request."""
        return self._is_private and not context.is_forwarded

    def answer(self, work: Work, places: int, on_error: ErrorEvent = error_event, form: StreamForm = EVENTS) -> Answer:
        return Answer(work, self.running, places, self.settings.request_timeout_s + MARGIN_S, on_error, form)

    async def card(self, name: str) -> dict[str, Any]:
        """The entry of /v1/models, for OpenAI's clients and for Anthropic's. `parent` of an adapter is the model that it belongs
        to, as with vLLM.
        """
        card: dict[str, Any] = {"id": name, "object": "model", "created": self.created, "owned_by": "everbatch"}
        created_at = datetime.fromtimestamp(self.created, UTC).isoformat()
        card |= {"type": "model", "display_name": name, "created_at": created_at, "lifecycle": "active"}
        served = self.served_as(name)
        if (facts := await self.facts(served)) is not None:
            length = facts.max_model_len
            card |= {"max_model_len": length, "max_input_tokens": length, "max_tokens": length}
            card["input_modalities"] = ["text", "image"] if facts.takes_images else ["text"]
            card["capabilities"] = self.capabilities(served, facts)
        return card if name in served.names else card | {"parent": served.names[0]}

    def capabilities(self, served: Served, facts: Facts) -> list[str]:
        """The capabilities that the model tells, and `reasoning` where the marks of its reasoning are known."""
        marks = self._dialects[served.triton_model].marks
        return [*facts.capabilities, *(["reasoning"] if marks is not None else [])]

    async def check_fills(self, model: str, param: str) -> None:
        """Raise GatewayError(400) for a model that is known not to fill in the middle. `param`: the field that asks for it."""
        facts = await self.facts(self.served_as(model))
        if facts is not None and "fim" not in facts.capabilities:
            raise GatewayError(400, NO_FIM.format(param=param, model=model[:80]), param, "unsupported_parameter")

    async def send_chunks(self, out: Outlet, jobs: list[Job], context: RequestContext, chunks: Chunks) -> None:
        """Send each token in the cheapest way: one event, one write. Clients that take each HTTP chunk for an event, as
        perf_analyzer and genai-perf do, cannot read two in one."""
        async with aclosing(pieces(self.link, jobs, context, out.waiting)) as source:
            async for index, piece in source:
                for event in chunks.of(index, piece):
                    await out.event(event)
                    if piece.prompt_logprobs is not None:  # a long prompt makes many events
                        await self.turns.next()
        for event in chunks.last():
            await out.event(event)
        await out.end_of_events(DONE)

    async def respond(
        self, out: Outlet, asked: Responding, job: Job, context: RequestContext, writer: ResponseWriter
    ) -> None:
        """A reply of /v1/responses, kept for later turns unless `store` is false."""
        message = asked.message
        async with aclosing(pieces(self.link, [job], context, out.waiting)) as source:
            async for _, piece in source:
                if not message.stream:
                    writer.take(piece)
                elif data := await writer.events(piece):
                    await out.event(data)
        body = await writer.finished()
        answer = msgspec.json.encode(body)
        if message.store is not False:
            stored = Stored(writer.id, tuple(asked.items), writer.items(), asked.before.earlier, answer)
            self.store.put(context.namespace, stored)
        self.add_to_conversation(asked, writer, context.namespace)
        if message.stream:
            await out.end_of_events(await writer.closing(body))
        else:
            await out.json([answer])

    def add_to_conversation(self, asked: Responding, writer: ResponseWriter, namespace: str) -> None:
        """Where the response is one of a conversation that has not been deleted meanwhile."""
        if (conversation_id := asked.before.conversation) is not None:
            found = self.store.get(namespace, conversation_id)
            if isinstance(found, Conversation):
                self.store.put(namespace, found.with_items((*asked.items, *writer.items())))

    async def facts(self, served: Served) -> Facts | None:
        """The facts of a model; None while it cannot be asked. Calls that come while it is asked wait for the same answer."""
        asked = self._facts.get(served.triton_model)
        if asked is None or (asked.done() and asked.result() is None):
            asked = self._facts[served.triton_model] = asyncio.ensure_future(self._ask_facts(served))
        return await asyncio.shield(asked)

    def forget_facts(self) -> None:
        self._facts.clear()

    async def _ask_facts(self, served: Served) -> Facts | None:
        request = {"prompt_token_ids": [0], "tokenize": True}
        job = Job(request, f"{secrets.token_hex(12)}-0", "", triton_model=served.triton_model)
        try:
            async with asyncio.timeout(FACTS_TIMEOUT_S):
                found = await self.tokens_of(job)
                return Facts(found.max_model_len, found.takes_images, tuple(found.capabilities))
        except (GatewayError, TimeoutError):
            return None

    async def tokens_of(self, job: Job) -> Piece:
        """The answer to a request that only tokenises. Raises GatewayError."""
        async with aclosing(self.link.stream(job)) as source:
            return await anext(source)

    async def count_tokens(self, job: Job, context: RequestContext) -> int:
        """The number of prompt tokens of a request that only tokenises."""
        (reply,) = await whole(self.link, [job], context)
        return reply.usage.prompt_tokens

    def before(self, message: Asking, namespace: str) -> Before:
        """The items that a request continues. Raises GatewayError."""
        given = message.conversation
        if given is None:
            earlier = self._earlier(message, namespace)
            return Before([] if earlier is None else earlier.conversation(), earlier, None)
        if message.previous_response_id is not None:
            text = "conversation and previous_response_id both say what is gone on from; leave one out"
            raise GatewayError(400, text, "conversation", "invalid_value")
        found = self.conversation(given if isinstance(given, str) else given.id, namespace)
        return Before(list(found.items), found.parent, found.id)

    def conversation(self, conversation_id: str, namespace: str) -> Conversation:
        """Raises GatewayError(404)."""
        found = self.store.get(namespace, conversation_id)
        if not isinstance(found, Conversation):
            text = "there is no such conversation; it was deleted, or is forgotten"
            raise GatewayError(404, text, "conversation", "not_found")
        return found

    def response(self, response_id: str, namespace: str) -> Stored:
        """Raises GatewayError(404)."""
        found = self.store.get(namespace, response_id)
        if not isinstance(found, Stored):
            text = "there is no such response; it was not stored, or is forgotten"
            raise GatewayError(404, text, "response_id", "not_found")
        return found

    def _earlier(self, message: Asking, namespace: str) -> Stored | None:
        """The response that previous_response_id names. Raises GatewayError."""
        if message.previous_response_id is None:
            return None
        found = self.store.get(namespace, message.previous_response_id)
        if not isinstance(found, Stored):
            text = "previous_response_id names no response that is kept here; send the earlier turns as input"
            raise GatewayError(400, text, "previous_response_id", "previous_response_not_found")
        return found
