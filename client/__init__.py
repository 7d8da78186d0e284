"""Client of an Everbatch server. Talks to Triton only: nothing of the server's code is imported."""

from __future__ import annotations

from client.async_client import AsyncEverbatchClient
from client.client import EverbatchClient
from client.errors import (
    Cancelled,
    ClientError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unreachable,
)
from client.guide import Guide
from client.messages import Completion, GenerateRequest, Session, TextChunk
from client.options import GenerateOptions
from client.retry import Retry

__all__ = [
    "AsyncEverbatchClient",
    "Cancelled",
    "ClientError",
    "Completion",
    "DeadlineExceeded",
    "EverbatchClient",
    "GenerateOptions",
    "GenerateRequest",
    "Guide",
    "InvalidArgument",
    "NotFound",
    "Retry",
    "Session",
    "TextChunk",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
]
