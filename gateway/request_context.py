"""RequestContext: the state of one HTTP request from its head to its last byte."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import GatewayError, anthropic_refusal
from gateway.keys import EVERYBODY, Client
from gateway.tracing import Caller
from gateway.triton_client import Piece
from gateway.without_effect import Key

SCOPE_KEY = "everbatch"


@dataclass
class RequestContext:
    """The client of a request, its body until a route takes it, and the tokens so far."""

    client: Client = EVERYBODY
    is_anthropic: bool = False  # the client speaks Anthropic's API
    is_ollama: bool = False  # or Ollama's
    body: bytes = b""
    body_bytes: int = 0  # the length of the body, which is known when it is taken
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    status: int = 0  # 0: nothing sent yet
    is_forwarded: bool = False  # a proxy stands between, with anybody behind it
    is_background: bool = False  # a line of a batch
    timeout_s: float | None = None  # seconds for its replies; None: as all have
    left: bool = False  # the client went away before its reply was complete
    caller: Caller = ()  # the span that has sent the request, for the model's trace
    error: GatewayError | None = None  # the error that the client got, as a status or as the last event of a stream
    ignored: list[Key] = field(default_factory=list)  # keys of the body that have no effect here
    prompt_tokens: int = 0
    completion_tokens: int = 0
    at_end: ExitStack = field(default_factory=ExitStack)  # gives places back, and writes down what the request was
    guide_notes: list[str] = field(
        default_factory=list
    )  # keywords of the client's schemas that are not held, with their places

    @property
    def namespace(self) -> str:
        return self.client.namespace

    def refusal(self, error: GatewayError) -> tuple[int, dict[str, Any]]:
        """The status and the body of the answer to an error, in the shape of the API that the client speaks."""
        if self.is_ollama:
            return error.status, {"error": error.message}
        return anthropic_refusal(error, self.request_id) if self.is_anthropic else (error.status, error.body())

    def take_body(self) -> bytes:
        """The body, which is not kept any longer: replies may take minutes."""
        body, self.body = self.body, b""
        self.body_bytes = len(body)
        return body

    def count(self, piece: Piece) -> None:
        self.completion_tokens += len(piece.token_ids)
        self.guide_notes = self.guide_notes or piece.guide_notes
        if piece.usage is not None and piece.index == 0:  # the other replies have the same prompt
            self.prompt_tokens += piece.usage.prompt_tokens
            self.completion_tokens += piece.usage.discarded_tokens


def visit_of(scope: Any) -> RequestContext:
    context: RequestContext = scope[SCOPE_KEY]
    return context
