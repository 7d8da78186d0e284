"""ClientError, the error of a failed request, and a subclass for each code that a caller may want to handle by itself.

Remedies name arguments of the client, as in `url=HOST:PORT`; see option_names for what the command line makes of them.
"""

from __future__ import annotations

import re
from typing import ClassVar

_UNKNOWN_MODEL = "Request for unknown model:"
_SESSION_ERROR = re.compile(r"session error (\d+)")
# Error texts of a server when a conversation exceeds the model's context, the KV pool or the limits of a request.
_TOO_LONG = re.compile(
    r"session error 6\b|(tokens|bytes), the limit is|KV blocks, the pool has|messages, allowed is 1 to \d+; drop"
)


class ClientError(Exception):
    """A request failed. The text is one sentence for a person, mostly the server's own.

    `code` is a gRPC status name (UNAVAILABLE, INVALID_ARGUMENT, ...), the same over gRPC and HTTP, UNREACHABLE where no
    server was found, and UNKNOWN if no side gave a code.
    """

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code or self.default_code

    @property
    def session_error(self) -> int | None:
        """TurboMind's code of a session's refusal: 1 unknown, 2 conflict, 3 busy, 4 inactive, 5 failed, 6 too long."""
        found = _SESSION_ERROR.search(str(self))
        return int(found[1]) if found else None

    @property
    def refuses_streams(self) -> bool:
        """True if the model answers at once only, as with `triton.decoupled=false`. Nothing of the request was done."""
        return "only supported in decoupled mode" in str(self)

    @property
    def is_too_long(self) -> bool:
        """True if the prompt, or the conversation, has more tokens than the server holds for one request."""
        return _TOO_LONG.search(str(self)) is not None


class InvalidArgument(ClientError):
    """The server refuses what the request holds; sent again it would be refused again."""

    default_code = "INVALID_ARGUMENT"


class NotFound(ClientError):
    """The server has no model of this name."""

    default_code = "NOT_FOUND"


class Unauthenticated(ClientError):
    """A gateway in front of the server asks for a key, or does not take the one it got."""

    default_code = "UNAUTHENTICATED"


class Unavailable(ClientError):
    """The server cannot take the request now (a full queue, an engine that starts again), or the connection broke."""

    default_code = "UNAVAILABLE"


class Unreachable(ClientError):
    """Nothing that speaks the protocol answers at the address, or its certificate is not trusted."""

    default_code = "UNREACHABLE"


class DeadlineExceeded(ClientError):
    """There was no final answer within `timeout_s`."""

    default_code = "DEADLINE_EXCEEDED"


class Cancelled(ClientError):
    """The request was cancelled, by a `stop` request or because the client was closed meanwhile."""

    default_code = "CANCELLED"


_CLASSES: dict[str, type[ClientError]] = {
    kind.default_code: kind
    for kind in (InvalidArgument, NotFound, Unauthenticated, Unavailable, Unreachable, DeadlineExceeded, Cancelled)
}


def client_error(message: str, code: str | None = None) -> ClientError:
    """The error of a code, which is what the text says of itself (`code_in`) where none is given."""
    code = code_in(message) if code is None else code
    return _CLASSES.get(code, ClientError)(message, code)


def code_in(message: str) -> str:
    """The status that a message names itself, as in `[UNAVAILABLE] queue full`.

    Triton has no other place for it: over HTTP most errors are status 400, on a gRPC stream each is a bare text. Its own
    words about a model that it does not have, or has not at the moment because it is being loaded or the server ends, name none.
    """
    if message.startswith("[") and "]" in message:
        word = message[1 : message.index("]")]
        if word.isupper():
            return word
    if not message.startswith(_UNKNOWN_MODEL):
        return "UNKNOWN"
    return "UNAVAILABLE" if message.endswith(("has no available versions", "is not at ready state")) else "NOT_FOUND"


def no_server(url: str) -> ClientError:
    """The error for an address where nothing listens."""
    return Unreachable(
        f"no server answers at {url}; start one with ./everbatch serve, or name another with url=HOST:PORT"
    )


def no_http(url: str) -> ClientError:
    """The error for an address where something listens that does not speak HTTP/1, as Triton's gRPC port."""
    return Unreachable(
        f"what listens at {url} does not speak HTTP/1; if this is the gRPC port (8001 by default), name it with "
        "url=HOST:PORT, without http://, if it speaks TLS, with https://HOST:PORT, else name the HTTP port (8000 by default)"
    )


def no_grpc(url: str) -> ClientError:
    """The error for an address where something listens that does not speak gRPC, as Triton's HTTP port."""
    return Unreachable(
        f"what listens at {url} does not speak gRPC; if this is the HTTP port (8000 by default), name it with "
        "url=http://HOST:PORT, if it speaks TLS, with grpcs://HOST:PORT, else name the gRPC port (8001 by default)"
    )


def no_tls(url: str) -> ClientError:
    """The error for an address with TLS where something listens that does not speak it."""
    plain = url.replace("https://", "http://").replace("grpcs://", "grpc://")
    return Unreachable(f"what listens at {url} does not speak TLS; name it with url={plain} if that is meant")


def no_trust(url: str) -> ClientError:
    """The error for a certificate that is self-made, out of date, or another host's."""
    return Unreachable(
        f"the certificate of {url} is not trusted, or is that of another host; name the certificate of the "
        "authority that signed it with ca_file=FILE"
    )


def no_entry(url: str, *, has_key: bool) -> ClientError:
    """The error of a gateway that asks for an API key and does not know the one that was sent. The text leaves the key out."""
    what = "does not take the key that was sent" if has_key else "asks for a key"
    return Unauthenticated(f"{url} {what}; give one in EVERBATCH_API_KEY or with api_key=KEY")


def too_late(url: str, timeout_s: float) -> ClientError:
    """The error of a deadline that passed."""
    return DeadlineExceeded(f"no final answer from {url} within {round(timeout_s, 3):g} s")
