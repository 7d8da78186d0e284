"""The one exception of the client."""

from __future__ import annotations


class ClientError(Exception):
    """A request failed. `code` is a gRPC status name (UNAVAILABLE, INVALID_ARGUMENT, DEADLINE_EXCEEDED, CANCELLED,
    ...).

    Over HTTP Triton gives one status for every error of a model, so there `code` is UNKNOWN unless the text tells.
    """

    def __init__(self, message: str, code: str = "UNKNOWN"):
        super().__init__(message)
        self.code = code


def no_server(url: str) -> str:
    """The sentence for an address where nothing listens."""
    return f"no server answers at {url}; start one with ./everbatch serve, or name another with --url"
