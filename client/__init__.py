"""Client of an Everbatch server. Talks to Triton only: nothing of the server's code is imported."""

from __future__ import annotations

from client.client import EverbatchClient
from client.errors import ClientError
from client.messages import Completion, GenerateRequest, Session, TextChunk

__all__ = ["ClientError", "Completion", "EverbatchClient", "GenerateRequest", "Session", "TextChunk"]
