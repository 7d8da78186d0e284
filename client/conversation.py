"""A multi-turn conversation with one server-side session.

Every turn sends the whole conversation, and the server keeps the common prefix's KV. So a session that the server has
forgotten (idle too long, restarted) costs nothing but time: the turn is sent again with START.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator
from typing import Any

from client.client import EverbatchClient
from client.errors import ClientError
from client.messages import GenerateRequest, Session, TextChunk

UNKNOWN_SESSION = "session error 1"
BUSY_SESSION = "session error 3"
BUSY_RETRIES = 20  # A turn that was just cancelled needs a moment to leave the engine.
BUSY_PAUSE_S = 0.1


class Conversation:
    """Messages so far and the session that holds their KV. One turn at a time."""

    def __init__(self, client: EverbatchClient, system: str | None = None, **options: Any) -> None:
        """`options`: fields of GenerateRequest for every turn (max_tokens, temperature, ...)."""
        self._client = client
        self._system = system
        self._options = options
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message; the next turn opens a new session."""
        self.messages: list[dict[str, str]] = [{"role": "system", "content": self._system}] if self._system else []
        self._session_id = secrets.randbelow(2**63 - 1) + 1
        self._known = False

    def say(self, text: str) -> Generator[TextChunk, None, None]:
        """Send a turn, yield the reply. Closing the iterator or Ctrl-C cancels; what had come by then stays.

        A turn that fails, or was cancelled before its first text, is taken back: the conversation is as before. Raises
        ClientError.
        """
        self.messages.append({"role": "user", "content": text})
        reply: list[str] = []
        keep = False
        try:
            for chunk in self._send():
                reply.append(chunk.text)
                yield chunk
            keep = True
        except (GeneratorExit, KeyboardInterrupt):
            keep = any(reply)
            raise
        finally:
            if keep:
                self.messages.append({"role": "assistant", "content": "".join(reply)})
            else:
                self.messages.pop()

    def end(self) -> None:
        """Let the server forget the session. Best effort: it forgets idle ones by itself."""
        if not self._known:
            return
        self._known = False
        session = Session(self._session_id, stop=True, end=True)
        namespace = self._options.get("namespace")  # The session is known in no other namespace.
        request = GenerateRequest(prompt=" ", max_tokens=0, stream=False, session=session, namespace=namespace)
        try:
            for _ in self._client.send(request, timeout_s=5.0):
                pass
        except ClientError:
            return  # A server that is gone, or that has forgotten the session already, has nothing to end.

    def _send(self) -> Generator[TextChunk, None, None]:
        retries = 0
        while True:
            session = Session(self._session_id, start=not self._known)
            request = GenerateRequest(messages=list(self.messages), session=session, **self._options)
            try:
                for chunk in self._client.send(request):
                    self._known = True
                    yield chunk
                return
            except ClientError as error:
                if UNKNOWN_SESSION in str(error) and self._known:
                    self._known = False
                elif BUSY_SESSION in str(error) and retries < BUSY_RETRIES:
                    retries += 1
                    time.sleep(BUSY_PAUSE_S)  # No server tells when a session becomes free, so it is asked again.
                else:
                    raise
