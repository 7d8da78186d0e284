"""Requests to the Triton model: one gRPC stream for the replies to each prompt, on one channel that connects again by itself.

tritonclient's own asyncio client copies every response into numpy; here its generated stub is used directly, so that a
token costs one parsed message and one parsed JSON object.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped]
import msgspec
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from gateway.errors import ConnectionLost, GatewayError, from_triton, unavailable
from gateway.origin import GuideOrigin
from gateway.tracing import Caller
from gateway.triton_stream import TritonStream
from gateway.turns import Turns

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]
MARGIN_S = 5.0  # the model's own timeout comes first: it gives a reason
LARGE_RESPONSE = 1 << 18  # bytes; the elements of a larger one are read one in a turn
ENDED_EARLY = "the server ended this reply early; try again"
NOT_REACHED = "the inference server cannot be reached; try again when /health answers 200"
_READY_TIMEOUT_S = 2.0
END_S = 5.0  # for the ends of streams when this process ends; then they are cancelled
STOP_AGAIN_S = 1.0  # Triton may give a request to the model later than the command that stops it; doubled each time
STOP_AGAIN_MAX_S = 30.0
NOT_IN_TIME = "no answer in time; ask for fewer tokens"


@dataclass(frozen=True)
class Job:
    """The replies to one prompt: the JSON object for the model, the id under which Triton knows it, how many there are, what its
    guide was made of, and which Triton model is asked.
    """

    request: dict[str, Any]
    request_id: str
    namespace: str
    choices: int = 1
    origin: GuideOrigin | None = None
    triton_model: str = ""  # empty: the first model of the server
    caller: Caller = ()  # parameters that say to which trace it belongs
    timeout_s: float | None = None  # None: as the link has it
    resumed: int = 0  # number of choices that had ended when it was sent again (gateway/resuming.py)


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    discarded_tokens: int = 0  # tokens of replies that best_of has left out; in the first of the others
    reasoning_tokens: int = 0  # among completion_tokens


class PromptReport(msgspec.Struct, gc=False):
    """The prompt, as it is known when the first token comes; `token_ids` where the request asks for them."""

    prompt_tokens: int
    cached_tokens: int
    token_ids: list[int] | None = None
    files_left_out: int = 0  # files that did not fit into a prompt that fills in the middle


class Piece(msgspec.Struct):
    """One response of the model about one reply. The last one has a finish_reason, `stop` or `length`, and the usage."""

    index: int = 0  # number of the reply among those to its prompt
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[msgspec.Raw] | None = None  # a TokenLogProb each, not decoded yet
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    prompt: PromptReport | None = None  # in the first piece, where it is asked for
    max_model_len: int | None = None  # in the answer to a request that only tokenises
    takes_images: bool = False  # there too: whether the model reads images (`images` of a request)
    capabilities: list[str] = []  # there too: see backend/serving/wires/capabilities.py
    tokenizer: dict[str, str] | None = None  # there too, where it is asked for: special tokens and the chat template
    prompt_logprobs: list[msgspec.Raw] | None = None  # in the first piece, where it is asked for
    echoes: bool = True  # the text has the prompt in front, so that its tokens are those of the text, too
    embedding: bytes = b""  # little-endian float32, in the answer to a text to embed
    seed: int | None = None  # in the first piece of a stream that samples, where the request names none
    score: float = 0.0  # how relevant a document is to a query, 0 to 1
    guide_notes: list[
        str
    ] = []  # in the first piece: what of the guide's schemas is not held, by fields of the client's request
    live: msgspec.Raw = msgspec.Raw(
        b"null"
    )  # in the answer to a look: a LiveView (backend/api/live_view.py), not decoded

    @property
    def shown_logprobs(self) -> list[msgspec.Raw] | None:
        """Log-probabilities of all tokens of the text."""
        if self.prompt_logprobs is None or not self.echoes:
            return self.logprobs
        return self.prompt_logprobs + (self.logprobs or [])


_decoder = msgspec.json.Decoder(Piece)


class TritonLink:
    """Belongs to the event loop it is made in."""

    def __init__(self, url: str, model: str, timeout_s: float, turns: Turns, patience_s: float = 0.0) -> None:
        """`patience_s`: how long a reply whose server has ended waits for the next one; 0: it ends with an error."""
        self._model, self._timeout_s, self._turns = model, timeout_s, turns
        self.patience_s = patience_s
        self._asking: asyncio.Task[bool] | None = None
        self._ending: set[asyncio.Task[None]] = set()  # streams that are read to their ends
        self._channel = grpc.aio.insecure_channel(url, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def stream(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Yield what comes of the replies, until each has ended. Leaving early stops them at once. Raises GatewayError.

        Nothing is read ahead: a slow reader holds the stream back.
        """
        stream = TritonStream(self._stub.ModelStreamInfer(_once(self._message(job))))
        until = time.monotonic() + (job.timeout_s or self._timeout_s) + MARGIN_S
        # A reader may leave with the last piece of a choice, so a choice is closed before its piece is yielded.
        open_choices = job.choices - job.resumed
        try:
            while open_choices:
                if (answer := await stream.read(until - time.monotonic())) is grpc.aio.EOF:
                    raise ConnectionLost(ENDED_EARLY)
                data = _contents(answer, job.origin)
                for piece in _pieces(data):
                    if len(data) > LARGE_RESPONSE:
                        await self._turns.next()
                    open_choices -= piece.finish_reason is not None
                    if piece.guide_notes and job.origin is not None:
                        piece.guide_notes = [job.origin.named(note) for note in piece.guide_notes]
                    yield piece
        except GatewayError:
            open_choices = 0  # an error is the last response of a stream: there is nothing to stop
            raise
        except TimeoutError:
            raise GatewayError(408, NOT_IN_TIME, code="timeout") from None
        except grpc.RpcError as error:
            raise _from_rpc(error) from None
        finally:
            self._end_later(self._stop(stream, job) if open_choices and not stream.is_over else stream.to_its_end())

    def _end_later(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _stop(self, stream: TritonStream, job: Job) -> None:
        """Have the model end a request, and read its stream to the end."""
        ending, pause_s = asyncio.ensure_future(stream.to_its_end()), STOP_AGAIN_S
        try:
            while not ending.done():
                await TritonStream(self._stub.ModelStreamInfer(_once(self._stop_message(job)))).to_its_end()
                await asyncio.wait([ending], timeout=pause_s)
                pause_s = min(2 * pause_s, STOP_AGAIN_MAX_S)
        finally:
            ending.cancel()

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Callable[[Job], Awaitable[Piece]]]:
        """Yield a function that returns the one response to a request, for requests that follow each other: they share a stream,
        which costs half of what a stream for each does. After an error another stream is needed. Raises GatewayError.
        """
        stream = TritonStream(self._stub.ModelStreamInfer(), takes_more=True)

        async def ask(job: Job) -> Piece:
            try:
                await stream.write(self._message(job))
                while (answer := await stream.read()) is not grpc.aio.EOF:
                    if (
                        answer.error_message or answer.infer_response.raw_output_contents
                    ):  # else the end of the one before
                        if (piece := next(_pieces(_contents(answer, None)), None)) is None:
                            raise unavailable(ENDED_EARLY)
                        return piece
            except asyncio.InvalidStateError:  # The stream had ended before the request was written.
                raise ConnectionLost(NOT_REACHED) from None
            except grpc.RpcError as error:
                raise _from_rpc(error) from None
            raise ConnectionLost(NOT_REACHED)

        try:
            yield ask
        finally:
            self._end_later(stream.to_its_end())

    def _message(self, job: Job) -> Any:
        data = msgspec.json.encode({**job.request, "timeout_s": job.timeout_s or self._timeout_s})
        message = self._asking_for(job, data)
        for name, value in job.caller:
            message.parameters[name].string_param = value
        return message

    def _stop_message(self, job: Job) -> Any:
        message = self._asking_for(job, b"{}")
        _add_tensor(message, "stop", "BOOL", b"\1")
        return message

    def _asking_for(self, job: Job, data: bytes) -> Any:
        message = service_pb2.ModelInferRequest(model_name=job.triton_model or self._model, id=job.request_id)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        if job.namespace:
            message.parameters["cache_salt"].string_param = job.namespace
        _add_tensor(message, "request", "BYTES", struct.pack("<I", len(data)) + data)
        return message

    async def is_ready(self) -> bool:
        """True if Triton says that itself and the model are ready. Whoever asks meanwhile gets the same answer: anybody may
        ask, and Triton hears one question at a time.
        """
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask_readiness())
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[bool]) -> None:
        self._asking = None

    async def _ask_readiness(self) -> bool:
        try:
            server = self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=_READY_TIMEOUT_S)
            model = self._stub.ModelReady(service_pb2.ModelReadyRequest(name=self._model), timeout=_READY_TIMEOUT_S)
            answers = await asyncio.gather(server, model)
        except grpc.RpcError:
            return False  # not reachable, or the model is unknown: not ready in either case
        return all(answer.ready for answer in answers)

    async def close(self) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=END_S)
        for ending in self._ending:
            ending.cancel()
        await self._channel.close()


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message


