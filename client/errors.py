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


def no_server(url: str) -> ClientError:
    """The error for an address where nothing listens."""
    message = f"no server answers at {url}; start one with ./everbatch serve, or name another with --url"
    return ClientError(message, "UNREACHABLE")


def no_http(url: str) -> ClientError:
    """The error for an address where something listens that does not speak HTTP/1, as Triton's gRPC port."""
    message = (
        f"what listens at {url} does not speak HTTP/1; if this is the gRPC port (8001 by default), name it with --url "
        "HOST:PORT, without http://, else name the HTTP port (8000 by default)"
    )
    return ClientError(message, "UNREACHABLE")


def no_grpc(url: str) -> ClientError:
    """The error for an address where something listens that does not speak gRPC, as Triton's HTTP port."""
    message = (
        f"what listens at {url} does not speak gRPC; if this is the HTTP port (8000 by default), name it with --url "
        "http://HOST:PORT, else name the gRPC port (8001 by default)"
    )
    return ClientError(message, "UNREACHABLE")


def no_entry(url: str, *, has_key: bool) -> ClientError:
    """The error of a gateway that lets nobody in without a key that it knows. The key is not named."""
    what = "does not take the key that was sent" if has_key else "asks for a key"
    return ClientError(f"{url} {what}; give one in EVERBATCH_API_KEY or with --api-key", "UNAUTHENTICATED")
