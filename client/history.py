"""The state and the decisions of a conversation, without I/O: conversation.py and async_conversation.py send its requests."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from client.errors import ClientError
from client.images import content, lifted, num_characters
from client.messages import GenerateRequest, Message, Session
from client.options import check_names

UNKNOWN_SESSION, BUSY_SESSION = 1, 3  # ClientError.session_error
BUSY_RETRIES = 20  # A turn that was just cancelled needs a moment to leave the engine.
BUSY_PAUSE_S = 0.1
END_TIMEOUT_S = 5.0
LEFT_OUT_SHARE = 0.25  # Less would be refused again soon, and each time the server computes what is left anew.


class History:
    """Messages so far and the session that holds their KV. One turn at a time."""

    messages: list[Message]
    left_out: int  # old turns that no longer fitted and are not sent any more

    def __init__(self, system: str | None, options: dict[str, Any]) -> None:
        """Raises TypeError for an option that there is not."""
        check_names(options)
        if "session" in options:
            raise TypeError("session is no option of a conversation, which has one of its own; leave it out")
        self._system = system
        self._options = options
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message; the next turn opens a new session."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self.left_out = 0
        self._session_id = secrets.randbelow(2**63 - 1) + 1
        self._known = False

    def _begin(self, text: str, images: Sequence[str] = ()) -> None:
        self._before = (list(self.messages), self.left_out)
        self._retries = 0
        self.messages.append({"role": "user", "content": content(text, images)})

    def _finish(self, reply: str, *, keep: bool) -> None:
        """Add the reply, or take the turn back."""
        if keep:
            self.messages.append({"role": "assistant", "content": reply})
        else:
            self.messages, self.left_out = self._before

    def _request(self) -> GenerateRequest:
        messages, images = lifted(self.messages)
        if images:  # They go without a session, and a namespace of their own keeps the KV of the turns before.
            own = {**self._options, "namespace": self._options.get("namespace") or f"chat-{self._session_id}"}
            return GenerateRequest(messages=messages, images=images, **own)
        session = Session(self._session_id, start=not self._known)
        return GenerateRequest(messages=messages, session=session, **self._options)

    def _pause_after(self, error: ClientError) -> float:
        """Seconds after which the turn is sent again. Raises the error where that is of no use."""
        if error.session_error == UNKNOWN_SESSION and self._known:
            self._known = False
            return 0.0
        if error.session_error == BUSY_SESSION and self._retries < BUSY_RETRIES:
            self._retries += 1
            return BUSY_PAUSE_S  # No server tells when a session becomes free, so it is asked again.
        if error.is_too_long and self._leave_out():
            return 0.0
        raise error

    def _leave_out(self) -> bool:
        """Drop the oldest turns, a quarter of the text at least. False when only the newest is left."""
        first = 1 if self._system else 0
        too_much = LEFT_OUT_SHARE * sum(map(num_characters, self.messages[first:]))
        last, dropped = first, 0
        while last < len(self.messages) - 1 and dropped < max(too_much, 1):
            dropped += sum(map(num_characters, self.messages[last : last + 2]))
            last += 2
        del self.messages[first:last]
        self.left_out += (last - first) // 2
        return last > first

    def _end_request(self) -> GenerateRequest | None:
        """The request that ends the session on the server; None if the server has no session of this conversation."""
        if not self._known:
            return None
        self._known = False
        session = Session(self._session_id, stop=True, end=True)
        namespace = self._options.get("namespace")  # The session is known in no other namespace.
        return GenerateRequest(prompt=" ", max_tokens=0, stream=False, session=session, namespace=namespace)