def _add_tensor(message: Any, name: str, datatype: str, data: bytes) -> None:
    """Add an input of shape [1]."""
    tensor = message.inputs.add()
    tensor.name, tensor.datatype = name, datatype
    tensor.shape.append(1)
    message.raw_input_contents.append(data)


def _contents(answer: Any, origin: GuideOrigin | None) -> memoryview:
    """The tensor `response`. Raises GatewayError where there is none."""
    if answer.error_message:
        raise from_triton(answer.error_message, origin)
    contents = answer.infer_response.raw_output_contents
    if not contents:
        raise unavailable(ENDED_EARLY)
    return memoryview(contents[0])


def _pieces(data: memoryview) -> Iterator[Piece]:
    """The elements of the tensor: each is preceded by its length in four bytes. Raises GatewayError."""
    while data:
        end = 4 + int.from_bytes(data[:4], "little")
        piece = _decoder.decode(data[4:end])
        data = data[end:]
        if piece.finish_reason == "timeout":
            raise GatewayError(408, "the reply was not ready in time; ask for fewer tokens", code="timeout")
        if piece.finish_reason == "cancelled":
            raise unavailable("the reply was cancelled on the server; try again")
        yield piece


def _from_rpc(error: grpc.RpcError) -> GatewayError:
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return GatewayError(408, NOT_IN_TIME, code="timeout")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ConnectionLost(NOT_REACHED, was_taken="connect to" not in details)
    return from_triton(details)
