"""The one exception of the client."""

from __future__ import annotations


class ClientError(Exception):
    """A request failed. `code` is a gRPC status name (UNAVAILABLE, INVALID_ARGUMENT, DEADLINE_EXCEEDED, CANCELLED,
    ...).

    `code` is what the text says of itself (`code_in`), and UNKNOWN where it says nothing.
    """

    def __init__(self, message: str, code: str = "UNKNOWN") -> None:
        super().__init__(message)
        self.code = code


def code_in(message: str) -> str:
    """The status that a message names itself, as in `[UNAVAILABLE] queue full`.

    Triton has no other place for it: over HTTP every error is status 400, on a gRPC stream a bare text.
    """
    if message.startswith("[") and "]" in message:
        word = message[1 : message.index("]")]
        if word.isupper():
            return word
    return "UNKNOWN"


def no_server(url: str) -> str:
    """The sentence for an address where nothing listens."""
    return f"no server answers at {url}; start one with ./everbatch serve, or name another with --url"
