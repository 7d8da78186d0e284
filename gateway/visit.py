"""What the gateway knows of one HTTP request while it is there."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import GatewayError
from gateway.triton_client import Piece

SCOPE_KEY = "everbatch"


@dataclass
class Visit:
    """Of one request: whose it is, its body until it is taken, and the tokens that went through so far."""

    namespace: str = ""  # "" for everybody, where no keys are asked for
    body: bytes = b""
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    status: int = 0  # 0: nothing sent yet
    admitted: bool = False  # it counts among the requests that are being answered
    left: bool = False  # the client went away before its reply was complete
    error: GatewayError | None = None  # what the client was told, as a status or as the last event of a stream
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def take_body(self) -> bytes:
        """The body, which is not kept any longer: replies may take minutes."""
        body, self.body = self.body, b""
        return body

    def count(self, piece: Piece) -> None:
        self.completion_tokens += len(piece.token_ids)
        if piece.usage is not None and piece.index == 0:  # the other replies have the same prompt
            self.prompt_tokens += piece.usage.prompt_tokens
            self.completion_tokens += piece.usage.discarded_tokens


def visit_of(scope: Any) -> Visit:
    visit: Visit = scope[SCOPE_KEY]
    return visit
